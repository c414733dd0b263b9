"""``RunRequest``: how to start, continue or dismiss a run, by whom, and whether its graph has a row for it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from agentfsm.errors import AuthenticationError, HumanReplyError, NoTransitionError
from agentfsm.loop.approval_rows import counts_votes
from agentfsm.loop.extension import extends
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.human_input import HumanReply
from agentfsm.loop.outcomes import HumanAnswered, Outcome
from agentfsm.loop.quorum import Actor
from agentfsm.loop.reducer import on_outcome
from agentfsm.loop.state import RunState
from agentfsm.loop.suspension import SuspensionRecord
from agentfsm.machine.engine import Machine
from agentfsm.runtime.context import AgentConfig
from agentfsm.runtime.recorder import ResumePoint, RunHeader


@dataclass(frozen=True, slots=True)
class RunRequest:
    """How to start, resume or dismiss a run.

    Attributes:
        prompt: The user's message, for a new run.
        suspension_record: The suspension record that is resumed, or None.
        reply: The human's reply, or None.
        dismiss_reason: Why the run is to end without a reply, or None.
        resume_point: The run's position in the host's store, if it was loaded from there.
        guardrails: The limits under which it continues; None for those that it had.
        by: Who requests the run, replies or dismisses it, as the caller says: ``Host.identify`` turns it into an
            ``Actor``.
        deps: The run's dependencies, or None.
        signal_id: The id of the signal in the store that it acts on, or an empty string: ``by`` is then the actor of
            the signal, for whom a secret of the host vouches.
        admitted: The tools and hooks that ask people less than when the run began, as a migration admits.
    """

    prompt: str = ""
    suspension_record: SuspensionRecord | None = None
    reply: HumanReply | None = None
    dismiss_reason: str | None = None
    resume_point: ResumePoint | None = None
    guardrails: AgentGuardrails | None = None
    by: Any = field(default=None, repr=False)
    deps: Any = field(default=None, repr=False)
    signal_id: str = ""
    admitted: tuple[str, ...] = ()

    @property
    def expires_at(self) -> float | None:
        """When the pending request expires, in seconds since the epoch, or None."""
        if self.resume_point is not None:
            return self.resume_point.expires_at
        return None if self.suspension_record is None else self.suspension_record.expires_at


async def identify_actor(config: AgentConfig, run: RunState, request: RunRequest) -> RunRequest:
    """The request with the actor who makes it; a new run gets its requester. Nothing is changed if it is refused.

    A sub-agent's run gets both from its calling run.

    Raises:
        HumanReplyError: The host refuses whoever replies, or the approval's rule does.
    """
    if run.parent is not None:
        return request
    reply, host = request.reply, config.host
    if request.dismiss_reason is not None:
        expired = request.expires_at is not None and host.clock.time() > request.expires_at
        if not expired and (host.authenticate is not None or request.by is not None):
            actor, pending = await _actor(config, request), run.pending_request
            if pending is not None and pending.quorum is not None:
                pending.quorum.check_reply("deny", actor)
            if actor is not None and not request.signal_id:  # the reason of a signal names its sender already
                return replace(request, dismiss_reason=f"{request.dismiss_reason} (by {actor})")
        return request
    if reply is None:
        if request.suspension_record is None and request.resume_point is None and request.by is not None:
            run.requester = await host.identify(request.by)
        return request
    actor = await _actor(config, request)
    pending = run.pending_request
    quorum = None if pending is None else pending.quorum
    plain_name = host.authenticate is None and isinstance(request.by, str)
    reply = replace(reply, by="" if actor is None else actor.id, actor=None if plain_name and quorum is None else actor)
    if quorum is not None:
        due = quorum.is_due(host.clock.time())
        quorum = replace(quorum, escalated=quorum.escalated or due)
        quorum.check_reply(reply.kind, actor, authenticated=host.authenticate is not None)
    return replace(request, reply=reply)


async def _actor(config: AgentConfig, request: RunRequest) -> Actor | None:
    """Who replies or dismisses a run."""
    if not request.signal_id:
        return await config.host.identify(request.by)
    actor: Actor | None = request.by
    if config.host.authenticate is not None and (actor is None or not actor.verified):
        raise AuthenticationError(
            "nobody vouched for whoever sent this: give Runs(..., authenticate=...) what the host has"
        )
    return actor


def run_header(config: AgentConfig, run: RunState, request: RunRequest) -> RunHeader:
    """The content of the first record of a run's journal."""
    record = request.suspension_record
    return RunHeader(
        run.run_id,
        run.session_id,
        config.machine.graph,
        run.guardrails,
        run.behavior,
        config.policy,
        tuple(run.messages) if record is None else (),
        None if record is None else record.state,
        config.host.seed,
        {} if run.parent is None else {"run": run.parent[0], "call": run.parent[1]},
        tuple(config.tools.values()),
        run.requester,
        run.details,
    )


def resume_details(request: RunRequest) -> dict[str, Any]:
    """The content of the record of a resume: what the run waited for, and which record the reply answers."""
    resume_point = request.resume_point
    if resume_point is None:
        return {}
    limits: dict[str, Any] = {}
    if request.guardrails is not None:
        limits["guardrails"] = request.guardrails.model_dump(mode="json")
    if request.admitted:
        limits["approvals"] = list(request.admitted)
    if request.reply is None or resume_point.request_ref is None:
        return {"from": resume_point.kind, **limits}
    seq, digest = resume_point.request_ref
    return {"from": resume_point.kind, "to": {"seq": seq, "hash": digest}, **limits}


def escalation_is_due(config: AgentConfig, run: RunState) -> bool:
    """Whether the approval that a run waits for is to be escalated now.

    One that a sub-agent asks for is escalated by its own run, too, when that is answered; where the calling run's graph
    counts no votes, only then.
    """
    request = run.pending_request
    if request is None or request.quorum is None or not request.quorum.is_due(config.host.clock.time()):
        return False
    return not request.asker or counts_votes(config.machine.graph)


def would_transition(machine: Machine, run: RunState, outcome: Outcome) -> bool:
    """Whether a suspended run has a transition for an outcome; the run itself is unchanged."""
    trial = _with_outcome(run, outcome)
    moves = machine.would_take(trial) is not None
    return moves and trial.aborted is run.aborted  # a guard that raises must not end a wait


def _with_outcome(run: RunState, outcome: Outcome) -> RunState:
    """A copy of a run to which an outcome has happened."""
    trial = copy.copy(run)
    trial.messages = list(run.messages)
    trial.recent_calls, trial.recent_results = list(run.recent_calls), list(run.recent_results)
    trial.batch = [copy.copy(call) for call in run.batch]
    trial.deferred_messages, trial.state_results = list(run.deferred_messages), dict(run.state_results)
    trial.state_visits = dict(run.state_visits)
    trial.state_calls = {number: replace(call, tool=copy.copy(call.tool)) for number, call in run.state_calls.items()}
    trial.failure_attempts, trial.call_failures = dict(run.failure_attempts), dict(run.call_failures)
    trial.counters = dict(run.counters)
    on_outcome(trial, outcome)
    return trial


def require_extension(machine: Machine, run: RunState, reply: HumanReply) -> None:
    """Check that an extension is granted by the row that takes it, before anything is changed.

    Raises:
        HumanReplyError: The row grants nothing.
    """
    request = run.pending_request
    if reply.kind != "extend" or request is None:
        return
    trial = _with_outcome(run, HumanAnswered(reply))
    row = machine.would_take(trial)
    if row is None:  # ``require_transition`` says more
        return
    if trial.aborted is run.aborted and not extends(row, machine.specs[row.target], request):
        raise HumanReplyError(
            f"the row {row.id} would take the reply, and extends no limit; the run still waits: reply with a string"
        )


def require_transition(machine: Machine, run: RunState, outcome: Outcome) -> None:
    """Check that a suspended run has a transition for an outcome, before anything is changed.

    Raises:
        NoTransitionError: The graph has no row for it, or a guard raised; the run is unchanged, and its record is
            unused.
    """
    trial = _with_outcome(run, outcome)
    row = machine.would_take(trial)
    raised = None if trial.aborted is run.aborted else trial.aborted
    if row is not None and raised is None:
        return
    what = outcome.reply.kind if isinstance(outcome, HumanAnswered) else type(outcome).__name__.lower()
    waits = f"run {run.run_id!r} waits in {str(run.state)!r}, and"
    if raised is not None:
        raise NoTransitionError(
            f"{waits} with {what!r}, {raised.explanation}; the run is unchanged, and its record is unused"
        )
    rows = ", ".join(row.name for row in machine.graph.rows(run.state))
    raise NoTransitionError(
        f"{waits} no row of that state accepts {what!r} (rows: {rows}); the run is unchanged, and its record is unused:"
        " add a row to the graph"
    )
