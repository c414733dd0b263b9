"""Each preset is a few lines of configuration over the one loop: what it changes, and that it changes nothing else."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from agentfsm import Agent
from agentfsm.loop.failures import Action, FailureKind
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.presets import PRESETS, Preset
from agentfsm.loop.transition_table import LOOP
from agentfsm.testing import ScriptedModel
from tests.helpers.scenarios import make_failure, make_run

K = FailureKind
MODEL_ERRORS = {K.output_malformed, K.unknown_tool, K.invalid_arguments, K.tool_error}


def test_the_presets_are_named_for_what_they_do():
    assert list(PRESETS) == ["standard", "funnel", "feedback", "breaker", "strict"]
    assert all(preset.name == name for name, preset in PRESETS.items())


def test_the_presets_cannot_be_changed():
    with pytest.raises(TypeError):
        PRESETS["mine"] = Preset("mine")  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["standard"].name = "x"  # type: ignore[misc]


TOOL_KINDS = {K.tool_error, K.unknown_tool, K.invalid_arguments, K.environment_error}
PUBLISHED_BUDGETS = {
    K.transient_provider: 3,
    K.output_truncated: 1,
    K.output_malformed: 2,
    **dict.fromkeys(TOOL_KINDS, 2),
}
LACKED_ROWS: dict[str, set[str]] = {
    "standard": set(),
    "funnel": {"post_tool.repeated_error"},
    "feedback": {
        "pre_step.no_progress",
        "post_llm.output_truncated",
        "post_llm.output_refused",
        "post_llm.loop_detected",
        "post_llm.no_progress",
        "post_tool.repeated_error",
    },
    "breaker": {
        "pre_step.no_progress",
        "post_llm.output_truncated",
        "post_llm.output_refused",
        "post_llm.loop_detected",
        "post_llm.no_progress",
    },
    "strict": {
        "pre_step.no_progress",
        "post_llm.loop_detected",
        "post_llm.no_progress",
        "post_tool.policy_violation",
        "post_tool.repeated_error",
        "post_tool.ambiguous_input",
        "post_tool.scope_too_large",
        "post_tool.capability_gap",
        "post_tool.kernel_invalidated",
        "post_tool.unknown_tool",
        "post_tool.invalid_arguments",
        "post_tool.environment_error",
        "post_tool.tool_error",
    },
}


def budgets(name: str) -> dict[FailureKind, int]:
    """The retry budgets of a preset, without those that are 0."""
    return {kind: budget for kind in FailureKind if (budget := PRESETS[name].policy.retry_budget(kind))}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_lacks_the_rows_that_contradict_its_source_and_no_others(name):
    rows, loop = {t.id for t in PRESETS[name].graph}, {t.id for t in LOOP}
    assert loop - rows == LACKED_ROWS[name]
    assert rows - loop == ({"post_llm.answer_not_serializable"} if name == "strict" else set())
    assert PRESETS[name].graph.name == ("loop" if name == "standard" else name)


@pytest.mark.parametrize("name", PRESETS)
def test_the_rows_for_cancellation_aborts_and_limits_stay(name):
    rows = {t.id for t in PRESETS[name].graph}
    for state in ("pre_step", "call_llm", "post_llm", "dispatch_tool", "post_tool", "recover"):
        assert {f"{state}.cancelled", f"{state}.aborted"} <= rows
    limits = ("runaway", "iteration_limit", "time_limit", "token_limit", "cost_limit")
    assert {f"pre_step.{limit}" for limit in limits} <= rows


@pytest.mark.parametrize("name", ["feedback", "breaker", "strict"])
@pytest.mark.parametrize("kind", [K.transient_provider, K.provider_error, K.context_overflow])
def test_every_failed_model_call_ends_the_run(name, kind):
    assert PRESETS[name].policy.decide(make_failure(kind.value), make_run()) is Action.handoff


def test_standard_is_every_default_with_five_retries_for_each_kind_of_failed_call():
    standard = PRESETS["standard"]
    assert (standard.behavior, standard.guardrails, standard.graph) == (Behavior(), AgentGuardrails(), LOOP)
    assert budgets("standard") == PUBLISHED_BUDGETS | dict.fromkeys(TOOL_KINDS, 5)
    rules = Behavior()
    assert (rules.text_is_answer, rules.control_tools, rules.envelope) == (True, False, False)
    assert (rules.feedback, rules.environment_errors, rules.attempts_scope) == ("once", "retry", "streak")
    assert (rules.addendum, rules.repeats, rules.missing_call) == (True, "results", "no_progress")


def test_funnel_registers_control_tools_takes_no_text_for_an_answer_and_counts_calls_alone():
    funnel = PRESETS["funnel"]
    assert funnel.behavior == Behavior(control_tools=True, text_is_answer=False, repeats="calls")
    assert (funnel.guardrails, budgets("funnel")) == (AgentGuardrails(), PUBLISHED_BUDGETS)


def test_without_a_row_for_it_a_reply_without_a_call_completes_a_run_of_funnel_without_output():
    graph = PRESETS["funnel"].graph.without("post_llm.no_progress")
    result = Agent(ScriptedModel(["only text"]), preset="funnel", graph=graph).run_sync("go")
    assert result.decisions[-1].transition.ends == "completed"
    assert (result.ok, result.output) == (True, None)


def test_feedback_has_five_steps_keeps_feedback_and_ends_on_the_worlds_errors():
    feedback = PRESETS["feedback"]
    limits = feedback.guardrails
    assert (limits.max_iterations, limits.max_execution_time_s, limits.on_limit) == (5, None, "stop")
    assert limits.max_tool_result_chars is None
    assert feedback.behavior == Behavior(
        envelope=True, feedback="kept", addendum=False, environment_errors="terminal", attempts_scope="run"
    )
    assert budgets("feedback").keys() == MODEL_ERRORS
    assert all(budget > 10_000 for budget in budgets("feedback").values())


def test_breaker_feeds_errors_back_until_five_equal_ones_and_has_no_cap_on_iterations():
    breaker = PRESETS["breaker"]
    assert breaker.guardrails.max_iterations is None
    assert breaker.guardrails.repeated_error_threshold == 5
    assert breaker.behavior == Behavior(
        control_tools=True, text_is_answer=False, missing_call="malformed", addendum=False
    )
    assert budgets("breaker").keys() == MODEL_ERRORS | {K.environment_error}
    assert all(budget > 10_000 for budget in budgets("breaker").values())


@pytest.mark.parametrize("name", ["breaker", "strict"])
def test_where_the_source_has_no_limit_none_acts_on_an_ordinary_run(name):
    limits = PRESETS[name].guardrails
    assert (limits.max_iterations, limits.max_tokens, limits.max_cost_usd) == (None, None, None)
    assert limits.max_tool_result_chars is None
    assert limits.max_execution_time_s == 86_400
    assert limits.step_limit == 10_000


def test_the_page_about_presets_lists_the_rows_that_each_lacks():
    page = (Path(__file__).parents[2] / "docs" / "presets.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| (`[a-z_]+\.[^|]+) \|$", page, re.MULTILINE)
    assert {name: set(re.findall(r"`([^`]+)`", rows)) for name, rows in listed} == {
        name: rows for name, rows in LACKED_ROWS.items() if rows
    }


def test_strict_takes_a_tools_failure_for_conversation_and_a_models_for_the_end():
    assert PRESETS["strict"].behavior == Behavior(addendum=False)
    assert budgets("strict") == {K.output_truncated: 1}


def test_a_choice_that_there_is_not_is_refused():
    for choice in (
        {"feedback": "loud"},
        {"environment_errors": "ignore"},
        {"attempts_scope": "day"},
        {"repeats": "never"},
        {"missing_call": "fine"},
        {"mood": 1},
    ):
        with pytest.raises(ValueError, match=next(iter(choice))):
            Behavior(**choice)
