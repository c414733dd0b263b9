"""``PostgresStore`` through a pgbouncer in transaction mode, where a session belongs to nobody."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfsm import Agent, Host, RunCancelled, Runs, StaleLease, StoreError, tool
from agentfsm.journal.run_info import RunInfo
from agentfsm.journal.store import consistent_read
from agentfsm.journal.verification import GOOD, verify
from agentfsm.loop.keys import Keyring
from agentfsm.testing import ScriptedModel, call
from agentfsm.testing.store_conformance import CHECKS, sealed_records
from agentfsm.workers import Activation, Waker, open_waker
from tests.helpers.child_process import child_environment
from tests.helpers.pgbouncer import SERVER_CONNECTIONS, transaction_pooler
from tests.helpers.postgres import empty_database
from tests.helpers.postgres_worker import SECRET, worker

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")

from agentfsm.journal.postgres import PostgresStore  # noqa: E402  # needs psycopg
from tests.helpers.frozen_transaction import redact_while_frozen  # noqa: E402


@pytest.fixture(scope="module")
def pooler(database: str) -> Iterator[str]:
    with transaction_pooler(database) as url:
        yield url


@pytest.fixture
def url(pooler: str, database: str) -> str:
    """A database through the pooler, without tables of ours."""
    empty_database(database)
    return pooler


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_with_leases_it_does_what_every_store_does(check: Any, url: str) -> None:
    asyncio.run(check(lambda: PostgresStore(url, liveness="lease")))


@pytest.mark.slow
def test_many_stores_share_the_few_connections_of_the_pooler(url: str, database: str) -> None:
    async def work(number: int) -> str:
        async with PostgresStore(url, liveness="lease") as store:
            agent = Agent(ScriptedModel(["done"]), host=Host(store=store, secret=SECRET))
            return str((await agent.run("go", run_id=f"run{number}")).output)

    async def scenario() -> list[str]:
        return await asyncio.gather(*map(work, range(20)))

    assert asyncio.run(scenario()) == ["done"] * 20
    with psycopg.connect(database) as db:
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        assert db.execute(query).fetchone()[0] <= SERVER_CONNECTIONS


@pytest.mark.slow
def test_a_run_whose_process_is_killed_behind_a_pooler_goes_on_in_another_one(url: str, tmp_path: Path) -> None:
    file = tmp_path / "shipped"
    command = [sys.executable, "-m", "tests.helpers.postgres_worker", url, "lease", "one", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment()) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "inside\n"

        async def takes_over() -> tuple[str, int]:
            async with PostgresStore(url, liveness="lease", lease_s=1.0) as store:
                with pytest.raises(StaleLease):  # it lives, and renews its lease
                    await store.acquire("one", "me")
                child.send_signal(signal.SIGKILL)
                child.wait()
                agent = worker(store, file, "Order 7 is on its way.")
                while not (runs := await agent.unfinished_runs()):
                    await asyncio.sleep(0.05)
                result = await runs[0]
                records, head = await consistent_read(store, "one")
                return str(result.output), verify("one", records, head, keyring=Keyring(SECRET)).code

        assert asyncio.run(takes_over()) == ("Order 7 is on its way.", GOOD)
    assert file.read_text() == "7\n7\n"  # it is idempotent, and was cut off


@pytest.mark.slow
@pytest.mark.parametrize(("direct", "poll_s"), [(True, 3600.0), (False, 0.05)], ids=["direct", "polling"])
def test_a_cancellation_is_heard_of_by_a_direct_connection_or_by_looking(
    direct: bool, poll_s: float, url: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentfsm.journal.postgres.postgres_signals.POLL_S", poll_s)
    inside = asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        inside.set()
        await asyncio.Event().wait()
        return "never"

    async def scenario() -> Any:
        options = {"listen_url": database} if direct else {}
        ours = PostgresStore(url, liveness="lease", **options)
        theirs = PostgresStore(url, liveness="lease")
        async with ours, theirs:
            agent = Agent(ScriptedModel([call("wait")]), tools=[wait], host=Host(store=ours, secret=SECRET))
            running = asyncio.ensure_future(agent.run("Wait.", run_id="one"))
            await inside.wait()
            await Runs(theirs, secret=SECRET).cancel("one", "too late")
            return (await running).outcome

    outcome = asyncio.run(scenario())
    assert isinstance(outcome, RunCancelled)
    assert outcome.reason == "too late"


@pytest.mark.slow
def test_nobody_waits_for_a_process_that_was_frozen_in_a_transaction_behind_a_pooler(url: str, database: str) -> None:
    async def scenario() -> None:
        async with PostgresStore(url, liveness="lease") as store:
            await redact_while_frozen(store, database)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_server_that_ends_the_connections_of_a_pooler_loses_nothing(url: str, database: str) -> None:
    """The pooler may pass on what comes next before it knows, and then there are two answers to one question."""
    records = sealed_records(40)
    end = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )

    async def scenario() -> None:
        async with PostgresStore(url, liveness="lease") as store:
            lease = await store.acquire("a", "me", new=True)
            with psycopg.connect(database, autocommit=True) as db:
                for number, record in enumerate(records):
                    db.execute(end)
                    await store.append(lease, [record], "running", RunInfo("a", "running", tokens=number))
            assert await store.records("a") == records

    asyncio.run(scenario())


def test_a_store_that_counts_on_its_session_is_told_what_a_pooler_needs(url: str) -> None:
    async def write() -> None:
        async with PostgresStore(url) as store:
            await store.acquire("one", "me", new=True)

    with pytest.raises(StoreError, match="liveness=lease"):
        asyncio.run(write())


def test_a_pooler_is_reported(url: str) -> None:
    async def facts() -> dict[str, tuple[str, bool]]:
        async with PostgresStore(url, liveness="lease") as store:
            await store.maintenance.prepare()
            return {fact.name: (fact.value, fact.is_problem) for fact in await store.maintenance.describe()}

    assert asyncio.run(facts())["pooler"] == ("there is one between here and the server", False)


@pytest.mark.slow
def test_the_queues_of_workers_are_used_through_a_pooler(url: str) -> None:
    pytest.importorskip("dbos", reason="dbos is not installed")

    async def use(waker: Waker, name: str) -> bool:
        """Make the same statements often, whichever session of the server each one gets."""
        for number in range(10):
            assert await waker.wake(Activation(f"{name}-{number}", 0, "support:1"), delay_s=3600)
        return len(await waker.due(prefix=f"{name}-")) == 10

    async def scenario() -> None:
        wakers = [open_waker(f"{url}&liveness=lease") for _ in range(4)]
        try:
            await wakers[0].due(["none"])  # creates the tables
            assert all(await asyncio.gather(*(use(waker, f"w{number}") for number, waker in enumerate(wakers))))
        finally:
            for waker in wakers:
                await waker.aclose()

    asyncio.run(scenario())
