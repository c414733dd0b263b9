"""Defects that published agent loops have, each as a promise that this one keeps."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, computed_field

from agentfsm import (
    LOOP,
    AbortRun,
    Action,
    Agent,
    AgentError,
    AgentGuardrails,
    Allow,
    ContextOverflowError,
    DefaultPolicy,
    Deny,
    Edit,
    Failure,
    FailureKind,
    FinishReason,
    Handoff,
    HookContext,
    Host,
    ItRan,
    Message,
    Noted,
    PartialRunSummary,
    ProviderError,
    RecordError,
    RecordTamperedError,
    RecordUsedError,
    Reply,
    RunCancelled,
    RunCompleted,
    RunResult,
    RunState,
    RunWarning,
    State,
    StateSpec,
    SuspensionRecord,
    ToolCall,
    ToolContext,
    ToolStarted,
    TransientProviderError,
    Transition,
    UsedInFolder,
    UserInputRequested,
    hook,
    observer,
    tool,
)
from agentfsm.core.presets import PRESETS
from agentfsm.testing import FakeClock, RecordingModel, call
from tests.sources.scenes import events_of, moves, results, scripted, text_of
from tests.transcripts import check_requests, check_transcript

K = FailureKind


def echo(text: str) -> str:
    """Gives back its text."""
    return text


def explode(text: str = "boom") -> str:
    """Raises."""
    raise ValueError(text)


def cut(*calls: ToolCall, text: str = "") -> Reply:
    """A reply that its length limit cut off."""
    return Reply(Message.assistant(text, calls), FinishReason.LENGTH)


class Booking(BaseModel):
    model_config = ConfigDict(strict=True)
    day: datetime.date
    seats: tuple[int, ...]


def host(**more: Any) -> Host:
    return Host(clock=FakeClock(), secret=b"a secret of the tests", **more)


async def resumed(agent: Agent, prompt: str, *replies: Any) -> RunResult:
    """The result of a run after some replies of a person."""
    result = await agent.run(prompt)
    for reply in replies:
        assert isinstance(result.outcome, UserInputRequested), result.outcome
        result = await agent.resume(result.outcome.suspension_record, reply)
    return result


def check(model: RecordingModel, result: RunResult) -> None:
    check_requests(model.requests)
    check_transcript(result.messages, request=False)


# -- max_iterations N gives exactly N model calls ----------------------------------------------------


class AlwaysAgain:
    """A policy that never gives up."""

    def retry_budget(self, kind: FailureKind) -> int:
        return 10**9

    def backoff(self, kind: FailureKind, attempt: int) -> float:
        return 0.0

    def decide(self, failure: Failure, state: RunState) -> Action:
        return Action.retry


FAULTS: dict[str, Callable[[int], Any]] = {
    "a tool that works": lambda i: call("echo", text=str(i)),
    "a tool that fails": lambda i: call("explode", text=str(i)),
    "an unknown tool": lambda i: call(f"tool_{i}"),
    "arguments that do not fit": lambda i: call("echo", wrong=i),
    "a cut-off reply": lambda i: cut(text=str(i)),
    "a refusal": lambda i: Reply(Message.assistant("no"), FinishReason.REFUSAL),
    "an empty reply": lambda i: "",
    "a hiccup of the provider": lambda i: TransientProviderError("503"),
    "a prompt that is too long": lambda i: ContextOverflowError("too long"),
    "a provider that says no": lambda i: ProviderError("401"),
    "ten equal calls": lambda i: [call("echo", text="same") for _ in range(10)],
}


@pytest.mark.parametrize("limit", [1, 2, 7])
@pytest.mark.parametrize("fault", FAULTS)
def test_max_iterations_gives_exactly_so_many_model_calls_whatever_fails_and_whatever_the_policy(
    limit: int, fault: str
) -> None:
    model = scripted(*(FAULTS[fault](i) for i in range(limit + 5)))
    guardrails = AgentGuardrails(max_iterations=limit, on_limit="stop", repeated_error_threshold=99)
    agent = Agent(model, tools=[echo, explode], guardrails=guardrails, policy=AlwaysAgain())
    result = agent.run_sync("go")
    assert len(model.requests) == limit
    assert isinstance(result.outcome, PartialRunSummary)
    check(model, result)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_max_iterations_is_exact_in_every_preset(preset: str) -> None:
    def entry(i: int) -> Any:
        if preset == "feedback":
            return json.dumps({"kind": "tool_call", "tool_name": "echo", "arguments": {"text": str(i)}})
        return call("echo", text=str(i))

    model = scripted(*map(entry, range(9)))
    guardrails = AgentGuardrails(max_iterations=4, on_limit="stop")
    result = Agent(model, tools=[echo], preset=preset, guardrails=guardrails).run_sync("go")
    assert len(model.requests) == 4
    assert isinstance(result.outcome, PartialRunSummary)


def test_recoveries_spend_the_same_iterations_as_steps_that_work() -> None:
    model = scripted(
        TransientProviderError("503"), call("explode"), cut(text="half"), call("nonexistent"), call("echo", text="a")
    )
    guardrails = AgentGuardrails(max_iterations=5, on_limit="stop")
    result = Agent(model, tools=[echo, explode], guardrails=guardrails, host=host()).run_sync("go")
    assert len(model.requests) == 5
    assert result.run.model_calls == 5
    assert moves(result)[-2:] == ["pre_step: iteration_limit -> recover", "recover: stop -> terminal"]


def test_a_person_who_extends_the_budget_gets_exactly_as_many_again() -> None:
    model = scripted(*(call("echo", text=str(i)) for i in range(99)))
    agent = Agent(model, tools=[echo], guardrails=AgentGuardrails(max_iterations=2, max_steps=99), host=host())
    for replies in (1, 2, 3):
        model.requests.clear()
        result = asyncio.run(resumed(agent, "go", *["go on"] * replies))
        assert len(model.requests) == 2 * (1 + replies)
        assert isinstance(result.outcome, UserInputRequested if replies < 3 else PartialRunSummary)  # max_continues


# -- a one-shot instruction stands in exactly one request --------------------------------------------


def seen_in(model: RecordingModel, words: str) -> list[int]:
    return [i for i, request in enumerate(model.requests) if words in text_of(request)]


def test_an_instruction_stands_in_exactly_one_request() -> None:
    model = scripted("just talking", call("echo", text="a"), call("echo", text="b"), call("return_done", output="x"))
    result = Agent(model, tools=[echo], preset="funnel").run_sync("go")
    assert result.output == "x"
    assert seen_in(model, "return_unable if it") == [1]
    assert "return_unable if it" not in "\n".join(m.content for m in result.messages)


def test_an_instruction_waits_for_a_request_that_the_model_answers() -> None:
    model = scripted(
        "just talking", TransientProviderError("503"), call("echo", text="a"), call("return_done", output="")
    )
    Agent(model, tools=[echo], preset="funnel", host=host()).run_sync("go")
    assert seen_in(model, "return_unable if it") == [1, 2]  # the first of them got no answer


def test_an_instruction_survives_a_suspension_and_still_stands_in_one_request() -> None:
    model = scripted("just talking", call("echo", text="a"), call("return_done", output="x"))
    guardrails = AgentGuardrails(max_iterations=1, max_steps=99)
    agent = Agent(model, tools=[echo], preset="funnel", guardrails=guardrails, host=host())
    result = asyncio.run(resumed(agent, "go", "go on", "go on"))
    assert result.output == "x"
    assert seen_in(model, "return_unable if it") == [1]


ANSWERS_NO_CALL = {
    "truncated": ("standard", cut(text="half a"), "Go on from where it stopped"),
    "truncated with a call": ("standard", cut(call("echo", "c1", text="a")), "Go on from where it stopped"),
    "text only": ("breaker", "just talking", "called no tool"),
}


@pytest.mark.parametrize("case", ANSWERS_NO_CALL)
def test_feedback_that_answers_no_call_stands_in_exactly_one_request(case: str) -> None:
    preset, entry, words = ANSWERS_NO_CALL[case]
    end = call("return_done", output="x") if preset == "breaker" else "x"
    model = scripted(entry, call("echo", text="a"), end)
    guardrails = AgentGuardrails(max_iterations=9)
    result = Agent(model, tools=[echo], preset=preset, guardrails=guardrails).run_sync("go")
    assert result.output == "x"
    told = [i for i, r in enumerate(model.requests) if words in r.messages[-1].content]
    assert told == [1]
    check(model, result)


def test_feedback_on_a_malformed_answer_stands_in_exactly_one_request() -> None:
    model = scripted("no number", "12 apples", "12")
    agent = Agent(model, output_type=int)
    result = agent.run_sync("how many?")
    assert result.output == 12
    assert seen_in(model, "could not be read") == [1, 2]  # one for each of the two bad answers
    assert [text_of(r).count("could not be read") for r in model.requests] == [0, 1, 1]


def test_feedback_that_answers_a_call_is_its_result_and_stays() -> None:
    model = scripted(call("nonexistent"), call("echo", text="a"), "x")
    Agent(model, tools=[echo]).run_sync("go")
    assert seen_in(model, "There is no tool named 'nonexistent'") == [1, 2]


# -- no request ever carries an unanswered call ------------------------------------------------------


@tool(requires_approval=True)
def dangerous(what: str) -> str:
    """Needs a person's leave."""
    return f"did {what}"


@tool(parallel=True)
async def slow(text: str) -> str:
    """May run beside others."""
    await asyncio.sleep(0)
    return text


@tool(parallel=True)
async def crash(text: str) -> str:
    """May run beside others, and raises."""
    raise KeyError(text)


UNANSWERED = {
    "truncation": ([cut(call("echo", "a", text="1"), call("echo", "b", text="2")), "x"], ()),
    "truncation in a row": ([cut(call("echo", "a", text="1")), cut(call("echo", "b")), "x"], ()),
    "a loop": ([[call("echo", text="same")] * 9, call("echo", text="other"), "x"], ("do something else",)),
    "a refusal with calls": ([Reply(Message.assistant("", (call("echo", "a"),)), FinishReason.REFUSAL)], ()),
    "ask_user in a batch": (
        [[call("echo", text="a"), call("ask_user", question="which?"), call("echo", text="b")], "x"],
        ("this one",),
    ),
    "ask_user twice in a batch": ([[call("ask_user", question="1?"), call("ask_user", question="2?")], "x"], ("one",)),
    "return_done in front": ([[call("return_done", output="x"), call("echo", text="b")]], ()),
    "return_unable in front": ([[call("return_unable", rationale="no"), call("echo", text="b")]], ()),
    "a crash in a batch": ([[call("echo", text="a"), call("explode"), call("echo", text="b")], "x"], ()),
    "a crash beside others": ([[call("slow", text="a"), call("crash", text="k"), call("slow", text="b")], "x"], ()),
    "an unknown tool in a batch": ([[call("nonexistent"), call("echo", text="b")], "x"], ()),
    "bad arguments in a batch": ([[call("echo", wrong=1), call("echo", text="b")], "x"], ()),
    "an approval, allowed": ([[call("dangerous", what="it"), call("echo", text="b")], "x"], (Allow(),)),
    "an approval, denied": ([[call("dangerous", what="it"), call("echo", text="b")], "x"], (Deny("no"),)),
    "an approval, edited": ([[call("echo", text="b"), call("dangerous", what="it")], "x"], (Edit({"what": "less"}),)),
    "equal ids from the model": (
        [Reply(Message.assistant("", (call("echo", "same", text="1"), call("echo", "same", text="2")))), "x"],
        (),
    ),
    "no ids from the model": (
        [Reply(Message.assistant("", (ToolCall("", "echo", {"text": "1"}), ToolCall("", "echo", {"text": "2"})))), "x"],
        (),
    ),
}


@pytest.mark.parametrize("preset", ["standard", "funnel", "breaker", "strict"])
@pytest.mark.parametrize("case", UNANSWERED)
def test_no_request_carries_an_unanswered_call(case: str, preset: str) -> None:
    script, replies = UNANSWERED[case]
    rules = PRESETS[preset].rules.model_copy(update={"control_tools": True, "text_is_answer": True})
    model = scripted(*script)
    tools = [echo, explode, dangerous, slow, crash]
    agent = Agent(model, tools=tools, preset=replace(PRESETS[preset], rules=rules), host=host())
    result = asyncio.run(resumed(agent, "go", *replies))
    assert not isinstance(result.outcome, UserInputRequested)
    check(model, result)
    again = scripted("hello again")
    Agent(again, preset="standard").run_sync("and now?", message_history=result.messages)
    check_requests(again.requests)


def test_each_call_of_a_batch_is_told_what_became_of_it() -> None:
    script, replies = UNANSWERED["ask_user in a batch"]
    model = scripted(*script[:1], call("return_done", output="x"))
    result = asyncio.run(resumed(Agent(model, tools=[echo], preset="funnel", host=host()), "go", *replies))
    first, second, third = results(result.messages)[:3]
    assert (first, second) == ("a", "this one")
    assert "Not run" in third
    assert "question" in third


def test_a_run_that_is_cancelled_in_a_tool_answers_every_call() -> None:
    async def scene() -> RunResult:
        @tool
        async def hang(text: str) -> str:
            """Calls for the end and never returns."""
            run.cancel("enough")
            await asyncio.Event().wait()
            return text

        model = scripted([call("echo", text="a"), call("hang", text="b"), call("echo", text="c")])
        run = Agent(model, tools=[echo, hang]).run("go")
        return await run

    result = asyncio.run(scene())
    assert result.outcome == RunCancelled(
        run_id=result.run.run_id, seq=result.outcome.seq, time=result.outcome.time, reason="enough"
    )
    check_transcript(result.messages, request=False)
    assert results(result.messages)[0] == "a"
    assert all("cancelled" in text for text in results(result.messages)[1:])


def test_a_run_that_is_cancelled_among_parallel_tools_keeps_what_was_done() -> None:
    async def scene() -> RunResult:
        @tool(parallel=True)
        async def hang(text: str) -> str:
            """Never returns."""
            await asyncio.Event().wait()
            return text

        model = scripted([call("slow", text="done"), call("hang", text="b")])
        run = Agent(model, tools=[slow, hang]).run("go")
        async for event in run:
            if type(event).__name__ == "ToolFinished":
                run.cancel("enough")
        return run.result

    result = asyncio.run(scene())
    check_transcript(result.messages, request=False)
    assert results(result.messages)[0] == "done"
    assert "cancelled" in results(result.messages)[1]


def test_a_run_whose_task_is_cancelled_ends_whole_and_lets_the_cancellation_through() -> None:
    async def scene() -> RunResult:
        @tool
        async def hang() -> str:
            """Never returns."""
            await asyncio.Event().wait()
            return ""

        run = Agent(scripted([call("hang"), call("hang")]), tools=[hang]).run("go")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await run
        return run.result

    result = asyncio.run(scene())
    assert isinstance(result.outcome, RunCancelled)
    check_transcript(result.messages, request=False)


@pytest.mark.parametrize("how", [ValueError, KeyError, OverflowError, StopAsyncIteration, SystemExit])
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_whatever_a_tool_raises_is_its_calls_result(how: type[BaseException], is_async: bool) -> None:
    def plain() -> str:
        """Crashes."""
        raise how("crashed")

    async def awaited() -> str:
        """Crashes."""
        raise how("crashed")

    function = tool(name="crash")(awaited if is_async else plain)
    model = scripted([call("crash"), call("echo", text="b")], "x")
    result = Agent(model, tools=[function, echo]).run_sync("go")
    assert result.output == "x"
    assert "crashed" in results(result.messages)[0]
    assert result.run.lessons_learned[-1].kind is K.tool_error
    check(model, result)


def test_a_tool_that_awaits_something_cancelled_fails_and_cancels_nobody() -> None:
    async def inner() -> str:
        """Awaits a task that somebody has cancelled."""
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task
        return ""

    model = scripted(call("inner"), "x")
    result = Agent(model, tools=[inner]).run_sync("go")
    assert result.output == "x"
    assert "CancelledError" in results(result.messages)[0]
    assert result.run.lessons_learned[-1].kind is K.tool_error


@pytest.mark.parametrize("prompt", ["never mind that", "go on"])
def test_the_transcript_of_a_suspended_run_is_good_as_the_history_of_another(prompt: str) -> None:
    first = Agent(scripted([call("echo", text="a"), call("dangerous", what="it")]), tools=[echo, dangerous]).run_sync(
        "go"
    )
    assert isinstance(first.outcome, UserInputRequested)
    model = scripted("x")
    result = Agent(model).run_sync(prompt, message_history=first.messages)
    check(model, result)
    assert len(results(model.requests[0].messages)) == 2


# -- ten equal calls in one reply trip the loop guard ------------------------------------------------


@pytest.mark.parametrize("parallel", [False, True], ids=["in turn", "together"])
def test_ten_equal_calls_in_one_reply_trip_the_loop_guard_before_the_sixth_runs(parallel: bool) -> None:
    ran: list[str] = []

    @tool(parallel=parallel)
    async def note(text: str) -> str:
        """Keeps count."""
        ran.append(text)
        return text

    model = scripted([call("note", text="same")] * 10)
    result = Agent(model, tools=[note], host=host()).run_sync("go")
    assert isinstance(result.outcome, UserInputRequested)
    assert result.outcome.originating_failure_kind is K.loop_detected
    assert len(ran) < 6
    assert moves(result)[-2:] == ["post_llm: loop_detected -> recover", "recover: ask_user -> suspended"]


def test_equal_calls_are_counted_across_replies_and_within_them() -> None:
    ran: list[str] = []

    def note(text: str) -> str:
        """Keeps count."""
        ran.append(text)
        return text

    model = scripted([call("note", text="same")] * 2, [call("note", text="same")] * 3, call("note", text="same"))
    result = Agent(model, tools=[note], host=host()).run_sync("go")
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

    return LOOP.with_transition(Transition(at, dawdle, State.RECOVER), before="cancelled")


def test_one_stall_strikes_once() -> None:
    clock = FakeClock()
    model = scripted(call("echo", text="a"), "x")
    graph = stalling(clock, State.POST_LLM, [31.0])
    result = Agent(model, tools=[echo], graph=graph, host=Host(clock=clock)).run_sync("go")
    assert result.output == "x"
    assert moves(result).count("pre_step: no_progress -> recover") == 1
    assert len(model.requests) == 2


def test_a_second_stall_strikes_only_behind_another_model_call() -> None:
    clock = FakeClock()
    model = scripted(call("echo", text="a"), call("echo", text="b"), "x")
    graph = stalling(clock, State.POST_TOOL, [31.0] * 9)
    result = Agent(model, tools=[echo], graph=graph, host=Host(clock=clock)).run_sync("go")
    assert result.output == "x"
    way = moves(result)
    strikes = [i for i, m in enumerate(way) if m == "pre_step: no_progress -> recover"]
    assert len(strikes) == 2
    for one, other in pairwise(strikes):
        assert "pre_step: otherwise -> call_llm" in way[one:other]


def test_silence_below_the_threshold_is_none() -> None:
    clock = FakeClock()
    graph = stalling(clock, State.POST_LLM, [30.0])
    result = Agent(scripted(call("echo", text="a"), "x"), tools=[echo], graph=graph, host=Host(clock=clock)).run_sync(
        ""
    )
    assert not result.run.failure_attempts
    assert not result.run.lessons_learned


@pytest.mark.parametrize("where", ["a slow tool", "a slow model", "a back-off", "a consumer", "a consumer in a tool"])
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
    if where == "a back-off":
        entries.insert(0, TransientProviderError("429", retry_after_s=40))
    agent = Agent(scripted(*entries), tools=[slow_tool], host=Host(clock=clock))

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
    assert K.no_progress not in [lesson.kind for lesson in result.run.lessons_learned]


def test_an_observer_that_takes_long_is_no_stall() -> None:
    clock = FakeClock()
    dawdle = observer(lambda event: clock.advance(10))
    result = Agent(
        scripted(call("echo", text="a"), "x"), tools=[echo], hooks=[dawdle], host=Host(clock=clock)
    ).run_sync("")
    assert K.no_progress not in [lesson.kind for lesson in result.run.lessons_learned]


def test_a_run_that_was_left_alone_and_then_awaited_has_not_stalled() -> None:
    clock = FakeClock()
    agent = Agent(scripted(call("echo", text="a"), "x"), tools=[echo], host=Host(clock=clock))

    async def scene() -> RunResult:
        run = agent.run("go")
        async for event in run:
            if type(event).__name__ == "ModelReplied":
                break
        clock.advance(250)
        return await run

    result = asyncio.run(scene())
    assert result.output == "x"
    assert not result.run.lessons_learned


# -- five failing calls of a batch -------------------------------------------------------------------


@pytest.mark.parametrize("equal", [True, False], ids=["equal errors", "different errors"])
def test_five_failing_calls_of_a_batch_give_one_recovery_and_one_terminal_event(equal: bool) -> None:
    batch = [call("explode", text="same" if equal else str(i)) for i in range(5)]
    for i, one in enumerate(batch):
        batch[i] = ToolCall(f"c{i}", one.name, one.arguments)
    model = scripted(batch, "x")
    agent = Agent(model, tools=[explode], guardrails=AgentGuardrails(loop_hard_threshold=9))

    async def scene() -> tuple[list[Any], RunResult]:
        run = agent.run("go")
        return await events_of(run), run.result

    events, result = asyncio.run(scene())
    recoveries = [d for d in result.decisions if d.target == State.RECOVER]
    assert len(recoveries) == 1
    assert len(results(result.messages)) == 5
    if equal:
        assert isinstance(result.outcome, Handoff)
        assert result.outcome.failure is not None
        assert result.outcome.failure.kind is K.repeated_error
    else:
        assert [e.action for e in events if isinstance(e, AgentError)] == [Action.retry]
        assert result.run.failure_attempts == {K.tool_error: 1}
        assert result.output == "x"
    check(model, result)


def test_a_batch_that_fails_in_many_ways_is_one_failure_and_the_others_stand_in_its_metadata() -> None:
    def missing() -> str:
        """Meets a missing file."""
        raise FileNotFoundError("gone")

    seen: list[Any] = []
    model = scripted([call("explode"), call("missing"), call("echo", wrong=1), call("nonexistent")], "x")
    Agent(model, tools=[echo, explode, missing], hooks=[observer(seen.append)]).run_sync("go")
    [error] = [e for e in seen if isinstance(e, AgentError)]
    assert error.failure.kind is K.unknown_tool  # the first in the order of the table
    assert set(error.failure.metadata["others"]) == {"invalid_arguments", "environment_error", "tool_error"}


# -- malformed arguments never run the tool ----------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"count": "many"},
        {"count": None},
        {"count": 1, "more": 2},
        {"Count": 1},
        {"count": [1]},
        {"count": float("nan")},
        {"count": 10**30, "extra": {}},
    ],
)
def test_arguments_that_do_not_fit_never_run_the_tool(arguments: dict[str, Any]) -> None:
    ran: list[int] = []

    def add(count: int) -> str:
        """Adds."""
        ran.append(count)
        return "ran"

    model = scripted(ToolCall("c", "add", arguments), "x")
    result = Agent(model, tools=[add]).run_sync("go")
    assert not ran
    assert [lesson.kind for lesson in result.run.lessons_learned] == [K.invalid_arguments]
    assert result.output == "x"
    check(model, result)


def test_arguments_that_are_no_json_never_run_the_tool_and_the_model_is_told_why() -> None:
    ran: list[str] = []

    def note(text: str = "default") -> str:
        """Could run without arguments."""
        ran.append(text)
        return "ran"

    model = scripted(ToolCall("c", "note", {}, malformed="the arguments are no valid JSON: Expecting value"), "x")
    result = Agent(model, tools=[note]).run_sync("go")
    assert not ran
    assert "Expecting value" in results(result.messages)[0]


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), object(), {1, 2}, b"bytes"],
    ids=["nan", "infinity", "object", "set", "bytes"],
)
def test_a_model_that_gives_arguments_which_no_json_can_hold_harms_nobody(value: Any) -> None:
    @tool(requires_approval=True)
    def note(value: Any) -> str:
        """Takes anything."""
        return "ran"

    model = scripted(ToolCall("c", "note", {"value": value}), "x")
    result = Agent(model, tools=[note], host=host()).run_sync("go")
    assert result.output == "x"
    assert [lesson.kind for lesson in result.run.lessons_learned] == [K.invalid_arguments]
    check(model, result)


def test_a_call_in_a_message_that_was_cut_off_is_never_run() -> None:
    ran: list[str] = []

    def note(text: str) -> str:
        """Keeps count."""
        ran.append(text)
        return text

    model = scripted(cut(call("note", "c", text="looks whole")), "x")
    result = Agent(model, tools=[note]).run_sync("go")
    assert not ran
    assert "cut off" in results(result.messages)[0]


def test_a_tool_that_changes_its_arguments_changes_no_transcript() -> None:
    def tidy(data: dict[str, Any], anything: Any) -> str:
        """Empties what it is given."""
        data["inner"].clear()
        anything.clear()
        return "tidied"

    given = {"data": {"inner": {"a": 1}}, "anything": [1, 2]}
    model = scripted(ToolCall("c", "tidy", given), "x")
    result = Agent(model, tools=[tidy]).run_sync("go")
    [message] = [m for m in result.messages if m.tool_calls]
    assert message.tool_calls[0].arguments == {"data": {"inner": {"a": 1}}, "anything": [1, 2]}


def test_arguments_are_read_as_json_where_a_type_is_strict() -> None:
    def book(booking: Booking) -> str:
        """Books."""
        return f"{booking.day:%d.%m.%Y} {sum(booking.seats)}"

    entry = call("book", booking={"day": "2026-03-01", "seats": [1, 2]})
    result = Agent(scripted(entry, "x"), tools=[book]).run_sync("go")
    assert results(result.messages) == ["01.03.2026 3"]
    typed = Agent(scripted('{"day": "2026-03-01", "seats": [1, 2]}'), output_type=Booking).run_sync("go")
    assert typed.output == Booking(day=datetime.date(2026, 3, 1), seats=(1, 2))


# -- a person's answers ------------------------------------------------------------------------------


def test_three_denials_in_a_row_stop_the_batch_before_anything_else_runs_or_is_asked() -> None:
    batch = [call("dangerous", what=str(i)) for i in range(3)]
    model = scripted([*batch, call("echo", text="next")], "x")
    agent = Agent(model, tools=[echo, dangerous], host=host())
    result = asyncio.run(resumed(agent, "go", Deny("1"), Deny("2"), Deny("3")))
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is K.policy_violation
    assert "next" not in results(result.messages)
    check(model, result)


def test_a_denial_is_no_failure_and_a_success_between_forgives_it() -> None:
    model = scripted(*(call("dangerous", what=str(i)) for i in range(5)), "x")
    agent = Agent(model, tools=[dangerous], host=host())
    result = asyncio.run(resumed(agent, "go", Deny("1"), Deny("2"), Allow(), Deny("4"), Deny("5")))
    assert result.output == "x"
    assert not result.run.lessons_learned
    assert results(result.messages)[:3] == ["Denied by the user: 1", "Denied by the user: 2", "did 2"]


@pytest.mark.parametrize(
    "answer",
    [Edit({"what": float("nan")}), Edit({"what": object()}), Deny(7), ItRan({"a": 1}), 7, None, Allow],  # type: ignore[arg-type]
    ids=["nan", "an object", "a reason of 7", "a result of a dict", "7", "nothing", "a class"],
)
def test_an_answer_that_is_none_is_refused_and_the_run_waits_on(answer: Any) -> None:
    agent = Agent(scripted(call("dangerous", what="it"), "x"), tools=[dangerous], host=host())
    record = suspended(agent)
    with pytest.raises(RecordError):
        agent.resume(record, answer)
    assert asyncio.run(_await(agent.resume(record, Allow()))).output == "x"


# -- a call that is run again as it stands -----------------------------------------------------------


def test_a_call_is_run_again_only_after_its_back_off_and_with_the_same_key() -> None:
    clock = FakeClock()
    tries: list[tuple[int, str, float]] = []

    @tool(idempotent=True, retryable=True)
    def flaky(context: ToolContext, text: str) -> str:
        """Works the second time."""
        tries.append((context.attempt, context.idempotency_key, sum(clock.slept)))
        if context.attempt == 1:
            raise OSError("not yet")
        return text

    policy = type("Slow", (DefaultPolicy,), {"backoff": lambda self, kind, attempt: 7.0})()
    model = scripted([call("echo", text="a"), call("flaky", text="b")], "x")
    result = Agent(model, tools=[echo, flaky], policy=policy, host=Host(clock=clock)).run_sync("go")
    assert result.output == "x"
    assert len(model.requests) == 2
    assert results(result.messages) == ["a", "b"]
    key = tries[0][1]
    assert tries == [(1, key, 0.0), (2, key, 7.0)]
    assert clock.slept == [7.0]


def test_a_call_that_is_not_declared_idempotent_and_retryable_is_never_run_again_by_itself() -> None:
    ran: list[str] = []

    def flaky(text: str) -> str:
        """Fails."""
        ran.append(text)
        raise OSError("not yet")

    result = Agent(scripted(call("flaky", text="a"), "x"), tools=[flaky]).run_sync("go")
    assert ran == ["a"]
    assert result.output == "x"


# -- a record that went through JSON resumes ---------------------------------------------------------


def suspended(agent: Agent, prompt: str = "go") -> SuspensionRecord:
    result = agent.run_sync(prompt)
    assert isinstance(result.outcome, UserInputRequested), result.outcome
    return result.outcome.suspension_record


WAYS_TO_WAIT: dict[str, tuple[list[Any], str, Any, dict[str, Any]]] = {
    "a question": ([call("ask_user", question="which?", choices=["a", "b"])], "question", "a", {}),
    "an approval": ([call("dangerous", what="it")], "approval", Allow(), {}),
    "an approval with other arguments": ([call("dangerous", what="it")], "approval", Edit({"what": "less"}), {}),
    "a limit": ([call("echo", text="a")], "limit", "go on", {"max_iterations": 1}),
    "a loop": ([[call("echo", text="same")] * 6], "question", "stop that", {}),
    "odd texts": (
        [call("ask_user", question="\ud83d \x00 \u2028 <&> \"' é", context="\ud800")],
        "question",
        "\ud800",
        {},
    ),
}


@pytest.mark.parametrize("case", WAYS_TO_WAIT)
def test_a_record_that_went_through_json_resumes(case: str) -> None:
    entries, kind, reply, limits = WAYS_TO_WAIT[case]
    model = scripted(*entries, call("return_done", output="x"))
    agent = Agent(model, tools=[echo, dangerous], preset="funnel", guardrails=AgentGuardrails(**limits), host=host())
    record = suspended(agent)
    text = record.to_json()
    assert json.loads(text)["kind"] == kind
    back = SuspensionRecord.from_json(text.encode())
    assert back == record
    result = asyncio.run(_await(agent.resume(back, reply)))
    assert result.output == "x"
    check(model, result)


async def _await(run: Any) -> Any:
    return await run


OTHER_PROCESS = """
import asyncio, sys
from agentfsm import Agent, AgentGuardrails, Allow, Host, UsedInFolder, tool
from agentfsm.testing import ScriptedModel, call

@tool(requires_approval=True)
def dangerous(what: str) -> str:
    "Needs leave."
    return f"did {what}"

async def main(folder):
    host = Host(secret=b"shared", used=UsedInFolder(folder + "/used"))
    model = ScriptedModel([lambda messages: f"it {messages[-1].content}"])
    agent = Agent(model, tools=[dangerous], host=host, guardrails=AgentGuardrails(max_iterations=9))
    record = open(folder + "/record.json", encoding="utf-8").read()
    result = await agent.resume(record, Allow())
    print(result.output, len(result.messages), result.run.run_id)

asyncio.run(main(sys.argv[1]))
"""


def test_a_record_resumes_in_another_process_and_only_once(tmp_path: Path) -> None:
    shared = Host(secret=b"shared", used=UsedInFolder(tmp_path / "used"))
    guardrails = AgentGuardrails(max_iterations=9)
    agent = Agent(scripted(call("dangerous", what="it")), tools=[dangerous], host=shared, guardrails=guardrails)
    record = suspended(agent)
    (tmp_path / "record.json").write_text(record.to_json(), encoding="utf-8")

    def resume(seed: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", OTHER_PROCESS, str(tmp_path)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parent.parent,
            timeout=60,
            check=False,
        )

    first = resume("1")
    assert first.stdout.split() == ["it", "did", "it", "4", record.run_id], first.stderr
    second = resume("2")
    assert second.returncode != 0
    assert "RecordUsedError" in second.stderr
    with pytest.raises(RecordUsedError):
        agent.resume(record, Allow())


# -- a record with any one field changed is refused --------------------------------------------------


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a JSON value that could be changed: each leaf, each empty list and object."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from leaves(each, (*path, key))
    elif isinstance(value, list) and value:
        for place, each in enumerate(value):
            yield from leaves(each, (*path, place))
    else:
        yield path


def changed(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case None:
            return "x"
        case list():
            return ["x"]
        case _:
            return {"x": 1}


def test_a_record_with_any_one_field_changed_is_refused_and_the_right_one_still_resumes() -> None:
    model = scripted(
        "just talking", [call("echo", text="a"), call("dangerous", what="it")], call("return_done", output="x")
    )
    agent = Agent(model, tools=[echo, dangerous], preset="funnel", host=host())
    record = suspended(agent)
    data = json.loads(record.to_json())
    paths = list(leaves(data))
    assert {p[0] for p in paths} == set(SuspensionRecord.model_fields)
    assert len(paths) > 80
    for path in paths:
        copy = json.loads(record.to_json())
        place = copy
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = changed(place[path[-1]])
        with pytest.raises(RecordError):
            agent.resume(json.dumps(copy), Allow())
    for path in paths:  # and with any one left out
        copy = json.loads(record.to_json())
        place = copy
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]
        with pytest.raises(RecordError):
            agent.resume(json.dumps(copy), Allow())
    with pytest.raises(RecordError):
        agent.resume(json.dumps({**data, "more": 1}), Allow())
    assert len(model.requests) == 2
    result = asyncio.run(_await(agent.resume(record, Allow())))
    assert result.output == "x"


def test_a_record_signed_with_another_secret_is_refused() -> None:
    record = suspended(Agent(scripted(call("dangerous", what="it")), tools=[dangerous], host=host()))
    other = Agent(scripted(), tools=[dangerous], host=Host(secret=b"another"))
    with pytest.raises(RecordTamperedError):
        other.resume(record, Allow())


def test_a_record_that_was_used_is_refused_even_when_two_resume_it_at_once() -> None:
    agent = Agent(scripted(call("dangerous", what="it"), "x", "y"), tools=[dangerous], host=host())
    record = suspended(agent)

    async def scene() -> list[Any]:
        runs = [agent.resume(record, Allow()), agent.resume(record, Allow())]
        return await asyncio.gather(*map(_await, runs), return_exceptions=True)

    one, other = asyncio.run(scene())
    assert one.output == "x"
    assert isinstance(other, RecordUsedError)
    with pytest.raises(RecordUsedError):
        agent.resume(record, Allow())


# -- code of the user's that raises ------------------------------------------------------------------


class Boom(Exception):
    """What the user's code raises."""


class Seen:
    """Counts the hooks that ran at the end."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    def hooks(self) -> list[Any]:
        @hook(State.TERMINAL)
        def close(context: HookContext) -> None:
            self.closed.append("first")

        @hook(State.TERMINAL)
        async def close_too(context: HookContext) -> None:
            self.closed.append("second")

        return [close, close_too]


def aborted_by(agent: Agent, model: RecordingModel, closed: Seen) -> PartialRunSummary:
    """Run, and check that the run ended in order: aborted, whole, its hooks closed, one last event."""

    async def scene() -> RunResult:
        run = agent.run("go")
        await events_of(run)
        return run.result

    result = asyncio.run(scene())
    assert isinstance(result.outcome, PartialRunSummary), result.outcome
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is K.aborted
    assert "Boom" in result.outcome.failure.explanation
    assert result.state == State.TERMINAL
    assert result.decisions[-1].guard == "aborted"
    assert closed.closed == ["first", "second"]
    check(model, result)
    return result.outcome


STATES_WITH_DOORS = [
    State.PRE_STEP,
    State.CALL_LLM,
    State.POST_LLM,
    State.DISPATCH_TOOL,
    State.POST_TOOL,
    State.RECOVER,
]
EVERYWHERE = ([call("echo", text="a"), call("explode"), call("echo", text="b")], "x")


@pytest.mark.parametrize("at", STATES_WITH_DOORS)
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_a_hook_that_raises_and_fails_closed_ends_the_run_in_order(at: State, is_async: bool) -> None:
    closed = Seen()

    def raises(context: HookContext) -> None:
        raise Boom("in a hook")

    async def raises_later(context: HookContext) -> None:
        await asyncio.sleep(0)
        raise Boom("in a hook")

    model = scripted(*EVERYWHERE)
    bad = hook(at, fail_open=False)(raises_later if is_async else raises)
    outcome = aborted_by(Agent(model, tools=[echo, explode], hooks=[bad, *closed.hooks()]), model, closed)
    assert outcome.failure is not None
    assert "raises" in outcome.failure.explanation


@pytest.mark.parametrize("at", STATES_WITH_DOORS)
def test_a_hook_that_raises_and_fails_open_is_warned_about(at: State) -> None:
    @hook(at)
    def raises(context: HookContext) -> None:
        raise Boom("in a hook")

    seen: list[Any] = []
    model = scripted(*EVERYWHERE)
    result = Agent(model, tools=[echo, explode], hooks=[raises, observer(seen.append)]).run_sync("go")
    assert result.output == "x"
    assert any("Boom" in e.text for e in seen if isinstance(e, RunWarning))


@pytest.mark.parametrize("at", STATES_WITH_DOORS)
def test_a_hook_that_aborts_the_run_is_named(at: State) -> None:
    @hook(at)
    def gatekeeper(context: HookContext) -> AbortRun:
        return AbortRun("Boom: not today")

    closed = Seen()
    model = scripted(*EVERYWHERE)
    outcome = aborted_by(Agent(model, tools=[echo, explode], hooks=[gatekeeper, *closed.hooks()]), model, closed)
    assert outcome.failure is not None
    assert "gatekeeper" in outcome.failure.explanation


@pytest.mark.parametrize("fail_open", [True, False])
def test_a_hook_at_the_end_that_raises_keeps_no_other_from_running_and_changes_no_outcome(fail_open: bool) -> None:
    @hook(State.TERMINAL, fail_open=fail_open)
    def raises(context: HookContext) -> None:
        raise Boom("at the end")

    closed, seen = Seen(), []
    result = Agent(scripted("x"), hooks=[raises, *closed.hooks(), observer(seen.append)]).run_sync("go")
    assert result.output == "x"
    assert closed.closed == ["first", "second"]
    assert any("Boom" in e.text for e in seen if isinstance(e, RunWarning))


def test_a_task_cancelled_while_a_hook_at_the_end_runs_still_has_its_outcome() -> None:
    async def scene() -> RunResult:
        @hook(State.TERMINAL)
        async def hang(context: HookContext) -> None:
            await asyncio.Event().wait()

        run = Agent(scripted("x"), hooks=[hang]).run("go")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await run
        return run.result

    result = asyncio.run(scene())
    assert result.output == "x"
    assert isinstance(result.outcome, RunCompleted)


@pytest.mark.parametrize("at", STATES_WITH_DOORS)
@pytest.mark.parametrize("first", [True, False], ids=["asked first", "asked last"])
def test_a_detector_that_raises_ends_the_run_in_order(at: State, first: bool) -> None:
    def faulty(run: RunState) -> Failure | None:
        raise Boom("in a detector")

    closed = Seen()
    if at is State.RECOVER:
        graph = LOOP.with_transition(Transition(at, faulty, State.PRE_STEP), before="cancelled" if first else None)
    else:
        graph = LOOP.with_detector(at, faulty, before="cancelled" if first else None)
    model = scripted(*(EVERYWHERE if first or at is State.RECOVER else [call("echo", text="a"), "x"]))
    outcome = aborted_by(Agent(model, tools=[echo, explode], graph=graph, hooks=closed.hooks()), model, closed)
    assert outcome.failure is not None
    assert "faulty" in outcome.failure.explanation


class Faulty(DefaultPolicy):
    """A policy that raises in one of its methods."""


def faulty_policy(method: str) -> Any:
    def raises(self: Any, *args: Any) -> Any:
        raise Boom("in a policy")

    return type("Faulty", (DefaultPolicy,), {method: raises})()


@pytest.mark.parametrize("method", ["decide", "backoff", "retry_budget"])
def test_a_policy_that_raises_ends_the_run_in_order(method: str) -> None:
    closed = Seen()
    model = scripted(*EVERYWHERE)
    aborted_by(Agent(model, tools=[echo, explode], policy=faulty_policy(method), hooks=closed.hooks()), model, closed)


@pytest.mark.parametrize("answer", ["no such action", None, 7, float("nan")])
def test_a_policy_that_answers_nonsense_ends_the_run_in_order(answer: Any) -> None:
    policy = type("Odd", (DefaultPolicy,), {"decide": lambda self, failure, state: answer})()
    result = Agent(scripted(*EVERYWHERE), tools=[echo, explode], policy=policy).run_sync("go")
    assert isinstance(result.outcome, PartialRunSummary)
    assert result.decisions[-1].guard == "aborted"
    check_transcript(result.messages, request=False)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, "soon", None])
def test_a_back_off_that_is_no_time_ends_the_run_in_order(seconds: Any) -> None:
    policy = type("Odd", (DefaultPolicy,), {"backoff": lambda self, kind, attempt: seconds})()
    clock = FakeClock()
    model = scripted(TransientProviderError("503"), "x")
    result = Agent(model, policy=policy, host=Host(clock=clock)).run_sync("go")
    if result.ok:
        assert clock.slept in ([], [0.0])
    else:
        assert isinstance(result.outcome, PartialRunSummary)
        assert result.decisions[-1].guard == "aborted"


def test_an_effect_of_a_state_of_ones_own_that_raises_ends_the_run_in_order() -> None:
    def effect(run: RunState) -> Noted:
        raise Boom("in an effect")

    graph = LOOP.with_state(
        StateSpec("review", "look at it", effect=effect),
        [Transition("review", None, State.TERMINAL)],
        entered_by="post_llm.otherwise",
    )
    closed = Seen()
    model = scripted("x")
    aborted_by(Agent(model, graph=graph, hooks=closed.hooks()), model, closed)


def test_an_approval_rule_that_raises_never_lets_the_call_run() -> None:
    ran: list[str] = []

    def rule(arguments: Any) -> bool:
        raise Boom("in an approval rule")

    @tool(requires_approval=rule)
    def note(text: str) -> str:
        """Keeps count."""
        ran.append(text)
        return text

    closed = Seen()
    model = scripted([call("echo", text="a"), call("note", text="b")], "x")
    aborted_by(Agent(model, tools=[echo, note], hooks=closed.hooks()), model, closed)
    assert not ran


@pytest.mark.parametrize("raising", ["recall", "remember"])
def test_a_memory_that_raises_is_done_without(raising: str) -> None:
    class Memory:
        async def recall(self, prompt: str) -> str:
            if raising == "recall":
                raise Boom("in a memory")
            return "you like tea"

        async def remember(self, messages: Any) -> None:
            if raising == "remember":
                raise Boom("in a memory")

    seen: list[Any] = []
    result = Agent(scripted("x"), memory=Memory(), hooks=[observer(seen.append)]).run_sync("go")
    assert result.output == "x"
    assert any("Boom" in e.text for e in seen if isinstance(e, RunWarning))


def test_an_observer_that_raises_harms_neither_the_run_nor_the_order_of_its_events() -> None:
    def bad(event: Any) -> None:
        raise Boom("in an observer")

    seen: list[Any] = []
    agent = Agent(scripted(call("echo", text="a"), "x"), tools=[echo], hooks=[observer(bad), observer(seen.append)])

    async def scene() -> tuple[list[Any], RunResult]:
        run = agent.run("go")
        return await events_of(run), run.result

    events, result = asyncio.run(scene())
    assert result.output == "x"
    assert seen == events
    assert any("bad" in e.text for e in events if isinstance(e, RunWarning))


@pytest.mark.parametrize("how", [Boom("x"), ValueError("x"), KeyError("x"), asyncio.CancelledError("x")])
def test_a_model_that_raises_anything_hands_the_task_back(how: BaseException) -> None:
    model = scripted(how)
    result = Agent(model).run_sync("go")
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is K.provider_error
    assert type(how).__name__ in result.outcome.rationale


@pytest.mark.parametrize("reply", [None, "text", 7, Message.assistant("no Reply")])
def test_a_model_that_returns_no_reply_hands_the_task_back(reply: Any) -> None:
    class Odd:
        name = "odd"

        async def reply(self, request: Any) -> Any:
            return reply

    result = Agent(Odd()).run_sync("go")
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is K.provider_error


def test_an_answer_whose_type_has_other_names_in_json_comes_through() -> None:
    class Answer(BaseModel):
        model_config = ConfigDict(extra="forbid")
        total: int = Field(alias="Total")

        @computed_field  # type: ignore[prop-decorator]
        @property
        def twice(self) -> int:
            return 2 * self.total

    for preset, entry in (("standard", '{"Total": 7}'), ("funnel", call("return_done", output={"Total": 7}))):
        result = Agent(scripted(entry), output_type=Answer, preset=preset).run_sync("how much?")
        assert result.output == Answer(Total=7), preset
