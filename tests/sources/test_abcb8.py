"""abcb, chapter 8: the loop, and the session that carries a conversation from step to step.

Its `run_loop` is the preset ``feedback``: a model that answers in JSON envelopes, a session to which every
reply and every tool result is added, and one budget of steps. The five tests that the page prints keep
their names; the others state what its text says.
"""

from __future__ import annotations

import pytest

from agentfsm import Agent, AgentGuardrails, FailureKind, Message, PartialRunSummary, Role, RunCompleted, RunResult
from agentfsm.testing import RecordingModel
from tests.helpers.scenarios import scripted_model, tool_result_texts, transitions_taken


def stub_echo(text: str) -> str:
    """Echoes the `text` field of its arguments."""
    return text


def registry_with_stub_echo(model: RecordingModel, max_steps: int = 5) -> Agent:
    limits = AgentGuardrails(max_iterations=max_steps, on_limit="stop")
    return Agent(model, tools=[stub_echo], preset="feedback", guardrails=limits)


def session_of(result: RunResult) -> list[Message]:
    """The conversation, without the instructions that an envelope model needs in front of it."""
    return [m for m in result.messages if m.role is not Role.SYSTEM]


def echo(text: str) -> str:
    return f'{{"kind":"tool_call","tool_name":"stub_echo","arguments":{{"text":"{text}"}}}}'


# -- the tests that the page prints -------------------------------------------------------------------


def test_run_step_appends_assistant_and_tool_messages_to_session() -> None:
    model = scripted_model('{"kind":"tool_call","tool_name":"stub_echo","arguments":{"text":"pong"}}')
    session = session_of(registry_with_stub_echo(model, max_steps=1).run_sync("hi"))
    assert len(session) == 3
    assert session[1].role is Role.ASSISTANT
    assert session[2].role is Role.TOOL
    assert session[2].content == "pong"


def test_run_loop_errors_when_max_steps_exceeded() -> None:
    model = scripted_model(
        '{"kind":"tool_call","tool_name":"stub_echo","arguments":{"text":"a"}}',
        '{"kind":"tool_call","tool_name":"stub_echo","arguments":{"text":"b"}}',
    )
    result = registry_with_stub_echo(model, max_steps=2).run_sync("hi")
    assert isinstance(result.outcome, PartialRunSummary)
    assert result.outcome.failure is not None
    assert result.outcome.failure.kind is FailureKind.iteration_limit
    assert "2" in result.outcome.failure.explanation
    assert not result.ok


def test_run_loop_returns_final_immediately() -> None:
    model = scripted_model('{"kind":"final","content":"done"}')
    assert registry_with_stub_echo(model).run_sync("hi").output == "done"


def test_run_loop_executes_tool_then_returns_final() -> None:
    model = scripted_model(
        '{"kind":"tool_call","tool_name":"stub_echo","arguments":{"text":"pong"}}',
        '{"kind":"final","content":"finished"}',
    )
    assert registry_with_stub_echo(model).run_sync("hi").output == "finished"


def test_run_loop_runs_multiple_tools_then_final() -> None:
    model = scripted_model(
        '{"kind":"tool_call","tool_name":"stub_echo","arguments":{"text":"one"}}',
        '{"kind":"tool_call","tool_name":"stub_echo","arguments":{"text":"two"}}',
        '{"kind":"final","content":"both done"}',
    )
    assert registry_with_stub_echo(model).run_sync("hi").output == "both done"


# -- 8.1 to 8.4: the shape of the loop, and the session ----------------------------------------------


def test_a_tool_goes_round_the_loop_and_a_final_answer_leaves_it() -> None:
    model = scripted_model(echo("pong"), '{"kind":"final","content":"finished"}')
    result = registry_with_stub_echo(model).run_sync("hi")
    assert transitions_taken(result) == [
        "pre_step: otherwise -> call_llm",
        "call_llm: otherwise -> post_llm",
        "post_llm: tool_calls -> dispatch_tool",
        "dispatch_tool: otherwise -> post_tool",
        "post_tool: otherwise -> pre_step",
        "pre_step: otherwise -> call_llm",
        "call_llm: otherwise -> post_llm",
        "post_llm: otherwise -> terminal",
    ]


def test_the_session_starts_with_the_users_message() -> None:
    model = scripted_model('{"kind":"final","content":"done"}')
    registry_with_stub_echo(model).run_sync("hi")
    assert [m for m in model.requests[0].messages if m.role is not Role.SYSTEM] == [Message.user("hi")]


def test_every_request_carries_the_whole_session_so_far() -> None:
    model = scripted_model(echo("one"), echo("two"), '{"kind":"final","content":"both done"}')
    session = session_of(registry_with_stub_echo(model).run_sync("hi"))
    seen = [[m for m in r.messages if m.role is not Role.SYSTEM] for r in model.requests]
    assert [len(each) for each in seen] == [1, 3, 5]
    for each in seen:
        assert each == session[: len(each)]


def test_the_reply_is_recorded_before_it_is_read() -> None:
    model = scripted_model("no envelope at all", '{"kind":"final","content":"done"}')
    result = registry_with_stub_echo(model).run_sync("hi")
    assert session_of(result)[1] == Message.assistant("no envelope at all")


def test_the_session_holds_what_the_model_returned_not_what_was_made_of_it() -> None:
    fenced = '```json\n{"kind":"final","content":"done"}\n```'
    result = registry_with_stub_echo(scripted_model(fenced)).run_sync("hi")
    assert result.output == "done"
    assert session_of(result)[-1].content == fenced


def test_the_model_sees_the_tools_result_on_the_next_call() -> None:
    model = scripted_model(
        echo("pong"), lambda messages: f'{{"kind":"final","content":"it said {messages[-1].content}"}}'
    )
    assert registry_with_stub_echo(model).run_sync("hi").output == "it said pong"


# -- 8.5 to 8.8: the budget --------------------------------------------------------------------------


@pytest.mark.parametrize("max_steps", [1, 2, 5])
def test_max_steps_means_so_many_attempts_and_not_one_more(max_steps: int) -> None:
    model = scripted_model(*(echo(str(i)) for i in range(9)))
    result = registry_with_stub_echo(model, max_steps).run_sync("hi")
    assert len(model.requests) == max_steps
    assert tool_result_texts(result.messages) == [str(i) for i in range(max_steps)]


def test_a_final_answer_on_the_last_step_is_in_time() -> None:
    model = scripted_model(echo("a"), '{"kind":"final","content":"just so"}')
    assert registry_with_stub_echo(model, max_steps=2).run_sync("hi").output == "just so"


def test_the_spent_budget_is_the_loops_own_outcome_no_crash_of_model_or_tool() -> None:
    result = registry_with_stub_echo(scripted_model(echo("a")), max_steps=1).run_sync("hi")
    assert isinstance(result.outcome, PartialRunSummary)
    assert "final answer" in result.outcome.missing
    assert result.outcome.learned_facts == ()  # a spent budget teaches nothing
    assert all(not m.is_error for m in result.messages)
    assert transitions_taken(result)[-2:] == ["pre_step: iteration_limit -> recover", "recover: stop -> terminal"]


# -- 8.9 and 8.10: who owns the session, and the default of the command -------------------------------


def test_a_caller_can_own_the_session_and_pass_it_in() -> None:
    first = registry_with_stub_echo(scripted_model(echo("pong"), '{"kind":"final","content":"one"}')).run_sync("hi")
    model = scripted_model('{"kind":"final","content":"two"}')
    second = registry_with_stub_echo(model).run_sync("and now?", message_history=first.messages)
    assert session_of(second)[:4] == session_of(first)
    assert [m.content for m in model.requests[0].messages if m.role is Role.USER] == ["hi", "and now?"]
    assert sum(m.role is Role.SYSTEM for m in second.messages) == 1


def test_the_default_budget_is_five() -> None:
    model = scripted_model(*(echo(str(i)) for i in range(9)))
    result = Agent(model, tools=[stub_echo], preset="feedback").run_sync("hi")
    assert len(model.requests) == 5
    assert isinstance(result.outcome, PartialRunSummary)


def test_the_mock_run_of_the_command_line() -> None:
    model = scripted_model('{"kind":"final","content":"mock run: you said hello"}')
    result = Agent(model, tools=[stub_echo], preset="feedback").run_sync("hello")
    assert result.output == "mock run: you said hello"
    assert isinstance(result.outcome, RunCompleted)
