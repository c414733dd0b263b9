"""Journal records: what a store keeps, how to read it, and the JSON-lines export.

A record's *body* is canonical JSON. Its hash covers the body and the hash of the previous record (``hash_chain``).
Texts, arguments and results are *hidden*: the body holds a commitment to the value, ``{"#": [place, digest]}``.
The value and its salt are stored beside the body, where they can be redacted without breaking the chain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from agentfsm.errors import AgentfsmError, JournalError
from agentfsm.loop.canonical_json import decode

if TYPE_CHECKING:
    from agentfsm.loop.state import RunState
    from agentfsm.loop.withholding import SecretOpener

FORMAT_VERSION = 1
"""The version of the journal format; the first record of every run states it."""

VOUCHED_BY_NEXT = "next"
"""In place of a record's MAC: that of the next record vouches for it, because its hash covers this one's. Of the
records that are written together, only the last one has a MAC of its own."""

MIGRATION_BASES = frozenset({"replayed", "vouched"})
"""What admitted a run to a new graph: a replay of its path on that graph, or the word of the developer."""

UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, AgentfsmError)
"""What reading a record of a journal that somebody changed can raise."""


@cache
def installed_release() -> str:
    """The version of this package; ``0`` if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # only needed where runs are written or loaded

    try:
        return version("agentfsm")
    except PackageNotFoundError:
        return "0"


class SealedRecord(NamedTuple):
    """One record with its hash, as stores keep it.

    Attributes:
        seq: Its sequence number in the run, from 1.
        body: The canonical JSON that was hashed.
        hash: The record's hash, 64 hex digits.
        hidden: A JSON array of the hidden values, ``[salt in hex, value]`` each, null for a redacted one; an empty
            string if there are none.
        mac: Who wrote it: a key id and a MAC of the hash, 40 hex digits, or ``VOUCHED_BY_NEXT``; an empty string if
            nothing shows who did.
    """

    seq: int
    body: str
    hash: str
    hidden: str = ""
    mac: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """One record, decoded.

    Attributes:
        run_id: The run.
        seq: Its sequence number in the run, from 1.
        kind: What happened (``transition``, ``effect.intent``...).
        time: When, in seconds since the epoch; for information only: ``seq`` defines the order.
        epoch: The lease under which it was written, from 1; it increases each time the run is acquired.
        data: The whole body, with every hidden value filled in; ``REDACTED`` for a redacted one.
        hash: The record's hash, 64 hex digits.
        redacted: Whether one of its values was redacted.
    """

    run_id: str
    seq: int
    kind: str
    time: float
    epoch: int
    data: dict[str, Any]
    hash: str
    redacted: bool = False


class Redacted:
    """Takes the place of a hidden value that was redacted."""

    def __repr__(self) -> str:
        return "(redacted)"


REDACTED = Redacted()


def without_redacted(value: Any, name: str = "") -> Any:
    """A part of a body in which redacted values are empty or say so, for a run that is only to end."""
    if isinstance(value, Redacted):
        return _EMPTY.get(name, lambda: repr(REDACTED))()
    if isinstance(value, dict):
        return {key: without_redacted(each, key) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [without_redacted(each, name) for each in cast("Sequence[Any]", value)]
    return value


_EMPTY: Mapping[str, Callable[[], Any]] = {
    **dict.fromkeys(("arguments", "metadata", "form", "partial_data"), dict),
    **dict.fromkeys(("tags", "choices", "blockers"), list),
    "state": lambda: None,
}
"""What makes empty values of the fields that are not texts."""


def is_kind(record: SealedRecord, kind: str) -> bool:
    """Whether a record is of a kind such as ``run.suspended``, without decoding it.

    No other field of a body has such a value, and texts are hidden, so a search of the text is enough.
    """
    return f'"kind":"{kind}"' in record.body


def open_record(record: SealedRecord, opener: SecretOpener | None = None) -> dict[str, Any]:
    """The body of a record, with every hidden value filled in; ``REDACTED`` for a redacted one.

    Args:
        record: The record.
        opener: Opens the secrets in it; without it, their placeholders stay.

    Raises:
        JournalError: The record cannot be read.
        MissingExtraError: The package that opens secrets is not installed.
    """
    try:
        if not record.hidden:
            return cast("dict[str, Any]", decode(record.body))
        hidden: list[Any] = json.loads(record.hidden)
        if opener is not None and "[sealed " in record.hidden:
            hidden = [each and [each[0], opener.open(each[1])] for each in hidden]
        return cast("dict[str, Any]", decode(record.body, hidden_restorer(hidden, tagged='"$' in record.hidden)))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise JournalError(f"record {record.seq} cannot be read: {error}") from error


def was_redacted(record: SealedRecord) -> bool:
    """Whether a hidden value of a record was redacted."""
    return "null" in record.hidden and None in json.loads(record.hidden)


def hidden_restorer(hidden: Sequence[Any], *, tagged: bool = True) -> Callable[[dict[str, Any]], Any]:
    """For ``decode``: replaces commitments by the hidden values, those that were redacted by ``REDACTED``.

    Args:
        hidden: The hidden values of the record, decoded from JSON.
        tagged: Whether ``hidden`` may contain tagged objects of canonical JSON.
    """

    def restore(data: dict[str, Any]) -> Any:
        if len(data) != 1 or "#" not in data:
            return data
        entry = hidden[data["#"][0]]
        if entry is None:
            return REDACTED
        return decode(json.dumps(entry[1])) if tagged else entry[1]

    return restore


def read_records(sealed: Iterable[SealedRecord], run_id: str) -> list[Record]:
    """Records of a run, decoded.

    Raises:
        JournalError: One of them cannot be read.
    """
    return [read_record(record, run_id) for record in sealed]


def read_record(sealed: SealedRecord, run_id: str) -> Record:
    """One record, decoded.

    Raises:
        JournalError: It cannot be read.
    """
    body = open_record(sealed)
    try:
        kind, time, epoch = body["kind"], body["ts"] / 1000, body["epoch"]
    except (LookupError, TypeError) as error:
        raise JournalError(f"record {sealed.seq} cannot be read: a field is missing or has the wrong type") from error
    return Record(run_id, sealed.seq, kind, time, epoch, body, sealed.hash, redacted=was_redacted(sealed))


@dataclass(frozen=True, slots=True)
class RenameMap:
    """New names by old ones, as a ``run.migrated`` record holds them; names not listed do not change.

    Attributes:
        states: New names of states.
        transitions: New ids of transitions; a transition that is not listed follows the name of its state.
    """

    states: Mapping[str, str] = field(default_factory=dict[str, str])
    transitions: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def from_record(cls, body: Mapping[str, Any]) -> RenameMap:
        """The names in the body of a ``run.migrated`` record."""
        return cls(dict(body.get("states", ())), dict(body.get("transitions", ())))

    def to_record(self) -> dict[str, list[list[str]]]:
        """The names as fields of a record: pairs, because keys of a record are ASCII and names need not be."""
        pairs = {"states": self.states, "transitions": self.transitions}
        return {key: [[str(old), str(new)] for old, new in sorted(of.items())] for key, of in pairs.items() if of}

    def state(self, name: str) -> str:
        """The new name of a state."""
        return str(self.states.get(name, name))

    def transition(self, transition_id: str) -> str:
        """The new id of a transition."""
        if transition_id in self.transitions:
            return self.transitions[transition_id]
        source, _, guard = transition_id.rpartition(".")
        return f"{self.state(source)}.{guard}"

    def rename(self, run: RunState) -> None:
        """Apply the new names to a run: to its current state and to the results of its states."""
        run.state = self.state(run.state)
        run.state_results = {self.state(name): value for name, value in run.state_results.items()}
        run.calling_state = self.state(run.calling_state)
        run.state_visits = {self.state(name): visits for name, visits in run.state_visits.items()}


def export_lines(records: Iterable[SealedRecord]) -> Iterator[str]:
    """One line per record, ``{"hash":...,"hidden":[...],"mac":...,"record":...}``; ``record`` is what was hashed.

    A record without a MAC has no ``mac``.
    """
    for record in records:
        mac = f'"mac":"{record.mac}",' if record.mac else ""
        yield f'{{"hash":"{record.hash}","hidden":{record.hidden or "[]"},{mac}"record":{record.body}}}\n'


def read_lines(lines: Iterable[str]) -> list[SealedRecord]:
    """The records of an exported journal.

    Raises:
        JournalError: A line is not a line of an export.
    """
    return [read_line(number, line) for number, line in enumerate(lines, 1)]


def read_line(number: int, line: str) -> SealedRecord:
    """The record in one line of an exported journal.

    Raises:
        JournalError: It is not a line of an export.
    """
    head, separator, rest = line.rstrip("\r\n").partition('","hidden":')
    hidden, rest = _split_hidden(rest)
    fields = _AFTER_HIDDEN.match(rest)
    if not (head.startswith('{"hash":"') and separator and fields and rest.endswith("}}")):
        raise JournalError(f"line {number} is not a line of an exported journal")
    hidden = "" if hidden == "[]" else hidden
    return SealedRecord(number, rest[fields.end() : -1], head.removeprefix('{"hash":"'), hidden, fields[1] or "")


_AFTER_HIDDEN = re.compile(r',(?:"mac":"([0-9a-f]*|next)",)?"record":')


def _split_hidden(text: str) -> tuple[str, str]:
    """The JSON array at the start of a text, and the rest; empty strings if there is none."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return "", ""
    return text[:end], text[end:]
