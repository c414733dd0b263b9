"""Recovery policy: what is done about a failure, with its retry budgets and backoff.

A policy is pure: it sees the failure and the run as they are *before* this failure is counted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from agentfsm.loop.failures import LIMIT_KINDS, Action, Failure, FailureKind
from agentfsm.loop.outcomes import RecoveryDecided
from agentfsm.loop.state import RunState

__all__ = ["DefaultPolicy", "RecoveryPolicy", "decide_recovery"]

MAX_BACKOFF_S = 30.0

LIMIT_MARGIN_S = 0.001
"""What a back-off that would outlast the run's time waits beyond it, in seconds."""


@runtime_checkable
class RecoveryPolicy(Protocol):
    """Decides what is done about a failure. Inject your own for other budgets or other escalation."""

    def retry_budget(self, kind: FailureKind) -> int:
        """How often a kind may be retried in a row."""
        ...

    def backoff(self, kind: FailureKind, attempt: int) -> float:
        """Seconds to wait before a retry; the first retry is attempt 1."""
        ...

    def decide(self, failure: Failure, state: RunState) -> Action:
        """What to do; ``state.failure_attempts`` holds the strikes before this one."""
        ...


@dataclass(frozen=True)
class DefaultPolicy:
    """Retry within a budget, narrow once, then hand off.

    Attributes:
        budgets: Retries in a row by kind; a kind that is missing has none.
        actions: What to do about a kind in place of what its failure suggests.
        jitter: The most by which a back-off is lengthened, as a part of it (0.1 is up to 10 %); drawn
            from the run's own seeded generator, so a replay waits as long.
    """

    budgets: Mapping[FailureKind, int] = field(
        default_factory=lambda: {k: k.spec.retries for k in FailureKind if k.spec.retries}
    )
    actions: Mapping[FailureKind, Action] = field(default_factory=dict[FailureKind, Action])
    jitter: float = 0.0

    def retry_budget(self, kind: FailureKind) -> int:
        """How often a kind may be retried in a row."""
        return self.budgets.get(kind, 0)

    def backoff(self, kind: FailureKind, attempt: int) -> float:
        """``min(2 ** attempt, 30)`` seconds for ``transient_provider`` (attempt 1 waits 2 s), else 0."""
        if kind is not FailureKind.transient_provider:
            return 0.0
        return min(2.0 ** min(attempt, 10), MAX_BACKOFF_S)

    def decide(self, failure: Failure, state: RunState) -> Action:
        """The suggested action; a retry past its budget and a second narrowing become a hand-off."""
        action = self.actions.get(failure.kind, failure.suggested_action)
        attempts = state.attempts(failure.kind)
        spent = action is Action.retry and attempts >= self.retry_budget(failure.kind)
        if spent or (action is Action.narrow_scope and attempts >= 1):
            return Action.handoff
        return action


def decide_recovery(policy: RecoveryPolicy, run: RunState, seed: int | None = None) -> RecoveryDecided:
    """What is done about the run's failure: the policy's action within what the guardrails allow.

    Args:
        policy: Asked once, before the failure is counted.
        run: The run in ``recover``.
        seed: Seed of the run's random draws.
    """
    failure = run.failure
    if failure is None:  # a graph of the user's leads here with nothing found
        return RecoveryDecided(Action.retry)
    action = Action(policy.decide(failure, run))
    if action is Action.ask_user and failure.kind in LIMIT_KINDS and run.continues >= run.guardrails.max_continues:
        action = Action.stop
    if action is not Action.retry:
        return RecoveryDecided(action)
    attempt = run.attempts(failure.kind) + 1
    wait = policy.backoff(failure.kind, attempt)
    jitter = float(getattr(policy, "jitter", 0.0))
    if wait and jitter:
        draw = random.Random(f"{seed}:{run.run_id}:{run.steps}")  # noqa: S311  # repeatable, not secret
        wait *= 1 + jitter * draw.random()
    wait = max(wait, _retry_after_s(failure))
    if not math.isfinite(wait):
        raise ValueError(f"a back-off must be a number of seconds, not {wait}")
    limit = run.guardrails.max_execution_time_s
    if limit is not None:  # no back-off outlasts the run: a moment past the limit, and the limit acts
        wait = min(wait, max(0.0, limit - run.elapsed_s) + LIMIT_MARGIN_S)
    return RecoveryDecided(action, backoff_s=wait, retry_calls=_may_rerun(run, failure))


def _retry_after_s(failure: Failure) -> float:
    """How long the provider, or a tool, asks to wait, in seconds; what is no time asks for nothing."""
    try:
        asked = float(failure.metadata.get("retry_after_s") or 0.0)
    except (TypeError, ValueError):
        return 0.0
    return max(0.0, asked)


def _may_rerun(run: RunState, failure: Failure) -> bool:
    failed = [c for c in run.batch if c.result is not None and c.result.failure is not None]
    return (
        failure.kind.spec.rerun_may_help
        and bool(failed)
        and all(c.result is not None and c.result.retryable for c in failed)
        and all(c.retries < run.guardrails.max_tool_retries for c in failed)
    )
