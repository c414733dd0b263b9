"""``on_human_answer``: a text, a decision about a call, the outcome of a call in doubt."""

from __future__ import annotations

from typing import Any

import pytest

from agentfsm.loop import outcomes as o
from agentfsm.loop import prompts
from agentfsm.loop.failures import Action, FailureKind
from agentfsm.loop.human_input import HumanReply, PendingRequest
from agentfsm.loop.messages import Message, Role, ToolCall, ToolResult, Usage
from agentfsm.loop.reducer import on_outcome
from agentfsm.loop.state import CallState, RunState
from tests.helpers.scenarios import (
    make_call,
    make_failure,
    make_reply,
    make_run,
    ok_result,
    pending_calls,
    take_transition,
)

K = FailureKind
ONE, TWO, THREE = make_call("1"), make_call("2"), make_call("3")


def answered(waiting: PendingRequest | None, said: HumanReply, **fields: Any) -> RunState:
    run = make_run("suspended", pending_request=waiting, **fields)
    on_outcome(run, o.HumanAnswered(said))
    return run


def test_a_text_is_a_users_message():
    run = answered(PendingRequest("question", "?"), HumanReply("text", "Paris"), messages=[Message.user("hi")])
    assert run.messages == [Message.user("hi"), Message.user("Paris")]
    assert run.human_reply == HumanReply("text", "Paris")


def test_an_open_batch_is_closed_in_front_of_a_users_message():
    run = answered(
        PendingRequest("question", "?", failure_kind=K.loop_detected),
        HumanReply("text", "Paris"),
        batch=pending_calls(ONE), reply=make_reply("", ONE), messages=[Message.assistant("", (ONE,))],
    )  # fmt: skip
    assert [m.role for m in run.messages] == [Role.ASSISTANT, Role.TOOL, Role.USER]


def test_the_answer_to_an_ask_user_call_is_that_calls_result():
    batch = [CallState(ONE, ONE.signature, result=ok_result(ONE)), CallState(TWO, TWO.signature), *pending_calls(THREE)]
    run = answered(
        PendingRequest("question", "?", call_id="2"),
        HumanReply("text", "Paris"),
        batch=batch, ending="ask", reply=make_reply("", ONE, TWO, THREE), messages=[Message.user("hi")],
    )  # fmt: skip
    take_transition(run, "suspended.replied")
    assert [(m.role, m.tool_call_id) for m in run.messages[1:]] == [
        (Role.TOOL, "1"),
        (Role.TOOL, "2"),
        (Role.TOOL, "3"),
    ]
    assert run.messages[2].content == "Paris"
    assert not run.messages[2].is_error
    assert run.messages[3].content == prompts.NOT_RUN_TEXTS["ask"]
    assert run.ending is None


@pytest.mark.parametrize(
    ("kind", "reset"),
    [
        (K.iteration_limit, {"counters": {"iterations": 0, "steps": 9, "continues": 1}}),
        (K.time_limit, {"elapsed_s": 0.0, "final_turn": ""}),
        (K.token_limit, {}),
        (K.cost_limit, {}),
    ],
)
def test_resuming_a_limit_resets_that_limit_and_nothing_else(kind, reset):
    usage = Usage(9, 9, cost_usd=9)
    counters = {"iterations": 7, "steps": 8}
    before = {"elapsed_s": 70.0, "final_turn": "used", "model_calls": 7, "usage": usage}
    run = answered(
        PendingRequest("limit", "?", failure_kind=kind), HumanReply("text", "go on"), counters=dict(counters), **before
    )
    assert run.counters == counters  # the row that is taken extends the limit, not the answer
    take_transition(run, "suspended.replied")
    after = {"counters": {**counters, "steps": 9, "continues": 1}, **before, **reset}
    assert {name: getattr(run, name) for name in after} == after


def test_any_other_answer_extends_no_budget():
    run = answered(
        PendingRequest("question", "?", failure_kind=K.ambiguous_input),
        HumanReply("text", "x"),
        counters={"iterations": 7},
    )
    take_transition(run, "suspended.replied")
    assert (run.continues, run.iterations) == (0, 7)


def test_an_answer_to_a_detected_loop_resets_the_counts():
    run = answered(
        PendingRequest("question", "?", failure_kind=K.loop_detected), HumanReply("text", "x"), recent_calls=["a"] * 5
    )
    assert run.recent_calls == []


APPROVAL = PendingRequest("approval", "?", call_id="1", tool="look")


def test_allowing_a_call_lets_it_run():
    run = answered(APPROVAL, HumanReply("allow"), batch=pending_calls(ONE))
    assert (run.batch[0].approved, run.batch[0].edited, run.batch[0].result) == (True, False, None)


@pytest.mark.parametrize(
    ("reason", "text"), [("too dear", "Denied by the user: too dear"), ("", "Denied by the user.")]
)
def test_denying_a_call_sets_its_result_and_is_not_a_failure(reason, text):
    run = answered(APPROVAL, HumanReply("deny", reason), batch=pending_calls(ONE))
    assert run.batch[0].denied == text
    assert (run.batch[0].approved, run.call_failures, run.failure) == (False, {}, None)


def test_editing_a_call_changes_its_arguments_and_not_its_signature():
    call = ToolCall("1", "look", {"a": 1}, malformed="x")
    run = answered(APPROVAL, HumanReply("edit", arguments={"a": 2}), batch=pending_calls(call))
    (entry,) = run.batch
    assert entry.call == ToolCall("1", "look", {"a": 2})
    assert entry.signature == call.signature
    assert entry.approved
    assert entry.edited


DOUBT = PendingRequest("in_doubt", "?", call_id="1", tool="look")


def in_doubt(kind: str, text: str = "") -> CallState:
    batch = pending_calls(ONE)
    batch[0].started = True
    return answered(DOUBT, HumanReply(kind, text), batch=batch).batch[0]


def test_a_call_that_ran_gets_the_result_that_a_person_reports():
    entry = in_doubt("ran", "it is 42")
    assert entry.result == ToolResult("1", "look", "it is 42")
    assert not entry.started


def test_a_call_that_did_not_run_is_as_if_never_started():
    entry = in_doubt("did_not_run")
    assert (entry.result, entry.started) == (None, False)


def test_the_result_of_a_call_given_up_is_unknown():
    entry = in_doubt("give_up")
    assert entry.result.status == "skipped"
    assert "not known" in entry.result.content
    assert not entry.started


def test_once_answered_a_run_waits_for_nothing():
    run = answered(
        PendingRequest("limit", "?", failure_kind=K.time_limit),
        HumanReply("text", "x"),
        failure=make_failure("time_limit"),
    )
    run.action = Action.ask_user
    take_transition(run, "suspended.replied")
    assert (run.human_reply, run.pending_request, run.failure, run.action) == (None, None, None, None)


def test_an_answer_to_a_run_that_waits_for_nothing_is_only_noted():
    run = answered(None, HumanReply("text", "x"))
    assert run.messages == []
    assert run.human_reply is not None


def test_a_decision_about_a_call_that_is_not_there_changes_nothing():
    run = answered(APPROVAL, HumanReply("allow"), batch=pending_calls(TWO))
    assert not run.batch[0].approved
