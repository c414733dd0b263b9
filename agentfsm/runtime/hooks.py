"""Hooks that run before a state's effect, observers of events, and the logging of events.

A hook can stop a run; an observer cannot. Log lines contain ids, names, kinds and counts, never text of users,
models or tools. The start and end of a run are logged as INFO, each transition and call as DEBUG, and what failed
without failing the run as WARNING.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Any, Generic, cast

from agentfsm.errors import ConfigurationError
from agentfsm.loop.events import (
    Ending,
    Event,
    ModelReplied,
    RecoveryStarted,
    RunResumed,
    RunStarted,
    ToolFinished,
    ToolStarted,
    Transitioned,
    UserInputRequested,
)
from agentfsm.loop.failures import FailureKind
from agentfsm.loop.messages import ToolCall
from agentfsm.loop.read_only import FrozenDict, read_only
from agentfsm.loop.state import RunView
from agentfsm.machine.declaration import EffectSpec
from agentfsm.machine.graph import State
from agentfsm.runtime.run_context import AboutRun, Deps
from agentfsm.runtime.tools import Tool


@dataclass(frozen=True, slots=True)
class AbortRun:
    """Returned by a hook: end the run as aborted."""

    reason: str


@dataclass(frozen=True, slots=True)
class SkipCall:
    """Returned by a hook at ``dispatch_tool``: do not run this call; its result says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class DenyCall:
    """Returned by a hook at ``dispatch_tool``: deny this call. ``max_denials`` in a row are a ``policy_violation``."""

    reason: str


@dataclass(frozen=True, slots=True)
class AskApproval:
    """Returned by a hook at ``dispatch_tool``: a human must approve this call first."""

    question: str = ""


HookDecision = AbortRun | SkipCall | DenyCall | AskApproval | None
"""What a hook returns; None to continue. At states other than ``dispatch_tool``, only None and ``AbortRun``."""


@read_only
@dataclass(frozen=True, slots=True)
class HookContext(AboutRun, Generic[Deps]):
    """What a hook sees. It cannot change any of it but ``deps``: an attempt ends the run as aborted.

    It has the attributes of ``RunContext``, too.

    Attributes:
        state: The state whose effect is about to run.
        run: Everything the run knows at this moment.
        call: At ``dispatch_tool``, the call that is about to run, as the model made it; else None.
        tool: At ``dispatch_tool``, its tool; else None.
        arguments: At ``dispatch_tool``, what the tool will get: validated, converted, defaults filled in. The tool
            gets a copy of its own.
        deps: The run's dependencies; None if it has none.
    """

    state: str
    run: RunView = field(repr=False)
    call: ToolCall | None = field(default=None, repr=False)
    tool: Tool | None = None
    arguments: Mapping[str, Any] = field(default_factory=FrozenDict, repr=False)
    deps: Deps = field(default=cast("Any", None), repr=False)


@dataclass(frozen=True)
class Hook:
    """A function that runs before a state's effect.

    Attributes:
        at: The state, or one of the loop's effects (``CALL_MODEL``, ``RUN_CALLS``, ...) for every state that has it,
            whatever its name is. At ``dispatch_tool``, and wherever ``RUN_CALLS`` is the effect, the hook runs once for
            each call, and again when a call that a human approved is about to run: the approval does not replace the
            hook's, and much may have changed since. At ``terminal`` it runs when the run ends, however it ends.
        function: Plain or async; returns None to continue, or a decision. Any other value counts as an exception,
            and so does an async one that does not return within the guardrails' ``hook_timeout_s``, or before the
            run's time is up.
        fail_open: Whether an exception is only a warning (True) or aborts the run (False).
        once: Whether it runs only the first time the run reaches the state. A run resumed from a store knows
            which states it has visited; without a store, it is once before and once after each resume.
        name: Its name in warnings and errors.
    """

    at: str | EffectSpec
    function: Callable[[HookContext[Any]], HookDecision | Awaitable[HookDecision]]
    fail_open: bool = True
    once: bool = False
    name: str = ""


@dataclass(frozen=True)
class Observer:
    """A plain function that receives every event. An exception in it is a warning, and the run continues.

    Raises:
        ConfigurationError: It is a coroutine function.
    """

    function: Callable[[Event], Any]

    def __post_init__(self) -> None:
        if iscoroutinefunction(self.function) or iscoroutinefunction(type(self.function).__call__):
            raise ConfigurationError(f"observer {self.name} must be a plain function: it is not awaited")

    @property
    def name(self) -> str:
        """Its name in warnings."""
        return str(getattr(self.function, "__name__", self.function))


HookFunction = Callable[[HookContext[Any]], HookDecision | Awaitable[HookDecision]]
"""A function that ``hook`` accepts."""


def hook(at: State | str | EffectSpec, *, fail_open: bool = True, once: bool = False) -> Callable[[HookFunction], Hook]:
    """Decorator: run a function before a state's effect.

    Args:
        at: The state, or the effect of the states at which to run it; see ``Hook``.
        fail_open: Whether an exception is only a warning (True) or aborts the run (False).
        once: Whether it runs only the first time the run reaches the state.
    """

    def decorate(function: HookFunction) -> Hook:
        return Hook(at, function, fail_open, once, str(getattr(function, "__name__", function)))

    return decorate


def observer(function: Callable[[Event], Any]) -> Observer:
    """Decorator: call a plain function with every event.

    Raises:
        ConfigurationError: It is a coroutine function.
    """
    return Observer(function)


INFO_EVENTS = (RunStarted, RunResumed)
"""The events that are logged at INFO, in addition to the last one."""

logger = logging.getLogger("agentfsm")
logger.addHandler(logging.NullHandler())  # else Python prints warnings to stderr if logging is not configured


def log_event(event: Event) -> None:
    """Log an event, if its level is enabled."""
    if isinstance(event, RunStarted | RunResumed):
        verb = "started" if isinstance(event, RunStarted) else f"resumed ({event.kind})"
        logger.info("run %s: %s with %s", event.run_id, verb, event.model)
    elif isinstance(event, Ending):
        what = f" ({event.kind})" if isinstance(event, UserInputRequested) else ""
        logger.info("run %s: %s%s", event.run_id, type(event).__name__, what)
    elif logger.isEnabledFor(logging.DEBUG) and (line := _debug_message(event)):
        logger.debug("run %s: %s", event.run_id, line)


def _debug_message(event: Event) -> str:
    match event:
        case Transitioned():
            return f"{event.source} -> {event.target} ({event.decision.guard})"
        case ModelReplied():
            used, calls = event.usage, len(event.message.tool_calls)
            return f"reply with {calls} calls, {used.input_tokens} + {used.output_tokens} tokens"
        case ToolStarted():
            return f"tool {event.call.name} started"
        case ToolFinished():
            result = event.result
            kind = result.failure.kind if result.failure is not None else None
            name = "" if kind is FailureKind.unknown_tool else f" {result.name}"  # the name is text of the model
            return f"tool{name}: {result.status}" + (f" ({kind.value})" if kind is not None else "")
        case RecoveryStarted():
            return f"{event.failure.kind.value}: {event.action.value}, attempt {event.attempt}"
        case _:
            return ""
