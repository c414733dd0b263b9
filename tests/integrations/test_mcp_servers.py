"""Third-party MCP servers, over stdio and streamable HTTP: their results arrive unchanged."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")

from agentfsm import Agent, RunCancelled, RunResult, ToolStarted
from agentfsm.integrations.mcp import MCPSettings, MCPTools
from agentfsm.testing import RecordingModel, ScriptedModel, call
from tests.helpers.npm_servers import EverythingServer, everything_command, everything_http
from tests.helpers.provider_rules import check_transcript

FIXTURES = everything_command, everything_http  # importing registers the fixtures


def results(result: RunResult) -> list[str]:
    return [m.content for m in result.messages if m.role == "tool"]


def run(tools: MCPTools, script: list[Any], **agent: Any) -> RunResult:
    async def main() -> RunResult:
        async with tools:
            result = await Agent(ScriptedModel(script), tools=tools, **agent).run("go")
        assert asyncio.all_tasks() == {asyncio.current_task()}
        check_transcript(result.messages, request=False)
        return result

    return asyncio.run(main())


def needs(module: str, package: str) -> None:
    if find_spec(module) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")


# -- mcp-server-time ----------------------------------------------------------------------------------------


PREFIX = MCPSettings(prefix="time_")


def test_the_time_server() -> None:
    needs("mcp_server_time", "mcp-server-time")
    tools = MCPTools.stdio(sys.executable, ["-m", "mcp_server_time", "--local-timezone", "UTC"], settings=PREFIX)
    convert = call("time_convert_time", source_timezone="UTC", time="12:00", target_timezone="Asia/Tokyo")
    wrong = call("time_get_current_time", timezone="Mars/Olympus")
    first, second = results(run(tools, [convert, wrong, "ok"]))
    assert json.loads(first)["target"]["datetime"].endswith("T21:00:00+09:00")
    assert "Mars/Olympus" in second


# -- mcp-server-git -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_git_server(tmp_path: Path) -> None:
    needs("mcp_server_git", "mcp-server-git")
    git = shutil.which("git")
    if git is None:
        pytest.skip("mcp-server-git needs git, and it is not on the path")
    for command in (
        ["init", "-q"],
        ["config", "user.name", "A Tester"],
        ["config", "user.email", "tester@example.com"],
        ["commit", "-q", "--allow-empty", "-m", "The first of all"],
    ):
        subprocess.run([git, *command], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "new.txt").write_text("new")
    tools = MCPTools.stdio(sys.executable, ["-m", "mcp_server_git", "--repository", str(tmp_path)])
    here = str(tmp_path)
    script = [call("git_log", repo_path=here), call("git_status", repo_path=here), call("git_status"), "ok"]
    log, status, wrong = results(run(tools, script))
    assert "The first of all" in log
    assert "new.txt" in status
    assert "'repo_path' is a required property" in wrong


# -- server-everything ----------------------------------------------------------------------------------------


@pytest.fixture(params=["stdio", "http"])
def tools(request: pytest.FixtureRequest) -> MCPTools:
    if request.param == "http":
        server: EverythingServer = request.getfixturevalue("everything_http")
        return MCPTools.http(server.url)
    command: list[str] = request.getfixturevalue("everything")
    return MCPTools.stdio(command[0], [*command[1:], "stdio"])


def test_text_structured_content_and_an_image(tools: MCPTools) -> None:
    script = [
        call("echo", message="hello"),
        call("get-sum", a=2, b=40),
        call("get-structured-content", location="Chicago"),
        call("get-tiny-image"),
        call("get-sum", a="two", b=1),
        "ok",
    ]
    result = run(tools, script)
    echo, total, weather, picture, wrong = results(result)
    assert "hello" in echo
    assert "42" in total
    assert set(json.loads(weather)) == {"temperature", "conditions", "humidity"}  # once, not twice
    assert "[image, image/png, " in picture
    assert [image.media_type for message in result.messages for image in message.images] == ["image/png"]
    assert "a: 'two' is not of type 'number'" in wrong


def test_schemas_are_passed_unchanged_to_the_model(everything: list[str]) -> None:
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    messages = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/list"},
    ]
    with subprocess.Popen([*everything, "stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for message in messages:
            server.stdin.write(json.dumps(message) + "\n")
        server.stdin.flush()
        listed = next(m for line in server.stdout if (m := json.loads(line)).get("id") == 2)["result"]["tools"]
        server.terminate()
    model = RecordingModel(ScriptedModel(["ok"]))

    async def main() -> None:
        async with MCPTools.stdio(everything[0], [*everything[1:], "stdio"]) as tools:
            await Agent(model, tools=tools).run("go")

    asyncio.run(main())
    specs = {s.name: s for s in model.requests[0].tools}
    assert {t["name"]: t["inputSchema"] for t in listed}.items() <= {n: s.parameters for n, s in specs.items()}.items()
    assert all(specs[t["name"]].description == t["description"] for t in listed)


@pytest.mark.slow
def test_a_long_call_is_stopped_by_its_timeout_and_by_cancellation(tools: MCPTools) -> None:
    long = call("trigger-long-running-operation", duration=60, steps=5)

    async def main() -> None:
        async with tools:
            run = Agent(ScriptedModel([long, call("echo", message="x"), long]), tools=_with_limit(tools, 0.3)).run("go")
            started = 0
            async for event in run:
                started += isinstance(event, ToolStarted)
                if isinstance(event, ToolStarted) and started == 3:
                    asyncio.get_running_loop().call_later(0.1, run.cancel)
            result = run.result
            assert isinstance(result.outcome, RunCancelled)
            first, second, third = results(result)
            assert first == "timed out after 0.3 s"
            assert "x" in second
            assert third.startswith("Interrupted")

    asyncio.run(main())


def _with_limit(tools: MCPTools, seconds: float) -> list[Any]:
    """The tools, of which the one that takes long has a limit."""
    from dataclasses import replace

    return [replace(t, timeout=seconds) if t.name == "trigger-long-running-operation" else t for t in tools]


@pytest.mark.slow
def test_over_http_a_server_that_dies_is_an_environment_error_and_is_reconnected(
    everything_http: EverythingServer,
) -> None:
    server = everything_http

    def kill(_: Any) -> Any:
        server.kill()
        return call("echo", message="two")

    def start(_: Any) -> Any:
        server.start()
        return call("echo", message="three")

    result = run(MCPTools.http(server.url), [call("echo", message="one"), kill, start, "ok"])
    assert result.ok
    guards = [d.guard for d in result.decisions if d.source == "post_tool"]
    assert guards == ["otherwise", "environment_error", "otherwise"]
    assert "three" in results(result)[2]


@pytest.mark.slow
def test_over_http_a_lost_session_is_reopened(everything_http: EverythingServer) -> None:
    server = everything_http

    def restart(_: Any) -> Any:
        server.kill()
        server.start()
        return call("echo", message="two")

    result = run(MCPTools.http(server.url), [call("echo", message="one"), restart, call("echo", message="3"), "ok"])
    assert "is gone" in results(result)[1]
    assert results(result)[2].startswith("Echo: 3")
