"""The same tools over stdio and HTTP, in the protocol with sessions and in the one without."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")

from agentfsm import Agent
from agentfsm.integrations.mcp import MCPTools
from agentfsm.testing import RecordingModel, ScriptedModel, call
from tests.helpers.mcp_servers import SdkServer, sdk_http, sdk_legacy_http, sdk_stdio

FIXTURES = sdk_http, sdk_legacy_http  # importing registers the fixtures


@pytest.mark.slow
@pytest.mark.parametrize("connection", ["stdio", "sdk_server", "legacy_server"])
def test_a_long_result_is_told_to_the_model_once(
    connection: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    text = " ".join(f"word{n}" for n in range(11_800))
    assert len(text) > 104_000

    async def main() -> RecordingModel:
        if connection == "stdio":
            server = sdk_stdio(tmp_path)
        else:
            running: SdkServer = request.getfixturevalue(connection)
            server = MCPTools.http(running.url)
        model = RecordingModel(ScriptedModel([call("recite", words=11_800), "It is long."]))
        async with server as tools:
            await Agent(model, tools=tools).run("Recite.")
        return model

    last = asyncio.run(main()).requests[-1]
    told = "".join(message.content for message in last.messages)
    assert told.count(text) == 1
    assert len(told) < len(text) + 1_000
