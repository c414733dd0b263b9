"""Failure kinds, the default action for each, and the ``Failure`` value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import to_jsonable_python

__all__ = [
    "DEFAULT_ACTIONS",
    "LIMIT_KINDS",
    "OUTPUT_KINDS",
    "PROVIDER_KINDS",
    "TOOL_KINDS",
    "Action",
    "Failure",
    "FailureKind",
    "describe_exception",
]


class Action(StrEnum):
    """What the recovery funnel does about a failure."""

    retry = "retry"
    narrow_scope = "narrow_scope"
    ask_user = "ask_user"
    handoff = "handoff"
    stop = "stop"


class FailureKind(StrEnum):
    """Every kind of failure that the loop tells apart; the set is closed."""

    transient_provider = "transient_provider"
    provider_error = "provider_error"
    context_overflow = "context_overflow"
    output_truncated = "output_truncated"
    output_refused = "output_refused"
    output_malformed = "output_malformed"
    ambiguous_input = "ambiguous_input"
    scope_too_large = "scope_too_large"
    capability_gap = "capability_gap"
    no_progress = "no_progress"
    loop_detected = "loop_detected"
    repeated_error = "repeated_error"
    unknown_tool = "unknown_tool"
    invalid_arguments = "invalid_arguments"
    tool_error = "tool_error"
    environment_error = "environment_error"
    policy_violation = "policy_violation"
    kernel_invalidated = "kernel_invalidated"
    aborted = "aborted"
    iteration_limit = "iteration_limit"
    time_limit = "time_limit"
    token_limit = "token_limit"  # noqa: S105  # a budget, no password
    cost_limit = "cost_limit"


LIMIT_KINDS = frozenset(
    {FailureKind.iteration_limit, FailureKind.time_limit, FailureKind.token_limit, FailureKind.cost_limit}
)
"""The kinds that say that a budget of the run is spent."""

PROVIDER_KINDS = (FailureKind.transient_provider, FailureKind.provider_error, FailureKind.context_overflow)
OUTPUT_KINDS = (
    FailureKind.output_truncated,
    FailureKind.output_refused,
    FailureKind.output_malformed,
    FailureKind.loop_detected,
    FailureKind.no_progress,
)
TOOL_KINDS = (
    FailureKind.unknown_tool,
    FailureKind.invalid_arguments,
    FailureKind.tool_error,
    FailureKind.environment_error,
    FailureKind.repeated_error,
    FailureKind.ambiguous_input,
    FailureKind.scope_too_large,
    FailureKind.capability_gap,
    FailureKind.kernel_invalidated,
    FailureKind.policy_violation,
)
"""The kinds of a model's call, of its reply and of a batch: a success there sets their strikes back to zero."""

DEFAULT_ACTIONS = MappingProxyType(
    {
        FailureKind.transient_provider: Action.retry,
        FailureKind.provider_error: Action.handoff,
        FailureKind.context_overflow: Action.narrow_scope,
        FailureKind.output_truncated: Action.retry,
        FailureKind.output_refused: Action.handoff,
        FailureKind.output_malformed: Action.retry,
        FailureKind.ambiguous_input: Action.ask_user,
        FailureKind.scope_too_large: Action.narrow_scope,
        FailureKind.capability_gap: Action.handoff,
        FailureKind.no_progress: Action.narrow_scope,
        FailureKind.loop_detected: Action.ask_user,
        FailureKind.repeated_error: Action.handoff,
        FailureKind.unknown_tool: Action.retry,
        FailureKind.invalid_arguments: Action.retry,
        FailureKind.tool_error: Action.retry,
        FailureKind.environment_error: Action.retry,
        FailureKind.policy_violation: Action.handoff,
        FailureKind.kernel_invalidated: Action.narrow_scope,
        FailureKind.aborted: Action.stop,
        FailureKind.iteration_limit: Action.ask_user,
        FailureKind.time_limit: Action.ask_user,
        FailureKind.token_limit: Action.ask_user,
        FailureKind.cost_limit: Action.ask_user,
    }
)
"""What is done about each kind, unless a detector or the policy says otherwise."""


class Failure(BaseModel):
    """One failure, as a detector found it: immutable, hashable, and the same after a trip through JSON.

    Two failures are equal when kind, explanation and blockers are: ``metadata`` and ``partial_data`` say
    more about a failure, they do not make it another one.

    Attributes:
        kind: Which of the closed set it is.
        explanation: What happened, for people and for the model.
        blockers: Concrete reasons why the run cannot go on; a list becomes a tuple.
        suggested_action: What to do; the kind's default where none is given, so never None.
        partial_data: What was achieved before it failed; JSON (what is none becomes its text).
        metadata: More about it (attempt, status, the other failures of a batch...); JSON, likewise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: FailureKind
    explanation: str
    blockers: tuple[str, ...] = ()
    suggested_action: Action = Field(default_factory=lambda data: DEFAULT_ACTIONS[data["kind"]])
    partial_data: Any = None
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])

    @field_validator("suggested_action", mode="before")
    @classmethod
    def _default_action(cls, value: object, info: Any) -> object:
        return DEFAULT_ACTIONS.get(info.data.get("kind"), Action.stop) if value is None else value

    @field_validator("explanation", "blockers", mode="before")
    @classmethod
    def _clean_text(cls, value: object) -> object:
        return _replace_surrogates(value)

    @field_validator("partial_data", "metadata")
    @classmethod
    def _to_json(cls, value: Any) -> Any:
        value = _replace_surrogates(value)
        return to_jsonable_python(value, fallback=repr, bytes_mode="base64", inf_nan_mode="null")

    def _identity(self) -> tuple[FailureKind, str, tuple[str, ...]]:
        return (self.kind, self.explanation, self.blockers)

    def __eq__(self, other: object) -> bool:
        return self._identity() == other._identity() if isinstance(other, Failure) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity())


def _replace_surrogates(value: object) -> object:
    """A value with ``?`` for each lone surrogate (a file's name may hold some), which no JSON can hold."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {_replace_surrogates(k): _replace_surrogates(v) for k, v in items}
    if isinstance(value, (list, tuple)):
        return [_replace_surrogates(v) for v in cast("Sequence[object]", value)]
    return value


def describe_exception(error: BaseException) -> str:
    """An exception in words: its class, and what it says where it can say it."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:  # user code too
        return kind
    return f"{kind}: {text}" if text else kind
