"""User code as users annotate it: type checkers accept both names of what it receives, and refuse changes."""

from __future__ import annotations

from agentfsm import (
    Action,
    DefaultPolicy,
    Failure,
    FailureKind,
    Handoff,
    HookContext,
    PartialRunSummary,
    Recovery,
    RecoveryPolicy,
    RunAborted,
    RunCancelled,
    RunCompleted,
    RunResult,
    RunState,
    RunView,
    UserInputRequested,
)

__all__ = ["POLICIES", "counts_with_run_state", "counts_with_run_view", "ending_of", "hook_that_asks_both"]


def counts_with_run_state(run: RunState) -> int:
    """Written before there were views."""
    return len(run.messages) + len(run.batch) + run.iterations + run.attempts(FailureKind.tool_error)


def counts_with_run_view(run: RunView) -> int:
    """Written for a view."""
    return len(run.messages) + len(run.batch) + run.iterations + run.attempts(FailureKind.tool_error)


def changes_a_view(run: RunView) -> None:
    """A type checker refuses this line, and a run ends as aborted."""
    run.state = "terminal"  # type: ignore[misc]


def hook_that_asks_both(context: HookContext) -> None:
    """A hook passes its view on to helpers of either kind."""
    if counts_with_run_state(context.run) != counts_with_run_view(context.run):
        raise AssertionError("the two differ")


class PolicyForRunStates(DefaultPolicy):
    """Written before there were views."""

    def decide(self, failure: Failure, state: RunState) -> Action:
        """Retry once."""
        return Action.handoff if state.attempts(failure.kind) else Action.retry


class PolicyForRunViews:
    """Written for a view."""

    def retry_budget(self, kind: FailureKind) -> int:
        """One."""
        return 1

    def backoff(self, kind: FailureKind, attempt: int) -> float:
        """None."""
        return 0.0

    def decide(self, failure: Failure, state: RunView) -> Action:
        """Retry once."""
        return Action.handoff if state.attempts(failure.kind) else Action.retry


class DefaultPolicyForRunViews(DefaultPolicy):
    """Overrides what the default policy does, for a view."""

    def decide(self, failure: Failure, state: RunView) -> Action | Recovery:
        """Retry once, then as by default."""
        return super().decide(failure, state) if state.attempts(failure.kind) else Action.retry


def ending_of(result: RunResult[str]) -> str:
    """Type checkers accept that nothing follows only if the ``match`` names every last event of a run."""
    match result.outcome:
        case RunCompleted():
            return "completed"
        case Handoff() | PartialRunSummary() | RunCancelled() | RunAborted():
            return "not completed"
        case UserInputRequested():
            return "suspended"


POLICIES: tuple[RecoveryPolicy, ...] = (PolicyForRunStates(), PolicyForRunViews(), DefaultPolicyForRunViews())
