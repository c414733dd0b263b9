"""Tool calls: a batch is handled once, invalid arguments never reach a tool, only retryable calls run again."""

from __future__ import annotations

import asyncio
import datetime
import sys
from types import FrameType
from typing import Any

import pytest

from agentfsm import (
    Action,
    Agent,
    AgentGuardrails,
    Allow,
    DefaultPolicy,
    Deny,
    Edit,
    Handoff,
    Host,
    ItRan,
    RecoveryStarted,
    RunResult,
    State,
    SuspensionRecordError,
    ToolCall,
    ToolContext,
    observer,
    tool,
)
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.scenarios import (
    Booking,
    Kind,
    await_run,
    check_run,
    collect_events,
    dangerous,
    echo,
    explode,
    make_host,
    run_until_suspended,
    run_with_replies,
    scripted_model,
    tool_result_texts,
    truncated_reply,
)

# -- five failing calls of a batch -------------------------------------------------------------------


@pytest.mark.parametrize("equal", [True, False], ids=["equal errors", "different errors"])
def test_five_failing_calls_of_a_batch_give_one_recovery_and_one_terminal_event(equal: bool) -> None:
    batch = [call("explode", text="same" if equal else str(i)) for i in range(5)]
    for i, one in enumerate(batch):
        batch[i] = ToolCall(f"c{i}", one.name, one.arguments)
    model = scripted_model(batch, "x")
    agent = Agent(model, tools=[explode], guardrails=AgentGuardrails(loop_hard_threshold=9))

    async def scene() -> tuple[list[Any], RunResult]:
        run = agent.run("go")
        return await collect_events(run), run.result

    events, result = asyncio.run(scene())
    recoveries = [d for d in result.decisions if d.target == State.RECOVER]
    assert len(recoveries) == 1
    assert len(tool_result_texts(result.messages)) == 5
    assert [e.action for e in events if isinstance(e, RecoveryStarted)] == [Action.retry]
    assert result.run_state.failure_attempts == {Kind.tool_error: 1}
    assert result.output == "x"
    check_run(model, result)


def test_a_batch_that_fails_in_many_ways_is_one_failure_and_the_others_stand_in_its_metadata() -> None:
    def missing() -> str:
        """Meets a missing file."""
        raise FileNotFoundError("gone")

    seen: list[Any] = []
    model = scripted_model([call("explode"), call("missing"), call("echo", wrong=1), call("nonexistent")], "x")
    Agent(model, tools=[echo, explode, missing], hooks=[observer(seen.append)]).run_sync("go")
    [error] = [e for e in seen if isinstance(e, RecoveryStarted)]
    assert error.failure.kind is Kind.unknown_tool  # the first in the order of the table
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

    model = scripted_model(ToolCall("c", "add", arguments), "x")
    result = Agent(model, tools=[add]).run_sync("go")
    assert not ran
    assert [lesson.kind for lesson in result.run_state.lessons_learned] == [Kind.invalid_arguments]
    assert result.output == "x"
    check_run(model, result)


def test_arguments_that_are_not_json_never_run_the_tool() -> None:
    ran: list[str] = []

    def note(text: str = "default") -> str:
        """Could run without arguments."""
        ran.append(text)
        return "ran"

    model = scripted_model(ToolCall("c", "note", {}, malformed="the arguments are no valid JSON: Expecting value"), "x")
    result = Agent(model, tools=[note]).run_sync("go")
    assert not ran
    assert "Expecting value" in tool_result_texts(result.messages)[0]


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), object(), {1, 2}, b"bytes"],
    ids=["nan", "infinity", "object", "set", "bytes"],
)
def test_arguments_that_json_cannot_represent_do_no_harm(value: Any) -> None:
    @tool(requires_approval=True)
    def note(value: Any) -> str:
        """Takes anything."""
        return "ran"

    model = scripted_model(ToolCall("c", "note", {"value": value}), "x")
    result = Agent(model, tools=[note], host=make_host()).run_sync("go")
    assert result.output == "x"
    assert [lesson.kind for lesson in result.run_state.lessons_learned] == [Kind.invalid_arguments]
    check_run(model, result)


def test_a_call_in_a_truncated_message_is_never_run() -> None:
    ran: list[str] = []

    def note(text: str) -> str:
        """Keeps count."""
        ran.append(text)
        return text

    model = scripted_model(truncated_reply(call("note", "c", text="looks whole")), "x")
    result = Agent(model, tools=[note]).run_sync("go")
    assert not ran
    assert "truncated" in tool_result_texts(result.messages)[0]


def test_a_tool_that_changes_its_arguments_changes_no_transcript() -> None:
    def tidy(data: dict[str, Any], anything: Any) -> str:
        """Empties what it is given."""
        data["inner"].clear()
        anything.clear()
        return "tidied"

    given = {"data": {"inner": {"a": 1}}, "anything": [1, 2]}
    model = scripted_model(ToolCall("c", "tidy", given), "x")
    result = Agent(model, tools=[tidy]).run_sync("go")
    [message] = [m for m in result.messages if m.tool_calls]
    assert message.tool_calls[0].arguments == {"data": {"inner": {"a": 1}}, "anything": [1, 2]}


def test_arguments_are_read_as_json_where_a_type_is_strict() -> None:
    def book(booking: Booking) -> str:
        """Books."""
        return f"{booking.day:%d.%m.%Y} {sum(booking.seats)}"

    entry = call("book", booking={"day": "2026-03-01", "seats": [1, 2]})
    result = Agent(scripted_model(entry, "x"), tools=[book]).run_sync("go")
    assert tool_result_texts(result.messages) == ["01.03.2026 3"]
    typed = Agent(scripted_model('{"day": "2026-03-01", "seats": [1, 2]}'), output_type=Booking).run_sync("go")
    assert typed.output == Booking(day=datetime.date(2026, 3, 1), seats=(1, 2))


# -- a person's answers ------------------------------------------------------------------------------


def test_three_denials_in_a_row_stop_the_batch_before_anything_else_runs_or_is_asked() -> None:
    batch = [call("dangerous", what=str(i)) for i in range(3)]
    model = scripted_model([*batch, call("echo", text="next")], "x")
    agent = Agent(model, tools=[echo, dangerous], host=make_host())
    result = asyncio.run(run_with_replies(agent, "go", Deny("1"), Deny("2"), Deny("3")))
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is Kind.policy_violation
    assert "next" not in tool_result_texts(result.messages)
    check_run(model, result)


def test_a_denial_is_not_a_failure_and_a_success_resets_the_count() -> None:
    model = scripted_model(*(call("dangerous", what=str(i)) for i in range(5)), "x")
    agent = Agent(model, tools=[dangerous], host=make_host())
    result = asyncio.run(run_with_replies(agent, "go", Deny("1"), Deny("2"), Allow(), Deny("4"), Deny("5")))
    assert result.output == "x"
    assert not result.run_state.lessons_learned
    assert tool_result_texts(result.messages)[:3] == ["Denied by the user: 1", "Denied by the user: 2", "did 2"]


@pytest.mark.parametrize(
    "answer",
    [Edit({"what": float("nan")}), Edit({"what": object()}), Deny(7), ItRan({"a": 1}), 7, None, Allow],  # type: ignore[arg-type]
    ids=["nan", "an object", "a reason of 7", "a result of a dict", "7", "nothing", "a class"],
)
def test_an_answer_that_is_none_is_refused_and_the_run_waits_on(answer: Any) -> None:
    agent = Agent(scripted_model(call("dangerous", what="it"), "x"), tools=[dangerous], host=make_host())
    record = run_until_suspended(agent)
    with pytest.raises(SuspensionRecordError):
        asyncio.run(agent.resume(record, answer).load())
    assert asyncio.run(await_run(agent.resume(record, Allow()))).output == "x"


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
    model = scripted_model([call("echo", text="a"), call("flaky", text="b")], "x")
    result = Agent(model, tools=[echo, flaky], policy=policy, host=Host(clock=clock)).run_sync("go")
    assert result.output == "x"
    assert len(model.requests) == 2
    assert tool_result_texts(result.messages) == ["a", "b"]
    key = tries[0][1]
    assert tries == [(1, key, 0.0), (2, key, 7.0)]
    assert clock.slept == [7.0]


def test_a_call_that_is_not_declared_idempotent_and_retryable_is_never_run_again_by_itself() -> None:
    ran: list[str] = []

    def flaky(text: str) -> str:
        """Fails."""
        ran.append(text)
        raise OSError("not yet")

    result = Agent(scripted_model(call("flaky", text="a"), "x"), tools=[flaky]).run_sync("go")
    assert ran == ["a"]
    assert result.output == "x"


def lines_for_each_call(count: int) -> float:
    """How many lines of the package a run takes for each call of one reply."""

    @tool
    async def look(n: int) -> str:
        """Look."""
        return str(n)

    script = [[call("look", n=n) for n in range(count)], "done"]
    agent = Agent(ScriptedModel(script), tools=[look], guardrails=AgentGuardrails(max_calls_per_reply=count))
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace if "agentfsm" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = agent.run_sync("go")
    finally:
        sys.settrace(before)
    assert [each.content for each in result.messages if each.tool_call_id] == [str(n) for n in range(count)]
    return lines / count


def test_each_call_of_a_long_reply_takes_as_much_work_as_one_of_a_short_reply():
    lines_for_each_call(1)  # what is imported and cached then is not counted
    assert lines_for_each_call(60) < 1.1 * lines_for_each_call(15)
