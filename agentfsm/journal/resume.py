"""Takes a run up from its store: what it knew, and what it takes to go on."""

from __future__ import annotations

from dataclasses import dataclass

from agentfsm.core.state import RunState
from agentfsm.errors import JournalError, JournalGraphError, RunError, UnknownRunError
from agentfsm.journal.restore import Past, restore
from agentfsm.journal.store import Store
from agentfsm.journal.verify import CANNOT, TAMPERED, verify
from agentfsm.machine.graph import Graph
from agentfsm.runtime.recorder import TakenUp

__all__ = ["Resumable", "differences", "take_up"]


@dataclass(frozen=True)
class Resumable:
    """A run that can go on.

    Attributes:
        run: What it knew behind its last record.
        taken_up: Where it stood.
        suspended: The id of the suspension that it waits in, or None where it was cut off.
    """

    run: RunState
    taken_up: TakenUp
    suspended: str | None


def take_up(store: Store, run_id: str, graph: Graph) -> Resumable:
    """A run that a store holds, made ready to go on. Nothing is written.

    Raises:
        UnknownRunError: There is no such run, or it was cut off before anything was kept of it.
        RunError: The run is over.
        JournalGraphError: It was written under another graph; the error lists what differs.
        JournalError: Its journal cannot be read.
    """
    rows = store.rows(run_id)
    if not rows:
        raise UnknownRunError(f"run {run_id!r} was cut off before it did anything: start it anew")
    told = verify(run_id, rows, store.head(run_id))
    if told.code in (TAMPERED, CANNOT):
        raise JournalError(f"run {run_id!r} cannot go on: record {told.seq}: {told.reason}")
    past = restore(rows)
    if past.finished:
        raise RunError(f"run {run_id!r} is over; there is nothing to go on with")
    _same_graph(past, graph, run_id)
    waits = past.suspended
    run = past.run
    kind = "interrupted" if waits is None else str(waits["waiting"]["kind"])
    tool = run.waiting.tool if run.waiting is not None else ""
    expires = None if waits is None else waits["expires"] / 1000
    taken_up = TakenUp(past.seq, past.hash, kind, tool, expires, dict(past.attempts), past.loose)
    return Resumable(run, taken_up, None if waits is None else str(waits["id"]))


def _same_graph(past: Past, graph: Graph, run_id: str) -> None:
    pinned = past.graph
    if pinned["fingerprint"] == graph.fingerprint:
        return
    raise JournalGraphError(
        f"run {run_id!r} was written under graph {pinned['name']!r} ({pinned['fingerprint'][:12]}), the agent runs "
        f"graph {graph.name!r} ({graph.fingerprint[:12]}):",
        differences(pinned, graph),
    )


def differences(pinned: dict[str, list[list[object]]], graph: Graph) -> tuple[str, ...]:
    """What differs between a pinned table and a graph, a line each."""
    lines: list[str] = []
    for what in ("states", "transitions"):
        old = [_row(row) for row in pinned[what]]
        new = [_row(row) for row in graph.table[what]]
        lines += [f"- {row}" for row in old if row not in new]
        lines += [f"+ {row}" for row in new if row not in old]
        if not lines and old != new:
            lines.append(f"the {what} stand in another order")
    return tuple(lines)


def _row(row: list[object]) -> str:
    if len(row) == 4 and isinstance(row[1], bool):
        name, waits, final, spends = row
        return " ".join(str(part) for part in (name, "waits" * bool(waits), "final" * bool(final), spends) if part)
    source, guard, target, spends = row
    return f"{source}.{guard} -> {target}" + (f" (spends {spends})" if spends else "")
