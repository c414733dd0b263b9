"""Outcomes: one small immutable value for each way an effect can end.

Everything that is not a pure function enters a run as an outcome, so a run can be replayed from its outcomes without a
model or tools.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentfsm.loop.failures import Action, Failure
from agentfsm.loop.messages import Message, Reply, ToolCall, ToolResult
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
    """``pre_step``: the back-off is over; ``recalled`` is what a memory brought on the first step."""

    recalled: str = ""


@dataclass(frozen=True, slots=True)
class ModelCallSucceeded:
    """``call_llm``: the model answered."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class ModelCallFailed:
    """``call_llm``: the model's call failed."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class ReplyParsed:
    """``post_llm``: what the reply says: calls, or an answer, or why it cannot be read."""

    calls: tuple[ToolCall, ...] = ()
    answer: Any = None
    malformed: str | None = None


@dataclass(frozen=True, slots=True)
class ToolsRan:
    """``dispatch_tool``: calls of the batch ran, in the order of the batch."""

    results: tuple[ToolResult, ...]


@dataclass(frozen=True, slots=True)
class CallBlocked:
    """``dispatch_tool``: a call must wait for a person.

    Attributes:
        waiting: What the person is asked.
        results: Of calls of the batch that have ended, or could not run anyway.
        held: Sub-agents' runs that wait for a person; the first of them asks.
    """

    waiting: PendingRequest
    results: tuple[ToolResult, ...] = ()
    held: tuple[SuspendedSubRun, ...] = ()


@dataclass(frozen=True, slots=True)
class RecoveryDecided:
    """``recover``: what the policy decided, and how long to back off, in seconds."""

    action: Action
    backoff_s: float = 0.0
    retry_calls: bool = False


@dataclass(frozen=True, slots=True)
class HumanAnswered:
    """``suspended``: a person answered."""

    reply: HumanReply


@dataclass(frozen=True, slots=True)
class Expired:
    """``suspended``: the time for an answer is over."""


@dataclass(frozen=True, slots=True)
class StateResult:
    """A state of your own: what its effect returned (JSON), and messages for the transcript."""

    value: Any = None
    messages: tuple[Message, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Anywhere: the run was cancelled; ``results`` are of calls that had ended by then."""

    reason: str
    results: tuple[ToolResult, ...] = ()


@dataclass(frozen=True, slots=True)
class Aborted:
    """Anywhere: a hook aborted the run, or code of the user's raised."""

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
"""Any of them."""
