"""Power cuts, truncated logs and flipped bits: no acknowledged record is lost, and no record is ever wrong."""

import asyncio
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from agentfsm import SqliteStore, StoreError
from agentfsm.journal.hash_chain import GENESIS_HASH, record_hash
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.store import consistent_read
from agentfsm.journal.verification import TAMPERED, verify
from tests.helpers.faulty_disk import cut_power, run_on_disk
from tests.helpers.journal_rows import unpack_rows
from tests.helpers.journal_scenarios import finished_run


def read(folder: Path, names: str = "abc") -> dict[str, list[SealedRecord]] | None:
    """Every row of a store, or None where there is none yet."""
    if not (folder / "runs.db").exists():
        return {name: [] for name in names}
    store = SqliteStore(folder / "runs.db")
    try:
        known = {h.run_id for h in asyncio.run(store.heads())}
        return {name: asyncio.run(store.records(name)) if name in known else [] for name in names}
    finally:
        store.close()


def put(folder: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def cuts(tmp_path, monkeypatch, level: str, count: int, seed: int = 0) -> int:
    """Cut the power at so many places; how many acknowledged rows were lost."""
    (tmp_path / "live").mkdir(exist_ok=True)
    disk, truth, acked = run_on_disk(tmp_path / "live", level, 40, seed, monkeypatch)
    draw = random.Random(seed)
    lost = 0
    for n in range(count):
        at = round((n + 1) * len(disk.log) / count)
        put(tmp_path / "cut", cut_power(disk, at, draw))
        found = read(tmp_path / "cut")
        for name in "abc":
            assert found[name] == truth[name][: len(found[name])], (at, name)  # never a wrong row
            promised = max((count for when, run, count in acked if run == name and when <= at), default=0)
            lost += max(0, promised - len(found[name]))
        if (tmp_path / "cut" / "runs.db").exists():
            db = sqlite3.connect(tmp_path / "cut" / "runs.db")
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",), at
            db.close()
    return lost


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 20))])
def test_a_power_cut_loses_nothing_that_was_acknowledged(tmp_path, monkeypatch, seed, counted):
    assert cuts(tmp_path, monkeypatch, "full", 400, seed) == 0
    counted("power cuts: 400, nothing acknowledged lost")


@pytest.mark.slow
def test_without_full_a_power_cut_may_only_lose_the_last_records(tmp_path, monkeypatch, counted):
    lost = cuts(tmp_path, monkeypatch, "normal", 400)
    assert lost > 0  # or the disk of this test forgets nothing
    counted(f"power cuts at the level `normal`: 400, {lost} rows of the last commits lost, none of them wrong")


@pytest.fixture
def with_a_log(tmp_path):
    """Files of a store whose rows stand, for the greater part, in the write-ahead log still."""
    import asyncio

    from agentfsm.testing.store_conformance import sealed_records

    async def live():
        store = SqliteStore(tmp_path / "runs.db")
        lease = await store.acquire("a", "me", new=True)
        some = sealed_records(40, hidden='[["00","' + "x" * 500 + '"]]')
        for row in some:
            await store.append(lease, [row], "running")
        files = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name in ("runs.db", "runs.db-wal")}
        store.close()
        return files, some

    (files, some) = asyncio.run(live())
    assert len(files["runs.db-wal"]) > 40 * 4096
    return files, some


def whole_rows(found: list[SealedRecord]) -> bool:
    head = GENESIS_HASH
    for seq, row in enumerate(found, 1):
        head = record_hash(head, row.body)
        if head != row.hash or row.seq != seq:
            return False
    return True


@pytest.mark.parametrize("count", [360, pytest.param(5000, marks=pytest.mark.soak)])
def test_a_log_truncated_anywhere_has_the_records_before_that(tmp_path, with_a_log, count, counted):
    files, some = with_a_log
    log = files["runs.db-wal"]
    seen = set()
    for n in range(count):
        put(tmp_path / "cut", {**files, "runs.db-wal": log[: round(n * len(log) / count)]})
        found = read(tmp_path / "cut", "a")["a"]
        assert found == some[: len(found)]
        seen.add(len(found))
    assert {0, 39} & seen
    assert len(seen) > 20
    counted(f"write-ahead log cut at {count} offsets: {len(seen)} lengths of journal, no wrong row")


@pytest.mark.slow
@pytest.mark.parametrize("count", [800, pytest.param(10_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ["runs.db-wal", "runs.db"])
def test_a_flipped_bit_never_gives_a_wrong_record(tmp_path, with_a_log, name, count, counted):
    files, some = with_a_log
    if name == "runs.db":  # all rows in the file itself
        put(tmp_path / "cut", files)
        db = sqlite3.connect(tmp_path / "cut" / "runs.db")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.close()
        files = {"runs.db": (tmp_path / "cut" / "runs.db").read_bytes()}
    draw = random.Random(count)
    found_out = shorter = 0
    for _ in range(count):
        data = bytearray(files[name])
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        put(tmp_path / "cut", {**files, name: bytes(data)})
        try:
            found = read(tmp_path / "cut", "a")["a"]
        except StoreError:  # SQLite saw it
            found_out += 1
            continue
        if name == "runs.db-wal":  # its frames have checksums: a prefix is all that can be left
            assert found == some[: len(found)]
            shorter += found != some
        elif found != some:  # a database has none: the seals and commitments find it
            found_out += 1
            assert (
                not whole_rows(found) or [r.hidden for r in found] != [r.hidden for r in some] or len(found) < len(some)
            )
    assert found_out or name == "runs.db-wal"
    what = f"{shorter} took rows of the end" if shorter else f"{found_out} found out"
    counted(f"bits flipped in {name}: {count}, {what}, no wrong row taken for a right one")


def test_a_table_of_runs_that_a_flipped_bit_left_without_numbers_is_reported(tmp_path):
    store, _ = finished_run(SqliteStore(tmp_path / "runs.db"))
    store.close()
    data = (tmp_path / "runs.db").read_bytes()
    table = b"CREATE TABLE run (\n    id INTEGER PRIMARY KEY"
    assert data.count(table) == 1
    (tmp_path / "runs.db").write_bytes(
        data.replace(table, table.replace(b"R P", b"R$P"))
    )  # ' ' and '$' differ by a bit
    with SqliteStore(tmp_path / "runs.db") as store, pytest.raises(StoreError, match="run 'sample' has no number"):
        asyncio.run(store.records("sample"))


WRONG = [("hash", "7"), ("hash", "'text'"), ("body", "8"), ("body", "x'00'"), ("hidden", "9"), ("hidden", "'['")]


@pytest.mark.parametrize(("column", "value"), WRONG)
def test_a_value_that_changed_its_type_is_tampering(tmp_path, column, value):
    store, _ = finished_run(SqliteStore(tmp_path / "runs.db"))
    store.close()
    unpack_rows(tmp_path / "runs.db")
    db = sqlite3.connect(tmp_path / "runs.db")
    db.executescript("DROP TRIGGER journal_keeps_what_it_has")
    db.execute(f"UPDATE journal SET {column} = {value} WHERE key & 4294967295 = 4")
    db.commit()
    db.close()
    store = SqliteStore(tmp_path / "runs.db")
    told = verify("sample", asyncio.run(store.records("sample")), asyncio.run(store.head("sample")))
    store.close()
    assert (told.code, told.seq) == (TAMPERED, 4)


@pytest.mark.parametrize(("column", "value"), [*WRONG, ("body", "'text'"), ("body", "x''"), ("hidden", "NULL")])
def test_a_value_that_changed_its_type_in_the_row_of_a_commit_is_tampering(tmp_path, column, value):
    store, _ = finished_run(SqliteStore(tmp_path / "runs.db"))
    store.close()
    db = sqlite3.connect(tmp_path / "runs.db")
    db.executescript("DROP TRIGGER journal_keeps_what_it_has")
    assert db.execute(f"UPDATE journal SET {column} = {value} WHERE key & 4294967295 = 6").rowcount == 1
    db.commit()
    db.close()
    store = SqliteStore(tmp_path / "runs.db")
    told = verify("sample", asyncio.run(store.records("sample")), asyncio.run(store.head("sample")))
    store.close()
    assert told.code == TAMPERED
    assert told.seq == (6 if column == "hash" else 4)  # records 4 to 6 are in the row


@pytest.mark.parametrize(("column", "value"), [("hash", "7"), ("seq", "'many'"), ("status", "5"), ("epoch", "'x'")])
def test_a_head_that_changed_its_type_is_a_clear_error(tmp_path, column, value):
    store, _ = finished_run(SqliteStore(tmp_path / "runs.db"))
    store.close()
    db = sqlite3.connect(tmp_path / "runs.db")
    db.execute(f"UPDATE run SET {column} = {value}")
    db.commit()
    db.close()
    store = SqliteStore(tmp_path / "runs.db")
    told = verify("sample", *asyncio.run(consistent_read(store, "sample")))
    store.close()
    assert (told.code, told.seq) == (TAMPERED, told.records)


@pytest.mark.parametrize("hidden", ["9", "[", "[[", "[[]]", '[["zz","x"]]', '[["00","x"', "[null,null]", "null", "x"])
def test_invalid_hidden_values_are_found(hidden):
    store, _ = finished_run()
    rows = asyncio.run(store.records("sample"))
    at = next(n for n, row in enumerate(rows) if row.hidden)
    rows[at] = rows[at]._replace(hidden=hidden)
    told = verify("sample", rows, asyncio.run(store.head("sample")))
    assert (told.code, told.seq) == (TAMPERED, at + 1)
