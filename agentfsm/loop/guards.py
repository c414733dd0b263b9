"""The yes/no guards of ``LOOP``: cancellation, approval, pending calls, recovery actions, human replies.

Guards that also say what failed are in ``detectors``. Guards never change the run.
"""

from __future__ import annotations

from collections.abc import Callable

from agentfsm.errors import GraphError
from agentfsm.loop.detectors import Example, detector
from agentfsm.loop.failures import Action
from agentfsm.loop.outcomes import StateResult
from agentfsm.loop.state import RunState
from agentfsm.machine.declaration import extends_limit, silent_while, takes

# -- any state: what stops a run -------------------------------------------------------------------


@silent_while("cancelled", None)
def cancelled(run: RunState) -> bool:
    """The run was cancelled."""
    return run.cancelled is not None


@silent_while("aborted", None)
def aborted(run: RunState) -> bool:
    """A hook failed closed or aborted the run, or user code raised."""
    return run.aborted is not None


# -- post_llm: the reply ------------------------------------------------------------------------------


@takes("tool_calls")
def tool_calls(run: RunState) -> bool:
    """The reply calls tools."""
    return bool(run.batch)


# -- dispatch_tool: what must wait for a person -------------------------------------------------------


@silent_while("pending_request", None)
@takes("approval_required")
def approval_required(run: RunState) -> bool:
    """The next call needs a person's approval."""
    return run.pending_request is not None and run.pending_request.kind == "approval"


@silent_while("pending_request", None)
@takes("in_doubt")
def in_doubt(run: RunState) -> bool:
    """A call was started before a crash, and it is not known whether it ran."""
    return run.pending_request is not None and run.pending_request.kind == "in_doubt"


# -- post_tool: the results of the batch ----------------------------------------------------------------


@silent_while("ending", None)
@takes("declared_done")
def declared_done(run: RunState) -> bool:
    """``return_done``, or a tool that ends the run, has run."""
    return run.ending == "done"


@silent_while("ending", None)
@takes("declared_unable")
def declared_unable(run: RunState) -> bool:
    """``return_unable`` has run."""
    return run.ending == "unable"


@silent_while("ending", None)
@takes("question_asked")
def question_asked(run: RunState) -> bool:
    """``ask_user`` has run."""
    return run.ending == "ask"


def calls_pending(run: RunState) -> bool:
    """Some call of the batch has no result yet."""
    calls = len(run.batch)
    return run.first_pending < calls and run.next_call < calls


# -- recover: what the policy decided -----------------------------------------------------------------


@silent_while("action", None)
@takes("ask_user")
def ask_user(run: RunState) -> bool:
    """The policy decided to ask a person."""
    return run.action is Action.ask_user


@silent_while("action", None)
@takes("handoff")
def handoff(run: RunState) -> bool:
    """The policy decided to hand off the task."""
    return run.action is Action.handoff


@silent_while("action", None)
@takes("stop")
def stop(run: RunState) -> bool:
    """The policy decided to end the run without asking."""
    return run.action is Action.stop


@silent_while("retry_calls", False)
@takes("retry_tool")
def retry_tool(run: RunState) -> bool:
    """The failed calls should run again unchanged: their tools are idempotent and retryable."""
    return run.retry_calls


# -- suspended: external events ----------------------------------------------------------------


@silent_while("expired", False)
def expired(run: RunState) -> bool:
    """The deadline for an answer has passed."""
    return run.expired


def escalated(run: RunState) -> bool:
    """Nobody has decided about the call for so long that more roles may answer."""
    quorum = None if run.pending_request is None else run.pending_request.quorum
    return quorum is not None and quorum.escalated and run.human_reply is None and not run.expired


def vote_recorded(run: RunState) -> bool:
    """A person approved the call, and others must approve it, too."""
    return run.human_reply is not None and run.human_reply.kind == "allow" and _lacks_votes(run)


def _lacks_votes(run: RunState) -> bool:
    """Whether the call still needs approvals; a sub-agent's run counts those for its own calls."""
    request = run.pending_request
    return request is not None and not request.asker and request.quorum is not None and request.quorum.missing > 0


def approval_decided(run: RunState) -> bool:
    """A person approved, denied or edited the call, or answered a sub-agent or a tool, whose call can now continue.

    A call that several people must approve is decided by the last of them, or by the first who denies it.
    """
    if run.human_reply is None or (run.human_reply.kind != "deny" and _lacks_votes(run)):
        return False
    return run.human_reply.kind in ("allow", "deny", "edit") or _answers_call(run)


def _answers_call(run: RunState) -> bool:
    """Whether a sub-agent or a tool asked: its call continues with the answer, whatever kind of answer it is."""
    return any(call.answer is not None for call in run.batch)


def doubt_settled(run: RunState) -> bool:
    """A person said whether the run's own call in doubt ran."""
    reply = run.human_reply
    return reply is not None and reply.kind in ("ran", "did_not_run", "give_up") and not _answers_call(run)


@extends_limit
def replied(run: RunState) -> bool:
    """A person replied with text to what the run itself asks, or extended the limit that it asks about."""
    return run.human_reply is not None and run.human_reply.kind in ("text", "extend") and not _answers_call(run)


# -- states of your own ------------------------------------------------------------------------------


def came_back(outcome: str) -> Callable[[RunState], bool]:
    """A guard that holds when a state's own effect came back with an outcome that the state declares.

    ::

        StateSpec("review", effect=review, outcomes=("approved", "rejected"))
        Transition("review", came_back("approved"), "terminal", ends="completed")

    Args:
        outcome: The outcome; the guard has its name.

    Raises:
        GraphError: It is not an identifier.
    """
    if not outcome.isidentifier():
        raise GraphError(
            "an outcome must be an identifier, because its guard has its name",
            f"came_back({outcome!r})",
            "write it like 'needs_work', here and where the state and its effect name it",
        )

    @detector(
        fires_on=[Example(state_result=StateResult(outcome=outcome))],
        silent_on=[Example(state_result=StateResult())],
    )
    @takes(outcome)
    def guard(run: RunState) -> bool:
        return run.state_outcome == outcome

    guard.__name__ = guard.__qualname__ = outcome
    guard.__doc__ = f"The state's effect came back with {outcome!r}."
    return guard
