"""``on_transition``: the failure found, the attempts reset, the batch closed."""

from __future__ import annotations

from typing import Any

import pytest

from agentfsm.loop import outcomes as o
from agentfsm.loop.failures import Action, FailureKind
from agentfsm.loop.human_input import HumanReply, PendingRequest
from agentfsm.loop.messages import ToolResult
from agentfsm.loop.reducer import on_outcome, on_transition
from agentfsm.loop.state import RunState
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import StateSpec, Transition
from tests.helpers.scenarios import (
    denied_result,
    failed_result,
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


# -- moves --------------------------------------------------------------------------------------------


def test_entering_pre_step_spends_a_step():
    run = make_run("recover", counters={"steps": 3})
    take_transition(run, "recover.otherwise")
    assert run.steps == 4


def test_the_failure_of_the_guard_becomes_the_runs_failure():
    run = make_run("pre_step")
    take_transition(run, "pre_step.time_limit", make_failure("time_limit"))
    assert run.failure == make_failure("time_limit")


def test_a_guard_that_only_says_yes_leaves_the_failure_alone():
    run = make_run("recover", failure=make_failure(), action=Action.handoff)
    take_transition(run, "recover.handoff", detected="yes")
    assert run.failure == make_failure()


# -- replies and their strikes ----------------------------------------------------------------------------


@pytest.mark.parametrize("attempts_scope", ["streak", "run"])
def test_a_good_reply_resets_the_attempts_of_the_output_kinds(attempts_scope):
    run = make_run("post_llm", behavior={"attempts_scope": attempts_scope}, batch=pending_calls(ONE))
    run.failure_attempts = {K.output_malformed: 1, K.no_progress: 1, K.tool_error: 1}
    take_transition(run, "post_llm.tool_calls")
    kept = {K.tool_error} if attempts_scope == "streak" else {K.output_malformed, K.no_progress, K.tool_error}
    assert set(run.failure_attempts) == kept


def test_a_failed_reply_resets_no_attempts():
    run = make_run("post_llm", failure_attempts={K.output_malformed: 1})
    take_transition(run, "post_llm.output_malformed", make_failure("output_malformed"))
    assert run.failure_attempts == {K.output_malformed: 1}
    assert run.failure == make_failure("output_malformed")


def test_a_successful_model_call_resets_the_attempts_of_the_provider_kinds():
    run = make_run("call_llm", failure_attempts={K.transient_provider: 2, K.context_overflow: 1, K.tool_error: 1})
    take_transition(run, "call_llm.otherwise")
    assert set(run.failure_attempts) == {K.tool_error}


def test_calls_that_are_let_through_are_remembered_for_the_loop_guard():
    run = make_run("post_llm", recent_calls=[str(i) for i in range(19)], batch=pending_calls(ONE, TWO))
    take_transition(run, "post_llm.tool_calls")
    assert run.recent_calls == [*(str(i) for i in range(1, 19)), ONE.signature, TWO.signature]


def test_calls_that_are_set_aside_are_not():
    run = make_run("post_llm", batch=pending_calls(ONE))
    take_transition(run, "post_llm.loop_detected", make_failure("loop_detected"))
    assert run.recent_calls == []


# -- the strikes of a batch ---------------------------------------------------------------------------


def judged(*results: ToolResult, transition: str = "post_tool.otherwise", **fields: Any) -> RunState:
    calls = [make_call(r.call_id) for r in results]
    run = make_run("dispatch_tool", batch=pending_calls(*calls), reply=make_reply("", *calls), **fields)
    on_outcome(run, o.ToolsRan(results))
    run.state = "post_tool"
    take_transition(run, transition, run.failure)
    return run


STRIKES = {K.tool_error: 1, K.unknown_tool: 1, K.transient_provider: 1}


def test_a_successful_tool_call_resets_the_attempts_of_the_tool_kinds():
    assert judged(ok_result(ONE), failure_attempts=dict(STRIKES)).failure_attempts == {K.transient_provider: 1}


def test_a_success_does_not_reset_kinds_that_failed_in_the_same_batch():
    run = judged(ok_result(ONE), failed_result(TWO), transition="post_tool.tool_error", failure_attempts=dict(STRIKES))
    assert run.failure_attempts == {K.tool_error: 1, K.transient_provider: 1}


@pytest.mark.parametrize("result", [failed_result(ONE, "environment_error"), denied_result(ONE)])
def test_without_a_success_no_attempts_are_reset(result):
    assert judged(result, failure_attempts=dict(STRIKES)).failure_attempts == STRIKES


def test_attempts_are_reset_only_once_the_batch_is_complete():
    """A success beside a call that still fails must not buy that call endless tries."""
    run = make_run(
        "post_tool", batch=pending_calls(ONE, TWO), reply=make_reply("", ONE, TWO), failure_attempts=dict(STRIKES)
    )
    on_outcome(run, o.ToolsRan((ok_result(ONE),)))
    take_transition(run, "post_tool.calls_pending")
    assert run.failure_attempts == STRIKES


def test_attempts_scope_run_never_resets_attempts():
    run = judged(ok_result(ONE), behavior={"attempts_scope": "run"}, failure_attempts=dict(STRIKES))
    assert run.failure_attempts == STRIKES


def test_the_circuit_breaker_and_the_denials_reset_after_recovery():
    run = make_run("post_tool", error_key=("a", "b", "c", "d"), error_streak=5)
    take_transition(run, "post_tool.repeated_error", make_failure("repeated_error"))
    assert (run.error_key, run.error_streak) == (None, 0)
    run = make_run("post_tool", denials=3)
    take_transition(run, "post_tool.policy_violation", make_failure("policy_violation"))
    assert run.denials == 0


def test_denials_that_are_not_acted_on_yet_are_still_counted():
    assert judged(failed_result(ONE), denied_result(TWO), transition="post_tool.tool_error").denials == 1
    assert judged(denied_result(ONE), denied_result(TWO)).denials == 2


# -- what was waited for ------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["work", "terminal"])
def test_a_custom_waiting_state_ends_with_the_answer(target):
    run = make_run("rest", pending_request=PendingRequest("question", "Go on?"), human_reply=HumanReply("text", "yes"))
    specs = {s.name: s for s in (StateSpec("rest", waits=True), StateSpec("work"), StateSpec("terminal", final=True))}
    run.state = target
    on_transition(run, Decision(Transition("rest", None, target), ()), specs)
    assert (run.pending_request is None, run.human_reply is None) == ((target == "work"),) * 2


def test_a_run_that_goes_on_waiting_keeps_its_request_and_the_answer():
    request = PendingRequest("approval", "May it pay?", call_id="1")
    run = make_run("rest", pending_request=request, human_reply=HumanReply("allow"))
    specs = {s.name: s for s in (StateSpec("rest", waits=True), StateSpec("other", waits=True))}
    for target in ("rest", "other"):
        on_transition(run, Decision(Transition("rest", None, target), ()), specs)
        assert (run.pending_request, run.human_reply) == (request, HumanReply("allow"))


@pytest.mark.parametrize("transition", [t for t in LOOP if t.ends], ids=lambda t: t.id)
def test_a_run_ends_as_its_last_row_says(transition):
    run = make_run(transition.source)
    take_transition(run, transition.id)
    assert (run.ended, run.done) == (transition.ends, True)


# -- a truncated answer --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transition", "found", "so_far"),
    [
        ("post_llm.output_truncated", "output_truncated", "half"),
        ("post_llm.output_malformed", "output_malformed", ""),
        ("post_llm.tool_calls", None, ""),
        ("post_llm.otherwise", None, ""),
    ],
)
def test_a_partial_answer_is_kept_until_the_next_reply_is_parsed(transition, found, so_far):
    run = make_run("post_llm", partial_answer="half")
    take_transition(run, transition, found and make_failure(found))
    assert run.partial_answer == so_far
