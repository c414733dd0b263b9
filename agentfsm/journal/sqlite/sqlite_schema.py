"""The SQLite file: schema, pragmas, connections, and SQLite errors as store errors."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from agentfsm.errors import StoreError, StoreFormatError, StoreFullError, StoreLockedError

APPLICATION_ID = 0x6166736D
"""``afsm`` in ASCII: tells an agentfsm store from any other SQLite file."""

SCHEMA_VERSION = 10
"""1: without MACs, as 0.1.0 wrote it; 2: with them; 3: with columns that list runs; 4: with signals; 5: with holds and
tombstones; 6: with the records of a commit in one row, and with runs found by their metadata; 7: with sealed holds; 8:
with an index of runs that have not finished; 9: with snapshots; 10: with filters of the prompts. The first write
migrates a file; the rows that it has stay as they are."""

LISTED, SIGNALS, TOMBSTONES, METADATA, SEALED_HOLDS, SNAPSHOTS, PROMPT_FILTERS = 3, 4, 5, 6, 7, 9, 10
"""The versions since which a file has these."""

BUSY_TIMEOUT_S = 5.0
"""Seconds to wait for a lock on the file that another program holds."""

WAL_AUTOCHECKPOINT_PAGES = 4000
"""Pages (of 4 KB) in the write-ahead log at which SQLite checkpoints it on its own."""

READ_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""Raised if a file cannot be read; ``UnicodeDecodeError`` if SQLite's error message itself is corrupted."""

SynchronousLevel = Literal["full", "normal"]
"""What a commit waits for: ``full``: the disk; ``normal``: the operating system."""

_UPDATE_TRIGGER_OF_1 = """CREATE TRIGGER journal_keeps_what_it_has BEFORE UPDATE OF key, body, hash ON journal
BEGIN SELECT RAISE(ABORT, 'a journal is append-only'); END;"""

_UPDATE_TRIGGER = _UPDATE_TRIGGER_OF_1.replace("hash ON", "hash, mac ON")

_DELETE_TRIGGER = """CREATE TRIGGER journal_loses_nothing BEFORE DELETE ON journal
BEGIN SELECT RAISE(ABORT, 'a journal is append-only'); END;"""

_MIGRATION_FROM_1 = f"""
ALTER TABLE journal ADD COLUMN mac BLOB;
ALTER TABLE run ADD COLUMN mac BLOB;
DROP TRIGGER IF EXISTS journal_keeps_what_it_has;
{_UPDATE_TRIGGER}
PRAGMA user_version = 2;
"""

_MIGRATION_FROM_2 = """
CREATE TABLE run_info (
    id INTEGER PRIMARY KEY,  -- run.id
    status TEXT NOT NULL DEFAULT 'running',
    started INTEGER,
    updated INTEGER,
    ending TEXT NOT NULL DEFAULT '',
    prompt TEXT NOT NULL DEFAULT '',
    actor TEXT NOT NULL DEFAULT '',
    session TEXT NOT NULL DEFAULT '',
    tags TEXT NOT NULL DEFAULT '',
    model TEXT NOT NULL DEFAULT '',
    cost_usd REAL,
    tokens INTEGER,
    waiting_kind TEXT NOT NULL DEFAULT '',
    waiting_tool TEXT NOT NULL DEFAULT '',
    waiting_roles TEXT NOT NULL DEFAULT '',
    expires INTEGER,
    parent TEXT NOT NULL DEFAULT ''
);
CREATE INDEX run_info_by_status ON run_info (status);
CREATE INDEX run_info_by_ending ON run_info (ending) WHERE ending <> '';
CREATE INDEX run_info_by_actor ON run_info (actor) WHERE actor <> '';
CREATE INDEX run_info_by_session ON run_info (session) WHERE session <> '';
CREATE INDEX run_info_by_model ON run_info (model) WHERE model <> '';
CREATE INDEX run_info_by_parent ON run_info (parent) WHERE parent <> '';
CREATE TABLE run_tag (
    tag TEXT NOT NULL,
    id INTEGER NOT NULL,
    PRIMARY KEY (tag, id)
) WITHOUT ROWID;
INSERT INTO run_info (id, status) SELECT id, status FROM run;
PRAGMA user_version = 3;
"""

_MIGRATION_FROM_3 = """
CREATE TABLE signal (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    run_id TEXT NOT NULL,
    body TEXT NOT NULL,
    mac BLOB NOT NULL
);
CREATE INDEX signal_by_run ON signal (run_id);
PRAGMA user_version = 4;
"""

_DELETE_TRIGGER_OF_5 = """CREATE TRIGGER journal_loses_nothing BEFORE DELETE ON journal
WHEN NOT EXISTS (SELECT 1 FROM tombstone WHERE number = OLD.key >> 32)
BEGIN SELECT RAISE(ABORT, 'a journal is append-only'); END;"""

_MIGRATION_FROM_4 = f"""
CREATE TABLE hold (
    id INTEGER PRIMARY KEY,  -- run.id
    reason TEXT NOT NULL,
    held_by TEXT NOT NULL,
    since INTEGER NOT NULL
);
CREATE TABLE tombstone (
    number INTEGER PRIMARY KEY,  -- the run.id that it had
    run_id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    content TEXT NOT NULL,
    mac BLOB NOT NULL
);
CREATE INDEX tombstone_by_run_id ON tombstone (run_id);
DROP TRIGGER IF EXISTS journal_loses_nothing;
{_DELETE_TRIGGER_OF_5}
PRAGMA user_version = 5;
"""

_MIGRATION_FROM_5 = """
ALTER TABLE run_info ADD COLUMN metadata TEXT;
CREATE TABLE run_metadata (
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    id INTEGER NOT NULL,
    PRIMARY KEY (name, value, id)
) WITHOUT ROWID;
PRAGMA user_version = 6;
"""

_MIGRATION_FROM_6 = """
ALTER TABLE hold ADD COLUMN ended INTEGER NOT NULL DEFAULT 0;
ALTER TABLE hold ADD COLUMN mac BLOB NOT NULL DEFAULT x'';
PRAGMA user_version = 7;
"""

_MIGRATION_FROM_7 = """
CREATE INDEX run_by_status ON run (status) WHERE status <> 'finished';
PRAGMA user_version = 8;
"""

_MIGRATION_FROM_8 = """
CREATE TABLE snapshot (
    id INTEGER PRIMARY KEY,  -- run.id
    content TEXT NOT NULL,
    mac BLOB NOT NULL
);
PRAGMA user_version = 9;
"""

_MIGRATION_FROM_9 = """
CREATE TABLE prompt_filter (
    block INTEGER PRIMARY KEY,  -- of runs, by their numbers
    bits BLOB NOT NULL
);
PRAGMA user_version = 10;
"""

_MIGRATIONS = (
    _MIGRATION_FROM_1, _MIGRATION_FROM_2, _MIGRATION_FROM_3, _MIGRATION_FROM_4, _MIGRATION_FROM_5, _MIGRATION_FROM_6,
    _MIGRATION_FROM_7, _MIGRATION_FROM_8, _MIGRATION_FROM_9,
)  # fmt: skip
"""What leads from each version to the next, from 1 on."""

_SCHEMA_OF_2 = f"""
CREATE TABLE run (
    id INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL UNIQUE,
    epoch INTEGER NOT NULL DEFAULT 0,
    owner TEXT,
    seq INTEGER NOT NULL DEFAULT 0,
    hash BLOB NOT NULL,
    status TEXT NOT NULL DEFAULT 'running',
    mac BLOB
);
CREATE TABLE journal (
    key INTEGER PRIMARY KEY,  -- run.id << 32 | seq: a run's records lie together, and need no other index
    body TEXT NOT NULL,
    hash BLOB NOT NULL,
    hidden TEXT,
    mac BLOB
);
{_UPDATE_TRIGGER}
{_DELETE_TRIGGER}
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = 2;
"""

_OUR_TRIGGERS = frozenset(
    sql.removesuffix(";") for sql in (_UPDATE_TRIGGER, _UPDATE_TRIGGER_OF_1, _DELETE_TRIGGER, _DELETE_TRIGGER_OF_5)
)

_SCHEMA_OF_1 = _SCHEMA_OF_2.replace(",\n    mac BLOB", "").replace(_UPDATE_TRIGGER, _UPDATE_TRIGGER_OF_1)

_SELECT_SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite!_stat%' ESCAPE '!'"
"""Without the statistics that ANALYZE keeps."""


def changed_schema(db: sqlite3.Connection) -> str:
    """How the schema of a store differs from one that a release created or migrated, or an empty string.

    Raises:
        sqlite3.Error: The file cannot be read.
    """
    version = schema_version(db)
    created = [(first, script) for first, script in ((1, _SCHEMA_OF_1), (2, _SCHEMA_OF_2)) if first <= version]
    if version not in range(1, SCHEMA_VERSION + 1):
        return f"its schema version is {version}, which no release wrote"
    found = set(db.execute(_SELECT_SCHEMA))
    differences: list[str] = []
    for first, script in created:
        expected = _schema_after(script, *_migrations(first, version))
        if found == expected:
            return ""
        changed = sorted({f"{kind} {name}" for kind, name, *_ in found ^ expected})
        differences.append(f"its schema differs from the one that agentfsm created: {', '.join(changed)}")
    return min(differences, key=len)


def _migrations(version: int, to: int = SCHEMA_VERSION) -> tuple[str, ...]:
    """The scripts that lead from one version to another."""
    return _MIGRATIONS[version - 1 : to - 1]


def _schema_after(*scripts: str) -> set[tuple[str, str, str, str | None]]:
    """The schema of an empty store after some scripts."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        for script in scripts:
            db.executescript(script)
        return set(db.execute(_SELECT_SCHEMA))


def wrong_types(db: sqlite3.Connection) -> list[tuple[int, int | None]]:
    """Number of the run, and of the record if it is in one, of each row with a value of another type than declared.

    SQLite would convert many of them without a word, so the values may be the same.

    Raises:
        sqlite3.Error: The file cannot be read.
    """
    found: list[tuple[int, int | None]] = [(number, None) for number in _rows_with_wrong_types(db, "run")]
    found += [(key >> 32, key & 0xFFFFFFFF) for key in _rows_with_wrong_types(db, "journal", _COMMIT_TYPES)]
    for table, since in _TABLES_SINCE.items():
        rows = _rows_with_wrong_types(db, table) if has(db, since) else []
        found += [(0 if table in ("signal", "prompt_filter") else number, None) for number in rows]
    return found


_TABLES_SINCE = {
    "hold": TOMBSTONES, "tombstone": TOMBSTONES, "run_info": LISTED, "signal": SIGNALS, "snapshot": SNAPSHOTS,
    "prompt_filter": PROMPT_FILTERS,
}  # fmt: skip

_COMMIT_TYPES = {"body": "BLOB", "hidden": "BLOB"}
"""The types in rows that have the records of a commit, as against those of a single record."""


def _rows_with_wrong_types(
    db: sqlite3.Connection, table: str, other_types: Mapping[str, str] | None = None
) -> list[int]:
    """The rows with a value that has another type than declared.

    Args:
        db: The file.
        table: The table.
        other_types: The types that columns may have instead, if all of them in a row have these.
    """
    columns = db.execute(f"PRAGMA table_info({table})").fetchall()

    def wrong_if(types: Mapping[str, str]) -> str:
        named = [(name, types.get(name, declared).lower(), required) for _, name, declared, required, *_ in columns]
        return " OR ".join(f"typeof({name}) NOT IN ('{type_}', '{type_ if n else 'null'}')" for name, type_, n in named)

    wrong = wrong_if({}) if other_types is None else f"({wrong_if({})}) AND ({wrong_if(other_types)})"
    return [rowid for (rowid,) in db.execute(f"SELECT rowid FROM {table} WHERE {wrong}")]  # noqa: S608  # our own names


def open_writer(path: Path, level: SynchronousLevel) -> sqlite3.Connection:
    """A connection that writes to the file, which is created for its owner alone if it does not exist.

    Raises:
        StoreError: It cannot be opened.
        StoreFormatError: It is not an agentfsm store, a newer release wrote it, or it has a foreign trigger.
    """

    def begin(db: sqlite3.Connection) -> None:
        _check_schema(db, path)
        _check_triggers(db, path)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {level}")
        db.execute("PRAGMA secure_delete = ON")
        db.execute(f"PRAGMA wal_autocheckpoint = {WAL_AUTOCHECKPOINT_PAGES}")
        if not has_tables(db):
            db.executescript(f"BEGIN; {_SCHEMA_OF_2} {' '.join(_migrations(2))} COMMIT;")
        elif (version := schema_version(db)) < SCHEMA_VERSION:
            db.executescript(f"BEGIN; {' '.join(_migrations(version))} COMMIT;")

    with contextlib.suppress(OSError):  # SQLite says what is wrong, and gives the files beside it the same mode
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        return _initialized(connect(f"{path.absolute().as_uri()}?mode=rwc", timeout=0), begin)
    except READ_ERRORS as error:
        raise as_store_error(error, path) from error


def open_reader(path: Path, *, empty: bool = False) -> sqlite3.Connection | None:
    """A connection that reads the file, or None if it does not exist or is empty.

    Args:
        path: The file.
        empty: Whether to open also a store that has lost its tables.

    Raises:
        StoreError: It cannot be read.
        StoreFormatError: It is not an agentfsm store, or a newer release wrote it.
    """
    try:
        if not path.stat().st_size:
            return None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    try:
        db, has_any = _read_only(path), False
        try:
            has_any = _has_journals(db) or (empty and _application_id(db) == APPLICATION_ID)
        finally:
            if not has_any:
                db.close()
    except READ_ERRORS as error:
        raise as_store_error(error, path) from error
    return db if has_any else None


def _read_only(path: Path) -> sqlite3.Connection:
    uri = path.absolute().as_uri()
    try:
        return _initialized(connect(f"{uri}?mode=ro"), lambda db: _check_schema(db, path))
    except sqlite3.OperationalError as error:
        code = str(getattr(error, "sqlite_errorname", ""))
        if not code.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")):
            raise
        if not os.access(path.parent, os.W_OK) and not file_size(path.with_name(f"{path.name}-wal")):
            # A read-only folder, with nothing in the log: no process can be writing the file.
            return _initialized(connect(f"{uri}?mode=ro&immutable=1"), lambda db: _check_schema(db, path))
        if code.startswith("SQLITE_CANTOPEN"):
            raise

    def only_read(db: sqlite3.Connection) -> None:
        db.execute("PRAGMA query_only = ON")
        _check_schema(db, path)

    # A power cut left a log that has to be recovered, which needs write access.
    return _initialized(connect(f"{uri}?mode=rw"), only_read)


def file_size(path: Path) -> int:
    """The size of a file in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _initialized(db: sqlite3.Connection, initialize: Callable[[sqlite3.Connection], None]) -> sqlite3.Connection:
    """The connection, after initialization; it is closed if that fails."""
    try:
        initialize(db)
    except BaseException:
        db.close()
        raise
    return db


def connect(uri: str, timeout: float | None = None) -> sqlite3.Connection:
    """A connection in autocommit mode.

    Args:
        uri: The file, as a SQLite URI.
        timeout: Seconds to wait for a lock; ``BUSY_TIMEOUT_S`` unless given.
    """
    wait = BUSY_TIMEOUT_S if timeout is None else timeout
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=wait)


def has_wal_bug() -> bool:
    """Whether this SQLite can damage a file that two connections write or checkpoint at once.

    (https://www.sqlite.org/wal.html#walresetbug; some distributions have mended older versions.)
    """
    return (3, 7, 0) <= sqlite3.sqlite_version_info <= (3, 51, 2)


def has_tables(db: sqlite3.Connection) -> bool:
    """Whether the file has any tables yet."""
    return bool(db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0])


def _has_journals(db: sqlite3.Connection) -> bool:
    """Whether the file has its runs or their records; one without both is like an empty one, whatever else it has."""
    return bool(db.execute("SELECT count(*) FROM sqlite_schema WHERE name IN ('run', 'journal')").fetchone()[0])


def has_macs(db: sqlite3.Connection) -> bool:
    """Whether the file has columns for MACs; a file of schema version 1 has none until it is written."""
    return schema_version(db) != 1


def has(db: sqlite3.Connection, since: int) -> bool:
    """Whether the file has what there is since a version of the schema; an earlier one has it once it is written."""
    return schema_version(db) >= since


def schema_version(db: sqlite3.Connection) -> int:
    """The version of the file's schema."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _application_id(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA application_id").fetchone()[0])


def _check_schema(db: sqlite3.Connection, path: Path) -> None:
    """Raise StoreFormatError for the file of another program or of a newer release."""
    if not has_tables(db):
        return
    application = _application_id(db)
    if application != APPLICATION_ID:
        raise StoreFormatError(f"{path} is a database of another program")
    require_known(db, path)


def require_known(db: sqlite3.Connection, path: Path) -> None:
    """Raise StoreFormatError for the file of a newer release."""
    if (version := schema_version(db)) > SCHEMA_VERSION:
        raise StoreFormatError(
            f"{path} has schema version {version}, and this release reads {SCHEMA_VERSION}: use a newer agentfsm"
        )


def _check_triggers(db: sqlite3.Connection, path: Path) -> None:
    """Raise StoreFormatError if the file has a trigger that no release wrote: it would run with every write."""
    triggers = db.execute("SELECT name, tbl_name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
    foreign = sorted({f"{name} on {table}" for name, table, sql in triggers if sql not in _OUR_TRIGGERS})
    if foreign:
        raise StoreFormatError(
            f"{path} has triggers that agentfsm did not write: {', '.join(foreign)}. They would run with every write: "
            "see with agentfsm verify what was changed, and drop them (DROP TRIGGER) if the rest is as it was"
        )


def rollback(db: sqlite3.Connection) -> None:
    """Roll back the current transaction, if there is one."""
    with contextlib.suppress(sqlite3.Error):
        db.rollback()


def as_store_error(error: Exception, path: Path) -> StoreError:
    """An error of SQLite as the ``StoreError`` to raise instead."""
    code = getattr(error, "sqlite_errorname", "") or ""
    if code in ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"):  # the file or its log; its shared memory
        return StoreFullError(
            f"{path}: no space left ({error}): make room, and try again; a run that was interrupted can be resumed"
        )
    if code.startswith("SQLITE_NOTADB"):
        return StoreFormatError(f"{path} is not a SQLite database")
    if code.startswith("SQLITE_BUSY"):
        return StoreLockedError(f"{path} is locked by another program ({error})")
    return StoreError(f"{path}: {error} ({code or 'no code'})")
