"""What an MCP server says about the progress of a call, as events of the run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")

from agentfsm import Agent, ToolProgress
from agentfsm.integrations.mcp import MCPSettings, MCPTools
from agentfsm.testing import ScriptedModel, call
from tests.helpers.mcp_servers import SdkServer, sdk_http, sdk_legacy_http
from tests.helpers.npm_servers import EverythingServer, everything_command, everything_http

FIXTURES = sdk_http, sdk_legacy_http, everything_command, everything_http  # importing registers the fixtures


def progress(url: str, one: Any, **settings: Any) -> list[ToolProgress]:
    """The events of one call."""

    async def main() -> list[ToolProgress]:
        async with MCPTools.http(url, settings=MCPSettings(**settings)) as tools:
            run = Agent(ScriptedModel([one, "ok"]), tools=tools).run("go")
            return [event async for event in run if isinstance(event, ToolProgress)]

    return asyncio.run(main())


@pytest.mark.parametrize("server", ["sdk_server", "legacy_server"])
@pytest.mark.parametrize("elicitation", [False, True])
def test_the_last_that_a_server_says_is_an_event(
    request: pytest.FixtureRequest, server: str, elicitation: bool
) -> None:
    running: SdkServer = request.getfixturevalue(server)
    last = progress(running.url, call("sweep", rooms=4), elicitation=elicitation)[-1]
    assert (last.name, last.message, last.fraction) == ("sweep", "room 4", 1.0)


def test_a_server_of_another_vendor_says_how_far_it_is(everything_http: EverythingServer) -> None:
    events = progress(everything_http.url, call("trigger-long-running-operation", duration=1, steps=2))
    assert [(event.message, event.fraction) for event in events] == [("1 of 2", 0.5), ("2 of 2", 1.0)]
