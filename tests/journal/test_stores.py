"""Every store passes the conformance suite; and what is specific to the SQLite store."""

import asyncio
import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agentfsm import ConfigurationError, StoreError, StoreFormatError, StoreLockedError, UnknownRunError
from agentfsm.journal.memory_store import MemoryStore
from agentfsm.journal.sqlite import sqlite_schema
from agentfsm.journal.sqlite.sqlite_schema import SCHEMA_VERSION
from agentfsm.journal.sqlite.sqlite_store import SqliteStore, select_heads
from agentfsm.testing.store_conformance import CHECKS, sealed_records


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", ["memory", "full", "normal"])
def test_conformance(kind, check, tmp_path):
    store = MemoryStore()
    path = tmp_path / "runs.db"
    asyncio.run(check(lambda: store if kind == "memory" else SqliteStore(path, synchronous=kind)))


@pytest.mark.parametrize("level", ["off", "FULL", None])
def test_a_commit_waits_for_nothing_but_what_is_documented(level, tmp_path):
    with pytest.raises(ConfigurationError, match="synchronous is 'full' or 'normal', not "):
        SqliteStore(tmp_path / "runs.db", synchronous=level)


async def keep(path, count=2):
    store = SqliteStore(path)
    lease = await store.acquire("a", "me", new=True)
    await store.append(lease, sealed_records(count), "running")
    return store, lease


def test_a_record_cannot_be_changed_or_deleted(tmp_path):
    store, _ = asyncio.run(keep(tmp_path / "runs.db"))
    store.close()
    db = sqlite3.connect(tmp_path / "runs.db")
    for text in ("UPDATE journal SET body = ''", "UPDATE journal SET hash = x''", "DELETE FROM journal"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            db.execute(text)
    db.close()


def test_a_second_process_is_refused_with_the_name_of_the_first(tmp_path):
    store, lease = asyncio.run(keep(tmp_path / "runs.db"))
    code = (
        "import asyncio, sys; from agentfsm.journal.sqlite import SqliteStore\n"
        "s = SqliteStore(sys.argv[1]); print(len(asyncio.run(s.records('a'))))\n"
        "try: asyncio.run(s.acquire('a', 'you'))\n"
        "except Exception as e: print(type(e).__name__, e)"
    )
    got = subprocess.run([sys.executable, "-c", code, tmp_path / "runs.db"], capture_output=True, text=True)
    store.close()
    assert got.stdout.startswith("2\nStoreLockedError")  # reading needs no lock
    assert f"process {os.getpid()} on" in got.stdout
    assert "runs.db" in got.stdout
    del lease


def test_two_stores_of_one_process_do_not_write_one_file(tmp_path):
    store, _ = asyncio.run(keep(tmp_path / "runs.db"))
    other = SqliteStore(tmp_path / "runs.db")
    with pytest.raises(StoreLockedError, match=str(os.getpid())):
        asyncio.run(other.acquire("a", "you"))
    store.close()
    asyncio.run(other.acquire("a", "you"))  # it may write now
    other.close()


def test_reading_creates_no_file(tmp_path):
    store = SqliteStore(tmp_path / "runs.db")
    assert asyncio.run(store.heads()) == []
    with pytest.raises(UnknownRunError, match=r"'a'.*runs\.db"):
        asyncio.run(store.records("a"))
    store.close()
    assert list(tmp_path.iterdir()) == []


def text_file(path):
    path.write_text("this is a long text, and no database at all" * 100)


def other_program(path):
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE t (x)")
    db.commit()
    db.close()


def newer(path):
    store, _ = asyncio.run(keep(path))
    store.close()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.commit()
    db.close()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (text_file, "is not a SQLite database"),
        (other_program, "another program"),
        (newer, f"version {SCHEMA_VERSION + 1}.*reads {SCHEMA_VERSION}"),
    ],
)
def test_a_file_of_another_format_is_refused_and_not_changed(tmp_path, make, words):
    path = tmp_path / "runs.db"
    make(path)
    before = path.read_bytes()
    with pytest.raises(StoreFormatError, match=words):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_a_file_that_a_later_release_has_migrated_while_it_was_open_is_refused(tmp_path):
    path = tmp_path / "runs.db"

    async def scenario():
        with SqliteStore(path) as reader:
            store, _ = await keep(path)
            store.close()
            assert await reader.heads()
            with contextlib.closing(sqlite3.connect(path)) as db:
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
            for use in (reader.heads, lambda: reader.acquire("b", "me", new=True)):
                with pytest.raises(StoreFormatError, match=f"version {SCHEMA_VERSION + 1}.*reads {SCHEMA_VERSION}"):
                    await use()

    asyncio.run(scenario())


def plans(db, work):
    """The plan by which SQLite carries out each statement of some work."""
    statements = []
    db.set_trace_callback(statements.append)
    work()
    db.set_trace_callback(None)
    return [[row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {statement}")] for statement in statements]


def test_a_file_of_schema_7_gets_an_index_of_the_runs_that_have_not_finished(tmp_path):
    path = shutil.copy(Path(__file__).parents[1] / "data" / "schema7" / "runs.db", tmp_path / "runs.db")

    async def found():
        async with SqliteStore(path) as store:
            statuses = ("running", "suspended", "finished", None)
            before = [[head.run_id for head in await store.heads(status)] for status in statuses]
            await store.maintenance.prepare()
            assert before == [[head.run_id for head in await store.heads(status)] for status in statuses]
            assert await store.maintenance.schema_damage() == []
            return before

    assert asyncio.run(found()) == [["cut_off"], ["waits"], ["finished"], ["finished", "waits", "cut_off"]]
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        for status in ("running", "suspended"):
            assert ["SEARCH run USING INDEX run_by_status (status=?)"] in plans(
                db, lambda status=status: select_heads(db, "status", status)
            )


def test_a_commit_of_a_run_that_goes_on_writes_no_index_of_its_status(tmp_path):
    store, lease = asyncio.run(keep(tmp_path / "runs.db"))
    statements = []

    async def trace(callback):
        await store._writer.submit(lambda db: db.set_trace_callback(callback))

    async def append():
        await trace(statements.append)
        await store.append(lease, sealed_records(4)[2:], "running")
        await trace(None)

    asyncio.run(append())
    updates = [each for each in statements if each.startswith("UPDATE run")]
    store.close()
    with closing(sqlite3.connect(tmp_path / "runs.db")) as db:
        db.text_factory = bytes  # an operand is a hash
        codes = [row[1].decode() for update in updates for row in db.execute(f"EXPLAIN {update}")]
    assert len(updates) == 1
    assert "Insert" in codes
    assert "IdxInsert" not in codes


def test_a_missing_folder_is_a_clear_error(tmp_path):
    store = SqliteStore(tmp_path / "no" / "runs.db")
    with pytest.raises(StoreError, match=r"runs\.db-lock cannot be written"):
        asyncio.run(store.acquire("a", "me", new=True))


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder to which every user can come: pytest makes its own ones private again whenever it starts elsewhere."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def test_a_read_only_folder_is_a_clear_error(shared_folder):
    folder = shared_folder / "locked"
    folder.mkdir()
    code = (
        "import asyncio, os, sys; from agentfsm.journal.sqlite import SqliteStore\n"
        "os.setuid(65534) if os.getuid() == 0 else None\n"
        "try: asyncio.run(SqliteStore(sys.argv[1]).acquire('a', 'me', new=True))\n"
        "except Exception as e: print(type(e).__name__, e)"
    )
    folder.chmod(0o555)
    got = subprocess.run([sys.executable, "-c", code, folder / "runs.db"], capture_output=True, text=True)
    assert got.stdout.startswith("StoreError"), got.stderr
    assert "runs.db-lock cannot be written: Permission denied" in got.stdout
    assert list(folder.iterdir()) == []


def test_a_closed_store_is_one_file_that_can_be_copied_or_read_in_a_read_only_folder(shared_folder):
    folder = shared_folder / "kept"
    folder.mkdir()
    store, _ = asyncio.run(keep(folder / "runs.db"))
    assert len(asyncio.run(store.records("a"))) == 2  # whoever has read it has a connection of its own
    store.close()
    assert not (folder / "runs.db-wal").exists()
    with SqliteStore(shutil.copy(folder / "runs.db", shared_folder / "copy.db")) as copy:
        assert [head.run_id for head in asyncio.run(copy.heads())] == ["a"]
    # Path.as_uri imports urllib on first use, and a Python in root's home cannot be read after setuid.
    code = (
        "import asyncio, os, sys, urllib.request; from agentfsm.journal.sqlite import SqliteStore\n"
        "os.setuid(65534) if os.getuid() == 0 else None\n"
        "with SqliteStore(sys.argv[1]) as store: print(len(asyncio.run(store.records('a'))))"
    )
    (folder / "runs.db").chmod(0o644)  # a store is its owner's alone
    folder.chmod(0o555)
    got = subprocess.run([sys.executable, "-c", code, folder / "runs.db"], capture_output=True, text=True)
    folder.chmod(0o755)
    assert got.stdout == "2\n", got.stderr


def test_an_inaccessible_folder_is_a_clear_error(shared_folder):
    folder = shared_folder / "shut"
    folder.mkdir()
    code = (
        "import asyncio, os, sys; from agentfsm.journal.sqlite import SqliteStore\n"
        "os.setuid(65534) if os.getuid() == 0 else None\n"
        "try: SqliteStore(sys.argv[1])\n"
        "except Exception as e: print(type(e).__name__, e)"
    )
    folder.chmod(0o000)
    got = subprocess.run([sys.executable, "-c", code, folder / "runs.db"], capture_output=True, text=True)
    folder.chmod(0o755)
    assert got.stdout.startswith("StoreError"), got.stderr
    assert "runs.db cannot be read: Permission denied" in got.stdout


def test_a_database_locked_by_another_program_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_schema, "BUSY_TIMEOUT_S", 0.05)
    store, lease = asyncio.run(keep(tmp_path / "runs.db"))
    other = sqlite3.connect(tmp_path / "runs.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    del lease
    store.close()
    store = SqliteStore(tmp_path / "runs.db")
    with pytest.raises(StoreLockedError, match="locked by another program"):
        asyncio.run(store.acquire("a", "me"))
    other.execute("ROLLBACK")
    other.close()
    assert asyncio.run(store.acquire("a", "me")).seq == 2
    store.close()


def test_claim_locks_the_store_before_the_first_write(tmp_path):
    store, other = SqliteStore(tmp_path / "runs.db"), SqliteStore(tmp_path / "runs.db")
    store.claim()
    store.claim()
    with pytest.raises(StoreLockedError, match=str(os.getpid())):
        other.claim()
    store.close()
    other.claim()
    assert asyncio.run(other.heads()) == []
    other.close()


def calls_of_a_new_run(among: int) -> int:
    """How many calls of Python functions it takes to create a run in memory beside so many others."""
    store = MemoryStore()
    leases = [asyncio.run(store.acquire(f"r{number}", "me", new=True)) for number in range(among)]
    calls = 0

    def count(*event: object) -> None:
        nonlocal calls
        calls += event[1] == "call"

    sys.setprofile(count)
    try:
        with pytest.raises(StopIteration):  # it awaits nothing
            store.acquire("new", "me", new=True).send(None)
    finally:
        sys.setprofile(None)
    assert len(leases) == among
    return calls


def test_a_new_run_in_memory_costs_the_same_however_many_others_there_are():
    assert calls_of_a_new_run(500) == calls_of_a_new_run(5)
