"""Failures: the row of each kind, equality, and the round trip through JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentfsm.errors import ModelError, ReadOnlyError, ToolError
from agentfsm.loop.failures import LIMIT_KINDS, PROVIDER_KINDS, TOOL_REPORTABLE_KINDS, Action, Failure, FailureKind

BY_HAND = {
    "transient_provider": "retry",
    "provider_error": "handoff",
    "context_overflow": "narrow_scope",
    "output_truncated": "retry",
    "output_refused": "handoff",
    "output_malformed": "retry",
    "ambiguous_input": "ask_user",
    "scope_too_large": "narrow_scope",
    "capability_gap": "handoff",
    "no_progress": "narrow_scope",
    "loop_detected": "ask_user",
    "repeated_error": "handoff",
    "unknown_tool": "retry",
    "invalid_arguments": "retry",
    "tool_error": "retry",
    "environment_error": "retry",
    "policy_violation": "handoff",
    "kernel_invalidated": "narrow_scope",
    "aborted": "stop",
    "iteration_limit": "ask_user",
    "time_limit": "ask_user",
    "token_limit": "ask_user",
    "cost_limit": "ask_user",
}


def test_the_kinds_and_their_default_actions_are_those_of_the_rules():
    assert {k.value: k.spec.action.value for k in FailureKind} == BY_HAND
    assert [k.value for k in FailureKind] == list(dict.fromkeys(k.value for k in FailureKind))
    assert {k.value for k in FailureKind} == set(BY_HAND)
    assert [a.value for a in Action] == ["retry", "narrow_scope", "ask_user", "handoff", "stop"]


def test_the_limits_are_the_four_budgets():
    assert {k.value for k in LIMIT_KINDS} == {"iteration_limit", "time_limit", "token_limit", "cost_limit"}


def test_the_defaults_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FailureKind.aborted.spec.action = Action.retry  # type: ignore[misc]
    with pytest.raises(AttributeError):
        FailureKind.aborted.spec = FailureKind.tool_error.spec  # type: ignore[misc]


def test_the_docstring_of_tool_error_lists_the_kinds_that_a_tool_may_report():
    listed = (
        (ToolError.__doc__ or "")
        .partition("``FailureKind`` that a tool may report:")[2]
        .partition("\n        blockers")[0]
    )
    assert sorted(re.findall(r"``(\w+)``", listed)) == sorted(TOOL_REPORTABLE_KINDS)


def test_every_model_error_reports_a_kind_of_the_provider():
    def kinds(error: type[ModelError]) -> set[str]:
        return {error.kind}.union(
            *(kinds(each) for each in error.__subclasses__() if each.__module__ == "agentfsm.errors")
        )

    assert kinds(ModelError) == set(PROVIDER_KINDS)


@pytest.mark.parametrize("kind", FailureKind)
@pytest.mark.parametrize("given", [{}, {"suggested_action": None}])
def test_the_suggested_action_is_never_none(kind, given):
    assert Failure(kind=kind, explanation="x", **given).suggested_action == BY_HAND[kind.value]


def test_an_explicit_suggested_action_is_kept():
    assert Failure(kind="tool_error", explanation="x", suggested_action="stop").suggested_action is Action.stop


def test_a_list_of_blockers_becomes_a_tuple():
    assert Failure(kind="tool_error", explanation="x", blockers=["a", "b"]).blockers == ("a", "b")


@pytest.mark.parametrize(
    "more",
    [
        {"suggested_action": "stop"},
        {"partial_data": {"a": 1}},
        {"metadata": {"attempt": 3}},
    ],
)
def test_two_failures_are_equal_when_kind_explanation_and_blockers_are(more):
    one = Failure(kind="tool_error", explanation="x", blockers=("b",))
    other = Failure(kind="tool_error", explanation="x", blockers=("b",), **more)
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other}) == 1


@pytest.mark.parametrize(
    "other",
    [
        Failure(kind="environment_error", explanation="x", blockers=("b",)),
        Failure(kind="tool_error", explanation="y", blockers=("b",)),
        Failure(kind="tool_error", explanation="x", blockers=("c",)),
        Failure(kind="tool_error", explanation="x"),
    ],
)
def test_two_failures_differ_in_any_of_the_three(other):
    assert Failure(kind="tool_error", explanation="x", blockers=("b",)) != other


def test_a_failure_is_not_equal_to_anything_else():
    assert Failure(kind="tool_error", explanation="x") != "tool_error"


def test_a_failure_cannot_be_changed():
    failure = Failure(kind="tool_error", explanation="x")
    with pytest.raises(ReadOnlyError):
        failure.explanation = "y"  # type: ignore[misc]


@pytest.mark.parametrize("bad", [{"kind": "bad_luck"}, {"kind": "tool_error", "surprise": 1}, {"explanation": None}])
def test_what_is_no_failure_is_refused(bad):
    with pytest.raises(ValidationError):
        Failure(**{"kind": "tool_error", "explanation": "x", **bad})


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@given(
    st.builds(
        Failure,
        kind=st.sampled_from(FailureKind),
        explanation=texts,
        blockers=st.lists(texts, max_size=3),
        suggested_action=st.none() | st.sampled_from(Action),
        partial_data=values,
        metadata=st.dictionaries(texts, values, max_size=3),
    )
)
def test_a_failure_is_the_same_after_a_trip_through_json(failure):
    back = Failure.model_validate_json(failure.model_dump_json())
    assert back == failure
    assert back.model_dump() == failure.model_dump()
    assert Failure.model_validate(json.loads(json.dumps(failure.model_dump(mode="json")))) == failure


def test_what_json_cannot_hold_becomes_what_it_can():
    class Odd:
        def __repr__(self) -> str:
            return "<odd>"

    failure = Failure(
        kind="tool_error", explanation="x", partial_data={1, 2}, metadata={"odd": Odd(), "nan": math.nan, "raw": b"ab"}
    )
    assert sorted(failure.partial_data) == [1, 2]
    assert failure.metadata["odd"] == "<odd>"
    assert json.loads(failure.model_dump_json())["metadata"]["nan"] is None
    assert Failure.model_validate_json(failure.model_dump_json()).metadata == failure.metadata


def test_half_a_character_of_a_files_name_becomes_a_question_mark():
    """What ``os.fsdecode`` makes of a name that is not UTF-8 is part of the text of an ``OSError``."""
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    failure = Failure(
        kind="environment_error",
        explanation=name,
        blockers=[name],
        partial_data=[name],
        metadata={name: {"x": (name,)}},
    )
    assert (failure.explanation, failure.blockers, failure.partial_data) == ("caf?", ("caf?",), ["caf?"])
    assert failure.metadata == {"caf?": {"x": ["caf?"]}}
    assert Failure.model_validate_json(failure.model_dump_json()) == failure
