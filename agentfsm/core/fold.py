"""How an outcome changes a run: ``apply`` folds in what an effect came back with. Pure but for the run.

``apply`` runs when an effect has ended, ``follow`` when the machine has moved. Together they are all that
writes to a ``RunState``, so a run is what its outcomes and decisions make of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentfsm.core import outcomes as o
from agentfsm.core import wording
from agentfsm.core.answers import take_answer
from agentfsm.core.batch import close_batch, take_result, unanswered
from agentfsm.core.failures import LIMITS, OUTPUT_KINDS, PROVIDER_KINDS, Action, Failure, FailureKind
from agentfsm.core.messages import Message, Role, Usage
from agentfsm.core.state import CallState, RunState, Waiting
from agentfsm.machine.graph import State

__all__ = ["apply"]

K = FailureKind
SUSPENDED = State.SUSPENDED


_NOTHING = Usage()


KEPT_RESULTS = 4
"""How many of the newest messages keep their text when a prompt was too long."""


_ASKED = frozenset({"question", "limit"})
"""What a sub-agent asks in words: the run then waits as it does for a question of its own."""


def apply(run: RunState, outcome: o.Outcome, took_s: float = 0.0, silence_s: float = 0.0) -> None:
    """Fold what an effect came back with into the run.

    Args:
        run: The run, in the state whose effect ended.
        outcome: What the effect came back with.
        took_s: Seconds that the effect took.
        silence_s: Seconds between the end of the last effect and the start of this one.
    """
    if (took_s or silence_s) and run.state != SUSPENDED:
        run.elapsed_s += took_s + silence_s
        if silence_s > run.silence_s:
            run.silence_s = silence_s
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
        take_result(run, result)


def _parked(run: RunState, outcome: o.Parked) -> None:
    run.backoff_s = 0.0
    for result in outcome.results:
        take_result(run, result)
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
    if failure.kind is K.output_truncated and outcome.action is not Action.retry:
        run.so_far = ""
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
        _tell(run, _after_the_cut(run))
    elif failure.kind in OUTPUT_KINDS or (failure.kind not in PROVIDER_KINDS and unanswered(run)):
        _tell(run, wording.feedback(failure))


def _tell(run: RunState, text: str) -> None:
    if run.rules.feedback == "once":
        run.feedback = text
    else:
        close_batch(run)
        run.messages.append(Message(Role.TOOL, text, is_error=True))


def _after_the_cut(run: RunState) -> str:
    """What the model is told of a message that was cut off: with more room, to say it again, else to go on."""
    cap = run.output_cap or run.guardrails.max_output_tokens
    if cap is not None:
        run.output_cap = min(2 * cap, max(cap, run.guardrails.max_output_tokens_limit))
        if run.output_cap > cap:
            run.so_far = ""
            return wording.cut_off("more_room")
    if run.batch or run.reply is None:
        return wording.cut_off("call")
    run.so_far += run.reply.message.content
    return wording.cut_off("answer")


def _narrow(run: RunState, failure: Failure) -> None:
    run.pending_instruction = wording.instruction(failure)
    if failure.kind is K.context_overflow:
        run.elided = max(run.elided, len(run.messages) - KEPT_RESULTS)


def _ask(run: RunState, failure: Failure) -> None:
    kind = "limit" if failure.kind in LIMITS else "question"
    run.waiting = Waiting(kind, wording.question(failure), failure_kind=failure.kind)


def _end(run: RunState, failure: Failure) -> None:
    """Nothing to prepare: the run ends."""


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
        take_result(run, result)
    run.cancelled = outcome.reason


def _aborted(run: RunState, outcome: o.Aborted) -> None:
    for result in outcome.results:
        take_result(run, result)
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
    o.Answered: take_answer,
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
