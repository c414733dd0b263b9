"""The Store protocol, its leases, and a consistent read of one run.

A store keeps records as they are given and never interprets them. It hands out *leases*: whoever acquires a run
becomes its owner in a new epoch, and only the current owner's records are accepted, each directly after the last
one. That check (*fencing*) is part of the same transaction as the records.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from agentfsm.journal.records import SealedRecord

__all__ = ["Head", "Lease", "Status", "Store", "consistent_read"]


Status = Literal["running", "suspended", "finished"]


@dataclass(frozen=True, slots=True)
class Head:
    """Where a run stands in its store.

    Attributes:
        run_id: The run.
        epoch: How often it was taken.
        owner: Who holds it, or None.
        seq: Its last record's number; 0 where there is none yet.
        hash: That record's hash, in hex.
        status: ``running`` (being run, or cut off), ``suspended`` or ``finished``.
    """

    run_id: str
    epoch: int
    owner: str | None
    seq: int
    hash: str
    status: Status


@dataclass(slots=True, weakref_slot=True, eq=False)
class Lease:
    """The right to write one run's records. Whoever drops it gives the run back.

    Attributes:
        run_id: The run.
        owner: Who holds it, for people to read.
        epoch: In which epoch.
        seq: The last record when it was taken.
        hash: That record's hash, in hex.
    """

    run_id: str
    owner: str
    epoch: int
    seq: int
    hash: str


class Store(Protocol):
    """Keeps journals. Reading answers at once; what is written is durable when its await returns."""

    async def acquire(self, run_id: str, owner: str, *, new: bool = False) -> Lease:
        """Become a run's holder.

        Args:
            run_id: The run.
            owner: Who takes it, for people to read.
            new: Whether this is to be a new run; one that was cut off before its first row is as good as new.

        Raises:
            RunExistsError: It is to be new, and there is one.
            UnknownRunError: There is none.
            StaleLease: Somebody holds it; the error names them.
            StoreError: The store cannot write.
        """
        ...

    def append(self, lease: Lease, records: Sequence[SealedRecord], status: Status) -> Awaitable[None]:
        """Add rows behind the last one. They are queued, in order, when this is called.

        Args:
            lease: The holder's lease; it ends when the status is not ``running``.
            records: The rows.
            status: How the run stands behind them. A finished run stays finished.

        Raises:
            StaleLease: Somebody else has taken the run, or the rows do not fit behind its last one.
            StoreFullError: There is no room.
            StoreError: The store cannot write. In each case none of the rows is there.
        """
        ...

    async def release(self, lease: Lease) -> None:
        """Give a run back as it is. A lease that is stale already is none to give back."""
        ...

    async def redact(self, lease: Lease, seq: int, hidden: str) -> None:
        """Put what is left in place of what stood hidden beside one record.

        Raises:
            StaleLease: The lease is not the run's.
        """
        ...

    def head(self, run_id: str) -> Head | None:
        """Where a run stands, or None where there is no such run."""
        ...

    def heads(self, status: Status | None = None) -> list[Head]:
        """Where every run stands (of one status), the oldest run first."""
        ...

    def records(self, run_id: str, after: int = 0) -> list[SealedRecord]:
        """A run's rows, in order, behind a sequence number.

        Raises:
            UnknownRunError: There is no such run.
        """
        ...

    def close(self) -> None:
        """Let go of everything; what was queued is written first."""
        ...


READ_ATTEMPTS = 3


def consistent_read(store: Store, run_id: str) -> tuple[list[SealedRecord], Head | None]:
    """A run's rows and what its store notes of them, of one moment.

    A store gives them one after the other, and a run that goes on meanwhile would look as if somebody had tampered
    with it. While it does, they are read again; a run that never stands still is given as far as it was noted
    before its rows were read.

    Raises:
        UnknownRunError: There is no such run.
        StoreError: The store cannot be read.
    """
    before = store.head(run_id)
    rows = store.records(run_id)
    for _ in range(READ_ATTEMPTS):
        after = store.head(run_id)
        if before is None or after is None or (before.seq, before.hash) == (after.seq, after.hash):
            return rows, after
        before, rows = after, store.records(run_id)
    return rows[: before.seq] if before is not None else rows, before
