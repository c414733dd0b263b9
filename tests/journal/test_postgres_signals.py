"""Answers and cancellations that reach another process through a PostgreSQL server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentfsm import Agent, Allow, Host, RunCancelled, RunCompleted, Runs, StaleHumanReplyError, tool
from agentfsm.runtime import timeout
from agentfsm.testing import ScriptedModel, call
from tests.helpers.postgres import empty_database

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")

from agentfsm.journal.postgres import (  # noqa: E402  # needs psycopg
    PostgresStore,
    postgres_signals,
)
from agentfsm.journal.postgres.postgres_session import PostgresSettings  # noqa: E402
from agentfsm.journal.postgres.postgres_signals import SignalListener  # noqa: E402

SECRET = b"the secret of the tests"


@pytest.fixture
def url(database: str) -> str:
    empty_database(database)
    return database


class Worker:
    """A process with the agent, and its own connections."""

    def __init__(self, store: PostgresStore) -> None:
        self.store, self.paid, self.inside = store, list[int](), asyncio.Event()

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

        return Agent(ScriptedModel(list(script)), tools=[pay, wait], host=Host(store=self.store, secret=SECRET))


@asynccontextmanager
async def both(url: str, **options: Any) -> AsyncIterator[tuple[Worker, Runs]]:
    """A worker, and the runs as another process sees them."""
    async with PostgresStore(url, **options) as ours, PostgresStore(url) as theirs:
        yield Worker(ours), Runs(theirs, secret=SECRET)


WAYS = [
    pytest.param({}, id="its-own-connection"),
    pytest.param({"liveness": "lease"}, id="looking"),
    pytest.param({"liveness": "lease", "listen_url": True}, id="a-direct-url"),
]


def options_for(url: str, way: dict[str, Any]) -> dict[str, Any]:
    return {name: url if name == "listen_url" else value for name, value in way.items()}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_another_process_works_on_is_cancelled(
    url: str, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentfsm.journal.postgres.postgres_signals.POLL_S", 0.05)

    async def scenario() -> None:
        async with both(url, **options_for(url, way)) as (worker, runs):
            running = asyncio.ensure_future(worker.agent(call("wait")).run("Wait.", run_id="one"))
            await worker.inside.wait()
            sent = await runs.cancel("one", "stop it")
            assert sent.owner is not None
            outcome = (await running).outcome
            assert isinstance(outcome, RunCancelled)
            assert outcome.reason == "stop it"
            assert await worker.store.signals.pending() == []

    asyncio.run(scenario())


@pytest.mark.slow
def test_an_answer_wakes_a_worker_that_listens_and_is_given_once(url: str) -> None:
    async def scenario() -> None:
        async with both(url) as (worker, runs):
            await worker.agent(call("pay", amount=5)).run("Pay 5.", run_id="one")

            async def work() -> Any:
                async for run_id in worker.store.signals.listen():
                    if run := await worker.agent("Paid.").next_run(run_id):
                        return (await run).outcome
                return None

            working = asyncio.ensure_future(work())
            sent = await asyncio.gather(
                *(runs.answer("one", Allow(), by=name) for name in "ab"), return_exceptions=True
            )
            assert isinstance(await working, RunCompleted)
            assert worker.paid == [5]
            (refused,) = (each for each in sent if isinstance(each, Exception))
            assert isinstance(refused, StaleHumanReplyError)

    asyncio.run(scenario())


@pytest.mark.slow
def test_what_was_sent_while_a_connection_was_cut_is_heard_of(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfsm.journal.postgres.postgres_signals.RECONNECT_S", 0.01)

    async def scenario() -> None:
        async with both(url) as (worker, runs):
            running = asyncio.ensure_future(worker.agent(call("wait")).run("Wait.", run_id="one"))
            await worker.inside.wait()
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as db:
                while True:  # until it listens
                    cut = await db.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
                    )
                    if await cut.fetchall():
                        break
                    await asyncio.sleep(0.01)
            await runs.cancel("one", "stop it")
            assert isinstance((await running).outcome, RunCancelled)

    asyncio.run(scenario())


def test_signals_to_runs_with_ids_too_long_to_be_sent_along_are_heard_of_too(url: str) -> None:
    async def scenario() -> None:
        async with both(url) as (worker, runs), asyncio.timeout(20):  # all signals are read again after 30 s
            listening = worker.store.signals.listen()
            for run_id in ("long" * 300, "short", "longer" * 300):
                hears = asyncio.ensure_future(anext(listening))
                await listens(url)
                await worker.agent(call("pay", amount=5)).run("Pay 5.", run_id=run_id)
                await runs.answer(run_id, Allow(), by="Ann")
                assert await hears == run_id
                (sent,) = await worker.store.signals.pending()
                await worker.store.signals.remove(sent.id)

    asyncio.run(scenario())


async def listens(url: str) -> None:
    """Wait until a connection listens."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as db:
        while not await (await db.execute("SELECT 1 FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")).fetchall():
            await asyncio.sleep(0.01)


def test_nothing_is_left_of_what_listened(url: str) -> None:
    async def scenario() -> int:
        async with both(url) as (worker, _):
            listening = worker.store.signals.listen()
            waiting = asyncio.ensure_future(anext(listening))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            await listening.aclose()
        return len(asyncio.all_tasks())

    assert asyncio.run(scenario()) == 1


def test_a_listener_that_swallows_a_cancellation_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As psycopg does before Python 3.12, if the server's answer comes in the same moment."""
    monkeypatch.setattr(postgres_signals, "POLL_S", 0)
    monkeypatch.setattr(timeout, "CANCEL_AGAIN_S", 0.01)
    swallowed = 0

    async def read_pending() -> list[str]:
        nonlocal swallowed
        if not swallowed:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed += 1
        return []

    async def claim_again() -> None:
        raise AssertionError("it has no connection that could be lost")

    async def scenario() -> None:
        settings = PostgresSettings("postgresql://host/db", "lease", 1.0, 1.0)
        listener = SignalListener(settings, read_pending, lambda run_id: None, claim_again)
        for _ in range(5):
            await asyncio.sleep(0)
        await asyncio.wait_for(listener.aclose(), 10)

    asyncio.run(scenario())
    assert swallowed == 1
