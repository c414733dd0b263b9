"""``on_outcome``: how each outcome changes a run."""

from __future__ import annotations

from typing import Any

import pytest

from agentfsm.loop import outcomes as o
from agentfsm.loop import prompts
from agentfsm.loop.failures import Action, FailureKind
from agentfsm.loop.human_input import HumanReply, PendingRequest, ReachedLimit
from agentfsm.loop.messages import FinishReason, Message, Reply, Role, Usage
from agentfsm.loop.reducer import on_outcome
from agentfsm.loop.state import CallState, RunState
from tests.helpers.scenarios import (
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


# -- time ---------------------------------------------------------------------------------------------


def test_active_time_is_what_effects_took_and_the_silence_between_them():
    run = make_run()
    on_outcome(run, o.PreStepDone(), duration_s=2.0, silence_s=0.5)
    on_outcome(run, o.PreStepDone(), duration_s=1.0, silence_s=0.25)
    assert run.elapsed_s == 3.75
    assert run.silence_s == 0.5


def test_time_spent_suspended_is_never_charged():
    run = make_run("suspended", pending_request=PendingRequest("question", "?"))
    on_outcome(run, o.HumanAnswered(HumanReply("text", "x")), duration_s=9999, silence_s=9999)
    assert (run.elapsed_s, run.silence_s) == (0, 0)


# -- pre_step -----------------------------------------------------------------------------------------


def test_what_a_memory_recalls_stands_before_the_question_in_the_same_message():
    run = make_run(messages=[Message.system("be good"), Message.user("hi")])
    on_outcome(run, o.PreStepDone("you like tea"))
    assert run.messages == [Message.system("be good"), prompts.with_memory(Message.user("hi"), "you like tea")]
    assert prompts.without_memory(run.messages[1]) == Message.user("hi")


@pytest.mark.parametrize(
    ("elapsed", "grace_s", "before", "after"),
    [(5, 2, "", "now"), (4.9, 2, "", ""), (5, 0, "", ""), (6, 2, "used", "used"), (6, 2, "now", "now")],
)
def test_the_last_turn_is_granted_once_when_the_time_is_over(elapsed, grace_s, before, after):
    limits = {"max_execution_time_s": 5, "finalize_grace_s": grace_s}
    run = make_run(elapsed_s=elapsed, final_turn=before, limits=limits)
    on_outcome(run, o.PreStepDone())
    assert run.final_turn == after


def test_without_a_time_limit_there_is_no_last_turn():
    run = make_run(elapsed_s=9e9, limits={"max_execution_time_s": None, "finalize_grace_s": 2})
    on_outcome(run, o.PreStepDone())
    assert run.final_turn == ""


def test_the_last_turn_is_over_with_its_model_call():
    run = make_run("call_llm", final_turn="now")
    on_outcome(run, o.ModelCallSucceeded(make_reply("x")))
    assert run.final_turn == "used"


# -- call_llm -----------------------------------------------------------------------------------------


def test_a_reply_is_stored_at_once_and_one_time_feedback_is_cleared():
    run = make_run("call_llm", pending_instruction="I", feedback="F", silence_s=20, messages=[Message.user("hi")])
    reply = Reply(Message.assistant("x"), FinishReason.LENGTH, Usage(3, 4, cost_usd=0.5))
    on_outcome(run, o.ModelCallSucceeded(reply))
    on_outcome(run, o.ModelCallSucceeded(reply))
    assert run.messages == [Message.user("hi"), reply.message, reply.message]
    assert run.reply is reply
    assert (run.pending_instruction, run.feedback, run.silence_s) == (None, None, 0)
    assert (run.iterations, run.model_calls) == (2, 2)
    assert run.usage == Usage(6, 8, cost_usd=1.0)


def test_a_failed_call_counts_as_a_call_and_says_nothing_to_the_model():
    run = make_run("call_llm", pending_instruction="I", feedback="F", silence_s=20)
    on_outcome(run, o.ModelCallFailed(make_failure("provider_error")))
    assert run.failure == make_failure("provider_error")
    assert (run.iterations, run.model_calls, run.silence_s) == (1, 1, 0)
    assert (run.pending_instruction, run.feedback) == ("I", "F")
    assert run.messages == []


def test_a_failed_model_call_clears_the_last_reply():
    run = make_run("call_llm", reply=make_reply("", ONE))
    on_outcome(run, o.ModelCallFailed(make_failure("provider_error")))
    assert run.reply is None


# -- post_llm -----------------------------------------------------------------------------------------


def test_what_a_reply_says_replaces_what_the_last_one_said():
    run = make_run("post_llm", answer="old", malformed="old")
    on_outcome(run, o.ReplyParsed(calls=(ONE, TWO)))
    assert [c.call for c in run.batch] == [ONE, TWO]
    assert (run.answer, run.malformed) == (None, None)


# -- recover ------------------------------------------------------------------------------------------


def recovered(kind: str, action: str, **more: Any) -> RunState:
    limits, rules = more.pop("limits", None), more.pop("behavior", None)
    again, wait = more.pop("retry_calls", False), more.pop("backoff_s", 0.0)
    run = make_run("recover", failure=make_failure(kind), limits=limits, behavior=rules, **more)
    on_outcome(run, o.RecoveryDecided(Action(action), wait, again))
    return run


@pytest.mark.parametrize("action", Action)
def test_every_action_counts_the_failure_and_records_its_lesson(action):
    run = recovered("tool_error", action, backoff_s=1.5)
    assert run.failure_attempts == {K.tool_error: 1}
    assert run.lessons_learned == [make_failure("tool_error")]
    assert run.action == action


def test_without_a_failure_nothing_is_counted():
    run = make_run("recover")
    on_outcome(run, o.RecoveryDecided(Action.retry))
    assert (run.failure_attempts, run.lessons_learned) == ({}, [])


@pytest.mark.parametrize("kind", ["output_malformed", "output_refused", "no_progress", "loop_detected"])
def test_feedback_that_no_tool_result_carries_is_one_time(kind):
    run = recovered(kind, "retry")
    assert run.feedback == prompts.feedback_text(make_failure(kind), run.behavior)
    assert run.messages == []


@pytest.mark.parametrize("kind", ["tool_error", "unknown_tool", "transient_provider"])
def test_feedback_in_a_tool_result_is_not_repeated(kind):
    assert recovered(kind, "retry").feedback is None


def test_kept_feedback_on_calls_that_were_not_run_is_the_end_of_their_results():
    call = make_call("9")
    run = recovered(
        "output_truncated", "retry",
        behavior={"feedback": "kept"},
        batch=pending_calls(call),
        reply=make_reply("", call, finish="length"),
        messages=[Message.assistant("", (call,))],
    )  # fmt: skip
    assert run.feedback is None
    (result,) = run.messages[1:]  # a message of its own would be sent as a user message after a tool result
    assert (result.role, result.tool_call_id, result.is_error) == (Role.TOOL, "9", True)
    assert result.content == f"{prompts.NOT_RUN_TEXTS['truncated']}\n\n{prompts.truncation_feedback('call')}"


def test_kept_feedback_on_a_reply_without_calls_is_a_tool_message():
    run = recovered("output_malformed", "retry", behavior={"feedback": "kept"}, messages=[Message.assistant("{")])
    assert run.messages[1:] == [
        Message(Role.TOOL, prompts.feedback_text(make_failure("output_malformed"), run.behavior), is_error=True)
    ]


@pytest.mark.parametrize(
    ("limits", "before", "after"),
    [
        ({"max_output_tokens": 100}, None, 200),
        ({"max_output_tokens": 100}, 200, 400),
        ({"max_output_tokens": 100, "max_output_tokens_limit": 150}, None, 150),
        ({"max_output_tokens": 100, "max_output_tokens_limit": 50}, None, 100),
        ({}, None, None),
    ],
)
def test_a_truncated_reply_raises_the_cap_up_to_its_limit(limits, before, after):
    assert recovered("output_truncated", "retry", limits=limits, output_cap=before).output_cap == after


@pytest.mark.parametrize(
    ("limits", "calls", "said", "so_far"),
    [
        ({}, (), "answer", "half"),
        ({}, (make_call("1"),), "call", ""),
        ({"max_output_tokens": 9}, (), "more_room", ""),
        ({"max_output_tokens": 9}, (make_call("1"),), "more_room", ""),
        ({"max_output_tokens": 9, "max_output_tokens_limit": 9}, (), "answer", "half"),
    ],
)
def test_a_truncated_reply_is_repeated_if_the_limit_can_rise_and_continued_otherwise(limits, calls, said, so_far):
    reply, batch = make_reply("half", *calls, finish="length"), pending_calls(*calls)
    run = recovered("output_truncated", "retry", limits=limits, reply=reply, batch=batch)
    assert (run.feedback, run.partial_answer) == (prompts.truncation_feedback(said), so_far)


def test_a_partial_answer_that_is_not_continued_is_dropped():
    for action in ("narrow_scope", "ask_user", "handoff", "stop"):
        assert recovered("output_truncated", action, partial_answer="half").partial_answer == ""
    assert recovered("transient_provider", "retry", partial_answer="half").partial_answer == "half"


def test_other_failures_leave_the_cap_alone():
    assert recovered("output_malformed", "retry", limits={"max_output_tokens": 9}).output_cap is None


@pytest.mark.parametrize(
    "kind", ["no_progress", "scope_too_large", "kernel_invalidated", "context_overflow", "tool_error"]
)
def test_narrow_scope_sets_the_instruction_of_the_next_request(kind):
    run = recovered(kind, "narrow_scope")
    assert run.pending_instruction == prompts.narrow_scope_instruction(make_failure(kind), run.behavior)
    assert run.feedback is None


def test_a_prompt_that_was_too_long_loses_its_older_results():
    messages = [Message.user(str(i)) for i in range(10)]
    assert recovered("context_overflow", "narrow_scope", messages=messages).elided == 6
    assert recovered("scope_too_large", "narrow_scope", messages=messages).elided == 0
    assert recovered("context_overflow", "narrow_scope", messages=messages[:2]).elided == 0
    assert recovered("context_overflow", "narrow_scope", messages=messages, elided=8).elided == 8


def test_a_stall_is_forgotten_once_it_was_dealt_with():
    assert recovered("no_progress", "narrow_scope", silence_s=99).silence_s == 0
    assert recovered("tool_error", "retry", silence_s=9).silence_s == 9


@pytest.mark.parametrize(
    ("kind", "waits"), [("loop_detected", "question"), ("ambiguous_input", "question"), ("time_limit", "limit")]
)
def test_ask_user_sets_the_pending_request(kind, waits):
    run = recovered(kind, "ask_user", elapsed_s=301.5)
    reached = ReachedLimit("seconds", spent=301.5, limit=300, default=300) if waits == "limit" else None
    assert run.pending_request == PendingRequest(
        waits, prompts.recovery_question(make_failure(kind)), failure_kind=K(kind), limit=reached
    )


def test_running_calls_again_clears_the_failed_ones_alone():
    batch = [CallState(c, c.signature) for c in (ONE, TWO)]
    batch[0].result, batch[1].result = failed_result(ONE, retryable=True), ok_result(TWO)
    run = recovered("tool_error", "retry", retry_calls=True, batch=batch, call_failures={K.tool_error: make_failure()})
    assert run.batch[0].result is not None
    take_transition(run, "recover.retry_tool")
    assert [c.result for c in run.batch] == [None, ok_result(TWO)]
    assert [c.retries for c in run.batch] == [1, 0]
    assert run.call_failures == {}
    assert run.retry_calls is False
    assert (run.counters["tool_retries"], run.counters["pending_calls"]) == (1, 1)
    assert len(run.batch) == 2


def test_failed_calls_keep_their_results_in_a_graph_that_does_not_run_them_again():
    batch = [CallState(ONE, ONE.signature)]
    batch[0].result = failed_result(ONE, retryable=True)
    run = recovered("tool_error", "retry", retry_calls=True, batch=batch, call_failures={K.tool_error: make_failure()})
    take_transition(run, "recover.otherwise")
    assert [m.content for m in run.messages if m.role is Role.TOOL] == ["it broke"]


@pytest.mark.parametrize("transition", ["recover.otherwise", "recover.retry_tool"])
def test_a_run_that_continues_has_no_current_failure(transition):
    run = recovered("tool_error", "retry")
    take_transition(run, transition)
    assert (run.failure, run.action) == (None, None)


@pytest.mark.parametrize("transition", ["recover.handoff", "recover.ask_user"])
def test_a_run_that_ends_or_waits_keeps_its_failure(transition):
    run = recovered("tool_error", "handoff")
    take_transition(run, transition)
    assert run.failure == make_failure("tool_error")


def test_a_reply_of_another_kind_breaks_the_row_of_equal_errors():
    assert recovered("output_malformed", "retry", error_key=("a", "b", "c", "d"), error_streak=4).error_streak == 0
    assert recovered("tool_error", "retry", error_key=("a", "b", "c", "d"), error_streak=4).error_streak == 4


def test_a_retry_after_a_final_text_always_gives_feedback():
    """A detector of one's own on a reply: the model must hear why it is asked again."""
    run = recovered("scope_too_large", "retry", messages=[Message.user("x"), Message.assistant("an answer")])
    assert run.feedback is not None
    assert "it broke" in run.feedback


# -- the other outcomes -------------------------------------------------------------------------------


def test_expired_and_no_outcome():
    run = make_run("suspended")
    on_outcome(run, o.Expired())
    assert run.expired
    before = repr(run)
    on_outcome(run, None)
    assert repr(run) == before


def test_the_result_of_a_custom_state_is_stored_under_its_name():
    run = make_run("review")
    on_outcome(run, o.StateResult({"score": 3}, (Message.user("hm"),)))
    assert run.state_results == {"review": {"score": 3}}
    assert run.messages == [Message.user("hm")]
    on_outcome(run, o.StateResult())
    assert run.state_results == {"review": {"score": 3}}


def test_a_cancellation_keeps_what_had_ended_by_then():
    run = make_run("dispatch_tool", batch=pending_calls(ONE, TWO), reply=make_reply("", ONE, TWO))
    on_outcome(run, o.Cancelled("stop", (ok_result(ONE),)))
    assert run.cancelled == "stop"
    take_transition(run, "dispatch_tool.cancelled")
    assert [m.content for m in run.messages] == ["fine", prompts.NOT_RUN_TEXTS["cancelled"]]


def test_the_first_failure_that_aborts_a_run_wins():
    run = make_run("dispatch_tool", batch=pending_calls(ONE))
    on_outcome(run, o.Aborted(make_failure("aborted", "first"), (ok_result(ONE),)))
    on_outcome(run, o.Aborted(make_failure("aborted", "second")))
    assert run.aborted == make_failure("aborted", "first")
    assert run.batch[0].result == ok_result(ONE)
    run.abort("x", ValueError())
    assert run.aborted == make_failure("aborted", "first")


def test_what_is_no_outcome_is_refused():
    with pytest.raises(KeyError):
        on_outcome(make_run(), "done")  # type: ignore[arg-type]
