"""Takes a run up from its store: what it knew, and what it takes to go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentfsm.core.state import RunState
from agentfsm.errors import JournalError, RunError, UnknownRunError
from agentfsm.journal.migration import Migration, migrate
from agentfsm.journal.moment import as_it_stands
from agentfsm.journal.restore import restore
from agentfsm.journal.store import Store
from agentfsm.journal.verify import CANNOT, TAMPERED, verify
from agentfsm.machine.graph import Graph
from agentfsm.runtime.recorder import TakenUp

__all__ = ["Resumable", "take_up"]


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


def take_up(store: Store, run_id: str, graph: Graph, migrations: Sequence[Migration] = ()) -> Resumable:
    """A run that a store holds, made ready to go on. Nothing is written.

    Args:
        store: Where it is.
        run_id: The run.
        graph: The graph under which it is to go on.
        migrations: What lets runs of other graphs in.

    Raises:
        UnknownRunError: There is no such run, or it was cut off before anything was kept of it.
        RunError: The run is over.
        JournalGraphError: It was written under another graph; the error lists what differs.
        JournalError: Its journal cannot be read.
    """
    rows, head = as_it_stands(store, run_id)
    if not rows:
        raise UnknownRunError(f"run {run_id!r} was cut off before it did anything: start it anew")
    told = verify(run_id, rows, head)
    if told.code in (TAMPERED, CANNOT):
        raise JournalError(f"run {run_id!r} cannot go on: record {told.seq}: {told.reason}")
    past = restore(rows)
    if past.finished:
        raise RunError(f"run {run_id!r} is over; there is nothing to go on with")
    migrated = migrate(rows, past, graph, migrations)
    waits, run = past.suspended, past.run
    taken_up = TakenUp(
        past.seq,
        past.hash,
        kind="interrupted" if waits is None else str(waits["waiting"]["kind"]),
        tool=run.waiting.tool if run.waiting is not None else "",
        expires_at=None if waits is None else waits["expires"] / 1000,
        asked=past.asked,
        attempts=dict(past.attempts),
        left=frozenset(past.left),
        results=past.loose,
        migrated=migrated,
    )
    return Resumable(run, taken_up, None if waits is None else str(waits["id"]))
