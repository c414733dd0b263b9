"""Finds what was left in a SQLite store of what was deleted from it: of runs by somebody, of values by us.

Runs are numbered as they come, and nothing of ours deletes one: records under a number that no run has, and a
number that neither has, were runs. One that was deleted with all it had behind the last run leaves no trace
here; a checkpoint knows it.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from agentfsm.journal import sqlite_file
from agentfsm.journal.verify import TAMPERED, Report

__all__ = ["loose", "wipe"]

_RUNS = "SELECT id FROM run"
_PLACES = "SELECT key >> 32, count(*), min(key & 4294967295) FROM journal GROUP BY key >> 32"
_FIRST = "SELECT CAST(body AS TEXT) FROM journal WHERE key = (? << 32 | 1)"


def loose(path: Path) -> list[Report]:
    """A report for each run that is not there any more, and for records in front of a run's first.

    Raises:
        StoreError: The file cannot be read.
    """
    db = sqlite_file.open_reader(path)
    if db is None:
        return []
    found: list[Report] = []
    try:
        db.execute("BEGIN")  # what follows is of one moment, though somebody may be writing
        runs = {int(number) for (number,) in db.execute(_RUNS)}
        places = db.execute(_PLACES).fetchall()
        for number, count, first in places:
            if number not in runs:
                run_id = _named(db.execute(_FIRST, (number,)).fetchone()) or f"(run {number})"
                found.append(Report(run_id, TAMPERED, count, None, "the store has its records, and not the run"))
            elif not first:
                found.append(Report(f"(run {number})", TAMPERED, count, None, "a record stands in front of its first"))
    except sqlite_file.UNREADABLE as error:
        raise sqlite_file.told(error, path) from error
    finally:
        db.close()
    numbers = sorted({0, *runs, *(number for number, _, _ in places if number > 0)})
    for before, behind in pairwise(numbers):
        if behind - before > 1:
            which = str(before + 1) if behind - before == 2 else f"{before + 1} to {behind - 1}"
            found.append(Report(f"(run {which})", TAMPERED, 0, None, "it was deleted with all that it had"))
    return found


def wipe(path: Path) -> bool:
    """Have nothing left in the file's log of what was overwritten; the writer's own process calls this.

    Returns:
        Whether nothing is left; another program that reads the file, as it was, has it kept.

    Raises:
        StoreError: The file cannot be written.
    """
    try:
        db = sqlite_file.connect(f"{path.absolute().as_uri()}?mode=rw")
        try:
            busy: int = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        finally:
            db.close()
    except sqlite_file.UNREADABLE as error:
        raise sqlite_file.told(error, path) from error
    return not busy


def _named(first: tuple[Any] | None) -> str:
    """The run that a first record says that it belongs to, or an empty string."""
    try:
        return "" if first is None else str(json.loads(first[0])["run"])
    except (ValueError, LookupError, TypeError):
        return ""
