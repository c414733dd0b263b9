"""Rewrites the rows of a SQLite store, which have the records of a commit each, as rows of one record, and back.

Whoever edits a store with SQL does the former first, as anybody can who has this package.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from agentfsm.journal.commit_encoding import JournalRow, decode_rows
from agentfsm.journal.hash_chain import GENESIS_HASH
from agentfsm.journal.records import VOUCHED_BY_NEXT, SealedRecord
from agentfsm.journal.sqlite.sqlite_store import select_records


@contextmanager
def without_triggers(db: sqlite3.Connection) -> Generator[None]:
    triggers = db.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        db.execute(f"DROP TRIGGER {name}")
    yield
    for _, create in triggers:
        db.execute(create)


def unpack_rows(path: Path) -> None:
    """One row for each record."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db, without_triggers(db):
        for number, run_id in db.execute("SELECT id, run_id FROM run").fetchall():
            rows = [row for record in select_records(db, run_id, 0) or [] for row in as_single(record)]
            high = number << 32
            db.execute("DELETE FROM journal WHERE key > ? AND key < ?", (high, high + (1 << 32)))
            for row in rows:
                mac = None if row.mac is None else bytes.fromhex(row.mac)
                values = (high | row.seq, row.body, bytes.fromhex(row.hash), row.hidden, mac)
                db.execute("INSERT INTO journal (key, body, hash, hidden, mac) VALUES (?, ?, ?, ?, ?)", values)


def stored_bodies(db: sqlite3.Connection) -> list[str]:
    """The bodies of all records, also of those that belong to no run; nothing of a row that cannot be read."""
    rows = db.execute("SELECT key, body, lower(hex(hash)), hidden FROM journal ORDER BY key").fetchall()
    return [record.body for row in rows for record in decode_rows([JournalRow(*row)], GENESIS_HASH)]


def as_single(record: SealedRecord) -> list[JournalRow]:
    mac = "" if record.mac == VOUCHED_BY_NEXT else record.mac or None
    return [JournalRow(record.seq, record.body, record.hash, record.hidden or None, mac)]


def commits(records: Iterable[SealedRecord]) -> Generator[list[SealedRecord]]:
    commit: list[SealedRecord] = []
    for record in records:
        commit.append(record)
        if record.mac != VOUCHED_BY_NEXT:
            yield commit
            commit = []
    if commit:
        yield commit
