"""Outcomes: one small immutable value for each way in which an effect can end.

Everything that is not a pure function enters a run as an outcome, so a run can be replayed from its outcomes without a
model or tools. An effect with nothing to report returns None.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentfsm.loop.failures import Action, Failure
from agentfsm.loop.messages import Message, Reply, ToolCall, ToolResult
from agentfsm.loop.read_only import freeze_field, read_only
from agentfsm.loop.state import HumanReply, PendingRequest, SuspendedSubRun

__all__ = [
    "Aborted",
    "CallBlocked",
    "Cancelled",
    "Expired",
    "HumanAnswered",
    "ModelCallFailed",
    "ModelCallSucceeded",
    "Outcome",
    "PreStepDone",
    "RecoveryDecided",
    "ReplyParsed",
    "StateResult",
    "ToolsRan",
]


@dataclass(frozen=True, slots=True)
class PreStepDone:
    """``pre_step``: the backoff is over. ``recalled`` is what the memory returned on the first step."""

    recalled: str = ""


@dataclass(frozen=True, slots=True)
class ModelCallSucceeded:
    """``call_llm``: the model replied."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class ModelCallFailed:
    """``call_llm``: the model call failed."""

    failure: Failure


@read_only
@dataclass(frozen=True, slots=True)
class ReplyParsed:
    """``post_llm``: the contents of the reply: tool calls, or an answer, or why it cannot be parsed."""

    calls: tuple[ToolCall, ...] = ()
    answer: Any = None
    malformed: str | None = None

    def __post_init__(self) -> None:
        freeze_field(self, "answer")


@dataclass(frozen=True, slots=True)
class ToolsRan:
    """``dispatch_tool``: calls of the batch ran; results are in the order of the batch."""

    results: tuple[ToolResult, ...]


@dataclass(frozen=True, slots=True)
class CallBlocked:
    """``dispatch_tool``: a call must wait for a person.

    Attributes:
        waiting: The request to the person.
        results: Results of the calls of the batch that have ended or cannot run.
        held: Runs of sub-agents that wait for a person; ``waiting`` is the request of the first.
    """

    waiting: PendingRequest
    results: tuple[ToolResult, ...] = ()
    held: tuple[SuspendedSubRun, ...] = ()


@dataclass(frozen=True, slots=True)
class RecoveryDecided:
    """``recover``: what the policy decided.

    Attributes:
        action: What to do about the failure.
        backoff_s: Seconds to wait before the next step.
        retry_calls: Whether to run the failed calls of the batch again, unchanged.
        instruction: The policy's own instruction for the next request, or an empty string.
        question: The policy's own question to a person, or an empty string.
    """

    action: Action
    backoff_s: float = 0.0
    retry_calls: bool = False
    instruction: str = ""
    question: str = ""


@dataclass(frozen=True, slots=True)
class HumanAnswered:
    """``suspended``: a person answered."""

    reply: HumanReply


@dataclass(frozen=True, slots=True)
class Expired:
    """``suspended``: the deadline for an answer has passed."""


@read_only
@dataclass(frozen=True, slots=True)
class StateResult:
    """A user-defined state: the value that its effect returned (JSON), and messages to append to the transcript."""

    value: Any = None
    messages: tuple[Message, ...] = field(default=())

    def __post_init__(self) -> None:
        freeze_field(self, "value")


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Any state: the run was cancelled; ``results`` are those of the calls that had already ended."""

    reason: str
    results: tuple[ToolResult, ...] = ()


@dataclass(frozen=True, slots=True)
class Aborted:
    """Any state: a hook aborted the run, or user code raised."""

    failure: Failure
    results: tuple[ToolResult, ...] = ()


Outcome = (
    PreStepDone
    | ModelCallSucceeded
    | ModelCallFailed
    | ReplyParsed
    | ToolsRan
    | CallBlocked
    | RecoveryDecided
    | HumanAnswered
    | Expired
    | StateResult
    | Cancelled
    | Aborted
)
"""Any outcome."""
