"""The driver: it takes rows of the table and nothing else, whatever user code does."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Action,
    Agent,
    AgentGuardrails,
    Failure,
    FailureKind,
    Handoff,
    Message,
    Reply,
    RunAborted,
    RunCancelled,
    RunResult,
    UserInputRequested,
    tool,
)
from agentfsm.loop.state import RunState
from agentfsm.runtime.run import Run
from agentfsm.testing import call
from tests.helpers.scenarios import (
    assert_aborted,
    check_result,
    look,
    run_agent,
    run_async,
    run_script,
    scripted_agent,
    transcript_of,
)

# -- a plain run --------------------------------------------------------------------------------------


def count_run_states() -> int:
    return sum(isinstance(each, RunState) for each in gc.get_objects())


@tool(requires_approval=True)
async def wipe(path: str) -> str:
    """Wipe a disk."""
    return path


async def await_run(agent: Agent) -> None:
    await agent.run("go")


async def iterate_run(agent: Agent) -> None:
    async for _ in agent.run("go"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("use", [await_run, iterate_run])
@pytest.mark.parametrize(
    ("name", "arguments"), [("look", {"where": "here"}), ("wipe", {"path": "/"}), ("missing", {}), ("look", {"at": 1})]
)
def test_a_run_that_nobody_uses_any_more_is_freed_at_once(use, name, arguments):
    # A run in a reference cycle keeps its whole history until the garbage collector looks at all objects.
    async def scene() -> None:
        agent, _ = scripted_agent(call(name, **arguments), "done", tools=[look, wipe])
        gc.collect()
        gc.disable()
        try:
            before = count_run_states()
            await use(agent)
            assert count_run_states() == before
        finally:
            gc.enable()

    run_async(scene)


def test_a_run_takes_only_transitions_of_the_table():
    result = run_script(call("look", where="here"), "done", tools=[look])
    assert [d.transition.id for d in result.decisions] == [
        "pre_step.otherwise",
        "call_llm.otherwise",
        "post_llm.tool_calls",
        "dispatch_tool.otherwise",
        "post_tool.otherwise",
        "pre_step.otherwise",
        "call_llm.otherwise",
        "post_llm.otherwise",
    ]
    assert transcript_of(result) == [("user", "go"), ("assistant", ""), ("tool", "seen here"), ("assistant", "done")]
    assert (result.run_state.steps, result.run_state.model_calls) == (2, 2)


# -- code of the user's that raises -------------------------------------------------------------------


class Broken:
    """A policy whose every question raises."""

    def __init__(self, where: str) -> None:
        self.where = where

    def retry_budget(self, kind: FailureKind) -> int:
        return 1

    def backoff(self, kind: FailureKind, attempt: int) -> float:
        if self.where == "backoff":
            raise ZeroDivisionError("no patience")
        return 0.0

    def decide(self, failure: Failure, state: RunState) -> Action:
        if self.where == "decide":
            raise ZeroDivisionError("no idea")
        return "shrug" if self.where == "word" else Action.retry  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("where", "words"), [("decide", "no idea"), ("backoff", "no patience"), ("word", "'shrug' is not a valid Action")]
)
def test_a_policy_that_raises_aborts_the_run(where, words):
    result = run_script(call("nothing"), "done", policy=Broken(where))
    assert_aborted(result, words)
    assert result.decisions[-1].source == "recover"


@pytest.mark.parametrize("state", ["pre_step", "call_llm", "post_llm", "dispatch_tool", "post_tool", "recover"])
def test_a_detector_that_raises_aborts_the_run_in_any_state(state):
    def mine(run: RunState) -> Failure | None:
        raise RuntimeError("blind")

    target = "terminal" if state == "recover" else "recover"
    script = (call("nothing"), "done") if state == "recover" else (call("look"), "done")
    ends = "partial" if state == "recover" else ""
    graph = LOOP.with_detector(state, mine, target=target, ends=ends)
    result = run_script(*script, graph=graph, tools=[look])
    assert_aborted(result, f"{state}.mine raised RuntimeError: blind")
    assert result.decisions[-1].source == state


def test_a_model_that_returns_something_else_than_a_reply_aborts_or_fails_in_order():
    class Odd:
        name = "odd"

        async def reply(self, request: Any) -> Any:
            return "just a text"

    result = check_result(run_async(lambda: run_agent(Agent(Odd()))))  # type: ignore[arg-type]
    assert isinstance(result.outcome, Handoff | RunAborted)


def test_a_guardrail_that_is_spent_by_a_raising_tool_is_no_exception_of_the_run():
    @tool
    def fail(n: int) -> str:
        raise ValueError(f"broken {n}")

    result = run_script(*[call("fail", n=n) for n in range(6)], tools=[fail])
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure.kind is FailureKind.tool_error


@pytest.mark.parametrize("reply", [Reply(None), Reply(Message.assistant("x"), usage=None), Reply(Message.user("x"))])
def test_a_reply_that_cannot_be_applied_ends_the_run_in_order(reply):
    class Odd:
        name = "odd"

        async def reply(self, request: Any) -> Any:
            return reply

    result = run_async(lambda: run_agent(Agent(Odd(), guardrails=AgentGuardrails(max_iterations=1, on_limit="stop"))))
    assert result.state == "terminal"


@pytest.mark.parametrize("where", ["recall", "remember"])
def test_a_cancellation_of_the_task_while_the_memory_works(where):
    started = asyncio.Event()

    class Slow:
        async def recall(self, prompt: str) -> str:
            return await self.hang("recall")

        async def remember(self, messages: Any) -> None:
            await self.hang("remember")

        async def hang(self, which: str) -> str:
            if which == where:
                started.set()
                await asyncio.Event().wait()
            return ""

    agent, _ = scripted_agent("done", memory=Slow())

    async def scene() -> RunResult:
        run = agent.run("go")

        async def use() -> None:
            await run

        task = asyncio.create_task(use())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return run.result

    assert check_result(run_async(scene)).ok is (where == "remember")


# -- a run that never waits -----------------------------------------------------------------------------


@tool
async def busy(n: int) -> str:
    """Compute for longer than a run may keep its event loop, without ever waiting."""
    end = time.perf_counter() + 0.006
    while time.perf_counter() < end:
        pass
    return f"busy {n}"


ENDLESS = AgentGuardrails(max_iterations=100_000, loop_hard_threshold=20)


def endless_agent() -> Agent:
    """An agent whose model calls tools forever, and whose effects never wait."""

    class Endless:
        name = "endless"

        async def reply(self, request: Any) -> Reply:
            n = len(request.messages)
            return Reply(Message.assistant("", (call("busy", f"c{n}", n=n),)))

    return Agent(Endless(), tools=[busy], guardrails=ENDLESS)


@pytest.mark.parametrize("how", ["loop", "thread", "wait_for", "timeout"])
def test_a_run_whose_effects_never_wait_can_be_cancelled_and_timed_out(how):
    async def scene() -> Run:
        run = endless_agent().run("go")
        match how:
            case "loop":
                asyncio.get_running_loop().call_later(0.02, run.cancel, "enough")
                await run
            case "thread":
                threading.Timer(0.02, run.cancel, ("enough",)).start()
                await run
            case "wait_for":
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(run, 0.02)
            case _:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await run
        return run

    assert isinstance(check_result(run_async(scene).result).outcome, RunCancelled)


def test_the_time_limit_of_a_run_whose_effects_never_wait_takes_effect():
    limits = ENDLESS.model_copy(update={"max_execution_time_s": 0.03, "on_limit": "stop"})
    agent = endless_agent()

    async def scene() -> RunResult:
        return await Agent(agent._config.model, tools=[busy], guardrails=limits).run("go")

    assert run_async(scene).outcome.failure.kind is FailureKind.time_limit


def test_a_run_whose_effects_never_wait_lets_others_run():
    ticks: list[int] = []

    async def ticking(run: Run) -> None:
        while len(ticks) < 5:
            ticks.append(len(run.decisions))
            await asyncio.sleep(0)
        run.cancel()

    async def scene() -> None:
        run = endless_agent().run("go")
        await asyncio.gather(run, ticking(run))

    run_async(scene)
    assert len(ticks) == 5


def test_a_run_takes_at_most_so_many_moves_and_then_it_is_aborted():
    limits = AgentGuardrails(max_moves=13)
    result = run_script(*[call("look", where=str(n)) for n in range(9)], tools=[look], guardrails=limits)
    assert len(result.decisions) == 14
    assert_aborted(result, "has made 13 moves without an end or a wait")


def test_a_wait_for_a_person_starts_the_count_of_moves_anew():
    limits = AgentGuardrails(max_moves=13, max_iterations=2, max_steps=99)
    agent, _ = scripted_agent(*[call("look", where=str(n)) for n in range(9)], tools=[look], guardrails=limits)

    async def scene() -> list[RunResult]:
        results = [await agent.run("go")]
        for _ in range(2):
            results.append(await agent.resume(results[-1].outcome.suspension_record, "go on"))
        return results

    results = run_async(scene)
    assert [type(r.outcome) for r in results] == [UserInputRequested] * 3
    assert results[-1].run_state.model_calls == 6
