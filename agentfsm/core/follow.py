"""How a decision changes a run: what it found, what it settles, and what entering its state means."""

from __future__ import annotations

from collections.abc import Callable

from agentfsm.core.batch import close_batch
from agentfsm.core.failures import OUTPUT_KINDS, PROVIDER_KINDS, TOOL_KINDS, Failure, FailureKind
from agentfsm.core.state import RunState
from agentfsm.machine.engine import Decision
from agentfsm.machine.graph import State

__all__ = ["follow"]

PRE_STEP, CALL_LLM, POST_LLM, DISPATCH_TOOL, POST_TOOL, RECOVER, SUSPENDED, TERMINAL = State


_REQUEST_OR_END = frozenset({PRE_STEP, CALL_LLM, TERMINAL})
"""Behind these states a request is made or a run is over: no call may be left without a result."""


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
    if run.batch and (final or row.target in _REQUEST_OR_END):
        close_batch(run)


def _settle_call(run: RunState, target: str) -> None:
    if target != RECOVER:
        _forgive(run, PROVIDER_KINDS)


def _settle_reply(run: RunState, target: str) -> None:
    if run.so_far and not (target == RECOVER and _was_cut_off(run)):  # it was gone on with, or is set aside
        run.so_far = ""
    if target == RECOVER:
        return
    _forgive(run, OUTPUT_KINDS)
    if run.batch:
        recent = run.recent_calls
        recent.extend([c.signature for c in run.batch])
        del recent[: -run.guardrails.loop_window]


def _was_cut_off(run: RunState) -> bool:
    return run.failure is not None and run.failure.kind is FailureKind.output_truncated


def _settle_batch(run: RunState, target: str) -> None:
    if target == DISPATCH_TOOL:
        return
    if run.failure_attempts and any(c.result is not None and c.result.status == "done" for c in run.batch):
        _forgive(run, tuple(k for k in TOOL_KINDS if k not in run.call_failures))
    if target == RECOVER and run.denials >= run.guardrails.max_denials:
        run.denials = 0
    if target == RECOVER and run.failure is not None and run.failure.kind is FailureKind.repeated_error:
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
