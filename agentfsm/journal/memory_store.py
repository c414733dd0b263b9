"""MemoryStore: an in-memory store for tests, and the reference for other stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Self
from weakref import ReferenceType, ref

from agentfsm.errors import RunExistsError, RunHeldError, StaleLease, UnknownRunError
from agentfsm.journal.hash_chain import GENESIS_HASH
from agentfsm.journal.maintenance import AnyStore, Damage, Fact, Hold, Tombstone
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.run_info import RunInfo, RunPage, RunQuery
from agentfsm.journal.signals import SealedSignal, SignalHub
from agentfsm.journal.store import Head, Lease, SealedSnapshot, Status, WhichRuns, head_row, seal_row
from agentfsm.loop.keys import Keyring


@dataclass
class _StoredRun:
    head: Head
    number: int
    records: list[SealedRecord] = field(default_factory=list[SealedRecord])
    lease: ReferenceType[Lease] | None = None
    keyring: Keyring | None = None
    info: RunInfo | None = None
    snapshot: SealedSnapshot | None = None

    def current_info(self) -> RunInfo:
        head = self.current_head()
        info = RunInfo(head.run_id, head.status) if self.info is None else self.info
        return replace(info, status=head.status, owner=head.owner)

    def current_head(self) -> Head:
        is_leased = self.lease is not None and self.lease() is not None
        head = self.head if is_leased else replace(self.head, owner=None)
        row = head_row(self.number, head.run_id, head.epoch, head.owner, head.seq, head.hash, head.status)
        return replace(head, row=row, mac=seal_row(self.keyring, row))


class MemorySignals:
    """The signals of a store in memory."""

    def __init__(self, stored_run: Callable[[str], _StoredRun]) -> None:
        self._stored_run = stored_run
        self._signals: dict[str, SealedSignal] = {}
        self._hub = SignalHub(self._lease_of)

    def _lease_of(self, run_id: str) -> Lease | None:
        lease = self._stored_run(run_id).lease
        return None if lease is None else lease()

    async def send(self, signal: SealedSignal) -> bool:
        """Keep a signal; see ``SignalQueue.send``."""
        self._stored_run(signal.run_id)
        if self._signals.setdefault(signal.id, signal) != signal:
            return False
        self._hub.notify(signal.run_id)
        return True

    async def pending(self, run_id: str | None = None) -> list[SealedSignal]:
        """The signals that were not removed yet; see ``SignalQueue.pending``."""
        return [signal for signal in self._signals.values() if run_id in (None, signal.run_id)]

    async def remove(self, signal_id: str) -> None:
        """Remove a signal; see ``SignalQueue.remove``."""
        self._signals.pop(signal_id, None)

    def listen(self) -> AsyncGenerator[str]:
        """The ids of runs that have signals; see ``SignalQueue.listen``."""
        return self._hub.listen(self.pending)


class MemoryMaintenance:
    """Maintains a store in memory."""

    def __init__(self, runs: dict[str, _StoredRun], signals: MemorySignals) -> None:
        self._runs = runs
        self._signals = signals
        self._holds: dict[str, Hold] = {}
        self._tombstones: dict[str, list[Tombstone]] = {}
        self._numbers = count(1)

    async def prepare(self, *, migrate: bool = False) -> None:
        """Do nothing: it can always be written."""

    def writable(self, store: AnyStore) -> AbstractAsyncContextManager[AnyStore]:
        """The store itself: any process may write it."""
        return nullcontext(store)

    async def describe(self) -> list[Fact]:
        """That it is in memory."""
        return [Fact("kind", "in memory, until the process ends")]

    async def schema_damage(self) -> list[Damage]:
        """None: there is no schema."""
        return []

    async def row_damage(self) -> list[Damage]:
        """None: nobody else can write here."""
        return []

    async def set_hold(self, run_id: str, hold: Hold | None) -> None:
        """Hold a run, or end its hold; see ``StoreMaintenance.set_hold``."""
        if run_id not in self._runs:
            raise UnknownRunError(f"there is no run {run_id!r}")
        self._holds.pop(run_id, None)
        if hold is not None:
            self._holds[run_id] = hold

    async def holds(self) -> dict[str, Hold]:
        """The holds of all runs that have one; see ``StoreMaintenance.holds``."""
        return {run_id: self._holds[run_id] for run_id in self._runs if run_id in self._holds}

    async def purge(self, tombstones: Sequence[Tombstone]) -> list[str]:
        """Delete runs, and keep their tombstones; see ``StoreMaintenance.purge``."""
        purged = [each for each in tombstones if self._can_be_purged(each)]
        for each in purged:
            del self._runs[each.run_id]
            self._holds.pop(each.run_id, None)
            self._tombstones.setdefault(each.run_id, []).append(each)
            for signal in await self._signals.pending(each.run_id):
                await self._signals.remove(signal.id)
        return [each.run_id for each in purged]

    def _can_be_purged(self, tombstone: Tombstone) -> bool:
        stored = self._runs.get(tombstone.run_id)
        if stored is None or self._is_held(tombstone.run_id):
            return False
        head = stored.current_head()
        said = (tombstone.number, tombstone.epoch, tombstone.seq, tombstone.hash)
        ended = head.status == "finished" or not head.seq
        return head.owner is None and ended and said == (stored.number, head.epoch, head.seq, head.hash)

    async def tombstones(self, run_id: str | None = None) -> list[Tombstone]:
        """What remains of the runs that were purged; see ``StoreMaintenance.tombstones``."""
        found = chain(*self._tombstones.values()) if run_id is None else self._tombstones.get(run_id, ())
        return sorted(found, key=lambda each: each.number)

    async def was_purged(self, run_id: str) -> bool:
        """Whether a run that had records was purged; see ``StoreMaintenance.was_purged``."""
        return self._had_records(run_id)

    def _had_records(self, run_id: str) -> bool:
        """Whether a run that was purged had records."""
        return any(each.seq for each in self._tombstones.get(run_id, ()))

    async def reindex(self) -> list[str]:
        """Do nothing: runs are found by what they are listed by."""
        return []

    async def compact(self) -> str:
        """Do nothing: what was deleted is gone."""
        return ""

    def require_not_held(self, run_id: str) -> None:
        """Check that a run is not on hold.

        Raises:
            RunHeldError: It is.
        """
        if self._is_held(run_id):
            raise RunHeldError(run_id, self._holds[run_id].reason)

    def _is_held(self, run_id: str) -> bool:
        return run_id in self._holds and not self._holds[run_id].ended

    def next_number(self, run_id: str) -> int:
        """The number of a new run.

        Raises:
            RunExistsError: A run with this id was purged.
        """
        if self._had_records(run_id):
            raise RunExistsError(f"run {run_id!r} existed until it was purged: its id cannot be used again")
        return next(self._numbers)


class MemoryStore:
    """Stores journals in memory, for as long as the process runs.

    Attributes:
        maintenance: What is done to the store as a whole.
        signals: The answers and cancellations that wait for runs.
    """

    def __init__(self) -> None:
        self._runs: dict[str, _StoredRun] = {}
        self.signals = MemorySignals(self._stored_run)
        self.maintenance = MemoryMaintenance(self._runs, self.signals)

    async def acquire(self, run_id: str, owner: str, *, new: bool = False, keyring: Keyring | None = None) -> Lease:
        """Acquire the lease of a run; see ``Store.acquire``."""
        existing = self._runs.get(run_id)
        if new and existing is not None and (existing.records or existing.current_head().owner is not None):
            raise RunExistsError(f"run {run_id!r} exists already")
        if new and existing is None:
            number = self.maintenance.next_number(run_id)
            self._runs[run_id] = _StoredRun(Head(run_id, 0, None, 0, GENESIS_HASH, "running"), number)
        stored = self._stored_run(run_id)
        if stored.lease is not None and stored.lease() is not None:
            raise StaleLease(run_id, stored.head.owner, "is being run")
        stored.head = replace(stored.head, epoch=stored.head.epoch + 1, owner=owner)
        lease = Lease(run_id, owner, stored.head.epoch, stored.head.seq, stored.head.hash)
        stored.lease, stored.keyring = ref(lease), keyring
        return lease

    def append(
        self,
        lease: Lease,
        records: Sequence[SealedRecord],
        status: Status,
        info: RunInfo | None = None,
        snapshot: SealedSnapshot | None = None,
    ) -> Awaitable[None]:
        """Append records after the last one; see ``Store.append``."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._append(lease, records, status, info, snapshot)
        except StaleLease as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        return done

    def _append(
        self,
        lease: Lease,
        records: Sequence[SealedRecord],
        status: Status,
        info: RunInfo | None,
        snapshot: SealedSnapshot | None,
    ) -> None:
        stored = self._leased_run(lease)
        head = stored.head
        if records and records[0].seq != head.seq + 1:
            raise StaleLease(lease.run_id, head.owner, f"has {head.seq} records, so {records[0].seq} is not the next")
        if head.status == "finished" != status:
            raise StaleLease(lease.run_id, head.owner, "is finished")
        stored.records.extend(records)
        last = records[-1] if records else SealedRecord(head.seq, "", head.hash)
        stored.head = replace(head, seq=last.seq, hash=last.hash, status=status)
        if info is not None:
            stored.info = info
        if snapshot is not None or status == "finished":
            stored.snapshot = None if status == "finished" else snapshot
        if status != "running":
            self._end_lease(stored)

    async def release(self, lease: Lease) -> None:
        """Release a lease; see ``Store.release``."""
        stored = self._stored_run(lease.run_id)
        if stored.head.epoch == lease.epoch:
            self._end_lease(stored)

    async def redact(self, lease: Lease, seq: int, hidden: str, listed: RunInfo | None = None) -> None:
        """Replace the hidden values of one record; see ``Store.redact``."""
        stored = self._leased_run(lease)
        self.maintenance.require_not_held(lease.run_id)
        stored.snapshot = None
        stored.records[seq - 1] = stored.records[seq - 1]._replace(hidden=hidden)
        if listed is not None and stored.info is not None:
            stored.info = replace(
                stored.info,
                prompt=listed.prompt,
                actor=listed.actor,
                session_id=listed.session_id,
                tags=listed.tags,
                metadata=listed.metadata,
            )

    async def head(self, run_id: str) -> Head | None:
        """The head of a run, or None if there is no such run."""
        stored = self._runs.get(run_id)
        return None if stored is None else stored.current_head()

    async def heads(self, which: WhichRuns | None = None) -> list[Head]:
        """The heads of all runs, or of some of them, the oldest run first; see ``Store.heads``."""
        heads = [stored.current_head() for stored in self._runs.values()]
        return [head for head in heads if which in (None, head.status) or (which == "cut off" and head.is_cut_off)]

    async def records(self, run_id: str, after: int = 0, limit: int | None = None) -> list[SealedRecord]:
        """A run's records, in order, after a sequence number; see ``Store.records``."""
        return self._stored_run(run_id).records[after:][:limit]

    async def snapshot(self, run_id: str) -> SealedSnapshot | None:
        """A run's snapshot, or None if it has none; see ``Store.snapshot``."""
        stored = self._runs.get(run_id)
        return None if stored is None else stored.snapshot

    async def find_runs(self, query: RunQuery) -> RunPage:
        """The runs that a query finds, the newest first; see ``Store.find_runs``."""
        older = [each for each in reversed(self._runs.values()) if not query.after or each.number < int(query.after)]
        found = [(stored.number, info) for stored in older if query.matches(info := stored.current_info())]
        page = found[: query.limit]
        return RunPage(tuple(info for _, info in page), str(page[-1][0]) if len(found) > len(page) else "")

    async def count_runs(self, query: RunQuery) -> int:
        """How many runs a query finds on all its pages."""
        return sum(query.matches(stored.current_info()) for stored in self._runs.values())

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    async def aclose(self) -> None:
        """Do nothing: there are no resources to release."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def _stored_run(self, run_id: str) -> _StoredRun:
        if run_id not in self._runs:
            raise UnknownRunError(f"there is no run {run_id!r}")
        return self._runs[run_id]

    def _leased_run(self, lease: Lease) -> _StoredRun:
        stored = self._stored_run(lease.run_id)
        if stored.head.epoch != lease.epoch or stored.lease is None:
            raise StaleLease(lease.run_id, stored.head.owner, f"was acquired by another owner after {lease.owner}")
        return stored

    @staticmethod
    def _end_lease(stored: _StoredRun) -> None:
        stored.head, stored.lease = replace(stored.head, owner=None), None
