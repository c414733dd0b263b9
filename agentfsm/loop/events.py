"""Events: what a run reports to its observers, in order; the last one says how the run ended.

The last event is always exactly one of ``RunCompleted``, ``Handoff``, ``PartialRunSummary``, ``RunCancelled`` and
``UserInputRequested``; the latter means that the run is suspended, not over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentfsm.loop.failures import Action, Failure, FailureKind
from agentfsm.loop.messages import FinishReason, Message, ToolCall, ToolResult, Usage
from agentfsm.loop.suspension import SuspensionRecord
from agentfsm.machine.engine import Decision

__all__ = [
    "Ending",
    "Event",
    "Handoff",
    "ModelReplied",
    "PartialRunSummary",
    "ReasoningDelta",
    "RecoveryStarted",
    "ReplyRestarted",
    "RunCancelled",
    "RunCompleted",
    "RunResumed",
    "RunStarted",
    "RunWarning",
    "TextDelta",
    "ToolCallDelta",
    "ToolFinished",
    "ToolStarted",
    "Transitioned",
    "UserInputRequested",
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run.

    Attributes:
        run_id: The run.
        seq: Its place among the events of this part of the run, from 1: behind a suspension or a crash the
            next part begins with ``RunResumed`` and counts anew.
        time: When, in seconds since the epoch, by the host's clock; information only, order is ``seq``.
    """

    run_id: str
    seq: int
    time: float


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A run begins with a user's message.

    Attributes:
        prompt: The message.
        model: The model's name.
        session_id: The conversation, where the caller has one.
        parent: For a sub-agent's run, the run and the call for which it works; else None.
    """

    prompt: str
    model: str = ""
    session_id: str = ""
    parent: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class RunResumed(Event):
    """A suspended run goes on.

    Attributes:
        kind: What it had waited for.
        model: The model's name.
        session_id: The conversation, where the caller has one.
        parent: For a sub-agent's run, the run and the call for which it works; else None.
    """

    kind: str
    model: str = ""
    session_id: str = ""
    parent: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Transitioned(Event):
    """The run moved by a row of its graph."""

    decision: Decision

    @property
    def source(self) -> str:
        """The state that was left."""
        return self.decision.source

    @property
    def target(self) -> str:
        """The state that was entered; its effect runs next."""
        return self.decision.target


@dataclass(frozen=True, kw_only=True)
class TextDelta(Event):
    """More of the text of the reply that is under way.

    Deltas are for people to read along: they come only while somebody watches and the model streams, and
    ``ModelReplied`` brings the whole. Where the reply fails after all, ``RecoveryStarted`` or an ending comes in
    its stead, and what was told of it is void.
    """

    text: str


@dataclass(frozen=True, kw_only=True)
class ReasoningDelta(Event):
    """More of what the model thinks, where its provider shows that."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ToolCallDelta(Event):
    """More of a tool call of the reply that is under way.

    Attributes:
        index: Which call of the reply, from 0.
        name: The tool.
        arguments: More of the JSON text of its arguments.
    """

    index: int
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class ReplyRestarted(Event):
    """The deltas of this reply so far are void: it begins anew, by another model.

    Attributes:
        reason: What happened.
    """

    reason: str


@dataclass(frozen=True, kw_only=True)
class ModelReplied(Event):
    """The model answered.

    Attributes:
        message: What it said.
        usage: What the call used up.
        finish_reason: Why it stopped.
        model: The name under which the provider answered, or an empty string.
    """

    message: Message
    usage: Usage
    finish_reason: FinishReason = FinishReason.STOP
    model: str = ""


@dataclass(frozen=True, kw_only=True)
class ToolStarted(Event):
    """A tool is about to run."""

    call: ToolCall


@dataclass(frozen=True, kw_only=True)
class ToolFinished(Event):
    """A tool call has its result."""

    result: ToolResult


@dataclass(frozen=True, kw_only=True)
class RecoveryStarted(Event):
    """Something failed, and the run recovers from it.

    Attributes:
        failure: What failed.
        action: What is done about it: ``retry`` or ``narrow_scope``.
        attempt: Which strike of its kind this is, from 1.
        backoff_s: Seconds that the run waits first.
        recoverable: Always True: what cannot be recovered from ends the run with another event.
    """

    failure: Failure
    action: Action
    attempt: int
    backoff_s: float = 0.0
    recoverable: bool = True


@dataclass(frozen=True, kw_only=True)
class RunWarning(Event):
    """Something beside the run failed (memory, a hook that fails open, an observer); the run goes on."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Ending(Event):
    """The last event of a run, or of its part up to a suspension."""


@dataclass(frozen=True, kw_only=True)
class RunCompleted(Ending):
    """The run finished; ``output`` is its answer."""

    output: Any


@dataclass(frozen=True, kw_only=True)
class Handoff(Ending):
    """The agent cannot finish and hands the task back; there is no question to answer.

    Attributes:
        rationale: Why.
        blockers: Concrete reasons.
        suggested_next_steps: What a person might do.
        failure: The failure behind it, or None where the model declared it.
    """

    rationale: str
    blockers: tuple[str, ...] = ()
    suggested_next_steps: tuple[str, ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class PartialRunSummary(Ending):
    """The run stopped early without asking anybody to act.

    Attributes:
        missing: What was not reached.
        learned_facts: What went wrong on the way, from the run's lessons.
        next_step_plan: What would come next.
        failure: The failure behind it.
    """

    missing: str
    learned_facts: tuple[str, ...] = ()
    next_step_plan: str = ""
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class RunCancelled(Ending):
    """The run was cancelled from outside."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class UserInputRequested(Ending):
    """The run is suspended and needs a person; it goes on with ``agent.resume(suspension_record, reply)``.

    Attributes:
        kind: ``question``, ``approval``, ``limit`` or ``in_doubt``.
        question: What the person is asked.
        context: More about it.
        choices: Answers to choose from, or empty.
        tool: For an approval or a doubt, the tool.
        arguments: For an approval or a doubt, the arguments of the call.
        asker: Where a sub-agent asks, the tool that it is; else an empty string.
        suspension_record: What must be kept to resume the run.
        digest: To what an answer can be bound (``agent.resume(run_id, reply, to=digest)``): the hash, in hex,
            of the journal's record that asks, which covers the exact arguments, the graph and all that
            happened; an empty string where no store keeps the run.
        originating_failure_kind: The kind of failure that led here, or None where a tool asked.
    """

    kind: str
    question: str
    context: str = ""
    choices: tuple[str, ...] = ()
    tool: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    asker: str = ""
    suspension_record: SuspensionRecord = field(repr=False)
    digest: str = ""
    originating_failure_kind: FailureKind | None = None
