"""What a journal is made of: sealed records in a chain, and the values that stand beside them, not in them.

A record's *body* is canonical JSON. Its hash is ``SHA-256(0x00 || previous hash || body)``, the first
record's previous hash being 32 zero bytes, so a record can be neither changed, nor moved, nor left out
without breaking every hash behind it. What was said (texts, arguments, results) is *hidden*: the body holds
``{"#": [place, SHA-256(salt || text)]}``, and salt and text stand beside the body, where they can be deleted
without breaking the chain.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from pydantic_core import to_jsonable_python

from agentfsm.errors import JournalError
from agentfsm.journal.canonical import decode, encode
from agentfsm.journal.secrets import Secrets

__all__ = ["FORM", "START", "Hider", "Record", "Row", "commitment", "open_row", "reveal", "seal", "was_redacted"]

FORM = 1
"""The version of the journal's form; it stands in the first record of every run."""

START = "0" * 64
"""What stands in for the hash in front of a run's first record."""


class Row(NamedTuple):
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


def seal(previous: str, body: str) -> str:
    """The hash of a record, in hex."""
    return hashlib.sha256(b"\0" + bytes.fromhex(previous) + body.encode()).hexdigest()


def commitment(salt: bytes, text: str) -> str:
    """What a body holds in place of a hidden value, in hex."""
    return hashlib.sha256(salt + text.encode()).hexdigest()


class Hider:
    """Puts values of one record aside and gives what the body holds in their place.

    Args:
        secrets: What must never be written.
    """

    def __init__(self, secrets: Secrets | None = None) -> None:
        self._secrets = secrets
        self._kept: list[str] = []
        self._salts = b""

    def _salt(self) -> bytes:
        """16 random bytes; they are drawn by the page, since to ask the operating system takes long."""
        if not self._salts:
            self._salts = os.urandom(16 * 32)
        salt, self._salts = self._salts[:16], self._salts[16:]
        return salt

    def put(self, value: Any) -> str:
        """The JSON that stands in the body for a value; what is empty stands there itself."""
        if value is None or value == "" or value == [] or value == {}:
            return encode(value)
        try:
            text = encode(value)
        except TypeError:  # something of the user's that is no JSON: as near as we can get
            text = encode(to_jsonable_python(value, fallback=str, inf_nan_mode="constants"))
        if self._secrets is not None:
            text = self._secrets.scrub(text)
        salt = self._salt()
        self._kept.append(f'["{salt.hex()}",{text}]')
        return f'{{"#":[{len(self._kept) - 1},"{commitment(salt, text)}"]}}'

    def hide(self, value: Any) -> Any:
        """The same as a value, for a body that is not written yet."""
        return json.loads(self.put(value))

    def arguments(self, tool: str, given: Mapping[str, Any]) -> str:
        """The JSON that stands in the body for a call's arguments; the secret ones are not even put aside."""
        return self.put(dict(given) if self._secrets is None else self._secrets.arguments(tool, given))

    def kept(self) -> str:
        """All that was put aside, as ``Row.hidden``."""
        return f"[{','.join(self._kept)}]" if self._kept else ""

    def taken(self) -> str:
        """The same, for a record that is whole: the next one begins with nothing put aside."""
        if not self._kept:
            return ""
        kept = self.kept()
        self._kept.clear()
        return kept


class Missing:
    """Stands where a hidden value was redacted."""

    def __repr__(self) -> str:
        return "(redacted)"


MISSING = Missing()


def open_row(row: Row) -> dict[str, Any]:
    """The record of a row, with every hidden value in its place; ``MISSING`` where one was redacted.

    Raises:
        JournalError: The row cannot be read.
    """
    try:
        body: dict[str, Any] = decode(row.body)
        if row.hidden:
            body = reveal(body, json.loads(row.hidden), tagged='"$' in row.hidden)
        return body
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise JournalError(f"record {row.seq} cannot be read: {error}") from error


def was_redacted(row: Row) -> bool:
    """Whether a value that stood hidden beside a record was redacted."""
    return "null" in row.hidden and None in json.loads(row.hidden)


def reveal(value: Any, hidden: Sequence[Any], *, tagged: bool = True) -> Any:
    """A value with what is hidden in it put back; ``MISSING`` where it was redacted.

    Args:
        value: The body of a record, or a part of it.
        hidden: What stands beside it, read as JSON.
        tagged: Whether there may be tagged objects in that.
    """
    if isinstance(value, list):
        return [reveal(item, hidden, tagged=tagged) for item in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    found = cast("dict[str, Any]", value)
    if len(found) == 1 and "#" in found:
        kept = hidden[found["#"][0]]
        if kept is None:
            return MISSING
        return decode(json.dumps(kept[1])) if tagged else kept[1]
    return {name: reveal(item, hidden, tagged=tagged) for name, item in found.items()}
