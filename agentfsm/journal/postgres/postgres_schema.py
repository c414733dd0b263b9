"""The PostgreSQL schema ``agentfsm``: its tables, its version, transactions on it, and the server's errors as ours."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import AsyncGenerator
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncConnection

from agentfsm.errors import StoreError, StoreFormatError, StoreFullError

SCHEMA_VERSION = 10
"""1: the first one; 2: with columns that list runs; 3: with signals; 4: with holds and tombstones; 5: with the records
of a commit in one row, and with runs found by their metadata; 6: with sealed holds; 7: with leases that do not last
longer if the server's clock is set back; 8: with a smaller key of the journal; 9: with snapshots; 10: with an index of
the prompts. The first write creates it; ``agentfsm store migrate`` brings it up to date. Processes that have an earlier
one open then refuse to write."""

_CREATE_LOCK = 0x6166736D
"""The advisory lock of whoever creates or migrates the schema: ``afsm`` in ASCII."""

LOCKED_FOR_S = 60
"""Seconds for which whoever creates or migrates the schema waits for a lock. Workers wait for it meanwhile."""

MIGRATIONS: tuple[LiteralString, ...] = (
    """
    CREATE TABLE agentfsm.run (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        run_id text NOT NULL UNIQUE,
        epoch bigint NOT NULL DEFAULT 0,
        owner text,
        owner_key bigint,  -- whose process it is: see owner, and the advisory locks of sessions
        seq bigint NOT NULL DEFAULT 0,
        hash bytea NOT NULL,
        status text NOT NULL DEFAULT 'running',
        mac bytea
    ) WITH (fillfactor = 50);  -- its columns change with each commit: room on the page keeps that from the index
    CREATE INDEX run_by_status ON agentfsm.run (status, id) WHERE status <> 'finished';
    CREATE TABLE agentfsm.journal (
        run bigint NOT NULL REFERENCES agentfsm.run (id),
        seq bigint NOT NULL,
        body text NOT NULL,
        hash bytea NOT NULL,
        hidden text,
        mac bytea,
        PRIMARY KEY (run, seq)
    );
    CREATE TABLE agentfsm.owner (
        key bigint PRIMARY KEY,
        alive_until timestamptz NOT NULL
    );
    CREATE VIEW agentfsm.alive AS  -- the keys of the processes that live, by the server's knowledge and clock
        SELECT ((classid::bigint << 32) | objid::bigint) AS key FROM pg_locks
            WHERE locktype = 'advisory' AND objsubid = 1 AND granted
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        UNION ALL SELECT key FROM agentfsm.owner WHERE alive_until > clock_timestamp();
    CREATE FUNCTION agentfsm.refuse() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'a journal is append-only'; END $$;
    CREATE TRIGGER journal_keeps_what_it_has BEFORE UPDATE OF run, seq, body, hash, mac ON agentfsm.journal
        FOR EACH ROW EXECUTE FUNCTION agentfsm.refuse();
    CREATE TRIGGER journal_loses_nothing BEFORE DELETE OR TRUNCATE ON agentfsm.journal
        FOR EACH STATEMENT EXECUTE FUNCTION agentfsm.refuse();
    """,
    """
    CREATE TABLE agentfsm.run_info (
        id bigint PRIMARY KEY REFERENCES agentfsm.run (id),
        started bigint,
        updated bigint,
        ending text NOT NULL,
        prompt text NOT NULL,
        actor text NOT NULL,
        session text NOT NULL,
        tags text[] NOT NULL,
        model text NOT NULL,
        cost_usd double precision,
        tokens bigint,
        waiting_kind text NOT NULL,
        waiting_tool text NOT NULL,
        waiting_roles text[] NOT NULL,
        expires bigint,
        parent text NOT NULL
    );
    CREATE INDEX run_info_by_ending ON agentfsm.run_info (ending, id) WHERE ending <> '';
    CREATE INDEX run_info_by_actor ON agentfsm.run_info (actor, id) WHERE actor <> '';
    CREATE INDEX run_info_by_session ON agentfsm.run_info (session, id) WHERE session <> '';
    CREATE INDEX run_info_by_model ON agentfsm.run_info (model, id) WHERE model <> '';
    CREATE INDEX run_info_by_parent ON agentfsm.run_info (parent, id) WHERE parent <> '';
    CREATE INDEX run_info_by_tag ON agentfsm.run_info USING gin (tags);
    """,
    """
    CREATE TABLE agentfsm.signal (
        number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id text NOT NULL UNIQUE,
        run_id text NOT NULL,
        body text NOT NULL,
        mac bytea NOT NULL
    );
    CREATE INDEX signal_by_run ON agentfsm.signal (run_id);
    """,
    """
    CREATE TABLE agentfsm.hold (
        id bigint PRIMARY KEY REFERENCES agentfsm.run (id),
        reason text NOT NULL,
        held_by text NOT NULL,
        since bigint NOT NULL
    );
    CREATE TABLE agentfsm.tombstone (
        number bigint PRIMARY KEY,  -- the run.id that it had
        run_id text NOT NULL,
        seq bigint NOT NULL,
        content text NOT NULL,
        mac bytea NOT NULL
    );
    CREATE INDEX tombstone_by_run_id ON agentfsm.tombstone (run_id);
    CREATE FUNCTION agentfsm.refuse_unless_purged() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN
            IF EXISTS (SELECT FROM agentfsm.tombstone WHERE number = OLD.run) THEN RETURN OLD; END IF;
            RAISE EXCEPTION 'a journal is append-only';
        END $$;
    DROP TRIGGER IF EXISTS journal_loses_nothing ON agentfsm.journal;
    CREATE TRIGGER journal_loses_nothing BEFORE DELETE ON agentfsm.journal
        FOR EACH ROW EXECUTE FUNCTION agentfsm.refuse_unless_purged();
    CREATE TRIGGER journal_is_not_emptied BEFORE TRUNCATE ON agentfsm.journal
        FOR EACH STATEMENT EXECUTE FUNCTION agentfsm.refuse();
    -- the server's statistics would keep values that were redacted or purged
    ALTER TABLE agentfsm.journal ALTER body SET STATISTICS 0, ALTER hidden SET STATISTICS 0;
    ALTER TABLE agentfsm.signal ALTER body SET STATISTICS 0;
    ALTER TABLE agentfsm.run_info ALTER prompt SET STATISTICS 0, ALTER actor SET STATISTICS 0,
        ALTER session SET STATISTICS 0, ALTER tags SET STATISTICS 0;
    """,
    """
    ALTER TABLE agentfsm.journal ALTER body DROP NOT NULL,
        ADD records bytea,  -- of a commit; a row has either these or the body of a single record
        ADD hidden_values bytea;
    ALTER TABLE agentfsm.journal ALTER records SET STORAGE EXTERNAL,  -- they are compressed
        ALTER records SET STATISTICS 0, ALTER hidden_values SET STATISTICS 0;
    DROP TRIGGER IF EXISTS journal_keeps_what_it_has ON agentfsm.journal;
    CREATE TRIGGER journal_keeps_what_it_has BEFORE UPDATE OF run, seq, body, records, hash, mac ON agentfsm.journal
        FOR EACH ROW EXECUTE FUNCTION agentfsm.refuse();
    ALTER TABLE agentfsm.run_info ADD metadata jsonb;
    ALTER TABLE agentfsm.run_info ALTER metadata SET STATISTICS 0;
    CREATE INDEX run_info_by_metadata ON agentfsm.run_info USING gin (metadata jsonb_path_ops);
    """,
    """
    ALTER TABLE agentfsm.hold ADD ended boolean NOT NULL DEFAULT false, ADD mac bytea NOT NULL DEFAULT '';
    """,
    """
    ALTER TABLE agentfsm.owner ADD renewed_at timestamptz NOT NULL DEFAULT clock_timestamp();
    CREATE OR REPLACE VIEW agentfsm.alive AS  -- a lease of the future is one from before the clock was set back
        SELECT ((classid::bigint << 32) | objid::bigint) AS key FROM pg_locks
            WHERE locktype = 'advisory' AND objsubid = 1 AND granted
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        UNION ALL SELECT key FROM agentfsm.owner
            WHERE alive_until > clock_timestamp() AND renewed_at - (alive_until - renewed_at) < clock_timestamp();
    """,
    """
    DROP TRIGGER IF EXISTS journal_keeps_what_it_has ON agentfsm.journal;
    ALTER TABLE agentfsm.journal ALTER run TYPE integer, ALTER seq TYPE integer;  -- they are in its index, too
    ALTER INDEX agentfsm.journal_pkey SET (fillfactor = 100);  -- rows come in order
    REINDEX TABLE agentfsm.journal;
    CREATE TRIGGER journal_keeps_what_it_has BEFORE UPDATE OF run, seq, body, records, hash, mac ON agentfsm.journal
        FOR EACH ROW EXECUTE FUNCTION agentfsm.refuse();
    """,
    """
    CREATE TABLE agentfsm.snapshot (
        id bigint PRIMARY KEY REFERENCES agentfsm.run (id),
        content text NOT NULL,
        mac bytea NOT NULL
    );
    ALTER TABLE agentfsm.snapshot ALTER content SET STATISTICS 0;
    """,
    """
    CREATE TABLE agentfsm.run_prompt (  -- a table of its own, because run_info changes while a prompt does not
        id bigint PRIMARY KEY REFERENCES agentfsm.run (id),
        prompt text NOT NULL
    );
    CREATE FUNCTION agentfsm.text_parts(text) RETURNS integer[] LANGUAGE sql IMMUTABLE PARALLEL SAFE COST 10000 AS $$
        SELECT array_agg(hashtext(part)) FROM (
            SELECT a, lead(a) OVER numbered AS b, lead(a, 2) OVER numbered AS c
            FROM regexp_split_to_table(lower($1 COLLATE "C"), '') WITH ORDINALITY AS letter (a, number)
            WINDOW numbered AS (ORDER BY number)
        ) AS letters, unnest(ARRAY[a, a || b, a || b || c]) AS part
    $$;
    INSERT INTO agentfsm.run_prompt SELECT id, prompt FROM agentfsm.run_info;
    CREATE INDEX run_prompt_by_parts ON agentfsm.run_prompt USING gin (agentfsm.text_parts(prompt));
    ALTER TABLE agentfsm.run_prompt ALTER prompt SET STATISTICS 0;
    ALTER INDEX agentfsm.run_prompt_by_parts ALTER COLUMN 1 SET STATISTICS 0;
    """,
)
"""What leads from each version to the next; the first one from an empty schema."""

FROZEN_AFTER_MS = 30_000
"""Milliseconds after which the server ends a transaction in which nothing happens."""

TABLES = ("hold", "journal", "owner", "run", "run_info", "run_prompt", "signal", "snapshot", "tombstone", "version")
"""The tables of the schema."""

_REFUSE = "BEGIN RAISE EXCEPTION 'a journal is append-only'; END"

TRIGGERS = {
    "journal_keeps_what_it_has": (
        "CREATE TRIGGER journal_keeps_what_it_has BEFORE UPDATE OF run, seq, body, records, hash, mac ON"
        " agentfsm.journal FOR EACH ROW EXECUTE FUNCTION agentfsm.refuse()",
        _REFUSE,
    ),
    "journal_loses_nothing": (
        "CREATE TRIGGER journal_loses_nothing BEFORE DELETE ON agentfsm.journal"
        " FOR EACH ROW EXECUTE FUNCTION agentfsm.refuse_unless_purged()",
        "BEGIN IF EXISTS (SELECT FROM agentfsm.tombstone WHERE number = OLD.run) THEN RETURN OLD; END IF;"
        " RAISE EXCEPTION 'a journal is append-only'; END",
    ),
    "journal_is_not_emptied": (
        "CREATE TRIGGER journal_is_not_emptied BEFORE TRUNCATE ON agentfsm.journal"
        " FOR EACH STATEMENT EXECUTE FUNCTION agentfsm.refuse()",
        _REFUSE,
    ),
}
"""The triggers of the schema by name: their definition, and the code of their function, as the server has them."""


@contextlib.asynccontextmanager
async def transaction(db: AsyncConnection[Any]) -> AsyncGenerator[None]:
    """A transaction that the server ends, with its connection, if this process stands still in it.

    A process that is stopped, or whose machine sleeps, would otherwise make others wait for the rows that it changed.
    The time is set for the transaction alone, because behind a pooler the next one is in another session.
    """
    async with db.transaction():
        await db.execute("SELECT set_config('idle_in_transaction_session_timeout', %s, true)", (str(FROZEN_AFTER_MS),))
        yield


_HAS_VERSION: LiteralString = """
    SELECT 1 FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace space ON space.oid = relnamespace
    WHERE nspname = 'agentfsm' AND relname = 'version'
"""
"""``to_regclass`` would say what the session of the server has cached, also if another one has created it since."""


async def read_version(db: AsyncConnection[Any]) -> int:
    """The version of the schema; 0 if there is none.

    Raises:
        StoreFormatError: A newer release wrote it.
    """
    if await (await db.execute(_HAS_VERSION)).fetchone() is None:
        return 0
    return await _read_number(db)


async def _read_number(db: AsyncConnection[Any]) -> int:
    row = await (await db.execute("SELECT number FROM agentfsm.version", prepare=True)).fetchone()
    version = int(row[0]) if row else 0
    if version > SCHEMA_VERSION:
        raise StoreFormatError(
            f"the schema agentfsm of {db.info.dbname!r} has version {version}, and this release of agentfsm knows "
            f"version {SCHEMA_VERSION}: install a newer one"
        )
    return version


async def require_current(db: AsyncConnection[Any]) -> None:
    """Check that the schema, which there is, is that of this release. During a migration, it waits for its end.

    Raises:
        StoreFormatError: An earlier release wrote it, or a newer one.
    """
    version = await _read_number(db)
    if version != SCHEMA_VERSION:
        raise StoreFormatError(
            f"the schema agentfsm of {db.info.dbname!r} has version {version}, and this release of agentfsm reads "
            f"version {SCHEMA_VERSION}: stop all processes of the earlier release, which can then no longer open it, "
            "and bring it up to date with agentfsm store migrate"
        )


def schema_sql() -> str:
    """The statements that create the schema, for whoever may run them, and those that let a role use it."""
    scripts = "\n".join(textwrap.dedent(script).strip() for script in MIGRATIONS)
    return f"""BEGIN;
CREATE SCHEMA agentfsm;
CREATE TABLE agentfsm.version (number integer NOT NULL);
INSERT INTO agentfsm.version VALUES ({SCHEMA_VERSION});
{scripts}
COMMIT;
-- What the role needs under which agents run, here agent_role:
-- GRANT USAGE ON SCHEMA agentfsm TO agent_role;
-- GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA agentfsm TO agent_role;
"""  # noqa: S608  # our own text


async def create_schema(db: AsyncConnection[Any]) -> int:
    """Create the schema, or migrate it to the version of this release; does nothing if it has that version.

    Returns:
        The version that it had before.

    Raises:
        StoreFormatError: A newer release wrote it, or the database does not store text as UTF-8.
        StoreError: Another session has had a lock for too long.
    """
    if await read_version(db) == SCHEMA_VERSION:  # without the lock, which anybody who may connect can hold
        return SCHEMA_VERSION
    try:
        async with transaction(db):
            return await _migrate(db)
    except psycopg.errors.LockNotAvailable as error:
        raise StoreError(
            f"the schema agentfsm of {db.info.dbname!r} cannot be created or migrated: for {LOCKED_FOR_S} seconds, "
            "another session has had a lock that this needs. Perhaps it is migrating the schema; pg_locks and "
            "pg_stat_activity show which one it is. Nothing was changed: try again"
        ) from error


async def _migrate(db: AsyncConnection[Any]) -> int:
    """What ``create_schema`` does, in a transaction."""
    await db.execute("SELECT set_config('lock_timeout', %s, true)", (f"{LOCKED_FOR_S}s",))
    await db.execute("SELECT pg_advisory_xact_lock(%s)", (_CREATE_LOCK,))
    before = await read_version(db)
    if before == SCHEMA_VERSION:
        return before
    if wrong := await _wrong_encoding(db):
        raise StoreFormatError(wrong)
    if before:  # whoever writes, or asks for the version first, does so before or after all this
        await db.execute("LOCK TABLE agentfsm.version IN ACCESS EXCLUSIVE MODE")
    else:
        await db.execute("CREATE SCHEMA IF NOT EXISTS agentfsm")
        await db.execute("CREATE TABLE agentfsm.version (number integer NOT NULL)")
        await db.execute("INSERT INTO agentfsm.version VALUES (0)")
    for script in MIGRATIONS[before:]:
        await db.execute(script)
    await db.execute("UPDATE agentfsm.version SET number = %s", (SCHEMA_VERSION,))
    return before


async def creation_obstacle(db: AsyncConnection[Any]) -> str:
    """Why this role cannot create the schema in a database that has none; empty if it can."""
    if wrong := await _wrong_encoding(db):
        return wrong
    row = await (await db.execute(_MAY_CREATE)).fetchone()
    assert row is not None  # noqa: S101  # a query without FROM has one row
    is_read_only, may_create = row
    if is_read_only:
        return "the server takes no changes, as a standby does not: connect to the primary server"
    if not may_create:
        return (
            "this role may not create it: let the owner of the database run what agentfsm store init --sql prints, "
            "with the GRANT at its end"
        )
    return ""


_MAY_CREATE = """
    SELECT current_setting('transaction_read_only') = 'on',
        has_database_privilege(current_database(), 'CREATE')
        AND coalesce((SELECT has_schema_privilege(oid, 'CREATE') FROM pg_namespace WHERE nspname = 'agentfsm'), true)
"""


async def _wrong_encoding(db: AsyncConnection[Any]) -> str:
    """What to do about a database that does not store text as UTF-8; empty if it does."""
    row = await (await db.execute("SELECT current_setting('server_encoding')")).fetchone()
    if row is None or row[0] != "UTF8":
        return f"the database {db.info.dbname!r} does not store text as UTF-8: create one that does"
    return ""


_NO_CONNECTION_LEFT = ("too many clients", "too many connections", "remaining connection slots", "no more connections")
"""What servers and poolers say to one client too many; the error has no code."""


def connection_advice(said: str) -> str:
    """What to do about an error of a server that has no connection left, to be added to it; empty for any other."""
    is_full = any(words in said for words in _NO_CONNECTION_LEFT)
    return "; raise max_connections, or put a pooler in between" if is_full else ""


def as_store_error(error: psycopg.Error, server: str) -> StoreError:
    """An error of the server as one of ours."""
    said = " ".join(str(error).split()) or type(error).__name__
    match error:
        case psycopg.errors.DiskFull():
            return StoreFullError(f"{server} has no space left: {said}")
        case psycopg.errors.InsufficientPrivilege():
            return StoreError(
                f"{server} refuses: {said}; the role needs CREATE on the database once, and SELECT, INSERT, UPDATE and "
                "DELETE on the tables of the schema agentfsm"
            )
        case psycopg.errors.ReadOnlySqlTransaction():
            return StoreError(
                f"{server} is read-only, as a standby is: connect to the primary server, which "
                f"target_session_attrs=read-write finds among several hosts ({said})"
            )
        case _ if "unsupported startup parameter" in said:
            return StoreError(
                f"{server} is a pooler ({said}): put ?liveness=lease at the end of the URL, and the server's own URL "
                "in listen_url"
            )
        case _:
            return StoreError(f"{server}: {said}{connection_advice(said)}")
