"""Failure kinds, one row each: what the loop does about a kind and says about it. Also the ``Failure`` value.

To add a kind, add a row to ``FailureKind``, a detector to ``agentfsm.loop.detectors`` and a row to ``LOOP`` in
``agentfsm.loop.transition_table``. Everything else (recovery policy, reducer, prompts, tools, journal) reads the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import to_jsonable_python

from agentfsm.loop.read_only import FrozenDict, freeze, read_only


class Action(StrEnum):
    """What the recovery policy decides to do about a failure."""

    retry = "retry"
    narrow_scope = "narrow_scope"
    ask_user = "ask_user"
    handoff = "handoff"
    stop = "stop"


class FailureGroup(StrEnum):
    """Where a kind of failure comes from. A success in the same place resets its count of attempts."""

    provider = "provider"  # the model call
    output = "output"  # the model's reply
    tool = "tool"  # a batch of tool calls
    limit = "limit"  # a budget of the run is spent
    abort = "abort"  # an error in the program itself


@dataclass(frozen=True)
class FailureSpec:
    """What the loop does about one kind of failure, and what it says about it.

    The texts are templates: ``{explanation}`` is replaced by the failure's explanation, ``{next_step}`` by what the
    model can do next in this run, and ``{form}`` by the form that its replies must have.

    Attributes:
        group: Where the failure comes from.
        action: What to do, unless a detector or the policy decides otherwise.
        retries: How many times in a row ``DefaultPolicy`` retries it; after that it hands off.
        tool_may_report: Whether a tool may report it, as a ``ToolError`` or a returned ``Failure``.
        rerun_may_help: Whether running the same tool call again, unchanged, may succeed.
        model_mistake: Whether it is a mistake in the model's own message, or an error that the model is to work around.
        lesson: Whether the model can learn from it, so that later requests may mention it.
        feedback: What the next request tells the model after a retry, where no tool result does.
        instruction: What the next request tells the model after ``narrow_scope``.
        question: What a person is asked after ``ask_user``.
    """

    group: FailureGroup
    action: Action
    retries: int = 0
    tool_may_report: bool = False
    rerun_may_help: bool = False
    model_mistake: bool = False
    lesson: bool = True
    feedback: str = "The last step failed: {explanation}. Try a different approach."
    instruction: str = "The last step failed ({explanation}). Pick the smallest next step that avoids this."
    question: str = "The run cannot continue on its own: {explanation}. What should it do?"


_SPECS: dict[str, FailureSpec] = {}
_G, _A = FailureGroup, Action


def _row(name: str, group: FailureGroup, action: Action, **rest: Any) -> str:
    _SPECS[name] = FailureSpec(group, action, **rest)
    return name


class FailureKind(StrEnum):
    """Every kind of failure, one row each; the set is closed."""

    transient_provider = _row("transient_provider", _G.provider, _A.retry, retries=3, lesson=False)
    provider_error = _row("provider_error", _G.provider, _A.handoff, lesson=False)
    context_overflow = _row(
        "context_overflow",
        _G.provider,
        _A.narrow_scope,
        instruction="The conversation had grown too long, so older tool results were left out. Work with what is "
        "here, and ask for less at a time.",
    )
    output_truncated = _row("output_truncated", _G.output, _A.retry, retries=1)
    output_refused = _row(
        "output_refused", _G.output, _A.handoff, feedback="Your last message refused: {explanation}. Try another way."
    )
    output_malformed = _row(
        "output_malformed",
        _G.output,
        _A.retry,
        retries=2,
        model_mistake=True,
        feedback="Your last message could not be read: {explanation}. {form}",
    )
    ambiguous_input = _row(
        "ambiguous_input",
        _G.tool,
        _A.ask_user,
        tool_may_report=True,
        question="The request is not clear enough: {explanation}. What is meant?",
    )
    scope_too_large = _row(
        "scope_too_large",
        _G.tool,
        _A.narrow_scope,
        tool_may_report=True,
        instruction="The last step was too large ({explanation}). Pick the smallest next step that helps, and do "
        "only that.",
    )
    capability_gap = _row("capability_gap", _G.tool, _A.handoff, tool_may_report=True)
    no_progress = _row(
        "no_progress",
        _G.output,
        _A.narrow_scope,
        feedback="Your last message called no tool. {next_step}",
        instruction="The last turn made no progress on the task. {next_step}",
    )
    loop_detected = _row(
        "loop_detected",
        _G.output,
        _A.ask_user,
        feedback="{explanation}. Repeating it brings nothing new: change your approach.",
        question="The agent repeats itself: {explanation}. What should it do instead?",
    )
    repeated_error = _row("repeated_error", _G.tool, _A.handoff)
    unknown_tool = _row("unknown_tool", _G.tool, _A.retry, retries=2, model_mistake=True)
    invalid_arguments = _row("invalid_arguments", _G.tool, _A.retry, retries=2, model_mistake=True)
    tool_error = _row(
        "tool_error", _G.tool, _A.retry, retries=2, tool_may_report=True, rerun_may_help=True, model_mistake=True
    )
    environment_error = _row(
        "environment_error", _G.tool, _A.retry, retries=2, tool_may_report=True, rerun_may_help=True
    )
    policy_violation = _row("policy_violation", _G.tool, _A.handoff, tool_may_report=True)
    kernel_invalidated = _row(
        "kernel_invalidated",
        _G.tool,
        _A.narrow_scope,
        tool_may_report=True,
        instruction="The working state of the last step is lost ({explanation}). Rebuild what you need, starting "
        "with the smallest next step.",
    )
    aborted = _row("aborted", _G.abort, _A.stop, lesson=False)
    iteration_limit = _row(
        "iteration_limit",
        _G.limit,
        _A.ask_user,
        lesson=False,
        question="The run has used up its model calls ({explanation}). How should it continue?",
    )
    time_limit = _row(
        "time_limit",
        _G.limit,
        _A.ask_user,
        lesson=False,
        question="The run has used up its time ({explanation}). How should it continue?",
    )
    token_limit = _row(
        "token_limit",
        _G.limit,
        _A.ask_user,
        lesson=False,
        question="The run has used up its tokens ({explanation}). How should it continue?",
    )
    cost_limit = _row(
        "cost_limit",
        _G.limit,
        _A.ask_user,
        lesson=False,
        question="The run has used up its budget ({explanation}). How should it continue?",
    )

    @property
    def spec(self) -> FailureSpec:
        """What the loop does about this kind, and what it says about it."""
        return _SPECS[self.value]


def _group(group: FailureGroup) -> tuple[FailureKind, ...]:
    return tuple(k for k in FailureKind if k.spec.group is group)


PROVIDER_KINDS = _group(FailureGroup.provider)
"""The kinds of a model call; also those that a ``ModelError`` may report."""

OUTPUT_KINDS = _group(FailureGroup.output)
"""The kinds of a model's reply."""

TOOL_KINDS = _group(FailureGroup.tool)
"""The kinds of a batch of tool calls."""

LIMIT_KINDS = _group(FailureGroup.limit)
"""The kinds that say that a budget of the run is spent."""

TOOL_REPORTABLE_KINDS = tuple(k for k in FailureKind if k.spec.tool_may_report)
"""The kinds that a tool may report; a tool that reports any other kind reports a ``tool_error``."""

MODEL_MISTAKE_KINDS = tuple(k for k in FailureKind if k.spec.model_mistake)
"""The kinds that the presets ``feedback`` and ``breaker`` return to the model with no retry budget of their own."""


@read_only
class Failure(BaseModel):
    """One failure that a detector found: immutable, hashable, and unchanged by a round trip through JSON.

    Two failures are equal when kind, explanation and blockers are equal; ``metadata`` and ``partial_data`` are details
    that equality ignores.

    Attributes:
        kind: Which of the closed set it is.
        explanation: What happened, for people and for the model.
        blockers: Concrete reasons why the run cannot continue; a list becomes a tuple.
        suggested_action: What to do. Defaults to the kind's action, so it is never None.
        partial_data: What was achieved before the failure, as JSON; a value that is not JSON becomes its ``repr``.
        metadata: Details (attempt, status, the other failures of a batch...), as JSON in the same way.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: FailureKind
    explanation: str
    blockers: tuple[str, ...] = ()
    suggested_action: Action = Field(default_factory=lambda data: data["kind"].spec.action)
    partial_data: Any = None
    metadata: dict[str, Any] = Field(default_factory=FrozenDict)

    @field_validator("suggested_action", mode="before")
    @classmethod
    def _default_action(cls, value: object, info: Any) -> object:
        if value is not None:
            return value
        kind = info.data.get("kind")  # absent when it is invalid itself
        return Action.stop if kind is None else kind.spec.action

    @field_validator("explanation", "blockers", mode="before")
    @classmethod
    def _clean_text(cls, value: object) -> object:
        return _replace_surrogates(value)

    @field_validator("partial_data", "metadata")
    @classmethod
    def _to_json(cls, value: Any) -> Any:
        value = _replace_surrogates(value)
        return freeze(to_jsonable_python(value, fallback=repr, bytes_mode="base64", inf_nan_mode="null"))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Failure:
        """The failure with other fields, as in pydantic: they are not validated, but frozen."""
        return super().model_copy(update={name: freeze(value) for name, value in (update or {}).items()})

    def _identity(self) -> tuple[FailureKind, str, tuple[str, ...]]:
        return (self.kind, self.explanation, self.blockers)

    def __eq__(self, other: object) -> bool:
        return self._identity() == other._identity() if isinstance(other, Failure) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity())


def _replace_surrogates(value: object) -> object:
    """A value with ``?`` for each lone surrogate (file names may contain some), which JSON cannot represent."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {_replace_surrogates(k): _replace_surrogates(v) for k, v in items}
    if isinstance(value, (list, tuple)):
        return [_replace_surrogates(v) for v in cast("Sequence[object]", value)]
    return value


def describe_exception(error: BaseException) -> str:
    """``ClassName: message``; the class name alone where the message is empty or cannot be computed."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:  # __str__ may be user code
        return kind
    return f"{kind}: {text}" if text else kind
