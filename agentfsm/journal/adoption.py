"""Takes over a run that the host's secret did not seal: one of an earlier release, or one whose secret is lost."""

from __future__ import annotations

import time

from agentfsm.errors import JournalError
from agentfsm.journal.hash_chain import RecordSealer
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.store import Store, acquired, consistent_read, off_loop
from agentfsm.journal.verification import TAMPERED, UNVERIFIABLE, verify
from agentfsm.loop.keys import Keyring
from agentfsm.loop.state import RunState


async def adopt(store: Store, run_id: str, keyring: Keyring, by: str = "") -> bool:
    """Seal a run's journal as it is, because somebody trusts it. What is approved and has not run is asked again.

    Args:
        store: The store that has the run; no process may be running it.
        run_id: The run.
        keyring: The keys of the host; the current one seals it.
        by: Who trusts it, for the journal.

    Returns:
        Whether it was adopted; False if it was sealed under a secret of the host already.

    Raises:
        UnknownRunError: There is no such run, or it has no record yet.
        JournalError: It was tampered with or cannot be read, or an answer that it
            cannot ask for again was given: a vote, or one to a sub-agent.
        StaleLease: Another owner holds the run, or it has new records.
        StoreError: The store cannot write.
    """
    records, head = await consistent_read(store, run_id)
    report = await off_loop(lambda rows: verify(run_id, rows, head, keyring=keyring), records)
    if report.code in (TAMPERED, UNVERIFIABLE):
        raise JournalError(f"run {run_id!r} cannot be adopted: record {report.seq}: {report.reason}")
    if not report.doubt:
        return False
    rehydrated = await off_loop(rehydrate, records) if head is not None and head.status != "finished" else None
    if rehydrated is not None and (given := _given_answers(rehydrated.run)):
        raise JournalError(
            f"run {run_id!r} cannot be adopted: {given}, and cannot be asked again; continue it with the release and "
            "the secret that wrote it, or dismiss it there"
        )
    async with acquired(store, run_id, keyring) as lease:
        if lease.hash != records[-1].hash:
            raise JournalError(f"run {run_id!r} cannot be adopted: it has new records")
        fields = {"kind": "run.adopted", **({"by": by} if by else {})}
        written = RecordSealer(keyring.current).seal_next(lease, int(time.time() * 1000), [(fields, "")])
        await store.append(lease, written, "running" if head is None else head.status)
    return True


def _given_answers(run: RunState) -> str:
    """The answers of a run that adopting it could not take back, or an empty string."""
    if any(call.answer is not None for call in run.batch):
        return "an answer is on its way to a sub-agent"
    quorum = None if run.pending_request is None else run.pending_request.quorum
    return "" if quorum is None or not quorum.votes else "its request for an approval has votes"
