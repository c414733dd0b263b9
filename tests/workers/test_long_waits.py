"""A wait of more than a minute before a retry frees the worker; the run goes on when the wait is over, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Approval,
    Graph,
    Host,
    MemoryStore,
    Runs,
    StaleLease,
    StateContext,
    StateSpec,
    TransientProviderError,
    Transition,
    hand_over,
    tool,
)
from agentfsm.journal.verification import GOOD
from agentfsm.runtime.context import LongWait
from agentfsm.runtime.run import advance
from agentfsm.testing import FakeClock, ScriptedModel, call
from agentfsm.workers import Waker, Worker, WorkerSettings
from agentfsm.workers.waker import Activation, Deliver
from tests.helpers.scenarios import await_run
from tests.helpers.worker_app import Delegates

SECRET = b"the secret of this process, long enough"


class HandWaker:
    """As much of a ``Waker`` as is used here; the test delivers what is queued."""

    deliver: Deliver

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.served = asyncio.Event()
        self.queued: dict[str, tuple[float, Activation]] = {}
        self.looked = 0

    async def serve(self, queues: Any, deliver: Deliver) -> None:
        self.queue, self.deliver = queues[-1], deliver
        self.served.set()

    async def wake(self, activation: Activation, *, delay_s: float = 0.0) -> bool:
        self.queued[activation.key] = (self.clock.time() + delay_s, activation)
        return True

    async def due(self, keys: Collection[str]) -> dict[str, float]:
        self.looked += 1
        return {key: due for key, (due, _) in self.queued.items() if key in keys}

    async def was_put_back(self, activation: Activation) -> bool:
        return False

    async def unfinished(self, older_than_s: float) -> list[Any]:
        return []

    async def stop(self, grace_s: float) -> None:
        pass


class Scene:
    """A store, and an agent whose provider asks for a wait before it answers."""

    def __init__(self, *waits: float) -> None:
        self.store = MemoryStore()
        self.clock = FakeClock()
        self.runs = Runs(self.store, secret=SECRET)
        busy = [TransientProviderError("busy", retry_after_s=wait, status=429) for wait in waits]
        self.model = ScriptedModel([*busy, "Done."])
        self.agent = Agent(self.model, host=Host(store=self.store, secret=SECRET, clock=self.clock, seed=1))

    async def interrupt(self) -> str:
        """A run that its process leaves in the middle of the wait."""
        run = self.agent.run("Do it.")
        slept = asyncio.Event()

        async def sleep(seconds: float) -> None:
            slept.set()
            await asyncio.Event().wait()

        own, self.clock.sleep = self.clock.sleep, sleep  # type: ignore[method-assign]  # until the process is gone
        task = asyncio.ensure_future(run)
        await slept.wait()
        self.clock.sleep = own  # type: ignore[method-assign]
        await run._driver.context.recorder.sink.release()  # as the store does for a process that is gone
        self.leftover = task
        return run.run_id

    @asynccontextmanager
    async def working(self) -> AsyncGenerator[HandWaker]:
        """A worker at work."""
        waker = HandWaker(self.clock)
        settings = WorkerSettings(sweep_s=0.001)
        worker = Worker({"clerk": self.agent}, self.store, cast("Waker", waker), secret=SECRET, settings=settings)
        serving = asyncio.create_task(worker.run())
        await waker.served.wait()
        try:
            yield waker
        finally:
            worker.stop()
            await serving


def test_a_long_wait_frees_the_worker_and_the_run_goes_on_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = Scene(90, 45)
        monkeypatch.setattr("agentfsm.workers.run_watcher.time.time", scene.clock.time)
        run_id = await scene.interrupt()
        async with scene.working() as waker:
            while not waker.queued:  # it was cut off, and is found
                await asyncio.sleep(0)
            ((_, activation),) = waker.queued.values()
            waker.queued.clear()
            assert await waker.deliver(activation) == "waits"
            head = await scene.store.head(run_id)
            assert head is not None
            assert (head.status, head.owner, scene.clock.slept) == ("running", None, [])
            ((due, timer),) = waker.queued.values()
            assert (due - scene.clock.time(), timer.is_timer) == (90, True)
            looked = waker.looked
            while waker.looked == looked:  # a sweep sees that it has a timer, and leaves it
                await asyncio.sleep(0)
            assert list(waker.queued.values()) == [(due, timer)]
            scene.clock.advance(90)
            assert await waker.deliver(timer) == "finished"
        assert scene.clock.slept == [45]  # a short wait is waited for
        report = await scene.runs.verify(run_id)
        assert (report.code, (await scene.runs.get(run_id)).info.ending) == (GOOD, "completed")

    asyncio.run(scenario())


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_wait_of_a_sub_agent_frees_the_worker_too(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = Scene(*[90] * 3)
        monkeypatch.setattr("agentfsm.workers.run_watcher.time.time", scene.clock.time)
        host = scene.agent.config.host
        for _ in range(depth):
            tools = [scene.agent.as_tool("helper", "Helps.")]
            scene.agent = Agent(Delegates(), tools=tools, host=host)
        run = scene.agent.run("Go.")
        await advance(run)
        await hand_over(run)
        async with scene.working() as waker:
            while not waker.queued:
                await asyncio.sleep(0)
            ((_, activation),) = waker.queued.values()
            for _ in range(3):
                waker.queued.clear()
                assert await waker.deliver(activation) == "waits"
                heads = await scene.store.heads()
                assert {(head.status, head.owner) for head in heads} == {("running", None)}
                assert len(heads) == 1 + depth
                ((due, activation),) = waker.queued.values()
                assert (due - scene.clock.time(), activation.run_id) == (90, run.run_id)
                scene.clock.advance(90)
            assert await waker.deliver(activation) == "finished"
        assert (scene.model.calls, scene.clock.slept) == (4, [])
        for head in await scene.store.heads():
            assert ((await scene.runs.verify(head.run_id)).code, head.status) == (GOOD, "finished")

    asyncio.run(scenario())


def test_a_long_wait_of_a_sub_agent_beside_other_calls_holds_the_worker() -> None:
    """Those would be cut off."""

    async def scenario() -> None:
        scene = Scene(90)
        host, looked = scene.agent.config.host, list[str]()

        @tool(parallel=True)
        def look() -> str:
            """Look."""
            looked.append("look")
            return "seen"

        tools = [scene.agent.as_tool("helper", "Helps.", parallel=True), look]
        scene.agent = Agent(
            ScriptedModel([[call("helper", task="Go."), call("look")], "Done."]), tools=tools, host=host
        )
        run = scene.agent.run("Go.")
        await advance(run, until=None, longest_wait_s=60)
        assert (run.result.output, looked, scene.clock.slept) == ("Done.", ["look"], [90])

    asyncio.run(scenario())


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_run_that_is_handed_over_while_it_or_its_sub_agent_waits_before_a_retry_waits_for_the_rest(
    depth: int, is_cancelled: bool
) -> None:
    async def scenario() -> None:
        scene = Scene(50)
        host = scene.agent.config.host
        for _ in range(depth):
            tools = [scene.agent.as_tool("helper", "Helps.")]
            scene.agent = Agent(Delegates(), tools=tools, host=host)
        waits, held, own = asyncio.Event(), asyncio.Event(), scene.clock.sleep

        async def sleep(seconds: float) -> None:
            waits.set()
            await held.wait()

        scene.clock.sleep = sleep  # type: ignore[method-assign]  # until the run was handed over
        run = scene.agent.run("Go.", run_id="r")
        awaiting = asyncio.create_task(await_run(run))
        await waits.wait()
        await hand_over(run)
        if is_cancelled:
            awaiting.cancel()
        held.set()
        with pytest.raises(asyncio.CancelledError if is_cancelled else StaleLease):
            await awaiting
        heads = await scene.store.heads()
        assert [(head.status, head.owner) for head in heads] == [("running", None)] * (1 + depth)
        scene.clock.sleep = own  # type: ignore[method-assign]
        scene.clock.advance(20)
        (again,) = await scene.agent.unfinished_runs()
        result = await again
        assert (result.output, scene.clock.slept, scene.model.calls) == ("Done.", [30], 2)
        for head in await scene.store.heads():
            assert ((await scene.runs.verify(head.run_id)).code, head.status) == (GOOD, "finished")

    asyncio.run(scenario())


@pytest.mark.parametrize(("away_s", "rest_s"), [(0, [90]), (50, [40]), (90, []), (1000, []), (-1000, [90])])
def test_a_run_that_was_interrupted_while_it_waited_waits_for_the_rest(away_s: float, rest_s: list[float]) -> None:
    async def scenario() -> None:
        scene = Scene(90)
        run_id = await scene.interrupt()
        scene.clock.advance(away_s)
        result = await scene.agent.resume(run_id)
        assert (result.output, scene.clock.slept) == ("Done.", rest_s)
        assert (await scene.runs.verify(run_id)).code == GOOD

    asyncio.run(scenario())


class Reviewed(Scene):
    """The same with a state of the user's own, which asks the busy provider, and may catch whatever is raised."""

    def __init__(self, *waits: float, catches: type[BaseException], **guardrails: Any) -> None:
        super().__init__(*waits)
        self.reviewed = list[str]()

        async def review(context: StateContext) -> str:
            self.reviewed.append("begun")
            try:
                reply = await context.ask_model("?", model=self.model)
            except catches as error:
                return type(error).__name__
            return reply.message.content

        rows = [Transition("review", None, "call_llm")]
        graph = LOOP.with_state(StateSpec("review", effect=review), rows, entered_by="pre_step.otherwise")
        limits = AgentGuardrails(**guardrails)
        self.agent = Agent(ScriptedModel(["Done."]), graph=graph, host=self.agent.config.host, guardrails=limits)


@pytest.mark.parametrize("catches", [KeyError, Exception, BaseException])
def test_a_long_wait_in_a_state_of_the_users_own_frees_the_worker_too(
    catches: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        scene = Reviewed(90, 45, 300, catches=catches, max_execution_time_s=400)
        monkeypatch.setattr("agentfsm.workers.run_watcher.time.time", scene.clock.time)
        run = scene.agent.run("Go.")
        with pytest.raises(LongWait):
            await advance(run, until=None, longest_wait_s=60)
        await hand_over(run)
        scene.clock.advance(20)
        async with scene.working() as waker:
            while not waker.queued:
                await asyncio.sleep(0)
            ((_, activation),) = waker.queued.values()
            for rest_s in (70, 300):
                waker.queued.clear()
                assert await waker.deliver(activation) == "waits"
                ((due, activation),) = waker.queued.values()
                assert (due - scene.clock.time(), activation.is_timer) == (rest_s, True)
                scene.clock.advance(rest_s)
            assert await waker.deliver(activation) == "finished"
        assert (scene.model.calls, scene.clock.slept, len(scene.reviewed)) == (4, [45], 4)
        stored = await scene.runs.get(run.run_id)
        assert (stored.info.ending, (await scene.runs.verify(run.run_id)).code) == ("completed", GOOD)

    asyncio.run(scenario())


@pytest.mark.parametrize(("away_s", "rest_s"), [(0, [90]), (50, [40]), (90, []), (1000, []), (-1000, [90])])
def test_a_state_of_the_users_own_that_was_interrupted_while_it_waited_waits_for_the_rest(
    away_s: float, rest_s: list[float]
) -> None:
    async def scenario() -> None:
        scene = Reviewed(90, 30, catches=KeyError)
        run_id = await scene.interrupt()
        scene.clock.advance(away_s)
        result = await scene.agent.resume(run_id)
        assert (result.output, scene.clock.slept) == ("Done.", [*rest_s, 30])
        assert (await scene.runs.verify(run_id)).code == GOOD

    asyncio.run(scenario())


def test_a_run_that_waits_without_a_process_is_cancelled_at_once() -> None:
    async def scenario() -> None:
        scene = Scene(90)
        run_id = await scene.interrupt()
        async with scene.working() as waker:
            head = await scene.store.head(run_id)
            assert head is not None
            assert await waker.deliver(Activation(run_id, head.epoch, waker.queue)) == "waits"
            await scene.runs.cancel(run_id, "no longer needed")
            assert await waker.deliver(Activation(run_id, head.epoch + 1, waker.queue)) == "finished"
        assert ((await scene.runs.get(run_id)).info.ending, scene.clock.slept) == ("cancelled", [])

    asyncio.run(scenario())


@pytest.mark.parametrize(("graph", "dues"), [(None, [60, 600]), (LOOP, [600])], ids=["counts votes", "counts none"])
def test_what_a_sub_agent_asks_is_escalated_and_expires_by_itself(
    graph: Graph | None, dues: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    @tool(requires_approval=Approval(roles=("a",), validity_s=600, escalate_to=("b",), escalate_after_s=60))
    def pay() -> str:
        """Pay."""
        return "paid"

    async def scenario() -> None:
        scene = Scene()
        monkeypatch.setattr("agentfsm.workers.run_watcher.time.time", scene.clock.time)
        helper, host = Agent(ScriptedModel([call("pay")]), tools=[pay]), scene.agent.config.host
        model = ScriptedModel([call("helper", task="Pay.")])
        scene.agent = Agent(model, tools=[helper.as_tool("helper", "Pays.")], graph=graph, host=host)
        limits = scene.agent.guardrails.model_copy(update={"validity_s": 600})
        scene.agent = scene.agent.with_config(scene.agent.config, limits)
        began = scene.clock.time()
        run_id = (await scene.agent.run("Go.")).run_id
        async with scene.working() as waker:
            for due_s in dues:
                while not waker.queued:
                    await asyncio.sleep(0)
                ((due, timer),) = waker.queued.values()
                assert due == pytest.approx(began + due_s)
                waker.queued.clear()
                scene.clock.advance(due + 1 - scene.clock.time())
                await waker.deliver(timer)
        report = await scene.runs.verify(run_id)
        assert (report.code, (await scene.runs.get(run_id)).info.ending) == (GOOD, "cancelled")

    asyncio.run(scenario())
