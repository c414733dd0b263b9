"""Forks a run: a new run that starts from a recorded point of another one."""

from __future__ import annotations

import contextlib
import time

from agentfsm.errors import JournalError, StoreError, UnknownRunError
from agentfsm.journal.hash_chain import record_hash
from agentfsm.journal.journal_writer import owner_name
from agentfsm.journal.outcome_codec import CommitmentWriter
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.replay import RehydratedRun, rehydrate
from agentfsm.journal.store import Store, consistent_read
from agentfsm.journal.verification import TAMPERED, UNVERIFIABLE, verify
from agentfsm.loop.canonical_json import encode
from agentfsm.loop.outcomes import ToolsRan
from agentfsm.loop.reducer import on_outcome
from agentfsm.loop.state import dump_state

__all__ = ["fork"]


async def fork(store: Store, run_id: str, at_seq: int, new_id: str) -> RehydratedRun:
    """Begin a run where another one stood behind one of its records.

    Its idempotency keys are its own. Calls that were being made at that record are in doubt, as after a crash.

    Args:
        store: Where the run is, and where the new one will be.
        run_id: The run.
        at_seq: The number of the last record that both have.
        new_id: The new run's id.

    Returns:
        The new run's past; ``agent.resume(new_id)`` goes on with it.

    Raises:
        UnknownRunError: There is no such run, or it has no such record.
        RunExistsError: There is a run of the new id already.
        JournalError: The run had ended by then, or its journal cannot be read, or was tampered with.
    """
    rows, head = consistent_read(store, run_id)
    if not 1 <= at_seq <= len(rows):
        raise UnknownRunError(f"run {run_id!r} has records 1 to {len(rows)}, not {at_seq}")
    told = verify(run_id, rows, head)
    if told.code in (TAMPERED, UNVERIFIABLE):
        raise JournalError(f"run {run_id!r} cannot be forked: record {told.seq}: {told.reason}")
    past = rehydrate(rows[:at_seq])
    finals = {name for name, _, final, _ in past.graph["states"] if final}
    run = past.run
    if run.state in finals:
        raise JournalError(f"run {run_id!r} had ended by record {at_seq}: fork it at an earlier one")
    if past.unclaimed_results:
        on_outcome(run, ToolsRan(tuple(past.unclaimed_results.values())))
    run.run_id, run.parent = new_id, None
    hider = CommitmentWriter()
    kept = ("form", "guardrails", "rules", "policy", "versions", "session", "seed")
    first = {
        **{name: past.created[name] for name in kept if name in past.created},
        "run": new_id,
        "graph": past.graph,
        "at": run.state,
        "state": hider.commitment_value(dump_state(run)),
        "parent": {"run": run_id, "seq": at_seq, "hash": rows[at_seq - 1].hash},
    }
    lease = await store.acquire(new_id, owner_name(), new=True)
    bodies = [("run.forked", first, hider.dump())]
    if past.suspension is not None:
        waits = CommitmentWriter()
        again = {name: value for name, value in past.suspension.items() if name in ("id", "expires")}
        waiting = {
            name: waits.commitment_value(value) if name in _HIDDEN_REQUEST_FIELDS else value
            for name, value in _request_fields(past).items()
        }
        bodies.append(("run.suspended", {**again, "waiting": waiting}, waits.dump()))
    made: list[SealedRecord] = []
    last = lease.hash
    for kind, fields, hidden in bodies:
        seq = len(made) + 1
        body = encode({**fields, "kind": kind, "seq": seq, "epoch": lease.epoch, "ts": int(time.time() * 1000)})
        last = record_hash(last, body)
        made.append(SealedRecord(seq, body, last, hidden))
    try:
        await store.append(lease, made, "running" if past.suspension is None else "suspended")
    finally:
        with contextlib.suppress(StoreError):  # whatever came of it, nobody holds the run
            await store.release(lease)
    return rehydrate(made)


_HIDDEN_REQUEST_FIELDS = frozenset({"question", "context", "choices", "arguments"})


def _request_fields(rehydrated: RehydratedRun) -> dict[str, object]:
    found: dict[str, object] = {} if rehydrated.suspension is None else rehydrated.suspension["waiting"]
    return found
