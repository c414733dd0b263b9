"""The table of signals in a SQLite store."""

from __future__ import annotations

import sqlite3

import agentfsm.journal.sqlite.sqlite_schema as sqlite_schema
from agentfsm.errors import UnknownRunError
from agentfsm.journal.signals import SealedSignal

__all__ = ["delete_signal", "insert_signal", "select_signals"]

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
    if not sqlite_schema.has_signals(db):
        return []
    where, values = ("", ()) if run_id is None else (" WHERE run_id = ?", (run_id,))
    rows = db.execute(f"SELECT {_COLUMNS} FROM signal{where} ORDER BY number", values)  # noqa: S608  # our own names
    return [SealedSignal(*row) for row in rows]


def delete_signal(db: sqlite3.Connection, signal_id: str) -> None:
    """Delete a signal."""
    db.execute("DELETE FROM signal WHERE id = ?", (signal_id,))
