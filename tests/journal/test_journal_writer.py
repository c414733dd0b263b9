"""The journal sink of a store: entries are appended in order, without waiting, and no error is lost."""

import asyncio
from collections import Counter

import pytest

from agentfsm import Agent, Host, SqliteStore, StaleLease, StoreFullError
from agentfsm.errors import JournalError
from agentfsm.journal.journal_writer import StoreJournal, open_journal
from agentfsm.journal.memory_store import MemoryStore
from agentfsm.journal.sqlite import sqlite_store
from agentfsm.loop.keys import KeyPurpose, Keyring, SecretKeys
from agentfsm.loop.state import RunState
from agentfsm.loop.withholding import Withholder
from agentfsm.testing import ScriptedModel, call
from tests.helpers.journal_scenarios import add


class Failing(MemoryStore):
    """A store whose next appends fail, one after the other."""

    def __init__(self, *errors):
        super().__init__()
        self.errors = list(errors)
        self.released = 0

    def append(self, lease, records, status, info=None, snapshot=None):
        if not self.errors:
            return super().append(lease, records, status, info, snapshot)
        done = asyncio.get_running_loop().create_future()
        done.set_exception(self.errors.pop(0))
        return done

    async def release(self, lease):
        self.released += 1
        await super().release(lease)


class Coroutines(MemoryStore):
    """A store of somebody's that gives a task where ours give a future."""

    def append(self, lease, records, status, info=None, snapshot=None):
        done = super().append(lease, records, status, info, snapshot)

        async def later():
            await asyncio.sleep(0)
            await done

        return asyncio.ensure_future(later())


def note(kind="note", what=None):
    return (kind, 1.0, what)


async def kept(store) -> StoreJournal:
    return await open_journal(store, RunState("r"), None, Keyring(b"s"), Withholder(Keyring(b"s").current))


def test_the_first_of_several_errors_is_raised_and_the_lease_released():
    async def live():
        store = Failing(StoreFullError("no room"), StaleLease("r", None, "follows from it"))
        keeper = await kept(store)
        keeper.push([note()])
        keeper.push([note()])
        with pytest.raises(StoreFullError, match="no room"):
            await keeper.flush()
        assert isinstance(keeper.error, StoreFullError)
        keeper.push([note()])  # comes to nothing
        assert store.released == 1
        assert await store.records("r") == []
        assert (await store.head("r")).owner is None

    asyncio.run(live())


def test_an_error_is_known_before_anyone_awaits_it():
    async def live():
        keeper = await kept(Failing(StoreFullError("no room")))
        assert keeper.error is None
        keeper.push([note()])
        assert isinstance(keeper.error, StoreFullError)

    asyncio.run(live())


def test_an_entry_that_is_not_json_stops_the_run():
    async def live():
        keeper = await kept(MemoryStore())
        keeper.push([note(what={"set": {1, 2}})])
        with pytest.raises(JournalError, match="cannot be written to its journal"):
            await keeper.flush()

    asyncio.run(live())


@pytest.mark.parametrize("make", [MemoryStore, Coroutines])
def test_entries_are_appended_in_order_and_none_after_the_end(make):
    async def live():
        store = make()
        keeper = await kept(store)
        for n in range(5):
            keeper.push([note(what={"n": n})])
        await keeper.flush()
        keeper.push([note("run.finished", {"ending": "x"})])
        keeper.push([note()])  # behind the end: nothing comes of it
        await keeper.flush()
        await keeper.flush()
        assert keeper.error is None
        return store

    store = asyncio.run(live())
    assert [row.seq for row in asyncio.run(store.records("r"))] == [1, 2, 3, 4, 5, 6]
    assert asyncio.run(store.head("r")).status == "finished"


def test_a_cancelled_flush_loses_no_entry():
    class Slow(MemoryStore):
        def append(self, lease, records, status, info=None, snapshot=None):
            done = super().append(lease, records, status, info, snapshot)
            if not records:
                return done
            waiting = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.01, lambda: waiting.done() or waiting.set_result(None))
            return waiting

    async def live():
        store = Slow()
        keeper = await kept(store)
        keeper.push([note()])
        task = asyncio.ensure_future(keeper.flush())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await keeper.flush()
        keeper.push([note()])
        await keeper.flush()
        assert len(await store.records("r")) == 2

    asyncio.run(live())


@pytest.mark.parametrize("stored", [True, False])
def test_there_is_one_mac_for_the_records_of_each_append_and_one_for_the_runs_row_and_none_without_a_store(
    stored, tmp_path, monkeypatch
):
    sealed, appended = Counter(), list[int]()
    seal, append = SecretKeys.seal, sqlite_store.insert_records

    def count_seal(keys, purpose, message):
        sealed[purpose] += 1
        return seal(keys, purpose, message)

    def count_append(db, key, records, status, info, snapshot):
        appended.append(len(records))
        append(db, key, records, status, info, snapshot)

    monkeypatch.setattr(SecretKeys, "seal", count_seal)
    monkeypatch.setattr(sqlite_store, "insert_records", count_append)
    store = SqliteStore(tmp_path / "runs.db") if stored else None

    async def live():
        return await Agent(ScriptedModel([call("add", a=1, b=2), "3"]), tools=[add], host=Host(store=store)).run("go")

    assert asyncio.run(live()).ok
    if store is not None:
        store.close()
    expected = {KeyPurpose.record: len(appended), KeyPurpose.run: len(appended) + 1} if stored else {}
    assert not stored or sum(appended) > 2 * len(appended)
    assert sealed == expected  # one more: the run is acquired
