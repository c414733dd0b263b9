"""The tools of an MCP server: here the time server, started as a child process.

Shows: MCPTools, a prefix for names, a permission rule over a tool of the server.

    pip install 'agentfsm[mcp]' mcp-server-time
    python mcp_server.py

The model is a scripted one, so this runs without a key; put ``"openai:gpt-5-mini"`` or another in its place.
"""

import asyncio
import json
import sys
from typing import Any

from agentfsm import Agent, allow, permissions
from agentfsm.integrations.mcp.toolset import MCPSettings, MCPTools
from agentfsm.testing import ScriptedModel, call


def answer(messages: Any) -> str:
    """What a model would make of the tool's result."""
    there = json.loads(messages[-1].content)["target"]["datetime"]
    return f"In Tokyo it is {there[11:16]} then."


SCRIPT = [
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
