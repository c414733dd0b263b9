"""PostgresStore: a durable store on a PostgreSQL server, written by many processes on many machines.

Who owns a run is decided by its epoch, which each acquisition raises: the statement that appends records compares it,
in the same transaction. Whether an owner lives is decided by the server, never by the clock of a worker. The records of
all runs of a process that are queued at one moment share a commit.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, LiteralString, NamedTuple, Self

from psycopg import AsyncCursor
from pydantic import SecretStr

from agentfsm.errors import (
    ConfigurationError,
    RunExistsError,
    RunHeldError,
    StaleLease,
    StoreError,
    StoreFormatError,
    UnknownRunError,
)
from agentfsm.journal.commit_encoding import JournalRow, decode_rows, encode_commit, replace_hidden
from agentfsm.journal.hash_chain import GENESIS_HASH
from agentfsm.journal.postgres.postgres_maintenance import PostgresMaintenance
from agentfsm.journal.postgres.postgres_rows import (
    INSERT_ROWS,
    SELECT_NAMED_ROWS,
    SELECT_ROWS,
    bytes_column,
    number_column,
    row_columns,
    rows_of,
    text_column,
)
from agentfsm.journal.postgres.postgres_run_info import (
    WRITE_LISTED,
    ListedRun,
    count_run_infos,
    listed_row,
    select_run_infos,
    update_texts,
)
from agentfsm.journal.postgres.postgres_schema import SCHEMA_VERSION, require_current, transaction
from agentfsm.journal.postgres.postgres_session import (
    Connection,
    Liveness,
    PostgresSession,
    PostgresSettings,
    parameters_url,
    read_conninfo,
)
from agentfsm.journal.postgres.postgres_signals import PostgresSignals
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.run_info import RunInfo, RunPage, RunQuery
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
from agentfsm.runtime.timeout import end_task

SHORT_ROWS_BYTES = 10_000
"""So many bytes of rows are decoded in a millisecond or two; more are decoded in a thread."""

FETCHED_ROWS = 500
"""How many rows are taken over from the server's answer without letting the event loop go on."""

_SELECT_RUN = """
    SELECT id, run_id, epoch, owner, owner_key, seq, encode(hash, 'hex'), status, coalesce(encode(mac, 'hex'), ''),
        owner_key IN (SELECT key FROM agentfsm.alive)
    FROM agentfsm.run
"""

_CUT_OFF: LiteralString = """
    WHERE status = 'running' AND seq > 0
        AND (owner_key = %s OR (owner_key IN (SELECT key FROM agentfsm.alive)) IS NOT TRUE)
    ORDER BY id
"""
"""Those that no other process owns: of those that are queued there may be many, and workers ask often."""

_SELECT_HASH_BEFORE = """
    SELECT encode(hash, 'hex') FROM agentfsm.journal
    WHERE run = (SELECT id FROM agentfsm.run WHERE run_id = %s) AND seq <= %s ORDER BY seq DESC LIMIT 1
"""

_CHANGE_OWNER = """
    UPDATE agentfsm.run SET epoch = %s, owner = %s, owner_key = %s, mac = %s
    WHERE id = %s AND epoch = %s AND seq = %s AND owner_key IS NOT DISTINCT FROM %s
"""

_APPEND_PARTS: LiteralString = f"""
    WITH head AS (
        SELECT * FROM unnest(
            %(number)s::bigint[], %(epoch)s::bigint[], %(before)s::bigint[], %(seq)s::bigint[], %(hash)s::bytea[],
            %(status)s::text[], %(owner)s::text[], %(mac)s::bytea[]
        ) AS head (number, epoch, before, seq, hash, status, owner, mac)
    ), known AS (
        SELECT FROM agentfsm.version WHERE number = %(version)s
    ), fence AS (
        UPDATE agentfsm.run AS run
        SET seq = head.seq, hash = head.hash, status = head.status, owner = head.owner, mac = head.mac,
            owner_key = CASE WHEN head.owner IS NULL THEN NULL ELSE run.owner_key END
        FROM head
        WHERE run.id = head.number AND run.epoch = head.epoch AND run.seq = head.before AND run.owner IS NOT NULL
            AND (run.status <> 'finished' OR head.status = 'finished') AND EXISTS (SELECT FROM known)
        RETURNING run.id, run.status
    ), added AS (
        {INSERT_ROWS} JOIN fence ON fence.id = new.run
    )"""  # noqa: S608  # our own text
_WRITTEN: LiteralString = " SELECT id FROM fence"
_MORE_PARTS: LiteralString = f""", {WRITE_LISTED}, kept AS (
        INSERT INTO agentfsm.snapshot (id, content, mac)
        SELECT snapshot.* FROM unnest(%(of)s::bigint[], %(snapshot)s::text[], %(snapshot_mac)s::bytea[])
            AS snapshot (id, content, mac) JOIN fence USING (id) WHERE fence.status <> 'finished'
        ON CONFLICT (id) DO UPDATE SET content = EXCLUDED.content, mac = EXCLUDED.mac
    ), dropped AS (
        DELETE FROM agentfsm.snapshot USING fence WHERE snapshot.id = fence.id AND fence.status = 'finished'
    )"""  # noqa: S608  # our own text
_APPEND, _APPEND_MORE = _APPEND_PARTS + _WRITTEN, _APPEND_PARTS + _MORE_PARTS + _WRITTEN
"""The fence and the records of many runs in one statement, the longer one with what they are listed by and their
snapshots: of a run whose fence fails, nothing is written, and nothing at all if a later release has migrated the
schema. That is looked for first, so that whoever migrates it and whoever writes lock tables in the same order."""


class _RunRow(NamedTuple):
    """The row of a run, and whether the process that owns it lives."""

    number: int
    run_id: str
    epoch: int
    owner: str | None
    owner_key: int | None
    seq: int
    digest: str
    status: Status
    mac: str
    is_alive: bool | None

    def text(self) -> str:
        """The text that is sealed."""
        return head_row(self.number, self.run_id, self.epoch, self.owner, self.seq, self.digest, self.status)


class _LeaseKey(NamedTuple):
    """The content of a lease, for queued jobs: a job must not keep the lease itself alive."""

    run_id: str
    epoch: int
    owner: str
    owner_key: int
    number: int
    keyring: Keyring | None


class _Job(NamedTuple):
    """Records to append, or a lease to release if ``status`` is None."""

    future: asyncio.Future[None] | None
    key: _LeaseKey
    records: tuple[SealedRecord, ...]
    status: Status | None
    info: RunInfo | None = None
    snapshot: SealedSnapshot | None = None

    @property
    def changes_more(self) -> bool:
        """Whether it writes other tables, too: what the run is listed by, or its snapshot."""
        return self.info is not None or self.snapshot is not None or self.status == "finished"


class _PostgresLease(Lease):
    """A lease with the content that queued jobs need, and what releases it when it is garbage-collected."""

    key: _LeaseKey
    finalizer: weakref.finalize[[_LeaseKey], Any]


class PostgresStore:
    """Stores journals on a PostgreSQL server (version 13 or later), for any number of processes.

    The first write creates the tables, in a schema ``agentfsm``, which needs the right to create one; ``agentfsm store
    init`` does it beforehand. Close the store with ``aclose`` when you are done, or use it in an ``async with`` block.

    Args:
        url: The database: ``postgresql://user:password@host/database``, or parameters in the form of libpq.
        liveness: How the server knows that this process still lives. ``session``: by its connection, so that the runs
            of a process that was killed can be taken over at once. ``lease``: by leases that it renews, which also
            works through a pooler in transaction mode, such as pgbouncer.
        lease_s: Seconds for which a lease is valid; a run of a process that died is free after that time.
        wait_s: Seconds to wait for a server that went away, before a write or a read fails.
        listen_url: The database without a pooler between, so that answers and cancellations that other processes send
            are heard of at once also with ``liveness="lease"``; without it they are looked for every 2 seconds.

    Attributes:
        url: The database as a URL, which may have a password.
        maintenance: What is done to the store as a whole.
        signals: The answers and cancellations that wait for runs.

    Raises:
        ConfigurationError: A URL cannot be read, or a number is not greater than 0.
    """

    def __init__(
        self,
        url: str,
        *,
        liveness: Liveness = "session",
        lease_s: float = 15.0,
        wait_s: float = 60.0,
        listen_url: str = "",
    ) -> None:
        given = read_conninfo(url)
        read_conninfo(listen_url)
        if liveness not in ("session", "lease") or not lease_s > 0 or not wait_s > 0:
            raise ConfigurationError(
                "liveness must be 'session' or 'lease', and lease_s and wait_s must be greater than 0"
            )
        self.url = SecretStr(url if "://" in url else parameters_url(given))
        self._settings = PostgresSettings(url, liveness, lease_s, wait_s, listen_url)
        self._process = os.getpid()
        self._queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = weakref.WeakKeyDictionary()
        self._leases: weakref.WeakValueDictionary[str, Lease] = weakref.WeakValueDictionary()
        self.maintenance = PostgresMaintenance(lambda: self._queue().session)
        self.signals = PostgresSignals(lambda: self._queue().session, self._leases.get)

    def __repr__(self) -> str:
        return f"PostgresStore({self._settings.server})"

    def _queue(self) -> _Queue:
        """What writes in the running event loop."""
        if os.getpid() != self._process:
            raise StoreError(
                f"{self!r} was opened by process {self._process}, and process {os.getpid()} was forked from it: open "
                "one there, or start the child with the method 'spawn'"
            )
        loop = asyncio.get_running_loop()
        if loop not in self._queues:
            self._queues[loop] = _Queue(PostgresSession(self._settings))
        return self._queues[loop]

    # -- leases ---------------------------------------------------------------------------------------

    async def acquire(self, run_id: str, owner: str, *, new: bool = False, keyring: Keyring | None = None) -> Lease:
        """Acquire the lease of a run; see ``Store.acquire``."""
        current = self._leases.get(run_id)
        if current is not None and new:
            raise RunExistsError(f"run {run_id!r} exists already")
        if current is not None:
            raise StaleLease(run_id, current.owner, "is being run")
        queue = self._queue()
        lease = _PostgresLease(run_id, owner, 0, 0, GENESIS_HASH)
        self._leases[run_id] = lease  # from here on, nothing else in this process can acquire it
        try:
            await queue.session.write(lambda db, _: _acquire(db, queue.session.key, lease, new, keyring))
        except BaseException:
            self._drop_lease(lease)
            if hasattr(lease, "key"):  # it may have been written, and nobody would release it
                queue.release_abandoned(lease.key)
            raise
        lease.finalizer = weakref.finalize(lease, queue.release_abandoned, lease.key)
        lease.finalizer.atexit = False
        self.signals.listener()
        return lease

    async def release(self, lease: Lease) -> None:
        """Release a lease; see ``Store.release``."""
        self._drop_lease(lease)
        await self._queue().submit(_lease_key(lease), (), None)

    def _drop_lease(self, lease: Lease) -> None:
        if self._leases.get(lease.run_id) is lease:
            del self._leases[lease.run_id]
        if isinstance(lease, _PostgresLease) and hasattr(lease, "finalizer"):
            lease.finalizer.detach()

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
        key = _lease_key(lease)
        if status != "running":
            self._drop_lease(lease)
        return self._queue().submit(key, tuple(records), status, info, snapshot)

    async def redact(self, lease: Lease, seq: int, hidden: str, listed: RunInfo | None = None) -> None:
        """Replace the hidden values of one record; see ``Store.redact``.

        The server keeps the old ones in free pages until ``maintenance.compact()``, and in its log for a while.
        """
        key = _lease_key(lease)

        async def update(db: Connection, again: bool) -> None:
            async with transaction(db):
                is_owned = await _lock_own(db, key)  # before the hold is looked for: it keeps one from being added
                held = "SELECT reason FROM agentfsm.hold WHERE id = %s AND NOT ended"
                if found := await (await db.execute(held, (key.number,))).fetchone():
                    raise RunHeldError(key.run_id, found[0])
                if not is_owned or not await _redact(db, key, seq, hidden):
                    raise await _stale_error(db, key)
                await db.execute(_DELETE_SNAPSHOT, (key.number,))
                if listed is not None:
                    await update_texts(db, key.number, listed)

        await self._queue().session.write(update)

    # -- reading --------------------------------------------------------------------------------------

    async def head(self, run_id: str) -> Head | None:
        """The head of a run, or None if there is no such run; see ``Store.head``."""
        if not is_storable(run_id):
            return None
        heads = await self._select("WHERE run_id = %s", run_id, prepare=True)
        return heads[0] if heads else None

    async def heads(self, which: WhichRuns | None = None) -> list[Head]:
        """The heads of all runs, or of some of them, the oldest run first; see ``Store.heads``."""
        if which is None:
            return await self._select("ORDER BY id")
        if which == "cut off":
            session = self._queue().session
            found = await self._select(_CUT_OFF, session.key, prepare=True)
            while await session.await_others():  # a server that was away does not know who lives before they are back
                found = await self._select(_CUT_OFF, session.key, prepare=True)
            return [head for head in found if head.is_cut_off]
        return await self._select("WHERE status = %s ORDER BY id", which)

    async def _select(self, clause: LiteralString, *values: str | int, prepare: bool = False) -> list[Head]:
        queue = self._queue()

        async def select(db: Connection) -> list[_RunRow]:
            rows = await (await db.execute(_SELECT_RUN + clause, values, prepare=prepare)).fetchall()
            return [_RunRow(*row) for row in rows]

        nothing: list[_RunRow] = []
        found = await queue.session.read(select, nothing)
        return [
            Head(
                run.run_id,
                run.epoch,
                run.owner if self._is_owned(run, queue.session.key) else None,
                run.seq,
                run.digest,
                run.status,
                row=run.text(),
                mac=run.mac,
            )
            for run in found
        ]

    def _is_owned(self, run: _RunRow, key: int) -> bool:
        return run.run_id in self._leases if run.owner_key == key else bool(run.is_alive)

    async def records(self, run_id: str, after: int = 0, limit: int | None = None) -> list[SealedRecord]:
        """A run's records, in order, after a sequence number; see ``Store.records``."""

        async def select(db: Connection) -> tuple[list[JournalRow], str] | None:
            found = await db.execute(f"{SELECT_NAMED_ROWS} LIMIT %s", (run_id, after, limit), prepare=True)
            rows = await _fetch_rows(found)
            if not rows and await _select_run(db, run_id) is None:
                return None
            if after <= 0:
                return rows, GENESIS_HASH
            before = await (await db.execute(_SELECT_HASH_BEFORE, (run_id, after), prepare=True)).fetchone()
            return rows, GENESIS_HASH if before is None else before[0]

        found = await self._queue().session.read(select, None)
        if found is None:
            raise UnknownRunError(f"there is no run {run_id!r} in {self._settings.server}")
        rows, before = found
        if sum(len(row.body) + len(row.hidden or "") for row in rows) <= SHORT_ROWS_BYTES:
            return decode_rows(rows, before, after)[:limit]
        return (await asyncio.to_thread(decode_rows, rows, before, after))[:limit]

    async def snapshot(self, run_id: str) -> SealedSnapshot | None:
        """A run's snapshot, or None if it has none; see ``Store.snapshot``."""

        async def select(db: Connection) -> SealedSnapshot | None:
            found = await (await db.execute(_SELECT_SNAPSHOT, (run_id,), prepare=True)).fetchone()
            return None if found is None else SealedSnapshot(*found)

        return await self._queue().session.read(select, None)

    async def find_runs(self, query: RunQuery) -> RunPage:
        """The runs that a query finds, the newest first; see ``Store.find_runs``."""
        session = self._queue().session
        found = await session.read(lambda db: select_run_infos(db, query), list[ListedRun]())
        page = found[: query.limit]
        runs = tuple(each.info if self._is_held(each, session.key) else replace(each.info, owner=None) for each in page)
        return RunPage(runs, str(page[-1].number) if len(found) > len(page) else "")

    def _is_held(self, run: ListedRun, key: int) -> bool:
        return run.info.run_id in self._leases if run.owner_key == key else run.is_alive

    async def count_runs(self, query: RunQuery) -> int:
        """How many runs a query finds on all its pages; see ``Store.count_runs``."""
        return await self._queue().session.read(lambda db: count_run_infos(db, query), 0)

    # -- the end --------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Write what is queued, give up all leases, and close the connections of this event loop."""
        await self.signals.aclose()
        queue = self._queues.pop(asyncio.get_running_loop(), None)
        for lease in list(self._leases.values()):
            self._drop_lease(lease)
        if queue is not None:
            await queue.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


TURNS_BETWEEN_COMMITS = 2
"""Turns of the event loop after a commit, in which the runs that waited for it continue. What they write then is part
of the next commit, and not of the one after. That saves a fifth of the statements."""


class _Queue:
    """What one event loop has to write, in order. All that is queued when the connection is free shares a commit."""

    def __init__(self, session: PostgresSession) -> None:
        self.session = session
        self._loop = asyncio.get_running_loop()
        self._jobs: list[_Job] = []
        self._flusher: asyncio.Task[None] | None = None

    def submit(
        self,
        key: _LeaseKey,
        records: tuple[SealedRecord, ...],
        status: Status | None,
        info: RunInfo | None = None,
        snapshot: SealedSnapshot | None = None,
    ) -> asyncio.Future[None]:
        """Queue a job. Without a status, the lease is released."""
        future = self._loop.create_future()
        self._jobs.append(_Job(future, key, records, status, info, snapshot))
        self._start()
        return future

    def release_abandoned(self, key: _LeaseKey) -> None:
        """Queue the release of a lease that was garbage-collected; safe in any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._add_release, key)

    def _add_release(self, key: _LeaseKey) -> None:
        self._jobs.append(_Job(None, key, (), None))
        self._start()

    def _start(self) -> None:
        if self._flusher is None or self._flusher.done():
            self._flusher = self._loop.create_task(self._flush())

    async def _flush(self) -> None:
        while self._jobs:
            jobs = self._next_jobs()
            try:
                await self._commit(jobs)
                for _ in range(TURNS_BETWEEN_COMMITS):
                    await asyncio.sleep(0)
            except asyncio.CancelledError:
                error = StoreError(f"{self.session.settings.server} had not answered when the store was closed")
                for job in jobs + self._jobs:
                    _resolve(job.future, error)
                self._jobs.clear()
                raise

    async def _commit(self, jobs: list[_Job]) -> None:
        errors: Mapping[int, Exception]
        try:
            errors = await self.session.write(partial(_write_jobs, jobs), checks_schema=True)
        except Exception as error:  # whatever it is: nobody may wait forever
            errors = {job.key.number: error for job in jobs}
        for job in jobs:
            _resolve(job.future, errors.get(job.key.number))

    def _next_jobs(self) -> list[_Job]:
        """The first job of each run."""
        chosen: dict[int, _Job] = {}
        rest: list[_Job] = []
        for job in self._jobs:
            if job.key.number in chosen:
                rest.append(job)
            else:
                chosen[job.key.number] = job
        self._jobs = rest
        return list(chosen.values())

    async def aclose(self) -> None:
        """Write what is queued, and close the connections. A server that does not answer is waited for, as always."""
        if self._flusher is not None:
            await asyncio.wait([self._flusher], timeout=self.session.settings.wait_s)
            await end_task(self._flusher)
        await self.session.aclose()


def _resolve(future: asyncio.Future[None] | None, error: Exception | None) -> None:
    if future is None or future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _lease_key(lease: Lease) -> _LeaseKey:
    key = getattr(lease, "key", None)
    if isinstance(key, _LeaseKey):
        return key
    return _LeaseKey(lease.run_id, lease.epoch, lease.owner, -1, -1, None)


# -- statements ---------------------------------------------------------------------------------------


async def _fetch_rows(found: AsyncCursor[tuple[Any, ...]]) -> list[JournalRow]:
    """The rows that ``SELECT_ROWS`` found. Other tasks of the event loop run between batches of them."""
    some = await found.fetchmany(FETCHED_ROWS)
    rows = rows_of(some)
    while len(some) == FETCHED_ROWS:
        await asyncio.sleep(0)
        some = await found.fetchmany(FETCHED_ROWS)
        rows += rows_of(some)
    return rows


async def _select_run(db: Connection, run_id: str) -> _RunRow | None:
    row = await (await db.execute(_SELECT_RUN + "WHERE run_id = %s", (run_id,))).fetchone()
    return None if row is None else _RunRow(*row)


async def _acquire(db: Connection, key: int, lease: _PostgresLease, new: bool, keyring: Keyring | None) -> None:
    """Acquire a run. It may be repeated: a claim of this process counts as none.

    Args:
        db: The connection.
        key: By which the server knows this process.
        lease: The lease, which has its content from just before that is written.
        new: Whether to create the run.
        keyring: The keys of the host.

    Raises:
        RunExistsError: It should be created, and exists already.
        UnknownRunError: It is not to be created and does not exist.
        StaleLease: A process that lives owns it.
        StoreError: Somebody without the secret changed its row.
    """
    run_id, owner = lease.run_id, lease.owner
    while True:
        run = await _select_run(db, run_id)
        if new and run is not None and (run.seq or (run.is_alive and run.owner_key != key)):
            raise RunExistsError(f"run {run_id!r} exists already")
        if run is None:
            if not new:
                raise UnknownRunError(f"there is no run {run_id!r}")
            buried = "SELECT 1 FROM agentfsm.tombstone WHERE run_id = %s AND seq > 0"
            if await (await db.execute(buried, (run_id,))).fetchone() is not None:
                raise RunExistsError(f"run {run_id!r} existed until it was purged: its id cannot be used again")
            genesis = bytes.fromhex(GENESIS_HASH)
            await db.execute(
                "INSERT INTO agentfsm.run (run_id, hash) VALUES (%s, %s) ON CONFLICT DO NOTHING", (run_id, genesis)
            )
            continue
        if run.is_alive and run.owner_key != key:
            raise StaleLease(run_id, run.owner, "is being run")
        if await _is_changed(db, run, keyring):
            raise changed_row_error(run_id)
        lease.epoch, lease.seq, lease.hash = run.epoch + 1, run.seq, run.digest
        lease.key = _LeaseKey(run_id, lease.epoch, owner, key, run.number, keyring)
        if await _change_owner(db, run, run._replace(epoch=lease.epoch, owner=owner, owner_key=key), keyring):
            return


async def _is_changed(db: Connection, run: _RunRow, keyring: Keyring | None) -> bool:
    """Whether somebody without the secret changed a row that was sealed, or removed its seal."""
    if keyring is None:
        return False
    if run.mac:
        return is_changed(run.text(), run.mac, keyring)
    sealed = await db.execute(
        "SELECT 1 FROM agentfsm.journal WHERE run = %s AND mac IS NOT NULL LIMIT 1", (run.number,)
    )
    return await sealed.fetchone() is not None


async def _change_owner(db: Connection, before: _RunRow, after: _RunRow, keyring: Keyring | None) -> bool:
    """Write the epoch and the owner of a run, unless somebody else has done so since it was read."""
    mac = None if keyring is None else bytes.fromhex(seal_row(keyring, after.text()))
    changed = await db.execute(
        _CHANGE_OWNER,
        (after.epoch, after.owner, after.owner_key, mac, before.number, before.epoch, before.seq, before.owner_key),
    )
    return changed.rowcount == 1


async def _write_jobs(jobs: list[_Job], db: Connection, again: bool) -> dict[int, StoreError]:
    """Write jobs of different runs, and return the error of each run that has one.

    Args:
        jobs: The jobs.
        db: The connection.
        again: Whether an attempt before this one may have been committed.
    """
    errors: dict[int, StoreError] = {}
    for job in jobs:
        if job.status is None:
            await _release(db, job.key)
    if heads := [await _new_head(db, job, job.status) for job in jobs if job.status is not None]:
        written = await _append(db, heads)
        for head in heads:
            if head.job.key.number not in written and not (again and await _is_written(db, head)):
                errors[head.job.key.number] = await _stale_error(db, head.job.key)
    return errors


_DELETE_SNAPSHOT = "DELETE FROM agentfsm.snapshot WHERE id = %s"
_SELECT_SNAPSHOT = """
    SELECT content, encode(snapshot.mac, 'hex') FROM agentfsm.snapshot JOIN agentfsm.run USING (id) WHERE run_id = %s
"""


class _NewHead(NamedTuple):
    """What the row of a run becomes with some records."""

    job: _Job
    status: Status
    before: int
    seq: int
    digest: str

    def mac(self) -> bytes | None:
        """The seal of the row."""
        key = self.job.key
        if key.keyring is None:
            return None
        row = head_row(key.number, key.run_id, key.epoch, self.owner(), self.seq, self.digest, self.status)
        return bytes.fromhex(seal_row(key.keyring, row))

    def owner(self) -> str | None:
        """The owner, unless the lease ends."""
        return self.job.key.owner if self.status == "running" else None


async def _new_head(db: Connection, job: _Job, status: Status) -> _NewHead:
    if job.records:
        return _NewHead(job, status, job.records[0].seq - 1, job.records[-1].seq, job.records[-1].hash)
    run = await _select_run(db, job.key.run_id)  # only the status changes
    return _NewHead(job, status, -1, -1, "") if run is None else _NewHead(job, status, run.seq, run.seq, run.digest)


async def _append(db: Connection, heads: list[_NewHead]) -> set[int]:
    """Write what is queued of runs, and return the numbers of those that this process owns."""
    rows = [(head.job.key.number, row) for head in heads for row in encode_commit(head.job.records)]
    values = {
        "version": SCHEMA_VERSION,
        "number": number_column([head.job.key.number for head in heads]),
        "epoch": number_column([head.job.key.epoch for head in heads]),
        "before": number_column([head.before for head in heads]),
        "seq": number_column([head.seq for head in heads]),
        "hash": bytes_column([bytes.fromhex(head.digest) for head in heads]),
        "status": text_column([head.status for head in heads]),
        "owner": text_column([head.owner() for head in heads]),
        "mac": bytes_column([head.mac() for head in heads]),
        **row_columns(rows),
    }
    jobs = [head.job for head in heads]
    has_more = any(job.changes_more for job in jobs)
    if has_more:
        kept = [(job.key.number, job.snapshot) for job in jobs if job.snapshot is not None]
        values |= {
            "listed": text_column([listed_row(job.key.number, job.info) for job in jobs if job.info is not None]),
            "of": number_column([number for number, _ in kept]),
            "snapshot": text_column([snapshot.content for _, snapshot in kept]),
            "snapshot_mac": bytes_column([bytes.fromhex(snapshot.mac) for _, snapshot in kept]),
        }
    done = await db.execute(_APPEND_MORE if has_more else _APPEND, values)
    return {row[0] for row in await done.fetchall()}


async def _lock_own(db: Connection, key: _LeaseKey) -> bool:
    """Lock the row of a run for the transaction; False if the lease is not the run's current one."""
    owned = "SELECT 1 FROM agentfsm.run WHERE id = %s AND epoch = %s AND owner IS NOT NULL FOR UPDATE"
    return await (await db.execute(owned, (key.number, key.epoch))).fetchone() is not None


async def _redact(db: Connection, key: _LeaseKey, seq: int, hidden: str) -> bool:
    """Replace the hidden values of a record; False if there is no such record."""
    found = rows_of(await (await db.execute(f"{SELECT_ROWS} LIMIT 1", (key.number, seq - 1))).fetchall())
    if not found:
        return False
    (row,) = found
    changed = replace_hidden(row, seq, hidden)
    texts, values = (changed or None, None) if isinstance(changed, str) else (None, changed)
    await db.execute(
        "UPDATE agentfsm.journal SET hidden = %s, hidden_values = %s WHERE run = %s AND seq = %s",
        (texts, values, key.number, row.seq),
    )
    return True


async def _is_written(db: Connection, head: _NewHead) -> bool:
    """Whether a commit whose answer was lost has written a head."""
    run = await _select_run(db, head.job.key.run_id)
    expected = (head.job.key.epoch, head.seq, head.digest, head.status)
    return run is not None and (run.epoch, run.seq, run.digest, run.status) == expected


async def _release(db: Connection, key: _LeaseKey) -> None:
    """Release a run, unless another owner has acquired it. A row that somebody changed stays as it is."""
    run = await _select_run(db, key.run_id)
    is_own = run is not None and (run.epoch, run.owner_key) == (key.epoch, key.owner_key)
    if run is None or not is_own or await _is_changed(db, run, key.keyring):
        return
    await _change_owner(db, run, run._replace(owner=None, owner_key=None), key.keyring)


async def _stale_error(db: Connection, key: _LeaseKey) -> StoreError:
    """Why nothing was written of a run."""
    try:
        await require_current(db)
    except StoreFormatError as error:
        return error
    run = await _select_run(db, key.run_id)
    found = None if run is None else (run.epoch, run.owner, run.seq, run.status)
    return stale_error(key.run_id, key.epoch, key.owner, found)
