"""The writer of a SQLite file: shares commits, and reports the result of every job."""

import asyncio
import sqlite3
import threading

import pytest

from agentfsm import StoreError
from agentfsm.journal.sqlite import SqliteStore, sqlite_store, sqlite_writer
from agentfsm.journal.sqlite.sqlite_writer import SqliteWriter
from agentfsm.testing.store_conformance import sealed_records


def test_a_store_serves_several_event_loops_at_once(tmp_path):
    store = SqliteStore(tmp_path / "runs.db")

    async def one(name):
        lease = await store.acquire(name, "me", new=True)
        for row in sealed_records(20):
            await store.append(lease, [row], "running")

    threads = [threading.Thread(target=lambda n=n: asyncio.run(one(f"run{n}"))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(asyncio.run(store.records(f"run{n}"))) for n in range(4)] == [20] * 4
    store.close()


def test_runs_that_write_at_once_share_commits(tmp_path, monkeypatch):
    store = SqliteStore(tmp_path / "runs.db")
    commits = []
    real = SqliteWriter._commit
    monkeypatch.setattr(SqliteWriter, "_commit", lambda *args: commits.append(len(args[2])) or real(*args))

    async def many():
        leases = [await store.acquire(f"run{n}", "me", new=True) for n in range(100)]
        commits.clear()
        await asyncio.gather(*(store.append(lease, sealed_records(1), "running") for lease in leases))

    asyncio.run(many())
    store.close()
    assert sum(commits) == 100
    assert len(commits) <= 50


@pytest.mark.parametrize(("runs", "commits"), [(8, [8]), (16, [16]), (40, [20, 20]), (128, [64, 64])])
def test_half_of_many_runs_share_a_commit_and_few_runs_share_one(tmp_path, monkeypatch, runs, commits):
    store = SqliteStore(tmp_path / "runs.db")
    seen = []
    real = SqliteWriter._commit
    monkeypatch.setattr(SqliteWriter, "_commit", lambda *args: seen.append(len(args[2])) or real(*args))

    async def many():
        leases = [await store.acquire(f"run{n}", "me", new=True) for n in range(runs)]
        seen.clear()
        await asyncio.gather(*[store.append(lease, sealed_records(1), "running") for lease in leases])

    asyncio.run(many())
    store.close()
    assert seen == commits


@pytest.mark.parametrize("level", ["full", "normal"])
def test_an_unexpected_error_is_raised_and_the_next_job_is_written(tmp_path, monkeypatch, level):
    async def live():
        store = SqliteStore(tmp_path / "runs.db", synchronous=level)
        lease = await store.acquire("a", "me", new=True)
        real = sqlite_store.insert_records
        monkeypatch.setattr(sqlite_store, "insert_records", lambda *args: {}["no error of a database"])
        with pytest.raises(StoreError, match="KeyError"):
            await asyncio.wait_for(store.append(lease, sealed_records(2), "running"), 30)
        other = sqlite3.connect(tmp_path / "runs.db", timeout=0, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")  # the file is not left locked
        other.close()
        monkeypatch.setattr(sqlite_store, "insert_records", real)
        await asyncio.wait_for(store.append(lease, sealed_records(2), "finished"), 30)
        assert len(await store.records("a")) == 2
        store.close()

    asyncio.run(live())


def test_jobs_of_a_closed_loop_are_written(tmp_path, monkeypatch):
    store = SqliteStore(tmp_path / "runs.db")
    closed, real = threading.Event(), SqliteWriter._commit

    async def live():
        leases = [await store.acquire(f"run{n}", "me", new=True) for n in range(3)]

        def late(*args):
            assert closed.wait(30)
            return real(*args)

        monkeypatch.setattr(SqliteWriter, "_commit", late)
        handed = [store.append(leases[0], sealed_records(2), "running")]
        await asyncio.sleep(0)  # a commit is on its way, and the others wait for the next
        return handed + [store.append(lease, sealed_records(2), "running") for lease in leases[1:]]

    asyncio.run(live())
    closed.set()
    store.close()
    with SqliteStore(tmp_path / "runs.db") as again:
        assert [head.seq for head in asyncio.run(again.heads())] == [2, 2, 2]


@pytest.mark.parametrize("level", ["full", "normal"])
def test_a_job_that_is_not_awaited_is_written(tmp_path, level):
    async def live():
        store = SqliteStore(tmp_path / "runs.db", synchronous=level)
        lease = await store.acquire("a", "me", new=True)
        some = sealed_records(6)
        store.append(lease, some[:2], "running")
        await asyncio.sleep(0)
        store.append(lease, some[2:4], "running")
        store.append(lease, some[4:], "running")
        await asyncio.sleep(0)
        store.close()
        return some

    some = asyncio.run(live())
    again = SqliteStore(tmp_path / "runs.db")
    assert asyncio.run(again.records("a")) == some
    again.close()


def test_a_single_run_waits_only_for_the_store(tmp_path):
    store = SqliteStore(tmp_path / "runs.db", synchronous="normal")

    async def live():
        lease = await store.acquire("a", "me", new=True)
        turns = []
        asyncio.get_running_loop().call_soon(turns.append, "a turn of the event loop")
        for row in sealed_records(3):
            await store.append(lease, [row], "running")
        assert turns == []
        assert len(await store.records("a")) == 3

    asyncio.run(live())
    store.close()


@pytest.mark.parametrize("level", ["full", "normal"])
def test_the_log_is_checkpointed_periodically(tmp_path, monkeypatch, level):
    monkeypatch.setattr(sqlite_writer, "CHECKPOINT_INTERVAL", 10)
    path = tmp_path / "runs.db"
    store = SqliteStore(path, synchronous=level)

    async def live():
        lease = await store.acquire("a", "me", new=True)
        for row in sealed_records(50, hidden='["' + "x" * 4000 + '"]'):
            await store.append(lease, [row], "running")

    asyncio.run(live())
    assert path.stat().st_size > 30 * 4000
    assert path.with_name("runs.db-wal").stat().st_size < 100 * 4096  # of some 200 pages that were written
    store.close()
