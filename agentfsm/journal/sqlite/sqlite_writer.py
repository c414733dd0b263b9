"""The single writer of a SQLite store: file lock, job queue, and group commits in a thread.

Queued jobs are executed in the event loop's thread, which takes microseconds, and committed in a thread of our own,
which takes as long as the disk does. A thread that did both would have to win the GIL back at every statement from
a busy loop. Whatever is queued during a commit goes into the next one.
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

from agentfsm.errors import StoreError, StoreLockedError
from agentfsm.journal.sqlite import sqlite_schema

__all__ = ["FileLock", "Job", "SqliteWriter"]


LOCK_ATTEMPTS, ATTEMPTS_ONCE_NAMED, RETRY_DELAY_S = 50, 3, 0.001
"""How often a lock is tried, how often it is where a name stands in the file, and the seconds in between."""

if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)  # far behind the text, which others may then read
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

    _ask = _lock

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _ask(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # any number may ask at once


class FileLock:
    """The lock; the operating system lets go of it when its process ends, however that ends.

    Args:
        path: A file of its own; locking a database itself would disturb SQLite's locks on it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock, or say who has it.

        Raises:
            StoreLockedError: Somebody else has it; the message names them.
            StoreError: The file cannot be made.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(f"{self._path} cannot be written: {error.strerror}") from error
        name = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
        holder = _lock_or_holder(descriptor)
        if holder is not None:
            os.close(descriptor)
            raise StoreLockedError(
                f"{self._path.name.removesuffix('-lock')} is written by {holder or 'another process'}: one process at "
                "a time writes a SQLite store; use a store on a server for more"
            )
        os.write(descriptor, name)  # over what a dead process may have left; others read the first line
        os.ftruncate(descriptor, len(name))
        self._descriptor = descriptor

    def held_by_other(self) -> bool:
        """Whether somebody else has it."""
        try:
            descriptor = os.open(self._path, os.O_RDWR)
        except OSError:
            return False
        try:
            _ask(descriptor)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def release(self) -> None:
        """Let go of it."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)  # who comes next is not to be taken for us
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def _lock_or_holder(descriptor: int) -> str | None:
    """Lock a file, or tell the name that stands in it.

    We try for a moment: somebody may only be asking whether it is held, and whoever has just got it is about to
    write its name over that of a dead process.
    """
    for attempt in range(1, LOCK_ATTEMPTS + 1):
        try:
            _lock(descriptor)
        except OSError:
            holder = _holder_name(descriptor)
            if holder and attempt >= ATTEMPTS_ONCE_NAMED:
                return holder
            time.sleep(RETRY_DELAY_S)
        else:
            return None
    return ""


def _holder_name(descriptor: int) -> str:
    if not hasattr(os, "pread"):
        return ""
    line, ended, _ = os.pread(descriptor, 200, 0).partition(b"\n")
    return line.decode(errors="replace") if ended else ""


CHECKPOINT_INTERVAL: Mapping[sqlite_schema.SynchronousLevel, int] = {"full": 64, "normal": 500}
"""Commits after which the thread of our own brings the log into the file, so that it is written from its start
again: to write where a log has been takes the disk half as long as to make it longer. If that were left to
SQLite, it would come as often for few large commits as for many small ones, and in whichever thread commits."""

BATCH_SIZE = 16
"""Jobs that go into a commit without waiting for more, or half as many as there are runs, whichever is more: so the
disk works for one half of the runs while the other half does."""

Job = Callable[[sqlite3.Connection], Any]
QueuedJob = tuple[Job, "asyncio.Future[Any]", bool]
Completion = tuple["asyncio.Future[Any]", Any, Exception | None]
Batch = tuple[list[QueuedJob], list[Completion] | None, bool]  # with whether somebody waits for the commit to begin


class SqliteWriter:
    """The one writer of a file, from its first job on.

    Args:
        path: The file.
        level: What a commit waits for.
    """

    def __init__(self, path: Path, level: sqlite_schema.SynchronousLevel) -> None:
        self._path = path
        self._level: sqlite_schema.SynchronousLevel = level
        self._file_lock = FileLock(path.with_name(path.name + "-lock"))
        self._lock = threading.Lock()
        self._queue: list[QueuedJob] = []
        self._state: Literal["idle", "due", "busy"] = "idle"  # due: queued; busy: being written or committed
        self._flush_loop: asyncio.AbstractEventLoop | None = None  # the loop that will call ``_called``
        self._commits_since_checkpoint = 0  # commits since the log was last brought into the file
        self._commit_started: SimpleQueue[None] = SimpleQueue()  # says that a commit has begun
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._db: sqlite3.Connection | None = None

    def owned_by_other_process(self) -> bool:
        """Whether another process writes the file."""
        return self._thread is None and self._file_lock.held_by_other()

    def start(self) -> None:
        """Become the file's writer.

        Raises:
            StoreLockedError: Somebody else is.
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
        """Have a job done; what comes back is done when it is durable.

        Args:
            job: Writes, or raises a ``StoreError`` before it has written anything.
            active_runs: How many runs may share a commit now; with one, there is nothing to wait for.
            truncate_wal: Whether what it overwrites must not be found in the file any more.
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
                loop.call_soon(self._on_flush)  # behind whatever else is ready now, so it goes into the same commit
        if due and enough:
            self._write_batch()
        return done

    def _on_flush(self) -> None:
        self._flush_loop = None
        self._write_batch()

    def _write_batch(self, *, in_writer_thread: bool = False) -> None:
        """Write what is queued, and have it committed.

        Args:
            in_writer_thread: Whether this is the thread of our own, and no event loop's.
        """
        with self._lock:
            if self._state != "due":  # somebody was quicker
                return
            self._state = "busy"
            jobs, self._queue = self._queue, []
        db = self._connection()
        try:
            db.execute("BEGIN IMMEDIATE")
            done = _run_jobs(db, jobs)
        except Exception:  # another program holds a lock, or a job is at fault: take the time to find out
            sqlite_schema.rollback(db)
            self._batches.put((jobs, None, False))
            return
        self._commits_since_checkpoint = (self._commits_since_checkpoint + 1) % CHECKPOINT_INTERVAL[self._level]
        if self._level == "normal" and self._commits_since_checkpoint:  # there is no disk to wait for
            self._complete_batch(jobs, done)
            return
        busy = (
            len(jobs) > 1 and not in_writer_thread
        )  # a loop with many runs would keep the interpreter's lock, and the disk wait
        self._batches.put((jobs, done, busy))
        if busy:
            self._commit_started.get()

    def _complete_batch(self, jobs: list[QueuedJob], completions: list[Completion] | None) -> None:
        """Commit what was written, tell those who wait, and have what was queued meanwhile written."""
        told: list[Completion]
        try:
            told = self._commit(self._connection(), jobs, completions)
        except Exception as error:  # nobody may wait for ever, whatever happens here
            if self._db is not None:
                sqlite_schema.rollback(self._db)
            why = StoreError(f"{self._path}: {type(error).__name__}: {error}")
            told = [(waiter, None, why) for _, waiter, _ in jobs]
        with self._lock:
            waiting = self._queue[0][1].get_loop() if self._queue else None
            self._flush_loop = waiting or self._flush_loop
            self._state = "idle" if waiting is None else "due"
        if waiting is not None:  # before those are told who will be busy then
            try:
                waiting.call_soon_threadsafe(self._on_flush)
            except RuntimeError:  # that loop is closed, and nobody waits there any more
                self._flush_loop = None
                self._write_batch(in_writer_thread=True)
        _resolve_futures(told)

    def _commit_loop(self) -> None:
        while (handed := self._batches.get()) is not None:
            jobs, done, awaited = handed
            if awaited:
                self._commit_started.put(None)
            self._complete_batch(jobs, done)
            del handed, jobs, done  # nothing of theirs is kept alive until the next

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
            if any(wipe for _, _, wipe in jobs):  # what was overwritten stands in the write-ahead log too
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            elif not self._commits_since_checkpoint:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            sqlite_schema.rollback(db)
            if len(jobs) > 1:  # one of them may be to blame: each on its own
                return [told for job in jobs for told in self._commit(db, [job], None)]
            return [(waiter, None, sqlite_schema.as_store_error(error, self._path)) for _, waiter, _ in jobs]
        return completions

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreError(f"{self._path} is closed")
        return self._db

    def close(self) -> None:
        """Write what is queued, let other processes write, and let go of the file."""
        if self._thread is None:
            return
        with self._lock:
            left, self._queue, self._state = self._queue, [], "busy"
        if left:
            self._batches.put((left, None, False))
        self._batches.put(None)
        self._thread.join()
        self._connection().close()
        self._thread = self._db = None
        self._state = "idle"
        self._file_lock.release()


def _run_jobs(db: sqlite3.Connection, jobs: list[QueuedJob]) -> list[Completion]:
    done: list[Completion] = []
    for job, waiter, _ in jobs:
        try:
            done.append((waiter, job(db), None))
        except StoreError as error:  # found before anything of this job was written
            done.append((waiter, None, error))
    return done


def _resolve_futures(completions: list[Completion]) -> None:
    """Let those who wait know: one call into each event loop, or at once where this is theirs."""
    here = asyncio._get_running_loop()  # None in a thread of ours, where the public one raises
    if len(completions) == 1 and completions[0][0].get_loop() is here:
        _set_results(completions)
        return
    by_loop: dict[asyncio.AbstractEventLoop, list[Completion]] = {}
    for told in completions:
        by_loop.setdefault(told[0].get_loop(), []).append(told)
    for loop, some in by_loop.items():
        if loop is here:
            _set_results(some)
            continue
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_set_results, some)


def _set_results(completions: list[Completion]) -> None:
    for waiter, value, error in completions:
        if waiter.done():
            continue
        if error is None:
            waiter.set_result(value)
        else:
            waiter.set_exception(error)
