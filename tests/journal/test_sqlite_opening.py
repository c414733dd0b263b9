"""A SQLite store opens and closes its file in a thread, so that the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentfsm import SqliteStore, StoreLockedError
from agentfsm.journal.signals import SealedSignal
from agentfsm.journal.sqlite import store_file
from agentfsm.journal.sqlite.sqlite_writer import SqliteWriter
from agentfsm.journal.sqlite.store_file import FileLock

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="flock")


def lock_file(path: Path) -> Path:
    return path.with_name(path.name + "-lock")


@pytest.fixture
def waited_in(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The threads that waited for the lock of a file."""
    names: set[str] = set()

    def sleep(seconds: float) -> None:
        names.add(threading.current_thread().name)
        time.sleep(seconds)

    monkeypatch.setattr(store_file, "time", SimpleNamespace(sleep=sleep, time_ns=time.time_ns))
    return names


async def released_by_the_loop(lock: FileLock, waited_in: set[str]) -> None:
    """Release a lock once somebody has waited for it, which takes an event loop that goes on meanwhile."""
    while not waited_in:
        await asyncio.sleep(0)
    lock.release()


@pytest.mark.parametrize("use", ["acquire", "prepare", "send", "compact"])
def test_the_event_loop_goes_on_while_another_process_holds_the_file_for_a_moment(
    use: str, tmp_path: Path, waited_in: set[str]
) -> None:
    path = tmp_path / "runs.db"
    lock = FileLock(lock_file(path))

    async def scenario() -> None:
        async with SqliteStore(path) as store:
            await store.release(await store.acquire("one", "me", new=True))
        lock.acquire(briefly=True)
        async with SqliteStore(path) as store:
            uses = {
                "acquire": lambda: store.acquire("one", "me"),
                "prepare": store.maintenance.prepare,
                "send": lambda: store.signals.send(SealedSignal("a", "one", "{}", "")),
                "compact": store.maintenance.compact,
            }
            await asyncio.gather(uses[use](), released_by_the_loop(lock, waited_in))

    asyncio.run(scenario())
    assert waited_in == {"agentfsm-store"}


def test_what_is_queued_while_the_file_is_opened_is_written_or_fails_with_the_opening(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    lock = FileLock(lock_file(path))

    async def scenario() -> None:
        async with SqliteStore(path) as store:
            names = [f"run{number}" for number in range(5)]
            lock.acquire()
            failed = await asyncio.gather(
                *(store.acquire(name, "me", new=True) for name in names), return_exceptions=True
            )
            assert [type(each) for each in failed] == [StoreLockedError] * 5
            lock.release()
            leases = await asyncio.gather(*(store.acquire(name, "me", new=True) for name in names))
            assert [(lease.run_id, lease.epoch) for lease in leases] == [(name, 1) for name in names]
            assert {head.owner for head in await store.heads()} == {"me"}

    asyncio.run(scenario())


def test_an_operation_that_is_cancelled_while_it_waits_for_the_file_leaves_it_free(
    tmp_path: Path, waited_in: set[str]
) -> None:
    path = tmp_path / "runs.db"
    lock = FileLock(lock_file(path))
    lock.acquire(briefly=True)

    async def scenario() -> None:
        async with SqliteStore(path) as store:
            sent = asyncio.create_task(store.signals.send(SealedSignal("a", "one", "{}", "")))
            while not waited_in:
                await asyncio.sleep(0)
            sent.cancel()
            lock.release()
            with pytest.raises(asyncio.CancelledError):
                await sent
            lock.acquire()
            lock.release()

    asyncio.run(scenario())


def test_a_file_is_freed_however_late_its_thread_looks_at_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited_in: set[str]
) -> None:
    look = SqliteWriter._schedule_batch

    def look_late(writer: SqliteWriter, *opened: Future[None]) -> None:
        if threading.current_thread().name == "agentfsm-store":
            time.sleep(0.02)
        look(writer, *opened)

    monkeypatch.setattr(SqliteWriter, "_schedule_batch", look_late)
    test_an_operation_that_is_cancelled_while_it_waits_for_the_file_leaves_it_free(tmp_path, waited_in)


def test_of_two_operations_at_once_the_last_frees_the_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"

    async def scenario() -> None:
        async with SqliteStore(path) as store, SqliteStore(path) as other:
            await store.release(await store.acquire("one", "me", new=True))
            store.close()
            signals = (SealedSignal(name, "one", "{}", "") for name in "ab")
            assert await asyncio.gather(*map(other.signals.send, signals)) == [True, True]
            await store.acquire("one", "me")

    asyncio.run(scenario())


def test_the_event_loop_goes_on_while_a_store_is_closed(tmp_path: Path) -> None:
    def waits(_: object) -> bool:
        started.set()
        return closing.wait(10)

    async def scenario() -> bool:
        store = SqliteStore(tmp_path / "runs.db")
        await store.acquire("one", "me", new=True)
        query = asyncio.create_task(store._reader.read(waits, None))
        while not started.is_set():
            await asyncio.sleep(0)
        closed = asyncio.create_task(store.aclose())
        while store._reader._thread is not None:  # the store waits for the query from now on
            await asyncio.sleep(0)
        closing.set()
        await closed
        return bool(await query)

    started, closing = threading.Event(), threading.Event()
    assert asyncio.run(scenario())
