"""Writes what the runs of a process have for one SQLite file, and commits it together.

What is queued is written in the thread of the event loop, which takes microseconds, and committed in a thread of
our own, which takes as long as the disk does. A thread that did both would have to win the interpreter's lock
back at every statement, against a loop that is busy. Whatever is queued while a commit is on its way goes into
the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from agentfsm.errors import StoreError
from agentfsm.journal import sqlite_file
from agentfsm.journal.filelock import FileLock

__all__ = ["Job", "Writer"]

TIDY_AFTER: Mapping[sqlite_file.Level, int] = {"full": 64, "normal": 500}
"""Commits after which the thread of our own brings the log into the file, so that it is written from its start
again: to write where a log has been takes the disk half as long as to make it longer. If that were left to
SQLite, it would come as often for few large commits as for many small ones, and in whichever thread commits."""

ENOUGH = 16
"""Jobs that go into a commit without waiting for more, or half as many as there are runs, whichever is more: so the
disk works for one half of the runs while the other half does."""

Job = Callable[[sqlite3.Connection], Any]
Queued = tuple[Job, "asyncio.Future[Any]", bool]
Told = tuple["asyncio.Future[Any]", Any, Exception | None]
Handed = tuple[list[Queued], list[Told] | None, bool]  # with whether somebody waits for the commit to begin


class Writer:
    """The one writer of a file, from its first job on.

    Args:
        path: The file.
        level: What a commit waits for.
    """

    def __init__(self, path: Path, level: sqlite_file.Level) -> None:
        self._path = path
        self._level: sqlite_file.Level = level
        self._file_lock = FileLock(path.with_name(path.name + "-lock"))
        self._lock = threading.Lock()
        self._queue: list[Queued] = []
        self._state: Literal["idle", "due", "busy"] = "idle"  # due: queued; busy: being written or committed
        self._called_in: asyncio.AbstractEventLoop | None = None  # the loop that will call ``_called``
        self._untidied = 0  # commits since the log was last brought into the file
        self._begun: SimpleQueue[None] = SimpleQueue()  # says that a commit has begun
        self._commits: SimpleQueue[Handed | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._db: sqlite3.Connection | None = None

    def elsewhere(self) -> bool:
        """Whether another process writes the file."""
        return self._thread is None and self._file_lock.held()

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
                self._db = sqlite_file.open_writer(self._path, self._level)
            except BaseException:
                self._file_lock.release()
                raise
            self._thread = threading.Thread(target=self._commit_all, name="agentfsm-store", daemon=True)
            self._thread.start()

    def do(self, job: Job, *, runs: int = 2, wipe: bool = False) -> asyncio.Future[Any]:
        """Have a job done; what comes back is done when it is durable.

        Args:
            job: Writes, or raises a ``StoreError`` before it has written anything.
            runs: How many runs may share a commit now; with one, there is nothing to wait for.
            wipe: Whether what it overwrites must not be found in the file any more.
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
            self._queue.append((job, done, wipe))
            if self._state == "idle":
                self._state = "due"
            due = self._state == "due"
            enough = runs < 2 or len(self._queue) >= max(ENOUGH, runs // 2)
            if due and not enough and self._called_in is not loop:
                self._called_in = loop
                loop.call_soon(self._called)  # behind whatever else is ready now, so it goes into the same commit
        if due and enough:
            self._write()
        return done

    def _called(self) -> None:
        self._called_in = None
        self._write()

    def _write(self, *, ours: bool = False) -> None:
        """Write what is queued, and have it committed.

        Args:
            ours: Whether this is the thread of our own, and no event loop's.
        """
        with self._lock:
            if self._state != "due":  # somebody was quicker
                return
            self._state = "busy"
            jobs, self._queue = self._queue, []
        db = self._database()
        try:
            db.execute("BEGIN IMMEDIATE")
            done = _perform(db, jobs)
        except Exception:  # another program holds a lock, or a job is at fault: take the time to find out
            sqlite_file.roll_back(db)
            self._commits.put((jobs, None, False))
            return
        self._untidied = (self._untidied + 1) % TIDY_AFTER[self._level]
        if self._level == "normal" and self._untidied:  # there is no disk to wait for
            self._finish(jobs, done)
            return
        busy = len(jobs) > 1 and not ours  # a loop with many runs would keep the interpreter's lock, and the disk wait
        self._commits.put((jobs, done, busy))
        if busy:
            self._begun.get()

    def _finish(self, jobs: list[Queued], done: list[Told] | None) -> None:
        """Commit what was written, tell those who wait, and have what was queued meanwhile written."""
        told: list[Told]
        try:
            told = self._commit(self._database(), jobs, done)
        except Exception as error:  # nobody may wait for ever, whatever happens here
            if self._db is not None:
                sqlite_file.roll_back(self._db)
            why = StoreError(f"{self._path}: {type(error).__name__}: {error}")
            told = [(waiter, None, why) for _, waiter, _ in jobs]
        with self._lock:
            waiting = self._queue[0][1].get_loop() if self._queue else None
            self._called_in = waiting or self._called_in
            self._state = "idle" if waiting is None else "due"
        if waiting is not None:  # before those are told who will be busy then
            try:
                waiting.call_soon_threadsafe(self._called)
            except RuntimeError:  # that loop is closed, and nobody waits there any more
                self._called_in = None
                self._write(ours=True)
        _tell(told)

    def _commit_all(self) -> None:
        while (handed := self._commits.get()) is not None:
            jobs, done, awaited = handed
            if awaited:
                self._begun.put(None)
            self._finish(jobs, done)
            del handed, jobs, done  # nothing of theirs is kept alive until the next

    def _commit(self, db: sqlite3.Connection, jobs: list[Queued], done: list[Told] | None) -> list[Told]:
        try:
            if done is None:
                db.execute(f"PRAGMA busy_timeout = {int(sqlite_file.BUSY_S * 1000)}")
                try:
                    db.execute("BEGIN IMMEDIATE")
                finally:
                    db.execute("PRAGMA busy_timeout = 0")
                done = _perform(db, jobs)
            db.execute("COMMIT")
            if any(wipe for _, _, wipe in jobs):  # what was overwritten stands in the write-ahead log too
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            elif not self._untidied:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            sqlite_file.roll_back(db)
            if len(jobs) > 1:  # one of them may be to blame: each on its own
                return [told for job in jobs for told in self._commit(db, [job], None)]
            return [(waiter, None, sqlite_file.told(error, self._path)) for _, waiter, _ in jobs]
        return done

    def _database(self) -> sqlite3.Connection:
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
            self._commits.put((left, None, False))
        self._commits.put(None)
        self._thread.join()
        self._database().close()
        self._thread = self._db = None
        self._state = "idle"
        self._file_lock.release()


def _perform(db: sqlite3.Connection, jobs: list[Queued]) -> list[Told]:
    done: list[Told] = []
    for job, waiter, _ in jobs:
        try:
            done.append((waiter, job(db), None))
        except StoreError as error:  # found before anything of this job was written
            done.append((waiter, None, error))
    return done


def _tell(done: list[Told]) -> None:
    """Let those who wait know: one call into each event loop, or at once where this is theirs."""
    here = asyncio._get_running_loop()  # None in a thread of ours, where the public one raises
    if len(done) == 1 and done[0][0].get_loop() is here:
        _settle(done)
        return
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
