"""Errors and cancellations while a run ends: journal, transcript and last event agree."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence

import pytest

from agentfsm import LOOP, Agent, DefaultPolicy, Host, RunAborted, RunCancelled, RunCompleted, RunState, tool
from agentfsm.journal.memory_store import MemoryStore
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.replay import replay
from agentfsm.journal.run_info import RunInfo
from agentfsm.journal.store import Lease, SealedSnapshot, Status
from agentfsm.journal.verification import GOOD, verify
from agentfsm.loop.failures import Action, Failure
from agentfsm.loop.state_json import dump_state
from agentfsm.testing import ScriptedModel, call
from tests.helpers.scenarios import check_result, run_async, run_script, tool_texts


class Cautious(MemoryStore):
    """A store whose last write of a run waits until it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.free = asyncio.Event(), asyncio.Event()

    def append(
        self,
        lease: Lease,
        records: Sequence[SealedRecord],
        status: Status,
        info: RunInfo | None = None,
        snapshot: SealedSnapshot | None = None,
    ) -> Awaitable[None]:
        done = super().append(lease, records, status, info, snapshot)
        return done if status == "running" else self._later(done)

    async def _later(self, done: Awaitable[None]) -> None:
        self.reached.set()
        await self.free.wait()
        await done


@pytest.mark.parametrize("times", [1, 2])
def test_cancelling_a_run_while_its_end_is_stored_does_not_change_it(times):
    async def scene() -> None:
        store = Cautious()
        run = Agent(ScriptedModel(["done"]), host=Host(store=store)).run("go", run_id="r")
        task = asyncio.ensure_future(run)
        await store.reached.wait()
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        store.free.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert run.finished
        assert isinstance(check_result(run.result).outcome, RunCompleted)
        assert (await run).output == "done"
        rows = await store.records("r")
        assert verify("r", rows, await store.head("r")).code == GOOD

    run_async(scene)


def test_an_interrupted_run_that_is_dismissed_keeps_the_results_of_its_calls():
    hanging = asyncio.Event()

    @tool(parallel=True)
    async def work(n: int) -> str:
        if n == 2:
            hanging.set()
            await asyncio.Event().wait()
        return f"result {n}"

    async def begun(store: MemoryStore) -> None:
        agent = Agent(ScriptedModel([[call("work", n=1), call("work", n=2)]]), tools=[work], host=Host(store=store))
        task = asyncio.ensure_future(agent.run("go", run_id="r"))
        await hanging.wait()
        while not any('"kind":"effect.result"' in row.body for row in await store.records("r")):
            await asyncio.sleep(0)
        kept.extend(await store.records("r"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    kept: list[SealedRecord] = []
    run_async(lambda: begun(MemoryStore()))

    async def dismissed() -> None:
        store = MemoryStore()
        lease = await store.acquire("r", "gone", new=True, keyring=Host().keyring)
        await store.append(lease, kept, "running")
        await store.release(lease)
        result = check_result(
            await Agent(ScriptedModel([]), tools=[work], host=Host(store=store)).dismiss("r", "enough")
        )
        assert isinstance(result.outcome, RunCancelled)
        assert tool_texts(result) == ["result 1", "Interrupted: the run was cancelled before this call had a result."]
        rows = await store.records("r")
        assert verify("r", rows, await store.head("r")).code == GOOD
        assert dump_state(rehydrate(rows).run) == dump_state(result.run_state)
        assert replay(rows, LOOP).same
        assert json.loads(rows[-1].body)["kind"] == "run.finished"

    run_async(dismissed)


def test_a_policy_that_raises_a_cancellation_does_not_cancel_the_run():
    class Odd(DefaultPolicy):
        def decide(self, failure: Failure, state: RunState) -> Action:
            raise asyncio.CancelledError

    result = run_script(call("nothing"), policy=Odd())
    assert isinstance(result.outcome, RunAborted)
    assert result.decisions[-1].guard == "aborted"
