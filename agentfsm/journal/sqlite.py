"""A store in one SQLite file: durable against power cuts, written by one process.

WAL and ``synchronous=FULL``: what was awaited is on the disk. All runs of the process share its commits.
Another process that wants to write is refused with the holder's name: SQLite before 3.51.3 can corrupt a WAL
file that two processes write, and a lease that a dead process held is then known to be free.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar
from weakref import WeakValueDictionary

from agentfsm.errors import RunExistsError, StaleLease, UnknownRunError
from agentfsm.journal import sqlite_file, sqlite_rows
from agentfsm.journal.records import START, Row
from agentfsm.journal.sqlite_file import APPLICATION_ID, SCHEMA_VERSION
from agentfsm.journal.sqlite_rows import Holder
from agentfsm.journal.sqlite_writer import Writer
from agentfsm.journal.store import Head, Lease, Status

__all__ = ["APPLICATION_ID", "SCHEMA_VERSION", "SqliteStore"]

Found = TypeVar("Found")


class SqliteStore:
    """Keeps journals in a SQLite file. Reading needs no lock; the first write makes this process the writer.

    Close it at the end, or use it in a ``with`` block.

    Args:
        path: The file; it is made by the first write.
        synchronous: ``full``: what was awaited survives a power cut. ``normal``: it survives the process, and
            a power cut may take the last commits with it, never part of one.

    Raises:
        StoreFormatError: The file is no store of ours, or a newer release wrote it.
        StoreError: The file cannot be read.
    """

    def __init__(self, path: str | Path, *, synchronous: Literal["full", "normal"] = "full") -> None:
        self.path = Path(path)
        self._writer = Writer(self.path, synchronous)
        self._leases: WeakValueDictionary[str, Lease] = WeakValueDictionary()
        self._reader: sqlite3.Connection | None = None
        self._reading = threading.Lock()
        self._read(lambda db: None, None)

    # -- taking and giving back -----------------------------------------------------------------------

    def claim(self) -> None:
        """Become the file's writer now, and not with the first write.

        Raises:
            StoreLockedError: Another process is; the message names it.
            StoreError: The file cannot be written.
        """
        self._writer.start()

    async def take(self, run_id: str, owner: str, *, new: bool = False) -> Lease:
        """Become a run's holder; see ``Store.take``."""
        held = self._leases.get(run_id)
        if held is not None and new:
            raise RunExistsError(f"there is a run {run_id!r} already")
        if held is not None:
            raise StaleLease(run_id, held.owner, "is being run")
        lease = _RowLease(run_id, owner, 0, 0, START)
        self._leases[run_id] = lease  # nobody else of this process takes it from here on
        try:
            found = await self._writer.do(lambda db: sqlite_rows.take(db, run_id, owner, new))
            lease.epoch, lease.seq, lease.hash, row = found
            lease.holder = Holder(run_id, lease.epoch, owner, row)
        except BaseException:
            self._forget(lease)
            raise
        return lease

    async def release(self, lease: Lease) -> None:
        """Give a run back as it is."""
        self._forget(lease)
        holder = _holder(lease)
        await self._writer.do(lambda db: sqlite_rows.free(db, holder))

    def _forget(self, lease: Lease) -> None:
        if self._leases.get(lease.run_id) is lease:
            del self._leases[lease.run_id]

    # -- writing --------------------------------------------------------------------------------------

    def append(self, lease: Lease, rows: Sequence[Row], status: Status) -> Awaitable[None]:
        """Add rows behind the last one; see ``Store.append``."""
        holder, runs = _holder(lease), len(self._leases)
        if status != "running":
            self._forget(lease)
        return self._writer.do(lambda db: sqlite_rows.append(db, holder, rows, status), runs=runs)

    async def redact(self, lease: Lease, seq: int, hidden: str) -> None:
        """Put what is left in place of what stood hidden beside one record, and wipe what stood there."""
        holder = _holder(lease)
        await self._writer.do(lambda db: sqlite_rows.redact(db, holder, seq, hidden), wipe=True)

    # -- reading --------------------------------------------------------------------------------------

    def head(self, run_id: str) -> Head | None:
        """Where a run stands, or None where there is no such run."""
        found = self._heads("run_id", run_id)
        return found[0] if found else None

    def heads(self, status: Status | None = None) -> list[Head]:
        """Where every run stands (of one status), the oldest run first."""
        return self._heads() if status is None else self._heads("status", status)

    def _heads(self, *where: str) -> list[Head]:
        found: list[Any] = self._read(lambda db: sqlite_rows.heads(db, *where), [])
        others = bool(found) and self._writer.elsewhere()
        return [
            Head(run_id, epoch, owner if others or run_id in self._leases else None, seq, seal, status)
            for run_id, epoch, owner, seq, seal, status in found
        ]

    def rows(self, run_id: str, after: int = 0) -> list[Row]:
        """A run's rows, in order, behind a sequence number."""
        found = self._read(lambda db: sqlite_rows.rows(db, run_id, after), None)
        if found is None:
            raise UnknownRunError(f"there is no run {run_id!r} in {self.path}")
        return found

    def _read(self, ask: Callable[[sqlite3.Connection], Found], nothing: Found) -> Found:
        """What the file says, or what stands for it where there is nothing in it yet.

        Raises:
            StoreError: It cannot be read.
        """
        with self._reading:
            if self._reader is None:
                self._reader = sqlite_file.open_reader(self.path)
            if self._reader is None:
                return nothing
            try:
                return ask(self._reader)
            except sqlite_file.UNREADABLE as error:
                raise sqlite_file.told(error, self.path) from error

    def close(self) -> None:
        """Write what is queued, let other processes write, and let go of the file."""
        if self._reader is not None:  # first: whoever closes last brings the log into the file, and it only reads
            self._reader.close()
            self._reader = None
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(slots=True, eq=False)
class _RowLease(Lease):
    """A lease that knows the run's row, so that nobody has to look it up for every commit."""

    holder: Holder | None = None


def _holder(lease: Lease) -> Holder:
    if isinstance(lease, _RowLease) and lease.holder is not None:
        return lease.holder
    return Holder(lease.run_id, lease.epoch, lease.owner, 0)  # a lease that nobody gave holds no row
