"""How a run changes: what each outcome folds in, and what each move settles."""

from __future__ import annotations

from typing import Any

import pytest

from agentfsm.core import outcomes as o
from agentfsm.core import wording
from agentfsm.core.failures import Action, FailureKind
from agentfsm.core.fold import apply
from agentfsm.core.follow import follow
from agentfsm.core.loop import LOOP
from agentfsm.core.messages import FinishReason, Message, Reply, Role, ToolCall, ToolResult, Usage
from agentfsm.core.state import CallState, PersonReply, RunState, Waiting
from agentfsm.machine.engine import Decision
from tests.core.builders import a_call, a_reply, a_run, failing, failure, pending

K = FailureKind


def move(run: RunState, transition: str, found: Any = None) -> None:
    """Follow a row of the loop, as the machine would have taken it."""
    row = LOOP.transition(transition)
    assert run.state == row.source
    run.state = row.target
    follow(run, Decision(row, (), found))


def done(call: ToolCall, text: str = "fine", **more: Any) -> ToolResult:
    return ToolResult(call.id, call.name, text, **more)


def denied(call: ToolCall) -> ToolResult:
    return ToolResult(call.id, call.name, "no", "denied")


ONE, TWO, THREE = a_call("1"), a_call("2"), a_call("3")


# -- time ---------------------------------------------------------------------------------------------


def test_active_time_is_what_effects_took_and_the_silence_between_them():
    run = a_run()
    apply(run, o.Checked(), took_s=2.0, silence_s=0.5)
    apply(run, o.Checked(), took_s=1.0, silence_s=0.25)
    assert run.elapsed_s == 3.75
    assert run.silence_s == 0.5


def test_time_spent_suspended_is_never_charged():
    run = a_run("suspended", waiting=Waiting("question", "?"))
    apply(run, o.Answered(PersonReply("text", "x")), took_s=9999, silence_s=9999)
    assert (run.elapsed_s, run.silence_s) == (0, 0)


# -- pre_step -----------------------------------------------------------------------------------------


def test_a_back_off_is_over_once_it_was_waited_for():
    run = a_run(backoff_s=4)
    apply(run, o.Checked())
    assert run.backoff_s == 0


def test_what_a_memory_recalls_is_a_message_of_its_own():
    run = a_run(messages=[Message.user("hi")])
    apply(run, o.Checked("you like tea"))
    assert run.messages[0] == Message.user("hi")
    assert run.messages[1].role is Role.USER
    assert "you like tea" in run.messages[1].content
    apply(run, o.Checked(""))
    assert len(run.messages) == 2


@pytest.mark.parametrize(
    ("elapsed", "grace_s", "before", "after"),
    [(5, 2, "", "now"), (4.9, 2, "", ""), (5, 0, "", ""), (6, 2, "used", "used"), (6, 2, "now", "now")],
)
def test_the_last_turn_is_granted_once_when_the_time_is_over(elapsed, grace_s, before, after):
    limits = {"max_execution_time_s": 5, "finalize_grace_s": grace_s}
    run = a_run(elapsed_s=elapsed, grace=before, limits=limits)
    apply(run, o.Checked())
    assert run.grace == after


def test_the_last_turn_is_over_with_its_model_call():
    run = a_run("call_llm", grace="now")
    apply(run, o.Replied(a_reply("x")))
    assert run.grace == "used"


# -- call_llm -----------------------------------------------------------------------------------------


def test_a_reply_is_stored_before_it_is_judged_and_one_shot_words_have_been_said():
    run = a_run("call_llm", pending_instruction="I", feedback="F", silence_s=20, messages=[Message.user("hi")])
    reply = Reply(Message.assistant("x"), FinishReason.LENGTH, Usage(3, 4, cost_usd=0.5))
    apply(run, o.Replied(reply))
    apply(run, o.Replied(reply))
    assert run.messages == [Message.user("hi"), reply.message, reply.message]
    assert run.reply is reply
    assert (run.pending_instruction, run.feedback, run.silence_s) == (None, None, 0)
    assert (run.iterations, run.model_calls) == (2, 2)
    assert run.usage == Usage(6, 8, cost_usd=1.0)


def test_a_failed_call_counts_as_a_call_and_says_nothing_to_the_model():
    run = a_run("call_llm", pending_instruction="I", feedback="F", silence_s=20)
    apply(run, o.CallFailed(failure("provider_error")))
    assert run.failure == failure("provider_error")
    assert (run.iterations, run.model_calls, run.silence_s) == (1, 1, 0)
    assert (run.pending_instruction, run.feedback) == ("I", "F")
    assert run.messages == []


def test_a_failed_call_leaves_no_old_reply_to_be_judged_again():
    run = a_run("call_llm", reply=a_reply("", ONE))
    apply(run, o.CallFailed(failure("provider_error")))
    assert run.reply is None


# -- post_llm -----------------------------------------------------------------------------------------


def test_what_a_reply_says_replaces_what_the_last_one_said():
    run = a_run("post_llm", answer="old", malformed="old")
    apply(run, o.Read(calls=(ONE, TWO)))
    assert [c.call for c in run.batch] == [ONE, TWO]
    assert (run.answer, run.malformed) == (None, None)


@pytest.mark.parametrize("attempts_scope", ["streak", "run"])
def test_a_good_reply_forgives_the_strikes_of_its_kinds(attempts_scope):
    run = a_run("post_llm", rules={"attempts_scope": attempts_scope}, batch=pending(ONE))
    run.failure_attempts = {K.output_malformed: 1, K.no_progress: 1, K.tool_error: 1}
    move(run, "post_llm.tool_calls")
    kept = {K.tool_error} if attempts_scope == "streak" else {K.output_malformed, K.no_progress, K.tool_error}
    assert set(run.failure_attempts) == kept


def test_a_reply_that_is_recovered_from_forgives_nothing():
    run = a_run("post_llm", failure_attempts={K.output_malformed: 1})
    move(run, "post_llm.output_malformed", failure("output_malformed"))
    assert run.failure_attempts == {K.output_malformed: 1}
    assert run.failure == failure("output_malformed")


def test_a_call_that_worked_forgives_the_providers_strikes():
    run = a_run("call_llm", failure_attempts={K.transient_provider: 2, K.context_overflow: 1, K.tool_error: 1})
    move(run, "call_llm.otherwise")
    assert set(run.failure_attempts) == {K.tool_error}


def test_calls_that_are_let_through_are_remembered_for_the_loop_guard():
    run = a_run("post_llm", recent_calls=[str(i) for i in range(19)], batch=pending(ONE, TWO))
    move(run, "post_llm.tool_calls")
    assert run.recent_calls == [*(str(i) for i in range(1, 19)), ONE.signature, TWO.signature]


def test_calls_that_are_set_aside_are_not():
    run = a_run("post_llm", batch=pending(ONE))
    move(run, "post_llm.loop_detected", failure("loop_detected"))
    assert run.recent_calls == []


# -- dispatch_tool ------------------------------------------------------------------------------------


def test_results_are_kept_with_their_calls():
    run = a_run("dispatch_tool", batch=pending(ONE, TWO))
    run.batch[1].started = True
    apply(run, o.Ran((done(TWO),)))
    assert run.batch[0].result is None
    assert run.batch[1].result == done(TWO)
    assert run.batch[1].started is False


def test_a_result_that_answers_no_call_is_dropped():
    run = a_run("dispatch_tool", batch=pending(ONE))
    apply(run, o.Ran((done(TWO),)))
    assert run.batch[0].result is None


def test_the_first_failure_of_each_kind_is_the_batchs():
    run = a_run("dispatch_tool", batch=pending(ONE, TWO, THREE))
    apply(run, o.Ran((failing(ONE, text="a"), failing(TWO, text="b"), failing(THREE, "environment_error", "c"))))
    assert run.call_failures == {
        K.tool_error: failure("tool_error", "look: a"),
        K.environment_error: failure("environment_error", "look: c"),
    }


def test_equal_errors_in_a_row_are_counted_whatever_their_spaces():
    run = a_run("dispatch_tool", batch=pending(ONE, TWO, THREE))
    apply(run, o.Ran((failing(ONE, text="no  disk\n"), failing(TWO, text="no disk"))))
    assert (run.error_streak, run.error_key) == (2, ("tool_error", "look", "ValueError", "no disk"))
    apply(run, o.Ran((failing(THREE, text="no ink"),)))
    assert run.error_streak == 1


@pytest.mark.parametrize(
    "other",
    [
        failing(TWO, "environment_error"),
        failing(a_call("2", "listen")),
        failing(TWO, text="else"),
        ToolResult("2", "look", "it broke", "failed", failure("tool_error"), "OtherError"),
    ],
)
def test_another_key_starts_the_count_anew(other):
    calls = (ONE, a_call("2", other.name))
    run = a_run("dispatch_tool", batch=pending(*calls))
    apply(run, o.Ran((failing(ONE), other)))
    assert run.error_streak == 1


def test_a_success_starts_the_count_anew():
    run = a_run("dispatch_tool", batch=pending(ONE, TWO, THREE))
    apply(run, o.Ran((failing(ONE), done(TWO), failing(THREE))))
    assert run.error_streak == 1


@pytest.mark.parametrize(
    ("results", "denials"),
    [
        ((denied(ONE), denied(TWO)), 2),
        ((denied(ONE), done(TWO)), 0),
        ((denied(ONE), failing(TWO)), 0),
        ((denied(ONE), ToolResult("2", "look", "s", "skipped")), 1),
    ],
)
def test_denials_are_counted_in_a_row(results, denials):
    run = a_run("dispatch_tool", batch=pending(ONE, TWO))
    apply(run, o.Ran(results))
    assert run.denials == denials


@pytest.mark.parametrize("ending", ["done", "unable"])
def test_an_ending_is_kept_with_its_value(ending):
    run = a_run("dispatch_tool", batch=pending(ONE))
    apply(run, o.Ran((done(ONE, ending=ending, value={"a": 1}),)))
    assert (run.ending, run.ending_value) == (ending, {"a": 1})


def test_a_question_is_no_result_but_what_the_run_waits_for():
    value = {"question": "Which?", "context": "two", "choices": ["a", "b"]}
    run = a_run("dispatch_tool", batch=pending(ONE))
    apply(run, o.Ran((done(ONE, ending="ask", value=value),)))
    assert run.batch[0].result is None
    assert run.ending == "ask"
    assert run.waiting == Waiting("question", "Which?", "two", ("a", "b"), call_id="1", tool="look")


def test_a_call_that_must_wait_parks_the_run_and_keeps_what_could_not_run():
    waiting = Waiting("approval", "May it?", call_id="2", tool="look")
    run = a_run("dispatch_tool", batch=pending(ONE, TWO))
    apply(run, o.Parked(waiting, (failing(ONE, "unknown_tool"),)))
    assert run.waiting is waiting
    assert run.batch[0].result is not None
    assert run.batch[1].result is None


# -- the batch is closed ------------------------------------------------------------------------------


def closing(*results: ToolResult | None, **fields: Any) -> list[Message]:
    """The tool messages of a batch whose calls have these results, when the run goes on."""
    calls = [a_call(str(i), n=i) for i, _ in enumerate(results, 1)]
    batch = [CallState(c, c.signature, result=r) for c, r in zip(calls, results, strict=True)]
    run = a_run("post_tool", batch=batch, reply=a_reply("", *calls), **fields)
    move(run, "post_tool.otherwise")
    assert run.batch == []
    assert run.call_failures == {}
    return run.messages


def test_every_call_gets_its_one_message_in_the_order_of_the_calls():
    first, second = closing(done(ONE, "a"), failing(TWO, text="b"))
    assert first == Message(Role.TOOL, "a", tool_call_id="1", name="look")
    assert second == Message(Role.TOOL, "b", tool_call_id="2", name="look", is_error=True)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cancelled": "stop"}, "cancelled"),
        ({"aborted": failure("aborted")}, "aborted"),
        ({"ending": "done"}, "done"),
        ({"ending": "unable"}, "unable"),
        ({}, ""),
    ],
)
def test_a_call_without_a_result_is_told_why(fields, reason):
    (message,) = closing(None, **fields)
    assert message.content == wording.NOT_RUN[reason]
    assert (message.tool_call_id, message.is_error) == ("1", True)


def test_a_call_of_a_truncated_message_is_told_that():
    run = a_run("recover", batch=pending(ONE), reply=a_reply("", ONE, finish="length"))
    move(run, "recover.otherwise")
    assert run.messages[0].content == wording.NOT_RUN["truncated"]


def test_a_call_that_was_made_before_is_warned_about():
    call = a_call("9", where="here")
    batch = [CallState(call, call.signature, result=done(call, "same"))]
    run = a_run("post_tool", batch=batch, reply=a_reply("", call), recent_calls=[call.signature] * 2)
    move(run, "post_tool.otherwise")
    assert run.messages[0].content == f"same\n{wording.repeat_warning(2)}"


def test_a_call_that_was_made_once_is_not_warned_about():
    call = a_call("9", where="here")
    batch = [CallState(call, call.signature, result=done(call, "same"))]
    run = a_run("post_tool", batch=batch, reply=a_reply("", call), recent_calls=[call.signature])
    move(run, "post_tool.otherwise")
    assert run.messages[0].content == "same"


def test_a_call_whose_arguments_a_person_changed_says_so():
    call = a_call("9")
    batch = [CallState(call, call.signature, result=done(call, "ok"), edited=True)]
    run = a_run("post_tool", batch=batch, reply=a_reply("", call))
    move(run, "post_tool.otherwise")
    assert run.messages[0].content.startswith("ok\n")
    assert "person changed" in run.messages[0].content


def test_the_call_of_an_envelope_is_answered_without_an_id():
    batch = [CallState(ONE, ONE.signature, result=done(ONE))]
    run = a_run("post_tool", batch=batch, reply=a_reply('{"kind": "tool_call"}'), rules={"envelope": True})
    move(run, "post_tool.otherwise")
    assert run.messages == [Message(Role.TOOL, "fine", name="look")]


def test_a_batch_stays_open_while_calls_are_pending_or_a_person_is_asked():
    for transition in ("post_tool.calls_pending", "post_tool.question_asked", "post_tool.tool_error"):
        run = a_run("post_tool", batch=pending(ONE))
        move(run, transition)
        assert len(run.batch) == 1
        assert run.messages == []


def test_messages_of_a_state_of_ones_own_never_stand_between_a_call_and_its_result():
    batch = [CallState(ONE, ONE.signature, result=done(ONE))]
    run = a_run("post_tool", batch=batch, reply=a_reply("", ONE), messages=[Message.assistant("", (ONE,))])
    apply(run, o.Noted(messages=(Message.user("think again"),)))
    assert [c.call for c in run.batch] == [ONE]
    move(run, "post_tool.otherwise")
    assert [m.role for m in run.messages] == [Role.ASSISTANT, Role.TOOL, Role.USER]


# -- the strikes of a batch ---------------------------------------------------------------------------


def judged(*results: ToolResult, transition: str = "post_tool.otherwise", **fields: Any) -> RunState:
    calls = [a_call(r.call_id) for r in results]
    run = a_run("dispatch_tool", batch=pending(*calls), reply=a_reply("", *calls), **fields)
    apply(run, o.Ran(results))
    run.state = "post_tool"
    move(run, transition, run.failure)
    return run


STRIKES = {K.tool_error: 1, K.unknown_tool: 1, K.transient_provider: 1}


def test_a_success_forgives_the_tools_strikes():
    assert judged(done(ONE), failure_attempts=dict(STRIKES)).failure_attempts == {K.transient_provider: 1}


def test_a_success_does_not_forgive_what_failed_beside_it():
    run = judged(done(ONE), failing(TWO), transition="post_tool.tool_error", failure_attempts=dict(STRIKES))
    assert run.failure_attempts == {K.tool_error: 1, K.transient_provider: 1}


@pytest.mark.parametrize("result", [failing(ONE, "environment_error"), denied(ONE)])
def test_without_a_success_nothing_is_forgiven(result):
    assert judged(result, failure_attempts=dict(STRIKES)).failure_attempts == STRIKES


def test_a_run_that_counts_as_a_whole_forgives_nothing():
    run = judged(done(ONE), rules={"attempts_scope": "run"}, failure_attempts=dict(STRIKES))
    assert run.failure_attempts == STRIKES


def test_the_breaker_and_the_denials_start_anew_once_they_were_acted_on():
    run = a_run("post_tool", error_key=("a", "b", "c", "d"), error_streak=5)
    move(run, "post_tool.repeated_error", failure("repeated_error"))
    assert (run.error_key, run.error_streak) == (None, 0)
    run = a_run("post_tool", denials=3)
    move(run, "post_tool.policy_violation", failure("policy_violation"))
    assert run.denials == 0


# -- recover ------------------------------------------------------------------------------------------


def recovered(kind: str, action: str, **more: Any) -> RunState:
    limits, rules = more.pop("limits", None), more.pop("rules", None)
    again, wait = more.pop("retry_calls", False), more.pop("backoff_s", 0.0)
    run = a_run("recover", failure=failure(kind), limits=limits, rules=rules, **more)
    apply(run, o.Recovered(Action(action), wait, again))
    return run


@pytest.mark.parametrize("action", Action)
def test_a_failure_is_counted_and_its_lesson_kept_whatever_is_done(action):
    run = recovered("tool_error", action, backoff_s=1.5)
    assert run.failure_attempts == {K.tool_error: 1}
    assert run.lessons_learned == [failure("tool_error")]
    assert (run.action, run.backoff_s) == (action, 1.5)


def test_with_nothing_found_nothing_is_counted():
    run = a_run("recover")
    apply(run, o.Recovered(Action.retry))
    assert (run.failure_attempts, run.lessons_learned) == ({}, [])


@pytest.mark.parametrize(
    "kind", ["output_truncated", "output_malformed", "output_refused", "no_progress", "loop_detected"]
)
def test_feedback_on_a_reply_that_no_call_answers_is_one_shot(kind):
    run = recovered(kind, "retry")
    assert run.feedback == wording.feedback(failure(kind))
    assert run.messages == []


@pytest.mark.parametrize("kind", ["tool_error", "unknown_tool", "transient_provider"])
def test_feedback_that_a_result_gives_or_nobody_needs_is_not_given_twice(kind):
    assert recovered(kind, "retry").feedback is None


def test_kept_feedback_is_a_message_behind_the_results():
    call = a_call("9")
    run = recovered(
        "output_truncated", "retry",
        rules={"feedback": "kept"},
        batch=pending(call),
        reply=a_reply("", call, finish="length"),
        messages=[Message.assistant("", (call,))],
    )  # fmt: skip
    assert run.feedback is None
    assert [(m.role, m.tool_call_id) for m in run.messages[1:]] == [(Role.TOOL, "9"), (Role.TOOL, None)]
    assert run.messages[-1].content == wording.feedback(failure("output_truncated"))


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


def test_other_failures_leave_the_cap_alone():
    assert recovered("output_malformed", "retry", limits={"max_output_tokens": 9}).output_cap is None


@pytest.mark.parametrize(
    "kind", ["no_progress", "scope_too_large", "kernel_invalidated", "context_overflow", "tool_error"]
)
def test_narrowing_tells_the_next_request_what_to_do(kind):
    run = recovered(kind, "narrow_scope")
    assert run.pending_instruction == wording.instruction(failure(kind))
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
def test_asking_says_what_is_asked_and_why(kind, waits):
    run = recovered(kind, "ask_user")
    assert run.waiting == Waiting(waits, wording.question(failure(kind)), failure_kind=K(kind))


def test_running_calls_again_clears_the_failed_ones_alone():
    batch = [CallState(c, c.signature) for c in (ONE, TWO)]
    batch[0].result, batch[1].result = failing(ONE, retryable=True), done(TWO)
    run = recovered("tool_error", "retry", retry_calls=True, batch=batch, call_failures={K.tool_error: failure()})
    assert [c.result for c in run.batch] == [None, done(TWO)]
    assert [c.retries for c in run.batch] == [1, 0]
    assert run.call_failures == {}
    move(run, "recover.retry_tool")
    assert run.retry_calls is False
    assert len(run.batch) == 2


@pytest.mark.parametrize("transition", ["recover.otherwise", "recover.retry_tool"])
def test_a_run_that_goes_on_has_no_failure_at_hand(transition):
    run = recovered("tool_error", "retry")
    move(run, transition)
    assert (run.failure, run.action) == (None, None)


@pytest.mark.parametrize("transition", ["recover.handoff", "recover.ask_user"])
def test_a_run_that_ends_or_waits_keeps_its_failure(transition):
    run = recovered("tool_error", "handoff")
    move(run, transition)
    assert run.failure == failure("tool_error")


def test_a_reply_of_another_kind_breaks_the_row_of_equal_errors():
    assert recovered("output_malformed", "retry", error_key=("a", "b", "c", "d"), error_streak=4).error_streak == 0
    assert recovered("tool_error", "retry", error_key=("a", "b", "c", "d"), error_streak=4).error_streak == 4


def test_a_retry_after_a_reply_that_no_call_answers_always_says_what_was_wrong():
    """A detector of one's own on a reply: the model must hear why it is asked again."""
    run = recovered("scope_too_large", "retry", messages=[Message.user("x"), Message.assistant("an answer")])
    assert run.feedback is not None
    assert "it broke" in run.feedback


# -- lessons ------------------------------------------------------------------------------------------


def test_five_kinds_of_lessons_are_kept_and_the_oldest_falls_out():
    run = a_run()
    kinds = ["tool_error", "unknown_tool", "no_progress", "output_malformed", "environment_error", "time_limit"]
    for kind in kinds:
        run.learn(failure(kind))
    assert [x.kind for x in run.lessons_learned] == kinds[1:]


def test_the_newest_lesson_of_a_kind_replaces_the_older_one():
    run = a_run()
    for kind, text in [("tool_error", "old"), ("no_progress", "x"), ("tool_error", "new")]:
        run.learn(failure(kind, text))
    assert [x.explanation for x in run.lessons_learned] == ["x", "new"]


# -- a person's answer --------------------------------------------------------------------------------


def answered(waiting: Waiting | None, said: PersonReply, **fields: Any) -> RunState:
    run = a_run("suspended", waiting=waiting, **fields)
    apply(run, o.Answered(said))
    return run


def test_a_text_is_a_users_message():
    run = answered(Waiting("question", "?"), PersonReply("text", "Paris"), messages=[Message.user("hi")])
    assert run.messages == [Message.user("hi"), Message.user("Paris")]
    assert run.person == PersonReply("text", "Paris")


def test_an_open_batch_is_closed_in_front_of_a_users_message():
    run = answered(
        Waiting("question", "?", failure_kind=K.loop_detected),
        PersonReply("text", "Paris"),
        batch=pending(ONE), reply=a_reply("", ONE), messages=[Message.assistant("", (ONE,))],
    )  # fmt: skip
    assert [m.role for m in run.messages] == [Role.ASSISTANT, Role.TOOL, Role.USER]


def test_the_answer_to_an_ask_user_call_is_that_calls_result():
    batch = [CallState(ONE, ONE.signature, result=done(ONE)), CallState(TWO, TWO.signature), *pending(THREE)]
    run = answered(
        Waiting("question", "?", call_id="2"),
        PersonReply("text", "Paris"),
        batch=batch, ending="ask", reply=a_reply("", ONE, TWO, THREE), messages=[Message.user("hi")],
    )  # fmt: skip
    move(run, "suspended.replied")
    assert [(m.role, m.tool_call_id) for m in run.messages[1:]] == [
        (Role.TOOL, "1"),
        (Role.TOOL, "2"),
        (Role.TOOL, "3"),
    ]
    assert run.messages[2].content == "Paris"
    assert not run.messages[2].is_error
    assert run.messages[3].content == wording.NOT_RUN["ask"]
    assert run.ending is None


@pytest.mark.parametrize(
    ("kind", "reset"),
    [
        (K.iteration_limit, {"iterations": 0}),
        (K.time_limit, {"elapsed_s": 0.0, "grace": ""}),
        (K.token_limit, {}),
        (K.cost_limit, {}),
    ],
)
def test_resuming_a_limit_resets_that_limit_and_nothing_else(kind, reset):
    usage = Usage(9, 9, cost_usd=9)
    before = {"iterations": 7, "elapsed_s": 70.0, "grace": "used", "steps": 8, "model_calls": 7, "usage": usage}
    run = answered(Waiting("limit", "?", failure_kind=kind), PersonReply("text", "go on"), **before)
    assert {name: getattr(run, name) for name in before} == {**before, **reset}
    assert run.continues == 1


def test_any_other_answer_extends_no_budget():
    run = answered(Waiting("question", "?", failure_kind=K.ambiguous_input), PersonReply("text", "x"), iterations=7)
    assert (run.continues, run.iterations) == (0, 7)


def test_after_an_answer_to_a_loop_the_counts_start_anew():
    run = answered(
        Waiting("question", "?", failure_kind=K.loop_detected), PersonReply("text", "x"), recent_calls=["a"] * 5
    )
    assert run.recent_calls == []


APPROVAL = Waiting("approval", "?", call_id="1", tool="look")


def test_allowing_a_call_lets_it_run():
    run = answered(APPROVAL, PersonReply("allow"), batch=pending(ONE))
    assert (run.batch[0].approved, run.batch[0].edited, run.batch[0].result) == (True, False, None)


@pytest.mark.parametrize(
    ("reason", "text"), [("too dear", "Denied by the user: too dear"), ("", "Denied by the user.")]
)
def test_denying_a_call_settles_what_the_model_is_told_and_is_no_failure(reason, text):
    run = answered(APPROVAL, PersonReply("deny", reason), batch=pending(ONE))
    assert run.batch[0].denied == text
    assert (run.batch[0].approved, run.call_failures, run.failure) == (False, {}, None)


def test_editing_a_call_changes_its_arguments_and_not_its_signature():
    call = ToolCall("1", "look", {"a": 1}, malformed="x")
    run = answered(APPROVAL, PersonReply("edit", arguments={"a": 2}), batch=pending(call))
    (entry,) = run.batch
    assert entry.call == ToolCall("1", "look", {"a": 2})
    assert entry.signature == call.signature
    assert entry.approved
    assert entry.edited


DOUBT = Waiting("in_doubt", "?", call_id="1", tool="look")


def in_doubt(kind: str, text: str = "") -> CallState:
    batch = pending(ONE)
    batch[0].started = True
    return answered(DOUBT, PersonReply(kind, text), batch=batch).batch[0]


def test_a_call_that_ran_has_the_result_that_a_person_tells():
    entry = in_doubt("ran", "it is 42")
    assert entry.result == ToolResult("1", "look", "it is 42")
    assert not entry.started


def test_a_call_that_did_not_run_is_as_if_never_started():
    entry = in_doubt("did_not_run")
    assert (entry.result, entry.started) == (None, False)


def test_a_call_that_is_given_up_says_that_nobody_knows():
    entry = in_doubt("give_up")
    assert entry.result.status == "skipped"
    assert "not known" in entry.result.content
    assert not entry.started


def test_once_answered_a_run_waits_for_nothing():
    run = answered(
        Waiting("limit", "?", failure_kind=K.time_limit), PersonReply("text", "x"), failure=failure("time_limit")
    )
    run.action = Action.ask_user
    move(run, "suspended.replied")
    assert (run.person, run.waiting, run.failure, run.action) == (None, None, None, None)


def test_an_answer_to_a_run_that_waits_for_nothing_is_only_noted():
    run = answered(None, PersonReply("text", "x"))
    assert run.messages == []
    assert run.person is not None


def test_a_decision_about_a_call_that_is_not_there_changes_nothing():
    run = answered(APPROVAL, PersonReply("allow"), batch=pending(TWO))
    assert not run.batch[0].approved


# -- the other outcomes -------------------------------------------------------------------------------


def test_expired_and_judged():
    run = a_run("suspended")
    apply(run, o.Expired())
    assert run.expired
    before = repr(run)
    apply(run, o.Judged())
    assert repr(run) == before


def test_what_a_state_of_ones_own_returns_is_noted_under_its_name():
    run = a_run("review")
    apply(run, o.Noted({"score": 3}, (Message.user("hm"),)))
    assert run.notes == {"review": {"score": 3}}
    assert run.messages == [Message.user("hm")]
    apply(run, o.Noted())
    assert run.notes == {"review": {"score": 3}}


def test_a_cancellation_keeps_what_had_ended_by_then():
    run = a_run("dispatch_tool", batch=pending(ONE, TWO), reply=a_reply("", ONE, TWO))
    apply(run, o.Cancelled("stop", (done(ONE),)))
    assert run.cancelled == "stop"
    move(run, "dispatch_tool.cancelled")
    assert [m.content for m in run.messages] == ["fine", wording.NOT_RUN["cancelled"]]


def test_the_first_failure_that_aborts_a_run_stands():
    run = a_run("dispatch_tool", batch=pending(ONE))
    apply(run, o.Aborted(failure("aborted", "first"), (done(ONE),)))
    apply(run, o.Aborted(failure("aborted", "second")))
    assert run.aborted == failure("aborted", "first")
    assert run.batch[0].result == done(ONE)
    run.abort("x", ValueError())
    assert run.aborted == failure("aborted", "first")


def test_what_is_no_outcome_is_refused():
    with pytest.raises(KeyError):
        apply(a_run(), "done")  # type: ignore[arg-type]


# -- moves --------------------------------------------------------------------------------------------


def test_entering_pre_step_spends_a_step():
    run = a_run("recover", steps=3)
    move(run, "recover.otherwise")
    assert run.steps == 4


def test_what_the_guard_found_is_the_runs_failure():
    run = a_run("pre_step")
    move(run, "pre_step.time_limit", failure("time_limit"))
    assert run.failure == failure("time_limit")


def test_a_guard_that_only_says_yes_leaves_the_failure_alone():
    run = a_run("recover", failure=failure(), action=Action.handoff)
    move(run, "recover.handoff", found="yes")
    assert run.failure == failure()
