"""Forks a run: a new run that starts from a recorded point of another one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from agentfsm.errors import JournalError, UnknownRunError
from agentfsm.journal.hash_chain import RecordSealer
from agentfsm.journal.outcome_codec import CommitmentWriter
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.rehydrate import RehydratedRun, rehydrate
from agentfsm.journal.run_info import RunInfo, first_info, info_of, spent_before
from agentfsm.journal.store import Status, Store, acquired, consistent_read, off_loop
from agentfsm.journal.verification import require_verified
from agentfsm.loop.canonical_json import decode
from agentfsm.loop.guards import escalated, vote_recorded
from agentfsm.loop.keys import Keyring
from agentfsm.loop.outcomes import ToolsRan
from agentfsm.loop.reducer import on_outcome
from agentfsm.loop.state import RunState
from agentfsm.loop.state_json import dump_state


async def fork(
    store: Store, run_id: str, at_seq: int, new_id: str, keyring: Keyring, *, now: float | None = None
) -> RehydratedRun:
    """Start a new run from the state of another one after one of its records.

    The new run has its own idempotency keys. Tool calls that were in progress at that record are in doubt, as after
    a crash. An approval is for a call of the run in which it was given: for calls that have no result yet, the new run
    asks again, and no vote counts in it. A request that was waiting is asked now, and has as much time as it had.

    Args:
        store: The store that has the run; the new run is stored there too.
        run_id: The run to fork.
        at_seq: The sequence number of the last record that the new run is based on.
        new_id: The new run's id.
        keyring: The keys of the host: one of them sealed the run, and the current one seals the new run.
        now: The time by the host's clock, in seconds since the epoch; that of this machine by default.

    Returns:
        The new run's state; ``agent.resume(new_id)`` continues it.

    Raises:
        UnknownRunError: There is no such run, or it has no such record.
        RunExistsError: A run with the new id exists already.
        JournalError: The run had ended by then, or a sub-agent's run that it called was waiting; or its journal cannot
            be read, was tampered with, or was not sealed under a secret of the host.
        StoreError: The store cannot be read or written.
    """
    records, head = await consistent_read(store, run_id)
    if not 1 <= at_seq <= len(records):
        raise UnknownRunError(f"run {run_id!r} has records 1 to {len(records)}, not {at_seq}")
    await require_verified(run_id, records, head, keyring, "forked")
    parent = await off_loop(rehydrate, records[:at_seq])
    run = parent.run
    if parent.table.states[run.state].final:
        raise JournalError(f"run {run_id!r} had ended by record {at_seq}: fork it at an earlier one")
    if parent.unclaimed_results:
        on_outcome(run, ToolsRan(tuple(parent.unclaimed_results.values())))
    _check_no_subagent_waits(run, at_seq)
    now_ms = int((time.time() if now is None else now) * 1000)
    run.run_id, run.parent = new_id, None
    run.withdraw_approvals()
    suspension = _ask_anew(parent, now_ms)
    origin = {"run": run_id, "seq": at_seq, "hash": records[at_seq - 1].hash}
    bodies = [_forked_body(parent, new_id, origin)]
    if suspension is not None:
        bodies.append(_suspended_body(suspension))
    status: Status = "running" if suspension is None else "suspended"
    async with acquired(store, new_id, keyring, new=True) as lease:
        new_records = RecordSealer(keyring.current).seal_next(lease, now_ms, bodies)
        await store.append(lease, new_records, status, _listed(new_id, run, status, new_records, suspension))
    return rehydrate(new_records)


def _check_no_subagent_waits(run: RunState, at_seq: int) -> None:
    """Refuse a fork that would share a sub-agent's run with its source: an answer to one would be one to both."""
    if below := next((each.held.run_id for each in run.batch if each.held is not None and each.held.run_id), ""):
        raise JournalError(
            f"at record {at_seq}, run {below!r} of a sub-agent was waiting for a person or continuing with an answer, "
            "and a run cannot have two callers: fork at a record before the call, or after its result"
        )


def _ask_anew(parent: RehydratedRun, now_ms: int) -> dict[str, Any] | None:
    """Have what a run waits for asked now, and of those who were asked first.

    Returns:
        The record of the request as it is then; None if none was written.
    """
    run, suspension = parent.run, parent.suspension
    asked_ms: int = 0 if suspension is None else suspension["ts"]
    waiting: dict[str, Any] = {} if suspension is None else suspension["waiting"]
    request = run.pending_request
    if request is not None and request.quorum is not None:
        asked_ms, now = int(request.quorum.asked_at * 1000), now_ms / 1000
        run.pending_request = replace(request, quorum=replace(request.quorum, asked_at=now, escalated=False))
        counted = (row for row in parent.table.rows.values() if row.name in _VOTE_ROWS)
        run.counters.update({name: 0 for row in counted for name in row.spends})
        if waiting:
            waiting = {**waiting, "quorum": {**waiting["quorum"], "votes": [], "asked_at": now, "escalated": False}}
    if suspension is None:
        return None
    expires = suspension["expires"]
    return {**suspension, "waiting": waiting, "expires": None if expires is None else expires + now_ms - asked_ms}


def _forked_body(parent: RehydratedRun, new_id: str, origin: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The fields and the hidden values of the first record of the new run."""
    commitments = CommitmentWriter()
    copied = ("form", "guardrails", "rules", "versions", "seed", "deps", "requester")
    committed = ("policy", "session", "tags", "metadata")
    first = {
        "kind": "run.forked",
        **{name: parent.created[name] for name in copied if name in parent.created},
        **{name: commitments.commitment_value(parent.created[name]) for name in committed if name in parent.created},
        "run": new_id,
        "graph": parent.graph,
        "at": parent.run.state,
        "state": commitments.commitment_value(dump_state(parent.run)),
        "spent": asdict(parent.run.usage),
        "parent": origin,
    }
    return first, commitments.dump()


def _suspended_body(suspension: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The fields and the hidden values of the record of the request that the new run waits for."""
    commitments = CommitmentWriter()
    waiting = {
        name: commitments.commitment_value(value) if name in _HIDDEN_REQUEST_FIELDS else value
        for name, value in suspension["waiting"].items()
    }
    fields = {"kind": "run.suspended", "id": suspension["id"], "expires": suspension["expires"], "waiting": waiting}
    return fields, commitments.dump()


def _listed(
    run_id: str, run: RunState, status: Status, records: Sequence[SealedRecord], suspension: Mapping[str, Any] | None
) -> RunInfo:
    """What the new run is listed by."""
    expires = None if suspension is None else suspension["expires"]
    updated = decode(records[-1].body)["ts"] / 1000
    first = records[0]
    deadline = None if expires is None else expires / 1000
    return info_of(first_info(run_id, first), spent_before(first), run, status, updated, deadline)


_VOTE_ROWS = (escalated.__name__, vote_recorded.__name__)
_HIDDEN_REQUEST_FIELDS = frozenset({"question", "context", "choices", "arguments", "form"})
