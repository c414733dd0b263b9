"""SqliteStore: a durable store in one SQLite file, written by one process.

It uses a write-ahead log with ``synchronous=FULL``: what was awaited is on disk. All runs of the process share
commits. A second process that wants to write is refused with the name of the first, for two reasons: SQLite before
3.51.3 can corrupt a WAL file that two processes write, and the lease of a dead process is then known to be free.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args
from weakref import WeakValueDictionary, ref

import agentfsm.journal.sqlite.sqlite_schema as sqlite_schema
from agentfsm.errors import (
    ConfigurationError,
    RunExistsError,
    RunHeldError,
    StaleLease,
    StoreError,
    UnknownRunError,
)
from agentfsm.journal.commit_encoding import JournalRow, decode_rows, encode_commit, replace_hidden
from agentfsm.journal.hash_chain import GENESIS_HASH
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.run_info import RunInfo, RunPage, RunQuery
from agentfsm.journal.sqlite.owned_store import RunRow, SqliteTurn
from agentfsm.journal.sqlite.owner_socket import OwnerSocket
from agentfsm.journal.sqlite.sqlite_maintenance import SqliteMaintenance
from agentfsm.journal.sqlite.sqlite_reader import SqliteReader
from agentfsm.journal.sqlite.sqlite_run_info import (
    count_run_infos,
    select_run_infos,
    update_texts,
    write_run_info,
)
from agentfsm.journal.sqlite.sqlite_signals import SqliteSignals
from agentfsm.journal.sqlite.sqlite_writer import SqliteWriter
from agentfsm.journal.sqlite.store_file import StoreFile
from agentfsm.journal.store import (
    Head,
    Lease,
    SealedSnapshot,
    Status,
    WhichRuns,
    changed_row_error,
    head_row,
    is_changed,
    seal_row,
    stale_error,
)
from agentfsm.loop.canonical_json import is_storable
from agentfsm.loop.keys import Keyring


class LeaseKey(NamedTuple):
    """The content of a lease, for queued jobs: a job must not keep the lease itself alive."""

    run_id: str
    epoch: int
    owner: str
    run_rowid: int  # its row in the table of runs
    keyring: Keyring | None


def acquire_lease(
    db: sqlite3.Connection, run_id: str, owner: str, new: bool, keyring: Keyring | None = None
) -> tuple[int, int, str, int]:
    """Acquire a run: its new epoch, its last record's sequence number and hash, and its row id.

    Raises:
        RunExistsError: It should be created, and exists already.
        UnknownRunError: It is not to be created and does not exist.
        StoreError: Somebody without the secret changed its row.
    """
    run = _select_row(db, run_id)
    if new and run is not None and run.seq:
        raise RunExistsError(f"run {run_id!r} exists already")
    if new and run is None:
        if db.execute("SELECT 1 FROM tombstone WHERE run_id = ? AND seq > 0", (run_id,)).fetchone() is not None:
            raise RunExistsError(f"run {run_id!r} existed until it was purged: its id cannot be used again")
        db.execute(_INSERT_RUN, (run_id, bytes.fromhex(GENESIS_HASH)))
        run = _select_row(db, run_id)
        db.execute("INSERT INTO run_info (id) SELECT id FROM run WHERE run_id = ?", (run_id,))
    if run is None:
        raise UnknownRunError(f"there is no run {run_id!r}")
    if is_changed(run.text(), run.mac, keyring) or _lost_mac(db, run, keyring):
        raise changed_row_error(run_id)
    _update_row(db, run._replace(epoch=run.epoch + 1, owner=owner), keyring)
    return run.epoch + 1, run.seq, run.digest, run.number


_INSERT_RUN = """
    INSERT INTO run (id, run_id, hash) VALUES (1 + max(
        coalesce((SELECT max(id) FROM run), 0), coalesce((SELECT max(number) FROM tombstone), 0)
    ), ?, ?)
"""
"""Numbers are never used again, or the records of a purged run and of a later one could not be told apart."""


def release_lease(db: sqlite3.Connection, key: LeaseKey) -> None:
    """Release a run, unless another owner has acquired it since. A row that somebody changed stays as it is."""
    run = _select_row(db, key.run_id)
    if run is None or run.epoch != key.epoch:
        return
    if not is_changed(run.text(), run.mac, key.keyring) and not _lost_mac(db, run, key.keyring):
        _update_row(db, run._replace(owner=None), key.keyring)


def _select_row(db: sqlite3.Connection, run_id: str) -> RunRow | None:
    row = db.execute(f"SELECT {_ROW} FROM run WHERE run_id = ?", (run_id,)).fetchone()  # noqa: S608  # no user text
    return None if row is None else RunRow(*row)


_ROW = "id, run_id, epoch, owner, seq, lower(hex(hash)), status, lower(hex(mac))"


def _lost_mac(db: sqlite3.Connection, run: RunRow, keyring: Keyring | None) -> bool:
    """Whether a row has no MAC although records of its run have: somebody without the secret removed it."""
    if run.mac or keyring is None:
        return False
    low, high = run.number << 32, (run.number + 1) << 32
    query = "SELECT 1 FROM journal WHERE key > ? AND key < ? AND mac IS NOT NULL LIMIT 1"
    return db.execute(query, (low, high)).fetchone() is not None


def _update_row(db: sqlite3.Connection, run: RunRow, keyring: Keyring | None) -> None:
    """Write the epoch and the owner of a run."""
    mac = _mac_bytes(keyring, run.text())
    db.execute("UPDATE run SET epoch = ?, owner = ?, mac = ? WHERE id = ?", (run.epoch, run.owner, mac, run.number))


def _mac_bytes(keyring: Keyring | None, row: str) -> bytes | None:
    return None if keyring is None else bytes.fromhex(seal_row(keyring, row))


_FENCE = "WHERE id = ? AND run_id = ? AND epoch = ? AND seq = ? AND owner IS NOT NULL"
_UPDATE_RUN = f"UPDATE run SET seq = ?, hash = ?, owner = ?, mac = ? {_FENCE} AND status = ?"  # noqa: S608  # ours
"""The status stays: an index has it, which SQLite would rewrite whenever it is set, even to the same value."""

_SET_STATUS = "UPDATE run SET seq = ?, hash = ?, owner = ?, mac = ?, status = ?"
_UPDATE_STATUS = f"{_SET_STATUS} {_FENCE} AND status <> 'finished'"
_SELECT_ROWS = (
    "SELECT key - ?, body, lower(hex(hash)), hidden, CASE WHEN {mac} IS NOT NULL THEN lower(hex({mac})) END"
    " FROM journal WHERE key > ? AND key < ? ORDER BY key"
)
_SELECT_HASH_BEFORE = "SELECT lower(hex(hash)) FROM journal WHERE key > ? AND key <= ? ORDER BY key DESC LIMIT 1"
_INSERT_ROW = "INSERT INTO journal (key, body, hash, hidden, mac) VALUES (?, ?, ?, ?, ?)"


def insert_records(
    db: sqlite3.Connection,
    key: LeaseKey,
    records: Sequence[SealedRecord],
    status: Status,
    info: RunInfo | None = None,
    snapshot: SealedSnapshot | None = None,
) -> None:
    """Append records after a run's last one, and write what it is listed by and its snapshot.

    Raises:
        StaleLease: Another owner holds the run, or the records do not follow its last one.
        UnknownRunError: There is no such run.
    """
    number, run_id, epoch, owner, keyring = key.run_rowid, key.run_id, key.epoch, key.owner, key.keyring
    if records:
        before, seq, digest = records[0].seq - 1, records[-1].seq, records[-1].hash
    else:  # only the status changes
        run = _select_row(db, run_id)
        before = seq = -1 if run is None else run.seq
        digest = "" if run is None else run.digest
    owned = owner if status == "running" else None
    mac = _mac_bytes(keyring, head_row(number, run_id, epoch, owned, seq, digest, status))
    changes, fence = (seq, bytes.fromhex(digest), owned, mac), (number, run_id, epoch, before)
    if (
        db.execute(_UPDATE_RUN, (*changes, *fence, status)).rowcount != 1
        and db.execute(_UPDATE_STATUS, (*changes, status, *fence)).rowcount != 1
    ):
        raise _stale_error(db, key)
    high = number << 32
    for seq_of_row, body, hash_of_row, hidden, mac_of_row in encode_commit(records):
        values = (high | seq_of_row, body, bytes.fromhex(hash_of_row), hidden, _from_hex(mac_of_row))
        db.execute(_INSERT_ROW, values)
    if info is not None:
        write_run_info(db, number, info)
    if status == "finished":
        db.execute("DELETE FROM snapshot WHERE id = ?", (number,))
    elif snapshot is not None:
        db.execute(
            "INSERT OR REPLACE INTO snapshot (id, content, mac) VALUES (?, ?, ?)",
            (number, snapshot.content, bytes.fromhex(snapshot.mac)),
        )


def _from_hex(digits: str | None) -> bytes | None:
    return None if digits is None else bytes.fromhex(digits)


def update_hidden(db: sqlite3.Connection, key: LeaseKey, seq: int, hidden: str, listed: RunInfo | None = None) -> None:
    """Replace the hidden values of one record, and the texts by which its run is listed.

    Raises:
        StaleLease: Another owner holds the run.
        UnknownRunError: There is no such run.
        RunHeldError: The run is on hold.
        StoreError: The values are not those of the record, or the record cannot be read.
    """
    run = db.execute(
        "SELECT id FROM run WHERE run_id = ? AND epoch = ? AND owner IS NOT NULL", (key.run_id, key.epoch)
    ).fetchone()
    if run is None:
        raise _stale_error(db, key)
    held = db.execute("SELECT reason FROM hold WHERE id = ? AND NOT ended", run).fetchone()
    if held is not None:
        raise RunHeldError(key.run_id, held[0])
    db.execute("DELETE FROM snapshot WHERE id = ?", run)
    low, high = run[0] << 32, (run[0] + 1) << 32
    found = db.execute(f"{_SELECT_ROWS.format(mac='mac')} LIMIT 1", (low, low + seq - 1, high)).fetchone()
    if found is not None:
        row = JournalRow(*found)
        changed = replace_hidden(row, seq, hidden)
        db.execute("UPDATE journal SET hidden = ? WHERE key = ?", (changed, low | row.seq))
    if listed is not None:
        update_texts(db, run[0], listed)


def _stale_error(db: sqlite3.Connection, key: LeaseKey) -> StoreError:
    run = db.execute("SELECT epoch, owner, seq, status FROM run WHERE run_id = ?", (key.run_id,)).fetchone()
    return stale_error(key.run_id, key.epoch, key.owner, run)


def select_heads(db: sqlite3.Connection, column: str = "", *values: str) -> list[Any]:
    """Number, run id, epoch, owner, seq, hash, status and MAC of runs, the oldest run first.

    Args:
        db: The file.
        column: The column to filter by, ``run_id`` or ``status``; empty for all runs.
        values: The value of that column.
    """
    where = f" WHERE {column} = ?" if column else ""
    if column == "status" and values != ("finished",):
        where += " AND status <> 'finished'"  # so that SQLite sees that the index has them all
    row = _ROW if sqlite_schema.has_macs(db) else _ROW.replace("lower(hex(mac))", "''")
    return db.execute(f"SELECT {row} FROM run{where} ORDER BY id", values).fetchall()  # noqa: S608  # column names from our code


def select_records(
    db: sqlite3.Connection, run_id: str, after: int, limit: int | None = None
) -> list[SealedRecord] | None:
    """A run's records after a sequence number, at most so many, or None if there is no such run."""
    run = db.execute("SELECT id FROM run WHERE run_id = ?", (run_id,)).fetchone()
    if run is None:
        return None
    if not isinstance(run[0], int):
        raise sqlite3.DatabaseError(f"run {run_id!r} has no number: the table of the runs is damaged")
    low, high = run[0] << 32, (run[0] + 1) << 32
    query = _SELECT_ROWS.format(mac="mac" if sqlite_schema.has_macs(db) else "NULL") + " LIMIT ?"
    rows = map(JournalRow._make, db.execute(query, (low, low + after, high, -1 if limit is None else limit)))
    before = db.execute(_SELECT_HASH_BEFORE, (low, low + after)).fetchone()
    return decode_rows(rows, GENESIS_HASH if before is None else before[0], after)[:limit]


def select_snapshot(db: sqlite3.Connection, run_id: str) -> SealedSnapshot | None:
    """A run's snapshot, or None if it has none."""
    if not sqlite_schema.has(db, sqlite_schema.SNAPSHOTS):
        return None
    found = db.execute(_SELECT_SNAPSHOT, (run_id,)).fetchone()
    return None if found is None else SealedSnapshot(found[0].decode(errors="replace"), found[1])


_SELECT_SNAPSHOT = """
    SELECT CAST(content AS BLOB), lower(hex(snapshot.mac)) FROM snapshot JOIN run ON run.id = snapshot.id
    WHERE run_id = ?
"""


async def read_row(reader: SqliteReader, run_id: str) -> tuple[RunRow | None, int]:
    """The row of a run, or None, and the number that a new run would get."""

    def select(db: sqlite3.Connection) -> tuple[RunRow | None, int]:
        (number,) = db.execute("SELECT coalesce(max(id), 0) + 1 FROM run").fetchone()
        return _select_row(db, run_id), number

    return await reader.read(select, (None, 1))


class SqliteStore:
    """Stores journals in a SQLite file. Reading needs no lock; the first write makes this process the writer.

    Close it when you are done, or use it in a ``with`` block. Reads and commits happen in two threads of its own.

    Args:
        path: The file; the first write creates it.
        synchronous: ``full``: what was awaited survives a power cut. ``normal``: it survives a crash of the process,
            but a power cut may lose the last commits, never part of one.

    Attributes:
        path: The file, as an absolute path.
        maintenance: What is done to the store as a whole.
        signals: The answers and cancellations that wait for runs.

    Raises:
        ConfigurationError: ``synchronous`` is neither of the two.
        StoreFormatError: The file is not an agentfsm store, or a newer release wrote it.
        StoreError: The file cannot be read, or has hard links.
    """

    def __init__(self, path: str | Path, *, synchronous: Literal["full", "normal"] = "full") -> None:
        if synchronous not in get_args(sqlite_schema.SynchronousLevel):
            raise ConfigurationError(f"synchronous is 'full' or 'normal', not {synchronous!r}")
        self._file = StoreFile(Path(path))
        self.path = self._file.given
        self._writer = SqliteWriter(self._file, synchronous, OwnerSocket(self._file.lock, ref(self)))
        self._leases: WeakValueDictionary[str, Lease] = WeakValueDictionary()
        self._reader = SqliteReader(self._file)
        self._claiming = threading.Lock()  # also other processes' operations acquire runs here, in another thread
        turn = SqliteTurn(self._file, self._writer, lambda: bool(self._leases))
        self.signals = SqliteSignals(self._writer, self._reader, turn, self._leases.get)
        self.maintenance = SqliteMaintenance(
            self.path, self._writer, self._reader, self._leases, turn, partial(read_row, self._reader)
        )
        self._reader.read_now(lambda db: None, None)  # is it a store?

    # -- leases ---------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Become the file's writer now instead of at the first write.

        Raises:
            StoreLockedError: Another process is the writer; the message names it.
            StoreError: The file cannot be written.
        """
        self._writer.start()

    async def acquire(self, run_id: str, owner: str, *, new: bool = False, keyring: Keyring | None = None) -> Lease:
        """Acquire the lease of a run; see ``Store.acquire``."""
        self._file.check_process()
        lease = _SqliteLease(run_id, owner, 0, 0, GENESIS_HASH)
        with self._claiming:
            current = self._leases.get(run_id)
            if current is not None and new:
                raise RunExistsError(f"run {run_id!r} exists already")
            if current is not None:
                raise StaleLease(run_id, current.owner, "is being run")
            self._leases[run_id] = lease  # from here on, nothing else in this process can acquire it
        try:
            acquired = await self._writer.submit(lambda db: acquire_lease(db, run_id, owner, new, keyring))
            lease.epoch, lease.seq, lease.hash, rowid = acquired
            lease.key = LeaseKey(run_id, lease.epoch, owner, rowid, keyring)
        except BaseException:
            _drop_lease(self._leases, lease)
            raise
        return lease

    async def release(self, lease: Lease) -> None:
        """Release a lease; see ``Store.release``."""
        _drop_lease(self._leases, lease)
        key = _lease_key(lease)
        await self._writer.submit(lambda db: release_lease(db, key))

    # -- writing --------------------------------------------------------------------------------------

    def append(
        self,
        lease: Lease,
        records: Sequence[SealedRecord],
        status: Status,
        info: RunInfo | None = None,
        snapshot: SealedSnapshot | None = None,
    ) -> Awaitable[None]:
        """Append records after the last one; see ``Store.append``."""
        key, runs = _lease_key(lease), len(self._leases)
        if status != "running":
            _drop_lease(self._leases, lease)
        return self._writer.submit(
            lambda db: insert_records(db, key, records, status, info, snapshot), active_runs=runs
        )

    async def redact(self, lease: Lease, seq: int, hidden: str, listed: RunInfo | None = None) -> None:
        """Replace the hidden values of one record, and erase the old ones from the file and its log."""
        key = _lease_key(lease)
        await self._writer.submit(lambda db: update_hidden(db, key, seq, hidden, listed), truncate_wal=True)

    # -- reading --------------------------------------------------------------------------------------

    async def head(self, run_id: str) -> Head | None:
        """The head of a run, or None if there is no such run; see ``Store.head``."""
        if not is_storable(run_id):
            return None
        heads = await self._reader.read(lambda db: self._heads(db, "run_id", run_id), list[Head]())
        return heads[0] if heads else None

    async def heads(self, which: WhichRuns | None = None) -> list[Head]:
        """The heads of all runs, or of some of them, the oldest run first; see ``Store.heads``."""
        if which == "cut off":
            return [head for head in await self.heads("running") if head.is_cut_off]
        filters = () if which is None else ("status", which)
        return await self._reader.read(lambda db: self._heads(db, *filters), list[Head]())

    def _heads(self, db: sqlite3.Connection, *filters: str) -> list[Head]:
        rows = select_heads(db, *filters)
        others = bool(rows) and self._writer.owned_by_other_process()
        return [
            Head(
                run_id,
                epoch,
                owner if others or run_id in self._leases else None,
                seq,
                digest,
                status,
                row=head_row(number, run_id, epoch, owner, seq, digest, status),
                mac=mac,
            )
            for number, run_id, epoch, owner, seq, digest, status, mac in rows
        ]

    async def records(self, run_id: str, after: int = 0, limit: int | None = None) -> list[SealedRecord]:
        """A run's records, in order, after a sequence number; see ``Store.records``."""
        records = await self._reader.read(lambda db: select_records(db, run_id, after, limit), None)
        if records is None:
            raise UnknownRunError(f"there is no run {run_id!r} in {self.path}")
        return records

    async def snapshot(self, run_id: str) -> SealedSnapshot | None:
        """A run's snapshot, or None if it has none; see ``Store.snapshot``."""
        return await self._reader.read(lambda db: select_snapshot(db, run_id), None)

    async def find_runs(self, query: RunQuery) -> RunPage:
        """The runs that a query finds, the newest first; see ``Store.find_runs``."""
        found = await self._reader.read(lambda db: self._find(db, query), list[tuple[int, RunInfo]]())
        page = found[: query.limit]
        return RunPage(tuple(info for _, info in page), str(page[-1][0]) if len(found) > len(page) else "")

    def _find(self, db: sqlite3.Connection, query: RunQuery) -> list[tuple[int, RunInfo]]:
        found = select_run_infos(db, query, sqlite_schema.schema_version(db))
        others = any(info.owner for _, info in found) and self._writer.owned_by_other_process()
        return [
            (number, info if info.owner is None or others or info.run_id in self._leases else replace(info, owner=None))
            for number, info in found
        ]

    async def count_runs(self, query: RunQuery) -> int:
        """How many runs a query finds on all its pages; see ``Store.count_runs``."""
        return await self._reader.read(lambda db: count_run_infos(db, query, sqlite_schema.schema_version(db)), 0)

    def close(self) -> None:
        """Write what is queued, and close the file; other processes can then write it."""
        self._reader.close()  # first: the connection closed last checkpoints the log, which a reader cannot
        self._writer.close()
        self._file.closed()

    async def aclose(self) -> None:
        """The same from an event loop, which is not blocked until what is queued is written."""
        await self._writer.drain()
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


@dataclass(slots=True, eq=False)
class _SqliteLease(Lease):
    """A lease that has the run's row id, which saves a query per commit."""

    key: LeaseKey | None = None


def _lease_key(lease: Lease) -> LeaseKey:
    if isinstance(lease, _SqliteLease) and lease.key is not None:
        return lease.key
    return LeaseKey(lease.run_id, lease.epoch, lease.owner, 0, None)  # not a lease of this store: no run has row 0


def _drop_lease(leases: WeakValueDictionary[str, Lease], lease: Lease) -> None:
    if leases.get(lease.run_id) is lease:
        del leases[lease.run_id]
