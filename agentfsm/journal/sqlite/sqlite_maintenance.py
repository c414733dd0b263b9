"""Maintains a SQLite store (see ``StoreMaintenance``), and finds what was changed in it by other means.

Runs are numbered in order, and one that agentfsm purges leaves a tombstone with its number, so records without a run,
and gaps in the numbers, mean that a run was deleted. Deleting the newest run with all its records leaves no trace here;
a checkpoint detects that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import agentfsm.journal.sqlite.sqlite_schema as sqlite_schema
from agentfsm.errors import StoreError, UnknownRunError
from agentfsm.journal.commit_encoding import JournalRow, run_id_in
from agentfsm.journal.maintenance import Damage, Fact, Hold, Tombstone, read_tombstone
from agentfsm.journal.sqlite.owned_store import OwnedStore, RunRow, SqliteTurn
from agentfsm.journal.sqlite.sqlite_reader import SqliteReader
from agentfsm.journal.sqlite.sqlite_run_info import (
    delete_run_info,
    find_filter_damage,
    find_index_damage,
    rebuild_index,
    rebuild_prompt_filter,
    unfiltered_blocks,
)
from agentfsm.journal.sqlite.sqlite_writer import SqliteWriter

_IS_AS_SAID = """
    SELECT 1 FROM run WHERE id = ? AND run_id = ? AND epoch = ? AND seq = ? AND hash = ?
    AND (status = 'finished' OR seq = 0) AND NOT EXISTS (SELECT 1 FROM hold WHERE hold.id = run.id AND NOT ended)
"""


class SqliteMaintenance:
    """Maintains one file."""

    def __init__(
        self,
        path: Path,
        writer: SqliteWriter,
        reader: SqliteReader,
        leases: Mapping[str, object],
        turn: SqliteTurn,
        select_row: Callable[[str], Awaitable[tuple[RunRow | None, int]]],
    ) -> None:
        self._path = path
        self._writer = writer
        self._reader = reader
        self._leases = leases
        self._turn = turn
        self._select_row = select_row

    async def prepare(self, *, migrate: bool = False) -> None:
        """Become the writer of the file, and create or migrate its tables; see ``StoreMaintenance.prepare``."""
        await self._writer.started()

    @asynccontextmanager
    async def writable(self, store: Any) -> AsyncGenerator[Any]:
        """The store itself, or what writes through the process that owns the file; see ``StoreMaintenance``."""
        async with self._turn.write() as owner:
            yield store if owner is None else OwnedStore(store, owner, self._select_row)

    async def describe(self) -> list[Fact]:
        """Versions, size, and who writes the file; see ``StoreMaintenance.describe``."""
        version = await self._reader.read(sqlite_schema.schema_version, 0)
        log = self._path.with_name(f"{self._path.name}-wal")
        size = sqlite_schema.file_size(self._path) + sqlite_schema.file_size(log)
        facts = [
            Fact("kind", f"SQLite {sqlite3.sqlite_version}"),
            Fact("schema", _describe_version(version)),
            Fact("size", f"{size:,} bytes"),
        ]
        if await asyncio.to_thread(self._writer.owned_by_other_process):
            facts.append(Fact("writer", "another process writes it; commands write through that one"))
        if sqlite_schema.has_wal_bug():
            facts.append(
                Fact(
                    "wal",
                    "this SQLite can damage a file that two programs write at once: let no other one do so",
                )
            )
        if not os.access(self._path, os.W_OK):
            facts.append(Fact("rights", f"{self._path} cannot be written: give yourself access to it", is_problem=True))
        return facts

    async def schema_damage(self) -> list[Damage]:
        """How tables and triggers differ from those of a release; see ``StoreMaintenance.schema_damage``."""
        return await asyncio.to_thread(find_schema_damage, self._path)

    async def row_damage(self) -> list[Damage]:
        """Runs that were deleted, and records that belong to none; see ``StoreMaintenance.row_damage``."""
        return await asyncio.to_thread(find_row_damage, self._path)

    async def set_hold(self, run_id: str, hold: Hold | None) -> None:
        """Hold a run, or end its hold; see ``StoreMaintenance.set_hold``."""
        given = {"run": run_id, "hold": None if hold is None else asdict(hold)}
        await self._turn.do(lambda: self._writer.submit(lambda db: _hold(db, run_id, hold)), "set_hold", **given)

    async def holds(self) -> dict[str, Hold]:
        """The holds of all runs that have one; see ``StoreMaintenance.holds``."""
        return await self._reader.read(_select_holds, dict[str, Hold]())

    async def purge(self, tombstones: Sequence[Tombstone]) -> list[str]:
        """Delete runs, and keep their tombstones; see ``StoreMaintenance.purge``."""
        given = [asdict(each) for each in tombstones]
        return list(await self._turn.do(lambda: self._purge_here(tombstones), "purge", tombstones=given))

    async def _purge_here(self, tombstones: Sequence[Tombstone]) -> list[str]:
        purged: list[str] = []
        for start in range(0, len(tombstones), _BATCH):  # each batch is short work for the event loop
            batch = tombstones[start : start + _BATCH]
            purged += await self._writer.submit(partial(self._purge, batch))
        return purged

    def _purge(self, tombstones: Sequence[Tombstone], db: sqlite3.Connection) -> list[str]:
        purged: list[str] = []
        for each in tombstones:
            said = (each.number, each.run_id, each.epoch, each.seq, bytes.fromhex(each.hash))
            if each.run_id not in self._leases and db.execute(_IS_AS_SAID, said).fetchone() is not None:
                _bury(db, each)
                purged.append(each.run_id)
        return purged

    async def tombstones(self, run_id: str | None = None) -> list[Tombstone]:
        """What remains of the runs that were purged; see ``StoreMaintenance.tombstones``."""
        rows = await self._reader.read(lambda db: _select_tombstones(db, run_id), list[tuple[str, str]]())
        return [read_tombstone(*row) for row in rows]

    async def was_purged(self, run_id: str) -> bool:
        """Whether a run that had records was purged; see ``StoreMaintenance.was_purged``."""
        return await self._reader.read(lambda db: _was_purged(db, run_id), False)

    async def reindex(self) -> list[str]:
        """Have runs found by what they are listed by; see ``StoreMaintenance.reindex``."""
        return list(await self._turn.do(self._reindex_here, "reindex"))

    async def _reindex_here(self) -> list[str]:
        found = list(await self._writer.submit(rebuild_index))
        return found + [run_id for run_id in await self._rebuild_filters(every=True) if run_id not in found]

    async def _rebuild_filters(self, *, every: bool = False) -> list[str]:
        """Write the filters of prompts that are missing, or all of them; each is short work for the event loop."""
        blocks = await self._writer.submit(partial(unfiltered_blocks, every=every))
        return [
            each for block in blocks for each in await self._writer.submit(partial(rebuild_prompt_filter, block=block))
        ]

    async def compact(self) -> str:
        """Return the space of what was deleted to the file system; see ``StoreMaintenance.compact``."""
        async with self._turn.write() as owner:
            if owner is not None:
                return str(await owner.call("compact"))
            await self._rebuild_filters()
            await self._writer.compact()
        if await asyncio.to_thread(truncate_wal, self._path):
            return ""
        return "another program has the store open: until it closes it, the file may have what was deleted"


_BATCH = 5
"""How many runs are purged in one transaction: the event loop waits while the statements run."""


def _describe_version(version: int) -> str:
    newest = sqlite_schema.SCHEMA_VERSION
    return f"version {version}" + (f"; agentfsm store migrate makes it {newest}" if version < newest else "")


def _hold(db: sqlite3.Connection, run_id: str, hold: Hold | None) -> None:
    run = db.execute("SELECT id FROM run WHERE run_id = ?", (run_id,)).fetchone()
    if run is None:
        raise UnknownRunError(f"there is no run {run_id!r}")
    if hold is None:
        db.execute("DELETE FROM hold WHERE id = ?", run)
    else:
        row = (*run, hold.reason, hold.by, round(hold.since * 1000), hold.ended, bytes.fromhex(hold.mac))
        db.execute(
            "INSERT OR REPLACE INTO hold (id, reason, held_by, since, ended, mac) VALUES (?, ?, ?, ?, ?, ?)", row
        )


def _select_holds(db: sqlite3.Connection) -> dict[str, Hold]:
    if not sqlite_schema.has(db, sqlite_schema.TOMBSTONES):
        return {}
    sealed = "ended, lower(hex(hold.mac))" if sqlite_schema.has(db, sqlite_schema.SEALED_HOLDS) else "0, ''"
    columns = f"run_id, CAST(reason AS TEXT), CAST(held_by AS TEXT), CAST(since AS INTEGER), {sealed}"
    query = f"SELECT {columns} FROM hold JOIN run ON run.id = hold.id ORDER BY run.id"  # noqa: S608  # our own names
    return {
        run_id: Hold(reason, by, since / 1000, bool(ended), mac)
        for run_id, reason, by, since, ended, mac in db.execute(query)
    }


def _bury(db: sqlite3.Connection, tombstone: Tombstone) -> None:
    number = tombstone.number
    db.execute(
        "INSERT INTO tombstone (number, run_id, seq, content, mac) VALUES (?, ?, ?, ?, ?)",
        (number, tombstone.run_id, tombstone.seq, tombstone.content, bytes.fromhex(tombstone.mac)),
    )
    db.execute("DELETE FROM journal WHERE key >= ? AND key < ?", (number << 32, (number + 1) << 32))
    db.execute("DELETE FROM signal WHERE run_id = ?", (tombstone.run_id,))
    delete_run_info(db, number)
    db.execute("DELETE FROM hold WHERE id = ?", (number,))
    db.execute("DELETE FROM snapshot WHERE id = ?", (number,))
    db.execute("DELETE FROM run WHERE id = ?", (number,))


_IS_PURGED = "SELECT EXISTS (SELECT 1 FROM tombstone WHERE run_id = ? AND seq > 0)"


def _was_purged(db: sqlite3.Connection, run_id: str) -> bool:
    return sqlite_schema.has(db, sqlite_schema.TOMBSTONES) and bool(db.execute(_IS_PURGED, (run_id,)).fetchone()[0])


_TOMBSTONES = "SELECT content, lower(hex(mac)) FROM tombstone ORDER BY number"
_TOMBSTONES_OF_ID = "SELECT content, lower(hex(mac)) FROM tombstone WHERE run_id = ? ORDER BY number"


def _select_tombstones(db: sqlite3.Connection, run_id: str | None) -> list[tuple[str, str]]:
    if not sqlite_schema.has(db, sqlite_schema.TOMBSTONES):
        return []
    found = db.execute(_TOMBSTONES) if run_id is None else db.execute(_TOMBSTONES_OF_ID, (run_id,))
    return found.fetchall()


_SELECT_RUN_IDS = "SELECT id FROM run"
_SELECT_PURGED = "SELECT number FROM tombstone"
_COUNT_RECORDS_BY_RUN = "SELECT key >> 32, max(key & 4294967295), min(key & 4294967295) FROM journal GROUP BY key >> 32"
_SELECT_FIRST_ROW = (
    "SELECT key & 4294967295, body, lower(hex(hash)), hidden FROM journal WHERE key > ? << 32 ORDER BY key LIMIT 1"
)


def find_schema_damage(path: Path) -> list[Damage]:
    """One entry if the file's tables or triggers are not those of a store, or are gone, or none.

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
        if sqlite_schema.has(db, sqlite_schema.TOMBSTONES):
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
        missed = find_filter_damage(db) if sqlite_schema.has(db, sqlite_schema.PROMPT_FILTERS) else []
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
    """Copy a store as it is at one moment, even while another process writes it; only the owner can read the copy.

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
