"""Forge, error recovery: an error is fed back to the agent, and five equal ones in a row end its loop.

The loop is the preset ``breaker``. The five tests of the breaker that the page names keep their names.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentfsm import (
    Action,
    Agent,
    AgentGuardrails,
    ContextOverflowError,
    FailureKind,
    FinishReason,
    Handoff,
    Host,
    Message,
    PartialRunSummary,
    ProviderError,
    RecoveryStarted,
    Reply,
    Role,
    RunCancelled,
    RunCompleted,
    RunResult,
    ToolCall,
    TransientProviderError,
    UserInputRequested,
    tool,
)
from agentfsm.testing import FakeClock, RecordingModel, call
from tests.helpers.provider_rules import check_requests, check_transcript
from tests.helpers.scenarios import collect_events, request_text, scripted_model, tool_result_texts, transitions_taken

K = FailureKind
DONE = call("return_done", output="finished")
BREAKS_AT = 5


def calculator(a: float, b: float) -> float:
    """Divides a by b."""
    return a / b


def fail(message: str) -> str:
    """Fails in the words that it is given."""
    raise RuntimeError(message)


@tool(ends_run=True)
def publish(text: str) -> str:
    """Ends the loop."""
    return f"published {text}"


def breaker(model: Any, **limits: Any) -> Agent:
    guardrails = AgentGuardrails(**{"max_iterations": None, "loop_hard_threshold": 20, **limits})
    host = Host(clock=FakeClock(), secret=b"of the tests")
    return Agent(model, tools=[calculator, fail, publish], preset="breaker", guardrails=guardrails, host=host)


def play(agent: Agent, prompt: str = "go") -> tuple[list[Any], RunResult]:
    async def scene() -> tuple[list[Any], RunResult]:
        run = agent.run(prompt)
        return await collect_events(run), run.result

    events, result = asyncio.run(scene())
    assert isinstance(agent.model, RecordingModel)
    check_requests(agent.model.requests)
    if result.state == "terminal":
        check_transcript(result.messages, request=False)
    return list(events), result


def recovered(events: list[Any]) -> list[FailureKind]:
    return [e.failure.kind for e in events if isinstance(e, RecoveryStarted)]


def error(message: str) -> ToolCall:
    return call("fail", message=message)


SUCCESS = call("calculator", a=4, b=2)


# -- the breaker's five tests ------------------------------------------------------------------------


def test_tracks_single_error() -> None:
    events, result = play(breaker(scripted_model(error("A"), SUCCESS, DONE)))
    assert recovered(events) == [K.tool_error]
    assert result.ok
    _, result = play(breaker(scripted_model(error("A"), ProviderError("the end"))))
    assert result.run_state.error_streak == 1
    assert result.run_state.error_key is not None
    assert "A" in result.run_state.error_key[-1]


def test_tracks_multiple_different_errors() -> None:
    script = [error(chr(ord("A") + i)) for i in range(12)]
    events, result = play(breaker(scripted_model(*script, DONE)))
    assert recovered(events) == [K.tool_error] * 12
    assert result.output == "finished"


def test_triggers_circuit_breaker_on_5_identical_errors() -> None:
    model = scripted_model(*[error("A")] * 9)
    events, result = play(breaker(model))
    assert len(model.requests) == BREAKS_AT
    assert recovered(events) == [K.tool_error] * (BREAKS_AT - 1)
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is K.repeated_error
    assert "5 times" in result.outcome.rationale
    assert transitions_taken(result)[-2:] == ["post_tool: repeated_error -> recover", "recover: handoff -> terminal"]


def test_resets_after_successful_iteration() -> None:
    script = [*[error("A")] * 4, SUCCESS, *[error("A")] * 4, DONE]
    events, result = play(breaker(scripted_model(*script)))
    assert recovered(events) == [K.tool_error] * 8
    assert result.output == "finished"
    _, result = play(breaker(scripted_model(*script[:-1], error("A"))))
    assert isinstance(result.outcome, Handoff)


@pytest.mark.parametrize("errors", range(1, BREAKS_AT + 1))
def test_circuit_breaker_requires_all_five_slots_filled(errors: int) -> None:
    _, result = play(breaker(scripted_model(*[error("A")] * errors, DONE)))
    assert isinstance(result.outcome, RunCompleted if errors < BREAKS_AT else Handoff)


# -- what counts as identical ------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(4))
def test_one_different_error_among_five_breaks_the_pattern(place: int) -> None:
    script = [error("A")] * 5
    script[place] = error("B")
    _, result = play(breaker(scripted_model(*script, DONE)))
    assert result.output == "finished"


def test_errors_that_take_turns_never_open_the_breaker() -> None:
    script = [error("AB"[i % 2]) for i in range(30)]
    _, result = play(breaker(scripted_model(*script, DONE)))
    assert result.output == "finished"


def test_errors_that_differ_in_blanks_alone_are_the_same() -> None:
    _, result = play(breaker(scripted_model(*(error(f"disk{' ' * i}full") for i in range(1, 6)))))
    assert isinstance(result.outcome, Handoff)


def test_the_same_words_from_another_tool_are_another_error() -> None:
    def fail_too(message: str) -> str:
        """Fails in the words that it is given."""
        raise RuntimeError(message)

    script = [call("fail" if i % 2 else "fail_too", message="A") for i in range(8)]
    agent = Agent(
        scripted_model(*script, DONE),
        tools=[fail, fail_too],
        preset="breaker",
        guardrails=AgentGuardrails(max_iterations=None, loop_hard_threshold=20),
    )
    assert play(agent)[1].output == "finished"


@pytest.mark.parametrize("other", ["just talking", ""], ids=["text only", "nothing"])
def test_an_error_without_a_call_breaks_the_pattern_too(other: str) -> None:
    script = [*[error("A")] * 4, other, *[error("A")] * 4]
    events, result = play(breaker(scripted_model(*script, DONE)))
    assert recovered(events) == [K.tool_error] * 4 + [K.output_malformed] + [K.tool_error] * 4
    assert result.output == "finished"


# -- terminal errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failing",
    [
        TransientProviderError("503"),
        ProviderError("401"),
        ContextOverflowError("too long"),
        RuntimeError("no route to host"),
    ],
)
def test_a_failed_call_of_the_model_ends_the_loop(failing: Exception) -> None:
    model = scripted_model(failing, DONE)
    events, result = play(breaker(model))
    assert len(model.requests) == 1
    assert not recovered(events)
    assert isinstance(result.outcome, Handoff)


def test_a_cancelled_context_ends_the_loop() -> None:
    async def scene(cancel_from_outside: bool) -> RunResult:
        async def hang() -> str:
            """Never returns."""
            if not cancel_from_outside:
                run.cancel("the user pressed stop")
            await asyncio.Event().wait()
            return ""

        run = Agent(scripted_model(call("hang")), tools=[hang], preset="breaker").run("go")
        if cancel_from_outside:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(run, 0.05)
        else:
            await run
        return run.result

    for outside in (False, True):
        result = asyncio.run(scene(outside))
        assert isinstance(result.outcome, RunCancelled)
        check_transcript(result.messages, request=False)
    assert isinstance(asyncio.run(scene(False)).outcome, RunCancelled)


# -- recoverable errors ------------------------------------------------------------------------------

BAD_JSON = "the arguments are no valid JSON: Expecting ',' delimiter: line 1 column 9"
RECOVERABLE: dict[str, tuple[Any, FailureKind]] = {
    "no tool call": ("let me think", K.output_malformed),
    "nothing at all": ("", K.output_malformed),
    "no tool call, truncated": (Reply(Message.assistant("let me"), FinishReason.LENGTH), K.output_malformed),
    "no tool call, refused": (Reply(Message.assistant("I cannot"), FinishReason.REFUSAL), K.output_malformed),
    "invalid tool call": (ToolCall("c", "calculator", {}, malformed=BAD_JSON), K.invalid_arguments),
    "missing required fields": (call("calculator", a=1), K.invalid_arguments),
    "unknown tool": (call("abacus", a=1), K.unknown_tool),
    "tool execution failure": (error("out of paper"), K.tool_error),
}


@pytest.mark.parametrize("case", RECOVERABLE)
def test_a_recoverable_error_goes_back_to_the_agent(case: str) -> None:
    entry, kind = RECOVERABLE[case]
    events, result = play(breaker(scripted_model(entry, DONE)))
    [found] = [e for e in events if isinstance(e, RecoveryStarted)]
    assert (found.failure.kind, found.action, found.recoverable) == (kind, Action.retry, True)
    assert result.output == "finished"


@pytest.mark.parametrize("case", RECOVERABLE)
def test_five_of_any_recoverable_error_in_a_row_end_the_loop(case: str) -> None:
    entry, _ = RECOVERABLE[case]
    model = scripted_model(*[entry] * 9)
    _, result = play(breaker(model))
    assert isinstance(result.outcome, Handoff)
    assert len(model.requests) == BREAKS_AT


@pytest.mark.parametrize("case", RECOVERABLE)
def test_four_of_them_do_not(case: str) -> None:
    entry, _ = RECOVERABLE[case]
    _, result = play(breaker(scripted_model(*[entry] * 4, DONE)))
    assert result.output == "finished"


def test_an_environment_error_of_a_tool_is_fed_back_as_any_other() -> None:
    def read(path: str) -> str:
        """Meets a missing file."""
        raise FileNotFoundError(2, "No such file", path)

    model = scripted_model(*(call("read", path=f"/{i}") for i in range(7)), DONE)
    agent = Agent(model, tools=[read], preset="breaker")
    assert play(agent)[1].output == "finished"


# -- the flow ----------------------------------------------------------------------------------------


def test_the_flow_of_a_call_that_works() -> None:
    _, result = play(breaker(scripted_model(SUCCESS, DONE)))
    assert transitions_taken(result)[:5] == [
        "pre_step: otherwise -> call_llm",
        "call_llm: otherwise -> post_llm",
        "post_llm: tool_calls -> dispatch_tool",
        "dispatch_tool: otherwise -> post_tool",
        "post_tool: otherwise -> pre_step",
    ]


@pytest.mark.parametrize(
    ("case", "way"),
    [
        ("no tool call", ["post_llm: output_malformed -> recover"]),
        ("no tool call, truncated", ["post_llm: output_malformed -> recover"]),
        ("invalid tool call", ["post_tool: invalid_arguments -> recover"]),
        ("unknown tool", ["post_tool: unknown_tool -> recover"]),
        ("tool execution failure", ["post_tool: tool_error -> recover"]),
    ],
)
def test_the_flow_of_each_error_is_one_more_iteration(case: str, way: list[str]) -> None:
    _, result = play(breaker(scripted_model(RECOVERABLE[case][0], DONE)))
    place = transitions_taken(result).index(way[0])
    assert transitions_taken(result)[place : place + 3] == [
        way[0],
        "recover: otherwise -> pre_step",
        "pre_step: otherwise -> call_llm",
    ]


@pytest.mark.parametrize("entry", [call("publish", text="it"), DONE])
def test_a_loop_breaking_tool_ends_the_loop_with_success(entry: ToolCall) -> None:
    model = scripted_model(error("A"), entry, SUCCESS)
    _, result = play(breaker(model))
    assert isinstance(result.outcome, RunCompleted)
    assert result.output in ("published it", "finished")
    assert transitions_taken(result)[-1] == "post_tool: declared_done -> terminal"
    assert len(model.requests) == 2


def test_a_loop_breaking_tool_that_fails_ends_nothing() -> None:
    @tool(ends_run=True)
    def submit() -> str:
        """Fails."""
        raise RuntimeError("not yet")

    model = scripted_model(call("submit"), DONE)
    _, result = play(Agent(model, tools=[submit], preset="breaker"))
    assert result.output == "finished"
    assert len(model.requests) == 2


def test_any_success_begins_anew_also_after_replies_without_a_call() -> None:
    script = [*["text"] * 4, SUCCESS, *["text"] * 4, DONE]
    assert play(breaker(scripted_model(*script)))[1].output == "finished"


def test_five_equal_errors_in_a_row_are_equal_whatever_else_came_before() -> None:
    script = [call("abacus"), "text", error("A"), *["text"] * 4]
    model = scripted_model(*script, DONE)
    assert play(breaker(model))[1].output == "finished"
    model = scripted_model(*script, "text", DONE)
    _, result = play(breaker(model))
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is K.output_malformed
    assert transitions_taken(result)[-2:] == ["post_llm: output_malformed -> recover", "recover: handoff -> terminal"]


def test_equal_calls_and_equal_successes_are_no_error() -> None:
    script = [*[error("A")] * 4, SUCCESS] * 3 + [SUCCESS] * 9
    assert play(Agent(scripted_model(*script, DONE), tools=[fail, calculator], preset="breaker"))[1].ok


def test_nothing_is_added_to_what_a_tool_returns_however_often() -> None:
    model = scripted_model(*[SUCCESS] * 3, *[error("A")] * 3, DONE)
    _, result = play(breaker(model))
    assert [m.content for m in result.messages if m.role is Role.TOOL][:-1] == ["2.0"] * 3 + ["RuntimeError: A"] * 3


def test_an_error_is_never_repeated_after_the_next_request() -> None:
    model = scripted_model(error("out of paper"), "text", SUCCESS, SUCCESS, DONE)
    play(breaker(model))
    assert not any("context_addendum" in m.content for r in model.requests for m in r.messages)
    assert ["contains no tool call" in request_text(r) for r in model.requests] == [False, False, True, False, False]


@pytest.mark.slow
def test_there_is_no_cap_on_iterations_but_the_breaker_and_the_time() -> None:
    script = [call("calculator", a=i, b=1) for i in range(120)]
    model = scripted_model(*script, DONE)
    _, result = play(Agent(model, tools=[calculator], preset="breaker"))
    assert result.output == "finished"
    assert len(model.requests) == 121


def test_a_time_limit_still_ends_what_never_repeats_itself() -> None:
    clock = FakeClock()

    def wait(n: int) -> str:
        """Fails in ever new words, and slowly."""
        clock.advance(1)
        raise RuntimeError(f"failure number {n}")

    model = scripted_model(*(call("wait", n=i) for i in range(99)))
    agent = Agent(
        model,
        tools=[wait],
        preset="breaker",
        guardrails=AgentGuardrails(max_iterations=None, max_execution_time_s=20, on_limit="stop"),
        host=Host(clock=clock),
    )
    _, result = play(agent)
    assert isinstance(result.outcome, PartialRunSummary)
    assert len(model.requests) == 20


# -- the four messages -------------------------------------------------------------------------------


def told(case: str) -> tuple[str, RunResult]:
    """What the request behind an error adds, in its tool results and at its end."""
    model = scripted_model(RECOVERABLE[case][0], DONE)
    _, result = play(breaker(model))
    before, after = model.requests[0].messages, model.requests[1].messages
    return "\n".join(m.content for m in list(after)[len(before) :]), result


def test_message_no_tool_call() -> None:
    text, _ = told("no tool call")
    assert "it contains no tool call" in text
    assert "You must call a tool in your reply." in text


def test_message_invalid_json() -> None:
    text, _ = told("invalid tool call")
    assert "Expecting ',' delimiter: line 1 column 9" in text
    assert "Correct them and call again" in text


def test_message_missing_fields() -> None:
    text, _ = told("missing required fields")
    assert "b: field required" in text


def test_message_unknown_tool() -> None:
    text, _ = told("unknown tool")
    assert "'abacus'" in text
    assert "ask_user, calculator, fail, publish, return_done, return_unable" in text


def test_message_execution_failure() -> None:
    text, _ = told("tool execution failure")
    assert "out of paper" in text


# -- ephemeral context -------------------------------------------------------------------------------


def test_an_error_that_answers_no_call_is_told_once_and_never_kept() -> None:
    model = scripted_model("let me think", SUCCESS, DONE)
    _, result = play(breaker(model))
    told_in = ["contains no tool call. You must" in request_text(r) for r in model.requests]
    assert told_in == [False, True, False]
    assert model.requests[1].messages[-1].role is Role.USER
    assert all("contains no tool call. You must" not in m.content for m in result.messages)


def test_only_the_current_error_is_told() -> None:
    model = scripted_model("let me think", "and again", DONE)
    play(breaker(model))
    assert [request_text(r).count("contains no tool call. You must") for r in model.requests] == [0, 1, 1]


def test_an_error_that_answers_a_call_is_that_calls_result() -> None:
    model = scripted_model(error("out of paper"), SUCCESS, DONE)
    _, result = play(breaker(model))
    first = next(m for m in result.messages if m.role is Role.TOOL)
    assert first.is_error
    assert "out of paper" in first.content
    assert first in list(model.requests[2].messages)


# -- the example scenario ----------------------------------------------------------------------------

QUESTION = "I cannot divide by zero. Would you like a different calculation?"


def test_example_scenario() -> None:
    def second(messages: Any) -> ToolCall:
        assert any(m.role is Role.TOOL and "division by zero" in m.content for m in messages)
        return call("ask_user", question=QUESTION)

    model = scripted_model(
        call("calculator", a=100, b=0), second, lambda m: call("return_done", output=tool_result_texts(m)[-1])
    )
    agent = breaker(model)
    events, result = play(agent, "Calculate 100 divided by 0")
    assert recovered(events) == [K.tool_error]
    assert isinstance(result.outcome, UserInputRequested)
    assert result.outcome.question == QUESTION
    assert len(model.requests) == 2

    async def answered() -> RunResult:
        assert isinstance(result.outcome, UserInputRequested)
        return await agent.resume(result.outcome.suspension_record, "by 4, then")

    assert asyncio.run(answered()).output == "by 4, then"


def test_example_scenario_with_a_tool_of_ones_own_that_breaks_the_loop() -> None:
    @tool(ends_run=True)
    def ask_question(question: str) -> str:
        """Asks the user, and ends the turn."""
        return question

    model = scripted_model(call("calculator", a=100, b=0), call("ask_question", question=QUESTION))
    agent = Agent(model, tools=[calculator, ask_question], preset="breaker")
    _, result = play(agent, "Calculate 100 divided by 0")
    assert result.output == QUESTION
    assert "division by zero" in tool_result_texts(result.messages)[0]
    assert model.requests[0].messages[-1] == Message.user("Calculate 100 divided by 0")
