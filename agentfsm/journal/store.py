"""The Store protocol, its leases, and a consistent read of one run.

A store keeps records as they are given and never interprets them. It hands out *leases*: the caller that acquires
a run becomes its owner in a new epoch, and only the current owner's records are accepted, each directly after the
last one. That check (*fencing*) is part of the same transaction as the records.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as _quote
from typing import Literal, NamedTuple, Protocol, Self, TypeVar

from agentfsm.errors import StaleLease, StoreError, UnknownRunError
from agentfsm.journal.maintenance import StoreMaintenance
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.run_info import RunInfo, RunPage, RunQuery, Status
from agentfsm.journal.signals import SignalQueue
from agentfsm.loop.keys import KeyPurpose, Keyring

__all__ = [
    "Head",
    "Lease",
    "SealedSnapshot",
    "Status",
    "Store",
    "WhichRuns",
    "acquired",
    "changed_row_error",
    "consistent_read",
    "head_row",
    "is_changed",
    "off_loop",
    "owner_name",
    "seal_row",
    "stale_error",
]


WhichRuns = Status | Literal["cut off"]
"""Those with a status, or those that were begun and then left by their owner in the middle."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a run in its store: its last record, owner and status.

    Attributes:
        run_id: The run.
        epoch: How often the run was acquired.
        owner: The owner of its lease, or None.
        seq: The sequence number of its last record; 0 if there is none yet.
        hash: That record's hash, 64 hex digits.
        status: ``running`` (in progress or interrupted), ``suspended`` or ``finished``.
        row: All that the store keeps about the run, as ``head_row`` writes it.
        mac: The seal of ``row``; empty if the run was last acquired without keys.
    """

    run_id: str
    epoch: int
    owner: str | None
    seq: int
    hash: str
    status: Status
    row: str = ""
    mac: str = ""

    @property
    def is_cut_off(self) -> bool:
        """Whether the run was begun and then left by its owner in the middle."""
        return self.status == "running" and self.owner is None and self.seq > 0

    def is_left_to_workers(self, *, has_news: bool) -> bool:
        """Whether the run is for a worker to begin, to continue or to end, and none does.

        Args:
            has_news: Whether something was sent to it that nobody has acted on, or its request has expired.
        """
        if self.owner is not None or self.status == "finished":
            return False
        return self.status == "running" or not self.seq or has_news


class SealedSnapshot(NamedTuple):
    """What a run knew after one of its records, as a store keeps it: the journal says the same, and takes longer.

    Attributes:
        content: The snapshot (``agentfsm.journal.snapshot``).
        mac: Who wrote it: a key id and a MAC of the content, 40 hex digits.
    """

    content: str
    mac: str


def head_row(number: int, run_id: str, epoch: int, owner: str | None, seq: int, digest: str, status: str) -> str:
    """What a store keeps about a run, as the text that is sealed: a JSON array.

    Args:
        number: The number of the run in the store.
        run_id: The run.
        epoch: How often it was acquired.
        owner: The owner of its lease; for a dead process, the last one.
        seq: The sequence number of its last record.
        digest: That record's hash, 64 hex digits.
        status: Its status.
    """
    owned = "null" if owner is None else _quote(str(owner))  # str: what a changed file has may have any type
    return f'[{number},{_quote(str(run_id))},{epoch},{owned},{seq},"{digest}","{status}"]'


def seal_row(keyring: Keyring | None, row: str) -> str:
    """The seal of such a text under the current key; empty without keys."""
    return "" if keyring is None else keyring.current.seal(KeyPurpose.run, row.encode())


def is_changed(row: str, seal: str, keyring: Keyring | None) -> bool:
    """Whether somebody without the secret changed such a text, which was sealed under a secret of the host."""
    return bool(seal and keyring and keyring.check_seal(KeyPurpose.run, row.encode(), seal) is False)


def changed_row_error(run_id: str) -> StoreError:
    """The error for a run that is not acquired because of that."""
    return StoreError(
        f"run {run_id!r} is not acquired: somebody without the secret changed its row in the store; agentfsm verify "
        "shows what is wrong"
    )


def stale_error(run_id: str, epoch: int, owner: str, found: tuple[int, str | None, int, Status] | None) -> StoreError:
    """The error for a lease, of an epoch and an owner, with which nothing can be written.

    Args:
        run_id: The run.
        epoch: The epoch of the lease.
        owner: The owner of the lease.
        found: Epoch, owner, last sequence number and status of the run; None if there is no such run.
    """
    if found is None:
        return UnknownRunError(f"there is no run {run_id!r}")
    epoch_now, owner_now, seq, status = found
    if status == "finished":
        reason = "is finished"
    elif epoch_now != epoch or owner_now is None:
        reason = f"was acquired by another owner after {owner}"
    else:
        reason = f"has {seq} records, and the new ones do not follow them"
    return StaleLease(run_id, owner_now, reason)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Lease:
    """The right to write one run's records. A lease that is garbage-collected is released.

    Attributes:
        run_id: The run.
        owner: A name of the owner, for error messages.
        epoch: The epoch of the lease.
        seq: The sequence number of the last record when the run was acquired.
        hash: That record's hash, 64 hex digits.
        is_signalled: Whether the run has got a signal since it was acquired.
        on_signal: Called for each signal that the run gets from now on, in any thread; None for nothing.
    """

    run_id: str
    owner: str
    epoch: int
    seq: int
    hash: str
    is_signalled: bool = field(default=False, kw_only=True)
    on_signal: Callable[[], None] | None = field(default=None, kw_only=True, repr=False)

    def signal(self) -> None:
        """Tell the owner that the run has got a signal; a store calls this, in any thread."""
        self.is_signalled = True
        if self.on_signal is not None:
            self.on_signal()


class Store(Protocol):
    """Stores journals. A write is durable when its await returns. Nothing that it does blocks the event loop."""

    @property
    def maintenance(self) -> StoreMaintenance:
        """What is done to the store as a whole."""
        ...

    @property
    def signals(self) -> SignalQueue:
        """The answers and cancellations that wait for runs."""
        ...

    async def acquire(self, run_id: str, owner: str, *, new: bool = False, keyring: Keyring | None = None) -> Lease:
        """Acquire the lease of a run, in a new epoch.

        With keys, what the store keeps about the run is sealed from here on, whenever it changes.

        Args:
            run_id: The run.
            owner: A name of the owner, for error messages.
            new: Whether to create the run. A run that was interrupted before its first record counts as new.
            keyring: The keys of the host.

        Raises:
            RunExistsError: It should be created, and exists already.
            UnknownRunError: It is not to be created and does not exist.
            StaleLease: Another owner holds it; the error names the owner.
            StoreError: The store cannot write, or somebody without the secret changed what it keeps about the run.
        """
        ...

    def append(
        self,
        lease: Lease,
        records: Sequence[SealedRecord],
        status: Status,
        info: RunInfo | None = None,
        snapshot: SealedSnapshot | None = None,
    ) -> Awaitable[None]:
        """Append records after the last one. They are queued, in order, when this is called.

        Args:
            lease: The owner's lease; it ends when the status is not ``running``.
            records: The records.
            status: The status of the run after them. A finished run stays finished.
            info: What it is listed by from now on, written together with the records; None to leave that as it is.
            snapshot: Takes the place of the run's snapshot, together with the records; None to leave that as it is.
                A finished run has none.

        Raises:
            StaleLease: Another owner has acquired the run, or the records do not follow its last one.
            StoreFullError: There is no space left.
            StoreError: The store cannot write. In each case none of the records was written.
        """
        ...

    async def release(self, lease: Lease) -> None:
        """Release a lease; the run stays as it is. Releasing a stale lease does nothing."""
        ...

    async def redact(self, lease: Lease, seq: int, hidden: str, listed: RunInfo | None = None) -> None:
        """Replace the hidden values of one record, and delete the run's snapshot, which may have them.

        Args:
            lease: The run's lease.
            seq: The record.
            hidden: The hidden values that remain, as ``SealedRecord.hidden``.
            listed: Has the prompt, the actor, the session and the tags by which the run is listed from now on; None to
                leave them as they are.

        Raises:
            StaleLease: The lease is not the run's current one.
            StoreError: The store cannot write.
        """
        ...

    async def head(self, run_id: str) -> Head | None:
        """The head of a run, or None if there is no such run.

        Raises:
            StoreError: The store cannot be read.
        """
        ...

    async def heads(self, which: WhichRuns | None = None) -> list[Head]:
        """The heads of all runs, of those with one status, or of those that were cut off, the oldest run first.

        Raises:
            StoreError: The store cannot be read.
        """
        ...

    async def records(self, run_id: str, after: int = 0, limit: int | None = None) -> list[SealedRecord]:
        """A run's records, in order, after a sequence number: all of them, or at most so many.

        Raises:
            UnknownRunError: There is no such run.
            StoreError: The store cannot be read.
        """
        ...

    async def snapshot(self, run_id: str) -> SealedSnapshot | None:
        """A run's snapshot, or None if it has none or does not exist.

        Raises:
            StoreError: The store cannot be read.
        """
        ...

    async def find_runs(self, query: RunQuery) -> RunPage:
        """The runs that a query finds, the newest first, a page at a time.

        The order is that in which they were created, and does not change. No run is twice on the pages of a query or
        missing from them, whatever is written in the meantime.

        Raises:
            StoreError: The store cannot be read.
        """
        ...

    async def count_runs(self, query: RunQuery) -> int:
        """How many runs a query finds on all its pages.

        Raises:
            StoreError: The store cannot be read.
        """
        ...

    async def aclose(self) -> None:
        """Write what is queued, and release all resources."""
        ...

    async def __aenter__(self) -> Self:
        """The store itself, which is closed at the end of the ``async with`` block."""
        ...

    async def __aexit__(self, *error: object) -> None: ...


def owner_name() -> str:
    """The owner that this process's leases name: its process id and host, for error messages."""
    return f"process {os.getpid()} on {socket.gethostname()}"


@asynccontextmanager
async def acquired(store: Store, run_id: str, keyring: Keyring | None, *, new: bool = False) -> AsyncGenerator[Lease]:
    """The lease of a run, for an operation of a moment; it is released whether or not that succeeds.

    Raises:
        RunExistsError, UnknownRunError, StaleLease, StoreError: As ``Store.acquire`` raises them.
    """
    lease = await store.acquire(run_id, owner_name(), new=new, keyring=keyring)
    try:
        yield lease
    finally:
        with suppress(StoreError):
            await store.release(lease)


READ_ATTEMPTS = 3

SHORT_JOURNAL_CHARS = 50_000
"""So many characters of a journal are verified and rehydrated in a few milliseconds."""

Computed = TypeVar("Computed")


async def off_loop(
    compute: Callable[[Sequence[SealedRecord]], Computed],
    records: Sequence[SealedRecord],
    snapshot: SealedSnapshot | None = None,
) -> Computed:
    """What a function computes from records, and perhaps a snapshot, in a thread unless both are short."""
    chars = sum(len(record.body) + len(record.hidden) for record in records)
    if chars + (0 if snapshot is None else len(snapshot.content)) <= SHORT_JOURNAL_CHARS:
        return compute(records)
    return await asyncio.to_thread(compute, records)


async def consistent_read(store: Store, run_id: str, after: int = 0) -> tuple[list[SealedRecord], Head | None]:
    """A run's records after a sequence number, and its head, as they were at one moment.

    A store returns them in two reads, and a run that continues between them would look tampered with. If the records do
    not end with that of the head, they are read again, up to ``READ_ATTEMPTS`` times; for a run that never pauses, the
    records up to the head that was read first are returned.

    Raises:
        UnknownRunError: There is no such run.
        StoreError: The store cannot be read.
    """
    before = await store.head(run_id)
    records = await store.records(run_id, after)
    for _ in range(READ_ATTEMPTS):
        if before is not None and records and (before.seq, before.hash) == (records[-1].seq, records[-1].hash):
            return records, before
        now = await store.head(run_id)
        if before is None or now is None or (before.seq, before.hash) == (now.seq, now.hash):
            return records, now
        before, records = now, await store.records(run_id, after)
    return records[: before.seq - after] if before is not None else records, before
