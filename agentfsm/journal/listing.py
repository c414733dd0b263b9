"""What a run should be listed by: computed from its records, compared with what the store has, and rewritten."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from agentfsm.errors import JournalError, StoreError, UnknownRunError
from agentfsm.journal.history_verifier import KINDS_AFTER_END
from agentfsm.journal.records import SealedRecord, is_kind
from agentfsm.journal.run_info import RunInfo, RunPage, RunQuery, called_model, first_info, info_of, spent_before
from agentfsm.journal.store import Head, Status, Store, acquired, consistent_read, off_loop
from agentfsm.journal.verification import (
    GOOD,
    OPEN,
    TAMPERED,
    CheckpointHashes,
    VerificationReport,
    read_and_verify,
)
from agentfsm.loop.canonical_json import decode
from agentfsm.loop.keys import Keyring
from agentfsm.loop.messages import round_usd

_FROM_THE_START = ("started", "prompt", "actor", "session_id", "tags", "metadata", "parent")
"""What follows from the first record."""

SHOWN_MATCHES = 5
"""How many runs are named that begin with the same text."""

_WHEN_IT_STOPPED = ("updated", "ending", "model", "cost_usd", "tokens", "waiting_for", "expires")
"""What is written when a run ends or waits; while it runs, it may be a second old."""


def compute_run_info(run_id: str, records: Sequence[SealedRecord], status: Status) -> RunInfo:
    """What a run should be listed by.

    Raises:
        JournalError: They cannot be read.
    """
    from agentfsm.journal.rehydrate import rehydrate  # with it the whole loop: verify needs that only for a run

    rehydrated = rehydrate(records)
    base = first_info(run_id, records[0])
    suspension = rehydrated.suspension
    expires = None if suspension is None or suspension["expires"] is None else suspension["expires"] / 1000
    info = info_of(base, spent_before(records[0]), rehydrated.run, status, ended_at(records), expires)
    return replace(info, model=called_model(records))


def ended_at(records: Sequence[SealedRecord]) -> float:
    """When a run did something last, in seconds since the epoch; redactions and the like are not done by it."""
    bodies = map(decode, (record.body for record in reversed(records)))
    return next((body["ts"] / 1000 for body in bodies if body["kind"] not in KINDS_AFTER_END), 0.0)


async def iterate_runs(store: Store, query: RunQuery) -> AsyncIterator[RunInfo]:
    """All runs that a query finds, the newest first; pages of its ``limit`` are read as they are needed.

    Raises:
        StoreError: The store cannot be read.
    """
    while True:
        page = await store.find_runs(query)
        for info in page.runs:
            yield info
        if not page.next:
            return
        query = replace(query, after=page.next)


async def find_run_id(store: Store, prefix: str) -> str:
    """The id of the run whose id is, or begins with, a text.

    Raises:
        UnknownRunError: There is no such run, or there are several; the error lists them.
        StoreError: The store cannot be read.
    """
    if await store.head(prefix) is not None:
        return prefix
    page = await store.find_runs(RunQuery(run_id=prefix, limit=SHOWN_MATCHES)) if prefix else RunPage()
    match [info.run_id for info in page.runs]:
        case [one]:
            return one
        case []:
            raise UnknownRunError(f"there is no run {prefix!r}")
        case several:
            more = ", ..." if page.next else ""
            raise UnknownRunError(f"several runs begin with {prefix!r}: {', '.join(several)}{more}")


async def find_listing(store: Store, run_id: str) -> RunInfo | None:
    """What a run is listed by, or None if there is no such run.

    Raises:
        StoreError: The store cannot be read.
    """
    return next(iter((await store.find_runs(RunQuery(exact_id=run_id))).runs), None)


async def verify_listed_run(
    store: Store, run_id: str, checkpoint: CheckpointHashes | None = None, keyring: Keyring | None = None
) -> VerificationReport:
    """Verify one run of a store, its snapshot, and what it is listed by; else as ``verify_stored_run``."""
    try:
        snapshot = await store.snapshot(run_id)  # first: a run in progress may have a newer one than its records
    except StoreError:  # what is wrong is reported of its records
        snapshot = None
    report, records, head = await read_and_verify(store, run_id, checkpoint, keyring)
    report = await _verify_listing(store, report, records, head)
    if snapshot is None or keyring is None or report.code not in (GOOD, OPEN) or report.doubt:
        return report
    from agentfsm.journal.snapshot import snapshot_damage  # only for the runs that have one

    reason = await off_loop(lambda rows: snapshot_damage(snapshot, run_id, rows, keyring), records)
    return VerificationReport(run_id, TAMPERED, len(records), None, reason) if reason else report


async def verify_listing(store: Store, report: VerificationReport) -> VerificationReport:
    """The report on a run, which says if somebody changed what the run is listed by.

    A run that an earlier release wrote, and that is not listed in full yet, is not compared.

    Raises:
        StoreError: The store cannot be read.
    """
    if report.code not in (GOOD, OPEN):
        return report
    try:
        records, head = await consistent_read(store, report.run_id)
    except UnknownRunError:
        return report
    return await _verify_listing(store, report, records, head)


async def _verify_listing(
    store: Store, report: VerificationReport, records: Sequence[SealedRecord], head: Head | None
) -> VerificationReport:
    if report.code not in (GOOD, OPEN) or head is None or not records or len(records) != report.records:
        return report
    listed = await find_listing(store, report.run_id)
    if listed is None or listed == RunInfo(listed.run_id, listed.status, listed.owner):
        return report
    if await store.head(report.run_id) != head:  # it continued since its records were read
        return report
    wrong = await off_loop(lambda rows: _differences(listed, rows), records)
    if listed.status != head.status and await _has_another_status(store, head):
        wrong.insert(0, "status")
    if not wrong:
        return report
    reason = f"it is listed by another {' and '.join(wrong)} than its records say: agentfsm store rebuild mends that"
    return VerificationReport(report.run_id, TAMPERED, report.records, None, reason)


async def _has_another_status(store: Store, head: Head) -> bool:
    """Whether a run is listed with another status than its head has, while nobody works on it."""
    listed = await find_listing(store, head.run_id)
    return listed is not None and listed.status != head.status and await store.head(head.run_id) == head


async def needs_rebuild(store: Store, head: Head) -> bool:
    """Whether the entry of a run in the list is incomplete, or differs from its records.

    Raises:
        StoreError: The store cannot be read.
    """
    listed = await find_listing(store, head.run_id)
    if not head.seq or listed is None:
        return False
    report = await verify_listing(store, VerificationReport(head.run_id, GOOD, head.seq))
    return listed.started is None or listed.metadata is None or report.code == TAMPERED


def _differences(listed: RunInfo, records: Sequence[SealedRecord]) -> list[str]:
    """What a run is listed by that does not follow from its records."""
    names, expected = list[str](_FROM_THE_START), first_info(listed.run_id, records[0])
    if listed.status != "running" and not any(is_kind(record, "redaction") for record in records):
        try:
            expected = compute_run_info(listed.run_id, records, listed.status)
            names += _WHEN_IT_STOPPED
        except JournalError:  # its state cannot be computed, which verification has found to be so for a reason
            pass
    if listed.metadata is None:  # an earlier release listed it
        names.remove("metadata")
    known, told = map(_with_rounded_cost, (expected, listed))  # earlier releases did not round sums
    return [name for name in names if getattr(told, name) != getattr(known, name)]


def _with_rounded_cost(info: RunInfo) -> RunInfo:
    return info if info.cost_usd is None else replace(info, cost_usd=round_usd(info.cost_usd))


async def rebuild_run_info(store: Store, run_id: str, keyring: Keyring | None = None) -> RunInfo:
    """Rewrite what a run is listed by, from its records; for a run of an earlier release, for the first time.

    Args:
        store: The store that has the run; no process may be running it.
        run_id: The run.
        keyring: The keys of the host, under which what the store keeps about the run is sealed.

    Returns:
        What it is listed by now.

    Raises:
        UnknownRunError: There is no such run, or it has no record yet.
        JournalError: Its journal cannot be read.
        StaleLease: Another owner holds the run, or it has new records.
        StoreError: The store cannot be read or written.
    """
    records, head = await consistent_read(store, run_id)
    if head is None or not records:
        raise UnknownRunError(f"run {run_id!r} has no record yet")
    status = head.status
    info = await off_loop(lambda rows: compute_run_info(run_id, rows, status), records)
    async with acquired(store, run_id, keyring) as lease:
        if lease.hash != records[-1].hash:
            raise JournalError(f"run {run_id!r} is not listed again: it has new records")
        await store.append(lease, (), status, info)
    return info
