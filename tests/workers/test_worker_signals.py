"""What a worker does about answers and cancellations that wait for a run when it is told to look at the run."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from agentfsm import (
    Actor,
    Agent,
    AgentGuardrails,
    Allow,
    Approval,
    Deny,
    Edit,
    Host,
    MemoryStore,
    RunContext,
    Runs,
    StaleLease,
    StoreError,
    StoreFormatError,
    UserInputRequested,
    tool,
)
from agentfsm.journal.erasure import ErasureQuery
from agentfsm.journal.signals import SealedSignal
from agentfsm.journal.store import Store
from agentfsm.loop.keys import Keyring
from agentfsm.runtime import timeout
from agentfsm.runtime.run import Run, advance, hand_over
from agentfsm.testing import ScriptedModel, call
from agentfsm.workers import Worker
from agentfsm.workers.run_watcher import RunWatcher
from agentfsm.workers.served_agents import ServedAgents
from agentfsm.workers.submission import submission_queue
from agentfsm.workers.waker import Activation, Deliver, SetAside, Waker
from agentfsm.workers.worker_metrics import WorkerCounts
from agentfsm.workers.worker_settings import WorkerSettings
from tests.helpers.stepped_clock import SteppedClock
from tests.helpers.worker_app import Delegates, Steps

SECRET = b"the secret of this process, long enough"
KEY_ID = Keyring(SECRET).current.key_id


class HandWaker:
    """As much of a ``Waker`` as is used here: activations are delivered by the test, whenever it likes."""

    deliver: Deliver

    def __init__(self) -> None:
        self.served = asyncio.Event()

    async def serve(self, queues: Any, deliver: Deliver) -> None:
        self.queue, self.deliver = queues[-1], deliver
        self.served.set()

    async def wake(self, activation: Activation, *, delay_s: float = 0.0) -> bool:
        return not delay_s

    async def due(self, keys: Collection[str]) -> dict[str, float]:
        return {}

    async def was_put_back(self, activation: Activation) -> bool:
        return False

    async def set_aside(self, activation: Activation, reason: str, until: float | None = None) -> None:
        pass

    async def unfinished(self, older_than_s: float) -> list[Any]:
        return []

    async def stop(self, grace_s: float) -> None:
        pass


class Scene:
    """A store, its clock, and an agent whose tools ask before they act."""

    def __init__(self) -> None:
        self.store: Store = MemoryStore()
        self.clock = SteppedClock()
        self.runs = Runs(self.store, secret=SECRET)
        self.acted: list[str] = []

        @tool(requires_approval=Approval(validity_s=30))
        def pay() -> str:
            """Pay."""
            self.acted.append("pay")
            return "paid"

        @tool(requires_approval=Approval(validity_s=86400))
        def refund() -> str:
            """Refund."""
            self.acted.append("refund")
            return "refunded"

        @tool
        def send() -> str:
            """Send."""
            self.acted.append("send")
            return "sent"

        self.tools = [pay, refund, send]

    def agent(self, *replies: Any) -> Agent[Any, Any]:
        """The agent, with what its model says."""
        host = Host(store=self.store, secret=SECRET, clock=self.clock)
        return Agent(ScriptedModel([*replies]), tools=self.tools, host=host)

    async def activate(
        self,
        run_id: str,
        *,
        is_timer: bool,
        meanwhile: Callable[[], Awaitable[Any]] | None = None,
    ) -> str:
        """What a worker does with an activation of a run, and ``meanwhile`` while it sleeps."""
        waker = HandWaker()
        worker = Worker({"clerk": self.agent("Done.")}, self.store, cast("Waker", waker), secret=SECRET)
        serving = asyncio.create_task(worker.run())
        await waker.served.wait()
        if meanwhile is not None:
            sleep = self.clock.sleep

            async def slept(seconds: float) -> None:
                self.clock.sleep = sleep  # type: ignore[method-assign]  # once
                await meanwhile()
                await sleep(seconds)

            self.clock.sleep = slept  # type: ignore[method-assign]  # only this sleep is disturbed
        head = await self.store.head(run_id)
        assert head is not None
        try:
            return await waker.deliver(Activation(run_id, head.epoch, waker.queue, is_timer=is_timer))
        finally:
            worker.stop()
            await serving

    async def ending(self, run_id: str) -> str | None:
        return (await self.runs.get(run_id)).info.ending


def test_a_run_that_was_cancelled_while_nobody_ran_it_does_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = Scene()
        run = scene.agent(call("send")).run("Send it.")
        while run.run_state.state != "dispatch_tool":
            await advance(run)
        await hand_over(run)
        await scene.runs.cancel(run.run_id, "sent by mistake")
        pending = scene.store.signals.pending

        async def from_afar(run_id: str | None = None) -> list[SealedSignal]:
            for _ in range(100):  # the round trip to a server
                await asyncio.sleep(0)
            return await pending(run_id)

        monkeypatch.setattr(scene.store.signals, "pending", from_afar)
        assert await scene.activate(run.run_id, is_timer=False) == "finished"
        assert (scene.acted, await scene.ending(run.run_id)) == ([], "cancelled")

    asyncio.run(scenario())


def test_a_worker_says_that_it_did_not_stop_if_its_engine_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class StuckWaker(HandWaker):
        async def stop(self, grace_s: float) -> None:
            await asyncio.Event().wait()

    async def scenario() -> bool:
        monkeypatch.setattr("agentfsm.workers.worker.HAND_OVER_S", 0.0)
        scene, waker = Scene(), StuckWaker()
        worker = Worker({"clerk": scene.agent("Done.")}, scene.store, cast("Waker", waker), secret=SECRET)
        serving = asyncio.create_task(worker.run())
        await waker.served.wait()
        worker.stop()
        return await asyncio.wait_for(serving, 30)

    assert asyncio.run(scenario()) is False


def test_a_worker_stops_when_a_later_release_has_migrated_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene, waker = Scene(), HandWaker()
        worker = Worker({"clerk": scene.agent("Done.")}, scene.store, cast("Waker", waker), secret=SECRET)
        serving = asyncio.create_task(worker.run())
        await waker.served.wait()

        async def migrated(which: object) -> Any:
            raise StoreFormatError("install a newer release")

        monkeypatch.setattr(scene.store, "heads", migrated)
        with pytest.raises(StoreFormatError, match="install a newer release"):
            await asyncio.wait_for(serving, 30)

    asyncio.run(scenario())


def test_two_activations_of_one_run_at_once_set_nothing_aside() -> None:
    class NotingWaker(HandWaker):
        async def set_aside(self, activation: Activation, reason: str, until: float | None = None) -> None:
            aside.append(reason)

    async def scenario() -> None:
        scene, waker = Scene(), NotingWaker()
        run = scene.agent(call("send")).run("Send it.")
        while run.run_state.state != "dispatch_tool":
            await advance(run)
        await hand_over(run)
        worker = Worker({"clerk": scene.agent("Done.")}, scene.store, cast("Waker", waker), secret=SECRET)
        serving = asyncio.create_task(worker.run())
        await waker.served.wait()
        head = await scene.store.head(run.run_id)
        assert head is not None
        twice = [waker.deliver(Activation(run.run_id, head.epoch, waker.queue)) for _ in range(2)]
        words = await asyncio.gather(*twice)
        worker.stop()
        await serving
        assert sorted(words) == ["finished", "outdated"]
        assert scene.acted == ["send"]

    aside: list[str] = []
    asyncio.run(scenario())
    assert aside == []


def test_a_run_whose_answer_was_refused_is_not_woken_again_and_again_but_by_the_next_answer() -> None:
    class NotingWaker(HandWaker):
        def __init__(self) -> None:
            super().__init__()
            self.woken: list[str] = []

        async def wake(self, activation: Activation, *, delay_s: float = 0.0) -> bool:
            self.woken.append(activation.run_id)
            return True

    async def scenario() -> None:
        scene, waker = Scene(), NotingWaker()
        agents = ServedAgents({"clerk": scene.agent("Done.")})
        watcher: Any = RunWatcher(scene.store, cast("Waker", waker), agents, WorkerSettings(), WorkerCounts())

        async def woken() -> int:
            waker.woken.clear()
            listening = scene.store.signals.listen()
            await watcher._wake_signalled_run(await anext(listening))
            await listening.aclose()
            return len(waker.woken)

        run = await scene.agent(call("pay")).run("Pay.", run_id="r")
        assert isinstance(run.outcome, UserInputRequested)
        await scene.runs.answer("r", Edit({"unknown": 1}))
        assert await woken() == 1
        assert await scene.activate("r", is_timer=False) == "nothing to do"
        assert (await scene.runs.get("r")).refused
        assert [await woken(), await woken()] == [0, 0]
        await scene.runs.answer("r", Allow())
        assert await woken() == 1
        await scene.activate("r", is_timer=False)
        assert scene.acted == ["pay"]

    asyncio.run(scenario())


@pytest.mark.parametrize("why", ["another tool", "other guardrails"])
def test_an_answer_that_a_worker_cannot_act_on_is_left_to_workers_that_can(why: str) -> None:
    class NotingWaker(HandWaker):
        def __init__(self) -> None:
            super().__init__()
            self.woken: list[str] = []

        async def wake(self, activation: Activation, *, delay_s: float = 0.0) -> bool:
            self.woken.append(activation.queue)
            return True

    @tool(requires_approval=Approval(validity_s=30))
    def pay(amount: int = 5) -> str:
        """Pay an amount."""
        return "paid"

    async def scenario() -> None:
        scene, waker = Scene(), NotingWaker()
        await scene.agent(call("pay")).run("Pay.", run_id="r", tags=["agent:clerk"])
        config = scene.agent("Done.").config
        other = replace(config, tools={**config.tools, "pay": pay})
        if why == "other guardrails":
            other = replace(config, guardrails=AgentGuardrails(max_iterations=5))
        newer = scene.agent().with_config(other)
        worker = Worker({"clerk": newer}, scene.store, cast("Waker", waker), secret=SECRET)
        agents = ServedAgents({"clerk": scene.agent("Done.")})
        older = RunWatcher(scene.store, cast("Waker", waker), agents, WorkerSettings(), WorkerCounts())

        async def woken(watcher: Any) -> int:
            waker.woken.clear()
            await watcher._wake_signalled_run("r")
            return len(waker.woken)

        serving = asyncio.create_task(worker.run())
        await waker.served.wait()
        await scene.runs.answer("r", Allow())
        assert await woken(worker._watcher) == 1
        head = await scene.store.head("r")
        assert head is not None
        assert await waker.deliver(Activation("r", head.epoch, waker.queue)) == "nothing to do"
        assert [await woken(worker._watcher), await woken(older)] == [0, 1]
        assert waker.queue not in waker.woken  # it would be delivered to either
        if why == "another tool":
            await scene.runs.answer("r", Deny("no"))
            assert [await woken(worker._watcher), await woken(older)] == [1, 1]
        worker.stop()
        await serving

    asyncio.run(scenario())


def test_an_answer_sent_in_time_counts_although_the_timer_is_delivered_first() -> None:
    async def scenario() -> None:
        scene = Scene()
        waiting = await scene.agent(call("pay")).run("Pay it.")
        await scene.runs.answer(waiting.run_id, Allow())
        scene.clock.advance(3600)  # no worker was up
        assert await scene.activate(waiting.run_id, is_timer=True) == "finished"
        assert (scene.acted, await scene.ending(waiting.run_id)) == (["pay"], "completed")

    asyncio.run(scenario())


def test_a_request_that_nobody_answered_in_time_is_dismissed_by_a_timer_that_comes_early_or_late() -> None:
    async def scenario(advance_s: float) -> None:
        scene = Scene()
        waiting = await scene.agent(call("pay")).run("Pay it.")
        scene.clock.advance(advance_s)
        assert await scene.activate(waiting.run_id, is_timer=True) == "finished"
        assert (scene.acted, await scene.ending(waiting.run_id)) == ([], "cancelled")

    for advance_s in (0, 3600):
        asyncio.run(scenario(advance_s))


def test_a_timer_that_comes_early_leaves_a_newer_request_alone() -> None:
    async def scenario() -> None:
        scene = Scene()
        waiting = await scene.agent(call("pay")).run("Pay it.")

        async def answer() -> None:
            await scene.agent(call("refund")).resume(waiting.run_id, Allow())

        assert await scene.activate(waiting.run_id, is_timer=True, meanwhile=answer) == "outdated"
        details = await scene.runs.get(waiting.run_id)
        assert (details.info.status, scene.acted) == ("suspended", ["pay"])

    asyncio.run(scenario())


def test_a_worker_ends_although_what_it_listens_to_swallows_a_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As psycopg does before Python 3.12, if the server's answer comes in the same moment."""
    monkeypatch.setattr(timeout, "CANCEL_AGAIN_S", 0.01)
    swallowed = list[str]()

    async def listen(watcher: RunWatcher) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            swallowed.append("once")
        await asyncio.Event().wait()

    monkeypatch.setattr(RunWatcher, "listen", listen)

    async def scenario() -> None:
        scene, waker = Scene(), HandWaker()
        worker = Worker({"clerk": scene.agent("Done.")}, scene.store, cast("Waker", waker), secret=SECRET)
        serving = asyncio.create_task(worker.run())
        await waker.served.wait()
        await asyncio.sleep(0)
        worker.stop()
        async with asyncio.timeout(30):
            assert await serving
        assert swallowed == ["once"]

    asyncio.run(scenario())


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_run_that_was_cut_off_too_often_ends_if_it_was_cancelled_and_is_set_aside_otherwise(cancelled: bool) -> None:
    async def scenario() -> None:
        scene = Scene()
        run = scene.agent(call("send")).run("Send it.")
        while run.run_state.state != "dispatch_tool":
            await advance(run)
        await hand_over(run)
        for _ in range(5):  # workers that die at this point
            lease = await scene.store.acquire(run.run_id, "a worker", keyring=scene.agent().config.host.keyring)
            await scene.store.release(lease)
        if cancelled:
            await scene.runs.cancel(run.run_id, "sent by mistake")
        expected = ("finished", "cancelled") if cancelled else ("set aside", "")
        assert (await scene.activate(run.run_id, is_timer=False), await scene.ending(run.run_id)) == expected
        assert scene.acted == []

    asyncio.run(scenario())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("calls_an_attempt", [0, 1])
def test_a_run_whose_sub_agent_comes_further_each_time_that_it_is_cut_off_is_not_set_aside(
    calls_an_attempt: int, depth: int
) -> None:
    async def scenario() -> None:
        scene, attempts, done = Scene(), list[Run[Any, Any]](), list[int]()

        @tool(idempotent=True)
        async def look(order: int) -> str:
            """Look, unless the worker dies in this call."""
            if attempts and len(done) == len(attempts) * calls_an_attempt:
                await hand_over(attempts[-1])
            else:
                done.append(order)
            return "seen"

        def agent() -> Agent[Any, Any]:
            made: Agent[Any, Any] = Agent(Steps("look", 9), tools=[look])
            for _ in range(depth):
                host = Host(store=scene.store, secret=SECRET, clock=scene.clock)
                made = Agent(Delegates(), tools=[made.as_tool("helper", "Helps.")], host=host)
            return made

        scene.agent = lambda *_: agent()  # type: ignore[method-assign]
        for _ in range(6):
            found = await agent().unfinished_runs() if attempts else [agent().run("Go.", run_id="r")]
            attempts += found
            with pytest.raises(StaleLease):
                await attempts[-1]
        attempts.clear()
        if calls_an_attempt:
            assert (await scene.activate("r", is_timer=False), await scene.ending("r")) == ("finished", "completed")
            assert done == list(range(9))
        else:
            assert (await scene.activate("r", is_timer=False), done) == ("set aside", [])

    asyncio.run(scenario())


def test_a_queued_run_of_a_person_whose_data_was_erased_is_dropped_and_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        scene, queue, dropped = Scene(), HandWaker(), list[str]()
        submitted, back = list[Activation](), list[str]()

        async def wake(activation: Activation, *, delay_s: float = 0.0) -> bool:
            submitted.append(activation)
            return True

        async def drop(activation: Activation) -> None:
            dropped.append(activation.key)

        async def list_set_aside() -> list[SetAside]:
            return [SetAside(each, "no account") for each in submitted]

        async def put_back(run_id: str) -> bool:
            back.append(run_id)
            return True

        queue.wake, queue.drop = wake, drop  # type: ignore[method-assign, attr-defined]
        queue.list_set_aside, queue.put_back = list_set_aside, put_back  # type: ignore[attr-defined]
        runs = Runs(scene.store, secret=SECRET, waker=cast("Waker", queue))
        ann, bob = [await runs.submit("clerk", "Send it.", actor=Actor(name)) for name in ("ann", "bob")]
        report = await runs.erase(ErasureQuery(actor="ann"))
        assert (report.purged, back, dropped) == ((ann,), [ann], [f"{ann}:0"])
        waker = HandWaker()
        worker = Worker({"clerk": scene.agent(call("send"), "ok")}, scene.store, cast("Waker", waker), secret=SECRET)
        serving = asyncio.create_task(worker.run())
        await waker.served.wait()
        read: list[str | None] = []
        tombstones = scene.store.maintenance.tombstones

        async def reading(run_id: str | None = None) -> Any:
            read.append(run_id)
            return await tombstones(run_id)

        monkeypatch.setattr(scene.store.maintenance, "tombstones", reading)
        words = [await waker.deliver(each) for each in submitted]
        worker.stop()
        await serving
        assert (words, scene.acted) == (["outdated", "finished"], ["send"])
        assert read == [ann]  # and not what remains of all other runs
        assert [head.run_id for head in await scene.store.heads()] == [bob]

    asyncio.run(scenario())


def test_a_run_that_cannot_begin_keeps_its_reason_when_its_worker_is_told_to_stop() -> None:
    workers, aside = list[Worker](), list[tuple[str, float | None]]()

    def deps(context: RunContext) -> dict[str, Any]:
        workers[0].stop()
        raise OSError("the directory is away")

    async def scenario() -> None:
        scene, queue, waker = Scene(), HandWaker(), HandWaker()
        submitted = list[Activation]()

        async def wake(activation: Activation, *, delay_s: float = 0.0) -> bool:
            submitted.append(activation)
            return True

        async def set_aside(activation: Activation, reason: str, until: float | None = None) -> None:
            aside.append((reason, until))

        queue.wake = wake  # type: ignore[method-assign]
        waker.set_aside = set_aside  # type: ignore[method-assign]
        await Runs(scene.store, secret=SECRET, waker=cast("Waker", queue)).submit("clerk", "Go.")
        broken = Agent(ScriptedModel(["Done."]), deps_type=dict, deps_factory=deps)
        workers.append(Worker({"clerk": broken}, scene.store, cast("Waker", waker), secret=SECRET))
        serving = asyncio.create_task(workers[0].run())
        await waker.served.wait()
        await waker.deliver(submitted[0])
        await serving

    asyncio.run(scenario())
    ((reason, until),) = aside
    assert "the directory is away" in reason
    assert until is None


@pytest.mark.parametrize("why", ["it stops", "it stops as it acquires the run", "the store fails"])
def test_a_submitted_run_that_a_worker_does_not_begin_with_stays_in_the_queue(why: str) -> None:
    """Nothing else would find it: it is not cut off."""

    class Failing(MemoryStore):
        async def acquire(self, *arguments: Any, **options: Any) -> Any:
            if workers and why == "the store fails":
                raise StoreError("no space left")
            if workers and why == "it stops as it acquires the run":
                workers[0].stop()
                await serving[0]
            return await super().acquire(*arguments, **options)

    workers, serving, aside = list[Worker](), list[asyncio.Task[bool]](), list[tuple[str, float | None]]()

    async def scenario() -> None:
        scene, queue, waker = Scene(), HandWaker(), HandWaker()
        scene.store, submitted = Failing(), list[Activation]()

        async def wake(activation: Activation, *, delay_s: float = 0.0) -> bool:
            submitted.append(activation)
            return True

        async def set_aside(activation: Activation, reason: str, until: float | None = None) -> None:
            aside.append((activation.key, until))

        queue.wake = wake  # type: ignore[method-assign]
        waker.set_aside = set_aside  # type: ignore[method-assign]
        run_id = await Runs(scene.store, secret=SECRET, waker=cast("Waker", queue)).submit("clerk", "Go.")
        agents = {"clerk": scene.agent("Done.")}
        workers.append(Worker(agents, scene.store, cast("Waker", waker), secret=SECRET))
        serving.append(asyncio.create_task(workers[0].run()))
        await waker.served.wait()
        if why == "it stops":
            workers[0].stop()
        assert await waker.deliver(submitted[0]) == "set aside"
        ((key, until),) = aside
        assert key == f"{run_id}:0"
        assert until is not None  # a worker puts it back
        workers[0].stop()
        await serving[0]
        head = await scene.store.head(run_id)
        assert head is not None
        assert (head.seq, head.owner) == (0, None)

    asyncio.run(scenario())


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_somebody_moves_to_the_queue_of_another_agent_is_not_worked_on_by_it(begun: bool) -> None:
    """The engine's tables are not sealed, and another agent may have tools that this one must not have."""

    async def scenario() -> None:
        scene, waker, queue = Scene(), HandWaker(), HandWaker()
        submitted = list[Activation]()

        async def wake(activation: Activation, *, delay_s: float = 0.0) -> bool:
            submitted.append(activation)
            return True

        queue.wake = wake  # type: ignore[method-assign]
        runs = Runs(scene.store, secret=SECRET, waker=cast("Waker", queue))
        run_id = await runs.submit("chat", "Hello.")
        chat, admin = scene.agent("Hi."), scene.agent(call("send"), "Sent.")
        worker = Worker({"chat": chat, "admin": admin}, scene.store, cast("Waker", waker), secret=SECRET)
        serving = asyncio.create_task(worker.run())
        await waker.served.wait()
        moved = replace(submitted[0], queue=submission_queue("admin", KEY_ID))
        if begun:
            run = chat.run("Hello.", run_id=run_id, tags=["agent:chat"])
            await run.load()
            await advance(run)
            await hand_over(run)
            head = await scene.store.head(run_id)
            assert head is not None
            moved = Activation(run_id, head.epoch, waker.queue)  # of the agent that was named last
        assert await waker.deliver(moved) == ("outdated" if begun else "set aside")
        if begun:
            assert await waker.deliver(replace(moved, queue=submission_queue("chat", KEY_ID))) == "finished"
        worker.stop()
        await serving
        assert scene.acted == []

    asyncio.run(scenario())


def test_nothing_of_an_activated_run_is_read_on_where_its_head_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        scene = Scene()
        reads, ended = asyncio.Event(), asyncio.Event()

        async def read(run_id: str, limit: int) -> Any:
            reads.set()
            try:
                await asyncio.Event().wait()  # as long as the server is away
            finally:
                ended.set()

        async def fail(run_id: str) -> Any:
            await reads.wait()
            raise StoreError("the server is away")

        monkeypatch.setattr(scene.store, "records", read)
        monkeypatch.setattr(scene.store, "head", fail)
        agent = scene.agent()
        worker = Worker({"clerk": agent}, scene.store, cast("Waker", HandWaker()), secret=SECRET)
        queue = worker.queues[-1]
        assert await worker._deliver(Activation("r", 1, queue)) == "store failed"
        assert ended.is_set()

    asyncio.run(scenario())


def test_the_documented_activity_for_temporal_leaves_its_run_to_another_worker_when_temporal_stops_it() -> None:
    pytest.importorskip("temporalio", reason="temporalio is not installed")
    page = (Path(__file__).parents[2] / "docs" / "workers.md").read_text(encoding="utf-8")
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "temporalio" in block)
    begun = asyncio.Event()

    @tool(idempotent=True)
    async def refund(order: int) -> str:
        """Refund an order."""
        begun.set()
        await asyncio.Event().wait()
        return "never"

    clerk = Agent(ScriptedModel([call("refund", order=7)]), tools=[refund])
    given: dict[str, Any] = {"clerk": clerk}
    exec(example.replace("from desk import clerk", "").replace("asyncio.run(main())", ""), given)

    async def scenario() -> None:
        store = MemoryStore()
        temporal, activities = given["ActivityEnvironment"](), given["Activities"](store)
        run = activities.agent.run("Refund order 7.", run_id="r")
        await advance(run)
        await hand_over(run)
        active = asyncio.create_task(temporal.run(activities.go_on, "r"))
        await begun.wait()
        temporal.cancel()
        with pytest.raises(asyncio.CancelledError):
            await active
        head = await store.head("r")
        assert head is not None
        assert (head.status, head.owner) == ("running", None)

    asyncio.run(scenario())
