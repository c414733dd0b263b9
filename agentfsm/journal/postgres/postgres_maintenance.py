"""Maintains a store on a PostgreSQL server (see ``StoreMaintenance``), and finds what was changed in it by other means.

Whoever owns the database can drop a trigger, put a view in place of a table, or hide rows behind a rule or a policy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from agentfsm.errors import StoreError, UnknownRunError
from agentfsm.journal.commit_encoding import run_id_in
from agentfsm.journal.maintenance import AnyStore, Damage, Fact, Hold, Tombstone, read_tombstone
from agentfsm.journal.postgres.postgres_rows import SELECT_ROWS, rows_of
from agentfsm.journal.postgres.postgres_run_info import rebuild_prompts
from agentfsm.journal.postgres.postgres_schema import (
    TABLES,
    TRIGGERS,
    create_schema,
    creation_obstacle,
    read_version,
    transaction,
)
from agentfsm.journal.postgres.postgres_session import Connection, PostgresSession

_BATCH = 500
"""How many runs are purged in one transaction."""

_FIRST_LOOK_S, _LOOKS = 0.01, 12
"""How soon to look first whether transactions have ended, each time twice as long after the last; 41 s in all."""

_HOLD = """
    INSERT INTO agentfsm.hold (id, reason, held_by, since, ended, mac) VALUES (%s, %s, %s, %s, %s, %s)
    ON CONFLICT (id) DO UPDATE SET (reason, held_by, since, ended, mac)
        = (EXCLUDED.reason, EXCLUDED.held_by, EXCLUDED.since, EXCLUDED.ended, EXCLUDED.mac)
"""

_SELECT_HOLDS = """
    SELECT run_id, reason, held_by, since, ended, encode(hold.mac, 'hex')
    FROM agentfsm.hold JOIN agentfsm.run ON run.id = hold.id ORDER BY run.id
"""

_LOCK = "SELECT id FROM agentfsm.run WHERE id = ANY(%s) ORDER BY id FOR UPDATE"
"""Keeps a hold from being added at the same time, since a hold refers to the row. It is a statement of its own, so that
the next one sees the holds that it waited for."""

_BURY = """
    WITH wanted AS (
        SELECT * FROM unnest(
            %(number)s::bigint[], %(run_id)s::text[], %(epoch)s::bigint[], %(seq)s::bigint[], %(hash)s::bytea[],
            %(content)s::text[], %(mac)s::bytea[]
        ) AS wanted (number, run_id, epoch, seq, hash, content, mac)
    ), found AS (
        SELECT wanted.* FROM wanted JOIN agentfsm.run ON run.id = wanted.number
        WHERE (run.run_id, run.epoch, run.seq, run.hash) = (wanted.run_id, wanted.epoch, wanted.seq, wanted.hash)
            AND (run.status = 'finished' OR run.seq = 0)
            AND (run.owner_key IS NULL OR run.owner_key NOT IN (SELECT key FROM agentfsm.alive))
            AND NOT EXISTS (SELECT FROM agentfsm.hold WHERE hold.id = run.id AND NOT ended)
    )
    INSERT INTO agentfsm.tombstone (number, run_id, seq, content, mac)
    SELECT number, run_id, seq, content, mac FROM found RETURNING number, run_id
"""

_TOMBSTONES = "SELECT content, encode(mac, 'hex') FROM agentfsm.tombstone ORDER BY number"
_TOMBSTONES_OF_ID = "SELECT content, encode(mac, 'hex') FROM agentfsm.tombstone WHERE run_id = %s ORDER BY number"

LONGEST_SKEW_S = 60.0
"""How many seconds the clocks of a server and of a machine with workers may be apart."""

_DESCRIBE = """
    SELECT current_setting('server_version'),
        (SELECT sum(pg_total_relation_size(oid)) FROM pg_class
            WHERE relnamespace = 'agentfsm'::regnamespace AND relkind = 'r'),
        current_setting('transaction_read_only') = 'on', extract(epoch FROM clock_timestamp())::float8,
        (SELECT string_agg(rights || ' on ' || tables, '; ' ORDER BY rights) FROM (
            SELECT rights, string_agg(relname, ', ' ORDER BY relname) AS tables FROM (
                SELECT relname, string_agg(wanted, ', ' ORDER BY wanted) AS rights
                FROM pg_class, unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS wanted
                WHERE relnamespace = 'agentfsm'::regnamespace AND relkind = 'r' AND relname <> 'version'
                    AND NOT has_table_privilege(pg_class.oid, wanted) GROUP BY relname
            ) AS by_table GROUP BY rights
        ) AS by_rights)
"""

_OWNS_TABLES = """
    SELECT bool_and(pg_has_role(relowner, 'USAGE')) FROM pg_class
    WHERE relnamespace = 'agentfsm'::regnamespace AND relkind = 'r'
"""

_OPEN_TRANSACTIONS = """
    SELECT virtualxid FROM pg_locks LEFT JOIN pg_stat_activity USING (pid)
    WHERE locktype = 'virtualxid' AND pid <> pg_backend_pid()
        AND coalesce(datname, current_database()) = current_database()
"""
"""Those of this database, whoever runs them; of a connection that is being made the database is not known yet."""


class PostgresMaintenance:
    """Maintains the schema ``agentfsm`` of one database."""

    def __init__(self, session: Callable[[], PostgresSession]) -> None:
        self._session = session

    async def prepare(self, *, migrate: bool = False) -> None:
        """Connect, and create or migrate the tables; see ``StoreMaintenance.prepare``."""
        if migrate:
            await self._session().inspect(create_schema)
        await self._session().write(_nothing)

    def writable(self, store: AnyStore) -> AbstractAsyncContextManager[AnyStore]:
        """The store itself: any process may write it."""
        return nullcontext(store)

    async def describe(self) -> list[Fact]:
        """Versions, size, rights, clock, and a pooler in between; see ``StoreMaintenance.describe``."""
        session = self._session()
        found = await session.read(_describe, list[Fact]())
        if not found:
            return await session.inspect(_describe_empty)
        pooled = await session.read(_is_pooled, False)
        if pooled:
            clash = session.settings.liveness == "session"
            advice = ": in transaction mode it needs ?liveness=lease at the end of the URL" if clash else ""
            found.append(Fact("pooler", f"there is one between here and the server{advice}", is_problem=clash))
        return found

    async def schema_damage(self) -> list[Damage]:
        """How tables and triggers differ from those of a release; see ``StoreMaintenance.schema_damage``."""
        return await self._session().read(find_schema_damage, list[Damage]())

    async def row_damage(self) -> list[Damage]:
        """Records that belong to no run; see ``StoreMaintenance.row_damage``."""
        return await self._session().read(find_row_damage, list[Damage]())

    async def set_hold(self, run_id: str, hold: Hold | None) -> None:
        """Hold a run, or end its hold; see ``StoreMaintenance.set_hold``."""
        await self._session().write(lambda db, _: _hold(db, run_id, hold))

    async def holds(self) -> dict[str, Hold]:
        """The holds of all runs that have one; see ``StoreMaintenance.holds``."""
        return await self._session().read(_select_holds, dict[str, Hold]())

    async def purge(self, tombstones: Sequence[Tombstone]) -> list[str]:
        """Delete runs, and keep their tombstones; see ``StoreMaintenance.purge``."""
        purged: list[str] = []
        for start in range(0, len(tombstones), _BATCH):
            batch = tombstones[start : start + _BATCH]

            async def bury(db: Connection, again: bool, batch: Sequence[Tombstone] = batch) -> list[str]:
                before = await _already_purged(db, batch) if again else set[str]()
                return [*before, *await _purge(db, [each for each in batch if each.run_id not in before])]

            purged += await self._session().write(bury)
        return purged

    async def tombstones(self, run_id: str | None = None) -> list[Tombstone]:
        """What remains of the runs that were purged; see ``StoreMaintenance.tombstones``."""
        rows = await self._session().read(lambda db: _select_tombstones(db, run_id), list[tuple[str, str]]())
        return [read_tombstone(*row) for row in rows]

    async def was_purged(self, run_id: str) -> bool:
        """Whether a run that had records was purged; see ``StoreMaintenance.was_purged``."""
        return await self._session().read(lambda db: _was_purged(db, run_id), False)

    async def reindex(self) -> list[str]:
        """Have runs found by the prompts that they are listed by; the server itself keeps the other indexes."""
        return await self._session().write(lambda db, _: rebuild_prompts(db))

    async def compact(self) -> str:
        """Rewrite the tables without dead rows; see ``StoreMaintenance.compact``. Writers wait meanwhile."""
        nobody_reads_it = await self._await_open_transactions()
        await self._session().write(lambda db, _: _compact(db))
        return (
            "the server's write-ahead log, standbys and backups have what was deleted for as long as they are kept"
            if nobody_reads_it
            else "what was deleted may still be in the tables, since a transaction that began before has not ended: "
            "compact the store again when it has; the server's write-ahead log, standbys and backups have it, too"
        )

    async def _await_open_transactions(self) -> bool:
        """Wait until those have ended that are open now: the server keeps deleted rows that they may still read.

        Returns:
            Whether they have ended.
        """
        session = self._session()
        open_ones = await session.read(_open_transactions, set[str]())
        for look in range(_LOOKS):
            if not open_ones:
                break
            await asyncio.sleep(_FIRST_LOOK_S * 2**look)
            open_ones &= await session.read(_open_transactions, set[str]())
        return not open_ones


async def _nothing(db: Connection, again: bool) -> None:
    """A write that only connects."""


async def _describe_empty(db: Connection) -> list[Fact]:
    advice = await creation_obstacle(db) or "agentfsm store init creates it"
    return [Fact("schema", f"there is none yet: {advice}", is_problem=True)]


async def _describe(db: Connection) -> list[Fact]:
    row = await (await db.execute(_DESCRIBE)).fetchone()
    assert row is not None  # noqa: S101  # a query without FROM has one row
    server, size, is_read_only, clock, missing = row
    ahead_s = round(clock - time.time(), 1) or 0.0  # and not -0.0
    facts = [
        Fact("kind", f"PostgreSQL {server}"),
        Fact("schema", f"version {await read_version(db)}"),
        Fact("size", f"{size:,} bytes"),
        _clock_fact(ahead_s),
    ]
    if is_read_only:
        facts.append(
            Fact(
                "standby",
                "this server is read-only: connect to the primary one, or turn off default_transaction_read_only",
                is_problem=True,
            )
        )
    if missing:
        rights = f"the role lacks {missing}: let the owner of the schema GRANT that, as agentfsm store init --sql shows"
        facts.append(Fact("rights", rights, is_problem=True))
    return facts


def _clock_fact(ahead_s: float) -> Fact:
    is_problem = abs(ahead_s) > LONGEST_SKEW_S
    advice = ": set the wrong one, or runs start, expire and are purged at the wrong time" if is_problem else ""
    return Fact("clock", f"the server's is {ahead_s:+.1f} s from the one here{advice}", is_problem)


async def _is_pooled(db: Connection) -> bool:
    row = await (await db.execute("SELECT pg_backend_pid()")).fetchone()
    return row is not None and row[0] != db.info.backend_pid


async def _hold(db: Connection, run_id: str, hold: Hold | None) -> None:
    run = await (await db.execute("SELECT id FROM agentfsm.run WHERE run_id = %s", (run_id,))).fetchone()
    if run is None:
        raise UnknownRunError(f"there is no run {run_id!r}")
    if hold is None:
        await db.execute("DELETE FROM agentfsm.hold WHERE id = %s", run)
        return
    row = (*run, hold.reason, hold.by, round(hold.since * 1000), hold.ended, bytes.fromhex(hold.mac))
    await db.execute(_HOLD, row)


async def _select_holds(db: Connection) -> dict[str, Hold]:
    rows = await (await db.execute(_SELECT_HOLDS)).fetchall()
    return {run_id: Hold(reason, by, since / 1000, ended, mac) for run_id, reason, by, since, ended, mac in rows}


async def _purge(db: Connection, tombstones: Sequence[Tombstone]) -> list[str]:
    values = {
        "number": [each.number for each in tombstones],
        "run_id": [each.run_id for each in tombstones],
        "epoch": [each.epoch for each in tombstones],
        "seq": [each.seq for each in tombstones],
        "hash": [bytes.fromhex(each.hash) for each in tombstones],
        "content": [each.content for each in tombstones],
        "mac": [bytes.fromhex(each.mac) for each in tombstones],
    }
    async with transaction(db):
        await db.execute(_LOCK, (values["number"],))
        buried = await (await db.execute(_BURY, values)).fetchall()
        numbers = [number for number, _ in buried]
        await db.execute("DELETE FROM agentfsm.journal WHERE run = ANY(%s)", (numbers,))
        await db.execute("DELETE FROM agentfsm.run_info WHERE id = ANY(%s)", (numbers,))
        await db.execute("DELETE FROM agentfsm.run_prompt WHERE id = ANY(%s)", (numbers,))
        await db.execute("DELETE FROM agentfsm.signal WHERE run_id = ANY(%s)", ([run_id for _, run_id in buried],))
        await db.execute("DELETE FROM agentfsm.hold WHERE id = ANY(%s)", (numbers,))
        await db.execute("DELETE FROM agentfsm.snapshot WHERE id = ANY(%s)", (numbers,))
        await db.execute("DELETE FROM agentfsm.run WHERE id = ANY(%s)", (numbers,))
    return [run_id for _, run_id in buried]


async def _already_purged(db: Connection, tombstones: Sequence[Tombstone]) -> set[str]:
    """Those that a commit whose answer was lost has written."""
    query = "SELECT run_id FROM agentfsm.tombstone WHERE content = ANY(%s)"
    found = await (await db.execute(query, ([each.content for each in tombstones],))).fetchall()
    return {run_id for (run_id,) in found}


async def _was_purged(db: Connection, run_id: str) -> bool:
    query = "SELECT EXISTS (SELECT FROM agentfsm.tombstone WHERE run_id = %s AND seq > 0)"
    row = await (await db.execute(query, (run_id,))).fetchone()
    return row is not None and bool(row[0])


async def _select_tombstones(db: Connection, run_id: str | None) -> list[tuple[str, str]]:
    found = await (db.execute(_TOMBSTONES) if run_id is None else db.execute(_TOMBSTONES_OF_ID, (run_id,)))
    return [(content, mac) for content, mac in await found.fetchall()]


async def _open_transactions(db: Connection) -> set[str]:
    return {number for (number,) in await (await db.execute(_OPEN_TRANSACTIONS)).fetchall()}


async def _compact(db: Connection) -> None:
    owned = await (await db.execute(_OWNS_TABLES)).fetchone()
    if owned is None or not owned[0]:
        raise StoreError(
            "the store is not compacted: only the role that owns the tables of the schema agentfsm may do that "
            "(VACUUM FULL)"
        )
    for table in ("journal", "run_info", "run_prompt", "signal", "snapshot", "run"):
        await db.execute(f"VACUUM FULL agentfsm.{table}")  # our own names


_RELATIONS = """
    SELECT relname, relkind::text, relrowsecurity FROM pg_class
    WHERE relnamespace = 'agentfsm'::regnamespace AND relname = ANY(%s)
"""
_TRIGGERS = """
    SELECT relname, tgname, tgenabled::text, pg_get_triggerdef(pg_trigger.oid), prosrc
    FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid JOIN pg_proc ON pg_proc.oid = tgfoid
    WHERE relnamespace = 'agentfsm'::regnamespace AND NOT tgisinternal
"""
_RULES = "SELECT tablename, rulename FROM pg_rules WHERE schemaname = 'agentfsm'"

_ORPHANS = """
    SELECT run, max(seq) FROM agentfsm.journal AS journal
    WHERE NOT EXISTS (SELECT FROM agentfsm.run WHERE run.id = journal.run) GROUP BY run ORDER BY run
"""
_BEFORE_THE_FIRST = "SELECT run, count(*) FROM agentfsm.journal WHERE seq < 1 GROUP BY run ORDER BY run"

_NOT_FOUND = """
    SELECT info.id FROM agentfsm.run_info AS info LEFT JOIN agentfsm.run_prompt ON run_prompt.id = info.id
    WHERE info.prompt <> coalesce(run_prompt.prompt, '') ORDER BY info.id
"""


async def find_schema_damage(db: Connection) -> list[Damage]:
    """One entry if tables or triggers are not those of a store, or are gone, or none."""
    changed = [*await _changed_tables(db), *await _changed_triggers(db)]
    if not changed:
        return []
    reason = f"its schema differs from the one that agentfsm created: {', '.join(changed)}"
    return [Damage("(schema)", reason)]


async def _changed_tables(db: Connection) -> list[str]:
    rows = await (await db.execute(_RELATIONS, (list(TABLES),))).fetchall()
    found = {name: (kind, hides_rows) for name, kind, hides_rows in rows}
    rules = await (await db.execute(_RULES)).fetchall()
    return sorted(
        [
            *(f"table {name}" for name in TABLES if found.get(name) != ("r", False)),
            *(f"rule {rule} on {table}" for table, rule in rules),
        ]
    )


async def _changed_triggers(db: Connection) -> list[str]:
    async with db.transaction():
        await db.execute("SET LOCAL quote_all_identifiers = off")  # or the server spells every definition differently,
        await db.execute("SET LOCAL search_path = pg_catalog")  # and without the schema, if that is searched anyway
        rows = await (await db.execute(_TRIGGERS)).fetchall()
    expected = dict(TRIGGERS)
    changed: list[str] = []
    for table, name, enabled, definition, source in rows:
        wanted = expected.pop(str(name), None)
        if enabled != "O" or wanted != (definition, " ".join(source.split())):
            changed.append(f"trigger {name} on {table}")
    return sorted([*changed, *(f"trigger {name}" for name in expected)])


async def find_row_damage(db: Connection) -> list[Damage]:
    """An entry for each run whose row was deleted, with a record before its first, or not found by its prompt.

    A number between two runs that no run has means nothing here: the server skips numbers.
    """
    damage: list[Damage] = []
    for number, count in await (await db.execute(_ORPHANS)).fetchall():
        first = await (await db.execute(f"{SELECT_ROWS} LIMIT 1", (number, 0))).fetchall()
        reason = "the store has its records, and the run is missing"
        damage.append(Damage(run_id_in(rows_of(first)) or f"(run {number})", reason, count))
    for number, count in await (await db.execute(_BEFORE_THE_FIRST)).fetchall():
        reason = "it has a record before its first"
        damage.append(Damage(f"(run {number})", reason, count))
    for (number,) in await (await db.execute(_NOT_FOUND)).fetchall():
        damage.append(Damage(f"(run {number})", "it is not found by the prompt that it is listed by"))
    return damage
