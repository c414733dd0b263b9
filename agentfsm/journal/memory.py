"""A store in memory: for tests, and the model that other stores are held to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from weakref import ReferenceType, ref

from agentfsm.errors import RunExistsError, StaleLease, UnknownRunError
from agentfsm.journal.records import START, Row
from agentfsm.journal.store import Head, Lease, Status

__all__ = ["MemoryStore"]


@dataclass
class _Kept:
    head: Head
    rows: list[Row] = field(default_factory=list[Row])
    lease: ReferenceType[Lease] | None = None

    def seen(self) -> Head:
        held = self.lease is not None and self.lease() is not None
        return self.head if held else replace(self.head, owner=None)


class MemoryStore:
    """Keeps journals as long as the process lives."""

    def __init__(self) -> None:
        self._runs: dict[str, _Kept] = {}

    async def take(self, run_id: str, owner: str, *, new: bool = False) -> Lease:
        """Become a run's holder; see ``Store.take``."""
        known = self._runs.get(run_id)
        if new and known is not None and (known.rows or known.seen().owner is not None):
            raise RunExistsError(f"there is a run {run_id!r} already")
        if new and known is None:
            self._runs[run_id] = _Kept(Head(run_id, 0, None, 0, START, "running"))
        kept = self._kept(run_id)
        if kept.lease is not None and kept.lease() is not None:
            raise StaleLease(run_id, kept.head.owner, "is being run")
        kept.head = replace(kept.head, epoch=kept.head.epoch + 1, owner=owner)
        lease = Lease(run_id, owner, kept.head.epoch, kept.head.seq, kept.head.hash)
        kept.lease = ref(lease)
        return lease

    def append(self, lease: Lease, rows: Sequence[Row], status: Status) -> Awaitable[None]:
        """Add rows behind the last one; see ``Store.append``."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._append(lease, rows, status)
        except StaleLease as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        return done

    def _append(self, lease: Lease, rows: Sequence[Row], status: Status) -> None:
        kept = self._held(lease)
        head = kept.head
        if rows and rows[0].seq != head.seq + 1:
            raise StaleLease(lease.run_id, head.owner, f"has {head.seq} records, so {rows[0].seq} is not the next")
        if head.status == "finished" != status:
            raise StaleLease(lease.run_id, head.owner, "is finished")
        kept.rows.extend(rows)
        last = rows[-1] if rows else Row(head.seq, "", head.hash)
        kept.head = replace(head, seq=last.seq, hash=last.hash, status=status)
        if status != "running":
            self._let_go(kept)

    async def release(self, lease: Lease) -> None:
        """Give a run back as it is."""
        kept = self._kept(lease.run_id)
        if kept.head.epoch == lease.epoch:
            self._let_go(kept)

    async def redact(self, lease: Lease, seq: int, hidden: str) -> None:
        """Put what is left in place of what stood hidden beside one record."""
        kept = self._held(lease)
        kept.rows[seq - 1] = kept.rows[seq - 1]._replace(hidden=hidden)

    def head(self, run_id: str) -> Head | None:
        """Where a run stands, or None where there is no such run."""
        kept = self._runs.get(run_id)
        return None if kept is None else kept.seen()

    def heads(self, status: Status | None = None) -> list[Head]:
        """Where every run stands (of one status), the oldest run first."""
        return [k.seen() for k in self._runs.values() if status is None or k.head.status == status]

    def rows(self, run_id: str, after: int = 0) -> list[Row]:
        """A run's rows, in order, behind a sequence number."""
        return self._kept(run_id).rows[after:]

    def close(self) -> None:
        """Nothing is to be let go of."""

    def _kept(self, run_id: str) -> _Kept:
        if run_id not in self._runs:
            raise UnknownRunError(f"there is no run {run_id!r}")
        return self._runs[run_id]

    def _held(self, lease: Lease) -> _Kept:
        kept = self._kept(lease.run_id)
        if kept.head.epoch != lease.epoch or kept.lease is None:
            raise StaleLease(lease.run_id, kept.head.owner, f"was taken from {lease.owner}")
        return kept

    @staticmethod
    def _let_go(kept: _Kept) -> None:
        kept.head, kept.lease = replace(kept.head, owner=None), None
