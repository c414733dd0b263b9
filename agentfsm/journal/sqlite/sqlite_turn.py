"""``SqliteTurn``: write a SQLite file for a moment, or reach the process that writes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from agentfsm.errors import StoreLockedError
from agentfsm.journal.sqlite.owned_store import OwnerConnection, connect_to_owner
from agentfsm.journal.sqlite.sqlite_writer import SqliteWriter
from agentfsm.journal.sqlite.store_file import StoreFile

__all__ = ["SqliteTurn"]

ATTEMPTS, FIRST_DELAY_S, LONGEST_DELAY_S = 14, 0.01, 1.0
"""Attempts to write a file whose writer does not listen, and seconds between them: each is twice as long as the one
before. Together they are as long as SQLite itself waits for a lock."""


class SqliteTurn:
    """Who may write one file now: this process, or another one that is asked to.

    Args:
        file: The file.
        writer: Its writer in this process.
        has_leases: Whether this process has acquired a run, and so has to stay the writer.
    """

    def __init__(self, file: StoreFile, writer: SqliteWriter, has_leases: Callable[[], bool]) -> None:
        self._file = file
        self._writer = writer
        self._has_leases = has_leases
        self._users = 0
        self._for_a_moment = False  # the first of the users made this process the writer

    @asynccontextmanager
    async def write(self) -> AsyncGenerator[OwnerConnection | None]:
        """Become the writer for a moment, unless this process is it, or connect to the process that is.

        Yields:
            The connection to the process that writes the file; None if this one does.

        Raises:
            StoreLockedError: Another process writes the file, and nobody listens for it.
            StoreError: The file cannot be written.
        """
        if not self._users:
            self._for_a_moment = not self._writer.is_started
        self._users += 1
        try:
            owner = None if self._writer.is_started else await self._claim()
            try:
                yield owner
            finally:
                if owner is not None:
                    await owner.aclose()
        finally:
            self._users -= 1
            if self._for_a_moment and not self._users and not self._has_leases():
                self._writer.close_if_idle()

    async def _claim(self) -> OwnerConnection | None:
        """Become the writer, or connect to it."""
        delay = FIRST_DELAY_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await self._writer.started(briefly=True)
            except StoreLockedError:
                owner = await connect_to_owner(self._file)
                if owner is not None:
                    return owner
                if attempt == ATTEMPTS:
                    raise
            else:
                return None
            await asyncio.sleep(delay)  # it may only just have begun, or be ending
            delay = min(2 * delay, LONGEST_DELAY_S)
        return None
