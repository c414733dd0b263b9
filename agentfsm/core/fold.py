"""How a run changes: ``apply`` folds an outcome in, ``follow`` folds a decision in. Pure but for the run.

``apply`` runs when an effect has ended, ``follow`` when the machine has moved. Together they are all that
writes to a ``RunState``, so a run is what its outcomes and decisions make of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from agentfsm.core import outcomes as o
from agentfsm.core import wording
from agentfsm.core.failures import LIMITS, Action, Failure, FailureKind
from agentfsm.core.messages import FinishReason, Message, Role, ToolResult, Usage
from agentfsm.core.state import CallState, RunState, Waiting
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import State

__all__ = ["apply", "follow"]

K = FailureKind
PRE_STEP, CALL_LLM, POST_LLM, DISPATCH_TOOL, POST_TOOL, RECOVER, SUSPENDED, TERMINAL = State
_NOTHING = Usage()

# A success of these phases sets the strikes of these kinds back to zero.
PROVIDER_KINDS = (K.transient_provider, K.provider_error, K.context_overflow)
OUTPUT_KINDS = (K.output_truncated, K.output_refused, K.output_malformed, K.loop_detected, K.no_progress)
TOOL_KINDS = (
    K.unknown_tool,
    K.invalid_arguments,
    K.tool_error,
    K.environment_error,
    K.repeated_error,
    K.ambiguous_input,
    K.scope_too_large,
    K.capability_gap,
    K.kernel_invalidated,
    K.policy_violation,
)

KEPT_RESULTS = 4
"""How many of the newest messages keep their text when a prompt was too long."""


def apply(run: RunState, outcome: o.Outcome, took_s: float = 0.0, silence_s: float = 0.0) -> None:
    """Fold what an effect came back with into the run.

    Args:
        run: The run, in the state whose effect ended.
        outcome: What the effect came back with.
        took_s: Seconds that the effect took.
        silence_s: Seconds between the end of the last effect and the start of this one.
    """
    if run.state != SUSPENDED:
        run.elapsed_s += took_s + silence_s
        run.silence_s = max(run.silence_s, silence_s)
    _APPLY[type(outcome)](run, outcome)


def _checked(run: RunState, outcome: o.Checked) -> None:
    run.backoff_s = 0.0
    limit = run.guardrails.max_execution_time_s
    if limit is not None and run.guardrails.finalize_grace_s and not run.grace and run.elapsed_s >= limit:
        run.grace = "now"
    if outcome.recalled:
        run.messages.append(Message.user(f"<memory>\n{outcome.recalled}\n</memory>"))


def _replied(run: RunState, outcome: o.Replied) -> None:
    """The message is stored before it is judged, its calls are owed results; what was said once has been said."""
    run.reply = outcome.reply
    run.messages.append(outcome.reply.message)
    run.batch = [CallState(call, call.signature) for call in outcome.reply.message.tool_calls]
    if outcome.reply.usage != _NOTHING:
        run.usage += outcome.reply.usage
    run.pending_instruction = run.feedback = None
    _called(run)


def _call_failed(run: RunState, outcome: o.CallFailed) -> None:
    run.failure = outcome.failure
    run.reply = None  # the last one was judged; a graph that lets this failure pass must not judge it again
    _called(run)


def _called(run: RunState) -> None:
    run.iterations += 1
    run.model_calls += 1
    run.silence_s = 0.0
    if run.grace == "now":
        run.grace = "used"


def _read(run: RunState, outcome: o.Read) -> None:
    if not run.batch:  # else the calls stand in the message itself, and are there already
        run.batch = [CallState(call, call.signature) for call in outcome.calls]
    run.answer = outcome.answer
    run.malformed = outcome.malformed


def _ran(run: RunState, outcome: o.Ran) -> None:
    run.backoff_s = 0.0
    for result in outcome.results:
        _result(run, result)


def _result(run: RunState, result: ToolResult) -> None:
    for call in run.batch:
        if call.call.id == result.call_id:
            break
    else:
        return
    call.started = False
    call.held = call.answer = None
    if result.usage is not None:
        run.usage += result.usage
    if result.ending == "ask":  # its result is the person's reply
        run.ending = "ask"
        run.waiting = Waiting("question", call_id=result.call_id, tool=result.name, **_asked(result))
        return
    call.result = result
    if result.status == "denied":
        run.denials += 1
    elif result.failure is not None:
        run.denials = 0
        run.call_failures.setdefault(result.failure.kind, result.failure)
        key = (result.failure.kind.value, result.name, result.error_class, " ".join(result.content.split()))
        run.error_streak = run.error_streak + 1 if key == run.error_key else 1
        run.error_key = key
    elif result.status == "done":
        run.denials = run.error_streak = 0
        run.error_key = None
        if result.ending is not None:
            run.ending, run.ending_value = result.ending, result.value


def _asked(result: ToolResult) -> dict[str, Any]:
    value = cast("Mapping[str, Any]", result.value or {})
    return {
        "question": value.get("question", ""),
        "context": value.get("context", ""),
        "choices": tuple(value.get("choices", ())),
    }


def _parked(run: RunState, outcome: o.Parked) -> None:
    for result in outcome.results:
        _result(run, result)
    calls = {c.call.id: c for c in run.batch}
    for held in outcome.held:
        run.usage += held.usage
        if held.waiting.call_id in calls:
            call = calls[held.waiting.call_id]
            call.held, call.answer, call.started = held, None, False
    if run.ending is not None:  # another call of the batch has ended the run, or asks first
        return
    run.waiting = outcome.waiting
    if run.waiting.asker and run.waiting.kind in _ASKED:
        run.ending = "ask"


_ASKED = frozenset({"question", "limit"})
"""What a sub-agent asks in words: the run then waits as it does for a question of its own."""


def _recovered(run: RunState, outcome: o.Recovered) -> None:
    """Count, record the lesson, act: in this order, after the policy has decided."""
    run.action, run.backoff_s, run.retry_calls = outcome.action, outcome.backoff_s, outcome.retry_calls
    failure = run.failure
    if failure is None:
        return
    run.record_failure_attempt(failure.kind)
    run.learn(failure)
    if failure.kind is K.no_progress:
        run.silence_s = 0.0  # one stall never strikes twice without a model call between
    if failure.kind in OUTPUT_KINDS:  # an error with another key: the breaker starts anew
        run.error_key, run.error_streak = None, 0
    _ACT[outcome.action](run, failure)


def _retry(run: RunState, failure: Failure) -> None:
    if run.retry_calls:
        for call in run.batch:
            if call.result is not None and call.result.failure is not None:
                call.result = None
                call.retries += 1
        run.call_failures.clear()
        return
    if failure.kind is K.output_truncated:
        _raise_cap(run)
    if failure.kind in OUTPUT_KINDS or (failure.kind not in PROVIDER_KINDS and _unanswered(run)):
        _tell(run, wording.feedback(failure))


def _unanswered(run: RunState) -> bool:
    """Whether a reply without calls is the last word: a retry must say why it was set aside."""
    return not run.batch and bool(run.messages) and run.messages[-1].role is Role.ASSISTANT


def _tell(run: RunState, text: str) -> None:
    if run.rules.feedback == "once":
        run.feedback = text
    else:
        _close_batch(run)
        run.messages.append(Message(Role.TOOL, text, is_error=True))


def _raise_cap(run: RunState) -> None:
    cap = run.output_cap or run.guardrails.max_output_tokens
    if cap is not None:
        run.output_cap = min(2 * cap, max(cap, run.guardrails.max_output_tokens_limit))


def _narrow(run: RunState, failure: Failure) -> None:
    run.pending_instruction = wording.instruction(failure)
    if failure.kind is K.context_overflow:
        run.elided = max(run.elided, len(run.messages) - KEPT_RESULTS)


def _ask(run: RunState, failure: Failure) -> None:
    kind = "limit" if failure.kind in LIMITS else "question"
    run.waiting = Waiting(kind, wording.question(failure), failure_kind=failure.kind)


def _end(run: RunState, failure: Failure) -> None:
    """Nothing to prepare: the run ends."""


def _answered(run: RunState, outcome: o.Answered) -> None:
    run.person = reply = outcome.reply
    waiting = run.waiting
    if waiting is None:
        return
    call = next((c for c in run.batch if c.call.id == waiting.call_id), None)
    if waiting.asker:
        if call is not None:
            call.answer, run.ending = reply, None
        return
    if reply.kind != "text":
        if call is not None:
            _DECIDE[reply.kind](run, call)
        return
    if call is not None:
        _result(run, ToolResult(call.call.id, call.call.name, reply.text))
    _close_batch(run)
    run.ending = None
    if call is not None:
        return
    run.messages.append(Message.user(reply.text))
    if waiting.failure_kind in LIMITS:
        run.continues += 1
    if waiting.failure_kind is K.iteration_limit:
        run.iterations = 0
    elif waiting.failure_kind is K.time_limit:
        run.elapsed_s, run.grace = 0.0, ""
    elif waiting.failure_kind is K.loop_detected:
        run.recent_calls.clear()


def _allow(run: RunState, call: CallState) -> None:
    call.approved = True


def _deny(run: RunState, call: CallState) -> None:
    reason = run.person.text if run.person is not None else ""
    call.denied = "Denied by the user" + (f": {reason}" if reason else ".")


def _edit(run: RunState, call: CallState) -> None:
    if run.person is not None:
        call.call = replace(call.call, arguments=dict(run.person.arguments), malformed=None)
    call.approved = call.edited = True


def _it_ran(run: RunState, call: CallState) -> None:
    text = run.person.text if run.person is not None else ""
    _result(run, ToolResult(call.call.id, call.call.name, text))


def _it_did_not(run: RunState, call: CallState) -> None:
    call.started = False


def _give_up(run: RunState, call: CallState) -> None:
    text = "It is not known whether this call ran, and it was given up. Do not repeat it."
    _result(run, ToolResult(call.call.id, call.call.name, text, status="skipped"))


def _expired(run: RunState, outcome: o.Expired) -> None:
    run.expired = True


def _noted(run: RunState, outcome: o.Noted) -> None:
    if outcome.value is not None:
        run.notes[run.state] = outcome.value
    (run.behind if run.batch else run.messages).extend(outcome.messages)


def _judged(run: RunState, outcome: o.Judged) -> None:
    """Nothing to fold in: the results are there, and the guards judge them."""


def _cancelled(run: RunState, outcome: o.Cancelled) -> None:
    for result in outcome.results:
        _result(run, result)
    run.cancelled = outcome.reason


def _aborted(run: RunState, outcome: o.Aborted) -> None:
    for result in outcome.results:
        _result(run, result)
    if run.aborted is None:
        run.aborted = outcome.failure


_APPLY: dict[type, Callable[[RunState, Any], None]] = {
    o.Checked: _checked,
    o.Replied: _replied,
    o.CallFailed: _call_failed,
    o.Read: _read,
    o.Ran: _ran,
    o.Parked: _parked,
    o.Judged: _judged,
    o.Recovered: _recovered,
    o.Answered: _answered,
    o.Expired: _expired,
    o.Noted: _noted,
    o.Cancelled: _cancelled,
    o.Aborted: _aborted,
}

_ACT: dict[Action, Callable[[RunState, Failure], None]] = {
    Action.retry: _retry,
    Action.narrow_scope: _narrow,
    Action.ask_user: _ask,
    Action.handoff: _end,
    Action.stop: _end,
}

_DECIDE: dict[str, Callable[[RunState, CallState], None]] = {
    "allow": _allow,
    "deny": _deny,
    "edit": _edit,
    "ran": _it_ran,
    "did_not_run": _it_did_not,
    "give_up": _give_up,
}


# -- decisions ----------------------------------------------------------------------------------------


def follow(run: RunState, decision: Decision, final: bool = False) -> None:
    """Fold a decision into the run: what it found, what it settles, and what entering the state means.

    Args:
        run: The run.
        decision: The move.
        final: Whether it leads to an end of the user's own; ``terminal`` is known.
    """
    row, found = decision.transition, decision.found
    if isinstance(found, Failure):
        run.failure = found
    settle = _SETTLE.get(row.source)
    if settle is not None:
        settle(run, row.target)
    elif run.person is not None:  # a wait of the user's own is over
        _settle_wait(run, row.target)
    if row.target == PRE_STEP:
        run.steps += 1
    if final or row.target in _REQUEST_OR_END:
        _close_batch(run)


_REQUEST_OR_END = frozenset({PRE_STEP, CALL_LLM, TERMINAL})
"""Behind these states a request is made or a run is over: no call may be left without a result."""


def _settle_call(run: RunState, target: str) -> None:
    if target != RECOVER:
        _forgive(run, PROVIDER_KINDS)


def _settle_reply(run: RunState, target: str) -> None:
    if target == RECOVER:
        return
    _forgive(run, OUTPUT_KINDS)
    if run.batch:
        window = run.guardrails.loop_window
        run.recent_calls = [*run.recent_calls, *(c.signature for c in run.batch)][-window:]


def _settle_batch(run: RunState, target: str) -> None:
    if target == DISPATCH_TOOL:
        return
    if run.failure_attempts and any(c.result is not None and c.result.status == "done" for c in run.batch):
        _forgive(run, tuple(k for k in TOOL_KINDS if k not in run.call_failures))
    if target == RECOVER and run.denials >= run.guardrails.max_denials:
        run.denials = 0
    if target == RECOVER and run.failure is not None and run.failure.kind is K.repeated_error:
        run.error_key, run.error_streak = None, 0


def _settle_recovery(run: RunState, target: str) -> None:
    if target in (SUSPENDED, TERMINAL):
        return
    run.failure = run.action = None
    run.retry_calls = False


def _settle_wait(run: RunState, target: str) -> None:
    if target == TERMINAL:
        return
    run.person = run.waiting = run.failure = run.action = None


_SETTLE: dict[str, Callable[[RunState, str], None]] = {
    CALL_LLM: _settle_call,
    POST_LLM: _settle_reply,
    POST_TOOL: _settle_batch,
    RECOVER: _settle_recovery,
    SUSPENDED: _settle_wait,
}


def _forgive(run: RunState, kinds: tuple[FailureKind, ...]) -> None:
    if run.failure_attempts and run.rules.attempts_scope == "streak":
        for kind in kinds:
            run.failure_attempts.pop(kind, None)


def _close_batch(run: RunState) -> None:
    """Give every call of the batch its one result in the transcript."""
    if not run.batch:
        return
    native = run.reply is not None and bool(run.reply.message.tool_calls)  # else the call stood in an envelope
    for call in run.batch:
        result = call.result or ToolResult(call.call.id, call.call.name, _why_not(run), status="skipped")
        content = result.content
        if call.edited:
            content += "\n[Note: a person changed the arguments of this call before it ran.]"
        if result.status in ("done", "failed"):
            count = run.recent_calls.count(call.signature)
            if count >= run.guardrails.loop_soft_threshold:
                content += "\n" + wording.repeat_warning(count)
        run.messages.append(
            Message(
                Role.TOOL,
                content,
                tool_call_id=result.call_id if native else None,
                name=result.name,
                is_error=result.status != "done",
            )
        )
    run.batch = []
    run.call_failures = {}
    if run.behind:
        run.messages.extend(run.behind)
        run.behind = []


def _why_not(run: RunState) -> str:
    if run.cancelled is not None:
        return wording.NOT_RUN["cancelled"]
    if run.aborted is not None:
        return wording.NOT_RUN["aborted"]
    if run.reply is not None and run.reply.finish_reason is FinishReason.LENGTH:
        return wording.NOT_RUN["truncated"]
    if run.waiting is not None and run.waiting.call_id is not None:
        return wording.NOT_RUN["ask"]
    return wording.NOT_RUN[run.ending or ""]
