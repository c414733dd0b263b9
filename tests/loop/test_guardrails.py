"""Guardrails out of range are rejected with the field's name; defaults that depend on others are computed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from agentfsm.errors import ReadOnlyError
from agentfsm.loop.failures import Failure
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.models.settings import ModelSettings
from agentfsm.runtime.permissions import PermissionRule

DEFAULTS = {
    "max_iterations": 50,
    "max_execution_time_s": 300,
    "finalize_grace_s": 0,
    "max_tokens": None,
    "max_cost_usd": None,
    "max_steps": None,
    "max_continues": 3,
    "max_calls_per_reply": 64,
    "max_moves": None,
    "on_limit": "ask_user",
    "tool_timeout_s": 600,
    "max_tool_result_chars": 200_000,
    "hook_timeout_s": 60,
    "cancel_grace_s": 2,
    "llm_timeout_s": 60,
    "stream_heartbeat_s": 20,
    "stall_threshold_s": 30,
    "loop_soft_threshold": 2,
    "loop_hard_threshold": 6,
    "loop_window": 20,
    "repeated_error_threshold": 5,
    "max_denials": 3,
    "max_tool_retries": 1,
    "max_output_tokens": None,
    "max_output_tokens_limit": 32768,
    "validity_s": None,
}
MAY_BE_ZERO = {"finalize_grace_s", "max_continues", "max_tool_retries"}
NUMBERS = sorted(DEFAULTS.keys() - {"on_limit"})
SECONDS = sorted(n for n in NUMBERS if n.endswith("_s") or n == "max_cost_usd")


def refusal(**limits: object) -> str:
    with pytest.raises(ValidationError) as caught:
        AgentGuardrails(**limits)
    return str(caught.value)


def test_the_defaults_are_those_of_the_rules():
    assert AgentGuardrails().model_dump() == DEFAULTS


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [-1, -0.5, math.nan, math.inf, -math.inf, "many"])
def test_negative_nan_and_nonsense_are_refused_with_the_fields_name(name, value):
    assert name in refusal(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
def test_zero_is_refused_where_it_means_nothing(name):
    if name in MAY_BE_ZERO:
        assert getattr(AgentGuardrails(**{name: 0}), name) == 0
    else:
        assert name in refusal(**{name: 0})


@pytest.mark.parametrize("name", NUMBERS)
def test_a_small_positive_number_is_accepted(name):
    value = 0.5 if name in SECONDS else 2
    given = {name: value, **({"loop_hard_threshold": 2} if name == "loop_window" else {})}
    assert getattr(AgentGuardrails(**given), name) == value


@pytest.mark.parametrize("name", sorted(set(NUMBERS) - set(SECONDS)))
def test_a_count_is_an_integer(name):
    assert name in refusal(**{name: 1.5})


@pytest.mark.parametrize("word", ["stop", "handoff", "ask_user"])
def test_on_limit_has_three_values(word):
    assert AgentGuardrails(on_limit=word).on_limit == word


def test_another_word_is_refused():
    assert "on_limit" in refusal(on_limit="shrug")


def test_a_misspelt_limit_is_refused():
    assert "max_iteration" in refusal(max_iteration=3)


def test_limits_cannot_be_changed():
    with pytest.raises(ReadOnlyError):
        AgentGuardrails().max_iterations = 3  # type: ignore[misc]


# -- what hangs together ------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [{"max_execution_time_s": 5}, {"max_tokens": 5}, {"max_cost_usd": 5}])
def test_iterations_may_be_unlimited_while_another_budget_is_finite(other):
    limits = {"max_iterations": None, "max_execution_time_s": None, **other}
    assert AgentGuardrails(**limits).max_iterations is None


def test_a_run_without_any_budget_is_refused():
    text = refusal(max_iterations=None, max_execution_time_s=None)
    assert "max_iterations" in text
    assert "another budget" in text


def test_a_loop_that_could_never_be_seen_is_refused():
    assert "loop_hard_threshold" in refusal(loop_hard_threshold=21)
    assert AgentGuardrails(loop_hard_threshold=20).loop_window == 20


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({}, 4 * 50 * (1 + 3)),
        ({"max_iterations": 3}, 48),
        ({"max_iterations": 3, "max_continues": 0}, 12),
        ({"max_iterations": 3, "max_steps": 7}, 7),
        ({"max_iterations": None}, 10_000),
        ({"max_iterations": None, "max_steps": 9}, 9),
    ],
)
def test_the_number_of_steps_is_always_finite(limits, steps):
    assert AgentGuardrails(**limits).step_limit == steps


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: AgentGuardrails(no_such_limit=1),  # type: ignore[call-arg]
        lambda: Behavior(no_such_rule=1),  # type: ignore[call-arg]
        lambda: ModelSettings(no_such_setting=1),  # type: ignore[call-arg]
        lambda: PermissionRule(tool=["not", "a", "text"], decision="allow"),  # type: ignore[call-arg, arg-type]
        lambda: Failure(kind="no_such_kind", explanation="unknown"),  # type: ignore[arg-type]
    ],
    ids=["limits", "behavior", "settings", "permission", "failure"],
)
def test_objects_that_are_models_of_pydantic_refuse_with_its_error_what_they_do_not_know(wrong: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        wrong()
    assert isinstance(caught.value, ValueError)
