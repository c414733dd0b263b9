"""The yes/no guards of ``LOOP``: cancellation, approval, pending calls, recovery actions, human replies.

Guards that also say what failed are in ``detectors``. Guards never change the run.
"""

from __future__ import annotations

from agentfsm.loop.failures import Action
from agentfsm.loop.state import RunState

# -- what stops a run from anywhere -------------------------------------------------------------------


def cancelled(run: RunState) -> bool:
    """Somebody has cancelled the run."""
    return run.cancelled is not None


def aborted(run: RunState) -> bool:
    """A hook failed closed or aborted the run, or code of the user's raised."""
    return run.aborted is not None


# -- post_llm: the reply ------------------------------------------------------------------------------


def tool_calls(run: RunState) -> bool:
    """The reply calls tools."""
    return bool(run.batch)


# -- dispatch_tool: what must wait for a person -------------------------------------------------------


def approval_required(run: RunState) -> bool:
    """The next call may not run before a person has allowed it."""
    return run.pending_request is not None and run.pending_request.kind == "approval"


def in_doubt(run: RunState) -> bool:
    """A call had started before a crash, and nobody knows whether it ran."""
    return run.pending_request is not None and run.pending_request.kind == "in_doubt"


# -- post_tool: what the batch brought ----------------------------------------------------------------


def declared_done(run: RunState) -> bool:
    """``return_done``, or a tool that ends the run, has run."""
    return run.ending == "done"


def declared_unable(run: RunState) -> bool:
    """``return_unable`` has run."""
    return run.ending == "unable"


def question_asked(run: RunState) -> bool:
    """``ask_user`` has run."""
    return run.ending == "ask"


def calls_pending(run: RunState) -> bool:
    """Some call of the batch has no result yet."""
    for call in run.batch:  # noqa: SIM110  # asked in every step: a generator costs more than the question
        if call.result is None:
            return True
    return False


# -- recover: what the policy decided -----------------------------------------------------------------


def ask_user(run: RunState) -> bool:
    """The policy decided to ask a person."""
    return run.action is Action.ask_user


def handoff(run: RunState) -> bool:
    """The policy decided to hand the task back."""
    return run.action is Action.handoff


def stop(run: RunState) -> bool:
    """The policy decided to end the run without a question."""
    return run.action is Action.stop


def retry_tool(run: RunState) -> bool:
    """The failed calls are run again as they stand: their tools are idempotent and retryable."""
    return run.retry_calls


# -- suspended: what came from outside ----------------------------------------------------------------


def expired(run: RunState) -> bool:
    """The time for an answer is over."""
    return run.expired


def approval_decided(run: RunState) -> bool:
    """A person allowed, denied or edited the call, or gave a sub-agent the answer with which its call goes on."""
    if run.human_reply is None:
        return False
    return run.human_reply.kind in ("allow", "deny", "edit") or any(c.answer is not None for c in run.batch)


def doubt_settled(run: RunState) -> bool:
    """A person said what became of the call that was in doubt."""
    return run.human_reply is not None and run.human_reply.kind in ("ran", "did_not_run", "give_up")


def replied(run: RunState) -> bool:
    """A person answered in words."""
    return run.human_reply is not None and run.human_reply.kind == "text"
