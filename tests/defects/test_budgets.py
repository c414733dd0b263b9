"""Budgets and instructions: N iterations are N model calls, and one-time texts are sent once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from agentfsm import (
    Action,
    Agent,
    AgentGuardrails,
    ContextOverflowError,
    Failure,
    FailureKind,
    FinishReason,
    Message,
    PartialRunSummary,
    ProviderError,
    Reply,
    RunState,
    TransientProviderError,
    UserInputRequested,
)
from agentfsm.loop.presets import PRESETS
from agentfsm.testing import RecordingModel, call
from tests.helpers.scenarios import (
    check_run,
    echo,
    explode,
    make_host,
    request_text,
    run_with_replies,
    scripted_model,
    transitions_taken,
    truncated_reply,
)

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
    "a cut-off reply": lambda i: truncated_reply(text=str(i)),
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
    model = scripted_model(*(FAULTS[fault](i) for i in range(limit + 5)))
    guardrails = AgentGuardrails(max_iterations=limit, on_limit="stop", repeated_error_threshold=99)
    agent = Agent(model, tools=[echo, explode], guardrails=guardrails, policy=AlwaysAgain())
    result = agent.run_sync("go")
    assert len(model.requests) == limit
    assert isinstance(result.outcome, PartialRunSummary)
    check_run(model, result)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_max_iterations_is_exact_in_every_preset(preset: str) -> None:
    def entry(i: int) -> Any:
        if preset == "feedback":
            return json.dumps({"kind": "tool_call", "tool_name": "echo", "arguments": {"text": str(i)}})
        return call("echo", text=str(i))

    model = scripted_model(*map(entry, range(9)))
    guardrails = AgentGuardrails(max_iterations=4, on_limit="stop")
    result = Agent(model, tools=[echo], preset=preset, guardrails=guardrails).run_sync("go")
    assert len(model.requests) == 4
    assert isinstance(result.outcome, PartialRunSummary)


def test_recoveries_spend_the_same_iterations_as_steps_that_work() -> None:
    model = scripted_model(
        TransientProviderError("503"),
        call("explode"),
        truncated_reply(text="half"),
        call("nonexistent"),
        call("echo", text="a"),
    )
    guardrails = AgentGuardrails(max_iterations=5, on_limit="stop")
    result = Agent(model, tools=[echo, explode], guardrails=guardrails, host=make_host()).run_sync("go")
    assert len(model.requests) == 5
    assert result.run_state.model_calls == 5
    assert transitions_taken(result)[-2:] == ["pre_step: iteration_limit -> recover", "recover: stop -> terminal"]


@pytest.mark.parametrize("budget", [1, 2])
def test_a_person_who_extends_the_budget_gets_exactly_as_many_again(budget: int) -> None:
    model = scripted_model(*(call("echo", text=str(i)) for i in range(99)))
    agent = Agent(model, tools=[echo], guardrails=AgentGuardrails(max_iterations=budget), host=make_host())
    for replies in (1, 2, 3):
        model.requests.clear()
        result = asyncio.run(run_with_replies(agent, "go", *["go on"] * replies))
        assert len(model.requests) == budget * (1 + replies)
        assert isinstance(result.outcome, UserInputRequested if replies < 3 else PartialRunSummary)  # max_continues


# -- a one-shot instruction stands in exactly one request --------------------------------------------


def seen_in(model: RecordingModel, words: str) -> list[int]:
    return [i for i, request in enumerate(model.requests) if words in request_text(request)]


def test_an_instruction_is_in_exactly_one_request() -> None:
    model = scripted_model(
        "just talking", call("echo", text="a"), call("echo", text="b"), call("return_done", output="x")
    )
    result = Agent(model, tools=[echo], preset="funnel").run_sync("go")
    assert result.output == "x"
    assert seen_in(model, "return_unable if it") == [1]
    assert "return_unable if it" not in "\n".join(m.content for m in result.messages)


def test_an_instruction_is_kept_until_a_model_call_succeeds() -> None:
    model = scripted_model(
        "just talking", TransientProviderError("503"), call("echo", text="a"), call("return_done", output="")
    )
    Agent(model, tools=[echo], preset="funnel", host=make_host()).run_sync("go")
    assert seen_in(model, "return_unable if it") == [1, 2]  # the first of them got no answer


def test_an_instruction_survives_a_suspension_and_is_in_one_request() -> None:
    model = scripted_model("just talking", call("echo", text="a"), call("return_done", output="x"))
    guardrails = AgentGuardrails(max_iterations=1, max_steps=99)
    agent = Agent(model, tools=[echo], preset="funnel", guardrails=guardrails, host=make_host())
    result = asyncio.run(run_with_replies(agent, "go", "go on", "go on"))
    assert result.output == "x"
    assert seen_in(model, "return_unable if it") == [1]


ANSWERS_NO_CALL = {
    "truncated": ("standard", truncated_reply(text="half a"), "Continue exactly where it stopped"),
    "truncated with a call": ("standard", truncated_reply(call("echo", "c1", text="a")), "Make the call again"),
    "text only": ("breaker", "just talking", "contains no tool call"),
}


@pytest.mark.parametrize("case", ANSWERS_NO_CALL)
def test_feedback_that_answers_no_call_is_in_exactly_one_request(case: str) -> None:
    preset, entry, words = ANSWERS_NO_CALL[case]
    end = call("return_done", output="x") if preset == "breaker" else "x"
    model = scripted_model(entry, call("echo", text="a"), end)
    guardrails = AgentGuardrails(max_iterations=9)
    result = Agent(model, tools=[echo], preset=preset, guardrails=guardrails).run_sync("go")
    assert result.output == "x"
    told = [i for i, r in enumerate(model.requests) if words in r.messages[-1].content]
    assert told == [1]
    check_run(model, result)


def test_feedback_on_a_malformed_answer_is_in_exactly_one_request() -> None:
    model = scripted_model("no number", "12 apples", "12")
    agent = Agent(model, output_type=int)
    result = agent.run_sync("how many?")
    assert result.output == 12
    assert seen_in(model, "could not be read") == [1, 2]  # one for each of the two bad answers
    assert [request_text(r).count("could not be read") for r in model.requests] == [0, 1, 1]


def test_a_model_call_that_failed_is_repeated_with_its_feedback() -> None:
    """The model has not seen the first of the two requests, which are the same."""
    model = scripted_model(truncated_reply(text="half a"), TransientProviderError("busy"), call("echo", text="a"), "x")
    result = Agent(model, tools=[echo], host=make_host()).run_sync("go")
    assert result.output == "x"
    assert seen_in(model, "Continue exactly where it stopped") == [1, 2]
    assert model.requests[1].messages == model.requests[2].messages


def test_feedback_that_answers_a_call_is_its_result_and_stays() -> None:
    model = scripted_model(call("nonexistent"), call("echo", text="a"), "x")
    Agent(model, tools=[echo]).run_sync("go")
    assert seen_in(model, "There is no tool named 'nonexistent'") == [1, 2]
