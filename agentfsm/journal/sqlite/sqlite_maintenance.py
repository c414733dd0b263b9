"""Maintains a SQLite store; see ``StoreMaintenance``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import agentfsm.journal.sqlite.sqlite_damage as sqlite_damage
from agentfsm.journal.maintenance import Damage
from agentfsm.journal.sqlite.sqlite_writer import SqliteWriter

__all__ = ["SqliteMaintenance"]


class SqliteMaintenance:
    """Maintains one file.

    Args:
        path: The file.
        writer: Its writer.
    """

    def __init__(self, path: Path, writer: SqliteWriter) -> None:
        self._path = path
        self._writer = writer

    async def prepare(self) -> None:
        """Become the writer of the file, and create or migrate its tables; see ``StoreMaintenance.prepare``."""
        self._writer.start()

    async def schema_damage(self) -> list[Damage]:
        """How tables and triggers differ from those of a release; see ``StoreMaintenance.schema_damage``."""
        return await asyncio.to_thread(sqlite_damage.find_schema_damage, self._path)

    async def row_damage(self) -> list[Damage]:
        """Runs that were deleted, and records that belong to none; see ``StoreMaintenance.row_damage``."""
        return await asyncio.to_thread(sqlite_damage.find_row_damage, self._path)
