"""``Run``: awaited, iterated, paused and continued, closed; and never used by two tasks at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentfsm import (
    Agent,
    Message,
    RunCancelled,
    RunCompleted,
    RunError,
    RunResult,
    RunStarted,
    SkipCall,
    TextDelta,
    ToolStarted,
    Transitioned,
    hook,
    tool,
)
from agentfsm.loop.events import Ending, ModelReplied, ToolFinished
from agentfsm.runtime.run import Run
from agentfsm.testing import RecordingModel, call
from tests.helpers.scenarios import (
    LOOK_SCRIPT,
    assert_cancelled,
    collect_events,
    look,
    run_async,
    scripted_agent,
    with_scripted_run,
)

# -- awaiting -----------------------------------------------------------------------------------------


def test_awaiting_a_run_gives_its_result():
    async def play(run: Run) -> None:
        assert not run.finished
        result = await run
        assert run.finished
        assert (result.output, result.ok, result.state) == ("done", True, "terminal")
        assert isinstance(result.outcome, RunCompleted)
        assert result.decisions == run.decisions
        assert result.run_state is run.run_state

    with_scripted_run(play)


def test_awaiting_it_again_gives_the_same_result_and_runs_nothing():
    async def play(run: Run) -> None:
        first = await run
        second = await run
        assert (first.outcome, first.decisions) == (second.outcome, second.decisions)

    with_scripted_run(play)


def test_a_run_does_nothing_until_it_is_awaited():
    agent, model = scripted_agent(*LOOK_SCRIPT, tools=[look])
    run = agent.run("go")
    assert (run.run_state.steps, run.decisions, run.finished, model.requests) == (0, (), False, [])


def test_the_repr_of_a_run_that_was_not_awaited_says_so():
    agent, _ = scripted_agent("done")
    run = agent.run("go", run_id="r1")
    assert repr(run) == "<Run 'r1' in state 'pre_step', not finished: await it>"
    run_async(lambda: run.aclose())
    assert repr(run) == "<Run 'r1' RunCancelled>"


def test_there_is_no_result_before_the_end():
    async def play(run: Run) -> None:
        with pytest.raises(RunError, match="not finished"):
            _ = run.result
        await run
        assert run.result.output == "done"

    with_scripted_run(play)


def test_a_run_has_an_id_that_its_caller_may_choose():
    agent, _ = scripted_agent()
    assert agent.run("go", run_id="mine").run_id == "mine"
    assert len({agent.run("go").run_id for _ in range(20)}) == 20


# -- iterating ----------------------------------------------------------------------------------------


def test_iterating_a_run_gives_every_event_in_order():
    async def play(run: Run) -> None:
        events = await collect_events(run)
        assert [type(e) for e in events if not isinstance(e, Transitioned)] == [
            RunStarted, ModelReplied, ToolStarted, ToolFinished, TextDelta, ModelReplied, RunCompleted,
        ]  # fmt: skip
        assert [e.decision for e in events if isinstance(e, Transitioned)] == list(run.decisions)
        assert {e.run_id for e in events} == {run.run_id}
        assert run.result.outcome is events[-1]
        assert [e async for e in run] == []
        assert (await run).output == "done"

    with_scripted_run(play)


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

    with_scripted_run(play, call("wait"), "done", tools=[wait])


@pytest.mark.parametrize("stop_at", range(1, 14))
def test_a_run_may_be_iterated_again_after_any_event(stop_at):
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

    with_scripted_run(play)


@pytest.mark.parametrize("stop_at", range(1, 14))
def test_a_run_may_be_awaited_after_any_event(stop_at):
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

    with_scripted_run(play)


def test_a_run_that_is_not_iterated_pauses_after_the_current_effect():
    async def play(run: Run) -> None:
        async for event in run:
            if isinstance(event, ModelReplied):
                break
        for _ in range(20):
            await asyncio.sleep(0)
        assert run.run_state.state in ("post_llm", "dispatch_tool")
        assert not run.finished
        await run.aclose()

    with_scripted_run(play)


# -- one at a time ------------------------------------------------------------------------------------


def hanging(free: asyncio.Event) -> Any:
    @tool
    async def hang() -> str:
        await free.wait()
        return "over"

    return hang


@pytest.mark.parametrize("first", ["await", "iterate"])
@pytest.mark.parametrize("second", ["await", "iterate", "close"])
def test_only_one_task_may_use_a_run_at_a_time(first, second):
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
        while run.run_state.state != "dispatch_tool":
            await asyncio.sleep(0)
        with pytest.raises(RunError, match="elsewhere"):
            await use(run, second)
        free.set()
        await task
        assert run.finished
        assert run.result.ok is (second != "close")

    with_scripted_run(play, call("hang"), "done", tools=[hanging(free)])


# -- closing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at", range(14))
def test_a_run_in_a_with_block_has_ended_after_it(stop_at):
    async def play(run: Run) -> None:
        seen = 0
        async with run:
            async for _ in run:
                seen += 1
                if seen >= stop_at:
                    break
        assert run.finished
        assert isinstance(run.result.outcome, RunCancelled | RunCompleted)

    with_scripted_run(play)


def test_closing_a_run_that_never_started_ends_it():
    async def play(run: Run) -> None:
        await run.aclose()
        assert_cancelled(run.result, "closed")
        await run.aclose()

    with_scripted_run(play)


def test_closing_a_run_that_is_over_changes_nothing():
    async def play(run: Run) -> None:
        async with run:
            await run
        assert run.result.ok

    with_scripted_run(play)


def test_an_exception_in_a_with_block_passes_through():
    async def play(run: Run) -> None:
        with pytest.raises(KeyError):
            async with run:
                raise KeyError
        assert_cancelled(run.result, "closed")

    with_scripted_run(play)


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

    results = run_async(scene)
    assert [r.output for r in results] == [f"you said {n}" for n in range(50)]
    assert all(len(r.messages) == 2 for r in results)


def test_a_skipped_call_is_no_reason_to_stop():
    async def play(run: Run) -> None:
        assert (await run).ok

    with_scripted_run(play, hooks=[hook("dispatch_tool")(lambda c: SkipCall("no"))])
