"""A run as its caller sees it: awaited, iterated, left and taken up, cancelled, closed; and never two at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentfsm import (
    Agent,
    Allow,
    Message,
    RunCancelled,
    RunCompleted,
    RunError,
    RunResult,
    RunStarted,
    SkipCall,
    ToolStarted,
    TransientProviderError,
    Transitioned,
    hook,
    tool,
)
from agentfsm.core.events import Ending, ModelReplied, ToolFinished, UserInputRequested
from agentfsm.runtime.run import Run
from agentfsm.testing import FakeClock, RecordingModel, call
from tests.runtime.scenes import agent_on, all_events, checked, drive
from tests.transcripts import check_requests, check_transcript


@tool
def look(where: str = "") -> str:
    """Look somewhere."""
    return f"seen {where}"


SCRIPT = (call("look", where="here"), "done")


def scene_of(play: Callable[[Run], Awaitable[Any]], *script: Any, **parts: Any) -> Any:
    """Play with one run of a script, and check what the model was sent and what the run left."""
    agent, model = agent_on(*(script or SCRIPT), **{"tools": [look], **parts})

    async def scene() -> Any:
        run = agent.run("go")
        came = await play(run)
        check_requests(model.requests)
        if run.finished and run.state.state == "terminal":
            check_transcript(run.state.messages, request=False)
        return came

    return drive(scene)


# -- awaiting -----------------------------------------------------------------------------------------


def test_awaiting_a_run_gives_its_result():
    async def play(run: Run) -> None:
        assert not run.finished
        result = await run
        assert run.finished
        assert (result.output, result.ok, result.state) == ("done", True, "terminal")
        assert isinstance(result.outcome, RunCompleted)
        assert result.decisions == run.decisions
        assert result.run is run.state

    scene_of(play)


def test_awaiting_it_again_gives_the_same_result_and_calls_nobody():
    async def play(run: Run) -> None:
        first = await run
        second = await run
        assert (first.outcome, first.decisions) == (second.outcome, second.decisions)

    scene_of(play)


def test_a_run_does_nothing_until_somebody_wants_it():
    agent, model = agent_on(*SCRIPT, tools=[look])
    run = agent.run("go")
    assert (run.state.steps, run.decisions, run.finished, model.requests) == (0, (), False, [])


def test_there_is_no_result_before_the_end():
    async def play(run: Run) -> None:
        with pytest.raises(RunError, match="not finished"):
            _ = run.result
        await run
        assert run.result.output == "done"

    scene_of(play)


def test_a_run_has_an_id_that_its_caller_may_choose():
    agent, _ = agent_on()
    assert agent.run("go", run_id="mine").run_id == "mine"
    assert len({agent.run("go").run_id for _ in range(20)}) == 20


# -- iterating ----------------------------------------------------------------------------------------


def test_iterating_a_run_gives_every_event_in_order():
    async def play(run: Run) -> None:
        events = await all_events(run)
        assert [type(e) for e in events if not isinstance(e, Transitioned)] == [
            RunStarted, ModelReplied, ToolStarted, ToolFinished, ModelReplied, RunCompleted,
        ]  # fmt: skip
        assert [e.decision for e in events if isinstance(e, Transitioned)] == list(run.decisions)
        assert {e.run_id for e in events} == {run.run_id}
        assert run.result.outcome is events[-1]
        assert [e async for e in run] == []
        assert (await run).output == "done"

    scene_of(play)


def test_events_come_while_their_effect_still_runs():
    """A consumer learns that a tool has started before the tool has ended."""
    started, free = asyncio.Event(), asyncio.Event()

    @tool
    async def wait() -> str:
        started.set()
        await free.wait()
        return "over"

    async def play(run: Run) -> None:
        async for event in run:
            if isinstance(event, ToolStarted):
                await started.wait()
                free.set()
        assert run.result.ok

    scene_of(play, call("wait"), "done", tools=[wait])


@pytest.mark.parametrize("stop_at", range(1, 14))
def test_a_run_that_was_left_behind_any_event_may_be_gone_on_with(stop_at):
    async def play(run: Run) -> None:
        seen = []
        async for event in run:
            seen.append(event)
            if len(seen) == stop_at:
                break
        if len(seen) == stop_at:
            async for event in run:
                seen.append(event)
        assert [e.seq for e in seen] == list(range(1, len(seen) + 1))
        assert isinstance(seen[-1], RunCompleted)

    scene_of(play)


@pytest.mark.parametrize("stop_at", range(1, 14))
def test_a_run_that_was_left_behind_any_event_may_be_awaited(stop_at):
    async def play(run: Run) -> None:
        seen = []
        async for event in run:
            seen.append(event)
            if len(seen) == stop_at:
                break
        assert (await run).output == "done"
        seen += [event async for event in run]
        assert [e.seq for e in seen] == list(range(1, len(seen) + 1))
        assert [e for e in seen if isinstance(e, Ending)] == seen[-1:]

    scene_of(play)


def test_a_run_that_nobody_goes_on_with_stops_behind_the_effect_at_hand():
    async def play(run: Run) -> None:
        async for event in run:
            if isinstance(event, ModelReplied):
                break
        for _ in range(20):
            await asyncio.sleep(0)
        assert run.state.state in ("post_llm", "dispatch_tool")
        assert not run.finished
        await run.aclose()

    scene_of(play)


# -- one at a time ------------------------------------------------------------------------------------


def hanging(free: asyncio.Event) -> Any:
    @tool
    async def hang() -> str:
        await free.wait()
        return "over"

    return hang


@pytest.mark.parametrize("first", ["await", "iterate"])
@pytest.mark.parametrize("second", ["await", "iterate", "close"])
def test_a_run_belongs_to_one_at_a_time(first, second):
    free = asyncio.Event()

    async def use(run: Run, how: str) -> None:
        if how == "await":
            await run
        elif how == "close":
            await run.aclose()
        else:
            async for _ in run:
                pass

    async def play(run: Run) -> None:
        task = asyncio.create_task(use(run, first))
        while run.state.state != "dispatch_tool":
            await asyncio.sleep(0)
        with pytest.raises(RunError, match="somewhere else"):
            await use(run, second)
        free.set()
        await task
        assert run.finished
        assert run.result.ok is (second != "close")

    scene_of(play, call("hang"), "done", tools=[hanging(free)])


# -- cancelling ---------------------------------------------------------------------------------------


class Stalling:
    """A model that says that it was asked, and never answers."""

    name = "stalling"

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def reply(self, request: Any) -> Any:
        self.asked.set()
        await asyncio.Event().wait()


def cancelled(result: RunResult, reason: str = "cancelled") -> None:
    assert isinstance(result.outcome, RunCancelled)
    assert result.outcome.reason == reason
    assert result.run.cancelled == reason
    assert result.decisions[-1].guard == "cancelled"
    checked(result)


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
        cancelled(await run, reason)
        assert run.state.model_calls == 0

    scene_of(play)


def test_cancelled_during_a_model_call():
    model = Stalling()
    agent = Agent(model)

    async def scene() -> None:
        run = agent.run("go")
        result, _ = await asyncio.gather(run, when(model.asked.is_set, run.cancel))
        cancelled(result)

    drive(scene)


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
        cancelled(result)
        tools = [m.content for m in result.messages if m.role == "tool"]
        assert tools[0] == "quick result"
        assert len(tools) == 3
        assert all("cancelled" in text for text in tools[1:])

    calls = [call("hang", what=w) for w in ("quick", "slow", "slower")]
    scene_of(play, calls, "done", tools=[hang])


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
        cancelled(result)
        free.set()

    scene_of(play, call("hang"), "done", tools=[hang])


def test_cancelled_during_a_back_off():
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
        cancelled(result)
        assert result.run.model_calls == 1

    scene_of(play, TransientProviderError("busy"), "done", clock=clock)


@pytest.mark.parametrize("state", ["pre_step", "call_llm", "post_llm", "dispatch_tool", "post_tool"])
def test_cancelled_by_a_hook_at_any_door(state):
    runs: list[Run] = []
    stop = hook(state)(lambda context: runs[0].cancel("from a hook"))

    async def play(run: Run) -> None:
        runs.append(run)
        cancelled(await run, "from a hook")

    scene_of(play, hooks=[stop])


def test_cancelled_by_a_hook_that_waits():
    runs: list[Run] = []

    async def stop(context: Any) -> None:
        runs[0].cancel("from a hook")
        await asyncio.Event().wait()

    async def play(run: Run) -> None:
        runs.append(run)
        cancelled(await run, "from a hook")
        assert run.state.model_calls == 1

    scene_of(play, hooks=[hook("post_llm")(stop)])


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
        cancelled(result, "from a tool")
        assert ("stopped" in [m.content for m in result.messages]) is not waits

    scene_of(play, [call("stop"), call("look")], "done", tools=[stop, look])


def test_cancelled_from_inside_a_plain_tool_in_its_thread():
    runs: list[Run] = []

    @tool
    def stop() -> str:
        runs[0].cancel("from a thread")
        return "stopped"

    async def play(run: Run) -> None:
        runs.append(run)
        cancelled(await run, "from a thread")

    scene_of(play, call("stop"), "done", tools=[stop])


def test_a_tool_that_swallows_the_cancellation_has_its_result_and_the_run_ends_all_the_same():
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
        cancelled(result)
        assert "done anyway" in [m.content for m in result.messages]
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    scene_of(play, call("stubborn"), "done", tools=[stubborn])


def test_cancelled_while_iterating():
    async def play(run: Run) -> None:
        events = []
        async for event in run:
            events.append(event)
            if isinstance(event, ToolStarted):
                run.cancel("seen enough")
        cancelled(run.result, "seen enough")
        assert isinstance(events[-1], RunCancelled)

    scene_of(play)


def test_the_first_reason_stands():
    async def play(run: Run) -> None:
        run.cancel("first")
        run.cancel("second")
        cancelled(await run, "first")

    scene_of(play)


def test_a_run_that_is_over_stays_as_it_is():
    async def play(run: Run) -> None:
        result = await run
        run.cancel()
        assert (await run).outcome is result.outcome
        assert result.ok

    scene_of(play)


def test_cancelled_while_it_waits_for_a_person():
    @tool(requires_approval=True)
    def pay() -> str:
        return "paid"

    agent, model = agent_on(call("pay"), "done", tools=[pay])

    async def scene() -> None:
        first = await agent.run("go")
        assert isinstance(first.outcome, UserInputRequested)
        run = agent.resume(first.outcome.suspension_record, Allow())
        run.cancel("never mind")
        result = await run
        cancelled(result, "never mind")
        checked(result, model)

    drive(scene)


# -- cancelled from outside ---------------------------------------------------------------------------


def outside(started: asyncio.Event, seen: list[str], how: str) -> Callable[[Run], Awaitable[None]]:
    """Play: the task that awaits or iterates a run is cancelled once something has started."""

    async def play(run: Run) -> None:
        async def use() -> None:
            if how == "await":
                await run
            else:
                async for _ in run:
                    pass

        task = asyncio.create_task(use())
        await when(started.is_set, lambda: None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert run.finished
        cancelled(run.result, "the task was cancelled")
        assert seen == ["terminal"]
        assert (await run).outcome is run.result.outcome

    return play


@pytest.mark.parametrize("how", ["await", "iterate"])
@pytest.mark.parametrize("parallel", [False, True])
def test_a_cancellation_of_the_task_passes_through_and_the_run_is_over_and_whole(how, parallel):
    started, seen = asyncio.Event(), []

    @tool(parallel=parallel)
    async def hang(n: int) -> str:
        started.set()
        await asyncio.Event().wait()
        return ""

    end = hook("terminal")(lambda c: seen.append(c.state))
    play = outside(started, seen, how)
    scene_of(play, [call("hang", n=1), call("hang", n=2)], "done", tools=[hang], hooks=[end])


@pytest.mark.parametrize("how", ["await", "iterate"])
def test_a_cancellation_of_the_task_during_a_model_call(how):
    model, seen = Stalling(), []
    agent = Agent(model, hooks=[hook("terminal")(lambda c: seen.append(c.state))])
    drive(lambda: outside(model.asked, seen, how)(agent.run("go")))


@pytest.mark.parametrize("how", ["await", "iterate"])
def test_a_cancellation_of_the_task_during_a_hook(how):
    started, seen = asyncio.Event(), []

    async def hang(context: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    hooks = [hook("post_llm")(hang), hook("terminal")(lambda c: seen.append(c.state))]
    scene_of(outside(started, seen, how), hooks=hooks)


@pytest.mark.parametrize("how", ["await", "iterate"])
def test_a_cancellation_of_the_task_during_the_last_hook_comes_too_late_to_change_the_ending(how):
    started = asyncio.Event()

    async def hang(context: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    async def play(run: Run) -> None:
        async def use() -> None:
            if how == "await":
                await run
            else:
                async for _ in run:
                    pass

        task = asyncio.create_task(use())
        await when(started.is_set, lambda: None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert run.finished
        assert run.result.output == "done"

    scene_of(play, "done", hooks=[hook("terminal")(hang)])


@pytest.mark.parametrize("how", ["await", "iterate"])
def test_a_timeout_around_a_run_ends_it(how):
    model = Stalling()
    agent = Agent(model)

    async def scene() -> None:
        run = agent.run("go")

        async def limited() -> None:
            async with asyncio.timeout(0.02):
                if how == "await":
                    await run
                else:
                    async for _ in run:
                        pass

        with pytest.raises(TimeoutError):
            await limited()
        cancelled(run.result, "the task was cancelled")
        assert (await run).outcome is run.result.outcome
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    drive(scene)


def test_a_cancellation_from_both_sides_is_one_from_outside():
    model = Stalling()
    agent = Agent(model)

    async def scene() -> None:
        run = agent.run("go")
        task = asyncio.create_task(run._to_the_end())
        await model.asked.wait()
        run.cancel("from inside")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert task.cancelling() == 1
        cancelled(run.result, "from inside")

    drive(scene)


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
        cancelled(run.result, "the task was cancelled")

    drive(scene)


def test_a_second_cancellation_while_the_first_is_worked_off_leaves_a_run_that_can_be_awaited():
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
        cancelled(await run, "the task was cancelled")

    drive(scene)


# -- closing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at", range(14))
def test_a_run_in_a_with_block_is_over_behind_it(stop_at):
    async def play(run: Run) -> None:
        seen = 0
        async with run:
            async for _ in run:
                seen += 1
                if seen >= stop_at:
                    break
        assert run.finished
        assert isinstance(run.result.outcome, RunCancelled | RunCompleted)

    scene_of(play)


def test_closing_a_run_that_never_started_ends_it():
    async def play(run: Run) -> None:
        await run.aclose()
        cancelled(run.result, "closed")
        await run.aclose()

    scene_of(play)


def test_closing_a_run_that_is_over_changes_nothing():
    async def play(run: Run) -> None:
        async with run:
            await run
        assert run.result.ok

    scene_of(play)


def test_an_exception_in_a_with_block_passes_through():
    async def play(run: Run) -> None:
        with pytest.raises(KeyError):
            async with run:
                raise KeyError
        cancelled(run.result, "closed")

    scene_of(play)


# -- several runs -------------------------------------------------------------------------------------


def test_one_agent_runs_many_at_once_and_they_share_nothing():
    class Echo:
        name = "echo"

        async def reply(self, request: Any) -> Any:
            from agentfsm import Reply

            await asyncio.sleep(0)
            users = [m.content for m in request.messages if m.role == "user"]
            return Reply(Message.assistant(f"you said {users[-1]}"))

    model = RecordingModel(Echo())
    agent = Agent(model)

    async def scene() -> list[RunResult]:
        return await asyncio.gather(*(agent.run(str(n)) for n in range(50)))

    results = drive(scene)
    assert [r.output for r in results] == [f"you said {n}" for n in range(50)]
    assert all(len(r.messages) == 2 for r in results)


def test_a_skipped_call_is_no_reason_to_stop():
    async def play(run: Run) -> None:
        assert (await run).ok

    scene_of(play, hooks=[hook("dispatch_tool")(lambda c: SkipCall("no"))])
