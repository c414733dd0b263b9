"""``dump_state`` and ``load_state``: any run survives the round trip; what JSON cannot represent is replaced."""

from __future__ import annotations

import datetime
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.failures import Action, Failure, FailureKind
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.human_input import HumanReply, PendingRequest
from agentfsm.loop.messages import FinishReason, Message, Reply, Role, ToolCall, ToolResult, Usage
from agentfsm.loop.state import CallState, RunState
from agentfsm.loop.state_json import dump_state, load_state
from tests.helpers.scenarios import make_failure, make_run

SURROGATES = st.sampled_from(["\ud800", "a\udfffb", "\udc80\ud800", "🙂\ud83d"])
WHOLE = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INTEGERS = st.integers()
COUNTS, SECONDS = st.integers(0, 2**40), st.floats(0, 1e12)


def runs(
    text: st.SearchStrategy[str] = WHOLE, number: st.SearchStrategy[Any] = INTEGERS
) -> st.SearchStrategy[RunState]:
    """Any run whose texts and free numbers are drawn from these."""
    scalars = st.none() | st.booleans() | number | text
    values = st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2), max_leaves=4
    )
    objects = st.dictionaries(text, values, max_size=2)
    calls = st.builds(ToolCall, text, text, objects, st.none() | text)
    failures = st.builds(
        Failure,
        kind=st.sampled_from(FailureKind),
        explanation=text,
        blockers=st.lists(text, max_size=2),
        suggested_action=st.none() | st.sampled_from(Action),
        partial_data=values,
        metadata=objects,
    )
    results = st.builds(
        ToolResult, text, text, text,
        st.sampled_from(["done", "failed", "denied", "skipped", "cut_off"]),
        st.none() | failures, text, st.sampled_from([None, "done", "unable", "ask"]), values, st.booleans(),
    )  # fmt: skip
    messages = st.builds(
        Message, st.sampled_from(Role), text,
        st.lists(calls, max_size=2).map(tuple), st.none() | text, st.none() | text, st.booleans(), st.none() | objects,
    )  # fmt: skip
    usages = st.builds(Usage, COUNTS, COUNTS, COUNTS, SECONDS)
    replies = st.builds(Reply, messages, st.sampled_from(FinishReason), usages, st.none() | text, text)
    entries = st.builds(
        CallState, call=calls, signature=text, result=st.none() | results, started=st.booleans(),
        approved=st.booleans(), edited=st.booleans(), retries=st.integers(0, 3),
    )  # fmt: skip
    waits = st.builds(
        PendingRequest, text, text, text, st.lists(text, max_size=2).map(tuple), st.none() | text, text, objects,
        st.none() | st.sampled_from(FailureKind),
    )  # fmt: skip
    limits = st.builds(
        AgentGuardrails,
        max_iterations=st.none() | st.integers(1, 99),
        finalize_grace_s=st.floats(0, 9),
        max_cost_usd=st.none() | st.floats(0.01, 9),
        on_limit=st.sampled_from(["ask_user", "stop", "handoff"]),
    )
    rules = st.builds(
        Behavior, text_is_answer=st.booleans(), envelope=st.booleans(), feedback=st.sampled_from(["once", "kept"])
    )
    return st.builds(
        RunState,
        run_id=text, session_id=text, state=text, guardrails=limits, behavior=rules,
        messages=st.lists(messages, max_size=3), deferred_messages=st.lists(messages, max_size=1),
        reply=st.none() | replies, malformed=st.none() | text, batch=st.lists(entries, max_size=2), answer=values,
        counters=st.dictionaries(text, COUNTS, max_size=3), model_calls=COUNTS,
        usage=usages, elapsed_s=SECONDS, silence_s=SECONDS,
        final_turn=st.sampled_from(["", "now", "used"]), failure=st.none() | failures,
        action=st.none() | st.sampled_from(Action), retry_calls=st.booleans(),
        failure_attempts=st.dictionaries(st.sampled_from(FailureKind), COUNTS, max_size=3),
        lessons_learned=st.lists(failures, max_size=2), pending_instruction=st.none() | text,
        feedback=st.none() | text, output_cap=st.none() | COUNTS, partial_answer=text, elided=COUNTS,
        call_failures=st.dictionaries(st.sampled_from(FailureKind), failures, max_size=2),
        recent_calls=st.lists(text, max_size=3), recent_results=st.lists(text, max_size=3),
        error_key=st.none() | st.tuples(text, text, text, text),
        error_streak=COUNTS, denials=COUNTS, pending_request=st.none() | waits,
        human_reply=st.none() | st.builds(HumanReply, text, text, objects),
        ending=st.none() | text, ending_value=values, cancelled=st.none() | text,
        aborted=st.none() | failures, expired=st.booleans(), state_results=objects,
    )  # fmt: skip


def plain(value: Any) -> Any:
    """A value with every tuple a list, to compare what the equality of failures leaves out too."""
    return json.loads(canonical_json(value))


@settings(max_examples=60, deadline=None)
@given(runs())
def test_a_run_is_the_same_after_a_trip_through_json(run):
    data = dump_state(run)
    text = canonical_json(data)
    back = load_state(json.loads(text.encode()))
    assert back == run
    assert dump_state(back) == plain(data)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(runs(WHOLE | SURROGATES, st.integers() | st.floats()))
def test_half_characters_and_numbers_that_are_none_do_not_stand_in_the_way(run):
    data = dump_state(run)
    text = canonical_json(data).encode()
    back = load_state(json.loads(text))
    assert plain(dump_state(back)) == plain(data)
    assert len(back.messages) == len(run.messages)


def test_half_a_character_becomes_a_question_mark():
    assert dump_state(make_run(messages=[Message.user("a\ud800b")]))["messages"][0]["content"] == "a?b"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_becomes_null(number):
    data = dump_state(make_run(answer={"x": [number]}, messages=[Message.user("\ud800")]))
    assert data["answer"] == {"x": [None]}
    assert data["messages"][0]["content"] == "?"


@pytest.mark.parametrize("odd", [math.nan, "\ud800"])
def test_what_json_cannot_hold_does_not_keep_other_values_from_it(odd):
    day = datetime.date(2024, 2, 29)
    assert dump_state(make_run(answer=[odd, day], state_results={"day": day}))["answer"][1] == "2024-02-29"


def test_a_big_integer_stays_what_it_is():
    assert load_state(json.loads(canonical_json(dump_state(make_run(answer=10**400))))).answer == 10**400


def test_what_is_read_back_is_as_it_was_typed():
    run = make_run(
        failure=make_failure("tool_error"),
        failure_attempts={FailureKind.tool_error: 2},
        batch=[CallState(ToolCall("1", "t"), "t:0", result=ToolResult("1", "t", "x"))],
        error_key=("a", "b", "c", "d"),
        pending_request=PendingRequest("question", "?", choices=("a",)),
    )
    back = load_state(json.loads(canonical_json(dump_state(run))))
    assert back.failure_attempts[FailureKind.tool_error] == 2
    assert next(iter(back.failure_attempts)) is FailureKind.tool_error
    assert isinstance(back.batch[0].result, ToolResult)
    assert back.error_key == ("a", "b", "c", "d")
    assert back.pending_request.choices == ("a",)
    assert isinstance(back.guardrails, AgentGuardrails)


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": None},
        {"messages": "none"},
        {"guardrails": {"max_iterations": 0}},
        {"failure": {"kind": "bad_luck", "explanation": "x"}},
        {"rules": {"manners": True}},
        {"steps": "many"},
    ],
)
def test_what_is_no_state_of_a_run_is_refused(change):
    with pytest.raises(ValidationError):
        load_state({**dump_state(make_run()), **change})
