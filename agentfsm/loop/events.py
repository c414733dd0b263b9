"""Events: what a run reports to its observers, in order; the last one says how the run ended.

The last event is always exactly one of ``RunCompleted``, ``Handoff``, ``PartialRunSummary``, ``RunCancelled``,
``RunAborted`` and ``UserInputRequested``, which means that the run is suspended, not over. ``to_dict`` gives each as
JSON data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeAlias

from agentfsm.loop.event_json import EVENT_VERSION, as_field, event_fields
from agentfsm.loop.failures import Action, Failure, FailureKind
from agentfsm.loop.human_input import ReachedLimit
from agentfsm.loop.messages import FinishReason, Message, ToolCall, ToolResult, Usage
from agentfsm.loop.quorum import Quorum
from agentfsm.loop.read_only import FrozenDict
from agentfsm.loop.suspension import SuspensionRecord
from agentfsm.machine.engine import Decision


class SecretFilter(Protocol):
    """Knows the secrets of one run."""

    def clean(self, data: dict[str, Any]) -> dict[str, Any]:
        """The data of an event with ``[withheld]`` for each secret."""
        ...

    def mask(self, text: str, data: dict[str, Any]) -> str:
        """A text with ``[withheld]`` for each secret.

        Args:
            text: The text.
            data: The event that it is about, as JSON data, which may have secret arguments itself.
        """
        ...

    def has_secrets(self, tool: str) -> bool:
        """Whether a tool has secret arguments."""
        ...


@dataclass(frozen=True, kw_only=True, repr=False)
class Event:
    """Something that happened in a run.

    Attributes:
        run_id: The run.
        seq: Its number, from 1. It continues after a suspension, in any process. After a crash, the numbers are greater
            than all before, and some are left out.
        time: When it happened, in seconds since the epoch, by the host's clock. For information: ``seq`` is the
            order.
        secrets: What ``to_dict`` withholds; None for an event that was not made by a run.
    """

    run_id: str
    seq: int
    time: float
    secrets: SecretFilter | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The event as JSON data, for others than the program that runs the agent: a browser, a log, a queue.

        ``agentfsm.event_schema()`` describes it. What a journal withholds reads ``[withheld]``, and what only the
        program can use is left out: suspension records, the provider's signatures of its reasoning, failure metadata.
        """
        data = {
            "version": EVENT_VERSION,
            "type": type(self).__name__,
            "run_id": self.run_id,
            "seq": self.seq,
            "time": self.time,
            **self._data(),
        }
        return data if self.secrets is None else self.secrets.clean(data)

    def mask(self, text: str) -> str:
        """A text about the event with ``[withheld]`` for each secret of the run, for logs and displays.

        Args:
            text: The text.
        """
        return text if self.secrets is None else self.secrets.mask(text, self._data())

    def __repr__(self) -> str:
        of_piece = getattr(self, "shown", None)
        values = ((each.name, getattr(self, each.name)) for each in fields(self) if each.repr)
        shown = ((name, of_piece if name == "text" and of_piece is not None else value) for name, value in values)
        return self.mask(f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown)})")

    def _data(self) -> dict[str, Any]:
        """The fields that the schema lists for its class, as JSON data."""
        return event_fields(self)


@dataclass(frozen=True, kw_only=True, repr=False)
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

    def _data(self) -> dict[str, Any]:
        return event_fields(self, parent=_parent_json(self.parent))


@dataclass(frozen=True, kw_only=True, repr=False)
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

    def _data(self) -> dict[str, Any]:
        return event_fields(self, parent=_parent_json(self.parent))


@dataclass(frozen=True, kw_only=True, repr=False)
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

    def _data(self) -> dict[str, Any]:
        verdict = self.decision.guard_result
        return event_fields(
            self,
            transition=self.decision.transition.id,
            guard=self.decision.guard,
            tried=[[name, result] for name, result in self.decision.tried],
            failure=as_field(verdict) if isinstance(verdict, Failure) else None,
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class TextDelta(Event):
    """The next part of the text of the current reply.

    Deltas are for display: they are emitted only if there is an observer and the model streams. ``ModelReplied``
    has the complete message. If the reply fails, ``RecoveryStarted`` or an ending follows instead; discard the deltas.

    Attributes:
        text: The text.
        shown: What ``to_dict`` has instead, because of secrets, which may begin in an earlier piece; None for the text.
    """

    text: str
    shown: str | None = field(default=None, repr=False, compare=False)

    def _data(self) -> dict[str, Any]:
        return event_fields(self, text=self.text if self.shown is None else self.shown)


@dataclass(frozen=True, kw_only=True, repr=False)
class ReasoningDelta(Event):
    """The next part of the model's reasoning, if its provider shows that.

    Attributes:
        text: The text.
        shown: What ``to_dict`` has instead, because of secrets, which may begin in an earlier piece; None for the text.
    """

    text: str
    shown: str | None = field(default=None, repr=False, compare=False)

    def _data(self) -> dict[str, Any]:
        return event_fields(self, text=self.text if self.shown is None else self.shown)


@dataclass(frozen=True, kw_only=True, repr=False)
class ToolCallDelta(Event):
    """The next part of a tool call of the current reply.

    Attributes:
        index: The number of the call in the reply, from 0.
        name: The tool.
        arguments: The next part of the JSON text of its arguments.
        shown: What ``to_dict`` has instead, because of secrets, which may begin in an earlier piece; None for the text.
    """

    index: int
    name: str
    arguments: str = field(repr=False)
    shown: str | None = field(default=None, repr=False, compare=False)

    def _data(self) -> dict[str, Any]:
        hidden = self.secrets is not None and self.secrets.has_secrets(self.name)
        shown = self.arguments if self.shown is None else self.shown
        return event_fields(self, arguments="" if hidden else shown)


@dataclass(frozen=True, kw_only=True, repr=False)
class ReplyRestarted(Event):
    """The reply starts again, from another model: discard its deltas so far.

    Attributes:
        reason: Why.
    """

    reason: str


@dataclass(frozen=True, kw_only=True, repr=False)
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


@dataclass(frozen=True, kw_only=True, repr=False)
class ToolStarted(Event):
    """A tool is about to run."""

    call: ToolCall


@dataclass(frozen=True, kw_only=True, repr=False)
class ToolProgress(Event):
    """A running tool says how far it is. Some are left out if a tool says much in a short time.

    Attributes:
        call_id: The call.
        name: The tool.
        message: What it does.
        fraction: How much of it is done, from 0 to 1; None if it does not say.
    """

    call_id: str
    name: str
    message: str
    fraction: float | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class ToolFinished(Event):
    """A tool call has ended and has a result."""

    result: ToolResult


@dataclass(frozen=True, kw_only=True, repr=False)
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


@dataclass(frozen=True, kw_only=True, repr=False)
class RunWarning(Event):
    """Something optional failed (memory, a hook that fails open, an observer); the run continues."""

    text: str


@dataclass(frozen=True, kw_only=True, repr=False)
class SubagentEvent(Event):
    """Something that happened in the run of a sub-agent, which answers a call of this run.

    Attributes:
        path: The ids of the calls that lead to it: that of this run, then those of its sub-agents' runs.
        tools: The tools of these calls.
        event: The event, with the id of the sub-agent's run and its number there. Never a ``SubagentEvent`` itself:
            the events of nested sub-agents have a longer path.
    """

    path: tuple[str, ...]
    tools: tuple[str, ...]
    event: Event

    def _data(self) -> dict[str, Any]:
        return event_fields(self, event=self.event.to_dict())


@dataclass(frozen=True, kw_only=True, repr=False)
class Ending(Event):
    """The last event of a run, or the last before it is suspended."""


@dataclass(frozen=True, kw_only=True, repr=False)
class RunCompleted(Ending):
    """The run finished.

    Attributes:
        output: Its answer: a text, or JSON data if the agent has an ``output_type``. The value of that type is the
            ``output`` of the run's result.
    """

    output: Any


@dataclass(frozen=True, kw_only=True, repr=False)
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


@dataclass(frozen=True, kw_only=True, repr=False)
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


@dataclass(frozen=True, kw_only=True, repr=False)
class RunAborted(Ending):
    """User code raised, or a hook aborted the run.

    Attributes:
        reason: What happened, and whose code it was.
        failure: The same as a failure, with the class of the exception in its metadata.
    """

    reason: str
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class RunCancelled(Ending):
    """The run was cancelled from outside."""

    reason: str


@dataclass(frozen=True, kw_only=True, repr=False)
class UserInputRequested(Ending):
    """The run is suspended until a person answers; resume it with ``agent.resume(suspension_record, reply)``.

    Attributes:
        kind: ``question``, ``form``, ``approval``, ``limit`` or ``in_doubt``.
        question: The question for the person.
        context: Background for the question.
        choices: Answers to choose from, or empty.
        tool: For an approval or a call in doubt, the tool.
        arguments: For an approval or a call in doubt, the arguments of the call.
        asker: If a sub-agent asks, its tool name; else an empty string.
        quorum: For an approval with a rule about who may answer, the rule and the votes so far; else None.
        limit: For a limit, how much of it is used up, and what a reply grants by default; else None.
        form: For a form, the JSON schema of the object to fill in; else empty.
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
    form: Mapping[str, Any] = field(default_factory=FrozenDict)
    suspension_record: SuspensionRecord = field(repr=False)
    digest: str = ""
    originating_failure_kind: FailureKind | None = None

    def _data(self) -> dict[str, Any]:
        return event_fields(self, expires_at=self.suspension_record.expires_at)


LastEvent: TypeAlias = RunCompleted | Handoff | PartialRunSummary | RunCancelled | RunAborted | UserInputRequested
"""Every ``Ending`` that there is, so that a type checker can tell whether a ``match`` has forgotten one."""


def _parent_json(parent: tuple[str, str] | None) -> dict[str, str] | None:
    return None if parent is None else {"run_id": parent[0], "call_id": parent[1]}
