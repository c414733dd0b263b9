"""The reducer: how outcomes, human replies and transitions change a ``RunState``.

``on_outcome`` runs when an effect has finished, ``on_transition`` when the machine has moved. Nothing else writes to a
``RunState``, so a run is determined by its outcomes and decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from agentfsm.loop import guards, prompts
from agentfsm.loop import outcomes as o
from agentfsm.loop.detectors import output_malformed
from agentfsm.loop.extension import EXTENDING_REPLIES, extend_limit, reached_limit
from agentfsm.loop.failures import LIMIT_KINDS, OUTPUT_KINDS, PROVIDER_KINDS, TOOL_KINDS, Action, Failure, FailureKind
from agentfsm.loop.human_input import PendingRequest
from agentfsm.loop.messages import NO_USAGE, Message, Role, ToolCall, ToolResult
from agentfsm.loop.outcomes import (
    CALL_MODEL,
    CHOOSE_RECOVERY,
    CLOSES_BATCH,
    JUDGE_RESULTS,
    PARSE_REPLY,
    RUN_CALLS,
)
from agentfsm.loop.quorum import APPROVING_REPLIES
from agentfsm.loop.reply_reader import continue_answer
from agentfsm.loop.state import CallState, RunState, StateCall, request_digest, state_call_number
from agentfsm.loop.tool_batch import (
    append_tool_results,
    charge,
    count_error,
    is_final_text,
    open_batch,
    record_results,
)
from agentfsm.machine.declaration import StateSpec, Transition
from agentfsm.machine.engine import Decision

K = FailureKind

UNELIDED_MESSAGES = 4
"""How many of the newest messages keep their tool results when a prompt was too long."""

GIVEN_UP_TEXT = "It is not known whether this call ran, and it was given up. Do not repeat it."
"""The result of a call in doubt of which nobody knows whether it ran."""

_FROM_OUTSIDE = frozenset({o.HumanAnswered, o.Escalated, o.Expired})
"""Outcomes of a wait, whose time is never charged."""

_TEXT_REQUESTS = frozenset({"question", "form", "limit"})
"""Requests of sub-agents and tools that are questions: the run then waits as it does for its own question."""


# -- outcomes -----------------------------------------------------------------------------------------


def on_outcome(run: RunState, outcome: o.Outcome | None, duration_s: float = 0.0, silence_s: float = 0.0) -> None:
    """Apply the outcome of an effect to the run.

    Args:
        run: The run, in the state whose effect ended.
        outcome: What the effect returned.
        duration_s: Seconds that the effect took.
        silence_s: Seconds between the end of the previous effect and the start of this one.
    """
    if run.batch_snapshot is not None:
        run.keep_views()
    if (duration_s or silence_s) and type(outcome) not in _FROM_OUTSIDE:
        run.elapsed_s += duration_s + silence_s
        if silence_s > run.silence_s:
            run.silence_s = silence_s
    if outcome is not None:
        _ON_OUTCOME[type(outcome)](run, outcome)


def _on_pre_step_done(run: RunState, outcome: o.PreStepDone) -> None:
    if run.guardrails.finalize_grace_s and not run.final_turn:
        limit = run.time_limit
        if limit is not None and run.elapsed_s >= limit:
            run.final_turn = "now"
    if outcome.recalled:
        _add_recalled(run, outcome.recalled)


def _add_recalled(run: RunState, recalled: str) -> None:
    """Put recalled memory in front of the question, in the same message: no request was made yet."""
    messages = list(run.messages)  # a new list: views of the old one still show what it held
    at = next((i for i in range(len(messages) - 1, -1, -1) if messages[i].role is Role.USER), None)
    if at is None:
        messages.append(prompts.with_memory(Message.user(""), recalled))
    else:
        messages[at] = prompts.with_memory(messages[at], recalled)
    run.messages = messages


def _on_model_call_succeeded(run: RunState, outcome: o.ModelCallSucceeded) -> None:
    """Store the message before any guard reads it; its calls need results. One-time feedback is done with.

    So is an earlier failure that no recovery has cleared: a row of a user's graph led past it.
    """
    reply = outcome.reply
    message = reply.message
    run.reply, run.reply_judged, run.failure = reply, False, None
    run.messages.append(message)
    open_batch(run, message.tool_calls)
    if reply.usage is not NO_USAGE:
        run.usage += reply.usage
    if outcome.withheld:
        run.withheld = tuple(dict.fromkeys((*run.withheld, *outcome.withheld)))
    run.pending_instruction = run.feedback = None
    _count_model_call(run, outcome.model_calls)


def _on_model_call_failed(run: RunState, outcome: o.ModelCallFailed) -> None:
    run.failure = outcome.failure
    run.reply = None  # already handled; a graph that ignores this failure must not handle it again
    _count_model_call(run, outcome.model_calls)


def _count_model_call(run: RunState, model_calls: int) -> None:
    counters = run.counters
    counters["iterations"] = counters.get("iterations", 0) + model_calls
    run.model_calls += model_calls
    run.turns += 1
    run.silence_s = 0.0
    if run.final_turn == "now":
        run.final_turn = "used"


def _on_reply_parsed(run: RunState, outcome: o.ReplyParsed) -> None:
    native = run.reply is not None and run.reply.message.tool_calls  # opened already, and perhaps answered since
    if not (run.batch or native):
        open_batch(run, outcome.calls)
    run.answer = outcome.answer
    run.malformed = outcome.malformed
    unusable = output_malformed(run)
    if unusable is not None:
        count_error(run, (unusable.kind.value, "", "", unusable.explanation))


def _on_tools_ran(run: RunState, outcome: o.ToolsRan) -> None:
    if run.pending_request is not None and run.ending is None:  # a row of a user's graph led past the wait
        run.pending_request = None
    record_results(run, outcome.results)


def _on_call_blocked(run: RunState, outcome: o.CallBlocked) -> None:
    if outcome.charge is not None:
        _on_state_call_blocked(run, outcome, outcome.charge)
        return
    record_results(run, outcome.results)
    calls = {c.call.id: c for c in run.batch}
    for sub_run in outcome.held:
        charge(run, sub_run.usage, sub_run.model_calls)
        if sub_run.waiting.call_id in calls:
            call = calls[sub_run.waiting.call_id]
            call.held, call.answer, call.started = sub_run, None, False
    if run.ending is not None:  # another call of the batch has ended the run, or asks first
        return
    run.pending_request = outcome.waiting
    if run.pending_request.asker and run.pending_request.kind in _TEXT_REQUESTS:
        run.ending = "ask"


def _on_state_call_blocked(run: RunState, outcome: o.CallBlocked, used: o.Charge) -> None:
    """The effect of a user-defined state is run again after the reply, and gets these results in order."""
    run.state_outcome = ""  # that of an earlier visit, or of another state
    charge(run, used.usage, used.model_calls)
    run.state_calls.update(outcome.calls)
    for each in run.state_calls.values():
        each.charged = True
    run.calling_state = run.state
    request = run.pending_request = outcome.waiting
    number = state_call_number(request.call_id or "")
    if number is not None and number not in run.state_calls:
        call = ToolCall(request.call_id or "", request.tool, dict(request.arguments))
        waiting = StateCall(request.tool, request_digest(call.arguments), tool=CallState(call, ""), charged=True)
        run.state_calls[number] = waiting


def _on_state_result(run: RunState, outcome: o.StateResult) -> None:
    if outcome.value is not None:
        run.state_results[run.state] = outcome.value
    run.state_outcome = outcome.outcome
    if outcome.compaction is not None:
        run.compaction = outcome.compaction
    (run.deferred_messages if run.batch else run.messages).extend(outcome.messages)
    charge(run, outcome.charge.usage, outcome.charge.model_calls)
    _end_visit(run, run.state)


def _end_visit(run: RunState, state: str) -> None:
    """A user-defined state is done with the calls that it has made; its next visit makes new ones."""
    run.state_visits[state] = run.state_visits.get(state, 0) + 1
    run.state_calls = {}


def _on_escalated(run: RunState, outcome: o.Escalated) -> None:
    """More roles may answer; an answer or an expiry that was kept has been acted on."""
    request = run.pending_request
    if request is not None and request.quorum is not None:
        run.pending_request = replace(request, quorum=replace(request.quorum, escalated=True))
        run.human_reply, run.expired = None, False


def _on_expired(run: RunState, outcome: o.Expired) -> None:
    """Nobody has answered in time; an answer that was kept has been acted on."""
    run.human_reply, run.expired = None, True


def _on_cancelled(run: RunState, outcome: o.Cancelled) -> None:
    record_results(run, outcome.results)
    _stop_state(run, outcome.charge)
    run.cancelled = outcome.reason


def _on_aborted(run: RunState, outcome: o.Aborted) -> None:
    record_results(run, outcome.results)
    _stop_state(run, outcome.charge)
    if run.aborted is None:
        run.aborted = outcome.failure


def _stop_state(run: RunState, used: o.Charge | None) -> None:
    """The effect of a user-defined state was cut off."""
    if used is not None:
        charge(run, used.usage, used.model_calls)
    if run.state_calls:
        run.state_calls = {}


# -- recovery -----------------------------------------------------------------------------------------


def _on_recovery_decided(run: RunState, outcome: o.RecoveryDecided) -> None:
    """Count the failure, record the lesson and prepare the action: in this order, after the policy has decided."""
    run.action, run.retry_calls = outcome.action, outcome.retry_calls
    failure = run.failure
    if failure is None:
        return
    run.record_failure_attempt(failure.kind)
    lesson = prompts.as_lesson(failure)
    if lesson is not None:
        run.add_lesson(lesson)
    if failure.kind is K.no_progress:
        run.silence_s = 0.0  # one stall counts once until the next model call
    if failure.kind in OUTPUT_KINDS and output_malformed(run) is None:  # a different error: reset the circuit breaker
        run.error_key, run.error_streak = None, 0
    if failure.kind is K.output_truncated and outcome.action is not Action.retry:
        run.partial_answer = ""
    _ON_ACTION[outcome.action](run, failure, outcome)


def _prepare_retry(run: RunState, failure: Failure, decided: o.RecoveryDecided) -> None:
    feedback = "" if run.retry_calls else _feedback(run, failure)
    if feedback:
        _set_feedback(run, decided.instruction or feedback)
    elif decided.instruction:
        run.pending_instruction = decided.instruction


def _feedback(run: RunState, failure: Failure) -> str:
    """What to tell the model about a reply that it should give again; empty where a tool result says it."""
    if failure.kind is K.output_truncated:
        return _after_truncation(run)
    if failure.kind in OUTPUT_KINDS or (failure.kind not in PROVIDER_KINDS and is_final_text(run)):
        return prompts.feedback_text(failure, run.behavior)
    return ""


def _set_feedback(run: RunState, text: str) -> None:
    if run.behavior.feedback == "once":
        run.feedback = text
        return
    answers_calls = bool(run.batch) and not run.deferred_messages
    append_tool_results(run)
    last = run.messages[-1] if answers_calls else None
    if last is not None and last.tool_call_id is not None:  # a message of its own would be a user message after it
        run.messages[-1] = replace(last, content=f"{last.content}\n\n{text}")
    else:
        run.messages.append(Message(Role.TOOL, text, is_error=True))


def _after_truncation(run: RunState) -> str:
    """Feedback on a truncated message: repeat it if the token limit could be raised, else continue it."""
    cap = run.output_cap or run.guardrails.max_output_tokens
    if cap is not None:
        run.output_cap = min(2 * cap, max(cap, run.guardrails.max_output_tokens_limit))
        if run.output_cap > cap:
            run.partial_answer = ""
            return prompts.truncation_feedback("more_room")
    if run.batch or run.reply is None:
        return prompts.truncation_feedback("call")
    run.partial_answer = continue_answer(run.partial_answer, run.reply.message.content)
    return prompts.truncation_feedback("answer")


def _prepare_narrow_scope(run: RunState, failure: Failure, decided: o.RecoveryDecided) -> None:
    run.pending_instruction = decided.instruction or prompts.narrow_scope_instruction(failure, run.behavior)
    if failure.kind is K.context_overflow:
        run.elided = max(run.elided, len(run.messages) - UNELIDED_MESSAGES)


def _prepare_question(run: RunState, failure: Failure, decided: o.RecoveryDecided) -> None:
    kind = "limit" if failure.kind in LIMIT_KINDS else "question"
    question = decided.question or prompts.recovery_question(failure)
    limit = reached_limit(run, failure.kind)
    run.pending_request = PendingRequest(kind, question, failure_kind=failure.kind, limit=limit)
    run.ending = None  # what a call has asked is not what the run waits for
    if decided.instruction:
        run.pending_instruction = decided.instruction


def _prepare_end(run: RunState, failure: Failure, decided: o.RecoveryDecided) -> None:
    """Nothing to prepare: the run ends."""


_ON_ACTION: dict[Action, Callable[[RunState, Failure, o.RecoveryDecided], None]] = {
    Action.retry: _prepare_retry,
    Action.narrow_scope: _prepare_narrow_scope,
    Action.ask_user: _prepare_question,
    Action.handoff: _prepare_end,
    Action.stop: _prepare_end,
}


# -- a person's answers -------------------------------------------------------------------------------


def on_human_answer(run: RunState, outcome: o.HumanAnswered) -> None:
    """Apply a person's answer: it becomes a message, the result of a call, or the decision about a call."""
    run.human_reply = reply = outcome.reply
    run.expired = False
    request = run.pending_request
    if request is None:
        return
    actor, quorum = reply.answered_by, request.quorum
    if quorum is not None and not request.asker and reply.kind in APPROVING_REPLIES:
        request = run.pending_request = replace(request, quorum=quorum.with_vote(actor))
        if guards.vote_recorded(run):
            return
    call = next((c for c in _open_calls(run) if c.call.id == request.call_id), None)
    if request.asker:
        if call is not None:
            call.answer, run.ending = reply, None
        return
    if reply.kind not in EXTENDING_REPLIES:
        if call is not None:
            _ON_CALL_REPLY[reply.kind](run, call)
        return
    if call is not None:
        record_results(run, (ToolResult(call.call.id, call.call.name, reply.text),))
    append_tool_results(run)
    run.ending = None
    if call is not None:
        return
    if reply.text:
        run.messages.append(Message.user(reply.text))
    if request.failure_kind is FailureKind.loop_detected:
        run.recent_calls.clear()
        run.recent_results.clear()


def _open_calls(run: RunState) -> list[CallState]:
    """The calls that a person may be asked about: those of the batch, and those of a user-defined state's effect."""
    return [*run.batch, *(each.tool for each in run.state_calls.values() if each.tool is not None)]


def _set_result(run: RunState, call: CallState, result: ToolResult) -> None:
    if any(each is call for each in run.batch):
        record_results(run, (result,))
    else:
        call.result, call.started = result, False


def _on_deny(run: RunState, call: CallState) -> None:
    reason = run.human_reply.text if run.human_reply is not None else ""
    call.denied = "Denied by the user" + (f": {reason}" if reason else ".")


def _on_edit(run: RunState, call: CallState) -> None:
    if run.human_reply is not None:
        call.call = replace(call.call, arguments=dict(run.human_reply.arguments), malformed=None)
    call.edited = True
    _approve(run, call)


def _approve(run: RunState, call: CallState) -> None:
    call.approved = True
    call.approved_tool = "" if run.pending_request is None else run.pending_request.tool_digest
    call.quorum = None if run.pending_request is None else run.pending_request.quorum


def _on_ran(run: RunState, call: CallState) -> None:
    text = run.human_reply.text if run.human_reply is not None else ""
    _set_result(run, call, ToolResult(call.call.id, call.call.name, text))


def _on_did_not_run(run: RunState, call: CallState) -> None:
    call.started = False


def _on_give_up(run: RunState, call: CallState) -> None:
    _set_result(run, call, ToolResult(call.call.id, call.call.name, GIVEN_UP_TEXT, status="skipped"))


_ON_CALL_REPLY: dict[str, Callable[[RunState, CallState], None]] = {
    "allow": _approve,
    "deny": _on_deny,
    "edit": _on_edit,
    "ran": _on_ran,
    "did_not_run": _on_did_not_run,
    "give_up": _on_give_up,
}


_ON_OUTCOME: dict[type, Callable[[RunState, Any], None]] = {
    o.PreStepDone: _on_pre_step_done,
    o.ModelCallSucceeded: _on_model_call_succeeded,
    o.ModelCallFailed: _on_model_call_failed,
    o.ReplyParsed: _on_reply_parsed,
    o.ToolsRan: _on_tools_ran,
    o.CallBlocked: _on_call_blocked,
    o.RecoveryDecided: _on_recovery_decided,
    o.HumanAnswered: on_human_answer,
    o.Escalated: _on_escalated,
    o.Expired: _on_expired,
    o.StateResult: _on_state_result,
    o.Cancelled: _on_cancelled,
    o.Aborted: _on_aborted,
}


# -- transitions --------------------------------------------------------------------------------------


def on_transition(run: RunState, decision: Decision, specs: Mapping[str, StateSpec]) -> None:
    """Apply a transition to the run: the failure found, leaving the old state, entering the new one.

    What is done depends on the declared effects of the two states, never on their names.

    Args:
        run: The run.
        decision: The transition taken.
        specs: The declared states of the run's graph, by name.
    """
    if run.batch_snapshot is not None:
        run.keep_views()
    row, guard_result = decision.transition, decision.guard_result
    source, target = specs[row.source], specs[row.target]
    failed = target.effect is CHOOSE_RECOVERY
    if guard_result is not None and isinstance(guard_result, Failure):
        run.failure, failed = guard_result, True  # also where a state of the user's comes before recovery
    on_leave = _ON_LEAVE.get(source.effect)
    if on_leave is not None:
        on_leave(run, target, failed)
    elif source.waits:
        _on_leave_wait(run, row, target)
    elif run.calling_state and not (target.waits or target.final):  # a row of a user's graph leads past the wait
        _leave_blocked_call(run, row)
    if target.final:
        run.ended = row.ends
    if (run.batch or run.pending_request) and (target.final or target.effect in CLOSES_BATCH):
        append_tool_results(run)
        if not target.final:  # a row of a user's graph may have led past what a call has asked for or decided
            run.ending = run.pending_request = None


def _on_leave_call_model(run: RunState, target: StateSpec, failed: bool) -> None:
    if (run.failure_attempts or run.lessons_learned) and not failed:
        _on_success(run, PROVIDER_KINDS)


def _on_leave_parse_reply(run: RunState, target: StateSpec, failed: bool) -> None:
    run.reply_judged = True
    if run.partial_answer and not (failed and _was_truncated(run)):  # it was continued, or is discarded
        run.partial_answer = ""
    if not failed and (run.failure_attempts or run.lessons_learned):
        _on_success(run, OUTPUT_KINDS)
    if run.batch and (not failed or target.effect is RUN_CALLS):  # the calls are made
        recent, results, window = run.recent_calls, run.recent_results, run.guardrails.loop_window
        while len(results) < len(recent):  # of a run that was stored before results were compared
            results.append("")
        for call in run.batch:
            recent.append(call.signature)
            results.append("")
        if len(recent) > window:
            del recent[:-window], results[:-window]


def _was_truncated(run: RunState) -> bool:
    return run.failure is not None and run.failure.kind is FailureKind.output_truncated


def _on_leave_judge_results(run: RunState, target: StateSpec, failed: bool) -> None:
    if target.effect is RUN_CALLS:
        return
    if (run.failure_attempts or run.lessons_learned) and any(
        c.result is not None and c.result.status == "done" for c in run.batch
    ):
        _on_success(run, [k for k in TOOL_KINDS if k not in run.call_failures])
    if not failed:
        return
    if run.denials >= run.guardrails.max_denials:
        run.denials = 0
    _close_breaker(run)


def _close_breaker(run: RunState) -> None:
    """Start counting from zero once the circuit breaker has opened."""
    if run.failure is not None and run.failure.kind is FailureKind.repeated_error:
        run.error_key, run.error_streak = None, 0


def _on_leave_recovery(run: RunState, target: StateSpec, failed: bool) -> None:
    if target.waits or target.final:
        return
    if run.retry_calls and target.effect is RUN_CALLS:
        for call in run.batch:
            if call.result is not None and call.result.failure is not None:
                call.result = None
                call.retries += 1
        run.first_pending = 0
        run.call_failures.clear()
    run.failure = run.action = None
    run.retry_calls = False


def _on_leave_wait(run: RunState, row: Transition, target: StateSpec) -> None:
    """A run that still waits keeps what it asks and the answer that it was given."""
    request = run.pending_request
    if target.waits and request is not None and not request.asks_something:
        run.pending_request = None
    if target.waits or target.final:
        return
    if row.extends:
        extend_limit(run)
    if run.calling_state:
        _leave_blocked_call(run, row)
    run.human_reply = run.pending_request = run.failure = run.action = None
    run.expired = False


def _leave_blocked_call(run: RunState, row: Transition) -> None:
    """A user-defined state waits no longer for its call. Unless the row leads back to it, its visit has ended."""
    if run.calling_state != row.target:
        _end_visit(run, run.calling_state)
    run.calling_state = ""
    run.pending_request = None


_ON_LEAVE: Mapping[object, Callable[[RunState, StateSpec, bool], None]] = {
    CALL_MODEL: _on_leave_call_model,
    PARSE_REPLY: _on_leave_parse_reply,
    JUDGE_RESULTS: _on_leave_judge_results,
    CHOOSE_RECOVERY: _on_leave_recovery,
}


def _on_success(run: RunState, kinds: Collection[FailureKind]) -> None:
    """What could fail in these ways has succeeded: forget their lessons, and reset the counts of attempts."""
    if run.lessons_learned:
        run.lessons_learned = [
            each for each in run.lessons_learned if each.kind not in kinds or _still_holds(run, each)
        ]
    if run.failure_attempts and run.behavior.attempts_scope == "streak":
        for kind in kinds:
            run.failure_attempts.pop(kind, None)


def _still_holds(run: RunState, lesson: Failure) -> bool:
    """Whether a lesson is about a tool none of whose calls in the batch succeeded."""
    tool = lesson.metadata.get("tool")
    if tool is None or lesson.kind is K.unknown_tool:
        return False
    return not any(c.call.name == tool and c.result is not None and c.result.status == "done" for c in run.batch)
