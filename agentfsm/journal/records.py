"""Journal records: sealing, hidden values, secret scrubbing, and JSON-lines export.

A record's *body* is canonical JSON. Its hash is ``SHA-256(0x00 || previous hash || body)``; the first record's
previous hash is 32 zero bytes. So no record can be changed, moved or removed without breaking every later hash.
Texts, arguments and results are *hidden*: the body holds a commitment, ``{"#": [place, SHA-256(salt || text)]}``.
Salt and text are stored beside the body, where they can be redacted without breaking the chain. Secrets are
replaced before anything is hashed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from pydantic_core import to_jsonable_python

from agentfsm.errors import JournalError
from agentfsm.loop.canonical_json import decode, encode
from agentfsm.loop.messages import secret_placeholder

__all__ = [
    "FORMAT_VERSION",
    "GENESIS_HASH",
    "CommitmentWriter",
    "Record",
    "SealedRecord",
    "SecretScrubber",
    "commitment",
    "environment_secrets",
    "export_lines",
    "open_record",
    "read_line",
    "read_lines",
    "record_hash",
    "restore_hidden",
    "was_redacted",
]


_SECRET_NAME = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS)\Z")

MIN_SECRET_LENGTH = 8
"""Characters that a value must have to be looked for in texts: shorter ones stand there by chance."""


def environment_secrets() -> list[str]:
    """The values of environment variables whose names say that they are keys, tokens or passwords."""
    named = [os.environ.get(name, "") for name in os.environ if _SECRET_NAME.search(name.upper())]
    return [value for value in named if len(value) >= MIN_SECRET_LENGTH]


class SecretScrubber:
    """The secrets of one run.

    Args:
        values: Values to be replaced wherever they occur.
        scrub_arguments: Names of secret arguments by tool.

    Attributes:
        salt: The run's salt; whoever has it and a secret can check that the secret was there.
    """

    def __init__(self, values: Iterable[str] = (), arguments: Mapping[str, frozenset[str]] | None = None) -> None:
        self.salt = os.urandom(16).hex()
        self._arguments = arguments or {}
        self._placeholders: dict[str, str] = {}
        for value in values:
            self._add(value)

    def placeholder_for(self, value: Any) -> str:
        """What stands in place of a secret."""
        text = value if isinstance(value, str) else encode(value)
        digest = hashlib.sha256(f"{self.salt}{text}".encode("utf-8", "surrogatepass")).hexdigest()
        return secret_placeholder(digest)

    def _add(self, value: Any) -> None:
        if isinstance(value, str) and len(value) >= MIN_SECRET_LENGTH:
            self._placeholders[encode(value)[1:-1]] = self.placeholder_for(value)

    def scrub(self, text: str) -> str:
        """A JSON text with every known secret replaced."""
        for secret, instead in self._placeholders.items():
            if secret in text:
                text = encode(decode(text.replace(secret, instead)))
        return text

    def scrub_arguments(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments with the secret ones replaced; from now on they are replaced in texts too."""
        secret = self._arguments.get(tool)
        if not secret:
            return dict(arguments)
        for name in secret & arguments.keys():
            self._add(arguments[name])
        return {name: self.placeholder_for(value) if name in secret else value for name, value in arguments.items()}


FORMAT_VERSION = 1
"""The version of the journal's form; it stands in the first record of every run."""

GENESIS_HASH = "0" * 64
"""What stands in for the hash in front of a run's first record."""


class SealedRecord(NamedTuple):
    """One sealed record, as stores keep it.

    Attributes:
        seq: Its place in the run, from 1.
        body: The canonical JSON that was hashed.
        hash: The seal, in hex.
        hidden: A JSON array of what stands beside the body, ``[salt in hex, value]`` each, null where it was
            redacted; an empty string where there is nothing.
    """

    seq: int
    body: str
    hash: str
    hidden: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """One record, to read.

    Attributes:
        run_id: The run.
        seq: Its place in the run, from 1.
        kind: What happened (``transition``, ``effect.intent``...).
        time: When, in seconds since the epoch; information only, order is ``seq``.
        epoch: Which holder of the run wrote it, from 1.
        data: The whole record with every hidden value in its place; ``None`` where one was redacted.
        hash: Its seal, in hex.
        redacted: Whether a value of it was redacted.
    """

    run_id: str
    seq: int
    kind: str
    time: float
    epoch: int
    data: dict[str, Any]
    hash: str
    redacted: bool = False


def record_hash(previous: str, body: str) -> str:
    """The hash of a record, in hex."""
    return hashlib.sha256(b"\0" + bytes.fromhex(previous) + body.encode()).hexdigest()


def commitment(salt: bytes, text: str) -> str:
    """What a body holds in place of a hidden value, in hex."""
    return hashlib.sha256(salt + text.encode()).hexdigest()


class CommitmentWriter:
    """Puts values of one record aside and gives what the body holds in their place.

    Args:
        secrets: What must never be written.
    """

    def __init__(self, secrets: SecretScrubber | None = None) -> None:
        self._secrets = secrets
        self._hidden: list[str] = []
        self._salts = b""

    def _next_salt(self) -> bytes:
        """16 random bytes; they are drawn by the page, since to ask the operating system takes long."""
        if not self._salts:
            self._salts = os.urandom(16 * 32)
        salt, self._salts = self._salts[:16], self._salts[16:]
        return salt

    def commitment_json(self, value: Any) -> str:
        """The JSON that stands in the body for a value; what is empty stands there itself."""
        if value is None or value == "" or value == [] or value == {}:
            return encode(value)
        try:
            text = encode(value)
        except TypeError:  # something of the user's that is no JSON: as near as we can get
            text = encode(to_jsonable_python(value, fallback=str, inf_nan_mode="constants"))
        if self._secrets is not None:
            text = self._secrets.scrub(text)
        salt = self._next_salt()
        self._hidden.append(f'["{salt.hex()}",{text}]')
        return f'{{"#":[{len(self._hidden) - 1},"{commitment(salt, text)}"]}}'

    def commitment_value(self, value: Any) -> Any:
        """The same as a value, for a body that is not written yet."""
        return json.loads(self.commitment_json(value))

    def arguments_json(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """The JSON that stands in the body for a call's arguments; the secret ones are not even put aside."""
        return self.commitment_json(
            dict(arguments) if self._secrets is None else self._secrets.scrub_arguments(tool, arguments)
        )

    def dump(self) -> str:
        """All that was put aside, as ``SealedRecord.hidden``."""
        return f"[{','.join(self._hidden)}]" if self._hidden else ""

    def drain(self) -> str:
        """The same, for a record that is whole: the next one begins with nothing put aside."""
        if not self._hidden:
            return ""
        kept = self.dump()
        self._hidden.clear()
        return kept


class Redacted:
    """Stands where a hidden value was redacted."""

    def __repr__(self) -> str:
        return "(redacted)"


REDACTED = Redacted()


def open_record(record: SealedRecord) -> dict[str, Any]:
    """The record of a row, with every hidden value in its place; ``REDACTED`` where one was redacted.

    Raises:
        JournalError: The row cannot be read.
    """
    try:
        body: dict[str, Any] = decode(record.body)
        if record.hidden:
            body = restore_hidden(body, json.loads(record.hidden), tagged='"$' in record.hidden)
        return body
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise JournalError(f"record {record.seq} cannot be read: {error}") from error


def was_redacted(record: SealedRecord) -> bool:
    """Whether a value that stood hidden beside a record was redacted."""
    return "null" in record.hidden and None in json.loads(record.hidden)


def restore_hidden(value: Any, hidden: Sequence[Any], *, tagged: bool = True) -> Any:
    """A value with what is hidden in it put back; ``REDACTED`` where it was redacted.

    Args:
        value: The body of a record, or a part of it.
        hidden: What stands beside it, read as JSON.
        tagged: Whether there may be tagged objects in that.
    """
    if isinstance(value, list):
        return [restore_hidden(item, hidden, tagged=tagged) for item in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    found = cast("dict[str, Any]", value)
    if len(found) == 1 and "#" in found:
        kept = hidden[found["#"][0]]
        if kept is None:
            return REDACTED
        return decode(json.dumps(kept[1])) if tagged else kept[1]
    return {name: restore_hidden(item, hidden, tagged=tagged) for name, item in found.items()}


def export_lines(records: Iterable[SealedRecord]) -> Iterator[str]:
    """One line a record: ``{"hash":...,"hidden":[...],"record":...}``, where ``record`` is what was hashed."""
    for row in records:
        yield f'{{"hash":"{row.hash}","hidden":{row.hidden or "[]"},"record":{row.body}}}\n'


def read_lines(lines: Iterable[str]) -> list[SealedRecord]:
    """The rows of an exported journal.

    Raises:
        JournalError: A line is none of an export.
    """
    return [read_line(number, line) for number, line in enumerate(lines, 1)]


def read_line(number: int, line: str) -> SealedRecord:
    """The row of one line of an exported journal.

    Args:
        number: The line's number, from 1.
        line: The line.

    Raises:
        JournalError: It is none of an export.
    """
    head, mark, rest = line.rstrip("\r\n").partition('","hidden":')
    hidden, mark2, body = _split_hidden(rest)
    if not (head.startswith('{"hash":"') and mark and mark2 and body.endswith("}}")):
        raise JournalError(f"line {number} is no line of an exported journal")
    return SealedRecord(number, body[:-1], head.removeprefix('{"hash":"'), "" if hidden == "[]" else hidden)


def _split_hidden(text: str) -> tuple[str, str, str]:
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return "", "", ""
    mark = ',"record":'
    return (text[:end], mark, text[end + len(mark) :]) if text.startswith(mark, end) else ("", "", "")
