"""The agent of ``make bench-scale``: so many calls of a tool, one of which a person must approve in every fifth run.

Each call adds a line with the run and the time to a file of the process in ``$SCALE_FOLDER``. While there is a file
``hold``, no run takes its first step, and each process that has one to take says so.
"""

from __future__ import annotations

import asyncio
import os
import time
from functools import cache
from pathlib import Path

from agentfsm import Agent, AgentGuardrails, Message, ModelRequest, Reply, Role, ToolCall, ToolContext, tool

FOLDER = Path(os.environ.get("SCALE_FOLDER", "."))
STEPS = int(os.environ.get("SCALE_STEPS", "20"))
TEXT = "x" * 250


class Steps:
    """A model whose prompt says at which of its calls a person is asked, or -1."""

    name = "steps"

    async def reply(self, request: ModelRequest) -> Reply:
        """The next call, or the answer."""
        prompt = next(message.content for message in request.messages if message.role is Role.USER)
        made = sum(message.role is Role.TOOL for message in request.messages)
        if not made:
            await _until_released()
        if made >= STEPS:
            return Reply(Message.assistant("done"))
        name = "approved_step" if made == int(prompt) else "step"
        return Reply(Message.assistant("", (ToolCall(f"call-{made}", name, {"number": made}),)))


async def _until_released() -> None:
    while (FOLDER / "hold").exists():
        (FOLDER / f"{os.getpid()}.waiting").touch()
        await asyncio.sleep(0.02)


@cache
def _calls() -> int:
    return os.open(FOLDER / f"{os.getpid()}.calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _note(context: ToolContext) -> str:
    os.write(_calls(), f"{context.run_id} {time.time():.4f}\n".encode())  # a buffer would be lost with a killed worker
    return TEXT


@tool(idempotent=True)
def step(context: ToolContext, number: int) -> str:
    """Do a step."""
    return _note(context)


@tool(idempotent=True, requires_approval=True)
def approved_step(context: ToolContext, number: int) -> str:
    """Do a step that somebody approves first."""
    return _note(context)


limits = AgentGuardrails(max_iterations=STEPS + 10, max_steps=20 * (STEPS + 10), llm_timeout_s=600, tool_timeout_s=600)
scale = Agent(Steps(), tools=[step, approved_step], guardrails=limits)
