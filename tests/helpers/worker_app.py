"""Agents for the processes of ``agentfsm worker`` in tests, and a model whose replies follow from the transcript alone.

What a tool does is said by files in the folder ``$WORKER_FOLDER``: each call adds a line with the process to ``calls``,
and stays while there is a file ``hold`` (for good, if it was removed after the call began: ``once``).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from agentfsm import Agent, AgentGuardrails, Approval, Message, ModelRequest, Reply, Role, ToolCall, tool

FOLDER = Path(os.environ.get("WORKER_FOLDER", "."))


class Steps:
    """A model that calls one tool so many times, and then says that it is done."""

    def __init__(self, tool_name: str, calls: int = 1) -> None:
        self.name = "steps"
        self._tool = tool_name
        self._calls = calls

    async def reply(self, request: ModelRequest) -> Reply:
        """The next call, or the answer."""
        made = sum(message.role is Role.TOOL for message in request.messages)
        if made < self._calls:
            calls = (ToolCall(f"call-{made}", self._tool, {"order": made}),)
            return Reply(Message.assistant("", calls))
        return Reply(Message.assistant("done"))


class Delegates:
    """A model that has the sub-agent ``helper`` do its task."""

    name = "delegates"

    async def reply(self, request: ModelRequest) -> Reply:
        """The call, or the answer."""
        is_done = request.messages[-1].role is Role.TOOL
        return Reply(Message.assistant("Done.", () if is_done else (ToolCall("h", "helper", {"task": "Do it."}),)))


def _work(order: int) -> str:
    with (FOLDER / "calls").open("a", encoding="utf-8") as calls:
        calls.write(f"{os.getpid()}\n")
    while (FOLDER / "hold").exists():
        time.sleep(0.02)
    return f"shipped {order}"


@tool(idempotent=True)
def ship(order: int) -> str:
    """Ship an order."""
    return _work(order)


@tool(idempotent=True)
def ship_by_air(order: int) -> str:
    """Ship an order by air."""
    return _work(order)


@tool(idempotent=True, requires_approval=True)
def refund(order: int) -> str:
    """Refund an order."""
    return f"refunded {order}"


@tool(idempotent=True, requires_approval=Approval(validity_s=1.0))
def refund_now(order: int) -> str:
    """Refund an order, if somebody says so at once."""
    return f"refunded {order}"


@tool(idempotent=True)
def crash(order: int) -> str:
    """End the process."""
    with (FOLDER / "calls").open("a", encoding="utf-8") as calls:
        calls.write(f"{os.getpid()}\n")
    os._exit(9)


LIMITS = AgentGuardrails(tool_timeout_s=600)

support = Agent(Steps("ship", 3), tools=[ship], guardrails=LIMITS)
support_by_air = Agent(Steps("ship_by_air", 3), tools=[ship, ship_by_air], guardrails=LIMITS)
cashier = Agent(Steps("refund"), tools=[refund], guardrails=LIMITS)
hasty = Agent(Steps("refund_now"), tools=[refund_now], guardrails=LIMITS)
crasher = Agent(Steps("crash"), tools=[crash], guardrails=LIMITS)
