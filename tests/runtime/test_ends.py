"""How a run ends where somebody interferes: its journal, its transcript and its last event say one thing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence

import pytest

from agentfsm import LOOP, Agent, DefaultPolicy, Host, PartialRunSummary, RunCancelled, RunCompleted, RunState, tool
from agentfsm.core.codec import dump_state
from agentfsm.core.failures import Action, Failure
from agentfsm.journal.memory import MemoryStore
from agentfsm.journal.records import Row
from agentfsm.journal.replay import replay
from agentfsm.journal.restore import restore
from agentfsm.journal.store import Lease, Status
from agentfsm.journal.verify import GOOD, verify
from agentfsm.testing import ScriptedModel, call
from tests.runtime.scenes import checked, drive, play, tool_texts


class Cautious(MemoryStore):
    """A store whose last write of a run waits until it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.free = asyncio.Event(), asyncio.Event()

    def append(self, lease: Lease, rows: Sequence[Row], status: Status) -> Awaitable[None]:
        done = super().append(lease, rows, status)
        return done if status == "running" else self._later(done)

    async def _later(self, done: Awaitable[None]) -> None:
        self.reached.set()
        await self.free.wait()
        await done


@pytest.mark.parametrize("times", [1, 2])
def test_cancelled_while_its_end_is_written_a_run_has_that_end(times):
    async def scene() -> None:
        store = Cautious()
        run = Agent(ScriptedModel(["done"]), host=Host(store=store)).run("go", run_id="r")
        task = asyncio.ensure_future(run._to_the_end())
        await store.reached.wait()
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        store.free.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert run.finished
        assert isinstance(checked(run.result).outcome, RunCompleted)
        assert (await run).output == "done"
        rows = store.rows("r")
        assert verify("r", rows, store.head("r")).code == GOOD

    drive(scene)


def test_a_run_that_was_cut_off_and_is_dismissed_keeps_what_its_calls_came_to():
    hanging = asyncio.Event()

    @tool(parallel=True)
    async def work(n: int) -> str:
        if n == 2:
            hanging.set()
            await asyncio.Event().wait()
        return f"result {n}"

    async def begun(store: MemoryStore) -> None:
        agent = Agent(ScriptedModel([[call("work", n=1), call("work", n=2)]]), tools=[work], host=Host(store=store))
        task = asyncio.ensure_future(agent.run("go", run_id="r")._to_the_end())
        await hanging.wait()
        while not any('"kind":"effect.result"' in row.body for row in store.rows("r")):
            await asyncio.sleep(0)
        kept.extend(store.rows("r"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    kept: list[Row] = []
    drive(lambda: begun(MemoryStore()))

    async def dismissed() -> None:
        store = MemoryStore()
        lease = await store.take("r", "gone", new=True)
        await store.append(lease, kept, "running")
        await store.release(lease)
        result = checked(await Agent(ScriptedModel([]), tools=[work], host=Host(store=store)).dismiss("r", "enough"))
        assert isinstance(result.outcome, RunCancelled)
        assert tool_texts(result) == ["result 1", "Cut off: the run was cancelled before this call had a result."]
        rows = store.rows("r")
        assert verify("r", rows, store.head("r")).code == GOOD
        assert dump_state(restore(rows).run) == dump_state(result.run)
        assert replay(rows, LOOP).same
        assert json.loads(rows[-1].body)["kind"] == "run.finished"

    drive(dismissed)


def test_a_policy_that_raises_a_cancellation_cancels_nobody():
    class Odd(DefaultPolicy):
        def decide(self, failure: Failure, state: RunState) -> Action:
            raise asyncio.CancelledError

    result = play(call("nothing"), policy=Odd())
    assert isinstance(result.outcome, PartialRunSummary)
    assert result.decisions[-1].guard == "aborted"
