"""Cancelling one running tool call: its result says so, and the run goes on, the same when it is replayed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Event,
    Host,
    MemoryStore,
    Run,
    RunCompleted,
    State,
    StateContext,
    StateSpec,
    ToolFinished,
    ToolStarted,
    Transition,
    tool,
)
from agentfsm.journal.replay import replay
from agentfsm.journal.verification import verify_stored_run
from agentfsm.testing import ScriptedModel, call

CUT_OFF = "Cancelled while it ran: too slow. Nobody knows what it had done by then."


@tool(parallel=True)
async def wait() -> str:
    """Wait for ever."""
    await asyncio.Event().wait()
    return "never"


@tool(parallel=True)
async def quick() -> str:
    """Be quick."""
    return "done"


async def drive(run: Run, on_start: Callable[[ToolStarted], Any]) -> list[Event]:
    events: list[Event] = []
    async for event in run:
        events.append(event)
        if isinstance(event, ToolStarted):
            on_start(event)
    return events


def results(events: list[Event]) -> list[tuple[str, str, str]]:
    return [(e.result.call_id, e.result.status, e.result.content) for e in events if isinstance(e, ToolFinished)]


def agent(script: list[Any], *tools: Any, **options: Any) -> Agent:
    host = Host(store=MemoryStore(), secret=b"k", monitor="raise")
    return Agent(ScriptedModel(script), tools=list(tools), host=host, **options)


@pytest.mark.parametrize("preset", ["standard", "strict"])
def test_a_running_call_is_cancelled_and_the_run_goes_on(preset):
    mine = agent([call("wait", "c1"), "I gave up waiting."], wait, preset=preset)
    run = mine.run("Go.")
    events = asyncio.run(drive(run, lambda event: run.cancel_call(event.call.id, "too slow")))
    assert results(events) == [("c1", "cut_off", CUT_OFF)]
    assert isinstance(events[-1], RunCompleted)
    answer = next(message for message in run.result.messages if message.role == "tool")
    assert (answer.content, answer.is_error) == (CUT_OFF, True)


def test_it_is_journaled_verified_and_replayed():
    mine = agent([call("wait", "c1"), "I gave up waiting."], wait)
    run = mine.run("Go.")
    asyncio.run(drive(run, lambda event: run.cancel_call("c1", "too slow")))
    store = mine.config.host.store
    report = asyncio.run(verify_stored_run(store, run.run_id, keyring=mine.config.host.keyring))
    assert (report.code, report.open) == (0, ())
    again = replay(asyncio.run(store.records(run.run_id)), mine.graph)
    assert (again.divergences, again.unknown) == ((), "")
    (ended,) = [record.data for record in run.journal if record.kind == "effect.result"]
    assert ended["out"]["status"] == "cut_off"


def test_the_other_calls_of_the_reply_are_not_touched():
    mine = agent([[call("wait", "c1"), call("quick", "c2"), call("wait", "c3")], "Done."], wait, quick)
    run = mine.run("Go.")

    def cancel(event: ToolStarted) -> None:
        if event.call.id == "c3":
            assert run.cancel_call("c1", "too slow")
            assert run.cancel_call("c3", "too slow")

    events = asyncio.run(drive(run, cancel))
    assert sorted(results(events)) == [("c1", "cut_off", CUT_OFF), ("c2", "done", "done"), ("c3", "cut_off", CUT_OFF)]
    assert run.result.output == "Done."


def test_a_call_that_does_not_run_cannot_be_cancelled():
    mine = agent([call("quick", "c1"), call("wait", "c2"), "Done."], quick, wait)
    run = mine.run("Go.")
    said: list[bool] = [run.cancel_call("c1")]  # nothing has begun

    def cancel(event: ToolStarted) -> None:
        if event.call.id == "c2":
            said.extend([run.cancel_call("c1"), run.cancel_call("c9"), run.cancel_call("c2")])

    asyncio.run(drive(run, cancel))
    said.append(run.cancel_call("c2"))
    assert said == [False, False, False, True, False]


def test_a_call_that_ended_in_the_same_moment_keeps_its_result_and_nothing_else_is_cut_off():
    class Asked(ScriptedModel):
        async def reply(self, request: Any) -> Any:
            await asyncio.sleep(0)
            return await super().reply(request)

    @tool
    async def soon() -> str:
        """Be done in a moment."""
        assert run.cancel_call("c1")  # arrives once the call has returned
        return "done"

    run = Agent(Asked([call("soon", "c1"), "Done."]), tools=[soon]).run("Go.")
    assert results(asyncio.run(drive(run, lambda _: None))) == [("c1", "done", "done")]
    assert run.result.output == "Done."


def test_it_may_be_called_from_another_thread():
    run = agent([call("wait", "c1"), "Done."], wait).run("Go.")
    said: list[bool] = []

    def cancel(_: ToolStarted) -> None:
        thread = threading.Thread(target=lambda: said.append(run.cancel_call("c1", "too slow")))
        thread.start()
        thread.join()

    assert results(asyncio.run(drive(run, cancel))) == [("c1", "cut_off", CUT_OFF)]
    assert said == [True]


def test_a_plain_function_goes_on_in_its_thread_and_the_run_without_it():
    gone_on = threading.Event()
    released = threading.Event()

    @tool
    def block() -> str:
        """Block."""
        released.wait(10)
        gone_on.set()
        return "late"

    run = agent([call("block", "c1"), "Done."], block).run("Go.")
    events = asyncio.run(drive(run, lambda _: run.cancel_call("c1", "too slow")))
    assert results(events) == [("c1", "cut_off", CUT_OFF)]
    assert isinstance(events[-1], RunCompleted)
    released.set()
    assert gone_on.wait(10)


def test_one_that_swallows_its_cancellation_is_abandoned():
    @tool
    async def stubborn() -> str:
        """Refuse."""
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    limits = AgentGuardrails(cancel_grace_s=0.01)
    run = agent([call("stubborn", "c1"), "Done."], stubborn, guardrails=limits).run("Go.")
    assert results(asyncio.run(drive(run, lambda _: run.cancel_call("c1", "too slow")))) == [("c1", "cut_off", CUT_OFF)]
    assert run.result.output == "Done."


def test_it_is_no_failure_and_is_not_run_again():
    @tool(idempotent=True, retryable=True)
    async def lazy() -> str:
        """Wait for ever."""
        await asyncio.Event().wait()
        return "never"

    run = agent([call("lazy", "c1"), "Done."], lazy).run("Go.")
    events = asyncio.run(drive(run, lambda _: run.cancel_call("c1", "too slow")))
    assert sum(isinstance(event, ToolStarted) for event in events) == 1
    assert "recover" not in {decision.target for decision in run.decisions}


def test_a_sub_agent_is_cancelled_and_what_it_used_is_charged():
    desk = Agent(ScriptedModel([call("wait"), "Never."]), tools=[wait])
    run = agent([call("desk", "c1", task="Go."), "Done."], desk.as_tool("desk", "-")).run("Go.")
    inner: list[str] = []

    async def main() -> list[Event]:
        events: list[Event] = []
        async for event in run:
            events.append(event)
            if (name := type(getattr(event, "event", None)).__name__) == "ToolStarted":
                assert run.cancel_call("c1", "too slow")
            inner.append(name)
        return events

    events = asyncio.run(main())
    assert results(events) == [("c1", "cut_off", CUT_OFF)]
    assert inner.count("RunCancelled") == 1
    assert run.result.output == "Done."
    assert run.result.run_state.model_calls == 3


def test_a_call_of_an_own_state_can_be_cancelled_too():
    seen: list[tuple[str, str]] = []

    async def fetch(context: StateContext) -> None:
        result = await context.call_tool("wait", {})
        seen.append((result.status, result.content))

    graph = LOOP.with_state(
        StateSpec("fetch", effect=fetch),
        [Transition("fetch", None, State.TERMINAL, ends="completed")],
        entered_by="post_llm.otherwise",
    )
    run = Agent(ScriptedModel(["Done."]), tools=[wait], graph=graph).run("Go.")
    asyncio.run(drive(run, lambda event: run.cancel_call(event.call.id, "too slow")))
    assert seen == [("cut_off", CUT_OFF)]
    assert run.result.output == "Done."
