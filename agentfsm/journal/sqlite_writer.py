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
from collections.abc import Callable, Generator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from agentfsm.errors import StoreError
from agentfsm.journal import sqlite_file
from agentfsm.journal.filelock import FileLock

__all__ = ["Job", "Writer"]

TIDY_AFTER = 500
"""Commits that do not wait for the disk, after which the thread of our own brings the log into the file. If it
were left to SQLite, a commit in the event loop's thread would wait for the disk then."""

ENOUGH = 16
"""Jobs that go into a commit without waiting for more, so that the disk works while other runs do."""

Job = Callable[[sqlite3.Connection], Any]
Queued = tuple[Job, "asyncio.Future[Any]", bool]
Told = tuple["asyncio.Future[Any]", Any, Exception | None]


class _Durable(asyncio.Future[Any]):
    """Done when what was queued is durable.

    Whoever awaits it, and has nobody to share a commit with, need not wait for a turn of the event loop first,
    which may take longer than to write it.
    """

    __slots__ = ("hurry",)
    hurry: Callable[[], None]

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done():
            self.hurry()
        return super().__await__()


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
        self._unasked = 0  # commits since the disk was last asked
        self._commits: SimpleQueue[tuple[list[Queued], list[Told] | None] | None] = SimpleQueue()
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

    def do(self, job: Job, *, alone: bool = False, wipe: bool = False) -> asyncio.Future[Any]:
        """Have a job done; what comes back is done when it is durable.

        Args:
            job: Writes, or raises a ``StoreError`` before it has written anything.
            alone: Whether nobody else writes now, so that there is nobody to share a commit with.
            wipe: Whether what it overwrites must not be found in the file any more.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any]
        if alone:
            done = durable = _Durable(loop=loop)
            durable.hurry = self._hurry
        else:
            done = loop.create_future()
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
            if self._state == "due" and self._called_in is not loop:
                self._called_in = loop
                loop.call_soon(self._called)  # behind whatever else is ready now, so it goes into the same commit
            enough = self._state == "due" and len(self._queue) >= ENOUGH
        if enough:
            self._write()
        return done

    def _called(self) -> None:
        self._called_in = None
        self._write()

    def _hurry(self) -> None:
        """Write now what was to be written soon; where a commit is on its way, that comes first."""
        if self._state == "due":
            self._write()

    def _write(self) -> None:
        """Write what is queued, and have it committed."""
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
            self._commits.put((jobs, None))
            return
        self._unasked = 0 if self._level == "full" else (self._unasked + 1) % TIDY_AFTER
        if self._unasked:  # there is no disk to wait for
            self._finish(jobs, done)
        else:
            self._commits.put((jobs, done))

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
        _tell(told)
        with self._lock:
            waiting = self._queue[0][1].get_loop() if self._queue else None
            self._called_in = waiting or self._called_in
            self._state = "idle" if waiting is None else "due"
        if waiting is not None:
            try:
                waiting.call_soon_threadsafe(self._called)
            except RuntimeError:  # that loop is closed, and nobody waits there any more
                self._called()

    def _commit_all(self) -> None:
        while (told := self._commits.get()) is not None:
            self._finish(*told)
            del told

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
            elif self._level == "normal" and not self._unasked:
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
            self._commits.put((left, None))
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
