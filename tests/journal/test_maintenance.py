"""What is done to a whole store: files of earlier schemas, tombstones, and that what was purged is in no byte of it."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from agentfsm import JournalError, SqliteStore
from agentfsm.journal.maintenance import Hold, Tombstone, read_tombstone, seal_tombstone
from agentfsm.journal.run_info import RunQuery
from agentfsm.journal.sqlite.sqlite_schema import SCHEMA_VERSION
from agentfsm.journal.verification import GOOD, OPEN, verify_stored_run
from agentfsm.loop.keys import KeyPurpose, Keyring

DATA = Path(__file__).parents[1] / "data"
KEYRING = Keyring(b"of the tests")
TOMBSTONE = Tombstone(7, "r", 2, 30, "ab" * 32, 1_700_000_000_000, "Ann", 'too "old"')


def test_a_file_of_schema_3_is_listed_as_before_and_can_hold_and_purge_after_its_first_write(tmp_path: Path) -> None:
    path = Path(shutil.copy(DATA / "schema3" / "runs.db", tmp_path / "runs.db"))

    async def main() -> None:
        async with SqliteStore(path) as store:
            before = (await store.find_runs(RunQuery())).runs
            assert [(info.run_id, info.prompt) for info in before] == [("waits", "Tidy up."), ("finished", "Go.")]
            assert await store.maintenance.holds() == {}
            assert await store.maintenance.tombstones() == []
            with closing(sqlite3.connect(path)) as db:
                assert db.execute("PRAGMA user_version").fetchone() == (3,)  # reading changes nothing
            await store.maintenance.prepare()
            assert (await store.find_runs(RunQuery())).runs == before
            for run_id, code in (("finished", GOOD), ("waits", OPEN)):
                assert (await verify_stored_run(store, run_id, keyring=KEYRING)).code == code
            await store.maintenance.set_hold("waits", Hold("case 7"))
            head = await store.head("finished")
            assert head is not None
            number = json.loads(head.row)[0]
            tombstone = Tombstone(number, "finished", head.epoch, head.seq, head.hash, 0)
            assert await store.maintenance.purge([seal_tombstone(tombstone, KEYRING)]) == ["finished"]
            assert await store.maintenance.schema_damage() == await store.maintenance.row_damage() == []
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)

    asyncio.run(main())


def test_records_are_deleted_only_where_a_tombstone_says_so(tmp_path: Path) -> None:
    path = Path(shutil.copy(DATA / "schema3" / "runs.db", tmp_path / "runs.db"))
    with SqliteStore(path) as store:
        store.claim()
    with closing(sqlite3.connect(path)) as db:
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            db.execute("DELETE FROM journal")
        db.execute("INSERT INTO tombstone VALUES (1, 'finished', 1, '', x'')")
        db.execute("DELETE FROM journal WHERE key >> 32 = 1")
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            db.execute("DELETE FROM journal")


def test_a_tombstone_is_read_as_it_was_sealed() -> None:
    sealed = seal_tombstone(TOMBSTONE, KEYRING)
    assert read_tombstone(sealed.content, sealed.mac) == sealed
    assert KEYRING.check_seal(KeyPurpose.tombstone, sealed.content.encode(), sealed.mac)
    assert not KEYRING.check_seal(KeyPurpose.tombstone, replace(sealed, seq=29).content.encode(), sealed.mac)


@pytest.mark.parametrize("content", ["", "[]", "[1]", '{"a":1}', TOMBSTONE.content.replace(",", ", ", 1)])
def test_what_is_no_tombstone_is_refused(content: str) -> None:
    with pytest.raises(JournalError, match="tombstone"):
        read_tombstone(content, "")
