"""Each preset is a few lines of configuration over the one loop: what it changes, and that it changes nothing else."""

from __future__ import annotations

import dataclasses

import pytest

from agentfsm.loop.failures import Action, FailureKind
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.presets import PRESETS, Preset
from agentfsm.loop.recovery_policy import DefaultPolicy
from agentfsm.loop.transition_table import LOOP

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


def test_standard_is_every_default():
    assert PRESETS["standard"] == Preset("standard", Behavior(), DefaultPolicy(), AgentGuardrails(), LOOP)
    rules = Behavior()
    assert (rules.text_is_answer, rules.control_tools, rules.envelope) == (True, False, False)
    assert (rules.feedback, rules.environment_errors, rules.attempts_scope) == ("once", "retry", "streak")


def test_funnel_registers_control_tools_and_takes_no_text_for_an_answer():
    funnel = PRESETS["funnel"]
    assert (funnel.behavior.control_tools, funnel.behavior.text_is_answer) == (True, False)
    assert dataclasses.replace(funnel, name="standard", behavior=Behavior()) == PRESETS["standard"]


def test_feedback_has_five_steps_keeps_feedback_and_ends_on_the_worlds_errors():
    feedback = PRESETS["feedback"]
    assert feedback.guardrails.max_iterations == 5
    assert feedback.guardrails.on_limit == "stop"
    assert feedback.behavior == Behavior(
        envelope=True, feedback="kept", addendum=False, environment_errors="terminal", attempts_scope="run"
    )
    budgets = {k: feedback.policy.retry_budget(k) for k in FailureKind}
    assert {k for k, budget in budgets.items() if budget} == MODEL_ERRORS
    assert all(budgets[k] > 10_000 for k in MODEL_ERRORS)


def test_breaker_feeds_errors_back_until_five_equal_ones_and_has_no_cap_on_iterations():
    breaker = PRESETS["breaker"]
    assert breaker.guardrails.max_iterations is None
    assert breaker.guardrails.repeated_error_threshold == 5
    assert breaker.behavior.feedback == "once"
    assert all(breaker.policy.retry_budget(k) > 10_000 for k in MODEL_ERRORS | {K.environment_error})
    assert breaker.policy.retry_budget(K.transient_provider) == 0
    assert isinstance(breaker.policy, DefaultPolicy)
    assert breaker.policy.actions == {K.no_progress: Action.retry}


def test_strict_takes_a_tools_failure_for_conversation_and_a_models_for_the_end():
    strict = PRESETS["strict"]
    gone = {t.id for t in LOOP} - {t.id for t in strict.graph}
    assert gone == {
        "post_tool.policy_violation",
        "post_tool.repeated_error",
        "post_tool.unknown_tool",
        "post_tool.invalid_arguments",
        "post_tool.environment_error",
        "post_tool.tool_error",
    }
    assert strict.graph.name == "strict"
    assert {k for k in FailureKind if strict.policy.retry_budget(k)} == {K.output_truncated}


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "strict"])
def test_every_other_preset_runs_on_the_one_loop(name):
    assert PRESETS[name].graph is LOOP


def test_a_choice_that_there_is_not_is_refused():
    for choice in ({"feedback": "loud"}, {"environment_errors": "ignore"}, {"attempts_scope": "day"}, {"mood": 1}):
        with pytest.raises(ValueError, match=next(iter(choice))):
            Behavior(**choice)
