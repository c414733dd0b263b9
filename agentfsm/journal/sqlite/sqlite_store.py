"""SqliteStore: a durable store in one SQLite file, written by one process.

WAL with ``synchronous=FULL``: what was awaited is on disk. All runs of the process share commits. A second process
that wants to write is refused with the owner's name: SQLite before 3.51.3 can corrupt a WAL file written by two
processes, and so a lease held by a dead process is known to be free.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar
from weakref import WeakValueDictionary

from agentfsm.errors import RunExistsError, StaleLease, StoreError, UnknownRunError
from agentfsm.journal.hash_chain import GENESIS_HASH
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.sqlite import sqlite_schema
from agentfsm.journal.sqlite.sqlite_schema import APPLICATION_ID, SCHEMA_VERSION
from agentfsm.journal.sqlite.sqlite_writer import SqliteWriter
from agentfsm.journal.store import Head, Lease, Status

__all__ = [
    "APPLICATION_ID",
    "SCHEMA_VERSION",
    "LeaseKey",
    "SqliteStore",
    "acquire_lease",
    "insert_records",
    "release_lease",
    "select_heads",
    "select_records",
    "update_hidden",
]


class LeaseKey(NamedTuple):
    """What a lease says; the queue must not keep a lease itself alive."""

    run_id: str
    epoch: int
    owner: str
    run_rowid: int  # in the table of runs


def acquire_lease(db: sqlite3.Connection, run_id: str, owner: str, new: bool) -> tuple[int, int, str, int]:
    """Make somebody a run's holder: the new epoch, the last record's number and hash, and the run's row.

    Raises:
        RunExistsError: It is to be new, and there is one.
        UnknownRunError: There is none.
    """
    found = db.execute("SELECT epoch, seq, hash, id FROM run WHERE run_id = ?", (run_id,)).fetchone()
    if new and found is not None and found[1]:
        raise RunExistsError(f"there is a run {run_id!r} already")
    if new and found is None:
        made = db.execute("INSERT INTO run (run_id, hash) VALUES (?, ?)", (run_id, bytes.fromhex(GENESIS_HASH)))
        found = (0, 0, bytes.fromhex(GENESIS_HASH), made.lastrowid or 0)
    if found is None:
        raise UnknownRunError(f"there is no run {run_id!r}")
    db.execute("UPDATE run SET epoch = epoch + 1, owner = ? WHERE run_id = ?", (owner, run_id))
    return found[0] + 1, found[1], found[2].hex(), found[3]


def release_lease(db: sqlite3.Connection, key: LeaseKey) -> None:
    """Nobody holds the run any more, unless somebody else has taken it."""
    db.execute("UPDATE run SET owner = NULL WHERE run_id = ? AND epoch = ?", (key.run_id, key.epoch))


_UPDATE_RUN = (
    "UPDATE run SET seq = coalesce(?1, seq), hash = coalesce(?2, hash), status = ?3,"
    " owner = CASE WHEN ?3 = 'running' THEN owner END"
    " WHERE id = ?4 AND run_id = ?5 AND epoch = ?6 AND seq + 1 = coalesce(?7, seq + 1) AND owner IS NOT NULL"
    " AND (status <> 'finished' OR ?3 = 'finished')"
)
_SELECT_RECORDS = (  # text whatever stands there: on a disk that flips bits, a value may change its type
    "SELECT key - ?, coalesce(CAST(body AS TEXT), ''), lower(hex(hash)), coalesce(CAST(hidden AS TEXT), '')"
    " FROM journal WHERE key > ? AND key < ? ORDER BY key"
)
_INSERT_RECORD = "INSERT INTO journal (key, body, hash, hidden) VALUES (?, ?, ?, ?)"


def insert_records(db: sqlite3.Connection, key: LeaseKey, records: Sequence[SealedRecord], status: Status) -> None:
    """Add rows behind a run's last one.

    Raises:
        StaleLease: Somebody else holds the run, or another row was to come next.
        UnknownRunError: There is no such run.
    """
    seals = [bytes.fromhex(row.hash) for row in records]
    first, last, seal = (records[0].seq, records[-1].seq, seals[-1]) if records else (None, None, None)
    moved = db.execute(_UPDATE_RUN, (last, seal, status, key.run_rowid, key.run_id, key.epoch, first))
    if moved.rowcount != 1:
        raise _stale_error(db, key)
    high = key.run_rowid << 32
    db.executemany(
        _INSERT_RECORD,
        [(high | row.seq, row.body, seal, row.hidden or None) for row, seal in zip(records, seals, strict=True)],
    )


def update_hidden(db: sqlite3.Connection, key: LeaseKey, seq: int, hidden: str) -> None:
    """Put what is left in place of what stood hidden beside one record.

    Raises:
        StaleLease: Somebody else holds the run.
        UnknownRunError: There is no such run.
    """
    held = db.execute(
        "SELECT id FROM run WHERE run_id = ? AND epoch = ? AND owner IS NOT NULL", (key.run_id, key.epoch)
    ).fetchone()
    if held is None:
        raise _stale_error(db, key)
    db.execute("UPDATE journal SET hidden = ? WHERE key = ?", (hidden, held[0] << 32 | seq))


def _stale_error(db: sqlite3.Connection, key: LeaseKey) -> StoreError:
    found = db.execute("SELECT epoch, owner, seq, status FROM run WHERE run_id = ?", (key.run_id,)).fetchone()
    if found is None:
        return UnknownRunError(f"there is no run {key.run_id!r}")
    epoch, owner, seq, status = found
    if status == "finished":
        why = "is finished"
    elif epoch != key.epoch or owner is None:
        why = f"was taken from {key.owner}"
    else:
        why = f"has {seq} records, so another was to come next"
    return StaleLease(key.run_id, owner, why)


def select_heads(db: sqlite3.Connection, column: str = "", *values: str) -> list[Any]:
    """Run id, epoch, owner, seq, hash and status of runs, the oldest run first.

    Args:
        db: The file.
        column: The column that is to have a value, ``run_id`` or ``status``; empty for all runs.
        values: That value.
    """
    some = f" WHERE {column} = ?" if column else ""
    text = f"SELECT run_id, epoch, owner, seq, lower(hex(hash)), status FROM run{some} ORDER BY id"  # noqa: S608  # names of ours
    return db.execute(text, values).fetchall()


def select_records(db: sqlite3.Connection, run_id: str, after: int) -> list[SealedRecord] | None:
    """A run's rows behind a sequence number, or None where there is no such run."""
    found = db.execute("SELECT id FROM run WHERE run_id = ?", (run_id,)).fetchone()
    if found is None:
        return None
    low, high = found[0] << 32, (found[0] + 1) << 32
    return [SealedRecord(*row) for row in db.execute(_SELECT_RECORDS, (low, low + after, high))]


QueryResult = TypeVar("QueryResult")


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
        self._writer = SqliteWriter(self.path, synchronous)
        self._leases: WeakValueDictionary[str, Lease] = WeakValueDictionary()
        self._reader: sqlite3.Connection | None = None
        self._reader_lock = threading.Lock()
        self._read(lambda db: None, None)

    # -- taking and giving back -----------------------------------------------------------------------

    def claim(self) -> None:
        """Become the file's writer now, and not with the first write.

        Raises:
            StoreLockedError: Another process is; the message names it.
            StoreError: The file cannot be written.
        """
        self._writer.start()

    async def acquire(self, run_id: str, owner: str, *, new: bool = False) -> Lease:
        """Become a run's holder; see ``Store.take``."""
        held = self._leases.get(run_id)
        if held is not None and new:
            raise RunExistsError(f"there is a run {run_id!r} already")
        if held is not None:
            raise StaleLease(run_id, held.owner, "is being run")
        lease = _SqliteLease(run_id, owner, 0, 0, GENESIS_HASH)
        self._leases[run_id] = lease  # nobody else of this process takes it from here on
        try:
            found = await self._writer.submit(lambda db: acquire_lease(db, run_id, owner, new))
            lease.epoch, lease.seq, lease.hash, row = found
            lease.key = LeaseKey(run_id, lease.epoch, owner, row)
        except BaseException:
            self._drop_lease(lease)
            raise
        return lease

    async def release(self, lease: Lease) -> None:
        """Give a run back as it is."""
        self._drop_lease(lease)
        holder = _lease_key(lease)
        await self._writer.submit(lambda db: release_lease(db, holder))

    def _drop_lease(self, lease: Lease) -> None:
        if self._leases.get(lease.run_id) is lease:
            del self._leases[lease.run_id]

    # -- writing --------------------------------------------------------------------------------------

    def append(self, lease: Lease, records: Sequence[SealedRecord], status: Status) -> Awaitable[None]:
        """Add rows behind the last one; see ``Store.append``."""
        holder, runs = _lease_key(lease), len(self._leases)
        if status != "running":
            self._drop_lease(lease)
        return self._writer.submit(lambda db: insert_records(db, holder, records, status), active_runs=runs)

    async def redact(self, lease: Lease, seq: int, hidden: str) -> None:
        """Put what is left in place of what stood hidden beside one record, and wipe what stood there."""
        holder = _lease_key(lease)
        await self._writer.submit(lambda db: update_hidden(db, holder, seq, hidden), truncate_wal=True)

    # -- reading --------------------------------------------------------------------------------------

    def head(self, run_id: str) -> Head | None:
        """Where a run stands, or None where there is no such run."""
        found = self._heads("run_id", run_id)
        return found[0] if found else None

    def heads(self, status: Status | None = None) -> list[Head]:
        """Where every run stands (of one status), the oldest run first."""
        return self._heads() if status is None else self._heads("status", status)

    def _heads(self, *filters: str) -> list[Head]:
        found: list[Any] = self._read(lambda db: select_heads(db, *filters), [])
        others = bool(found) and self._writer.owned_by_other_process()
        return [
            Head(run_id, epoch, owner if others or run_id in self._leases else None, seq, seal, status)
            for run_id, epoch, owner, seq, seal, status in found
        ]

    def records(self, run_id: str, after: int = 0) -> list[SealedRecord]:
        """A run's rows, in order, behind a sequence number."""
        found = self._read(lambda db: select_records(db, run_id, after), None)
        if found is None:
            raise UnknownRunError(f"there is no run {run_id!r} in {self.path}")
        return found

    def _read(self, query: Callable[[sqlite3.Connection], QueryResult], default: QueryResult) -> QueryResult:
        """What the file says, or what stands for it where there is nothing in it yet.

        Raises:
            StoreError: It cannot be read.
        """
        with self._reader_lock:
            if self._reader is None:
                self._reader = sqlite_schema.open_reader(self.path)
            if self._reader is None:
                return default
            try:
                return query(self._reader)
            except sqlite_schema.READ_ERRORS as error:
                raise sqlite_schema.as_store_error(error, self.path) from error

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
class _SqliteLease(Lease):
    """A lease that knows the run's row, so that nobody has to look it up for every commit."""

    key: LeaseKey | None = None


def _lease_key(lease: Lease) -> LeaseKey:
    if isinstance(lease, _SqliteLease) and lease.key is not None:
        return lease.key
    return LeaseKey(lease.run_id, lease.epoch, lease.owner, 0)  # a lease that nobody gave holds no row
