"""The tools of an MCP server, here the time server, started as a child process.

Shows: MCPTools, a prefix for tool names, a permission rule for the server's tools.

Needs the extra ``mcp``, and the package ``mcp-server-time``. The model is scripted, so no API key is needed; use
``"openai:gpt-5-mini"`` or another name instead.
"""

import asyncio
import json
import sys
from typing import Any

from agentfsm import Agent, allow, permissions
from agentfsm.integrations.mcp import MCPSettings, MCPTools
from agentfsm.testing import ScriptedModel, call


def answer(messages: Any) -> str:
    """What a model would answer with the tool's result."""
    there = json.loads(messages[-1].content)["target"]["datetime"]
    return f"In Tokyo it is {there[11:16]} then."


SCRIPT: list[Any] = [
    call("time_convert_time", source_timezone="UTC", time="12:00", target_timezone="Asia/Tokyo"),
    answer,
]


async def main() -> None:
    async with MCPTools.stdio(sys.executable, ["-m", "mcp_server_time"], settings=MCPSettings(prefix="time_")) as tools:
        print("The server's tools:", ", ".join(sorted(t.name for t in tools)))
        policy = permissions(allow("time_*"), otherwise="deny")
        agent = Agent(ScriptedModel(SCRIPT), tools=tools, hooks=[policy])
        result = await agent.run("When it is noon in UTC, what time is it in Tokyo?")
    print(result.output)


asyncio.run(main())
