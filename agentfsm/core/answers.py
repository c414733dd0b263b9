"""How a person's answer changes a run: a text, a decision about a call, or the end of a doubt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from agentfsm.core import outcomes as o
from agentfsm.core.batch import close_batch, take_result
from agentfsm.core.failures import LIMITS, FailureKind
from agentfsm.core.messages import Message, ToolResult
from agentfsm.core.state import CallState, RunState

__all__ = ["take_answer"]


def take_answer(run: RunState, outcome: o.Answered) -> None:
    """Fold a person's answer in: it becomes a message, a call's result, or what is decided about a call."""
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
        take_result(run, ToolResult(call.call.id, call.call.name, reply.text))
    close_batch(run)
    run.ending = None
    if call is not None:
        return
    run.messages.append(Message.user(reply.text))
    if waiting.failure_kind in LIMITS:
        run.continues += 1
    if waiting.failure_kind is FailureKind.iteration_limit:
        run.iterations = 0
    elif waiting.failure_kind is FailureKind.time_limit:
        run.elapsed_s, run.grace = 0.0, ""
    elif waiting.failure_kind is FailureKind.loop_detected:
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
    take_result(run, ToolResult(call.call.id, call.call.name, text))


def _it_did_not(run: RunState, call: CallState) -> None:
    call.started = False


def _give_up(run: RunState, call: CallState) -> None:
    text = "It is not known whether this call ran, and it was given up. Do not repeat it."
    take_result(run, ToolResult(call.call.id, call.call.name, text, status="skipped"))


_DECIDE: dict[str, Callable[[RunState, CallState], None]] = {
    "allow": _allow,
    "deny": _deny,
    "edit": _edit,
    "ran": _it_ran,
    "did_not_run": _it_did_not,
    "give_up": _give_up,
}
