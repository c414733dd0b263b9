"""Effects and their outcomes, as declared: what each state of the loop does, and each way in which that can end.

Everything that is not a pure function enters a run as an outcome, one small immutable value, so a run can be replayed
from its outcomes without a model or tools. An effect with nothing to report returns None.

The names in an ``EffectSpec`` are what can come of the effect, as the guards that take it declare
(``agentfsm.machine.declaration.takes``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from agentfsm.loop.failures import Action, Failure
from agentfsm.loop.human_input import HumanReply, PendingRequest, SuspendedSubRun
from agentfsm.loop.messages import Compaction, Message, Reply, ToolCall, ToolResult, Usage
from agentfsm.loop.read_only import freeze_field, quick_constructor, read_only
from agentfsm.loop.state import StateCall
from agentfsm.machine.declaration import EffectSpec, StateSpec

CHECK_BUDGETS = EffectSpec("check_budgets")
"""Wait for the backoff and, on the first step, recall memories; the guards check the budgets."""

CALL_MODEL = EffectSpec(
    "call_model",
    exceptional=("transient_provider", "provider_error", "context_overflow"),
    charges=("iterations",),
)
"""Make one model call."""

PARSE_REPLY = EffectSpec(
    "parse_reply",
    exceptional=("output_malformed", "output_truncated", "output_refused"),
    on_request=("tool_calls",),
)
"""Parse the reply into tool calls, an answer, or the reason why it is neither."""

RUN_CALLS = EffectSpec(
    "run_calls",
    exceptional=("in_doubt",),
    on_request=("approval_required",),
    charges=("iterations",),
)
"""Run the next call of the batch, or all that may run in parallel; a sub-agent's model calls are charged."""

JUDGE_RESULTS = EffectSpec("judge_results", on_request=("question_asked", "declared_done", "declared_unable"))
"""Nothing: the results are in the run already, and the guards read them there."""

CHOOSE_RECOVERY = EffectSpec(
    "choose_recovery",
    exceptional=("ask_user", "handoff", "stop"),
    on_request=("retry_tool",),
)
"""Let the policy decide what to do about the failure."""

BUILT_IN_EFFECTS = MappingProxyType(
    {e.name: e for e in (CHECK_BUDGETS, CALL_MODEL, PARSE_REPLY, RUN_CALLS, JUDGE_RESULTS, CHOOSE_RECOVERY)}
)
"""The loop's own effects, by name."""

CLOSES_BATCH = frozenset({CHECK_BUDGETS, CALL_MODEL})
"""States with these effects make a request, or lead to one, so every call must have a result; as where the run ends."""


def may_leave_undecided(target: StateSpec) -> bool:
    """Whether a run may go to a state from the wait for an approval that nobody has decided about.

    It may keep waiting, end, or drop the call. Its journal would not show what else it did with the call.
    """
    return target.waits or target.final or target.effect in CLOSES_BATCH


@dataclass(frozen=True, slots=True)
class Charge:
    """What the effect of a user-defined state used of the run's budgets."""

    model_calls: int = 0
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class PreStepDone:
    """``pre_step``: the backoff is over. ``recalled`` is what the memory returned on the first step."""

    recalled: str = ""


@dataclass(frozen=True, slots=True)
class ModelCallSucceeded:
    """``call_llm``: the model replied.

    Attributes:
        reply: The reply.
        model_calls: How many calls that took, with models to fall back to.
        withheld: Texts and numbers that its text shows to be secret; they are withheld from then on.
    """

    reply: Reply
    model_calls: int = 1
    withheld: tuple[Any, ...] = field(default=(), repr=False)


new_model_call_succeeded = quick_constructor(ModelCallSucceeded)


@dataclass(frozen=True, slots=True)
class ModelCallFailed:
    """``call_llm``: the model call failed, or so many calls of several models."""

    failure: Failure
    model_calls: int = 1


@read_only
@dataclass(frozen=True, slots=True)
class ReplyParsed:
    """``post_llm``: the contents of the reply: tool calls, or an answer, or why it cannot be parsed."""

    calls: tuple[ToolCall, ...] = ()
    answer: Any = None
    malformed: str | None = None

    def __post_init__(self) -> None:
        if self.answer is not None:
            freeze_field(self, "answer")


new_reply_parsed = quick_constructor(ReplyParsed, checks=False)


@dataclass(frozen=True, slots=True)
class ToolsRan:
    """``dispatch_tool``: calls of the batch ran; results are in the order of the batch."""

    results: tuple[ToolResult, ...]


@dataclass(frozen=True, slots=True)
class CallBlocked:
    """``dispatch_tool``, or a user-defined state that calls tools: a call must wait for a person.

    Attributes:
        waiting: The request to the person.
        results: Results of the calls of the batch that have ended or cannot run.
        held: Runs of sub-agents that wait for a person; ``waiting`` is the request of the first.
        charge: For a user-defined state, what its effect has used since the run was last charged; else None.
        calls: For a user-defined state, what its effect has called, by number. A journal has these in their records.
    """

    waiting: PendingRequest
    results: tuple[ToolResult, ...] = ()
    held: tuple[SuspendedSubRun, ...] = ()
    charge: Charge | None = None
    calls: Mapping[int, StateCall] = field(default_factory=dict[int, StateCall])


_WAS_RUN = frozenset({"done", "failed", "cut_off"})


def count_tool_calls(outcome: Outcome | None) -> int:
    """How many calls of the batch have run, by their results."""
    if not isinstance(outcome, (ToolsRan, CallBlocked)) or getattr(outcome, "charge", None) is not None:
        return 0
    return sum(result.status in _WAS_RUN for result in outcome.results)


@dataclass(frozen=True, slots=True)
class RecoveryDecided:
    """``recover``: what the policy decided.

    Attributes:
        action: What to do about the failure.
        backoff_s: Seconds that the state waited before it was left.
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
class Escalated:
    """``suspended``: nobody has decided about the call for so long that more roles may answer."""


@dataclass(frozen=True, slots=True)
class Expired:
    """``suspended``: the deadline for an answer has passed."""


@read_only
@dataclass(frozen=True, slots=True)
class StateResult:
    """A user-defined state: what its effect returned.

    Attributes:
        value: Any JSON value; it becomes ``run.state_results[state]``.
        messages: Messages to append to the transcript.
        outcome: Which of the outcomes it is that the state declares (``StateSpec.outcomes``), if it declares any.
        charge: What the effect used; filled in for it.
        compaction: What is left out of the requests to the model from now on, or None to leave that as it is.
    """

    value: Any = None
    messages: tuple[Message, ...] = field(default=())
    outcome: str = ""
    charge: Charge = field(default_factory=Charge)
    compaction: Compaction | None = None

    def __post_init__(self) -> None:
        freeze_field(self, "value")


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Any state: the run was cancelled.

    Attributes:
        reason: Why.
        results: Those of the calls that had already ended.
        charge: What the effect of a user-defined state had used.
    """

    reason: str
    results: tuple[ToolResult, ...] = ()
    charge: Charge | None = None


@dataclass(frozen=True, slots=True)
class Aborted:
    """Any state: a hook aborted the run, or user code raised.

    Attributes:
        failure: What happened.
        results: Those of the calls that had already ended.
        charge: What the effect of a user-defined state had used.
    """

    failure: Failure
    results: tuple[ToolResult, ...] = ()
    charge: Charge | None = None


Outcome = (
    PreStepDone
    | ModelCallSucceeded
    | ModelCallFailed
    | ReplyParsed
    | ToolsRan
    | CallBlocked
    | RecoveryDecided
    | HumanAnswered
    | Escalated
    | Expired
    | StateResult
    | Cancelled
    | Aborted
)
"""Any outcome."""
