"""When each guard of the loop fires and when it stays silent, by hand from the rules; none of them changes a run."""

from __future__ import annotations

import copy
import inspect

import pytest

from agentfsm.loop import detectors as d
from agentfsm.loop import guards
from agentfsm.loop.failures import Action, FailureKind
from agentfsm.loop.guardrails import Behavior
from agentfsm.loop.human_input import HumanReply, PendingRequest
from agentfsm.loop.messages import ToolCall, Usage
from agentfsm.loop.state import CallState, RunState
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.declaration import Exhausted
from tests.helpers.scenarios import failed_result, make_call, make_failure, make_reply, make_run, pending_calls

K = FailureKind


# -- all of them --------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [t for t in LOOP if t.guard is not None], ids=lambda t: t.id)
def test_a_guard_finds_nothing_in_a_fresh_run_and_changes_nothing(row):
    run = make_run(row.source)
    before = copy.deepcopy(run)
    assert not row.guard(run)
    assert run == before


@pytest.mark.parametrize("row", [t for t in LOOP if t.guard is not None], ids=lambda t: t.id)
def test_a_guard_is_a_plain_function_that_says_what_it_looks_for(row):
    assert inspect.isfunction(row.guard) or isinstance(row.guard, Exhausted)
    assert inspect.getdoc(row.guard)


# -- stops --------------------------------------------------------------------------------------------


def test_a_cancelled_run_is_one_with_a_reason_even_an_empty_one():
    assert guards.cancelled(make_run(cancelled=""))
    assert not guards.cancelled(make_run())


def test_an_aborted_run_is_one_with_a_failure():
    assert guards.aborted(make_run(aborted=make_failure("aborted")))


@pytest.mark.parametrize(("steps", "fires"), [(48, False), (49, True)])
def test_runaway_is_more_steps_than_allowed(steps, fires):
    """4 steps an iteration, for 3 iterations and as many for each of 3 extensions."""
    found = d.runaway(make_run(counters={"steps": steps}, limits={"max_iterations": 3}))
    assert bool(found) is fires
    if found:
        assert (found.kind, found.suggested_action, found.metadata) == (
            K.iteration_limit,
            Action.stop,
            {"max_steps": 48},
        )


# -- budgets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("made", "fires"), [(0, False), (2, False), (3, True), (4, True)])
def test_iteration_limit_is_n_calls_for_n(made, fires):
    found = d.iteration_limit(make_run(counters={"iterations": made}, limits={"max_iterations": 3}))
    assert bool(found) is fires
    if found:
        assert found.kind is K.iteration_limit
        assert "3" in found.explanation


def test_iteration_limit_may_be_none():
    assert d.iteration_limit(make_run(counters={"iterations": 10**6}, limits={"max_iterations": None})) is None


@pytest.mark.parametrize(("elapsed", "fires"), [(4.999, False), (5.0, True), (6.0, True)])
def test_time_limit_is_the_elapsed_time(elapsed, fires):
    found = d.time_limit(make_run(elapsed_s=elapsed, limits={"max_execution_time_s": 5}))
    assert bool(found) is fires
    if found:
        assert found.kind is K.time_limit


@pytest.mark.parametrize(("grace", "fires"), [("", True), ("now", False), ("used", True)])
def test_time_limit_lets_the_last_turn_pass(grace, fires):
    run = make_run(elapsed_s=6, final_turn=grace, limits={"max_execution_time_s": 5, "finalize_grace_s": 1})
    assert bool(d.time_limit(run)) is fires


def test_time_limit_may_be_none():
    assert d.time_limit(make_run(elapsed_s=1e9, limits={"max_execution_time_s": None})) is None


@pytest.mark.parametrize(("used", "fires"), [(99, False), (100, True)])
def test_token_limit_counts_input_and_output(used, fires):
    run = make_run(usage=Usage(used - 40, 40, cached_tokens=9), limits={"max_tokens": 100})
    assert bool(d.token_limit(run)) is fires
    assert d.token_limit(make_run(usage=Usage(10**9))) is None


@pytest.mark.parametrize(("used", "fires"), [(0.49, False), (0.5, True)])
def test_cost_limit_counts_dollars(used, fires):
    run = make_run(usage=Usage(cost_usd=used), limits={"max_cost_usd": 0.5})
    assert bool(d.cost_limit(run)) is fires
    assert d.cost_limit(make_run(usage=Usage(cost_usd=1e9))) is None


@pytest.mark.parametrize("action", ["ask_user", "stop", "handoff"])
@pytest.mark.parametrize(
    ("detector", "fields", "limits"),
    [
        (d.iteration_limit, {"counters": {"iterations": 1}}, {"max_iterations": 1}),
        (d.time_limit, {"elapsed_s": 1}, {"max_execution_time_s": 1}),
        (d.token_limit, {"usage": Usage(1)}, {"max_tokens": 1}),
        (d.cost_limit, {"usage": Usage(cost_usd=1)}, {"max_cost_usd": 1}),
    ],
)
def test_a_spent_budget_suggests_what_the_guardrails_say(detector, fields, limits, action):
    found = detector(make_run(**fields, limits={**limits, "on_limit": action}))
    assert found.suggested_action == action


# -- no progress --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("silence", "fires"), [(30.0, False), (30.1, True)])
def test_a_stall_is_silence_longer_than_the_threshold(silence, fires):
    found = d.no_progress(make_run("pre_step", silence_s=silence))
    assert bool(found) is fires
    if found:
        assert (found.kind, found.metadata) == (K.no_progress, {"stall": True})


def test_a_stall_is_seen_in_pre_step_alone():
    assert d.no_progress(make_run("post_llm", silence_s=99, reply=make_reply("text"), answer="text")) is None


@pytest.mark.parametrize(
    ("text", "answer", "control", "fires"),
    [
        ("an answer", "an answer", False, False),
        ("", "", False, True),
        ("  \n", "  \n", False, True),
        ("words", None, True, True),
        ("", None, True, True),
        ("{}", {"a": 1}, False, False),
    ],
)
def test_a_reply_brings_nothing_if_it_is_empty_or_only_talks_where_text_is_no_answer(text, answer, control, fires):
    rules = {"text_is_answer": not control, "control_tools": control}
    run = make_run("post_llm", reply=make_reply(text), answer=answer, behavior=rules)
    found = d.no_progress(run)
    assert bool(found) is fires
    assert found is None or found.kind is K.no_progress


@pytest.mark.parametrize("fields", [{"malformed": "no JSON"}, {"batch": pending_calls(make_call())}, {"reply": None}])
def test_a_reply_that_calls_or_cannot_be_read_is_not_idle(fields):
    assert d.no_progress(make_run("post_llm", **{"reply": make_reply(""), **fields})) is None


# -- the provider -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["transient_provider", "provider_error", "context_overflow"])
def test_a_failed_model_call_fires_only_the_detector_of_its_kind(name):
    run = make_run("call_llm", failure=make_failure(name))
    fired = [n for n in ("transient_provider", "provider_error", "context_overflow") if getattr(d, n)(run)]
    assert fired == [name]
    assert getattr(d, name)(run) is run.failure


# -- the reply ----------------------------------------------------------------------------------------


def test_a_reply_that_hits_its_token_limit_is_truncated():
    assert d.output_truncated(make_run("post_llm", reply=make_reply("x", finish="length"))).kind is K.output_truncated
    assert d.output_truncated(make_run("post_llm", reply=make_reply("x"))) is None


@pytest.mark.parametrize(
    ("reply", "blockers"),
    [
        (make_reply("I will not", finish="refusal"), ("I will not",)),
        (make_reply("", finish="content_filter"), ("stopped by content_filter",)),
        (make_reply("text", finish="content_filter", refusal=" No. "), ("No.",)),
        (make_reply("text", refusal="I must not."), ("I must not.",)),
        (make_reply("text"), None),
        (make_reply("text", finish="length"), None),
    ],
)
def test_a_refusal_is_its_own_blocker(reply, blockers):
    found = d.output_refused(make_run("post_llm", reply=reply))
    assert (found and found.blockers) == blockers
    assert found is None or found.suggested_action is Action.handoff


def test_a_reply_that_cannot_be_read_is_malformed_and_says_why():
    found = d.output_malformed(make_run("post_llm", malformed="no JSON at column 3"))
    assert (found.kind, found.explanation) == (K.output_malformed, "no JSON at column 3")
    assert d.output_malformed(make_run("post_llm", malformed="")) is not None


def test_tool_calls_is_whether_the_reply_calls():
    assert guards.tool_calls(make_run("post_llm", batch=pending_calls(make_call())))


# -- loops --------------------------------------------------------------------------------------------

SAME = make_call(name="look", where="here").signature


def looping(recent: int, now: int, *, others_between: int = 0, **limits: int) -> RunState:
    """``recent`` equal calls made, then some others, then ``now`` equal ones in the reply at hand."""
    others = [make_call(name="look", where=str(i)).signature for i in range(others_between)]
    batch = pending_calls(*(make_call(f"n{i}", where="here") for i in range(now)))
    return make_run("post_llm", recent_calls=[SAME] * recent + others, batch=batch, limits=limits)


@pytest.mark.parametrize(
    ("recent", "now", "fires"),
    [
        (0, 5, False),
        (4, 1, False),
        (5, 1, True),
        (0, 6, True),
        (0, 10, True),
        (3, 2, False),
        (3, 3, True),
        (5, 0, False),
    ],
)
def test_a_loop_is_seen_before_the_sixth_equal_call_runs(recent, now, fires):
    found = d.loop_detected(looping(recent, now))
    assert bool(found) is fires
    if found:
        assert found.kind is K.loop_detected
        assert found.metadata == {"signature": SAME, "count": 6}
        assert "'look'" in found.explanation


@pytest.mark.parametrize(("between", "fires"), [(0, True), (14, True), (15, False), (30, False)])
def test_only_the_last_twenty_calls_count(between, fires):
    """Five equal ones, ``between`` others, and the sixth: with the sixth, the window reaches 14 others back."""
    assert bool(d.loop_detected(looping(5, 1, others_between=between))) is fires


def test_the_window_slides_over_the_reply_itself():
    """Within one reply too, a call looks back over the calls in front of it and no further."""
    others = [make_call(f"o{i}", where=str(i)) for i in range(4)]
    batch = pending_calls(make_call("n0", where="here"), *others, make_call("n1", where="here"))
    run = make_run("post_llm", batch=batch, limits={"loop_window": 5, "loop_hard_threshold": 2})
    assert d.loop_detected(run) is None
    wider = make_run("post_llm", batch=batch, limits={"loop_window": 6, "loop_hard_threshold": 2})
    assert d.loop_detected(wider).metadata["count"] == 2


def test_old_repeats_alone_are_no_loop():
    run = make_run("post_llm", recent_calls=[SAME] * 6, batch=pending_calls(make_call(where="there")))
    assert d.loop_detected(run) is None


@pytest.mark.parametrize(
    ("results", "fires"),
    [
        (["a"] * 5, True),
        (["", "a", "", "a", "a"], True),  # an unknown result counts as equal
        ([], True),  # as in a run that was stored before results were compared
        (["a", "b", "c", "d", "e"], False),
        (["a", "a", "a", "a", "b"], False),  # something has changed since
        (["b", "a", "a", "a", "a"], False),
    ],
)
def test_only_calls_with_equal_results_are_equal(results, fires):
    run = looping(5, 1)
    run.recent_results = results
    assert bool(d.loop_detected(run)) is fires


def test_where_calls_alone_are_counted_their_results_do_not_matter():
    run = looping(5, 1)
    run.recent_results, run.behavior = ["a", "b", "c", "d", "e"], Behavior(repeats="calls")
    assert d.loop_detected(run)


def test_the_threshold_is_a_guardrail():
    assert d.loop_detected(looping(1, 1, loop_hard_threshold=2))
    assert d.loop_detected(looping(1, 1, loop_hard_threshold=3)) is None


def test_a_tool_name_with_a_colon_is_reported_in_full():
    batch = pending_calls(*(ToolCall(str(i), "a:b") for i in range(6)))
    assert "'a:b'" in d.loop_detected(make_run("post_llm", batch=batch)).explanation


# -- what a run waits for -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["approval", "in_doubt", "question", "limit"])
def test_approval_required_and_in_doubt_depend_on_the_pending_request(kind):
    run = make_run("dispatch_tool", pending_request=PendingRequest(kind, "?"))
    assert (guards.approval_required(run), guards.in_doubt(run)) == (kind == "approval", kind == "in_doubt")


@pytest.mark.parametrize(
    ("kind", "fired"),
    [
        ("text", "replied"),
        ("allow", "approval_decided"),
        ("deny", "approval_decided"),
        ("edit", "approval_decided"),
        ("ran", "doubt_settled"),
        ("did_not_run", "doubt_settled"),
        ("give_up", "doubt_settled"),
    ],
)
def test_a_persons_reply_fires_the_guard_of_its_kind_alone(kind, fired):
    run = make_run("suspended", human_reply=HumanReply(kind))
    assert [n for n in ("replied", "approval_decided", "doubt_settled") if getattr(guards, n)(run)] == [fired]


@pytest.mark.parametrize("kind", ["text", "extend", "fill", "allow", "deny", "edit", "ran", "did_not_run", "give_up"])
def test_a_reply_that_a_call_waits_for_decides_about_that_call_alone(kind):
    """A sub-agent or a tool asks, and its call continues with whatever the person replied."""
    reply = HumanReply(kind)
    run = make_run("suspended", human_reply=reply, batch=pending_calls(make_call()))
    run.batch[0].answer = reply
    assert [n for n in ("replied", "approval_decided", "doubt_settled") if getattr(guards, n)(run)] == [
        "approval_decided"
    ]


def test_expired_is_a_flag():
    assert guards.expired(make_run("suspended", expired=True))


# -- the batch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["done", "unable", "ask"])
def test_an_ending_fires_the_guard_of_its_kind_alone(ending):
    run = make_run("post_tool", ending=ending)
    assert (guards.declared_done(run), guards.declared_unable(run), guards.question_asked(run)) == (
        ending == "done", ending == "unable", ending == "ask",
    )  # fmt: skip


def test_calls_are_pending_while_one_has_no_result():
    first, second = make_call("1"), make_call("2")
    batch = [CallState(first, first.signature, result=failed_result(first)), CallState(second, second.signature)]
    run = make_run("post_tool", batch=batch)
    assert guards.calls_pending(run)
    batch[1].result = failed_result(second)
    assert not guards.calls_pending(run)


FROM_TOOLS = [
    "ambiguous_input", "scope_too_large", "capability_gap", "kernel_invalidated", "unknown_tool",
    "invalid_arguments", "environment_error", "tool_error", "policy_violation",
]  # fmt: skip


@pytest.mark.parametrize("name", FROM_TOOLS)
def test_a_failure_of_the_batch_fires_only_the_detector_of_its_kind(name):
    run = make_run("post_tool", call_failures={K(name): make_failure(name)})
    assert [n for n in FROM_TOOLS if getattr(d, n)(run)] == [name]


def test_the_other_failures_of_a_batch_stand_in_the_metadata():
    found = {
        K.tool_error: make_failure("tool_error", "t", metadata={"tool": "a"}),
        K.unknown_tool: make_failure("unknown_tool", "u"),
    }
    run = make_run("post_tool", call_failures=found)
    assert d.tool_error(run).metadata == {"tool": "a", "others": {"unknown_tool": "u"}}
    assert d.unknown_tool(run).metadata == {"others": {"tool_error": "t"}}
    assert found[K.tool_error].metadata == {"tool": "a"}


@pytest.mark.parametrize(("choice", "action"), [("retry", Action.retry), ("terminal", Action.handoff)])
def test_an_environment_error_may_be_terminal(choice, action):
    run = make_run(
        "post_tool",
        behavior={"environment_errors": choice},
        call_failures={K.environment_error: make_failure("environment_error")},
    )
    assert d.environment_error(run).suggested_action is action


@pytest.mark.parametrize(("denials", "fires"), [(2, False), (3, True), (4, True)])
def test_three_denials_in_a_row_are_a_policy_violation(denials, fires):
    found = d.policy_violation(make_run("post_tool", denials=denials))
    assert bool(found) is fires
    assert found is None or (found.kind is K.policy_violation and str(denials) in found.explanation)


@pytest.mark.parametrize(("streak", "fires"), [(4, False), (5, True)])
def test_five_equal_errors_in_a_row_open_the_breaker(streak, fires):
    run = make_run("post_tool", error_key=("tool_error", "look", "OSError", "no disk"), error_streak=streak)
    found = d.repeated_error(run)
    assert bool(found) is fires
    if found:
        assert (found.kind, found.blockers) == (K.repeated_error, ("no disk",))
        assert "'look' failed 5 times in a row" in found.explanation


def test_no_error_no_breaker():
    assert d.repeated_error(make_run("post_tool", error_streak=9)) is None


# -- the policy's decision ----------------------------------------------------------------------------


@pytest.mark.parametrize("action", Action)
def test_an_action_fires_the_guard_of_its_name_alone(action):
    run = make_run("recover", action=action)
    fired = [n for n in ("ask_user", "handoff", "stop") if getattr(guards, n)(run)]
    assert fired == ([action.value] if action.value in ("ask_user", "handoff", "stop") else [])


def test_retry_tool_is_a_flag_of_the_run():
    assert guards.retry_tool(make_run("recover", action=Action.retry, retry_calls=True))
    assert not guards.retry_tool(make_run("recover", action=Action.retry))
