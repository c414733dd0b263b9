"""The texts about failures for the model and for people."""

from __future__ import annotations

import pytest

from agentfsm.loop import prompts
from agentfsm.loop.failures import LIMIT_KINDS, FailureKind
from tests.helpers.scenarios import make_failure


@pytest.mark.parametrize("kind", FailureKind)
@pytest.mark.parametrize("say", [prompts.feedback_text, prompts.narrow_scope_instruction, prompts.recovery_question])
def test_every_kind_has_texts_without_unfilled_placeholders(say, kind):
    text = say(make_failure(kind.value, "EXPLAINED {braces}"))
    assert text
    assert "{explanation}" not in text


@pytest.mark.parametrize("kind", ["tool_error", "output_malformed", "scope_too_large", "kernel_invalidated"])
def test_the_texts_contain_the_explanation(kind):
    assert "EXPLAINED" in prompts.feedback_text(make_failure(kind, "EXPLAINED")) + prompts.narrow_scope_instruction(
        make_failure(kind, "EXPLAINED")
    )


@pytest.mark.parametrize("kind", sorted(LIMIT_KINDS))
def test_the_question_names_the_spent_budget(kind):
    assert "EXPLAINED" in prompts.recovery_question(make_failure(kind.value, "EXPLAINED"))


@pytest.mark.parametrize(("kind", "limit"), [("token_limit", "max_tokens"), ("cost_limit", "max_cost_usd")])
def test_the_question_says_when_no_reply_can_extend_the_budget(kind, limit):
    """A reply resets the time and iteration budgets only, and the question must not suggest otherwise."""
    text = prompts.recovery_question(make_failure(kind))
    assert "No reply can extend it" in text
    assert limit in text


def test_no_progress_offers_the_control_tools_as_first_class_choices():
    text = prompts.narrow_scope_instruction(make_failure("no_progress"))
    assert all(name in text for name in ("ask_user", "return_done", "return_unable"))


def test_an_unknown_tool_is_answered_with_the_registered_ones_sorted():
    text = prompts.unknown_tool_text("fetch", ["zip", "add", "mix"])
    assert "'fetch'" in text
    assert "add, mix, zip" in text


def test_where_no_tool_is_registered_an_unknown_one_is_answered_with_that():
    assert prompts.unknown_tool_text("fetch", []).endswith("No tool is registered: answer in words.")


def test_bad_arguments_are_answered_with_every_bad_field():
    text = prompts.invalid_arguments_text("add", ["a: missing", "b: not a number"])
    assert "'add'" in text
    assert "a: missing; b: not a number" in text


def test_a_repeat_is_counted():
    assert "3 times" in prompts.repeated_call_note(3)
