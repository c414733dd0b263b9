"""abcb, chapter 9: some errors become context for the model's next turn, the others end the run.

The loop is the preset ``feedback``. The seven tests that the page prints keep their names; the others
state what its text says.
"""

from __future__ import annotations

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
    Message,
    ModelRequest,
    PartialRunSummary,
    ProviderError,
    RecoveryStarted,
    Reply,
    Role,
    RunCompleted,
    RunResult,
    TransientProviderError,
    observer,
)
from agentfsm.testing import RecordingModel, ScriptExhaustedError
from tests.helpers.scenarios import scripted_model, tool_result_texts, transitions_taken

FINAL = '{"kind":"final","content":"recovered"}'


def stub_echo(text: str) -> str:
    """Echoes the `text` field of its arguments."""
    return text


def explode() -> str:
    """Fails by its own logic."""
    raise ValueError("boom")


def read_notes() -> str:
    """Meets a file that it may not read."""
    raise PermissionError(13, "denied")


def agent(model: Any, max_steps: int = 5, hooks: Any = ()) -> Agent:
    limits = AgentGuardrails(max_iterations=max_steps, on_limit="stop")
    tools = [stub_echo, explode, read_notes]
    return Agent(model, tools=tools, preset="feedback", guardrails=limits, hooks=hooks)


def tool_call(name: str, arguments: str = "{}") -> str:
    return f'{{"kind":"tool_call","tool_name":"{name}","arguments":{arguments}}}'


def session_of(request: ModelRequest) -> list[Message]:
    return [m for m in request.messages if m.role is not Role.SYSTEM]


# -- the tests that the page prints -------------------------------------------------------------------


def test_run_loop_recovery_is_bounded_by_max_steps() -> None:
    model = scripted_model("garbage one", "garbage two")
    result = agent(model, max_steps=2).run_sync("hi")
    assert isinstance(result.outcome, PartialRunSummary)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is FailureKind.iteration_limit
    assert len(model.requests) == 2


def test_run_loop_recovers_from_parse_error() -> None:
    model = scripted_model("this is not json", '{"kind":"final","content":"recovered"}')
    assert agent(model).run_sync("hi").output == "recovered"


def test_run_loop_recovers_from_unknown_tool() -> None:
    model = scripted_model(
        '{"kind":"tool_call","tool_name":"nonexistent","arguments":{}}',
        '{"kind":"final","content":"recovered"}',
    )
    assert agent(model).run_sync("hi").output == "recovered"


def test_run_loop_recovers_from_bad_arguments() -> None:
    model = scripted_model(
        '{"kind":"tool_call","tool_name":"stub_echo","arguments":{"wrong":1}}',
        '{"kind":"final","content":"recovered"}',
    )
    assert agent(model).run_sync("hi").output == "recovered"


def test_run_loop_aborts_on_provider_error() -> None:
    # One scripted tool call, then the provider has nothing more to say.
    model = scripted_model('{"kind":"tool_call","tool_name":"stub_echo","arguments":{"text":"x"}}')
    result = agent(model).run_sync("hi")
    assert isinstance(result.outcome, Handoff)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is FailureKind.provider_error


RECOVERABLE = {
    "Parse": ("this is not json", FailureKind.output_malformed),
    "UnknownTool": (tool_call("x"), FailureKind.unknown_tool),
    "Tool(InvalidArguments)": (tool_call("stub_echo", '{"wrong":1}'), FailureKind.invalid_arguments),
    "Tool(Execution)": (tool_call("explode"), FailureKind.tool_error),
}
TERMINAL = {
    "Tool(Io)": (tool_call("read_notes"), FailureKind.environment_error, Handoff),
    "Provider": (ScriptExhaustedError("no more responses"), FailureKind.provider_error, Handoff),
    "Provider(another)": (ProviderError("401 Unauthorized"), FailureKind.provider_error, Handoff),
    "Provider(transient)": (TransientProviderError("503"), FailureKind.transient_provider, Handoff),
}


def test_recovery_feedback_classifies_errors() -> None:
    for entry, kind in RECOVERABLE.values():
        seen: list[Any] = []
        model = scripted_model(entry, FINAL)
        result = agent(model, hooks=[observer(seen.append)]).run_sync("hi")
        errors = [e for e in seen if isinstance(e, RecoveryStarted)]
        assert [(e.failure.kind, e.action, e.recoverable) for e in errors] == [(kind, Action.retry, True)]
        assert len(tool_result_texts(model.requests[1].messages)) == 1
        assert result.ok

    for entry, kind, ending in TERMINAL.values():
        model = scripted_model(entry, FINAL)
        result = agent(model).run_sync("hi")
        assert isinstance(result.outcome, ending)
        assert result.outcome.failure is not None
        assert result.outcome.failure.kind is kind
        assert len(model.requests) == 1  # nothing was fed back to anybody

    spent = agent(scripted_model(*(tool_call("stub_echo", f'{{"text":"{i}"}}') for i in range(3))), max_steps=3)
    result = spent.run_sync("hi")
    assert isinstance(result.outcome, PartialRunSummary)
    assert transitions_taken(result)[-2:] == ["pre_step: iteration_limit -> recover", "recover: stop -> terminal"]


def test_run_loop_feeds_tool_result_back_to_model() -> None:
    model = scripted_model(
        '{"kind":"tool_call","tool_name":"stub_echo","arguments":{"text":"pong"}}',
        '{"kind":"final","content":"done"}',
    )
    assert agent(model).run_sync("hi").output == "done"
    assert len(model.requests) == 2
    second_turn = model.requests[1]
    assert any(m.role is Role.TOOL and m.content == "pong" for m in second_turn.messages)


# -- 9.1: recovery is the loop's policy --------------------------------------------------------------


@pytest.mark.parametrize("case", RECOVERABLE)
def test_a_recoverable_error_goes_back_to_the_model_through_recover(case: str) -> None:
    entry, kind = RECOVERABLE[case]
    result = agent(scripted_model(entry, FINAL)).run_sync("hi")
    way = transitions_taken(result)
    state = "post_llm" if kind is FailureKind.output_malformed else "post_tool"
    assert way.index(f"{state}: {kind} -> recover") + 1 == way.index("recover: otherwise -> pre_step")
    assert way[-1] == "post_llm: otherwise -> terminal"


@pytest.mark.parametrize("case", TERMINAL)
def test_a_terminal_error_ends_the_run_through_recover(case: str) -> None:
    entry, kind, _ = TERMINAL[case]
    way = transitions_taken(agent(scripted_model(entry, FINAL)).run_sync("hi"))
    state = "post_tool" if kind is FailureKind.environment_error else "call_llm"
    assert way[-2:] == [f"{state}: {kind} -> recover", "recover: handoff -> terminal"]


def test_the_decision_is_the_policys_and_a_host_may_bring_its_own() -> None:
    class GivesUp:
        def retry_budget(self, kind: FailureKind) -> int:
            return 0

        def backoff(self, kind: FailureKind, attempt: int) -> float:
            return 0.0

        def decide(self, failure: Any, state: Any) -> Action:
            return Action.stop

    model = scripted_model("this is not json", FINAL)
    result = Agent(model, preset="feedback", policy=GivesUp()).run_sync("hi")
    assert isinstance(result.outcome, PartialRunSummary)
    assert len(model.requests) == 1


# -- 9.3 and 9.4: what the feedback says -------------------------------------------------------------


def test_feedback_on_a_parse_error_says_where_it_went_wrong_and_asks_for_valid_json() -> None:
    model = scripted_model("this is not json", FINAL)
    [feedback] = tool_result_texts(agent(model).run_sync("hi").messages)
    assert "not valid JSON" in feedback
    assert "line 1 column" in feedback
    assert tool_result_texts(model.requests[1].messages) == [feedback]


def test_feedback_on_an_unknown_tool_names_it_and_the_registered_ones() -> None:
    [feedback] = tool_result_texts(agent(scripted_model(tool_call("nonexistent"), FINAL)).run_sync("hi").messages)
    assert "'nonexistent'" in feedback
    assert "explode, read_notes, stub_echo" in feedback  # sorted


def test_feedback_on_bad_arguments_names_each_bad_field() -> None:
    [feedback] = tool_result_texts(
        agent(scripted_model(tool_call("stub_echo", '{"wrong":1}'), FINAL)).run_sync("hi").messages
    )
    assert "text:" in feedback
    assert "wrong:" in feedback


def test_feedback_on_a_failed_execution_holds_the_tools_own_words() -> None:
    [feedback] = tool_result_texts(agent(scripted_model(tool_call("explode"), FINAL)).run_sync("hi").messages)
    assert "boom" in feedback


@pytest.mark.parametrize(
    "envelope",
    [
        "[]",
        '"final"',
        "{}",
        '{"kind":"final"}',
        '{"kind":"final","content":7}',
        '{"kind":"tool_call"}',
        '{"kind":"tool_call","tool_name":""}',
        '{"kind":"something","content":"x"}',
        '{"kind":"tool_call","tool_name":"stub_echo","arguments":{"text":NaN}}',
        "",
    ],
)
def test_json_that_is_no_valid_envelope_is_malformed_too(envelope: str) -> None:
    result = agent(scripted_model(envelope, FINAL)).run_sync("hi")
    assert result.output == "recovered"
    assert [k for k, n in result.run_state.failure_attempts.items() if n] == [FailureKind.output_malformed]


def test_arguments_that_are_no_object_are_invalid_arguments() -> None:
    result = agent(scripted_model(tool_call("stub_echo", '"pong"'), FINAL)).run_sync("hi")
    assert result.output == "recovered"
    assert list(result.run_state.failure_attempts) == [FailureKind.invalid_arguments]


# -- 9.5: the terminal cases -------------------------------------------------------------------------


def test_an_io_error_of_a_tool_is_the_environments_and_not_the_models_to_fix() -> None:
    model = scripted_model(tool_call("read_notes"), FINAL)
    result = agent(model).run_sync("hi")
    assert isinstance(result.outcome, Handoff)
    assert any("denied" in blocker for blocker in result.outcome.blockers)
    assert len(model.requests) == 1


def test_a_caller_may_go_on_with_a_fresh_budget_after_max_steps() -> None:
    first = agent(scripted_model(tool_call("stub_echo", '{"text":"a"}')), max_steps=1).run_sync("hi")
    assert isinstance(first.outcome, PartialRunSummary)
    model = scripted_model(FINAL)
    second = agent(model, max_steps=1).run_sync("go on", message_history=first.messages)
    assert second.output == "recovered"
    assert "a" in tool_result_texts(model.requests[0].messages)


# -- 9.7: one budget ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RECOVERABLE)
def test_every_recovery_consumes_a_step_and_nothing_else_bounds_it(case: str) -> None:
    entry, kind = RECOVERABLE[case]
    model = scripted_model(*[entry] * 4, FINAL)
    result = agent(model, max_steps=5).run_sync("hi")
    assert result.ok
    assert len(model.requests) == 5
    assert result.run_state.failure_attempts == {kind: 4}

    model = scripted_model(*[entry] * 5, FINAL)
    result = agent(model, max_steps=5).run_sync("hi")
    assert not result.ok
    assert len(model.requests) == 5


def test_tools_and_recoveries_spend_the_same_budget() -> None:
    model = scripted_model(tool_call("stub_echo", '{"text":"a"}'), "garbage", tool_call("nonexistent"), FINAL)
    assert isinstance(agent(model, max_steps=3).run_sync("hi").outcome, PartialRunSummary)
    assert len(model.requests) == 3


# -- 9.10 and 9.11: what the next turn sees ----------------------------------------------------------


@pytest.mark.parametrize("case", RECOVERABLE)
def test_the_next_turn_sees_the_message_the_attempt_and_the_feedback_as_a_tool_message(case: str) -> None:
    entry, _ = RECOVERABLE[case]
    model = scripted_model(entry, FINAL)
    agent(model).run_sync("hi")
    session = session_of(model.requests[1])
    assert [m.role for m in session] == [Role.USER, Role.ASSISTANT, Role.TOOL]
    assert session[0] == Message.user("hi")
    assert session[1] == Message.assistant(entry)


def test_the_session_keeps_the_mistake_the_feedback_and_the_next_attempt() -> None:
    result: RunResult = agent(scripted_model("garbage", tool_call("nonexistent"), FINAL)).run_sync("hi")
    session = [m for m in result.messages if m.role is not Role.SYSTEM]
    assert [m.role for m in session] == [
        Role.USER,
        Role.ASSISTANT,
        Role.TOOL,
        Role.ASSISTANT,
        Role.TOOL,
        Role.ASSISTANT,
    ]
    assert isinstance(result.outcome, RunCompleted)


def test_the_recorder_keeps_each_session_as_it_was_when_the_model_saw_it() -> None:
    model: RecordingModel = scripted_model("garbage", tool_call("stub_echo", '{"text":"a"}'), FINAL)
    agent(model).run_sync("hi")
    sizes = [len(tool_result_texts(r.messages)) for r in model.requests]
    assert sizes == [0, 1, 2]


UNUSABLE = {
    "truncated": Reply(Message.assistant('{"kind":"tool_call","tool_name":"stub_echo","argum'), FinishReason.LENGTH),
    "truncated, and yet an envelope": Reply(Message.assistant(FINAL), FinishReason.LENGTH),
    "refused": Reply(Message.assistant("I cannot help with that."), FinishReason.REFUSAL),
    "refused, and yet an envelope": Reply(Message.assistant(FINAL), refusal="I will not."),
    "filtered": Reply(Message.assistant(""), FinishReason.CONTENT_FILTER),
    "empty": Reply(Message.assistant("")),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_truncated_refused_or_empty_reply_is_malformed_output(case: str) -> None:
    model = scripted_model(*[UNUSABLE[case]] * 4, FINAL)
    result = agent(model).run_sync("hi")
    assert result.output == "recovered"
    assert result.run_state.failure_attempts == {FailureKind.output_malformed: 4}
    assert len(model.requests) == 5
    assert "post_llm: tool_calls -> dispatch_tool" not in transitions_taken(result)


def test_nothing_but_the_step_limit_stops_a_model_that_repeats_itself() -> None:
    for entry in (tool_call("explode"), tool_call("stub_echo", '{"text":"a"}'), "garbage"):
        model = scripted_model(*[entry] * 11, FINAL)
        assert agent(model, max_steps=12).run_sync("hi").output == "recovered"
        assert not any("context_addendum" in m.content for r in model.requests for m in r.messages)


def test_a_result_is_told_as_it_is_however_often_it_was_returned_before() -> None:
    model = scripted_model(*[tool_call("stub_echo", '{"text":"a"}')] * 3, FINAL)
    result = agent(model).run_sync("hi")
    assert [m.content for m in result.messages if m.role is Role.TOOL] == ["a"] * 3


def test_the_table_has_no_other_backstop() -> None:
    rows = {t.id for t in Agent(scripted_model(), preset="feedback").graph}
    assert not rows & {
        "pre_step.no_progress",
        "post_llm.output_truncated",
        "post_llm.output_refused",
        "post_llm.loop_detected",
        "post_llm.no_progress",
        "post_tool.repeated_error",
    }


def test_a_prompt_that_is_too_long_is_a_provider_error_and_ends_the_run() -> None:
    model = scripted_model(ContextOverflowError("too long"), FINAL)
    result = agent(model).run_sync("hi")
    assert isinstance(result.outcome, Handoff)
    assert len(model.requests) == 1


def test_prose_around_a_fenced_envelope_is_accepted() -> None:
    assert agent(scripted_model(f"Here you are:\n```json\n{FINAL}\n```\nDone!")).run_sync("hi").output == "recovered"
