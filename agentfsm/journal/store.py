"""The port to a store: where journals are kept, and who may write to which.

A store keeps rows as they are given and never looks into them. It gives out *leases*: whoever takes a run
becomes its holder in a new epoch, and only the last holder's rows are accepted, each behind the row that was
last. That check (``fencing``) stands in the same transaction as the rows themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from agentfsm.journal.records import Row

__all__ = ["Head", "Lease", "Status", "Store"]

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

    async def take(self, run_id: str, owner: str, *, new: bool = False) -> Lease:
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

    def append(self, lease: Lease, rows: Sequence[Row], status: Status) -> Awaitable[None]:
        """Add rows behind the last one. They are queued, in order, when this is called.

        Args:
            lease: The holder's lease; it ends when the status is not ``running``.
            rows: The rows.
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

    def rows(self, run_id: str, after: int = 0) -> list[Row]:
        """A run's rows, in order, behind a sequence number.

        Raises:
            UnknownRunError: There is no such run.
        """
        ...

    def close(self) -> None:
        """Let go of everything; what was queued is written first."""
        ...
