"""The moves of a run, read from its journal as quickly as they can be: no text of a model or tool is looked at."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from agentfsm.errors import AgentfsmError
from agentfsm.journal.records import Record, SealedRecord, is_kind, read_record
from agentfsm.loop.stored_table import StoredTable, read_table

__all__ = ["MoveKind", "PathMove", "PathReader"]

_PINS = ("run.created", "run.forked", "run.migrated")
_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, AgentfsmError)


class MoveKind(NamedTuple):
    """A row of the graph, and which guards were evaluated before it; many moves of a run share one.

    Attributes:
        id: The id of the transition.
        source: The state that it leaves.
        guard: The guard that held.
        target: The state that it leads to.
        ends: How it ends the run, or an empty string.
        said_no: The guards before it that did not hold.
        raised: Those that raised an error.
        failure: The kind of failure that was detected, or an empty string.
    """

    id: str
    source: str
    guard: str
    target: str
    ends: str
    said_no: tuple[str, ...]
    raised: tuple[str, ...]
    failure: str


class PathMove(NamedTuple):
    """A move: its record's sequence number, the index of its kind, and when, in milliseconds since the epoch."""

    seq: int
    kind: int
    time: int


class PathReader:
    """Reads the moves of a run, record by record.

    Attributes:
        kinds: The kinds of moves so far.
        moves: The moves so far.
        pins: The records that pin a graph: the first, and those of migrations.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._table: StoredTable | None = None
        self._index: dict[tuple[int, str, str, str], int] = {}
        self.kinds: list[MoveKind] = []
        self.moves: list[PathMove] = []
        self.pins: list[Record] = []

    def add(self, rows: Iterable[SealedRecord]) -> None:
        """Read the next records; one that cannot be read is left out, and the ledger names it."""
        for row in rows:
            try:
                if is_kind(row, "transition"):
                    self._move(row.seq, *_read_move(row.body))
                elif any(is_kind(row, kind) for kind in _PINS):
                    self._pin(read_record(row, self._run_id))
            except _UNREADABLE:
                continue

    @property
    def state(self) -> str:
        """The state that the run is in."""
        if self.moves:
            return self.kinds[self.moves[-1].kind].target
        first: Any = self.pins[0].data.get("at") if self.pins else None
        return str(first or ("" if self._table is None else self._table.initial.name))

    def _pin(self, record: Record) -> None:
        self._table = read_table(record.data["graph"])
        self.pins.append(record)

    def _move(self, seq: int, transition: str, tried: str, failure: str, time: int) -> None:
        key = len(self.pins), transition, tried, failure
        kind = self._index.get(key)
        if kind is None:
            self.kinds.append(self._kind(transition, tried, failure))
            kind = self._index[key] = len(self.kinds) - 1
        self.moves.append(PathMove(seq, kind, time))

    def _kind(self, transition: str, tried: str, failure: str) -> MoveKind:
        table = self._table
        if table is None:
            raise ValueError("it comes before the first record of a run")
        row = table.rows[transition]
        names = [each.name for each in table.rows.values() if each.source == row.source]
        answers = list(zip(names, tried, strict=False))
        return MoveKind(
            transition,
            str(row.source),
            row.name,
            str(row.target),
            row.ends,
            tuple(name for name, answer in answers if answer == "0"),
            tuple(name for name, answer in answers if answer == "e"),
            failure,
        )


_MOVE = re.compile(r'"transition":"([^"\\]*)","tried":"([01e]*)","ts":(\d+)[,}]')


def _read_move(body: str) -> tuple[str, str, str, int]:
    """The transition, the answers of the guards, the kind of the failure, and the time in the body of a record.

    The keys of a body are sorted, so these stand together near its end. One with a failure, or with a quote in a name,
    is decoded, which takes three times as long.
    """
    found = None if '"failure":' in body else _MOVE.match(body, body.rfind('"transition":"'))
    if found is not None:
        return found[1], found[2], "", int(found[3])
    data: dict[str, Any] = json.loads(body)
    failure = data["failure"]["kind"] if "failure" in data else ""
    return data["transition"], data["tried"], failure, int(data["ts"])
