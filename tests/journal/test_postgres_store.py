"""``PostgresStore`` on a real server: conformance, killed workers, lost connections and answers, and clear errors."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from agentfsm import (
    Agent,
    Allow,
    ConfigurationError,
    Host,
    RunHeldError,
    RunQuery,
    Runs,
    StaleLease,
    StoreError,
    StoreFormatError,
    StoreFullError,
    UnknownRunError,
    UserInputRequested,
    tool,
)
from agentfsm.agent.resume import load_run
from agentfsm.journal.listing import verify_listed_run
from agentfsm.journal.maintenance import Hold, Tombstone, seal_tombstone
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.redact import redact_text
from agentfsm.journal.signals import SealedSignal
from agentfsm.journal.store import Lease, consistent_read, seal_row
from agentfsm.journal.verification import GOOD, OPEN, verify
from agentfsm.loop.keys import Keyring
from agentfsm.testing import ScriptedModel, call
from agentfsm.testing.store_conformance import (
    CHECKS,
    finds_runs_by_every_part_of_their_prompt,
    finds_runs_by_what_they_are_listed_by,
    keeps_pages_apart_while_runs_are_created,
    sealed_records,
)
from tests.helpers.child_process import child_environment
from tests.helpers.postgres import CuttingProxy, empty_database, kill_server, new_database, start_server, start_standby
from tests.helpers.postgres_worker import SECRET, worker
from tests.journal.test_snapshots import KEYS, agent_on, comparable, config_of, interrupted

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")

from psycopg_pool import PoolTimeout  # noqa: E402  # beside psycopg

from agentfsm.journal.postgres import (  # noqa: E402  # needs psycopg
    PostgresStore,
    postgres_run_info,
    postgres_schema,
    postgres_session,
    postgres_store,
)
from agentfsm.journal.postgres.postgres_rows import bytes_column, number_column, text_column  # noqa: E402
from agentfsm.journal.postgres.postgres_schema import MIGRATIONS, SCHEMA_VERSION  # noqa: E402

LIVENESS = ("session", "lease")


@pytest.fixture
def url(database: str) -> str:
    """A database that nobody uses, without tables of ours."""
    empty_database(database)
    return database


def execute(url: str, statement: str) -> Any:
    with psycopg.connect(url, autocommit=True) as db:
        done = db.execute(statement)
        return done.fetchall() if done.description else None


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(url, **options)
    try:
        yield store
    finally:
        await store.aclose()


# -- conformance --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("liveness", LIVENESS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_does_what_every_store_does(check: Any, liveness: Any, url: str) -> None:
    asyncio.run(check(lambda: PostgresStore(url, liveness=liveness)))


@pytest.mark.parametrize("window", [2, *(pytest.param(window, marks=pytest.mark.soak) for window in (1, 3))])
def test_runs_are_found_by_tags_metadata_and_texts_among_the_newest_and_then_by_their_index(
    window: int, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_run_info, "WINDOW", window)
    for check in (
        finds_runs_by_what_they_are_listed_by,
        finds_runs_by_every_part_of_their_prompt,
        keeps_pages_apart_while_runs_are_created,
    ):
        empty_database(url)
        asyncio.run(check(lambda: PostgresStore(url)))


@pytest.mark.parametrize(
    ("kind", "column", "values"),
    [
        ("bigint", number_column, [0, 1, -1, 2**63 - 1, -(2**63)]),
        ("bytea", bytes_column, [b"", b"\0\xff", None, b"x" * 100_000]),
        ("text", text_column, ["", "NULL", None, '{"a", \\ä😀}', "x" * 100_000]),
        ("text", text_column, []),
        ("bytea", bytes_column, [None]),
    ],
)
def test_a_column_of_values_arrives_as_it_was_given(kind: str, column: Any, values: list[Any], url: str) -> None:
    with psycopg.connect(url, autocommit=True) as db:
        found = db.execute(f"SELECT value FROM unnest(%s::{kind}[]) AS given (value)", (column(values),), binary=True)
        assert [row[0] for row in found] == values


def test_a_run_is_loaded_from_its_snapshot_and_a_redaction_deletes_that(url: str) -> None:
    async def scene() -> None:
        async with opened(url) as store:
            for run_id in ("r", "other"):
                await interrupted(store, 40, run_id=run_id)
            config = config_of(agent_on(store, ()))
            lazy, whole = await load_run(config, "r", lazily=True), await load_run(config, "r")
            assert lazy.run.unread > 60
            assert comparable(lazy) == comparable(whole)
            assert (await verify_listed_run(store, "r", keyring=KEYS)).code == OPEN
            result = await agent_on(store, ["Done."]).resume("r", Allow())
            assert [message.content for message in result.messages if message.role == "tool"][:40] == [
                f"seen place {n}" for n in range(40)
            ]
            assert await store.snapshot("r") is None
            assert (await redact_text(store, "seen place 7", KEYS)).deleted
            assert await store.snapshot("other") is None

    asyncio.run(scene())


# -- other processes ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("liveness", LIVENESS)
def test_a_run_whose_process_is_killed_goes_on_in_another_one(liveness: Any, url: str, tmp_path: Path) -> None:
    file = tmp_path / "shipped"
    command = [sys.executable, "-m", "tests.helpers.postgres_worker", url, liveness, "one", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment()) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "inside\n"

        async def takes_over() -> tuple[str, int]:
            async with opened(url, liveness=liveness, lease_s=1.0) as store:
                head = await store.head("one")
                assert head is not None
                assert head.owner  # the process lives
                with pytest.raises(StaleLease):
                    await store.acquire("one", "me")
                child.send_signal(signal.SIGKILL)
                child.wait()
                agent = worker(store, file, "Order 7 is on its way.")
                while not (runs := await agent.unfinished_runs()):
                    await asyncio.sleep(0.05)
                result = await runs[0]
                records, head = await consistent_read(store, "one")
                report = verify("one", records, head, keyring=Keyring(SECRET))
                return str(result.output), report.code

        assert asyncio.run(takes_over()) == ("Order 7 is on its way.", GOOD)
    assert file.read_text() == "7\n7\n"  # it is idempotent, and was cut off


def test_an_abandoned_lease_blocks_no_other_process(url: str) -> None:
    async def scenario() -> int:
        async with opened(url) as first, opened(url) as second:
            lease = await first.acquire("a", "the first", new=True)
            await first.append(lease, sealed_records(1), "running")
            with pytest.raises(StaleLease, match="the first"):
                await second.acquire("a", "the second")
            assert await second.heads("cut off") == []
            del lease
            while True:
                try:
                    lease = await second.acquire("a", "the second")
                    assert await first.heads("cut off") == await second.heads("cut off") == []
                    return lease.epoch
                except StaleLease:
                    await asyncio.sleep(0.01)

    assert asyncio.run(scenario()) == 2


@pytest.mark.parametrize("new", [True, False])
def test_a_run_whose_acquisition_was_cancelled_when_it_had_been_written_has_no_owner(
    new: bool, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_owner = postgres_store._change_owner

    async def scenario() -> None:
        async with opened(url) as store, opened(url) as other:
            if not new:
                await store.append(await store.acquire("a", "before", new=True), sealed_records(1), "suspended")

            async def changed_and_cancelled(*args: Any) -> bool:
                done = await change_owner(*args)
                acquiring.cancel()
                await asyncio.sleep(0)  # where the cancellation arrives
                return done

            monkeypatch.setattr(postgres_store, "_change_owner", changed_and_cancelled)
            acquiring = asyncio.ensure_future(store.acquire("a", "me", new=new))
            with pytest.raises(asyncio.CancelledError):
                await acquiring
            monkeypatch.setattr(postgres_store, "_change_owner", change_owner)
            await store.release(await store.acquire("b", "me", new=True))  # written after all that was queued before
            head = await other.head("a")
            assert head is not None
            assert (head.owner, head.epoch) == (None, 1 if new else 2)
            assert (await other.acquire("a", "another", new=new)).epoch == head.epoch + 1

    asyncio.run(scenario())


@pytest.mark.parametrize("connection", ["kept", "lost"])
def test_an_owner_whose_lease_ran_out_cannot_write(connection: str, url: str) -> None:
    """As a process that was frozen: its lease is not renewed, another one takes the run, and then it wakes up."""
    proxy = CuttingProxy(url)

    async def scenario() -> None:
        frozen = PostgresStore(proxy.url, liveness="lease", lease_s=0.2)
        async with opened(url, liveness="lease") as other:
            lease = await frozen.acquire("a", "the frozen one", new=True)
            records = sealed_records(2)
            await frozen.append(lease, records[:1], "running")
            renewal = frozen._queue().session._renewal
            assert renewal is not None
            renewal.cancel()
            while True:
                try:
                    taken = await other.acquire("a", "the other one")
                    break
                except StaleLease:
                    await asyncio.sleep(0.05)
            if connection == "lost":
                proxy.cut_next("before")
            with pytest.raises(StaleLease, match="the other one"):
                await frozen.append(lease, records[1:], "finished")
            await other.append(taken, records[1:], "finished")
            assert await other.records("a") == records
            await frozen.aclose()

    asyncio.run(scenario())
    proxy.close()


@pytest.mark.parametrize(("meanwhile", "epoch", "seq"), [("taken", 3, 1), ("appended", 2, 2), ("suspended", 2, 1)])
def test_a_run_that_another_process_changes_while_it_is_acquired_is_read_again(
    meanwhile: str, epoch: int, seq: int, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_owner, records, keyring = postgres_store._change_owner, sealed_records(2), Keyring(SECRET)

    async def scenario() -> None:
        async with opened(url, liveness="lease") as first, opened(url) as store:
            lease = await first.acquire("a", "the first", new=True, keyring=keyring)
            await first.append(lease, records[:1], "running")
            execute(url, "UPDATE agentfsm.owner SET alive_until = '-infinity'")
            if meanwhile == "taken":
                await first.release(lease)

            async def change_late(*args: Any) -> bool:
                monkeypatch.setattr(postgres_store, "_change_owner", change_owner)
                if meanwhile == "taken":
                    await first.release(await first.acquire("a", "the first", keyring=keyring))
                elif meanwhile == "appended":
                    await first.append(lease, records[1:], "running")
                else:
                    await first.append(lease, (), "suspended")
                return await change_owner(*args)

            monkeypatch.setattr(postgres_store, "_change_owner", change_late)
            taken = await store.acquire("a", "the second", keyring=keyring)
            assert (taken.epoch, taken.seq) == (epoch, seq)
            head = await store.head("a")
            assert head is not None
            assert head.mac == seal_row(keyring, head.row)

    asyncio.run(scenario())


def test_an_approval_is_answered_by_another_process(url: str) -> None:
    paid: list[int] = []

    @tool(requires_approval=True)
    def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        return "paid"

    async def ask() -> None:
        async with opened(url) as store:
            agent = Agent(ScriptedModel([call("pay", amount=5)]), tools=[pay], host=Host(store=store, secret=SECRET))
            result = await agent.run("Pay.", run_id="one")
            assert isinstance(result.outcome, UserInputRequested)

    async def answer() -> Any:
        async with opened(url) as store:
            agent = Agent(ScriptedModel(["Paid."]), tools=[pay], host=Host(store=store, secret=SECRET))
            return (await agent.resume("one", Allow())).output

    asyncio.run(ask())
    assert asyncio.run(answer()) == "Paid."
    assert paid == [5]


def test_one_store_serves_one_event_loop_after_another(url: str) -> None:
    store = PostgresStore(url)
    agent = Agent(ScriptedModel(["one", "two"]), host=Host(store=store, secret=SECRET))
    assert [agent.run_sync("go").output for _ in range(2)] == ["one", "two"]
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    while execute(url, sessions) != [(1,)]:  # the one that asks: both loops have closed theirs, which takes a moment
        pass


@pytest.mark.parametrize("liveness", LIVENESS)
def test_a_store_is_closed_in_bounded_time_while_its_server_does_not_answer(
    liveness: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_session, "FAREWELL_S", 0.1)
    proxy, records = CuttingProxy(url), sealed_records(2)

    async def scenario(*, writes: bool) -> None:
        store = PostgresStore(proxy.url, liveness=liveness, wait_s=0.1)
        lease = await store.acquire(f"writes={writes}", "me", new=True)
        await store.append(lease, records[:1], "running")
        proxy.is_frozen = True
        append = asyncio.ensure_future(store.append(lease, records[1:], "running")) if writes else None
        await store.aclose()
        if append is not None:
            with pytest.raises(StoreError, match="had not answered when the store was closed"):
                await append
        proxy.is_frozen = False

    for writes in (False, True):
        asyncio.run(scenario(writes=writes))
    proxy.close()


def test_reads_that_begin_at_once_share_a_pool_of_connections(url: str) -> None:
    async def scenario() -> int:
        async with opened(url) as store:
            await asyncio.gather(*(store.heads() for _ in range(20)))
            return sum(task.get_name().endswith("-scheduler") for task in asyncio.all_tasks())

    assert asyncio.run(scenario()) == 1  # of psycopg_pool: one for each pool


def test_a_long_journal_is_decoded_in_a_thread_and_others_go_on_while_its_rows_are_fetched(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded_in: list[int] = []
    others: list[int] = []
    decode_rows = postgres_store.decode_rows

    def decode(*args: Any) -> Any:
        decoded_in.append(threading.get_ident())
        return decode_rows(*args)

    async def scenario() -> None:
        async with opened(url) as store:
            lease, records = await store.acquire("a", "me", new=True), sealed_records(40)
            for record in records:
                await store.append(lease, [record], "running")
            monkeypatch.setattr(postgres_store, "decode_rows", decode)
            assert await store.records("a") == records
            monkeypatch.setattr(postgres_store, "SHORT_ROWS_BYTES", 100)
            monkeypatch.setattr(postgres_store, "FETCHED_ROWS", 1)
            turns = asyncio.ensure_future(count_turns())
            assert await store.records("a") == records
            turns.cancel()
            assert await store.records("a", after=38, limit=1) == records[38:39]

    async def count_turns() -> None:
        while True:
            others.append(1)
            await asyncio.sleep(0)

    asyncio.run(scenario())
    short, long, end = decoded_in
    assert short == end == threading.get_ident() != long
    assert len(others) >= 40


def test_a_write_that_fails_in_our_own_code_is_an_error_and_the_next_one_is_made(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(records: Any) -> Any:
        raise ValueError("a fault")

    async def scenario() -> None:
        async with opened(url) as store, asyncio.timeout(30):
            lease, records = await store.acquire("a", "me", new=True), sealed_records(1)
            with monkeypatch.context() as meanwhile:
                meanwhile.setattr(postgres_store, "encode_commit", fail)
                with pytest.raises(ValueError, match="a fault"):
                    await store.append(lease, records, "running")
            await store.append(lease, records, "finished")
            assert await store.records("a") == records

    asyncio.run(scenario())


# -- holds --------------------------------------------------------------------------------------------


async def waits_for_a_lock(url: str) -> None:
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    while not await asyncio.to_thread(execute, url, waiting):
        pass


async def finished_run(store: PostgresStore, records: list[SealedRecord]) -> Tombstone:
    """Write the first run of the store, and return what is to remain of it."""
    await store.append(await store.acquire("a", "me", new=True), records, "finished")
    head = await store.head("a")
    assert head is not None
    return seal_tombstone(Tombstone(1, "a", head.epoch, head.seq, head.hash, 0), Keyring(SECRET))


@pytest.mark.parametrize("way", ["purge", "redact"])
def test_a_hold_that_is_being_committed_is_waited_for_and_holds(way: str, url: str) -> None:
    async def scenario() -> None:
        async with opened(url) as store:
            records = sealed_records(1, hidden='[["00","x"]]')
            tombstone = await finished_run(store, records)
            lease = await store.acquire("a", "me") if way == "redact" else None
            with psycopg.connect(url) as db:
                db.execute("INSERT INTO agentfsm.hold (id, reason, held_by, since) VALUES (1, 'case 7', 'Ann', 0)")
                work: Any = store.maintenance.purge([tombstone]) if lease is None else store.redact(lease, 1, "")
                working = asyncio.ensure_future(work)
                await waits_for_a_lock(url)
            if lease is None:
                assert await working == []
            else:
                with pytest.raises(RunHeldError, match="case 7"):
                    await working
            assert await store.records("a") == records
            assert list(await store.maintenance.holds()) == ["a"]

    asyncio.run(scenario())


# -- lost connections ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_commit_whose_answer_is_lost_is_neither_lost_nor_repeated(url: str) -> None:
    proxy = CuttingProxy(url)
    draw = random.Random(7)
    records = sealed_records(60)

    async def scenario() -> None:
        async with opened(proxy.url) as store:
            lease = await store.acquire("a", "me", new=True)
            for number, record in enumerate(records):
                if number % 2:
                    proxy.cut_next(draw.choice(["before", "after"]), record.hash[:4].encode())
                    proxy.cut_next(draw.choice(["before", "after"]))
                await store.append(lease, [record], "running")
            assert await store.records("a") == records

    asyncio.run(scenario())
    proxy.close()
    assert proxy.cuts == 30
    assert execute(url, "SELECT count(*), max(seq) FROM agentfsm.journal") == [(60, 60)]


def test_a_purge_whose_answer_is_lost_says_what_it_has_purged(url: str) -> None:
    proxy = CuttingProxy(url)

    async def scenario() -> None:
        async with opened(proxy.url) as store:
            tombstone = await finished_run(store, sealed_records(1))
            proxy.cut_next("after", b"COMMIT")
            assert await store.maintenance.purge([tombstone]) == ["a"]
            assert await store.maintenance.tombstones() == [tombstone]

    asyncio.run(scenario())
    proxy.close()
    assert proxy.cuts == 1


def test_a_connection_that_only_the_server_still_keeps_is_ended_and_its_runs_go_on(url: str) -> None:
    async def scenario() -> None:
        async with opened(url) as store:
            lease, records = await store.acquire("a", "me", new=True), sealed_records(1)
            session = store._queue().session
            kept, session._db = session._db, None
            await store.append(lease, records, "finished")
            assert await store.records("a") == records
            assert kept is not None
            with pytest.raises(psycopg.OperationalError):
                await kept.execute("SELECT 1")

    asyncio.run(scenario())


def test_after_an_answer_to_something_else_it_is_asked_again_on_another_connection(url: str) -> None:
    """As from a pooler that lost its server: psycopg then raises an error of its own, which has no code."""
    asked: list[Any] = []

    async def work(db: Any, again: bool) -> bool:
        asked.append(db)
        if not again:
            raise psycopg.InternalError("an answer to something else")
        return db.closed

    async def scenario() -> None:
        async with opened(url) as store:
            assert await store._queue().session.write(work) is False
            assert asked[0].closed

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(6, marks=pytest.mark.soak)])
def test_runs_go_on_when_the_server_was_killed_and_is_back(kills: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        own = start_server(Path(folder) / "data")
        url = new_database(own.get_uri())
        records = sealed_records(10 * kills)

        async def scenario() -> None:
            async with opened(url) as store:
                lease = await store.acquire("a", "me", new=True)
                for number in range(len(records)):
                    if number % 10 == 5:
                        kill_server(own)
                        restart = asyncio.create_task(asyncio.to_thread(own.ensure_postgres_running))
                        await store.append(lease, records[number : number + 1], "running")
                        await restart
                    else:
                        await store.append(lease, records[number : number + 1], "running")
                assert await store.records("a") == records

        asyncio.run(scenario())
        own.cleanup()


@pytest.mark.slow
@pytest.mark.parametrize("liveness", LIVENESS)
def test_a_process_in_a_long_call_keeps_its_run_when_the_server_was_killed_and_is_back(liveness: Any) -> None:
    listening = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"

    async def scenario(url: str, kill: Any) -> None:
        options = {"liveness": liveness, "lease_s": 0.6, "listen_url": url}
        async with opened(url, **options) as store, opened(url, **options) as other:
            records = sealed_records(2)
            lease = await store.acquire("a", "me", new=True)
            await store.append(lease, records[:1], "running")
            assert await other.heads("cut off") == []
            while (await asyncio.to_thread(execute, url, listening))[0][0] == 0:
                pass
            restarted = kill()
            assert await other.heads("cut off") == []  # it waits until the server is back, and its owner, too
            await restarted
            await store.append(lease, records[1:], "running")
            assert await other.records("a") == records

    with tempfile.TemporaryDirectory() as folder:
        own = start_server(Path(folder) / "data")

        def kill() -> asyncio.Task[Any]:
            kill_server(own)
            return asyncio.create_task(asyncio.to_thread(own.ensure_postgres_running))

        asyncio.run(scenario(new_database(own.get_uri()), kill))
        own.cleanup()


@pytest.mark.slow
def test_a_url_with_a_standby_finds_it_when_it_has_taken_over() -> None:
    with tempfile.TemporaryDirectory() as folder:
        primary = start_server(Path(folder) / "data")
        database = new_database(primary.get_uri())
        standby = start_standby(primary, Path(folder) / "standby")
        hosts = [parse_qs(urlsplit(each.get_uri()).query)["host"][0] for each in (primary, standby)]
        both = database.replace(f"host={hosts[0]}", f"host={hosts[1]},{hosts[0]}")
        records = sealed_records(2)

        async def scenario() -> None:
            async with opened(both) as store:
                with pytest.raises(StoreError, match="target_session_attrs=read-write finds among several hosts"):
                    await store.acquire("a", "me", new=True)
            async with opened(f"{both}&target_session_attrs=read-write") as store:
                lease = await store.acquire("a", "me", new=True)
                await store.append(lease, records[:1], "running")
                primary.cleanup()  # kills it
                promoted = asyncio.create_task(asyncio.to_thread(standby.psql, "SELECT pg_promote()"))
                await store.append(lease, records[1:], "running")
                await promoted
                assert await store.records("a") == records

        asyncio.run(scenario())
        standby.cleanup()


def test_a_server_that_stays_away_is_an_error_that_says_so(url: str) -> None:
    proxy = CuttingProxy(url)

    async def scenario() -> None:
        async with opened(proxy.url, wait_s=0.3) as store:
            lease = await store.acquire("a", "me", new=True)
            proxy.close()
            proxy.cut_next("before")
            with pytest.raises(StoreError, match=r"has not been reached for 0\.3 s") as raised:
                await store.append(lease, sealed_records(1), "running")
            assert "database" in str(raised.value)

    asyncio.run(scenario())


# -- a server that is away, or has no space -----------------------------------------------------------


def hurry(times: float, patches: pytest.MonkeyPatch) -> None:
    """Let the time of the running event loop pass so many times as fast, and that of the pool of connections."""
    loop: Any = asyncio.get_running_loop()
    selector, time, select, begun = loop._selector, loop.time, loop._selector.select, loop.time()
    loop.time = lambda: begun + times * (time() - begun)
    selector.select = lambda timeout=None: select(timeout and timeout / times)
    for module in ("pool_async", "sched_async"):
        patches.setattr(f"psycopg_pool.{module}.monotonic", loop.time)


@pytest.mark.parametrize("liveness", LIVENESS)
def test_the_server_keeps_plans_for_reading_one_run_and_not_for_searches_or_behind_a_pooler(
    liveness: Any, url: str
) -> None:
    async def kept(db: Any) -> list[str]:
        return [row[0] for row in await (await db.execute("SELECT statement FROM pg_prepared_statements")).fetchall()]

    async def scenario() -> None:
        async with opened(url, liveness=liveness) as store:
            await store.append(await store.acquire("a", "me", new=True), sealed_records(2), "finished")
            for _ in range(10):
                await store.records("a", after=1)
                await store.find_runs(RunQuery(tag="order", text="order"))
                await store.heads("suspended")
            statements = await store._queue().session.read(kept, list[str]())
            assert any("FROM agentfsm.journal" in each for each in statements) is (liveness == "session")
            assert not any("run_info" in each or "status = $" in each for each in statements)

    asyncio.run(scenario())


@pytest.mark.parametrize("returns", [True, False])
def test_a_server_that_is_away_for_a_minute_is_waited_for_and_nothing_is_lost(
    returns: bool, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = CuttingProxy(url)
    records = sealed_records(3)

    async def scenario() -> None:
        async with opened(proxy.url) as store:
            lease = await store.acquire("a", "me", new=True)
            await store.append(lease, records[:1], "running")
            assert await store.records("a") == records[:1]
            hurry(20, monkeypatch)
            proxy.is_away = True
            append = asyncio.ensure_future(store.append(lease, records[1:2], "running"))
            read = asyncio.ensure_future(store.records("a"))
            if returns:
                await asyncio.sleep(40)
                proxy.is_away = False
                await append
                assert (await read)[:1] == records[:1]
                gone, back = (each for each in caplog.records if each.name == "agentfsm")
                assert "cannot be reached, and is waited for: " in gone.message
                assert "is reached again" in back.message
            else:
                for each in (append, read):
                    with pytest.raises(StoreError, match=r"not been reached for 60 s.*what was acknowledged is stored"):
                        await each
                proxy.is_away = False
        async with opened(url) as store:  # another process goes on
            kept = await store.records("a")
            assert kept == records[: 2 if returns else 1]
            lease = await store.acquire("a", "you")
            await store.append(lease, records[len(kept) :], "finished")
            assert await store.records("a") == records

    asyncio.run(scenario())
    proxy.close()


def test_a_read_asks_a_server_that_is_away_again_and_again_and_not_ever_more_rarely(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_session, "LONGEST_DELAY_S", 0.05)
    proxy = CuttingProxy(url)
    attempts = 0

    def decide(data: bytes) -> str:
        nonlocal attempts
        attempts += 1
        return "before" if attempts <= 30 else "forward"

    async def scenario() -> None:
        async with opened(proxy.url, wait_s=20) as store:  # its pool alone would ask less often
            await store.append(await store.acquire("a", "me", new=True), sealed_records(1), "finished")
            assert len(await store.heads()) == 1
            proxy._cut = decide
            assert len(await store.heads()) == 1

    asyncio.run(scenario())
    proxy.close()
    assert attempts > 30


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="small file systems are mounted on Linux only")
def test_a_server_without_space_is_a_clear_error_and_what_was_acknowledged_stays(counted: Any) -> None:
    disk = Path(tempfile.mkdtemp(dir="/dev/shm"))
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", disk]).returncode:
        pytest.skip("mounting a small file system is not allowed here")

    async def fill(url: str) -> int:
        stored = 0
        with psycopg.connect(url, autocommit=True) as other:  # once the disk is full, nobody may be able to connect
            other.execute("CREATE TABLE ballast AS SELECT repeat(md5(n::text), 10) FROM generate_series(1, 5000) AS n")
            async with opened(url) as store:
                lease = await store.acquire("a", "me", new=True)
                records = sealed_records(2000, hidden=f'[["00","{os.urandom(5000).hex()}"]]')
                assert await store.records("a") == []
                try:
                    while True:
                        await store.append(lease, records[stored : stored + 1], "running")
                        stored += 1
                except StoreFullError as error:
                    said = str(error)
                assert "database 'small' has no space left" in said
                assert await store.records("a") == records[:stored]
                other.execute("DROP TABLE ballast")
                await store.append(lease, records[stored : stored + 1], "finished")
                assert await store.records("a") == records[: stored + 1]
        return stored

    try:
        with tempfile.TemporaryDirectory() as folder:
            own = start_server(Path(folder) / "data")
            owner = (Path(folder) / "data").stat()
            os.chown(disk, owner.st_uid, owner.st_gid)
            execute(own.get_uri(), f"CREATE TABLESPACE small LOCATION '{disk}'")
            execute(own.get_uri(), "CREATE DATABASE small TABLESPACE small")
            stored = asyncio.run(fill(own.get_uri().replace("/postgres?", "/small?")))
            own.cleanup()
        counted(f"on PostgreSQL: no space after {stored} records, all of which are there")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
        disk.rmdir()


# -- rows that others left or changed ------------------------------------------------------------------


def test_what_says_that_a_dead_process_lives_is_deleted_by_the_next_one(url: str) -> None:
    async def scenario() -> None:
        async with opened(url, liveness="lease") as store:
            await store.maintenance.prepare()
        for key, until in ((1, "yesterday"), (2, "tomorrow")):
            execute(url, f"INSERT INTO agentfsm.owner (key, renewed_at, alive_until) VALUES ({key}, now(), '{until}')")
        async with opened(url, liveness="lease") as store:
            await store.maintenance.prepare()
            assert execute(url, "SELECT key FROM agentfsm.owner ORDER BY key") == [(2,), (store._queue().session.key,)]

    asyncio.run(scenario())


def test_a_purge_deletes_a_snapshot_that_a_finished_run_should_not_have(url: str) -> None:
    async def scenario() -> None:
        async with opened(url) as store:
            tombstone = await finished_run(store, sealed_records(1))
            execute(url, "INSERT INTO agentfsm.snapshot (id, content, mac) VALUES (1, '{}', '\\x00')")
            assert await store.maintenance.purge([tombstone]) == ["a"]
            assert execute(url, "SELECT count(*) FROM agentfsm.snapshot") == [(0,)]

    asyncio.run(scenario())


@pytest.mark.parametrize("change", ["status = 'finished'", "mac = NULL"])
def test_a_row_that_somebody_without_the_secret_changed_is_neither_acquired_nor_sealed(change: str, url: str) -> None:
    keyring, row = Keyring(SECRET), "SELECT epoch, owner, seq, status, mac FROM agentfsm.run"
    records = [record._replace(mac="ab" * 20) for record in sealed_records(1)]

    async def scenario() -> None:
        async with opened(url) as store:
            lease = await store.acquire("a", "me", new=True, keyring=keyring)
            await store.append(lease, records, "running")
            execute(url, f"UPDATE agentfsm.run SET {change}")
            changed = execute(url, row)
            await store.release(lease)
            with pytest.raises(StoreError, match="somebody without the secret changed its row"):
                await store.acquire("a", "me", keyring=keyring)
            assert execute(url, row) == changed

    asyncio.run(scenario())


# -- what it refuses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE agentfsm.journal SET body = '{}'",
        "UPDATE agentfsm.journal SET records = '\\x00'",
        "UPDATE agentfsm.journal SET hash = '\\x00'",
        "UPDATE agentfsm.journal SET seq = 7",
        "DELETE FROM agentfsm.journal",
        "TRUNCATE agentfsm.journal",
    ],
)
def test_records_cannot_be_changed_or_deleted(url: str, statement: str) -> None:
    async def fill() -> None:
        async with opened(url) as store:
            await store.append(await store.acquire("a", "me", new=True), sealed_records(1), "finished")

    asyncio.run(fill())
    with pytest.raises(psycopg.errors.RaiseException, match="append-only"):
        execute(url, statement)


def read(url: str) -> Any:
    async def heads() -> Any:
        async with opened(url) as store:
            return await store.heads()

    return asyncio.run(heads())


def write(url: str) -> None:
    async def acquire() -> None:
        async with opened(url) as store:
            await store.acquire("a", "me", new=True)

    asyncio.run(acquire())


def test_a_database_without_tables_has_no_runs_and_reading_creates_none(url: str) -> None:
    assert read(url) == []
    assert execute(url, "SELECT to_regclass('agentfsm.run')") == [(None,)]


def test_the_schema_of_a_newer_release_is_refused(url: str) -> None:
    write(url)
    execute(url, f"UPDATE agentfsm.version SET number = {SCHEMA_VERSION + 1}")
    for use in (read, write):
        with pytest.raises(StoreFormatError, match=f"version {SCHEMA_VERSION + 1}.*version {SCHEMA_VERSION}"):
            use(url)


def test_whoever_holds_the_lock_of_the_schema_keeps_nobody_from_a_current_one_and_is_reported_else(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_schema, "LOCKED_FOR_S", 1)
    with psycopg.connect(url, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(%s)", (0x6166736D,))  # any role that may connect can do so
        with pytest.raises(StoreError, match=r"for 1 seconds, another session has had a lock.*try again"):
            write(url)
        other.execute("SELECT pg_advisory_unlock_all()")
        write(url)
        other.execute("SELECT pg_advisory_lock(%s)", (0x6166736D,))
        assert [head.run_id for head in read(url)] == ["a"]

        async def write_another() -> None:
            async with opened(url) as store:
                await store.acquire("b", "me", new=True)

        asyncio.run(write_another())


HELD = Hold("case 4711", by="Eve")
BURIED = Tombstone(1, "a", 1, 1, "00" * 32, 0)
SENT = SealedSignal("s1", "a", "{}", "00" * 32)

USES: dict[str, Callable[[PostgresStore, Lease, SealedRecord], Awaitable[Any]]] = {
    "append": lambda store, lease, record: store.append(lease, [record], "running"),
    "append nothing": lambda store, lease, record: store.append(lease, [], "suspended"),
    "redact": lambda store, lease, record: store.redact(lease, 1, "[null]"),
    "acquire": lambda store, lease, record: store.acquire("b", "me"),
    "acquire a new one": lambda store, lease, record: store.acquire("c", "me", new=True),
    "hold": lambda store, lease, record: store.maintenance.set_hold("a", HELD),
    "purge": lambda store, lease, record: store.maintenance.purge([BURIED]),
    "send": lambda store, lease, record: store.signals.send(SENT),
    "remove": lambda store, lease, record: store.signals.remove("s0"),
    "rebuild": lambda store, lease, record: store.maintenance.reindex(),
    "compact": lambda store, lease, record: store.maintenance.compact(),
    "read": lambda store, lease, record: store.heads(),
}


@pytest.mark.parametrize("use", USES)
def test_a_process_does_not_use_a_store_that_a_later_release_has_migrated_while_it_was_open(
    use: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_session, "CHECK_EVERY_S", 0.0)
    records = sealed_records(2, hidden='[["00","secret"]]')

    def rows() -> list[Any]:
        tables = ("run", "journal", "hold", "signal", "tombstone")
        return [execute(url, f"SELECT * FROM agentfsm.{table} ORDER BY 1") for table in tables]

    async def scenario() -> None:
        async with opened(url) as store:
            lease = await store.acquire("a", "me", new=True)
            await store.append(lease, records[:1], "running")
            await store.append(await store.acquire("b", "me", new=True), records[:1], "suspended")
            await store.signals.send(SealedSignal("s0", "b", "{}", "00" * 32))
            await store.heads()
            execute(url, f"UPDATE agentfsm.version SET number = {SCHEMA_VERSION + 1}")
            before = rows()
            with pytest.raises(StoreFormatError, match=f"version {SCHEMA_VERSION + 1}.*version {SCHEMA_VERSION}"):
                await USES[use](store, lease, records[1])
            assert rows() == before

    asyncio.run(scenario())


LATER_RELEASE = f"""
import asyncio, sys
from agentfsm.journal.postgres import PostgresStore, postgres_schema
postgres_schema.SCHEMA_VERSION = {SCHEMA_VERSION + 1}
postgres_schema.MIGRATIONS += ('''
    DO $$ BEGIN
        WHILE NOT EXISTS (SELECT FROM pg_locks WHERE NOT granted) LOOP PERFORM pg_sleep(0.01); END LOOP;
    END $$
''',)
asyncio.run(PostgresStore(sys.argv[1]).maintenance.prepare(migrate=True))
"""
"""Migrates a store, and is not done before somebody waits for it."""


def test_what_is_written_during_a_migration_waits_for_it_and_is_refused(url: str) -> None:
    records = sealed_records(2)
    is_locked = "SELECT 1 FROM pg_locks WHERE relation = 'agentfsm.version'::regclass AND mode = 'AccessExclusiveLock'"

    async def scenario() -> None:
        async with opened(url) as store:
            lease = await store.acquire("a", "me", new=True)
            await store.append(lease, records[:1], "running")
            later = await asyncio.create_subprocess_exec(
                sys.executable, "-c", LATER_RELEASE, url, env=child_environment()
            )
            while later.returncode is None and not execute(url, is_locked):
                await asyncio.sleep(0)
            with pytest.raises(StoreFormatError, match=f"version {SCHEMA_VERSION + 1}"):
                await store.append(lease, records[1:], "running")
            assert await later.wait() == 0
            assert execute(url, "SELECT seq FROM agentfsm.run") == [(1,)]

    asyncio.run(scenario())


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION))
def test_an_earlier_schema_is_migrated_when_that_is_asked_for_and_its_runs_are_listed(version: int, url: str) -> None:
    execute(url, "CREATE SCHEMA agentfsm; CREATE TABLE agentfsm.version (number integer NOT NULL)")
    execute(url, f"INSERT INTO agentfsm.version VALUES ({version}); {' '.join(MIGRATIONS[:version])}")
    execute(url, "INSERT INTO agentfsm.run (run_id, seq, hash, status) VALUES ('a', 1, '\\x00', 'finished')")
    execute(url, "INSERT INTO agentfsm.journal (run, seq, body, hash) VALUES (1, 1, '{}', '\\x00')")
    for use in (read, write):
        with pytest.raises(StoreFormatError, match=f"version {version}.*agentfsm store migrate"):
            use(url)

    async def migrate_and_list() -> list[str]:
        async with opened(url) as store:
            await store.maintenance.prepare(migrate=True)
            await store.acquire("another", "me", new=True)
            return [info.run_id for info in (await store.find_runs(RunQuery())).runs]

    assert asyncio.run(migrate_and_list()) == ["another", "a"]
    for statement in ("DELETE FROM agentfsm.journal", "TRUNCATE agentfsm.journal"):
        with pytest.raises(psycopg.errors.RaiseException, match="append-only"):
            execute(url, statement)
    assert execute(url, "SELECT number FROM agentfsm.version") == [(SCHEMA_VERSION,)]


def test_a_role_without_rights_is_told_which_it_needs(url: str) -> None:
    execute(url, "DROP ROLE IF EXISTS reader")
    execute(url, "CREATE ROLE reader LOGIN")
    with pytest.raises(StoreError, match="needs CREATE on the database"):
        write(url.replace("postgres:@", "reader@"))


def test_what_the_server_can_never_store_is_an_error_at_once(url: str) -> None:
    async def scenario() -> None:
        async with opened(url) as store:
            with pytest.raises(StoreError, match=r"exceeds btree .* maximum") as raised:
                await store.acquire(random.Random(7).randbytes(2000).hex(), "me", new=True)
            assert "has not been reached" not in str(raised.value)

    asyncio.run(scenario())


def test_a_run_whose_texts_the_server_cannot_store_as_they_are_verifies_and_is_found(url: str) -> None:
    async def scenario() -> None:
        async with opened(url) as store:
            agent, metadata = Agent(ScriptedModel(["ok"]), host=Host(store=store, secret=SECRET)), {"k\0": "v\0"}
            await agent.run("a\0b", run_id="r", actor="ann\0", tags=["t\0"], metadata=metadata)
            runs = Runs(store, secret=SECRET)
            assert (await runs.verify("r")).reason == ""
            assert await runs.count(RunQuery(text="a\0b", actor="ann\0", tag="t\0", metadata=metadata)) == 1
            with pytest.raises(UnknownRunError):
                await runs.get("r\0")

    asyncio.run(scenario())


@pytest.mark.parametrize("use", [read, write])
def test_a_server_that_is_not_there_is_an_error_at_once_without_the_password(use: Any) -> None:
    with pytest.raises(StoreError, match="127") as raised:
        use("postgresql://ann:hunter2@127.0.0.1:1/shop")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("given", ["", "not a url at all", "mysql://host/db"])
def test_what_is_no_url_is_refused(given: str) -> None:
    if given:
        with pytest.raises(ConfigurationError, match="postgresql://user:password@host/database"):
            PostgresStore(given)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"lease_s": 0}, {"wait_s": -1}, {"liveness": "clock"}])
def test_settings_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        PostgresStore("postgresql://host/db", **options)


# -- settings of the server that others rely on -------------------------------------------------------


@pytest.mark.parametrize("encoding", ["LATIN1", "EUC_JP", "SQL_ASCII"])
def test_text_is_stored_and_read_as_it_is_whatever_encoding_the_environment_or_the_server_asks_for(
    encoding: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with opened(f"{url}&options=-c%20client_encoding%3D{encoding}") as store:
            host = Host(store=store, secret=SECRET)
            await Agent(ScriptedModel(["Grüße ☃"]), host=host).run("Zoë ☃", run_id="r", actor="Zoë")
        monkeypatch.delenv("PGCLIENTENCODING")
        async with opened(url) as store:
            info = (await store.find_runs(RunQuery(actor="Zoë"))).runs[0]
            assert info.prompt == "Zoë ☃"
            assert (await Runs(store, secret=SECRET).verify("r")).code == GOOD

    monkeypatch.setenv("PGCLIENTENCODING", encoding)
    asyncio.run(scenario())


def test_a_process_in_a_long_call_keeps_its_run_on_a_server_that_ends_idle_sessions(url: str) -> None:
    async def scenario() -> None:
        async with opened(f"{url}&options=-c%20idle_session_timeout%3D50") as store, opened(url) as other:
            lease = await store.acquire("r", "me", new=True)
            await store.append(lease, sealed_records(1), "running")
            await asyncio.to_thread(execute, url, "SELECT pg_sleep(0.5)")
            assert await other.heads("cut off") == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("errors", "waits"),
    [
        ([PoolTimeout], False),
        ([psycopg.errors.TooManyConnections], False),
        ([psycopg.errors.QueryCanceled], False),
        ([psycopg.errors.AdminShutdown], True),
        ([psycopg.OperationalError, PoolTimeout], True),
    ],
)
def test_others_are_waited_for_when_the_server_was_away_and_not_when_it_is_busy(
    errors: list[type[Exception]], waits: bool, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with opened(url) as store:
            await store.maintenance.prepare()
            session = store._queue().session

            async def read(db: Any) -> None:
                if errors:
                    raise errors.pop(0)("as the server or the pool says")

            await session.read(read, None)
            assert await session.await_others() == waits

    monkeypatch.setattr(postgres_session, "RETURN_S", 0.5)
    asyncio.run(scenario())


@pytest.mark.parametrize("setting", ["quote_all_identifiers%3Don", "search_path%3Dagentfsm"])
def test_the_triggers_are_known_however_a_server_spells_their_names(setting: str, url: str) -> None:
    async def scenario() -> None:
        async with opened(f"{url}&options=-c%20{setting}") as store:  # a role named agentfsm has that search path
            await store.maintenance.prepare()
            assert await store.maintenance.schema_damage() == []

    asyncio.run(scenario())


def test_a_role_without_connections_left_is_told_so(url: str) -> None:
    execute(url, "DROP ROLE IF EXISTS crowded")
    execute(url, "CREATE ROLE crowded LOGIN CONNECTION LIMIT 1")
    execute(url, "GRANT pg_write_all_data, pg_read_all_data TO crowded")

    async def scenario() -> None:
        async with opened(url) as owner, opened(url.replace("postgres:@", "crowded@"), wait_s=0.3) as store:
            await owner.maintenance.prepare()
            await store.acquire("r", "me", new=True)
            with pytest.raises(StoreError, match=r'too many connections for role "crowded"; what was acknowledged'):
                await store.heads()

    asyncio.run(scenario())
