"""Cancelling a run, by ``cancel`` or by its task: it ends at once, with a result for every call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from agentfsm import (
    Agent,
    AgentGuardrails,
    Allow,
    Event,
    Message,
    ModelRequest,
    Reply,
    RunCancelled,
    RunResult,
    ToolCall,
    ToolStarted,
    TransientProviderError,
    Transitioned,
    hook,
    observer,
    tool,
)
from agentfsm.loop.events import UserInputRequested
from agentfsm.runtime.run import Run
from agentfsm.testing import FakeClock, call
from tests.helpers.scenarios import assert_cancelled, check_result, look, run_async, scripted_agent, with_scripted_run

# -- cancelling ---------------------------------------------------------------------------------------


class Stalling:
    """A model that says that it was asked, and never answers."""

    name = "stalling"

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def reply(self, request: Any) -> Any:
        self.asked.set()
        await asyncio.Event().wait()


async def when(condition: Callable[[], bool], then: Callable[[], None]) -> None:
    for _ in range(1000):
        if condition():
            then()
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


@pytest.mark.parametrize("reason", ["cancelled", "enough", ""])
def test_cancelled_before_it_starts(reason):
    async def play(run: Run) -> None:
        run.cancel(reason)
        assert_cancelled(await run, reason)
        assert run.run_state.model_calls == 0

    with_scripted_run(play)


def test_cancelled_during_a_model_call():
    model = Stalling()
    agent = Agent(model)

    async def scene() -> None:
        run = agent.run("go")
        result, _ = await asyncio.gather(run, when(model.asked.is_set, run.cancel))
        assert_cancelled(result)

    run_async(scene)


@pytest.mark.parametrize("parallel", [False, True])
def test_cancelled_during_tools_each_call_still_has_its_result(parallel):
    started: list[str] = []

    @tool(parallel=parallel)
    async def hang(what: str) -> str:
        started.append(what)
        if what == "quick":
            return "quick result"
        await asyncio.Event().wait()
        return ""

    async def play(run: Run) -> None:
        script_ready = 3 if parallel else 2
        result, _ = await asyncio.gather(run, when(lambda: len(started) == script_ready, run.cancel))
        assert_cancelled(result)
        tools = [m.content for m in result.messages if m.role == "tool"]
        assert tools[0] == "quick result"
        assert len(tools) == 3
        assert all("cancelled" in text for text in tools[1:])

    calls = [call("hang", what=w) for w in ("quick", "slow", "slower")]
    with_scripted_run(play, calls, "done", tools=[hang])


def test_cancelled_during_a_plain_tool_which_is_abandoned():
    import threading

    started, free = threading.Event(), threading.Event()

    @tool
    def hang() -> str:
        started.set()
        free.wait(10)
        return "too late"

    async def play(run: Run) -> None:
        async def stop() -> None:
            await asyncio.get_running_loop().run_in_executor(None, started.wait, 10)
            run.cancel()

        result, _ = await asyncio.gather(run, stop())
        assert_cancelled(result)
        free.set()

    with_scripted_run(play, call("hang"), "done", tools=[hang])


def test_cancelled_during_a_backoff():
    class Sleeping(FakeClock):
        def __init__(self) -> None:
            super().__init__()
            self.asleep = asyncio.Event()

        async def sleep(self, seconds: float) -> None:
            self.asleep.set()
            await asyncio.Event().wait()

    clock = Sleeping()

    async def play(run: Run) -> None:
        result, _ = await asyncio.gather(run, when(clock.asleep.is_set, run.cancel))
        assert_cancelled(result)
        assert result.run_state.model_calls == 1

    with_scripted_run(play, TransientProviderError("busy"), "done", clock=clock)


@pytest.mark.parametrize("state", ["pre_step", "call_llm", "post_llm", "dispatch_tool", "post_tool"])
def test_cancelled_by_a_hook_at_any_state(state):
    runs: list[Run] = []
    stop = hook(state)(lambda context: runs[0].cancel("from a hook"))

    async def play(run: Run) -> None:
        runs.append(run)
        assert_cancelled(await run, "from a hook")

    with_scripted_run(play, hooks=[stop])


def test_cancelled_by_a_hook_that_waits():
    runs: list[Run] = []

    async def stop(context: Any) -> None:
        runs[0].cancel("from a hook")
        await asyncio.Event().wait()

    async def play(run: Run) -> None:
        runs.append(run)
        assert_cancelled(await run, "from a hook")
        assert run.run_state.model_calls == 1

    with_scripted_run(play, hooks=[hook("post_llm")(stop)])


@pytest.mark.parametrize("waits", [False, True])
def test_cancelled_from_inside_a_tool(waits):
    runs: list[Run] = []

    @tool
    async def stop() -> str:
        runs[0].cancel("from a tool")
        if waits:
            await asyncio.Event().wait()
        return "stopped"

    async def play(run: Run) -> None:
        runs.append(run)
        result = await run
        assert_cancelled(result, "from a tool")
        assert ("stopped" in [m.content for m in result.messages]) is not waits

    with_scripted_run(play, [call("stop"), call("look")], "done", tools=[stop, look])


def test_cancelled_from_inside_a_plain_tool_in_its_thread():
    runs: list[Run] = []

    @tool
    def stop() -> str:
        runs[0].cancel("from a thread")
        return "stopped"

    async def play(run: Run) -> None:
        runs.append(run)
        assert_cancelled(await run, "from a thread")

    with_scripted_run(play, call("stop"), "done", tools=[stop])


def test_a_tool_that_swallows_the_cancellation_has_its_result_and_the_run_still_ends():
    started = asyncio.Event()

    @tool
    async def stubborn() -> str:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return "done anyway"

    async def play(run: Run) -> None:
        result, _ = await asyncio.gather(run, when(started.is_set, run.cancel))
        assert_cancelled(result)
        assert "done anyway" in [m.content for m in result.messages]
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    with_scripted_run(play, call("stubborn"), "done", tools=[stubborn])


def test_cancelled_while_iterating():
    async def play(run: Run) -> None:
        events = []
        async for event in run:
            events.append(event)
            if isinstance(event, ToolStarted):
                run.cancel("seen enough")
        assert_cancelled(run.result, "seen enough")
        assert isinstance(events[-1], RunCancelled)

    with_scripted_run(play)


def test_the_first_reason_is_kept():
    async def play(run: Run) -> None:
        run.cancel("first")
        run.cancel("second")
        assert_cancelled(await run, "first")

    with_scripted_run(play)


def test_a_run_that_is_over_stays_as_it_is():
    async def play(run: Run) -> None:
        result = await run
        run.cancel()
        assert (await run).outcome is result.outcome
        assert result.ok

    with_scripted_run(play)


def test_cancelled_while_it_waits_for_a_human():
    @tool(requires_approval=True)
    def pay() -> str:
        return "paid"

    agent, model = scripted_agent(call("pay"), "done", tools=[pay])

    async def scene() -> None:
        first = await agent.run("go")
        assert isinstance(first.outcome, UserInputRequested)
        run = agent.resume(first.outcome.suspension_record, Allow())
        run.cancel("never mind")
        result = await run
        assert_cancelled(result, "never mind")
        check_result(result, model)

    run_async(scene)


@pytest.mark.parametrize("state", ["call_llm", "dispatch_tool"])
def test_cancelled_by_a_hook_the_effect_does_not_start(state):
    """Not even that part of it that would run before its first await."""
    began: list[str] = []

    @tool
    async def act() -> str:
        began.append("act")
        return "done"

    class Eager:
        name = "eager"

        async def reply(self, request: ModelRequest) -> Reply:
            began.append("reply")
            return Reply(Message.assistant("", (ToolCall("c1", "act"),)))

    def at_the_door(event: Event) -> None:
        if isinstance(event, Transitioned) and event.target == state:
            run.cancel("stop there")

    async def scene() -> RunResult:
        return await run

    run = Agent(Eager(), tools=[act], hooks=[observer(at_the_door)]).run("go")
    assert_cancelled(run_async(scene), "stop there")
    assert began == ([] if state == "call_llm" else ["reply"])


# -- cancelled from outside ---------------------------------------------------------------------------


async def use(run: Run, how: str) -> None:
    """Await a run, or iterate it, to its end."""
    if how == "await":
        await run
    else:
        async for _ in run:
            pass


async def cut_off(run: Run, started: asyncio.Event, how: str) -> None:
    """Cancel the task that awaits or iterates a run, once something has started."""
    task = asyncio.create_task(use(run, how))
    await when(started.is_set, lambda: None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert run.finished


def outside(started: asyncio.Event, seen: list[str], how: str) -> Callable[[Run], Awaitable[None]]:
    """Play: the task that awaits or iterates a run is cancelled once something has started."""

    async def play(run: Run) -> None:
        await cut_off(run, started, how)
        assert_cancelled(run.result, "the task was cancelled")
        assert seen == ["terminal"]
        assert (await run).outcome is run.result.outcome

    return play


@pytest.mark.parametrize("how", ["await", "iterate"])
@pytest.mark.parametrize("parallel", [False, True])
def test_a_cancellation_of_the_task_passes_through_and_the_run_has_ended_consistently(how, parallel):
    started, seen = asyncio.Event(), []

    @tool(parallel=parallel)
    async def hang(n: int) -> str:
        started.set()
        await asyncio.Event().wait()
        return ""

    end = hook("terminal")(lambda c: seen.append(c.state))
    play = outside(started, seen, how)
    with_scripted_run(play, [call("hang", n=1), call("hang", n=2)], "done", tools=[hang], hooks=[end])


@pytest.mark.parametrize("how", ["await", "iterate"])
def test_a_cancellation_of_the_task_during_a_model_call(how):
    model, seen = Stalling(), []
    agent = Agent(model, hooks=[hook("terminal")(lambda c: seen.append(c.state))])
    run_async(lambda: outside(model.asked, seen, how)(agent.run("go")))


@pytest.mark.parametrize("how", ["await", "iterate"])
def test_a_cancellation_of_the_task_during_a_hook(how):
    started, seen = asyncio.Event(), []

    async def hang(context: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    hooks = [hook("post_llm")(hang), hook("terminal")(lambda c: seen.append(c.state))]
    with_scripted_run(outside(started, seen, how), hooks=hooks)


@pytest.mark.parametrize("how", ["await", "iterate"])
def test_a_cancellation_of_the_task_during_the_last_hook_comes_too_late_to_change_the_ending(how):
    started = asyncio.Event()

    async def hang(context: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    async def play(run: Run) -> None:
        await cut_off(run, started, how)
        assert run.result.output == "done"

    with_scripted_run(play, "done", hooks=[hook("terminal")(hang)])


@pytest.mark.parametrize("how", ["await", "iterate"])
def test_a_timeout_around_a_run_ends_it(how):
    model = Stalling()
    agent = Agent(model)

    async def scene() -> None:
        run = agent.run("go")

        async def limited() -> None:
            async with asyncio.timeout(0.02):
                await use(run, how)

        with pytest.raises(TimeoutError):
            await limited()
        assert_cancelled(run.result, "the task was cancelled")
        assert (await run).outcome is run.result.outcome
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    run_async(scene)


def test_a_cancellation_from_both_sides_is_one_from_outside():
    model = Stalling()
    agent = Agent(model)

    async def scene() -> None:
        run = agent.run("go")
        task = asyncio.ensure_future(run)
        await model.asked.wait()
        run.cancel("from inside")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert task.cancelling() == 1
        assert_cancelled(run.result, "from inside")

    run_async(scene)


def test_a_task_group_that_fails_ends_the_runs_in_it():
    model = Stalling()
    agent = Agent(model)

    async def scene() -> None:
        run = agent.run("go")

        async def use() -> None:
            await run

        async def fail() -> None:
            await model.asked.wait()
            raise ValueError("another task")

        async def both() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(use())
                group.create_task(fail())

        with pytest.raises(ExceptionGroup):
            await both()
        assert_cancelled(run.result, "the task was cancelled")

    run_async(scene)


def test_a_second_cancellation_during_the_first_leaves_a_run_that_can_be_awaited():
    started, free = asyncio.Event(), asyncio.Event()

    async def slow_end(context: Any) -> None:
        started.set()
        await free.wait()

    model = Stalling()
    agent = Agent(model, hooks=[hook("terminal")(slow_end)])

    async def scene() -> None:
        run = agent.run("go")

        async def use() -> None:
            async for _ in run:
                pass

        task = asyncio.create_task(use())
        await model.asked.wait()
        task.cancel()
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        free.set()
        assert_cancelled(await run, "the task was cancelled")

    run_async(scene)


# -- what user code does to the count of its task -------------------------------------------------------


async def fail_soon(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


async def failing_group() -> None:
    """A group that fails after its block has ended: before Python 3.13 its task remains as if it were cancelled."""
    async with asyncio.TaskGroup() as group:
        group.create_task(fail_soon(ValueError("of the group")))


async def use_by(run: Run, how: str) -> None:
    if how != "step":
        await use(run, how)
    while not run.finished:
        await run.step()


def count_cancellations() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


USES = pytest.mark.parametrize("how", ["await", "iterate", "step"])


@USES
@pytest.mark.parametrize("parallel", [False, True])
def test_a_task_group_that_fails_in_a_tool_is_a_failure_of_the_tool(how, parallel):
    @tool(parallel=parallel)
    async def group() -> str:
        await failing_group()
        return ""

    async def play(run: Run) -> None:
        await use_by(run, how)
        assert count_cancellations() == 0
        assert run.result.ok
        results = [m for m in run.result.messages if m.role == "tool"]
        assert [("ExceptionGroup" in m.content, m.is_error) for m in results] == [(True, True)] * 3

    with_scripted_run(play, [call("group"), call("group")], call("group"), "done", tools=[group])


@USES
@pytest.mark.parametrize("parallel", [False, True])
def test_a_tool_that_handles_the_failure_of_its_group_goes_on(how, parallel):
    # longer than a cancelled tool would have to end
    @tool(parallel=parallel)
    async def group(n: int) -> str:
        with pytest.raises(ExceptionGroup):
            await failing_group()
        await asyncio.sleep(0.05)
        return f"went on {n}"

    async def play(run: Run) -> None:
        await use_by(run, how)
        assert [m.content for m in run.result.messages if m.role == "tool"] == ["went on 1", "went on 2"]

    limits = AgentGuardrails(cancel_grace_s=0.01)
    script = [call("group", n=1), call("group", n=2)], "done"
    with_scripted_run(play, *script, tools=[group], guardrails=limits)


@USES
@pytest.mark.parametrize("parallel", [False, True])
def test_the_time_limit_of_a_tool_holds_after_its_group_has_failed(how, parallel):
    @tool(timeout=0.05, parallel=parallel)
    async def group(n: int) -> str:
        with pytest.raises(ExceptionGroup):
            await failing_group()
        await asyncio.Event().wait()
        return ""

    async def play(run: Run) -> None:
        await use_by(run, how)
        assert run.result.ok
        assert count_cancellations() == 0
        results = [m.content for m in run.result.messages if m.role == "tool"]
        assert len(results) == 2
        assert all("timed out after 0.05 s" in text for text in results)

    with_scripted_run(play, [call("group", n=1), call("group", n=2)], "done", tools=[group])


@USES
def test_a_group_that_is_abandoned_at_the_time_limit_does_not_cancel_the_run(how):
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                if closing:
                    raise

    closing: list[bool] = []

    @tool(timeout=0.01)
    async def group() -> str:
        async with asyncio.TaskGroup() as tasks:
            left.append(tasks.create_task(stubborn()))
            tasks.create_task(fail_soon(ValueError("of the group")))
        return ""

    left: list[asyncio.Task[None]] = []

    async def play(run: Run) -> None:
        await use_by(run, how)
        closing.append(True)
        left[0].cancel()
        await asyncio.wait(left)
        assert run.result.ok
        assert count_cancellations() == 0
        assert "was abandoned" in run.result.messages[-2].content

    limits = AgentGuardrails(cancel_grace_s=0.01)
    with_scripted_run(play, call("group"), "done", tools=[group], guardrails=limits)


def test_a_hook_whose_group_fails_does_not_disturb_the_group_of_a_tool():
    @hook("call_llm", fail_open=True)
    async def group_of_hook(context: Any) -> None:
        await failing_group()

    @tool
    async def group() -> str:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail_soon(ValueError("of the tool")))
            await asyncio.Event().wait()
        return ""

    async def play(run: Run) -> None:
        result = await run
        assert "ExceptionGroup" in result.messages[-2].content
        assert count_cancellations() == 0

    with_scripted_run(play, call("group"), "done", tools=[group], hooks=[group_of_hook])


@USES
@pytest.mark.parametrize("parallel", [False, True])
def test_a_cancellation_from_outside_counts_at_the_same_time_as_one_of_a_group(how, parallel):
    tasks: list[asyncio.Task[None]] = []

    async def cancel_the_run_and_fail() -> None:
        await asyncio.sleep(0)
        tasks[0].cancel()
        raise ValueError("of the group")

    @tool(parallel=parallel)
    async def group(n: int) -> str:
        with suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(cancel_the_run_and_fail())
        return "suppressed"

    async def play(run: Run) -> None:
        tasks.append(asyncio.create_task(use_by(run, how)))
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert_cancelled(run.result, "the task was cancelled")

    with_scripted_run(play, [call("group", n=1), call("group", n=2)], "done", tools=[group])


@USES
def test_a_cancellation_from_outside_that_a_tool_suppresses_stands(how):
    started = asyncio.Event()

    @tool
    async def suppressing() -> str:
        started.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "as if nothing had happened"

    async def play(run: Run) -> None:
        task = asyncio.create_task(use_by(run, how))
        await started.wait()
        task.cancel("from outside")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_cancelled(run.result, "the task was cancelled")

    with_scripted_run(play, call("suppressing"), "done", tools=[suppressing])


@USES
def test_a_run_that_is_cancelled_before_its_first_effect_has_ended(how):
    async def play(run: Run) -> None:
        task = asyncio.create_task(use_by(run, how))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert run.finished

    run_async(lambda: play(Agent(Stalling()).run("go")))


def test_a_run_whose_coroutine_is_closed_leaves_no_task():
    model = Stalling()

    async def scene() -> None:
        run = Agent(model).run("go")
        steps = run.__await__()
        next(steps)
        await model.asked.wait()
        next(steps)
        steps.close()
        for _ in range(100):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert run.finished

    run_async(scene)


def test_a_consumer_of_events_may_handle_the_failure_of_a_task_group_of_its_own():
    go_on = asyncio.Event()

    @tool
    async def slow() -> str:
        await go_on.wait()
        return "done"

    async def fail() -> None:
        raise ValueError("handled by the consumer")

    async def look_up() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(asyncio.sleep(0))

    async def play(run: Run) -> None:
        async for event in run:
            if isinstance(event, ToolStarted):
                with pytest.raises(ExceptionGroup):
                    await look_up()
                go_on.set()
        assert run.result.output == "fine"

    with_scripted_run(play, call("slow"), "fine", tools=[slow])
