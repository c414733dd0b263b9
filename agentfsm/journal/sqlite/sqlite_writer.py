"""The single writer of a SQLite store: file lock, job queue, and group commits in a thread.

Queued jobs are executed in the event loop's thread, which takes microseconds, and committed in the writer thread,
which takes as long as the disk does. A thread that did both would compete with a busy loop for the GIL at every
statement. Jobs that are queued during a commit go into the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import agentfsm.journal.sqlite.sqlite_schema as sqlite_schema
from agentfsm.errors import StoreError, StoreLockedError

__all__ = ["FileLock", "Job", "SqliteWriter"]


LOCK_ATTEMPTS, ATTEMPTS_ONCE_NAMED, RETRY_DELAY_S = 50, 3, 0.001
"""Attempts to lock a file, attempts if the file names an owner, and seconds between attempts."""

if sys.platform == "win32":
    import msvcrt

    def _try_exclusive(descriptor: int) -> None:
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)  # far after the text, so that other processes can read that
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

    _try_shared = _try_exclusive

else:
    import fcntl

    def _try_exclusive(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _try_shared(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # any number of processes may check at once


class FileLock:
    """An exclusive lock on a file; the operating system releases it when the process ends, however it ends.

    Args:
        path: A separate lock file; a lock on the database itself would interfere with SQLite's locks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Acquire the lock.

        Raises:
            StoreLockedError: Another process holds it; the message names the process.
            StoreError: The lock file cannot be created.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(f"{self._path} cannot be written: {error.strerror}") from error
        name = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
        owner = _lock_or_owner(descriptor)
        if owner is not None:
            os.close(descriptor)
            raise StoreLockedError(
                f"{self._path.name.removesuffix('-lock')} is in use by {owner or 'another process'}: only one process "
                "at a time can write a SQLite store; use a server-based store for more"
            )
        os.write(descriptor, name)  # overwrites the name of a dead process; other processes read the first line
        os.ftruncate(descriptor, len(name))
        self._descriptor = descriptor

    def held_by_other(self) -> bool:
        """Whether another process holds the lock."""
        try:
            descriptor = os.open(self._path, os.O_RDWR)
        except OSError:
            return False
        try:
            _try_shared(descriptor)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def release(self) -> None:
        """Release the lock, if this process holds it."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)  # our name must not be read as the next owner's
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def _lock_or_owner(descriptor: int) -> str | None:
    """Lock a file, or return the name of its owner, empty if the file has none; None if it is locked now.

    It tries for up to 50 ms: another process may only be checking whether the file is locked, and a new owner may not
    have written its name over that of a dead process yet.
    """
    for attempt in range(1, LOCK_ATTEMPTS + 1):
        try:
            _try_exclusive(descriptor)
        except OSError:
            owner = _owner_name(descriptor)
            if owner and attempt >= ATTEMPTS_ONCE_NAMED:
                return owner
            time.sleep(RETRY_DELAY_S)
        else:
            return None
    return ""


def _owner_name(descriptor: int) -> str:
    if not hasattr(os, "pread"):
        return ""
    line, ended, _ = os.pread(descriptor, 200, 0).partition(b"\n")
    return line.decode(errors="replace") if ended else ""


CHECKPOINT_INTERVAL: Mapping[sqlite_schema.SynchronousLevel, int] = {"full": 64, "normal": 500}
"""Commits after which the writer thread checkpoints the log, by level. The log is then overwritten from its start,
which takes the disk half as long as appending to it. SQLite's own checkpoints depend on the number of pages, not of
commits, and happen in the thread that commits."""

BATCH_SIZE = 16
"""Queued jobs that start a commit at once, or half the number of runs if that is more: the disk then works for one half
of the runs while the other half computes."""

Job = Callable[[sqlite3.Connection], Any]
QueuedJob = tuple[Job, "asyncio.Future[Any]", bool]
Completion = tuple["asyncio.Future[Any]", Any, Exception | None]
Batch = tuple[list[QueuedJob], list[Completion] | None, bool]  # the flag: a thread waits until the commit starts


class SqliteWriter:
    """The only writer of a file, from its first job on.

    Args:
        path: The SQLite file.
        level: What a commit waits for.
    """

    def __init__(self, path: Path, level: sqlite_schema.SynchronousLevel) -> None:
        self._path = path
        self._level: sqlite_schema.SynchronousLevel = level
        self._file_lock = FileLock(path.with_name(path.name + "-lock"))
        self._lock = threading.Lock()
        self._queue: list[QueuedJob] = []
        self._state: Literal["idle", "due", "busy"] = (
            "idle"  # due: jobs are queued; busy: jobs are being executed or committed
        )
        self._flush_loop: asyncio.AbstractEventLoop | None = None  # the loop that will call ``_on_flush``
        self._commits_since_checkpoint = 0  # commits since the last checkpoint of the log
        self._commit_started: SimpleQueue[None] = SimpleQueue()  # signals that a commit has started
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._db: sqlite3.Connection | None = None

    def owned_by_other_process(self) -> bool:
        """Whether another process writes the file."""
        return self._thread is None and self._file_lock.held_by_other()

    def start(self) -> None:
        """Lock the file and start the writer thread, if that is not done yet.

        Raises:
            StoreLockedError: Another process writes the file; the message names it.
            StoreError: The file cannot be written.
        """
        with self._lock:
            if self._thread is not None:
                return
            self._file_lock.acquire()
            try:
                self._db = sqlite_schema.open_writer(self._path, self._level)
            except BaseException:
                self._file_lock.release()
                raise
            self._thread = threading.Thread(target=self._commit_loop, name="agentfsm-store", daemon=True)
            self._thread.start()

    def submit(self, job: Job, *, active_runs: int = 2, truncate_wal: bool = False) -> asyncio.Future[Any]:
        """Queue a job.

        Args:
            job: Writes to the connection, or raises a ``StoreError`` before it has written anything.
            active_runs: Number of runs that could share a commit now; with one, the commit starts at once.
            truncate_wal: Whether to truncate the log, so that nothing of what the job overwrites is left in it.

        Returns:
            A future that is done when the job's writes are durable; its result is the job's. It fails with a
            ``StoreError`` if the store cannot write.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        if self._thread is None:
            try:
                self.start()
            except StoreError as error:
                done.set_exception(error)
                return done
        with self._lock:
            self._queue.append((job, done, truncate_wal))
            if self._state == "idle":
                self._state = "due"
            due = self._state == "due"
            enough = active_runs < 2 or len(self._queue) >= max(BATCH_SIZE, active_runs // 2)
            if due and not enough and self._flush_loop is not loop:
                self._flush_loop = loop
                loop.call_soon(
                    self._on_flush
                )  # after all callbacks that are ready now, so that their jobs share the commit
        if due and enough:
            self._write_batch()
        return done

    def _on_flush(self) -> None:
        self._flush_loop = None
        self._write_batch()

    def _write_batch(self, *, in_writer_thread: bool = False) -> None:
        """Execute what is queued, and hand it to the writer thread to commit.

        Args:
            in_writer_thread: Whether the caller is the writer thread, not an event loop's.
        """
        with self._lock:
            if self._state != "due":  # another thread was faster
                return
            self._state = "busy"
            jobs, self._queue = self._queue, []
        db = self._connection()
        try:
            db.execute("BEGIN IMMEDIATE")
            done = _run_jobs(db, jobs)
        except Exception:  # a lock, or a faulty job: the writer thread finds out which
            sqlite_schema.rollback(db)
            self._batches.put((jobs, None, False))
            return
        self._commits_since_checkpoint = (self._commits_since_checkpoint + 1) % CHECKPOINT_INTERVAL[self._level]
        if self._level == "normal" and self._commits_since_checkpoint:  # the commit does not wait for the disk
            self._complete_batch(jobs, done, None if in_writer_thread else asyncio.get_running_loop())
            return
        wait = len(jobs) > 1 and not in_writer_thread  # a loop with many runs would keep the GIL, and delay the commit
        self._batches.put((jobs, done, wait))
        if wait:
            self._commit_started.get()

    def _complete_batch(
        self,
        jobs: list[QueuedJob],
        completions: list[Completion] | None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Commit a batch, schedule the next one, and resolve the futures of the jobs.

        Args:
            jobs: The jobs.
            completions: Their results, or None if they are not executed yet.
            loop: The running event loop; None in the writer thread.
        """
        try:
            completions = self._commit(self._connection(), jobs, completions)
        except Exception as error:  # every future must be resolved, whatever happens here
            if self._db is not None:
                sqlite_schema.rollback(self._db)
            reason = StoreError(f"{self._path}: {type(error).__name__}: {error}")
            completions = [(future, None, reason) for _, future, _ in jobs]
        with self._lock:
            next_loop = self._queue[0][1].get_loop() if self._queue else None
            self._flush_loop = next_loop or self._flush_loop
            self._state = "idle" if next_loop is None else "due"
        if next_loop is not None:  # first of all: resolved futures will keep the loop busy
            try:
                next_loop.call_soon_threadsafe(self._on_flush)
            except RuntimeError:  # that loop is closed
                self._flush_loop = None
                self._write_batch(in_writer_thread=True)
        _resolve_futures(completions, loop)

    def _commit_loop(self) -> None:
        while (batch := self._batches.get()) is not None:
            jobs, done, awaited = batch
            if awaited:
                self._commit_started.put(None)
            self._complete_batch(jobs, done)
            del batch, jobs, done  # so that nothing of this batch stays alive until the next

    def _commit(
        self, db: sqlite3.Connection, jobs: list[QueuedJob], completions: list[Completion] | None
    ) -> list[Completion]:
        try:
            if completions is None:
                db.execute(f"PRAGMA busy_timeout = {int(sqlite_schema.BUSY_TIMEOUT_S * 1000)}")
                try:
                    db.execute("BEGIN IMMEDIATE")
                finally:
                    db.execute("PRAGMA busy_timeout = 0")
                completions = _run_jobs(db, jobs)
            db.execute("COMMIT")
            if any(truncate_wal for _, _, truncate_wal in jobs):  # what was overwritten is in the log too
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            elif not self._commits_since_checkpoint:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            sqlite_schema.rollback(db)
            if len(jobs) > 1:  # one of them may be the cause: commit each on its own
                return [completion for job in jobs for completion in self._commit(db, [job], None)]
            return [(future, None, sqlite_schema.as_store_error(error, self._path)) for _, future, _ in jobs]
        return completions

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreError(f"{self._path} is closed")
        return self._db

    def close(self) -> None:
        """Write what is queued, and close the file; other processes can then write it."""
        if self._thread is None:
            return
        with self._lock:
            jobs, self._queue, self._state = self._queue, [], "busy"
        if jobs:
            self._batches.put((jobs, None, False))
        self._batches.put(None)
        self._thread.join()
        self._connection().close()
        self._thread = self._db = None
        self._state = "idle"
        self._file_lock.release()


def _run_jobs(db: sqlite3.Connection, jobs: list[QueuedJob]) -> list[Completion]:
    done: list[Completion] = []
    for job, future, _ in jobs:
        try:
            done.append((future, job(db), None))
        except StoreError as error:  # raised before the job wrote anything
            done.append((future, None, error))
    return done


def _resolve_futures(completions: list[Completion], running_loop: asyncio.AbstractEventLoop | None) -> None:
    """Resolve futures, with one call into each event loop; at once for those of the running loop."""
    if len(completions) == 1 and completions[0][0].get_loop() is running_loop:
        _set_results(completions)
        return
    by_loop: dict[asyncio.AbstractEventLoop, list[Completion]] = {}
    for completion in completions:
        by_loop.setdefault(completion[0].get_loop(), []).append(completion)
    for loop, its_completions in by_loop.items():
        if loop is running_loop:
            _set_results(its_completions)
            continue
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_set_results, its_completions)


def _set_results(completions: list[Completion]) -> None:
    for future, value, error in completions:
        if future.done():
            continue
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
