"""The log of runs, under the logger ``agentfsm``: quiet unless somebody wants it, and without secrets at any level.

INFO tells when a run begins and ends, DEBUG every move and call, WARNING what failed beside a run. A line holds ids,
names that the program chose (states, guards, tools, models), kinds and counts; never what a person, a model, a tool
or an exception said, for that may be anything.
"""

from __future__ import annotations

import logging

from agentfsm.core.events import (
    AgentError,
    Ending,
    Event,
    ModelReplied,
    RunResumed,
    RunStarted,
    ToolFinished,
    ToolStarted,
    Transitioned,
    UserInputRequested,
)
from agentfsm.core.failures import FailureKind

__all__ = ["AT_INFO", "log", "tell"]

AT_INFO = (RunStarted, RunResumed)
"""The events, beside the last one, that INFO tells."""

log = logging.getLogger("agentfsm")
log.addHandler(logging.NullHandler())  # else Python prints warnings to stderr where nobody has set up a log


def tell(event: Event) -> None:
    """Write an event's line, if it has one."""
    if isinstance(event, RunStarted | RunResumed):
        begins = "begins" if isinstance(event, RunStarted) else f"goes on ({event.kind})"
        log.info("run %s: %s with %s", event.run_id, begins, event.model)
    elif isinstance(event, Ending):
        what = f" ({event.kind})" if isinstance(event, UserInputRequested) else ""
        log.info("run %s: %s%s", event.run_id, type(event).__name__, what)
    elif log.isEnabledFor(logging.DEBUG) and (line := _detail(event)):
        log.debug("run %s: %s", event.run_id, line)


def _detail(event: Event) -> str:
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
        case AgentError():
            return f"{event.failure.kind.value}: {event.action.value}, strike {event.attempt}"
        case _:
            return ""
