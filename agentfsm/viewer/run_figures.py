"""What the statistics add up: figures of single runs, read from their paths, and the totals of many.

A path is read from the journal as quickly as it can be: no text of a model or tool is looked at.
"""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from agentfsm.journal.records import UNREADABLE, Record, SealedRecord, is_kind, read_record
from agentfsm.journal.run_info import RunInfo
from agentfsm.loop.stored_table import StoredTable, read_table

_PINS = ("run.created", "run.forked", "run.migrated")


class MoveKind(NamedTuple):
    """A row of the graph, and which guards were evaluated before it; many moves of a run share one.

    Attributes:
        id: The id of the transition.
        source: The state that it leaves.
        guard: The guard that held.
        target: The state that it leads to.
        ends: How it ends the run, or an empty string.
        did_not_hold: The guards before it that did not hold.
        raised: Those that raised an error.
        failure: The kind of failure that was detected, or an empty string.
    """

    id: str
    source: str
    guard: str
    target: str
    ends: str
    did_not_hold: tuple[str, ...]
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
            except UNREADABLE:
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


class Figures(NamedTuple):
    """What one run did, as numbers.

    Attributes:
        fingerprint: The fingerprint of its graph, the last one if it was migrated.
        graph_name: The name of that graph.
        pins: The records that pin a graph, from which it can be drawn.
        moves: How often it took each row of that graph.
        failures: How often each kind of failure was detected.
    """

    fingerprint: str
    graph_name: str
    pins: tuple[Record, ...]
    moves: Counter[str]
    failures: Counter[str]


def figures_of(run_id: str, records: Sequence[SealedRecord]) -> Figures:
    """The figures of a run; what cannot be read of its journal is left out."""
    path = PathReader(run_id)
    path.add(records)
    graph: dict[str, Any] = path.pins[-1].data.get("graph", {}) if path.pins else {}
    kinds = Counter(move.kind for move in path.moves)
    rows: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for index, count in kinds.items():
        kind = path.kinds[index]
        rows[kind.id] += count
        if kind.failure:
            failures[kind.failure] += count
    return Figures(str(graph.get("fingerprint", "")), str(graph.get("name", "")), tuple(path.pins), rows, failures)


class Listed(NamedTuple):
    """A run as it is listed, with its figures."""

    info: RunInfo
    figures: Figures


class FiguresCache:
    """Figures of runs that have not changed since they were read."""

    def __init__(self, most: int = 5_000) -> None:
        self._most = most
        self._known: OrderedDict[str, tuple[float | None, str, Figures]] = OrderedDict()

    def get(self, info: RunInfo) -> Figures | None:
        """The figures of a run, if they are known and it is as it was."""
        known = self._known.get(info.run_id)
        # the listing of a run in progress may be a second old, so only one that rests is taken as unchanged
        if known is None or info.status == "running" or known[:2] != (info.updated, info.status):
            return None
        return known[2]

    def put(self, info: RunInfo, figures: Figures) -> None:
        """Keep the figures of a run."""
        self._known[info.run_id] = info.updated, info.status, figures
        self._known.move_to_end(info.run_id)
        while len(self._known) > self._most:
            self._known.popitem(last=False)


@dataclass
class _Day:
    runs: int = 0
    tokens: int = 0
    cost_usd: float | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.endings: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()


def totals_by_day(runs: Sequence[Listed]) -> list[dict[str, Any]]:
    """The runs of each day (UTC) on which some started, the latest day first.

    What a sub-agent's run took and cost is in that of its caller, so it is added only where the caller is not one of
    them.
    """
    days: dict[str, _Day] = {}
    counted = {info.run_id for info, _ in runs}
    for info, figures in runs:
        if info.started is None:
            continue
        day = days.setdefault(f"{datetime.fromtimestamp(info.started, UTC):%Y-%m-%d}", _Day())
        day.runs += 1
        day.endings[info.ending or info.status] += 1
        day.failures += figures.failures
        if info.parent not in counted:
            day.tokens += info.tokens or 0
            if info.cost_usd is not None:
                day.cost_usd = (day.cost_usd or 0.0) + info.cost_usd
            day.seconds += max(0.0, (info.updated or info.started) - info.started)
    return [
        {
            "day": name,
            "runs": day.runs,
            "endings": dict(day.endings),
            "failures": dict(day.failures.most_common()),
            "tokens": day.tokens,
            "cost": day.cost_usd,
            "seconds": day.seconds,
        }
        for name, day in sorted(days.items(), reverse=True)
    ]


def totals_by_graph(runs: Iterable[Listed]) -> list[dict[str, Any]]:
    """How often each row of each graph was taken, and by how many runs; the graph of most runs first."""
    graphs: dict[str, tuple[str, Counter[str], Counter[str], list[int]]] = {}
    for _, figures in runs:
        if figures.fingerprint:
            _, moves, taken_by, count = graphs.setdefault(
                figures.fingerprint, (figures.graph_name, Counter(), Counter(), [0])
            )
            moves += figures.moves
            taken_by.update(figures.moves.keys())
            count[0] += 1
    return [
        {
            "fingerprint": fingerprint,
            "name": name,
            "runs": count[0],
            "rows": [{"id": row, "moves": number, "runs": taken_by[row]} for row, number in moves.most_common()],
        }
        for fingerprint, (name, moves, taken_by, count) in sorted(graphs.items(), key=lambda each: -each[1][3][0])
    ]
