"""MemoryStore: an in-memory store for tests, and the reference for other stores."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from weakref import ReferenceType, ref

from agentfsm.errors import RunExistsError, StaleLease, UnknownRunError
from agentfsm.journal.hash_chain import GENESIS_HASH
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.store import Head, Lease, Status

__all__ = ["MemoryStore"]


@dataclass
class _StoredRun:
    head: Head
    records: list[SealedRecord] = field(default_factory=list[SealedRecord])
    lease: ReferenceType[Lease] | None = None

    def current_head(self) -> Head:
        held = self.lease is not None and self.lease() is not None
        return self.head if held else replace(self.head, owner=None)


class MemoryStore:
    """Keeps journals as long as the process lives."""

    def __init__(self) -> None:
        self._runs: dict[str, _StoredRun] = {}

    async def acquire(self, run_id: str, owner: str, *, new: bool = False) -> Lease:
        """Become a run's holder; see ``Store.take``."""
        known = self._runs.get(run_id)
        if new and known is not None and (known.records or known.current_head().owner is not None):
            raise RunExistsError(f"there is a run {run_id!r} already")
        if new and known is None:
            self._runs[run_id] = _StoredRun(Head(run_id, 0, None, 0, GENESIS_HASH, "running"))
        kept = self._stored_run(run_id)
        if kept.lease is not None and kept.lease() is not None:
            raise StaleLease(run_id, kept.head.owner, "is being run")
        kept.head = replace(kept.head, epoch=kept.head.epoch + 1, owner=owner)
        lease = Lease(run_id, owner, kept.head.epoch, kept.head.seq, kept.head.hash)
        kept.lease = ref(lease)
        return lease

    def append(self, lease: Lease, records: Sequence[SealedRecord], status: Status) -> Awaitable[None]:
        """Add rows behind the last one; see ``Store.append``."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._append(lease, records, status)
        except StaleLease as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        return done

    def _append(self, lease: Lease, records: Sequence[SealedRecord], status: Status) -> None:
        kept = self._leased_run(lease)
        head = kept.head
        if records and records[0].seq != head.seq + 1:
            raise StaleLease(lease.run_id, head.owner, f"has {head.seq} records, so {records[0].seq} is not the next")
        if head.status == "finished" != status:
            raise StaleLease(lease.run_id, head.owner, "is finished")
        kept.records.extend(records)
        last = records[-1] if records else SealedRecord(head.seq, "", head.hash)
        kept.head = replace(head, seq=last.seq, hash=last.hash, status=status)
        if status != "running":
            self._end_lease(kept)

    async def release(self, lease: Lease) -> None:
        """Give a run back as it is."""
        kept = self._stored_run(lease.run_id)
        if kept.head.epoch == lease.epoch:
            self._end_lease(kept)

    async def redact(self, lease: Lease, seq: int, hidden: str) -> None:
        """Put what is left in place of what stood hidden beside one record."""
        kept = self._leased_run(lease)
        kept.records[seq - 1] = kept.records[seq - 1]._replace(hidden=hidden)

    def head(self, run_id: str) -> Head | None:
        """Where a run stands, or None where there is no such run."""
        kept = self._runs.get(run_id)
        return None if kept is None else kept.current_head()

    def heads(self, status: Status | None = None) -> list[Head]:
        """Where every run stands (of one status), the oldest run first."""
        return [k.current_head() for k in self._runs.values() if status is None or k.head.status == status]

    def records(self, run_id: str, after: int = 0) -> list[SealedRecord]:
        """A run's rows, in order, behind a sequence number."""
        return self._stored_run(run_id).records[after:]

    def close(self) -> None:
        """Nothing is to be let go of."""

    def _stored_run(self, run_id: str) -> _StoredRun:
        if run_id not in self._runs:
            raise UnknownRunError(f"there is no run {run_id!r}")
        return self._runs[run_id]

    def _leased_run(self, lease: Lease) -> _StoredRun:
        kept = self._stored_run(lease.run_id)
        if kept.head.epoch != lease.epoch or kept.lease is None:
            raise StaleLease(lease.run_id, kept.head.owner, f"was taken from {lease.owner}")
        return kept

    @staticmethod
    def _end_lease(stored: _StoredRun) -> None:
        stored.head, stored.lease = replace(stored.head, owner=None), None
