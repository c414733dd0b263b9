"""Recovery policies: what to do about a failure, with retry budgets and backoff.

A policy is pure: it gets the failure and the run *before* this failure is counted.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from agentfsm.errors import ConfigurationError, ReadOnlyError
from agentfsm.loop.detectors import CONTINUES
from agentfsm.loop.failures import LIMIT_KINDS, Action, Failure, FailureKind, describe_exception
from agentfsm.loop.outcomes import RecoveryDecided
from agentfsm.loop.read_only import user_code
from agentfsm.loop.state import RunState, RunView

MAX_BACKOFF_S = 30.0

TIME_UP = "time_up"
"""In the metadata of a failed model call that was cut off by the run's time."""


@runtime_checkable
class RecoveryPolicy(Protocol):
    """Decides what to do about a failure. Pass your own to the agent for other budgets or another escalation."""

    def retry_budget(self, kind: FailureKind) -> int:
        """How many times in a row a kind may be retried."""
        ...

    def backoff(self, kind: FailureKind, attempt: int) -> float:
        """Seconds to wait before a retry; the first retry is attempt 1."""
        ...

    def decide(self, failure: Failure, state: RunView) -> Action | Recovery:
        """What to do; ``state.failure_attempts`` does not include this failure yet. Nothing of it can be changed."""
        ...


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a policy decides about a failure, in its own words.

    ::

        def decide(self, failure: Failure, state: RunView) -> Action | Recovery:
            if failure.kind is FailureKind.tool_error:
                return Recovery(Action.retry, instruction="The printer needs a moment: try the other one.")
            return super().decide(failure, state)

    Attributes:
        action: What to do.
        instruction: What the next request, and only that one, tells the model, instead of the text of the failure's
            kind, if it has one. Where feedback on a reply is kept (``Behavior.feedback``), so is this.
        question: What a person is asked, for ``ask_user``; by default the text of the failure's kind.

    Raises:
        ValueError: There is no such action.
        TypeError: The instruction or the question is not a string.
    """

    action: Action
    instruction: str = ""
    question: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "action", Action(self.action))
        for name in ("instruction", "question"):
            value: object = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"{name} must be a string, not {type(value).__name__}")


@dataclass(frozen=True)
class DefaultPolicy:
    """Retry within a budget, narrow once, then hand off.

    Attributes:
        budgets: Maximum retries in a row by kind; 0 for a kind that is missing. Defaults to the ``retries`` of
            each kind's row in ``FailureKind``.
        actions: What to do about a kind, instead of what the failure suggests.
        jitter: Maximum random addition to a backoff, as a fraction of it (0.1 adds up to 10 %). It comes from
            the run's seeded generator, so a replay waits as long.

    Raises:
        ConfigurationError: There is no such kind or action, or a budget is not a whole number.
    """

    budgets: Mapping[FailureKind, int] = field(
        default_factory=lambda: {k: k.spec.retries for k in FailureKind if k.spec.retries}
    )
    actions: Mapping[FailureKind, Action] = field(default_factory=dict[FailureKind, Action])
    jitter: float = 0.0

    def __post_init__(self) -> None:
        try:
            budgets = {FailureKind(kind): operator.index(retries) for kind, retries in self.budgets.items()}
            actions = {FailureKind(kind): Action(action) for kind, action in self.actions.items()}
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"a policy has a number of retries, or an Action, for a FailureKind: {error}"
            ) from None
        object.__setattr__(self, "budgets", budgets)
        object.__setattr__(self, "actions", actions)

    def retry_budget(self, kind: FailureKind) -> int:
        """How many times in a row a kind may be retried."""
        return self.budgets.get(kind, 0)

    def backoff(self, kind: FailureKind, attempt: int) -> float:
        """``min(2 ** attempt, 30)`` seconds for ``transient_provider`` (attempt 1 waits 2 s), else 0."""
        if kind is not FailureKind.transient_provider:
            return 0.0
        return min(2.0 ** min(attempt, 10), MAX_BACKOFF_S)

    def decide(self, failure: Failure, state: RunView) -> Action | Recovery:
        """The suggested action; a retry beyond its budget and a second ``narrow_scope`` become ``handoff``."""
        action = self.actions.get(failure.kind, failure.suggested_action)
        attempts = state.attempts(failure.kind)
        spent = action is Action.retry and attempts >= self.retry_budget(failure.kind)
        if spent or (action is Action.narrow_scope and attempts >= 1):
            return Action.handoff
        return action


class PolicyError(Exception):
    """A policy raised, or returned something that is not a decision; the text says which one. It aborts the run."""


def decide_recovery(policy: RecoveryPolicy, run: RunState, seed: int | None = None) -> RecoveryDecided:
    """What to do about the run's failure: the policy's action, within what the guardrails allow.

    A retry after a wait that would outlast the run's time is a handoff, which quotes the failure. A model call that the
    run's time has cut off is not a failure of the provider: no policy is asked, and the row for the time limit is next.

    Raises:
        PolicyError: The policy raised, decided on no action, or returned a backoff that is not a finite number.
        ReadOnlyError: The policy tried to change the run.
    """
    try:
        return _decide_recovery(policy, run, seed)
    except ReadOnlyError:
        raise
    except Exception as error:
        raise PolicyError(f"policy {type(policy).__name__} raised {describe_exception(error)}") from error


def _decide_recovery(policy: RecoveryPolicy, run: RunState, seed: int | None) -> RecoveryDecided:
    failure = run.failure
    if failure is None:  # a user's graph may enter recover without a failure
        return RecoveryDecided(Action.retry)
    limit = run.time_limit
    left = math.inf if limit is None else limit - run.elapsed_s
    if left <= 0 and failure.metadata.get(TIME_UP):
        return RecoveryDecided(Action.retry)
    decided = _ask_policy(policy, failure, run)
    own = decided if isinstance(decided, Recovery) else Recovery(decided)
    action = own.action
    if action is Action.ask_user and failure.kind in LIMIT_KINDS and CONTINUES.is_empty(run):
        action = Action.stop
    if action is not Action.retry:
        return RecoveryDecided(action, instruction=own.instruction, question=own.question)
    attempt = run.attempts(failure.kind) + 1
    wait = policy.backoff(failure.kind, attempt)
    jitter = float(getattr(policy, "jitter", 0.0))
    if wait and jitter:
        draw = random.Random(f"{seed}:{run.run_id}:{run.steps}")  # noqa: S311  # repeatable, not secret
        wait *= 1 + jitter * draw.random()
    wait = max(wait, _retry_after_s(failure))
    if not math.isfinite(wait):
        raise ValueError(f"a backoff must be a finite number of seconds, not {wait}")
    if left <= 0:  # the time limit takes effect next
        wait = 0.0
    if wait >= left > 0 or failure.metadata.get("not_admitted"):  # not begun: it could not end in time
        return RecoveryDecided(Action.handoff, instruction=own.instruction, question=own.question)
    return RecoveryDecided(action, wait, _may_rerun(run, failure), own.instruction, own.question)


def _ask_policy(policy: RecoveryPolicy, failure: Failure, run: RunState) -> Action | Recovery:
    with user_code("policy", policy.decide, run.change_attempts):
        return policy.decide(failure, run.view())


def _retry_after_s(failure: Failure) -> float:
    """Seconds to wait as the provider or a tool requested; 0 if that is missing or not a number."""
    try:
        delay = float(failure.metadata.get("retry_after_s") or 0.0)
    except (TypeError, ValueError):
        return 0.0
    return max(0.0, delay)


def _may_rerun(run: RunState, failure: Failure) -> bool:
    failed = [c for c in run.batch if c.result is not None and c.result.failure is not None]
    return (
        failure.kind.spec.rerun_may_help
        and bool(failed)
        and all(c.result is not None and c.result.retryable for c in failed)
        and all(c.retries < run.guardrails.max_tool_retries for c in failed)
    )
