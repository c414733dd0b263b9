"""Repeated calls and silence: the loop guard acts before the sixth equal call, and one stall strikes once."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Host,
    RunResult,
    RunState,
    RunWarning,
    State,
    ToolStarted,
    TransientProviderError,
    Transition,
    UserInputRequested,
    observer,
    tool,
)
from agentfsm.testing import FakeClock, call
from tests.helpers.scenarios import Kind, echo, make_host, scripted_model, transitions_taken

# -- ten equal calls in one reply trip the loop guard ------------------------------------------------


@pytest.mark.parametrize("parallel", [False, True], ids=["in turn", "together"])
def test_ten_equal_calls_in_one_reply_trip_the_loop_guard_before_the_sixth_runs(parallel: bool) -> None:
    ran: list[str] = []

    @tool(parallel=parallel)
    async def note(text: str) -> str:
        """Keeps count."""
        ran.append(text)
        return text

    model = scripted_model([call("note", text="same")] * 10)
    result = Agent(model, tools=[note], host=make_host()).run_sync("go")
    assert isinstance(result.outcome, UserInputRequested)
    assert result.outcome.originating_failure_kind is Kind.loop_detected
    assert len(ran) < 6
    assert transitions_taken(result)[-2:] == ["post_llm: loop_detected -> recover", "recover: ask_user -> suspended"]


def test_equal_calls_are_counted_across_replies_and_within_them() -> None:
    ran: list[str] = []

    def note(text: str) -> str:
        """Keeps count."""
        ran.append(text)
        return text

    model = scripted_model([call("note", text="same")] * 2, [call("note", text="same")] * 3, call("note", text="same"))
    result = Agent(model, tools=[note], host=make_host()).run_sync("go")
    assert isinstance(result.outcome, UserInputRequested)
    assert ran == ["same"] * 5


# -- one stall never strikes twice -------------------------------------------------------------------


def stalling(clock: FakeClock, at: State, silences: list[float]) -> Any:
    """``LOOP`` with a guard that lets time pass: silence between two phases."""
    left = list(silences)

    def dawdle(run: RunState) -> bool:
        if left:
            clock.advance(left.pop(0))
        return False

    return LOOP.with_transition(Transition(at, dawdle, State.RECOVER), before=LOOP.rows(at)[2].name)


def test_one_stall_counts_once() -> None:
    clock = FakeClock()
    model = scripted_model(call("echo", text="a"), "x")
    graph = stalling(clock, State.POST_LLM, [31.0])
    result = Agent(model, tools=[echo], graph=graph, host=Host(clock=clock)).run_sync("go")
    assert result.output == "x"
    assert transitions_taken(result).count("pre_step: no_progress -> recover") == 1
    assert len(model.requests) == 2


def test_a_second_stall_counts_only_after_another_model_call() -> None:
    clock = FakeClock()
    model = scripted_model(call("echo", text="a"), call("echo", text="b"), "x")
    graph = stalling(clock, State.POST_TOOL, [31.0] * 9)
    result = Agent(model, tools=[echo], graph=graph, host=Host(clock=clock)).run_sync("go")
    assert result.output == "x"
    way = transitions_taken(result)
    strikes = [i for i, m in enumerate(way) if m == "pre_step: no_progress -> recover"]
    assert len(strikes) == 2
    for one, other in pairwise(strikes):
        assert "pre_step: otherwise -> call_llm" in way[one:other]


def test_a_run_that_has_not_begun_has_no_phases_to_be_silent_between() -> None:
    class Slow(FakeClock):
        """A clock of a machine that stands still for half a minute between any two readings."""

        def monotonic(self) -> float:
            self.advance(31)
            return super().monotonic()

    limits = AgentGuardrails(max_execution_time_s=9_999)
    agent = Agent(scripted_model("x"), guardrails=limits, host=Host(clock=Slow(), monitor="raise"))
    result = agent.run_sync("go")
    assert result.output == "x"
    assert transitions_taken(result)[0] == "pre_step: otherwise -> call_llm"


def test_silence_below_the_threshold_is_none() -> None:
    clock = FakeClock()
    graph = stalling(clock, State.POST_LLM, [30.0])
    result = Agent(
        scripted_model(call("echo", text="a"), "x"), tools=[echo], graph=graph, host=Host(clock=clock)
    ).run_sync("")
    assert not result.run_state.failure_attempts
    assert not result.run_state.lessons_learned


@pytest.mark.parametrize("where", ["a slow tool", "a slow model", "a backoff", "a consumer", "a consumer in a tool"])
def test_what_has_its_own_time_limit_is_no_stall(where: str) -> None:
    clock = FakeClock()

    async def slow_tool(text: str) -> str:
        """Takes its time."""
        await clock.sleep(40 if where == "a slow tool" else 0)
        return text

    async def slow_reply(messages: Any) -> Any:
        await clock.sleep(40)
        return call("slow_tool", text="b")

    entries: list[Any] = [call("slow_tool", text="a"), "x"]
    if where == "a slow model":
        entries.insert(0, slow_reply)
    if where == "a backoff":
        entries.insert(0, TransientProviderError("429", retry_after_s=40))
    agent = Agent(scripted_model(*entries), tools=[slow_tool], host=Host(clock=clock))

    async def scene() -> RunResult:
        run = agent.run("go")
        async for event in run:
            if where == "a consumer":
                clock.advance(40)
            if where == "a consumer in a tool" and isinstance(event, ToolStarted):
                for _ in range(20):  # the step ends meanwhile
                    await asyncio.sleep(0)
                clock.advance(40)
        return run.result

    result = asyncio.run(scene())
    assert result.ok or isinstance(result.outcome, UserInputRequested)
    assert Kind.no_progress not in [lesson.kind for lesson in result.run_state.lessons_learned]


def test_an_observer_that_takes_long_is_no_stall() -> None:
    clock = FakeClock()
    dawdle = observer(lambda event: clock.advance(10))
    result = Agent(
        scripted_model(call("echo", text="a"), "x"), tools=[echo], hooks=[dawdle], host=Host(clock=clock)
    ).run_sync("")
    assert Kind.no_progress not in [lesson.kind for lesson in result.run_state.lessons_learned]


def test_a_run_that_was_left_alone_and_then_awaited_has_not_stalled() -> None:
    clock = FakeClock()
    agent = Agent(scripted_model(call("echo", text="a"), "x"), tools=[echo], host=Host(clock=clock))

    async def scene() -> RunResult:
        run = agent.run("go")
        async for event in run:
            if type(event).__name__ == "ModelReplied":
                break
        clock.advance(250)
        return await run

    result = asyncio.run(scene())
    assert result.output == "x"
    assert not result.run_state.lessons_learned


# -- what is no loop, since its results differ ----------------------------------------------------------


def edit_and_test(rounds: int, preset: str = "standard") -> tuple[RunResult, list[str]]:
    """A run that edits and runs the tests, which fail less each time; and what it warns about."""
    left = rounds
    warnings: list[str] = []

    def run_tests() -> str:
        """Runs the tests."""
        nonlocal left
        left -= 1
        return f"{left} failed"

    script = [entry for n in range(rounds) for entry in (call("echo", text=f"edit {n}"), call("run_tests"))]
    end = call("return_done", output="all pass") if preset == "funnel" else "all pass"
    watch = observer(lambda e: warnings.append(e.text) if isinstance(e, RunWarning) else None)
    agent = Agent(scripted_model(*script, end), tools=[echo, run_tests], preset=preset, host=make_host(), hooks=[watch])
    return agent.run_sync("fix the tests"), warnings


def test_tests_that_are_run_again_after_each_edit_are_no_loop() -> None:
    result, _ = edit_and_test(10)
    assert result.output == "all pass"
    assert not [m for m in result.messages if "[Note" in m.content]


def test_in_funnel_calls_alone_are_counted_and_the_soft_threshold_only_logs() -> None:
    result, warnings = edit_and_test(10, "funnel")
    assert isinstance(result.outcome, UserInputRequested)
    assert result.outcome.originating_failure_kind is Kind.loop_detected
    assert not [m for m in result.messages if "[Note" in m.content]
    assert warnings == [f"the same call was made {n} times: run_tests" for n in range(2, 7)]


def test_a_call_that_is_repeated_with_the_same_result_is_warned_about_in_its_result() -> None:
    model = scripted_model(call("echo", text="a"), call("echo", text="a"), "done")
    result = Agent(model, tools=[echo], host=make_host()).run_sync("go")
    told = [m.content for m in result.messages if m.role.value == "tool"]
    assert told == ["a", "a\n[Note: this exact call has now been made 2 times with this same result.]"]
