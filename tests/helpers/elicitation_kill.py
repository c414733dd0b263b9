"""A process that is killed while its run waits for a person whom an MCP server asks.

python elicitation_kill.py DATABASE TOOL URL
python elicitation_kill.py DATABASE TOOL stdio FOLDER
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from agentfsm import Agent, Host, SqliteStore, UserInputRequested
from agentfsm.integrations.mcp import MCPSettings, MCPTools
from agentfsm.testing import ScriptedModel, call
from tests.helpers.mcp_servers import sdk_stdio

DATABASE, TOOL, WHERE, *REST = sys.argv[1:]
SECRET = b"a secret of these tests"


async def main() -> None:
    settings = MCPSettings(elicitation=True)
    tools = sdk_stdio(Path(REST[0]), settings=settings) if WHERE == "stdio" else MCPTools.http(WHERE, settings=settings)
    with SqliteStore(DATABASE) as store:
        async with tools:
            agent = Agent(ScriptedModel([call(TOOL, city="Rome")]), tools=tools, host=Host(secret=SECRET, store=store))
            result = await agent.run("go", run_id="r")
            if isinstance(result.outcome, UserInputRequested):
                os.kill(os.getpid(), signal.SIGKILL)


asyncio.run(main())
