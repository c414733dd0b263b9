"""Hooks that run before a state's effect, observers of events, and the logging of events.

A hook may stop a run; an observer may not. Log lines hold ids, names, kinds and counts, never what a user, a model
or a tool said: INFO has the start and end of a run, DEBUG each transition and call, WARNING what failed beside a run.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Any, TypeVar

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
from agentfsm.loop.state import RunState
from agentfsm.machine.graph import State
from agentfsm.runtime.tools import Tool

__all__ = [
    "INFO_EVENTS",
    "AbortRun",
    "AskApproval",
    "DenyCall",
    "Hook",
    "HookContext",
    "HookDecision",
    "Observer",
    "SkipCall",
    "hook",
    "log_event",
    "logger",
    "observer",
]


@dataclass(frozen=True, slots=True)
class AbortRun:
    """A hook's verdict: end the run as aborted."""

    reason: str


@dataclass(frozen=True, slots=True)
class SkipCall:
    """A hook's verdict at ``dispatch_tool``: do not run this call; its result says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class DenyCall:
    """A hook's verdict at ``dispatch_tool``: this call is not allowed; ``max_denials`` in a row end the run."""

    reason: str


@dataclass(frozen=True, slots=True)
class AskApproval:
    """A hook's verdict at ``dispatch_tool``: a person must allow this call first."""

    question: str = ""


HookDecision = AbortRun | SkipCall | DenyCall | AskApproval | None


@dataclass(frozen=True, slots=True)
class HookContext:
    """What a hook sees.

    Attributes:
        state: The state at whose door it stands.
        run: Everything that the run knows; read it, do not change it.
        call: At ``dispatch_tool``, the call that is about to run, as the model made it; else None.
        tool: At ``dispatch_tool``, its tool; else None.
        arguments: At ``dispatch_tool``, what the tool will get: checked, converted, defaults filled in.
    """

    state: str
    run: RunState
    call: ToolCall | None = None
    tool: Tool | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Hook:
    """A function that runs before a state's effect.

    Attributes:
        at: The state at whose door it stands. At ``dispatch_tool`` it is asked once for each call, and again
            when a call that a person had to allow is about to run: their leave is none of its own, and much
            may have changed meanwhile. At ``terminal`` it runs when the run ends, however it ends.
        function: Plain or async; returns None to go on, or a verdict. What is no verdict there counts as raising.
        fail_open: Whether an exception in it is only warned about (True) or aborts the run (False).
        once: Whether it runs only the first time that the run comes by. Where a store keeps the run, a resumed
            one knows where it has been; else "once" is once in each part of it.
        name: What warnings and errors call it.
    """

    at: str
    function: Callable[[HookContext], HookDecision | Awaitable[HookDecision]]
    fail_open: bool = True
    once: bool = False
    name: str = ""


@dataclass(frozen=True)
class Observer:
    """A function that sees every event. Whatever it raises is counted and warned about, and the run goes on."""

    function: Callable[[Event], Any]

    def __post_init__(self) -> None:
        if iscoroutinefunction(self.function) or iscoroutinefunction(type(self.function).__call__):
            raise ConfigurationError(f"observer {self.name} must be a plain function: nobody awaits it")

    @property
    def name(self) -> str:
        """What warnings call it."""
        return str(getattr(self.function, "__name__", self.function))


HookFunction = Callable[[HookContext], HookDecision | Awaitable[HookDecision]]
F = TypeVar("F", bound=HookFunction)


def hook(at: State | str, *, fail_open: bool = True, once: bool = False) -> Callable[[HookFunction], Hook]:
    """Make a function a hook at a state's door.

    Args:
        at: The state.
        fail_open: Whether an exception in it is only warned about.
        once: Whether it runs only the first time that the run comes by.
    """

    def decorate(function: HookFunction) -> Hook:
        return Hook(at, function, fail_open, once, str(getattr(function, "__name__", function)))

    return decorate


def observer(function: Callable[[Event], Any]) -> Observer:
    """Make a plain function an observer of every event.

    Raises:
        ConfigurationError: It is a coroutine function.
    """
    return Observer(function)


INFO_EVENTS = (RunStarted, RunResumed)
"""The events, beside the last one, that INFO tells."""

logger = logging.getLogger("agentfsm")
logger.addHandler(logging.NullHandler())  # else Python prints warnings to stderr where nobody has set up a log


def log_event(event: Event) -> None:
    """Write an event's line, if it has one."""
    if isinstance(event, RunStarted | RunResumed):
        begins = "begins" if isinstance(event, RunStarted) else f"goes on ({event.kind})"
        logger.info("run %s: %s with %s", event.run_id, begins, event.model)
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
            return f"tool {event.call.name} begins"
        case ToolFinished():
            result = event.result
            kind = result.failure.kind if result.failure is not None else None
            name = "" if kind is FailureKind.unknown_tool else f" {result.name}"  # a model may call anything
            return f"tool{name} is {result.status}" + (f" ({kind.value})" if kind is not None else "")
        case RecoveryStarted():
            return f"{event.failure.kind.value}: {event.action.value}, strike {event.attempt}"
        case _:
            return ""
