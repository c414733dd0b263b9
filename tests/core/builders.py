"""Short ways to build runs, replies and results for the tests of the core."""

from __future__ import annotations

from typing import Any

from agentfsm.core.failures import Failure, FailureKind
from agentfsm.core.follow import follow
from agentfsm.core.guardrails import AgentGuardrails
from agentfsm.core.loop import LOOP
from agentfsm.core.messages import FinishReason, Message, Reply, ToolCall, ToolResult
from agentfsm.core.rules import Rules
from agentfsm.core.state import CallState, RunState
from agentfsm.machine.engine import Decision

__all__ = ["a_call", "a_reply", "a_run", "denied", "done", "failing", "failure", "move", "pending"]


def a_run(
    state: str = "pre_step", *, limits: dict[str, Any] | None = None, rules: Any = None, **fields: Any
) -> RunState:
    """A run in a state, with some limits, some rules and some fields set."""
    guardrails = AgentGuardrails(**(limits or {}))
    return RunState("run", state=state, guardrails=guardrails, rules=Rules(**(rules or {})), **fields)


def a_call(id: str = "c1", name: str = "look", **arguments: Any) -> ToolCall:  # noqa: A002
    return ToolCall(id, name, arguments)


def a_reply(text: str = "", *calls: ToolCall, finish: str = "stop", refusal: str | None = None) -> Reply:
    return Reply(Message.assistant(text, calls), FinishReason(finish), refusal=refusal)


def pending(*calls: ToolCall) -> list[CallState]:
    """A batch of calls with no result."""
    return [CallState(c, c.signature) for c in calls]


def failure(kind: str = "tool_error", explanation: str = "it broke", **more: Any) -> Failure:
    return Failure(kind=FailureKind(kind), explanation=explanation, **more)


def failing(call: ToolCall, kind: str = "tool_error", text: str = "it broke", **more: Any) -> ToolResult:
    """The result of a call that failed."""
    return ToolResult(call.id, call.name, text, "failed", failure(kind, f"{call.name}: {text}"), "ValueError", **more)


def done(call: ToolCall, text: str = "fine", **more: Any) -> ToolResult:
    """The result of a call that worked."""
    return ToolResult(call.id, call.name, text, **more)


def denied(call: ToolCall) -> ToolResult:
    """The result of a call that was denied."""
    return ToolResult(call.id, call.name, "no", "denied")


def move(run: RunState, transition: str, found: Any = None) -> None:
    """Follow a row of the loop, as the machine would have taken it."""
    row = LOOP.transition(transition)
    assert run.state == row.source
    run.state = row.target
    follow(run, Decision(row, (), found))
