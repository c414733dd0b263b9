"""The single writer of a SQLite store: job queue, and group commits in a thread.

Queued jobs are executed in the event loop's thread, which takes microseconds, and committed in the writer thread,
which takes as long as the disk does. That thread opens the file as well: another process may hold it for a moment, and
the tables may have to be migrated. A thread that did both would compete with a busy loop for the GIL at every
statement. Jobs that are queued during a commit go into the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import agentfsm.journal.sqlite.sqlite_schema as sqlite_schema
from agentfsm.errors import StoreError, StoreMovedError
from agentfsm.journal.sqlite.owner_socket import OwnerSocket
from agentfsm.journal.sqlite.store_file import StoreFile, after_fork, leak

CHECKPOINT_INTERVAL = 500
"""Commits after which the writer thread checkpoints the log, which is then overwritten from its start. A checkpoint
waits for the disk three times, once of them for a file that has grown, so it costs as much as many commits. SQLite's
own checkpoints depend on the number of pages, not of commits, and happen in the thread that commits."""

BATCH_SIZE = 16
"""Queued jobs that start a commit at once, or half the number of runs if that is more: the disk then works for one half
of the runs while the other half computes."""

Job = Callable[[sqlite3.Connection], Any]
QueuedJob = tuple[Job, "asyncio.Future[Any]", bool]
Completion = tuple["asyncio.Future[Any]", Any, Exception | None]
Batch = tuple[list[QueuedJob], list[Completion] | None, bool]  # the flag: a thread waits until the commit starts


class SqliteWriter:
    """The only writer of a file, from its first job on."""

    def __init__(self, file: StoreFile, level: sqlite_schema.SynchronousLevel, serving: OwnerSocket) -> None:
        self._file = file
        self._serving = serving
        self._closing = False
        self._path = file.given
        self._level: sqlite_schema.SynchronousLevel = level
        self._lock = threading.Lock()
        self._queue: list[QueuedJob] = []
        self._state: Literal["idle", "opening", "due", "busy"] = (
            "idle"  # due: jobs are queued; busy: jobs are being executed or committed
        )
        self._opened: Future[None] | None = None  # done when the writer thread has opened the file
        self._flush_loop: asyncio.AbstractEventLoop | None = None  # the loop that will call ``_on_flush``
        self._commits_since_checkpoint = 0  # commits since the last checkpoint of the log
        self._compactions: list[asyncio.Future[None]] = []  # to be resolved when the file is compacted
        self._commit_started: SimpleQueue[None] = SimpleQueue()  # signals that a commit has started
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._db: sqlite3.Connection | None = None
        after_fork(self)

    def owned_by_other_process(self) -> bool:
        """Whether another process writes the file. It waits if this one is about to, so call it in a thread."""
        opened = self._opened
        if opened is not None and opened.exception() is None:
            return False
        return self._file.lock.held_by_other()

    def start(self, *, briefly: bool = False) -> None:
        """Lock and open the file, if that is not done yet; ``started`` does so without blocking an event loop.

        Raises:
            StoreLockedError: Another process writes the file; the message names it.
            StoreMovedError: Another file has taken the place of the one that was read.
            StoreError: The file cannot be written, has hard links, or is open in the process that forked this one.
        """
        self._file.check_process()
        with self._lock:
            opened = self._opened or self._start_thread(briefly)
        opened.result()

    async def started(self, *, briefly: bool = False) -> None:
        """Lock and open the file without blocking the event loop; arguments and errors as for ``start``."""
        self._file.check_process()
        with self._lock:
            opened = asyncio.wrap_future(self._opened or self._start_thread(briefly))
        try:
            await asyncio.shield(opened)
        except asyncio.CancelledError:  # whoever is cancelled may close the file, which has to be open for that
            await asyncio.wait([opened])
            raise

    def _start_thread(self, briefly: bool) -> Future[None]:
        """Start the writer thread; the caller holds the lock of the queue."""
        opened = self._opened = Future[None]()
        self._state = "opening"
        self._thread = threading.Thread(target=self._run, args=(opened, briefly), name="agentfsm-store", daemon=True)
        self._thread.start()
        return opened

    def _run(self, opened: Future[None], briefly: bool) -> None:
        """Open the file, and commit what is queued until the file is closed."""
        try:
            self._file.check_openable()
            self._file.lock.acquire(briefly=briefly)
            with self._file.opening:
                self._db = sqlite_schema.open_writer(self._file.path, self._level)
            self._file.opened(to_write=True)
            self._serving.start()
        except Exception as error:
            self._disconnect()
            with self._lock:
                jobs, self._queue, self._state = self._queue, [], "idle"
                self._opened = self._thread = None
            opened.set_exception(error)
            _resolve_futures([(future, None, error) for _, future, _ in jobs], None)
            return
        self._schedule_batch(opened)
        while (batch := self._batches.get()) is not None:
            jobs, done, awaited = batch
            if awaited:
                self._commit_started.put(None)
            self._complete_batch(jobs, done)
            del batch, jobs, done  # so that nothing of this batch stays alive until the next

    @property
    def is_started(self) -> bool:
        """Whether this process writes the file."""
        opened = self._opened
        return opened is not None and opened.done()

    def close_if_idle(self) -> None:
        """Close the file if nothing is queued: it was needed for a moment only."""
        with self._lock:
            idle = self._state == "idle" and not self._queue
        if idle:
            self.close()

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
        try:
            self._file.check_process()
        except StoreError as error:
            done.set_exception(error)
            return done
        with self._lock:
            if self._closing:
                done.set_exception(StoreError(f"{self._path} is being closed"))
                return done
            if self._opened is None:
                self._start_thread(briefly=False)
            self._queue.append((job, done, truncate_wal))
            if self._state == "idle":
                self._state = "due"
            due = self._state == "due"
            enough = active_runs < 2 or len(self._queue) >= max(BATCH_SIZE, active_runs // 2)
            if due and not enough and self._flush_loop is not loop:
                self._flush_loop = loop
                # After all callbacks that are ready now, so that their jobs share the commit.
                loop.call_soon(self._on_flush)
        if due and enough:
            self._write_batch()
        return done

    def _on_flush(self) -> None:
        self._flush_loop = None
        self._write_batch()

    def _write_batch(self, *, in_writer_thread: bool = False) -> None:
        """Execute what is queued, and hand it to the writer thread to commit."""
        with self._lock:
            if self._state != "due":  # another thread was faster
                return
            self._state = "busy"
            jobs, self._queue = self._queue, []
        db = _require_open(self._db, self._path)
        try:
            db.execute("BEGIN IMMEDIATE")
            done = _run_jobs(db, jobs)
        except Exception:  # a lock, or a faulty job: the writer thread finds out which
            sqlite_schema.rollback(db)
            self._batches.put((jobs, None, False))
            return
        self._commits_since_checkpoint = (self._commits_since_checkpoint + 1) % CHECKPOINT_INTERVAL
        quick = self._level == "normal" and self._commits_since_checkpoint and not self._compactions
        if quick:  # the commit does not wait for the disk
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
        """Commit a batch, schedule the next one, and resolve the futures of the jobs."""
        try:
            completions = self._commit(_require_open(self._db, self._path), jobs, completions)
        except Exception as error:  # every future must be resolved, whatever happens here
            if self._db is not None:
                sqlite_schema.rollback(self._db)
            reason = StoreError(f"{self._path}: {type(error).__name__}: {error}")
            completions = [(future, None, reason) for _, future, _ in jobs]
        self._schedule_batch()  # first of all: resolved futures will keep the loop busy
        _resolve_futures(completions, loop)

    def _schedule_batch(self, opened: Future[None] | None = None) -> None:
        """Have what was queued in the meantime written by its event loop.

        Args:
            opened: Tells that the file is open, in the same moment: whoever waited for it may close it if it is idle.
        """
        with self._lock:
            next_loop = self._queue[0][1].get_loop() if self._queue else None
            self._flush_loop = next_loop or self._flush_loop
            self._state = "idle" if next_loop is None else "due"
            if opened is not None:
                opened.set_result(None)
        if next_loop is not None:
            try:
                next_loop.call_soon_threadsafe(self._on_flush)
            except RuntimeError:  # that loop is closed
                self._flush_loop = None
                self._write_batch(in_writer_thread=True)

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
            self._compact(db)
            if any(truncate_wal for _, _, truncate_wal in jobs):  # what was overwritten is in the log too
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            elif not self._commits_since_checkpoint:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            self._file.check_unmoved()
        except StoreMovedError as moved:
            return [(future, None, error or moved) for future, _, error in completions or ()]
        except sqlite3.Error as error:
            sqlite_schema.rollback(db)
            if len(jobs) > 1:  # one of them may be the cause: commit each on its own
                return [completion for job in jobs for completion in self._commit(db, [job], None)]
            return [(future, None, sqlite_schema.as_store_error(error, self._path)) for _, future, _ in jobs]
        return completions

    def _compact(self, db: sqlite3.Connection) -> None:
        """Rewrite the file without its free pages, if that is asked for."""
        if not self._compactions:
            return
        with self._lock:
            waiting, self._compactions = self._compactions, []
        error: Exception | None = None
        try:
            db.execute("VACUUM")
        except sqlite3.Error as failed:
            error = sqlite_schema.as_store_error(failed, self._path)
        _resolve_futures([(future, None, error) for future in waiting], None)

    async def compact(self) -> None:
        """Rewrite the file without its free pages, and truncate the log; in the writer thread, while runs wait.

        Raises:
            StoreError: The file cannot be written, or there is no space for a second copy of it.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self.started()
        with self._lock:
            self._compactions.append(done)
        await self.submit(lambda db: None, active_runs=1, truncate_wal=True)
        await done

    async def drain(self) -> None:
        """Wait until everything that is queued now is written, or has failed."""
        if self._thread is not None:
            with contextlib.suppress(StoreError):
                await self.submit(lambda db: None)

    def close(self) -> None:
        """Write what is queued, and close the file; other processes can then write it."""
        thread, opened = self._thread, self._opened
        if thread is None or opened is None or opened.exception() is not None:
            return
        with self._lock:
            self._closing = True
            jobs, self._queue, self._state = self._queue, [], "busy"
        if jobs:
            self._batches.put((jobs, None, False))
        self._batches.put(None)
        thread.join()
        self._serving.close()
        self._disconnect()
        self._opened = self._thread = None
        self._closing = False
        self._state = "idle"

    def _disconnect(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        self._file.unwritten()
        self._file.lock.release()

    def inherited(self) -> None:
        """In a forked child: never close the connection, which belongs to the parent."""
        self._opened = self._thread = None  # it did not survive the fork
        leak(self._db)


def _require_open(db: sqlite3.Connection | None, path: Path) -> sqlite3.Connection:
    if db is None:
        raise StoreError(f"{path} is closed")
    return db


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
