"""Replies truncated by their length: the answer is completed, or the run reports that it has none."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

from agentfsm import (
    Action,
    Agent,
    AgentGuardrails,
    Behavior,
    DefaultPolicy,
    Failure,
    FailureKind,
    FinishReason,
    Handoff,
    Message,
    Preset,
    Reply,
    RunResult,
    RunState,
    ToolCall,
    TransientProviderError,
    Usage,
    UserInputRequested,
)
from tests.helpers.scenarios import check_result, look, run_async, run_script, run_script_with_requests, scripted_agent

PLAIN = "Continue exactly where it stopped"
AGAIN = "send the complete message again"


def cut(text: str = "", *calls: ToolCall) -> Reply:
    return Reply(Message.assistant(text, calls), FinishReason.LENGTH)


def test_a_truncated_answer_that_is_continued_is_the_complete_output() -> None:
    result, requests = run_script_with_requests(cut("Once upon a time there"), " was a fox.")
    assert result.output == "Once upon a time there was a fox."
    assert PLAIN in requests[1].messages[-1].content


def test_a_reason_that_a_models_class_gives_as_a_string_counts() -> None:
    reply = Reply(Message.assistant("Once upon a time there"), "length")  # type: ignore[arg-type]
    assert run_script(reply, " was a fox.").output == "Once upon a time there was a fox."


def test_an_answer_that_is_repeated_in_full_is_not_joined() -> None:
    assert run_script(cut("Once upon"), "Once upon a time.").output == "Once upon a time."


def test_an_answer_that_is_started_again_in_other_words_is_not_joined() -> None:
    assert run_script(cut("The answer is fo"), "Sorry. It is 42.").output == "Sorry. It is 42."


def test_an_answer_that_used_up_its_cap_is_truncated_whatever_the_model_says() -> None:
    limits = AgentGuardrails(max_output_tokens=9, max_output_tokens_limit=9)
    full = Reply(Message.assistant("Once upon"), FinishReason.STOP, Usage(output_tokens=9))
    result, requests = run_script_with_requests(full, " a time.", guardrails=limits)
    assert (result.output, len(requests)) == ("Once upon a time.", 2)
    short = Reply(Message.assistant("Once upon"), FinishReason.STOP, Usage(output_tokens=8))
    assert run_script(short, guardrails=limits).output == "Once upon"


def test_a_call_that_used_up_its_cap_is_complete_if_its_arguments_are() -> None:
    call = ToolCall("c1", "look", {"where": "here"})
    full = Reply(Message.assistant("", (call,)), FinishReason.TOOL_CALLS, Usage(output_tokens=9))
    limits = AgentGuardrails(max_output_tokens=9)
    assert run_script(full, "done", guardrails=limits, tools=[look]).output == "done"


def test_with_more_room_the_answer_is_repeated_and_is_the_only_output() -> None:
    result, requests = run_script_with_requests(
        cut("Once upon a time there"),
        "Once upon a time there was a fox.",
        guardrails=AgentGuardrails(max_output_tokens=9),
    )
    assert result.output == "Once upon a time there was a fox."
    assert requests[1].max_output_tokens == 18
    assert AGAIN in requests[1].messages[-1].content


def test_at_the_limit_of_the_cap_the_answer_is_continued() -> None:
    limits = AgentGuardrails(max_output_tokens=9, max_output_tokens_limit=9)
    result, requests = run_script_with_requests(cut("Once upon"), " a time.", guardrails=limits)
    assert (result.output, requests[1].max_output_tokens) == ("Once upon a time.", 9)


def test_a_provider_error_between_the_halves_loses_neither() -> None:
    assert run_script(cut("Once upon"), TransientProviderError("503"), " a time.").output == "Once upon a time."


def test_a_truncated_answer_survives_a_suspension() -> None:
    limits = AgentGuardrails(max_iterations=1)
    agent, model = scripted_agent(cut("Once upon"), " a time.", guardrails=limits)

    assert check_result(run_async(lambda: answered(agent, "go on")), model).output == "Once upon a time."


async def answered(agent: Agent, reply: str) -> RunResult:
    outcome = (await agent.run("go")).outcome
    assert isinstance(outcome, UserInputRequested)
    return await agent.resume(outcome.suspension_record.to_json(), reply)


class Fox(BaseModel):
    name: str


@pytest.mark.parametrize("second", ['me": "Reineke"}', '{"name": "Reineke"}'], ids=["the rest", "all of it again"])
def test_a_structured_answer_may_be_continued_or_repeated(second: str) -> None:
    assert run_script(cut('{"na'), second, output_type=Fox).output == Fox(name="Reineke")


@pytest.mark.parametrize("again", [False, True])
def test_an_envelope_may_be_continued_or_repeated(again: bool) -> None:
    whole = json.dumps({"kind": "final", "content": "a fox"})
    script = (cut(whole[:20]), whole if again else whole[20:])
    assert run_script(*script, preset=Preset("envelopes", Behavior(envelope=True))).output == "a fox"


def test_a_truncated_call_must_be_made_again_and_is_not_continued() -> None:
    result, requests = run_script_with_requests(
        cut("I will look", ToolCall("c1", "look", {"where": "he"})), "There is nothing.", tools=[look]
    )
    assert result.output == "There is nothing."
    assert PLAIN not in requests[1].messages[-1].content
    assert "none of its calls was run" in requests[1].messages[-1].content


def test_text_after_a_call_is_a_separate_answer() -> None:
    script = [cut("I will"), Reply(Message.assistant("", (ToolCall("c1", "look", {}),))), "There is nothing."]
    assert run_script(*script, tools=[look]).output == "There is nothing."


def test_what_is_set_aside_is_no_part_of_the_answer() -> None:
    result = run_script(cut('{"na'), "no JSON at all", '{"name": "Reineke"}', output_type=Fox)
    assert result.output == Fox(name="Reineke")


def test_an_answer_that_is_truncated_again_and_again_is_handed_off() -> None:
    result = run_script(cut("a"), cut("b"))
    assert isinstance(result.outcome, Handoff)
    assert result.output is None


def test_a_policy_that_retries_longer_gets_every_part() -> None:
    policy = DefaultPolicy(budgets={FailureKind.output_truncated: 3})
    assert run_script(cut("a"), cut("b"), cut("c"), "d", policy=policy).output == "abcd"


def test_a_policy_that_asks_a_human_restarts_the_answer() -> None:
    class Asking(DefaultPolicy):
        def decide(self, failure: Failure, state: RunState) -> Action:
            return Action.retry if not state.attempts(failure.kind) else Action.ask_user

    agent, model = scripted_agent(cut("a"), cut("b"), "c", policy=Asking(budgets={FailureKind.output_truncated: 9}))

    assert check_result(run_async(lambda: answered(agent, "be short")), model).output == "c"
