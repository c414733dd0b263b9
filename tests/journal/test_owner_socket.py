"""Others reach the process that writes a SQLite store: answers, cancellations, and operations on a live store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentfsm import (
    Agent,
    Allow,
    Host,
    RunCancelled,
    RunCompleted,
    RunQuery,
    Runs,
    SqliteStore,
    StaleHumanReplyError,
    StaleLease,
    StoreError,
    StoreLockedError,
    UnknownRunError,
    UserInputRequested,
    tool,
)
from agentfsm.errors import JournalError, RunExistsError, RunHeldError
from agentfsm.journal.maintenance import Hold, Tombstone, seal_tombstone
from agentfsm.journal.redact import redact
from agentfsm.journal.sqlite.owner_protocol import connect
from agentfsm.journal.sqlite.store_file import FileLock
from agentfsm.journal.store import seal_row
from agentfsm.journal.verification import GOOD, OPEN
from agentfsm.loop.keys import Keyring
from agentfsm.testing import ScriptedModel, call
from agentfsm.testing.store_conformance import sealed_records
from tests.helpers.child_process import child_environment

SECRET = b"the secret of the tests"
KEYRING = Keyring(SECRET)

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="there are no Unix sockets")


class Service:
    """A process that writes a store and runs agents; here another thread of control over the same file."""

    def __init__(self, path: Path) -> None:
        self.store = SqliteStore(path)
        self.host = Host(store=self.store, secret=SECRET)
        self.paid: list[int] = []
        self.inside = asyncio.Event()

    def agent(self, *script: Any) -> Agent:
        @tool(requires_approval=True)
        def pay(amount: int) -> str:
            """Pay."""
            self.paid.append(amount)
            return "paid"

        @tool
        async def wait() -> str:
            """Wait."""
            self.inside.set()
            await asyncio.Event().wait()
            return "never"

        return Agent(ScriptedModel(list(script)), tools=[pay, wait], host=self.host)

    async def asks(self, run_id: str = "one") -> None:
        result = await self.agent(call("pay", amount=5)).run("Pay 5 to ann@example.org.", run_id=run_id)
        assert isinstance(result.outcome, UserInputRequested)


@asynccontextmanager
async def live(path: Path) -> AsyncIterator[tuple[Service, SqliteStore, Runs]]:
    """A service that owns a file, and the store of somebody else who does not."""
    service = Service(path)
    async with service.store, SqliteStore(path) as other:
        await service.asks()
        yield service, other, Runs(other, secret=SECRET)


def play(scenario: Any, path: Path) -> None:
    async def main() -> None:
        async with live(path) as (service, other, runs):
            await scenario(service, other, runs)

    asyncio.run(main())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


def lock_file(path: Path) -> Path:
    return path.with_name(path.name + "-lock")


def test_an_answer_reaches_the_owner_and_wakes_it_at_once(path: Path) -> None:
    async def scenario(service: Service, other: SqliteStore, runs: Runs) -> None:
        async def worker() -> Any:
            async for run_id in service.store.signals.listen():
                if run := await service.agent("Paid.").next_run(run_id):
                    return (await run).outcome
            return None

        working = asyncio.ensure_future(worker())
        await asyncio.sleep(0)
        await runs.answer("one", Allow(), by="ann")
        assert isinstance(await working, RunCompleted)
        assert service.paid == [5]
        assert await other.signals.pending() == []

    play(scenario, path)


def test_a_running_run_is_cancelled_from_another_process_at_once(path: Path) -> None:
    async def scenario(service: Service, other: SqliteStore, runs: Runs) -> None:
        running = asyncio.ensure_future(service.agent(call("wait")).run("Wait.", run_id="two"))
        await service.inside.wait()
        sent = await runs.cancel("two", "stop it")
        assert sent.owner is not None
        outcome = (await running).outcome
        assert isinstance(outcome, RunCancelled)
        assert outcome.reason == "stop it"

    play(scenario, path)


def test_a_second_answer_through_the_owner_is_refused(tmp_path: Path) -> None:
    async def scenario(service: Service, other: SqliteStore, runs: Runs) -> None:
        await runs.answer("one", Allow())
        with pytest.raises(StaleHumanReplyError, match="answered already"):
            await runs.answer("one", Allow())

    play(scenario, tmp_path / "runs.db")


def test_a_live_store_is_redacted_and_forked_and_everything_verifies(path: Path) -> None:
    async def scenario(service: Service, other: SqliteStore, runs: Runs) -> None:
        running = asyncio.ensure_future(service.agent(call("wait")).run("Wait.", run_id="two"))
        await service.inside.wait()
        assert await runs.fork("one", 1, "forked") == "forked"
        done = await runs.redact_text("ann@example.org", by="the officer")
        assert {each.run_id for each in done.deleted} == {"one", "forked"}
        assert done.remaining == ()
        running.cancel()
        await asyncio.wait([running])
        for run_id in ("one", "two", "forked"):
            assert (await runs.verify(run_id)).code in (GOOD, OPEN)
        head = await service.store.head("one")
        assert head is not None
        assert (head.status, head.owner) == ("suspended", None)

    play(scenario, path)
    left = b"".join(file.read_bytes() for file in path.parent.glob("runs.db*"))
    assert b"ann@example.org" not in left


def test_a_run_that_is_being_run_is_not_taken_by_an_operation(tmp_path: Path) -> None:
    async def scenario(service: Service, other: SqliteStore, runs: Runs) -> None:
        running = asyncio.ensure_future(service.agent(call("wait")).run("Wait.", run_id="two"))
        await service.inside.wait()
        async with other.maintenance.writable(other) as writable:
            with pytest.raises(StaleLease, match="is being run"):
                await writable.acquire("two", "an operation", keyring=KEYRING)
            with pytest.raises(UnknownRunError):
                await writable.acquire("three", "an operation", keyring=KEYRING)
            with pytest.raises(RunExistsError):
                await writable.acquire("one", "an operation", new=True, keyring=KEYRING)
        running.cancel()
        await asyncio.wait([running])

    play(scenario, tmp_path / "runs.db")


def test_what_an_operation_writes_through_the_owner_is_fenced_and_sealed(tmp_path: Path) -> None:
    async def scenario(service: Service, other: SqliteStore, runs: Runs) -> None:
        records = sealed_records(3)
        async with other.maintenance.writable(other) as writable:
            lease = await writable.acquire("new", "an operation", new=True, keyring=KEYRING)
            await writable.append(lease, records[:1], "running")
            with pytest.raises(StaleLease):
                await writable.append(lease, records[2:], "running")
            await writable.release(lease)
            again = await writable.acquire("new", "an operation", keyring=KEYRING)
            assert again.epoch == 2
            await writable.append(again, records[1:], "suspended")
        head = await other.head("new")
        assert head is not None
        assert (head.seq, head.status, head.owner) == (3, "suspended", None)
        assert head.mac == seal_row(KEYRING, head.row)
        assert await other.records("new") == records
        taken = await service.store.acquire("new", "the service", keyring=KEYRING)
        assert taken.epoch == 3

    play(scenario, tmp_path / "runs.db")


def test_what_somebody_without_the_secret_writes_through_the_owner_is_found_and_not_acted_on(tmp_path: Path) -> None:
    async def scenario(service: Service, other: SqliteStore, runs: Runs) -> None:
        async with other.maintenance.writable(other) as writable:
            lease = await writable.acquire("one", "an insider", keyring=Keyring(b"another secret"))
            await writable.append(lease, sealed_records(1, lease.seq, lease.hash), "suspended")
        with pytest.raises(JournalError, match="not sealed under this secret"):
            await runs.answer("one", Allow())
        with pytest.raises(JournalError):
            await service.agent("Paid.").resume("one", Allow())
        assert (await runs.verify("one")).code not in (GOOD, OPEN)
        assert service.paid == []

    play(scenario, tmp_path / "runs.db")


def test_runs_are_held_and_purged_through_the_owner(tmp_path: Path) -> None:
    async def scenario(service: Service, other: SqliteStore, runs: Runs) -> None:
        await service.agent("Done.").run("Go.", run_id="old")
        await other.maintenance.set_hold("one", Hold("case 7", "the officer", 5.0))
        assert await service.store.maintenance.holds() == {"one": Hold("case 7", "the officer", 5.0)}
        async with other.maintenance.writable(other) as writable:
            with pytest.raises(RunHeldError, match="case 7"):
                await redact(writable, "one", "1", KEYRING)
        head = await other.head("old")
        assert head is not None
        number = json.loads(head.row)[0]
        tombstone = seal_tombstone(Tombstone(number, "old", head.epoch, head.seq, head.hash, 1), KEYRING)
        assert await other.maintenance.purge([tombstone]) == ["old"]
        assert await service.store.head("old") is None
        assert await service.store.maintenance.tombstones() == [tombstone]

    play(scenario, tmp_path / "runs.db")


def test_an_index_is_rebuilt_through_the_owner(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"

    async def scenario(service: Service, other: SqliteStore, runs: Runs) -> None:
        await service.agent("Done.").run("Go.", run_id="tagged", tags=["billing"])
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE run_tag SET tag = 'wrong'")
        assert await runs.count(RunQuery(tag="billing")) == 0
        assert await other.maintenance.reindex() == ["tagged"]
        assert [await runs.count(RunQuery(tag=tag)) for tag in ("billing", "wrong")] == [1, 0]

    play(scenario, path)


def test_a_lease_ends_with_its_connection(tmp_path: Path) -> None:
    async def scenario(service: Service, other: SqliteStore, runs: Runs) -> None:
        async with other.maintenance.writable(other) as writable:
            lease = await writable.acquire("one", "an operation", keyring=KEYRING)
            with pytest.raises(StaleLease, match="an operation"):
                await service.store.acquire("one", "the service", keyring=KEYRING)
        assert lease.epoch == 2
        while True:  # the service hears of the end of a connection in another thread
            try:
                taken = await service.store.acquire("one", "the service", keyring=KEYRING)
                break
            except StaleLease:
                await asyncio.sleep(0)
        assert taken.epoch == 3

    play(scenario, tmp_path / "runs.db")


def test_without_an_owner_the_sender_writes_the_file_and_gives_it_back(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"

    async def scenario() -> None:
        async with SqliteStore(path) as store:
            service = Service(path)
            await service.asks()
            await service.store.aclose()
            await Runs(store, secret=SECRET).answer("one", Allow())
            service = Service(path)  # the file is free
            (run,) = await service.agent("Paid.").unfinished_runs()
            assert isinstance((await run).outcome, RunCompleted)
            await service.store.aclose()

    asyncio.run(scenario())


def test_a_service_that_starts_waits_for_whoever_owns_the_file_for_a_moment(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    lock = FileLock(lock_file(path))
    lock.acquire(briefly=True)
    released = threading.Timer(0.02, lock.release)
    released.start()
    with SqliteStore(path) as store:
        store.claim()
    released.join()
    lock.acquire()
    with SqliteStore(path) as store, pytest.raises(StoreLockedError, match=f"process {os.getpid()} on"):
        store.claim()
    lock.release()


def test_an_owner_that_does_not_listen_is_waited_for_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentfsm.journal.sqlite.owned_store.ATTEMPTS", 2)

    async def scenario(service: Service, other: SqliteStore, runs: Runs) -> None:
        lock = lock_file(tmp_path / "runs.db")
        lock.write_text(lock.read_text().partition("\n")[0] + "\n")
        with pytest.raises(StoreLockedError, match=f"process {os.getpid()} on"):
            await runs.answer("one", Allow())

    play(scenario, tmp_path / "runs.db")


def test_a_folder_with_a_live_store_can_be_copied_and_its_lock_file_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"

    async def scenario(service: Service, other: SqliteStore, runs: Runs) -> None:
        assert FileLock(lock_file(path)).announced()
        assert stat.S_IMODE(lock_file(path).stat().st_mode) == 0o600
        shutil.copytree(tmp_path, tmp_path / "copy")
        assert all(file.is_file() for file in (tmp_path / "copy").iterdir())

    play(scenario, path)
    assert FileLock(lock_file(path)).announced() == ""


@pytest.mark.parametrize(
    "data",
    [b"", b"\0\0\0\2[]", b"\0\0\0\4nope", b"\xff\xff\xff\xff", b"\0\0\0\x02{}", b'\0\0\0\x15{"command":"shutdown"}'],
)
def test_what_is_no_command_changes_nothing(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "runs.db"

    async def scenario(service: Service, other: SqliteStore, runs: Runs) -> None:
        before = await other.heads()
        reader, writer = await asyncio.open_unix_connection(sock=await connect(FileLock(lock_file(path)).announced()))
        writer.write(data)
        writer.write_eof()
        answer = await reader.read()
        assert not answer or "error" in json.loads(answer[4:])
        writer.close()
        assert await other.heads() == before
        await runs.answer("one", Allow())

    play(scenario, path)


CHILD = """
import asyncio, sys
from agentfsm import SqliteStore
from agentfsm.testing.store_conformance import sealed_records

async def main():
    store = SqliteStore(sys.argv[1])
    lease = await store.acquire("one", "the child", new=True)
    await store.append(lease, sealed_records(1), "suspended")
    print("owns", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_address_of_a_killed_owner_is_in_nobodys_way(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True, env=child_environment()
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "owns\n"

        async def scenario() -> None:
            async with SqliteStore(path) as store:
                async with store.maintenance.writable(store) as writable:
                    lease = await writable.acquire("one", "me")
                    child.send_signal(signal.SIGKILL)
                    child.wait()
                    with pytest.raises(StoreError, match="ended in the meantime"):
                        await writable.append(lease, sealed_records(1, 1, lease.hash), "finished")
                assert FileLock(lock_file(path)).announced()
                async with store.maintenance.writable(store) as writable:
                    assert writable is store
                    again = await writable.acquire("one", "me")
                    await writable.append(again, sealed_records(1, 1, again.hash), "finished")

        asyncio.run(scenario())
