"""Events: what a run reports to its observers, in order; the last one says how the run ended.

The last event is always exactly one of ``RunCompleted``, ``Handoff``, ``PartialRunSummary``, ``RunCancelled``,
``RunAborted`` and ``UserInputRequested``, which means that the run is suspended, not over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentfsm.loop.failures import Action, Failure, FailureKind
from agentfsm.loop.messages import FinishReason, Message, ToolCall, ToolResult, Usage
from agentfsm.loop.quorum import Quorum
from agentfsm.loop.read_only import FrozenDict
from agentfsm.loop.state import ReachedLimit
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
    "RunAborted",
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
        seq: Its number, from 1. After a suspension or a crash the run continues with ``RunResumed`` as number 1.
        time: When it happened, in seconds since the epoch, by the host's clock. For information: ``seq`` is the
            order.
    """

    run_id: str
    seq: int
    time: float


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A run started with a user message.

    Attributes:
        prompt: The message.
        model: The model's name.
        session_id: The conversation, or an empty string.
        parent: For the run of a sub-agent, the ids of the parent run and of the call that it works on; else None.
    """

    prompt: str
    model: str = ""
    session_id: str = ""
    parent: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class RunResumed(Event):
    """A run was resumed after a suspension or a crash.

    Attributes:
        kind: What it waited for.
        model: The model's name.
        session_id: The conversation, or an empty string.
        parent: For the run of a sub-agent, the ids of the parent run and of the call that it works on; else None.
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
    """The next part of the text of the current reply.

    Deltas are for display: they are emitted only if there is an observer and the model streams. ``ModelReplied``
    has the complete message. If the reply fails, ``RecoveryStarted`` or an ending follows instead; discard the deltas.
    """

    text: str


@dataclass(frozen=True, kw_only=True)
class ReasoningDelta(Event):
    """The next part of the model's reasoning, if its provider shows that."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ToolCallDelta(Event):
    """The next part of a tool call of the current reply.

    Attributes:
        index: The number of the call in the reply, from 0.
        name: The tool.
        arguments: The next part of the JSON text of its arguments.
    """

    index: int
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class ReplyRestarted(Event):
    """The reply starts again, from another model: discard its deltas so far.

    Attributes:
        reason: Why.
    """

    reason: str


@dataclass(frozen=True, kw_only=True)
class ModelReplied(Event):
    """The model replied.

    Attributes:
        message: The assistant message.
        usage: What the call consumed.
        finish_reason: Why the model stopped.
        model: The model name that the provider reported, or an empty string.
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
    """A tool call has ended and has a result."""

    result: ToolResult


@dataclass(frozen=True, kw_only=True)
class RecoveryStarted(Event):
    """The run recovers from a failure and continues.

    Attributes:
        failure: The failure.
        action: ``retry`` or ``narrow_scope``.
        attempt: The number of consecutive failures of this kind, from 1.
        backoff_s: Seconds that the run waits first.
        recoverable: Always True: a failure that is not recoverable ends the run with another event.
    """

    failure: Failure
    action: Action
    attempt: int
    backoff_s: float = 0.0
    recoverable: bool = True


@dataclass(frozen=True, kw_only=True)
class RunWarning(Event):
    """Something optional failed (memory, a hook that fails open, an observer); the run continues."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Ending(Event):
    """The last event of a run, or the last before it is suspended."""


@dataclass(frozen=True, kw_only=True)
class RunCompleted(Ending):
    """The run finished; ``output`` is its answer."""

    output: Any


@dataclass(frozen=True, kw_only=True)
class Handoff(Ending):
    """The agent cannot finish and hands off the task; there is no question to answer.

    Attributes:
        rationale: Why.
        blockers: Concrete reasons.
        suggested_next_steps: What a person could do next.
        failure: The failure that caused it, or None if the model declared it.
    """

    rationale: str
    blockers: tuple[str, ...] = ()
    suggested_next_steps: tuple[str, ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class PartialRunSummary(Ending):
    """The run stopped early and does not ask anyone to act.

    Attributes:
        missing: What was not achieved.
        learned_facts: What went wrong, from the run's lessons.
        next_step_plan: What would come next.
        failure: The failure that caused it.
    """

    missing: str
    learned_facts: tuple[str, ...] = ()
    next_step_plan: str = ""
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class RunAborted(Ending):
    """Code of the user's raised, or a hook aborted the run.

    Attributes:
        reason: What happened, and whose code it was.
        failure: The same as a failure, with the class of the exception in its metadata.
    """

    reason: str
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class RunCancelled(Ending):
    """The run was cancelled from outside."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class UserInputRequested(Ending):
    """The run is suspended until a person answers; resume it with ``agent.resume(suspension_record, reply)``.

    Attributes:
        kind: ``question``, ``approval``, ``limit`` or ``in_doubt``.
        question: The question for the person.
        context: Background for the question.
        choices: Answers to choose from, or empty.
        tool: For an approval or a call in doubt, the tool.
        arguments: For an approval or a call in doubt, the arguments of the call.
        asker: If a sub-agent asks, its tool name; else an empty string.
        quorum: For an approval with a rule about who may answer, the rule and the votes so far; else None.
        limit: For a limit, how much of it is used up, and what a reply grants by default; else None.
        suspension_record: What to save in order to resume the run.
        digest: The hash (hex) of the journal record with this request. It covers the exact arguments, the graph and
            the whole history, so an answer can be bound to it: ``agent.resume(run_id, reply, to=digest)``. Empty
            if no store has the run.
        originating_failure_kind: The kind of failure that led to it, or None if a tool asked.
    """

    kind: str
    question: str
    context: str = ""
    choices: tuple[str, ...] = ()
    tool: str = ""
    arguments: Mapping[str, Any] = field(default_factory=FrozenDict)
    asker: str = ""
    quorum: Quorum | None = None
    limit: ReachedLimit | None = None
    suspension_record: SuspensionRecord = field(repr=False)
    digest: str = ""
    originating_failure_kind: FailureKind | None = None
