"""Finds records and runs deleted from a SQLite store, and truncates its write-ahead log.

Runs are numbered in order, and agentfsm never deletes one: records whose run is missing, and gaps in the numbers,
were runs. Deleting the newest run with all its records leaves no trace here; a checkpoint detects that.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from agentfsm.journal.sqlite import sqlite_schema
from agentfsm.journal.verification import TAMPERED, VerificationReport

__all__ = ["find_orphans", "truncate_wal"]

_SELECT_RUN_IDS = "SELECT id FROM run"
_COUNT_RECORDS_BY_RUN = "SELECT key >> 32, count(*), min(key & 4294967295) FROM journal GROUP BY key >> 32"
_SELECT_FIRST_RECORD = "SELECT CAST(body AS TEXT) FROM journal WHERE key = (? << 32 | 1)"


def find_orphans(path: Path) -> list[VerificationReport]:
    """A report for each run that is not there any more, and for records in front of a run's first.

    Raises:
        StoreError: The file cannot be read.
    """
    db = sqlite_schema.open_reader(path)
    if db is None:
        return []
    found: list[VerificationReport] = []
    try:
        db.execute("BEGIN")  # what follows is of one moment, though somebody may be writing
        runs = {int(number) for (number,) in db.execute(_SELECT_RUN_IDS)}
        places = db.execute(_COUNT_RECORDS_BY_RUN).fetchall()
        for number, count, first in places:
            if number not in runs:
                run_id = _run_id_in(db.execute(_SELECT_FIRST_RECORD, (number,)).fetchone()) or f"(run {number})"
                found.append(
                    VerificationReport(run_id, TAMPERED, count, None, "the store has its records, and not the run")
                )
            elif not first:
                found.append(
                    VerificationReport(
                        f"(run {number})", TAMPERED, count, None, "a record stands in front of its first"
                    )
                )
    except sqlite_schema.READ_ERRORS as error:
        raise sqlite_schema.as_store_error(error, path) from error
    finally:
        db.close()
    numbers = sorted({0, *runs, *(number for number, _, _ in places if number > 0)})
    for before, behind in pairwise(numbers):
        if behind - before > 1:
            which = str(before + 1) if behind - before == 2 else f"{before + 1} to {behind - 1}"
            found.append(VerificationReport(f"(run {which})", TAMPERED, 0, None, "it was deleted with all that it had"))
    return found


def truncate_wal(path: Path) -> bool:
    """Have nothing left in the file's log of what was overwritten; the writer's own process calls this.

    Returns:
        Whether nothing is left; another program that reads the file, as it was, has it kept.

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


def _run_id_in(first_record: tuple[Any] | None) -> str:
    """The run that a first record says that it belongs to, or an empty string."""
    try:
        return "" if first_record is None else str(json.loads(first_record[0])["run"])
    except (ValueError, LookupError, TypeError):
        return ""
