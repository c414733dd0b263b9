"""Finds a changed schema, and records and runs deleted from a SQLite store, and truncates its write-ahead log.

Runs are numbered in order, and one that agentfsm purges leaves a tombstone with its number, so records without a run,
and gaps in the numbers, mean that a run was deleted. Deleting the newest run with all its records leaves no trace here;
a checkpoint detects that.
"""

from __future__ import annotations

import contextlib
import os
from itertools import pairwise
from pathlib import Path

import agentfsm.journal.sqlite.sqlite_schema as sqlite_schema
from agentfsm.errors import StoreError
from agentfsm.journal.commit_encoding import JournalRow, run_id_in
from agentfsm.journal.maintenance import Damage
from agentfsm.journal.sqlite.sqlite_run_info import find_filter_damage, find_index_damage

__all__ = ["copy_file", "find_row_damage", "find_schema_damage", "truncate_wal"]

_SELECT_RUN_IDS = "SELECT id FROM run"
_SELECT_PURGED = "SELECT number FROM tombstone"
_COUNT_RECORDS_BY_RUN = "SELECT key >> 32, max(key & 4294967295), min(key & 4294967295) FROM journal GROUP BY key >> 32"
_SELECT_FIRST_ROW = (
    "SELECT key & 4294967295, body, lower(hex(hash)), hidden FROM journal WHERE key > ? << 32 ORDER BY key LIMIT 1"
)


def find_schema_damage(path: Path) -> list[Damage]:
    """One entry if the file's tables or triggers are not those of a store, or are gone, or none.

    Args:
        path: The SQLite file.

    Raises:
        StoreError: The file cannot be read.
    """
    db = sqlite_schema.open_reader(path, empty=True)
    if db is None:
        return []
    try:
        changed = sqlite_schema.changed_schema(db)
    except sqlite_schema.READ_ERRORS as error:
        raise sqlite_schema.as_store_error(error, path) from error
    finally:
        db.close()
    return [Damage("(schema)", changed)] if changed else []


def find_row_damage(path: Path) -> list[Damage]:
    """An entry for each run that was deleted, has a record before its first or a value of another type, or is misfiled.

    Misfiled is a run that is found by other tags or metadata than it is listed by, or not by its prompt.

    Args:
        path: The SQLite file.

    Raises:
        StoreError: The file cannot be read.
    """
    db = sqlite_schema.open_reader(path)
    if db is None:
        return []
    reports: list[Damage] = []
    try:
        db.execute("BEGIN")  # a consistent snapshot, even while a run is being written
        runs = {int(number) for (number,) in db.execute(_SELECT_RUN_IDS)}
        purged: set[int] = set()
        if sqlite_schema.has_tombstones(db):
            purged = {int(number) for (number,) in db.execute(_SELECT_PURGED)}
        counts = db.execute(_COUNT_RECORDS_BY_RUN).fetchall()
        for number, count, first in counts:
            if number not in runs:
                rows = db.execute(_SELECT_FIRST_ROW, (number,)).fetchall()
                run_id = run_id_in([JournalRow(*row) for row in rows]) or f"(run {number})"
                reason = "the store has its records, and the run is missing"
                reports.append(Damage(run_id, reason, count))
            elif not first:
                reason = "it has a record before its first"
                reports.append(Damage(f"(run {number})", reason, count))
        for number, seq in sqlite_schema.wrong_types(db):
            reason = "a value has another type than every release wrote"
            reports.append(Damage(f"(run {number})", reason, seq=seq))
        misfiled = find_index_damage(db, sqlite_schema.schema_version(db))
        reason = "it is found by other tags or metadata than it is listed by"
        reports += [Damage(f"(run {number})", reason) for number in misfiled]
        missed = find_filter_damage(db) if sqlite_schema.has_prompt_filters(db) else []
        reports += [
            Damage(f"(run {number})", "it is not found by the prompt that it is listed by") for number in missed
        ]
    except sqlite_schema.READ_ERRORS as error:
        raise sqlite_schema.as_store_error(error, path) from error
    finally:
        db.close()
    numbers = sorted({0, *runs, *purged, *(number for number, _, _ in counts if number > 0)})
    for before, after in pairwise(numbers):
        if after - before > 1:
            which = str(before + 1) if after - before == 2 else f"{before + 1} to {after - 1}"
            reports.append(Damage(f"(run {which})", "it was deleted with its records"))
    return reports


def copy_file(path: Path, target: Path) -> None:
    """Copy a store as it is at one moment, also while another process writes it; only the owner can read the copy.

    Args:
        path: The SQLite file.
        target: The copy, which must not exist.

    Raises:
        StoreError: The file cannot be read, there is no store in it, or the copy exists or cannot be written.
    """
    db = sqlite_schema.open_reader(path)
    if db is None:
        raise StoreError(f"there is no store in {path}")
    try:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with contextlib.closing(sqlite_schema.connect(f"{target.absolute().as_uri()}?mode=rw")) as copy:
            db.backup(copy)
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror}") from error
    except sqlite_schema.READ_ERRORS as error:
        raise sqlite_schema.as_store_error(error, target) from error
    finally:
        db.close()


def truncate_wal(path: Path) -> bool:
    """Truncate the write-ahead log, so that nothing of what was overwritten is left in it.

    Call it in the process that writes the file.

    Args:
        path: The SQLite file.

    Returns:
        Whether the log was truncated; it is not while another program reads an older state of the file.

    Raises:
        StoreError: The file cannot be written.
    """
    try:
        db = sqlite_schema.connect(f"{path.absolute().as_uri()}?mode=rw")
        try:
            busy: int = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        finally:
            db.close()
    except sqlite_schema.READ_ERRORS as error:
        raise sqlite_schema.as_store_error(error, path) from error
    return not busy
