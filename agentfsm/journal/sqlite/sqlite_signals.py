"""The signals of a SQLite store: a table of the file."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Callable

import agentfsm.journal.sqlite.sqlite_schema as sqlite_schema
from agentfsm.errors import UnknownRunError
from agentfsm.journal.signals import RECHECK_S, SealedSignal, SignalHub
from agentfsm.journal.sqlite.owned_store import SqliteTurn
from agentfsm.journal.sqlite.sqlite_reader import SqliteReader
from agentfsm.journal.sqlite.sqlite_writer import SqliteWriter
from agentfsm.journal.store import Lease

LOOK_S = 1.0
"""Seconds between two looks at the table in a process that does not write the file."""

_COLUMNS = "CAST(id AS TEXT), CAST(run_id AS TEXT), CAST(body AS TEXT), lower(hex(mac))"


def insert_signal(db: sqlite3.Connection, signal: SealedSignal) -> bool:
    """Add a signal; False if there is another one with its id.

    Raises:
        UnknownRunError: There is no such run.
    """
    if db.execute("SELECT 1 FROM run WHERE run_id = ?", (signal.run_id,)).fetchone() is None:
        raise UnknownRunError(f"there is no run {signal.run_id!r}")
    row = (signal.id, signal.run_id, signal.body, bytes.fromhex(signal.mac))
    done = db.execute("INSERT INTO signal (id, run_id, body, mac) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", row)
    if done.rowcount:
        return True
    found = db.execute(f"SELECT {_COLUMNS} FROM signal WHERE id = ?", (signal.id,)).fetchone()  # noqa: S608  # our own names
    return SealedSignal(*found) == signal


def select_signals(db: sqlite3.Connection, run_id: str | None) -> list[SealedSignal]:
    """The signals of a run, or of all runs, the oldest first."""
    if not sqlite_schema.has(db, sqlite_schema.SIGNALS):
        return []
    where, values = ("", ()) if run_id is None else (" WHERE run_id = ?", (run_id,))
    rows = db.execute(f"SELECT {_COLUMNS} FROM signal{where} ORDER BY number", values)  # noqa: S608  # our own names
    return [SealedSignal(*row) for row in rows]


def delete_signal(db: sqlite3.Connection, signal_id: str) -> None:
    """Delete a signal."""
    db.execute("DELETE FROM signal WHERE id = ?", (signal_id,))


class SqliteSignals:
    """The signals of one file."""

    def __init__(
        self,
        writer: SqliteWriter,
        reader: SqliteReader,
        turn: SqliteTurn,
        lease_of: Callable[[str], Lease | None],
    ) -> None:
        self._writer = writer
        self._reader = reader
        self._turn = turn
        self._hub = SignalHub(lease_of)

    async def send(self, signal: SealedSignal) -> bool:
        """Keep a signal; see ``SignalQueue.send``. If another process writes the file, that process keeps it."""
        async with self._turn.write() as owner:
            if owner is not None:
                return bool(await owner.call("send_signal", signal=signal))
            is_kept: bool = await self._writer.submit(lambda db: insert_signal(db, signal))
        if is_kept:
            self._hub.notify(signal.run_id)
        return is_kept

    async def pending(self, run_id: str | None = None) -> list[SealedSignal]:
        """The signals that were not removed yet; see ``SignalQueue.pending``."""
        return await self._reader.read(lambda db: select_signals(db, run_id), list[SealedSignal]())

    async def remove(self, signal_id: str) -> None:
        """Remove a signal, and erase it from the file and its log; see ``SignalQueue.remove``."""
        await self._turn.do(
            lambda: self._writer.submit(lambda db: delete_signal(db, signal_id), truncate_wal=True),
            "remove_signal",
            id=signal_id,
        )

    def listen(self) -> AsyncGenerator[str]:
        """The ids of runs that have signals; see ``SignalQueue.listen``."""
        return self._hub.listen(self.pending, self._recheck_s)

    def _recheck_s(self) -> float:
        """Seconds after which to look again: other processes tell the one that writes the file, and no other."""
        return RECHECK_S if self._writer.is_started else LOOK_S
