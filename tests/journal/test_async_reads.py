"""A store is read without blocking the event loop, and a run is read when it starts."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from agentfsm import (
    Agent,
    Allow,
    Host,
    HumanReplyError,
    MemoryStore,
    Run,
    RunCancelled,
    RunError,
    SqliteStore,
    UnknownRunError,
    UserInputRequested,
    tool,
)
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.store import SHORT_JOURNAL_CHARS, off_loop
from agentfsm.testing import ScriptedModel, call


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


def agent(store: MemoryStore | SqliteStore, *script: object) -> Agent:
    host = Host(store=store, secret=b"of the tests")
    return Agent(ScriptedModel(script), tools=[pay], host=host)  # type: ignore[arg-type]


async def waiting(store: MemoryStore | SqliteStore) -> UserInputRequested:
    outcome = (await agent(store, call("pay", amount=5)).run("Pay.", run_id="r")).outcome
    assert isinstance(outcome, UserInputRequested)
    return outcome


async def iterate(run: Run) -> None:
    async with run:
        async for _ in run:
            pass


def test_queries_run_in_a_thread_of_the_store(tmp_path: Path) -> None:
    seen: set[str] = set()

    async def main() -> None:
        with SqliteStore(tmp_path / "runs.db") as store:
            await waiting(store)
            await store._reader.read(lambda _: seen.add(threading.current_thread().name), None)
            heads, records = await asyncio.gather(store.heads(), store.records("r"))
            assert [(head.run_id, head.seq) for head in heads] == [("r", len(records))]

    asyncio.run(main())
    (name,) = seen
    assert name.startswith("agentfsm-reader")


def test_only_a_long_journal_is_computed_in_a_thread() -> None:
    async def main() -> None:
        here = threading.get_ident()
        short = [SealedRecord(1, "x" * SHORT_JOURNAL_CHARS, "")]
        assert await off_loop(lambda _: threading.get_ident(), short) == here
        long = [*short, SealedRecord(2, "", "", "x")]
        assert await off_loop(lambda _: threading.get_ident(), long) != here

    asyncio.run(main())


def test_a_store_can_be_used_by_one_event_loop_after_the_other_and_after_it_was_closed(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    asyncio.run(waiting(store))
    assert len(asyncio.run(store.heads())) == 1
    asyncio.run(store.aclose())
    assert len(asyncio.run(store.heads())) == 1
    store.close()


def test_closing_writes_what_is_queued(tmp_path: Path) -> None:
    async def main() -> None:
        store = SqliteStore(tmp_path / "runs.db")
        lease = await store.acquire("r", "me", new=True)
        append = store.append(lease, (), "suspended")
        await store.aclose()
        await append

    asyncio.run(main())
    with SqliteStore(tmp_path / "runs.db") as store:
        assert [head.status for head in asyncio.run(store.heads())] == ["suspended"]


def test_a_resumed_run_is_read_and_checked_by_load_or_when_it_starts() -> None:
    store = MemoryStore()

    async def main() -> None:
        await waiting(store)
        run = agent(store, "done").resume("r", Allow())
        assert repr(run) == "<Run 'r' not loaded: await it>"
        assert (run.run_id, run.finished, run.decisions, run.journal) == ("r", False, (), [])
        for read in (lambda: run.state, lambda: run.run_state):
            with pytest.raises(RunError, match="not loaded yet"):
                read()
        assert await run.load() is run
        assert (run.state, run.run_state.steps) == ("suspended", 1)
        assert (await run).output == "done"
        missing = agent(store).resume("gone")
        for wait in (missing.load, missing.aclose, missing.__anext__):
            if wait == missing.aclose:
                await wait()  # there is nothing to cancel
                continue
            with pytest.raises(UnknownRunError):
                await wait()

    asyncio.run(main())


def test_a_wrong_reply_leaves_the_run_waiting_and_an_iteration_tells_so() -> None:
    store = MemoryStore()

    async def main() -> None:
        asked = await waiting(store)
        for target in ("r", asked.suspension_record):
            with pytest.raises(HumanReplyError):
                await iterate(agent(store).resume(target, "yes, please"))
        assert [head.status for head in await store.heads()] == ["suspended"]

    asyncio.run(main())


def test_a_run_that_was_cancelled_before_it_was_loaded_ends_as_cancelled() -> None:
    store = MemoryStore()

    async def main() -> None:
        await waiting(store)
        run = agent(store).resume("r", Allow())
        run.cancel("too late")
        result = await run
        assert isinstance(result.outcome, RunCancelled)
        assert result.outcome.reason == "too late"

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_the_journal_of_a_result_is_what_the_store_has(tmp_path: Path, kind: str) -> None:
    store = MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "runs.db")

    async def main() -> None:
        await waiting(store)
        result = await agent(store, "done").resume("r", Allow())
        stored = await store.records("r")
        assert [(r.seq, r.hash) for r in result.journal] == [(r.seq, r.hash) for r in stored]
        assert result.journal[0].kind == "run.created"
        assert result.journal[-1].kind == "run.finished"
        await store.aclose()

    asyncio.run(main())
