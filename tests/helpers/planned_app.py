"""The agents of ``worker_histories``: each run's prompt says which calls its model makes, and how long they take.

A plan is a list of batches, and a batch a list of calls: ``[tool, text, seconds]``, or ``["helper", plan]`` for a
sub-agent. What a tool does is a line in the file ``effects`` of the folder ``$WORKER_FOLDER``, which it writes before
anything else; then it takes its time.
"""

from __future__ import annotations

import json
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

from agentfsm import (
    Agent,
    AgentGuardrails,
    Approval,
    Message,
    ModelRequest,
    Reply,
    Role,
    Tool,
    ToolCall,
    ToolContext,
    tool,
)

APPROVALS = {"refund": 1, "wire": 2}
"""How many people must approve a call of each tool that waits."""
ONCE = ("pay", "wire")
"""Tools whose calls are not repeated."""
LIMITS = AgentGuardrails(max_iterations=200, max_execution_time_s=None, max_denials=64, tool_timeout_s=600)


class Planned:
    """A model that follows the plan in its first message."""

    name = "planned"

    async def reply(self, request: ModelRequest) -> Reply:
        """The next batch, or the answer."""
        plan = json.loads(next(each.content for each in request.messages if each.role is Role.USER))
        turn = sum(each.role is Role.ASSISTANT for each in request.messages)
        if turn == len(plan):
            return Reply(Message.assistant(f"finished {len(plan)}"))
        return Reply(Message.assistant("", tuple(_call(turn, n, each) for n, each in enumerate(plan[turn]))))


def _call(turn: int, number: int, planned: list[Any]) -> ToolCall:
    name, *given = planned
    arguments = {"task": json.dumps(given[0])} if name == "helper" else {"text": given[0], "seconds": given[1]}
    return ToolCall(f"c{turn}.{number}", name, arguments)


@cache
def _effects(folder: str) -> int:
    return os.open(Path(folder) / "effects", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _made(name: str, **options: Any) -> Tool:
    def do(context: ToolContext, text: str, seconds: float) -> str:
        """Do it."""
        line = f"{name} {context.run_id} {text}\n"
        os.write(_effects(os.environ["WORKER_FOLDER"]), line.encode())  # a buffer would be lost with the process
        time.sleep(seconds)
        return f"{name} {text}"

    return tool(name=name, **options)(do)


TOOLS = (
    _made("look", idempotent=True, parallel=True),
    _made("pay", parallel=True),
    _made("refund", idempotent=True, requires_approval=True),
    _made("wire", requires_approval=Approval(2)),
)

lowest = Agent(Planned(), tools=TOOLS, guardrails=LIMITS)
helper = Agent(Planned(), tools=[*TOOLS, lowest.as_tool("helper", "Helps.", parallel=True)], guardrails=LIMITS)
planned = Agent(Planned(), tools=[*TOOLS, helper.as_tool("helper", "Helps.", parallel=True)], guardrails=LIMITS)
