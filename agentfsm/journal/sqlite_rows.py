"""What a store does to its SQLite file, a function each: inside a transaction of whoever calls."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, NamedTuple

from agentfsm.errors import RunExistsError, StaleLease, StoreError, UnknownRunError
from agentfsm.journal.records import START, Row
from agentfsm.journal.store import Status

__all__ = ["Holder", "append", "free", "heads", "redact", "rows", "take"]


class Holder(NamedTuple):
    """What a lease says; the queue must not keep a lease itself alive."""

    run_id: str
    epoch: int
    owner: str
    row: int  # in the table of runs


def take(db: sqlite3.Connection, run_id: str, owner: str, new: bool) -> tuple[int, int, str, int]:
    """Make somebody a run's holder: the new epoch, the last record's number and hash, and the run's row.

    Raises:
        RunExistsError: It is to be new, and there is one.
        UnknownRunError: There is none.
    """
    found = db.execute("SELECT epoch, seq, hash, id FROM run WHERE run_id = ?", (run_id,)).fetchone()
    if new and found is not None and found[1]:
        raise RunExistsError(f"there is a run {run_id!r} already")
    if new and found is None:
        made = db.execute("INSERT INTO run (run_id, hash) VALUES (?, ?)", (run_id, bytes.fromhex(START)))
        found = (0, 0, bytes.fromhex(START), made.lastrowid or 0)
    if found is None:
        raise UnknownRunError(f"there is no run {run_id!r}")
    db.execute("UPDATE run SET epoch = epoch + 1, owner = ? WHERE run_id = ?", (owner, run_id))
    return found[0] + 1, found[1], found[2].hex(), found[3]


def free(db: sqlite3.Connection, holder: Holder) -> None:
    """Nobody holds the run any more, unless somebody else has taken it."""
    db.execute("UPDATE run SET owner = NULL WHERE run_id = ? AND epoch = ?", (holder.run_id, holder.epoch))


_ON = (
    "UPDATE run SET seq = coalesce(?1, seq), hash = coalesce(?2, hash), status = ?3,"
    " owner = CASE WHEN ?3 = 'running' THEN owner END"
    " WHERE id = ?4 AND run_id = ?5 AND epoch = ?6 AND seq + 1 = coalesce(?7, seq + 1) AND owner IS NOT NULL"
    " AND (status <> 'finished' OR ?3 = 'finished')"
)
_ROWS = (  # text whatever stands there: on a disk that flips bits, a value may change its type
    "SELECT key - ?, coalesce(CAST(body AS TEXT), ''), lower(hex(hash)), coalesce(CAST(hidden AS TEXT), '')"
    " FROM journal WHERE key > ? AND key < ? ORDER BY key"
)
_ROW = "INSERT INTO journal (key, body, hash, hidden) VALUES (?, ?, ?, ?)"


def append(db: sqlite3.Connection, holder: Holder, added: Sequence[Row], status: Status) -> None:
    """Add rows behind a run's last one.

    Raises:
        StaleLease: Somebody else holds the run, or another row was to come next.
        UnknownRunError: There is no such run.
    """
    seals = [bytes.fromhex(row.hash) for row in added]
    first, last, seal = (added[0].seq, added[-1].seq, seals[-1]) if added else (None, None, None)
    moved = db.execute(_ON, (last, seal, status, holder.row, holder.run_id, holder.epoch, first))
    if moved.rowcount != 1:
        raise _stale(db, holder)
    high = holder.row << 32
    db.executemany(
        _ROW, [(high | row.seq, row.body, seal, row.hidden or None) for row, seal in zip(added, seals, strict=True)]
    )


def redact(db: sqlite3.Connection, holder: Holder, seq: int, hidden: str) -> None:
    """Put what is left in place of what stood hidden beside one record.

    Raises:
        StaleLease: Somebody else holds the run.
        UnknownRunError: There is no such run.
    """
    held = db.execute(
        "SELECT id FROM run WHERE run_id = ? AND epoch = ? AND owner IS NOT NULL", (holder.run_id, holder.epoch)
    ).fetchone()
    if held is None:
        raise _stale(db, holder)
    db.execute("UPDATE journal SET hidden = ? WHERE key = ?", (hidden, held[0] << 32 | seq))


def _stale(db: sqlite3.Connection, holder: Holder) -> StoreError:
    found = db.execute("SELECT epoch, owner, seq, status FROM run WHERE run_id = ?", (holder.run_id,)).fetchone()
    if found is None:
        return UnknownRunError(f"there is no run {holder.run_id!r}")
    epoch, owner, seq, status = found
    if status == "finished":
        why = "is finished"
    elif epoch != holder.epoch or owner is None:
        why = f"was taken from {holder.owner}"
    else:
        why = f"has {seq} records, so another was to come next"
    return StaleLease(holder.run_id, owner, why)


def heads(db: sqlite3.Connection, where: str = "", *values: str) -> list[Any]:
    """Run id, epoch, owner, seq, hash and status of runs, the oldest run first.

    Args:
        db: The file.
        where: The column that is to have a value, ``run_id`` or ``status``; empty for all runs.
        values: That value.
    """
    some = f" WHERE {where} = ?" if where else ""
    text = f"SELECT run_id, epoch, owner, seq, lower(hex(hash)), status FROM run{some} ORDER BY id"  # noqa: S608  # names of ours
    return db.execute(text, values).fetchall()


def rows(db: sqlite3.Connection, run_id: str, after: int) -> list[Row] | None:
    """A run's rows behind a sequence number, or None where there is no such run."""
    found = db.execute("SELECT id FROM run WHERE run_id = ?", (run_id,)).fetchone()
    if found is None:
        return None
    low, high = found[0] << 32, (found[0] + 1) << 32
    return [Row(*row) for row in db.execute(_ROWS, (low, low + after, high))]
