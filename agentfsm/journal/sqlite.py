"""A store in one SQLite file: durable against power cuts, written by one process through one thread.

WAL and ``synchronous=FULL``: what was awaited is on the disk. All runs of the process share its commits:
whatever they have queued while one was on its way goes into the next. Another process that wants
to write is refused with the holder's name: SQLite before 3.51.3 can corrupt a WAL file that two processes
write, and a lease that a dead process held is then known to be free.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

from agentfsm.errors import (
    RunExistsError,
    StaleLease,
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreLockedError,
    UnknownRunError,
)
from agentfsm.journal.filelock import FileLock
from agentfsm.journal.records import START, Row
from agentfsm.journal.store import Head, Lease, Status

__all__ = ["APPLICATION_ID", "SCHEMA_VERSION", "SqliteStore"]

APPLICATION_ID = 0x6166736D
"""``afsm``: tells a file of ours from any other SQLite file."""

SCHEMA_VERSION = 1

BUSY_S = 5.0
"""Seconds to wait for another program that holds a lock on the file."""

_SCHEMA = f"""
CREATE TABLE run (
    id INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL UNIQUE,
    epoch INTEGER NOT NULL DEFAULT 0,
    owner TEXT,
    seq INTEGER NOT NULL DEFAULT 0,
    hash BLOB NOT NULL,
    status TEXT NOT NULL DEFAULT 'running'
);
CREATE TABLE journal (
    key INTEGER PRIMARY KEY,  -- run.id << 32 | seq: a run's records lie together, and need no other index
    body TEXT NOT NULL,
    hash BLOB NOT NULL,
    hidden TEXT
);
CREATE TRIGGER journal_keeps_what_it_has BEFORE UPDATE OF key, body, hash ON journal
BEGIN SELECT RAISE(ABORT, 'a journal is append-only'); END;
CREATE TRIGGER journal_loses_nothing BEFORE DELETE ON journal
BEGIN SELECT RAISE(ABORT, 'a journal is append-only'); END;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""

Job = Callable[[sqlite3.Connection], Any]
Queued = tuple[Job, "asyncio.Future[Any]", bool]
Told = tuple["asyncio.Future[Any]", Any, Exception | None]


class SqliteStore:
    """Keeps journals in a SQLite file. Reading needs no lock; the first write makes this process the writer.

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
        self._synchronous = synchronous
        self._leases: WeakValueDictionary[str, Lease] = WeakValueDictionary()
        self._file_lock = FileLock(self.path.with_name(self.path.name + "-lock"))
        self._lock = threading.Lock()
        self._queue: list[Queued] = []
        self._asleep = True
        self._commits: SimpleQueue[tuple[list[Queued], list[Told] | None] | None] = SimpleQueue()
        self._writer: threading.Thread | None = None
        self._db: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        if self.path.exists():
            self._reading()

    # -- taking and giving back -----------------------------------------------------------------------

    async def take(self, run_id: str, owner: str, *, new: bool = False) -> Lease:
        """Become a run's holder; see ``Store.take``."""
        held = self._leases.get(run_id)
        if held is not None and new:
            raise RunExistsError(f"there is a run {run_id!r} already")
        if held is not None:
            raise StaleLease(run_id, held.owner, "is being run")
        lease = Lease(run_id, owner, 0, 0, START)
        self._leases[run_id] = lease  # nobody else of this process takes it from here on
        try:
            lease.epoch, lease.seq, lease.hash = await self._do(lambda db: _take(db, run_id, owner, new))
        except BaseException:
            self._forget(lease)
            raise
        return lease

    async def release(self, lease: Lease) -> None:
        """Give a run back as it is."""
        self._forget(lease)

        def free(db: sqlite3.Connection) -> None:
            db.execute("UPDATE run SET owner = NULL WHERE run_id = ? AND epoch = ?", (lease.run_id, lease.epoch))

        await self._do(free)

    def _forget(self, lease: Lease) -> None:
        if self._leases.get(lease.run_id) is lease:
            del self._leases[lease.run_id]

    # -- writing --------------------------------------------------------------------------------------

    def append(self, lease: Lease, rows: Sequence[Row], status: Status) -> Awaitable[None]:
        """Add rows behind the last one; see ``Store.append``."""
        if status != "running":
            self._forget(lease)
        holder = _Holder(lease.run_id, lease.epoch, lease.owner)  # the queue must not keep a lease alive
        return self._do(lambda db: _append(db, holder, rows, status))

    async def redact(self, lease: Lease, seq: int, hidden: str) -> None:
        """Put what is left in place of what stood hidden beside one record, and wipe what stood there."""
        holder = _Holder(lease.run_id, lease.epoch, lease.owner)
        await self._do(lambda db: _redact(db, holder, seq, hidden), wipe=True)

    # What runs have queued is written in the thread of the event loop, which takes microseconds, and committed
    # in a thread of our own, which takes as long as the disk does. A writer thread that did both would have to
    # win the interpreter's lock back at every statement, against a loop that is busy.

    def _do(self, job: Job, wipe: bool = False) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        try:
            self._start_writer()
        except StoreError as error:
            done.set_exception(error)
            return done
        with self._lock:
            self._queue.append((job, done, wipe))
            if self._asleep:
                self._asleep = False
                loop.call_soon(self._write)  # behind whatever else is ready now, so it goes into the same commit
        return done

    def _start_writer(self) -> None:
        with self._lock:
            if self._writer is not None:
                return
            self._file_lock.acquire()
            try:
                self._db = self._open_writer()
            except BaseException:
                self._file_lock.release()
                raise
            self._writer = threading.Thread(target=self._commit_all, name="agentfsm-store", daemon=True)
            self._writer.start()

    def _open_writer(self) -> sqlite3.Connection:
        try:
            db = _connect(f"{self.path.absolute().as_uri()}?mode=rwc", timeout=0)
            _check(db, self.path)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute(f"PRAGMA synchronous = {self._synchronous}")
            db.execute("PRAGMA secure_delete = ON")
            if not _tables(db):
                db.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
        except sqlite3.Error as error:
            raise _told(error, self.path) from error
        return db

    def _write(self) -> None:
        """Write what is queued, and have it committed."""
        with self._lock:
            jobs, self._queue = self._queue, []
            if not jobs:
                self._asleep = True
                return
        db = self._database()
        try:
            db.execute("BEGIN IMMEDIATE")
            done = _perform(db, jobs)
        except sqlite3.Error:  # another program holds a lock, or a job is at fault: take the time to find out
            _roll_back(db)
            self._commits.put((jobs, None))
            return
        if self._synchronous == "normal":  # no disk to wait for
            self._finish(jobs, done)
        else:
            self._commits.put((jobs, done))

    def _finish(self, jobs: list[Queued], done: list[Told] | None) -> None:
        """Commit what was written, tell those who wait, and have what was queued meanwhile written."""
        told: list[Told]
        try:
            told = self._commit(self._database(), jobs, done)
        except Exception as error:  # nobody may wait for ever, whatever happens here
            why = StoreError(f"{self.path}: {type(error).__name__}: {error}")
            told = [(waiter, None, why) for _, waiter, _ in jobs]
        _tell(told)
        with self._lock:
            waiting = self._queue[0][1].get_loop() if self._queue else None
            self._asleep = waiting is None
        if waiting is not None:
            try:
                waiting.call_soon_threadsafe(self._write)
            except RuntimeError:  # that loop is closed, and nobody waits there any more
                self._write()

    def _commit_all(self) -> None:
        while (told := self._commits.get()) is not None:
            self._finish(*told)
            del told

    def _commit(self, db: sqlite3.Connection, jobs: list[Queued], done: list[Told] | None) -> list[Told]:
        try:
            if done is None:
                db.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")
                try:
                    db.execute("BEGIN IMMEDIATE")
                finally:
                    db.execute("PRAGMA busy_timeout = 0")
                done = _perform(db, jobs)
            db.execute("COMMIT")
            if any(wipe for _, _, wipe in jobs):  # what was overwritten stands in the write-ahead log too
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            _roll_back(db)
            if len(jobs) > 1:  # one of them may be to blame: each on its own
                return [told for job in jobs for told in self._commit(db, [job], None)]
            return [(waiter, None, _told(error, self.path)) for _, waiter, _ in jobs]
        return done

    def _database(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreError(f"{self.path} is closed")
        return self._db

    # -- reading --------------------------------------------------------------------------------------

    def head(self, run_id: str) -> Head | None:
        """Where a run stands, or None where there is no such run."""
        found = self._heads("WHERE run_id = ?", (run_id,))
        return found[0] if found else None

    def heads(self, status: Status | None = None) -> list[Head]:
        """Where every run stands (of one status), the oldest run first."""
        return self._heads("", ()) if status is None else self._heads("WHERE status = ?", (status,))

    def _heads(self, where: str, values: tuple[Any, ...]) -> list[Head]:
        text = f"SELECT run_id, epoch, owner, seq, hash, status FROM run {where} ORDER BY id"  # noqa: S608  # two constants
        found = self._ask(text, values)
        others = self._writer is None and bool(found) and self._file_lock.held()
        return [
            Head(run_id, epoch, owner if others or run_id in self._leases else None, seq, bytes(seal).hex(), status)
            for run_id, epoch, owner, seq, seal, status in found
        ]

    def rows(self, run_id: str, after: int = 0) -> list[Row]:
        """A run's rows, in order, behind a sequence number."""
        ids = self._ask("SELECT id FROM run WHERE run_id = ?", (run_id,))
        if not ids:
            raise UnknownRunError(f"there is no run {run_id!r} in {self.path}")
        low, high = ids[0][0] << 32, (ids[0][0] + 1) << 32
        found = self._ask(
            "SELECT key, body, hash, hidden FROM journal WHERE key > ? AND key < ? ORDER BY key", (low + after, high)
        )
        return [Row(key - low, body, seal.hex(), hidden or "") for key, body, seal, hidden in found]

    def _ask(self, text: str, values: tuple[Any, ...]) -> list[Any]:
        db = self._reading()
        if db is None:
            return []
        try:
            with self._lock:
                return db.execute(text, values).fetchall()
        except sqlite3.Error as error:
            raise _told(error, self.path) from error

    def _reading(self) -> sqlite3.Connection | None:
        if self._reader is None and self.path.exists() and self.path.stat().st_size:
            try:
                db = self._open_reader()
            except sqlite3.Error as error:
                raise _told(error, self.path) from error
            if not _tables(db):
                db.close()
                return None
            self._reader = db
        return self._reader

    def _open_reader(self) -> sqlite3.Connection:
        uri = self.path.absolute().as_uri()
        db = _connect(f"{uri}?mode=ro")
        try:
            _check(db, self.path)
        except sqlite3.OperationalError as error:
            if not str(getattr(error, "sqlite_errorname", "")).startswith("SQLITE_READONLY"):
                raise
            db.close()  # a power cut left something to be taken back first, and that writes
            db = _connect(f"{uri}?mode=rw")
            db.execute("PRAGMA query_only = ON")
            _check(db, self.path)
        return db

    def close(self) -> None:
        """Write what is queued, let other processes write, and let go of the file."""
        if self._writer is not None:
            with self._lock:
                left, self._queue = self._queue, []
            if left:
                self._commits.put((left, None))
            self._commits.put(None)
            self._writer.join()
            self._database().close()
            self._writer = self._db = None
            self._asleep = True
            self._file_lock.release()
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _Holder(NamedTuple):
    run_id: str
    epoch: int
    owner: str


def _connect(uri: str, timeout: float | None = None) -> sqlite3.Connection:
    wait = BUSY_S if timeout is None else timeout
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=wait)


def _perform(db: sqlite3.Connection, jobs: list[Queued]) -> list[Told]:
    done: list[Told] = []
    for job, waiter, _ in jobs:
        try:
            done.append((waiter, job(db), None))
        except StoreError as error:  # found before anything of this job was written
            done.append((waiter, None, error))
    return done


def _roll_back(db: sqlite3.Connection) -> None:
    with contextlib.suppress(sqlite3.Error):
        db.rollback()


def _tables(db: sqlite3.Connection) -> bool:
    return bool(db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0])


def _check(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is not ours, or that a newer release wrote."""
    if not _tables(db):
        return
    ours = db.execute("PRAGMA application_id").fetchone()[0]
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if ours != APPLICATION_ID:
        db.close()
        raise StoreFormatError(f"{path} is a database of another program")
    if version > SCHEMA_VERSION:
        db.close()
        raise StoreFormatError(
            f"{path} has schema version {version}, this release knows {SCHEMA_VERSION}: use a newer agentfsm"
        )


def _take(db: sqlite3.Connection, run_id: str, owner: str, new: bool) -> tuple[int, int, str]:
    found = db.execute("SELECT epoch, seq, hash FROM run WHERE run_id = ?", (run_id,)).fetchone()
    if new and found is not None and found[1]:
        raise RunExistsError(f"there is a run {run_id!r} already")
    if new and found is None:
        db.execute("INSERT INTO run (run_id, hash) VALUES (?, ?)", (run_id, bytes.fromhex(START)))
        found = (0, 0, bytes.fromhex(START))
    if found is None:
        raise UnknownRunError(f"there is no run {run_id!r}")
    db.execute("UPDATE run SET epoch = epoch + 1, owner = ? WHERE run_id = ?", (owner, run_id))
    return found[0] + 1, found[1], found[2].hex()


def _append(db: sqlite3.Connection, lease: _Holder, rows: Sequence[Row], status: Status) -> None:
    first = rows[0].seq if rows else None
    last = rows[-1] if rows else None
    moved = db.execute(
        "UPDATE run SET seq = coalesce(?, seq), hash = coalesce(?, hash), status = ?,"
        " owner = CASE WHEN ? = 'running' THEN owner END"
        " WHERE run_id = ? AND epoch = ? AND seq + 1 = coalesce(?, seq + 1) AND owner IS NOT NULL"
        " AND (status <> 'finished' OR ? = 'finished') RETURNING id",
        (
            last and last.seq,
            last and bytes.fromhex(last.hash),
            status,
            status,
            lease.run_id,
            lease.epoch,
            first,
            status,
        ),
    ).fetchone()
    if moved is None:
        raise _stale(db, lease)
    high = moved[0] << 32
    db.executemany(
        "INSERT INTO journal (key, body, hash, hidden) VALUES (?, ?, ?, ?)",
        [(high | row.seq, row.body, bytes.fromhex(row.hash), row.hidden or None) for row in rows],
    )


def _stale(db: sqlite3.Connection, lease: _Holder) -> StoreError:
    found = db.execute("SELECT epoch, owner, seq, status FROM run WHERE run_id = ?", (lease.run_id,)).fetchone()
    if found is None:
        return UnknownRunError(f"there is no run {lease.run_id!r}")
    epoch, owner, seq, status = found
    if status == "finished":
        why = "is finished"
    elif epoch != lease.epoch or owner is None:
        why = f"was taken from {lease.owner}"
    else:
        why = f"has {seq} records, so another was to come next"
    return StaleLease(lease.run_id, owner, why)


def _redact(db: sqlite3.Connection, lease: _Holder, seq: int, hidden: str) -> None:
    held = db.execute(
        "SELECT id FROM run WHERE run_id = ? AND epoch = ? AND owner IS NOT NULL", (lease.run_id, lease.epoch)
    ).fetchone()
    if held is None:
        raise _stale(db, lease)
    db.execute("UPDATE journal SET hidden = ? WHERE key = ?", (hidden, held[0] << 32 | seq))


def _told(error: sqlite3.Error, path: Path) -> StoreError:
    code = getattr(error, "sqlite_errorname", "") or ""
    if code.startswith("SQLITE_FULL"):
        return StoreFullError(f"{path}: there is no room ({error}); the run can be taken up when there is")
    if code.startswith("SQLITE_NOTADB"):
        return StoreFormatError(f"{path} is no database")
    if code.startswith("SQLITE_BUSY"):
        return StoreLockedError(f"{path} is locked by another program ({error})")
    return StoreError(f"{path}: {error} ({code or 'no code'})")


def _tell(done: list[Told]) -> None:
    """Let those who wait know: one call into each event loop, or at once where this is theirs."""
    here = asyncio._get_running_loop()  # None in a thread of ours, where the public one raises
    by_loop: dict[asyncio.AbstractEventLoop, list[Told]] = {}
    for told in done:
        by_loop.setdefault(told[0].get_loop(), []).append(told)
    for loop, some in by_loop.items():
        if loop is here:
            _settle(some)
            continue
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, some)


def _settle(some: list[Told]) -> None:
    for waiter, value, error in some:
        if waiter.done():
            continue
        if error is None:
            waiter.set_result(value)
        else:
            waiter.set_exception(error)
