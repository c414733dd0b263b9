"""MCP servers that break the protocol: each ending names its cause, and one bad tool or answer spoils nothing else."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")

from agentfsm import Agent, ConfigurationError, RunResult
from agentfsm.integrations.mcp import MCPSettings, MCPTools
from agentfsm.testing import ScriptedModel, call
from tests.helpers.mcp_servers import open_and_close
from tests.helpers.recording_server import Call, RecordingServer, Response, running
from tests.helpers.stepped_clock import SteppedClock


def results(result: RunResult) -> list[str]:
    return [m.content for m in result.messages if m.role == "tool"]


STRANGE = """
import json, os, sys
case, calls, out = sys.argv[1], 0, sys.stdout
def write(text):
    out.write(text)
    out.flush()
def answer(id, **more):
    write(json.dumps({"jsonrpc": "2.0", "id": id, **more}) + "\\n")
schema = {"type": "object", "properties": {}}
tool = {"name": "echo", "description": "Repeats.", "inputSchema": schema}
lists = {
    "twice": [tool, tool],
    "two meanings": [tool, {**tool, "description": "Sends your mail to everybody."}, {**tool, "name": "other"}],
    "one name for models": [{**tool, "name": "a.b"}, {**tool, "name": "a_b"}],
    "endless description": [{**tool, "description": "d" * 100_001}, {**tool, "name": "other"}],
    "no name": [{**tool, "name": ""}, tool],
    "no list": None,
}
results = {
    "raw tab": '{"content": [{"type": "text", "text": "a\\tb"}]}',
    "large number": '{"content": [], "structuredContent": {"n": ' + "9" * 5000 + "}}",
    "a text": '"hello"', "null": "null", "half a character": '{"content": [{"type": "text", "text": "a\\\\ud800b"}]}'
}
if case == "greets":
    write("Server is listening\\n{\\n")
    open(sys.argv[2], "w").close()
if case == "byte-order mark":
    write("\\ufeff")
for line in sys.stdin:
    message = json.loads(line)
    id, method = message.get("id"), message.get("method")
    if id is None:
        continue
    if method == "initialize":
        if case == "refuses":
            answer(id, error="license expired")
        elif case != "greets":
            version = "1999-01-01" if case == "old" else message["params"]["protocolVersion"]
            info = {} if case == "nameless" else {"serverInfo": {"name": "x", "version": "1"}}
            answer(id, result={"protocolVersion": version, "capabilities": {"tools": {}}, **info})
        if case == "leaves":
            sys.exit("no config")
    elif method == "tools/list":
        if case == "leaves later":
            os._exit(4)
        more = {"nextCursor": ""} if case == "empty cursor" else {}
        answer(id, result={"tools": lists.get(case, [tool]), **more})
    elif method == "tools/call":
        calls += 1
        if calls > 1:
            answer(id, result={"content": [{"type": "text", "text": f"call {calls}"}]})
        elif case in results:
            write(f'{{"jsonrpc": "2.0", "id": {id}, "result": {results[case]}}}\\n')
        elif case == "neither":
            answer(id)
        elif case == "raw tab, id last":
            write('{"result": {"content": [{"type": "text", "text": "a\\tb"}]}, "jsonrpc": "2.0", "id": %d}\\n' % id)
        elif case == "chatty":
            write('handling {"jsonrpc": "2.0", "id": %d}\\n' % id)
            write('{"method": "ask", "a": "\\t", "id": %d}\\n' % id)
            write('{"id": %d, \\t\\n' % id)
            answer(id, result={"content": [{"type": "text", "text": "fine"}]})
        elif case == "old version":
            write(json.dumps({"id": id, "result": {}}) + "\\n")
        elif case == "like a lost one":
            answer(id, error={"code": -32000, "message": "Connection closed by the database"})
        elif case == "own session":
            answer(id, error={"code": -32000, "message": "no open shopping session"})
        elif case == "session of a tool":
            answer(id, error={"code": -32001, "message": "Session not found"})
        elif case == "own error":
            answer(id, error={"code": -32000, "message": "quota exceeded"})
        elif case == "error in words":
            answer(id, error="quota exceeded")
        elif case == "no letters":
            content = b'{"content": [{"type": "text", "text": "\\xff"}]}'
            out.buffer.write(b'{"jsonrpc": "2.0", "id": %d, "result": %b}\\n' % (id, content))
            out.buffer.flush()
        elif case == "dies":
            os._exit(5)
    else:
        answer(id, error={"code": -32601, "message": "Method not found"})
"""


def strange(case: str, **settings: Any) -> MCPTools:
    return MCPTools.stdio(sys.executable, ["-c", STRANGE, case], settings=MCPSettings(timeout=20, **settings))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("leaves", "it has ended with exit code 1; the last lines of its stderr:\n    no config"),
        ("leaves later", "it has ended with exit code 4"),
        ("refuses", "license expired"),
        ("old", "Unsupported protocol version from the server: 1999-01-01"),
        ("nameless", "its answer is not valid: serverInfo"),
        ("no list", "does not return its list of tools: .* not valid: tools"),
    ],
)
def test_the_error_for_a_server_that_cannot_be_used_says_why(case: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        open_and_close(strange(case))


def test_what_a_server_writes_to_stdout_in_place_of_messages_is_quoted(tmp_path: Path) -> None:
    clock, written = SteppedClock(), tmp_path / "written"
    program = [sys.executable, "-c", STRANGE, "greets", str(written)]
    tools = MCPTools.stdio(program[0], program[1:], settings=MCPSettings(start_timeout=60))

    async def main() -> None:
        opening = asyncio.ensure_future(tools.__aenter__())
        while not written.exists():
            await asyncio.sleep(0.01)
        for _ in range(100):  # until it is read, too
            await asyncio.sleep(0)
        clock.advance(60)
        await opening

    with pytest.raises(ConfigurationError) as caught:
        clock.run(main())
    assert "does not respond within 60 s" in str(caught.value)
    assert "it wrote to stdout, where only messages may be:\n    Server is listening\n    {" in str(caught.value)


@pytest.mark.parametrize(
    ("case", "names", "why"),
    [
        ("twice", ["echo"], ""),
        ("two meanings", ["other"], "the server lists it several times, with different definitions"),
        ("one name for models", ["a_b"], "for models its name is that of 'a.b'"),
        ("endless description", ["other"], "its description is longer than 100,000 characters"),
        ("no name", ["echo"], "its name is empty"),
        ("empty cursor", ["echo"], ""),
        ("byte-order mark", ["echo"], ""),
    ],
)
def test_a_tool_that_is_unclear_is_left_out_with_a_warning_and_the_others_work(
    case: str, names: list[str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> list[str]:
        async with strange(case) as tools:
            return [tool.name for tool in tools]

    assert asyncio.run(main()) == names
    ours = [record.getMessage() for record in caplog.records if record.name == "agentfsm"]
    assert [why in text for text in ours] == ([True] if why else [])


NO_MESSAGE = "the server's answer is not a message of the protocol (JSON-RPC 2.0)"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        *((case, NO_MESSAGE) for case in ("a text", "null", "neither", "old version")),
        *((case, NO_MESSAGE) for case in ("raw tab", "raw tab, id last", "large number")),
        ("chatty", "fine"),
        ("own error", "quota exceeded"),
        ("like a lost one", "Connection closed by the database"),
        ("own session", "no open shopping session"),
        ("session of a tool", "Session not found"),
        ("error in words", "quota exceeded"),
        ("half a character", "a?b"),
        ("no letters", "\ufffd"),
    ],
)
def test_an_answer_that_breaks_the_protocol_is_the_result_of_its_call_alone(case: str, said: str) -> None:
    """The server stays up: the second call is answered by the same process."""

    async def main() -> RunResult:
        async with strange(case) as tools:
            return await Agent(ScriptedModel([call("echo"), call("echo"), "ok"]), tools=tools).run("go")

    result = asyncio.run(main())
    assert results(result) == [said, "call 2"]
    assert {d.guard for d in result.decisions if d.source == "post_tool"} <= {"tool_error", "otherwise"}


def test_the_error_of_a_call_whose_server_ends_says_how_it_ended() -> None:
    async def main() -> RunResult:
        async with strange("dies") as tools:
            return await Agent(ScriptedModel([call("echo"), "ok"]), tools=tools).run("go")

    assert "is gone: it has ended with exit code 5; the next call reconnects" in results(asyncio.run(main()))[0]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:1/mcp", "ConnectError: Connection refused"),
        ("http://nowhere.invalid/mcp", "ConnectError: "),
    ],
)
def test_the_error_for_an_address_that_cannot_be_reached_says_why(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        open_and_close(MCPTools.http(url))
    assert not str(caught.value).endswith("ConnectError")


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, "", "is gone: it answered 401 Unauthorized; the next call reconnects"),
        (429, "", "is gone: it answered 429 Too Many Requests; the next call reconnects"),
        (400, {"error": {"code": -32000, "message": "quota exceeded"}}, "quota exceeded"),
        (200, "{nope", NO_MESSAGE),
    ],
)
def test_the_error_of_a_call_over_http_has_its_status_or_reason(status: int, body: object, said: str) -> None:
    def respond(asked: Call) -> Response:
        message = asked.data
        result: dict[str, Any] = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
        answers = {
            "initialize": result | {"serverInfo": {"name": "x", "version": "1"}},
            "tools/list": {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]},
        }
        top = {"jsonrpc": "2.0", "id": message.get("id")}
        if "id" not in message:
            return Response(b"", status=202)
        if message["method"] == "tools/call":
            text = body if isinstance(body, str) else json.dumps(top | body)  # type: ignore[operator]
            return Response(text.encode(), status=status)
        if (found := answers.get(message["method"])) is None:
            return Response(json.dumps(top | {"error": {"code": -32601, "message": "no"}}).encode())
        return Response(json.dumps(top | {"result": found}).encode())

    async def main(url: str) -> RunResult:
        async with MCPTools.http(f"{url}/mcp") as tools:
            return await Agent(ScriptedModel([call("echo"), "ok"]), tools=tools).run("go")

    with running(RecordingServer(respond)) as server:
        assert said in results(asyncio.run(main(server.url)))[0]


@pytest.mark.parametrize(
    ("status", "code", "said", "is_lost"),
    [
        (404, -32600, "Session not found", True),  # the Python SDK
        (404, -32001, "Session not found", True),  # the TypeScript SDK
        (404, -32603, "unknown", True),  # in the protocol, the status alone says it
        (400, -32000, "Bad Request: No valid session ID provided", True),  # an example of the TypeScript SDK
        (400, -32000, "Bad Request: Server not initialized", True),  # the TypeScript SDK with one session
        (400, -32000, "Invalid or expired session", True),
        (404, -32601, "Method not found", False),
        (400, -32602, "the session ID must be a number", False),
        (400, -32000, "no open shopping session", False),
        (200, -32000, "no open shopping session", False),
        (200, -32001, "Session not found", False),
    ],
)
def test_a_session_that_the_server_no_longer_knows_is_begun_again_and_its_own_errors_end_none(
    status: int, code: int, said: str, is_lost: bool
) -> None:
    calls: list[str] = []

    def answer(asked: Call) -> Response:
        method = asked.data["method"]
        calls.append(method)
        result: dict[str, Any] = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
        answers: dict[str, Any] = {
            "initialize": result | {"serverInfo": {"name": "x", "version": "1"}},
            "tools/list": {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]},
            "tools/call": {"content": [{"type": "text", "text": "hello"}]},
        }
        top = {"jsonrpc": "2.0", "id": asked.data.get("id")}
        if method == "tools/call" and calls.count(method) == 1:
            return Response(json.dumps(top | {"error": {"code": code, "message": said}}).encode(), status=status)
        if "id" not in asked.data:
            return Response(b"", status=202)
        if method not in answers:
            return Response(json.dumps(top | {"error": {"code": -32601, "message": "no"}}).encode())
        return Response(json.dumps(top | {"result": answers[method]}).encode())

    async def main(url: str) -> RunResult:
        async with MCPTools.http(f"{url}/mcp") as tools:
            return await Agent(ScriptedModel([call("echo"), call("echo"), "ok"]), tools=tools).run("go")

    with running(RecordingServer(answer)) as server:
        first, second = results(asyncio.run(main(server.url)))
    assert (f"is gone: its session has ended ({said})" in first) == is_lost
    assert said in first
    assert second == "hello"
    assert calls.count("initialize") == (2 if is_lost else 1)
