"""Reads a SQLite store: one connection, and a thread for the queries of an event loop."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import agentfsm.journal.sqlite.sqlite_schema as sqlite_schema
from agentfsm.journal.sqlite.store_file import StoreFile, after_fork, leak

QueryResult = TypeVar("QueryResult")
Query = Callable[[sqlite3.Connection], QueryResult]


class SqliteReader:
    """Reads one file. It needs no lock, even while another process writes the file."""

    def __init__(self, file: StoreFile) -> None:
        self._file = file
        self._db: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None  # of our own: the event loop's may be full of users' tools
        after_fork(self)

    async def read(self, query: Query[QueryResult], default: QueryResult) -> QueryResult:
        """The result of a query, which runs in the reader's thread; arguments and errors as for ``read_now``."""
        self._file.check_process()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "agentfsm-reader")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.read_now, query, default)

    def read_now(self, query: Query[QueryResult], default: QueryResult) -> QueryResult:
        """The result of a query, which runs in the caller's thread.

        Raises:
            StoreMovedError: It was moved, deleted or replaced while the store was open.
            StoreFormatError: A newer release wrote it.
            StoreError: It cannot be read, or this process is a forked child.
        """
        self._file.check_process()
        with self._lock:
            self._file.check_unmoved()
            if self._db is None:
                self._file.check_openable()
                with self._file.opening:
                    self._db = sqlite_schema.open_reader(self._file.path)
                if self._db is None:
                    return default
                self._file.opened()
            try:
                sqlite_schema.require_known(self._db, self._file.given)  # it may have been migrated since it was opened
                return query(self._db)
            except sqlite_schema.READ_ERRORS as error:
                raise sqlite_schema.as_store_error(error, self._file.given) from error

    def close(self) -> None:
        """Wait for the queries that were started, and close the connection."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()
        if self._db is not None:
            self._db.close()
            self._db = None

    def __del__(self) -> None:
        """Close the connection of a store that nobody has closed, about which Python 3.13 warns."""
        if self._db is not None:
            self._db.close()

    def inherited(self) -> None:
        """In a forked child: never close the connection, which belongs to the parent."""
        leak(self._db)
        self._db = self._thread = None
