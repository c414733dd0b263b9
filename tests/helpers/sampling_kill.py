"""A process that is killed while a model replies to what an MCP server asks during a call.

python sampling_kill.py DATABASE URL TOOL REPLIES
"""

import asyncio
import os
import signal
import sys

from agentfsm import Agent, Host, ModelRequest, Reply, SqliteStore
from agentfsm.integrations.mcp import MCPSettings, MCPTools
from agentfsm.testing import ScriptedModel, call

DATABASE, URL, TOOL, REPLIES = sys.argv[1:]


class DeadlyModel:
    """A model that replies some times, and then ends the process."""

    name = "deadly"

    def __init__(self, replies: int) -> None:
        self.left = replies

    async def reply(self, request: ModelRequest) -> Reply:
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return await ScriptedModel(["short"]).reply(request)


async def main() -> None:
    settings = MCPSettings(sampling=Agent(DeadlyModel(int(REPLIES))), idempotent="annotated")
    with SqliteStore(DATABASE) as store:
        async with MCPTools.http(URL, settings=settings) as tools:
            host = Host(secret=b"a secret of these tests", store=store)
            await Agent(ScriptedModel([call(TOOL, text="long"), "ok"]), tools=tools, host=host).run("go", run_id="r")


asyncio.run(main())
