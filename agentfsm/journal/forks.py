"""A new run with the past of another, up to a record; what was done there is not done again."""

from __future__ import annotations

import contextlib
import time

from agentfsm.core.codec import dump_state
from agentfsm.core.fold import apply
from agentfsm.core.outcomes import Ran
from agentfsm.errors import JournalError, StoreError, UnknownRunError
from agentfsm.journal.canonical import encode
from agentfsm.journal.keeper import owner_name
from agentfsm.journal.moment import as_it_stands
from agentfsm.journal.records import Hider, Row, seal
from agentfsm.journal.restore import Past, restore
from agentfsm.journal.store import Store
from agentfsm.journal.verify import CANNOT, TAMPERED, verify

__all__ = ["fork"]


async def fork(store: Store, run_id: str, at: int, new_id: str) -> Past:
    """Begin a run where another one stood behind one of its records.

    Its idempotency keys are its own. Calls that were being made at that record are in doubt, as after a crash.

    Args:
        store: Where the run is, and where the new one will be.
        run_id: The run.
        at: The number of the last record that both have.
        new_id: The new run's id.

    Returns:
        The new run's past; ``agent.resume(new_id)`` goes on with it.

    Raises:
        UnknownRunError: There is no such run, or it has no such record.
        RunExistsError: There is a run of the new id already.
        JournalError: The run had ended by then, or its journal cannot be read, or was tampered with.
    """
    rows, head = as_it_stands(store, run_id)
    if not 1 <= at <= len(rows):
        raise UnknownRunError(f"run {run_id!r} has records 1 to {len(rows)}, not {at}")
    told = verify(run_id, rows, head)
    if told.code in (TAMPERED, CANNOT):
        raise JournalError(f"run {run_id!r} cannot be forked: record {told.seq}: {told.reason}")
    past = restore(rows[:at])
    finals = {name for name, _, final, _ in past.graph["states"] if final}
    run = past.run
    if run.state in finals:
        raise JournalError(f"run {run_id!r} had ended by record {at}: fork it at an earlier one")
    if past.loose:
        apply(run, Ran(tuple(past.loose.values())))
    run.run_id, run.parent = new_id, None
    hider = Hider()
    kept = ("form", "guardrails", "rules", "policy", "versions", "session", "seed")
    first = {
        **{name: past.created[name] for name in kept if name in past.created},
        "run": new_id,
        "graph": past.graph,
        "at": run.state,
        "state": hider.hide(dump_state(run)),
        "parent": {"run": run_id, "seq": at, "hash": rows[at - 1].hash},
    }
    lease = await store.take(new_id, owner_name(), new=True)
    bodies = [("run.forked", first, hider.kept())]
    if past.suspended is not None:
        waits = Hider()
        again = {name: value for name, value in past.suspended.items() if name in ("id", "expires")}
        waiting = {name: waits.hide(value) if name in _SAID else value for name, value in _waiting(past).items()}
        bodies.append(("run.suspended", {**again, "waiting": waiting}, waits.kept()))
    made: list[Row] = []
    last = lease.hash
    for kind, fields, hidden in bodies:
        seq = len(made) + 1
        body = encode({**fields, "kind": kind, "seq": seq, "epoch": lease.epoch, "ts": int(time.time() * 1000)})
        last = seal(last, body)
        made.append(Row(seq, body, last, hidden))
    try:
        await store.append(lease, made, "running" if past.suspended is None else "suspended")
    finally:
        with contextlib.suppress(StoreError):  # whatever came of it, nobody holds the run
            await store.release(lease)
    return restore(made)


_SAID = frozenset({"question", "context", "choices", "arguments"})


def _waiting(past: Past) -> dict[str, object]:
    found: dict[str, object] = {} if past.suspended is None else past.suspended["waiting"]
    return found
