"""Every wire, streamed or not, against a third-party server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentfsm import Agent, Allow, Deny, Edit, RunResult, ToolStarted, UserInputRequested, tool
from agentfsm.errors import ModelError, ProviderError, TransientProviderError
from agentfsm.loop.messages import FinishReason, Message, Reply, Role, Usage
from agentfsm.loop.model import ModelRequest, StreamChunk, TextChunk
from agentfsm.models import ModelSettings, resolve
from agentfsm.runtime.run import Run
from tests.helpers.model_clients import MODEL_CLASSES, WEATHER, AnyModel, request_error, request_reply, stream_reply
from tests.helpers.npm_servers import AiMock, aimock_server  # noqa: F401  # importing registers the fixture

WIRES = ["openai", "responses", "anthropic", "ollama"]
TOOL_REQUEST = ModelRequest((Message.system("Be brief."), Message.user("the weather in Paris?")), tools=(WEATHER,))

USAGE = {"prompt_tokens": 20, "completion_tokens": 6, "input_tokens": 20, "output_tokens": 6}
"""The fields of both APIs; the server sends those of the one that is used."""


def model(wire: str, aimock: AiMock, *, api_key: str | None = None, settings: ModelSettings | None = None) -> AnyModel:
    at_v1 = wire in ("openai", "responses")
    name = "claude-sonnet-4-6" if wire == "anthropic" else "gpt-5-mini"
    url = aimock.openai_url if at_v1 else aimock.url
    return MODEL_CLASSES[wire](name, base_url=url, api_key=api_key or aimock.key, settings=settings)


@pytest.mark.parametrize("wire", WIRES)
def test_a_call_its_result_and_the_reply_round_trip(wire: str, aimock: AiMock) -> None:
    aimock.script(
        {
            "match": {"userMessage": "weather in Paris", "systemMessage": "Be brief", "hasToolResult": False},
            "response": {"toolCalls": [{"id": "toolu_01", "name": "weather", "arguments": {"city": "Paris"}}]},
        },
        {
            "match": {"hasToolResult": True} if wire == "ollama" else {"toolCallId": "toolu_01"},
            "response": {"content": "It is sunny in Paris.", "usage": USAGE},
        },
    )

    async def talk() -> tuple[Reply, Reply]:
        client = model(wire, aimock, settings=ModelSettings(temperature=0, max_tokens=300))
        first = await client.reply(TOOL_REQUEST)
        result = Message(Role.TOOL, "sunny, 21 degrees", tool_call_id=first.message.tool_calls[0].id, name="weather")
        request = ModelRequest((*TOOL_REQUEST.messages, first.message, result), tools=(WEATHER,), max_output_tokens=100)
        second = await client.reply(request)
        await client.aclose()
        return first, second

    first, second = asyncio.run(talk())
    (call,) = first.message.tool_calls
    assert (call.name, call.arguments, call.malformed) == ("weather", {"city": "Paris"}, None)
    assert first.finish_reason is FinishReason.TOOL_CALLS
    assert second.message == Message.assistant("It is sunny in Paris.")
    assert second.finish_reason is FinishReason.STOP
    if wire != "ollama":  # the server reports no usage there
        assert second.usage == Usage(input_tokens=20, output_tokens=6)


@pytest.mark.parametrize("wire", WIRES)
def test_two_parallel_calls_and_their_results_round_trip(wire: str, aimock: AiMock) -> None:
    towns = ["Paris", "Rome"]
    calls = [{"name": "weather", "arguments": {"city": town}} for town in towns]
    aimock.script(
        {"match": {"turnIndex": 0}, "response": {"content": "Looking.", "toolCalls": calls}},
        {"match": {"turnIndex": 1}, "response": {"content": "Sunny and wet."}},
    )
    first = request_reply(model(wire, aimock), TOOL_REQUEST)
    assert first.message.content == "Looking."
    assert [call.arguments["city"] for call in first.message.tool_calls] == towns
    results = [
        Message(Role.TOOL, "sunny", tool_call_id=first.message.tool_calls[0].id, name="weather"),
        Message(Role.TOOL, "", tool_call_id=first.message.tool_calls[1].id, name="weather", is_error=True),
    ]
    again = ModelRequest((*TOOL_REQUEST.messages, first.message, *results, Message.user("go on")), tools=(WEATHER,))
    assert request_reply(model(wire, aimock), again).message.content == "Sunny and wet."
    roles = [message["role"] for message in aimock.requests()[-1]["messages"]]
    assert [roles.count(role) for role in ("system", "tool", "user")] == [1, 2, 2]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("status", "retry_after", "kind"),
    [(429, 7, TransientProviderError), (500, None, TransientProviderError), (400, None, ProviderError)],
)
def test_a_failure_has_its_kind_and_retry_delay(
    wire: str, status: int, retry_after: int | None, kind: type[ModelError], aimock: AiMock
) -> None:
    wait = {} if retry_after is None else {"retryAfter": retry_after}
    response = {"error": {"message": "not now", "type": "some_error"}, "status": status, **wait}
    aimock.script({"match": {}, "response": response})
    error = request_error(model(wire, aimock), TOOL_REQUEST)
    assert type(error) is kind
    assert (error.status, error.retry_after_s) == (status, retry_after)
    assert "not now" in str(error)


@pytest.mark.parametrize("wire", WIRES)
def test_a_wrong_key_is_rejected_and_not_shown(wire: str, aimock: AiMock) -> None:
    aimock.script({"match": {}, "response": {"content": "hi"}})
    error = request_error(model(wire, aimock, api_key="sk-wrong-0123456789"), TOOL_REQUEST)
    assert type(error) is ProviderError
    assert error.status == 401
    assert "api_key" in str(error)
    assert "sk-wrong" not in str(error)


@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire != "ollama"])  # it has no such finish reason
def test_a_truncated_response_is_reported_as_truncated(wire: str, aimock: AiMock) -> None:
    cut = "max_tokens" if wire == "anthropic" else "length"
    aimock.script({"match": {}, "response": {"content": "Once upon", "finishReason": cut}})
    assert request_reply(model(wire, aimock), TOOL_REQUEST).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("name", ["openai:gpt-5-mini", "claude-sonnet-4-6"])
def test_environment_variables_alone_are_enough(name: str, aimock: AiMock, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in aimock.environ.items():
        monkeypatch.setenv(variable, value)
    aimock.script({"match": {"userMessage": "weather"}, "response": {"content": "hi"}})
    client = resolve(name)
    assert asyncio.run(client.reply(TOOL_REQUEST)).message.content == "hi"


# -- streamed ----------------------------------------------------------------------------------------------


RICH = {
    "content": "It is sunny in Paris, naïve 😀 and \u2028 all. " * 5,
    "reasoning": "They want to know about the weather.",
    "toolCalls": [
        {"id": "toolu_01", "name": "weather", "arguments": {"city": "Paris", "note": "漢字 😀"}},
        {"id": "toolu_02", "name": "weather", "arguments": {"city": "Rome"}},
    ],
}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_streamed_reply_equals_the_unstreamed_one(wire: str, size: int, aimock: AiMock) -> None:
    aimock.script({"match": {}, "response": RICH, "chunkSize": size})

    async def both() -> tuple[Reply, list[StreamChunk], Reply]:
        client = model(wire, aimock)
        whole = await client.reply(TOOL_REQUEST)
        received, streamed = await stream_reply(client, TOOL_REQUEST)
        await client.aclose()
        return whole, received, streamed

    whole, received, streamed = asyncio.run(both())
    assert [(c.name, c.arguments) for c in streamed.message.tool_calls] == [
        (call["name"], call["arguments"]) for call in RICH["toolCalls"]
    ]
    assert streamed.message.content == whole.message.content == RICH["content"]
    assert "".join(piece.text for piece in received if isinstance(piece, TextChunk)) == RICH["content"]
    assert (streamed.finish_reason, streamed.usage) == (whole.finish_reason, whole.usage)
    assert [c.arguments for c in whole.message.tool_calls] == [c.arguments for c in streamed.message.tool_calls]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("fault", [{"truncateAfterChunks": 3}, {"disconnectAfterMs": 1, "latency": 5}])
def test_a_stream_interrupted_by_the_server_is_transient(wire: str, fault: dict[str, int], aimock: AiMock) -> None:
    aimock.script({"match": {}, "response": RICH, "chunkSize": 1, **fault})
    with pytest.raises(TransientProviderError):
        asyncio.run(stream_reply(model(wire, aimock), TOOL_REQUEST))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("chaos", "kinds"),
    [
        ({"dropRate": 1}, (TransientProviderError,)),
        ({"disconnectRate": 1}, (TransientProviderError,)),
        ({"rateLimitRate": 1}, (TransientProviderError,)),
        ({"malformedRate": 1}, (ProviderError, TransientProviderError)),  # truncated JSON in a complete response
    ],
)
def test_injected_server_faults_have_their_kinds(
    wire: str, streamed: bool, chaos: dict[str, int], kinds: tuple[type[ModelError], ...], aimock: AiMock
) -> None:
    aimock.script({"match": {}, "response": RICH, "chaos": chaos})
    client = model(wire, aimock)
    with pytest.raises(kinds):
        asyncio.run(_streamed(client) if streamed else client.reply(TOOL_REQUEST))


async def _streamed(client: AnyModel) -> Reply:
    return (await stream_reply(client, TOOL_REQUEST))[1]


# -- whole runs --------------------------------------------------------------------------------------------


def asking(tool: str, call_id: str) -> dict[str, Any]:
    return {"toolCalls": [{"id": call_id, "name": tool, "arguments": {"city": "Paris"}}]}


@tool(requires_approval=True)
def launch(city: str) -> str:
    """Launch a balloon."""
    return f"launched over {city}"


@tool(timeout=20)
async def wait(city: str) -> str:
    """Wait for the weather."""
    await asyncio.Event().wait()
    return city


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("answer", [Allow(), Deny("not today"), Edit({"city": "Rome"})])
def test_the_transcript_of_a_resumed_run_is_accepted(
    wire: str, watched: bool, answer: Allow | Deny | Edit, aimock: AiMock
) -> None:
    aimock.script(
        {"match": {"hasToolResult": False}, "response": asking("launch", "toolu_01")},
        {"match": {"hasToolResult": True}, "response": {"content": "All is done."}},
    )
    agent = Agent(model(wire, aimock), tools=[launch])

    async def main() -> RunResult:
        first = await _over(agent.run("launch a balloon"), watched)
        assert isinstance(first.outcome, UserInputRequested)
        return await _over(agent.resume(first.outcome.suspension_record, answer), watched)

    assert asyncio.run(main()).output == "All is done."


async def _over(run: Run, watched: bool) -> RunResult:
    if watched:
        async for _ in run:
            pass
    return await run


@pytest.mark.parametrize("wire", WIRES)
def test_the_transcript_of_a_cancelled_run_is_accepted(wire: str, aimock: AiMock) -> None:
    aimock.script(
        {"match": {"userMessage": "never mind"}, "response": {"content": "All right."}},
        {"match": {"userMessage": "wait for it"}, "response": asking("wait", "toolu_01")},
    )
    agent = Agent(model(wire, aimock), tools=[wait])

    async def main() -> str:
        run = agent.run("wait for it")
        async for event in run:
            if isinstance(event, ToolStarted):
                run.cancel("enough")
        again = await agent.run("never mind", message_history=(await run).messages)
        return str(again.output)

    assert asyncio.run(main()) == "All right."
    sent = aimock.requests()[-1]["messages"]
    assert sum(message["role"] == "tool" for message in sent) == 1


@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire != "ollama"])
def test_the_transcript_after_a_truncated_call_is_accepted_and_the_call_is_not_run(wire: str, aimock: AiMock) -> None:
    cut = {"anthropic": "max_tokens"}.get(wire, "length")
    aimock.script(
        {"match": {"sequenceIndex": 0}, "response": asking("launch", "toolu_01") | {"finishReason": cut}},
        {"match": {}, "response": {"content": "All is done."}},
    )
    result = asyncio.run(_over(Agent(model(wire, aimock), tools=[launch]).run("launch a balloon"), True))
    assert result.output == "All is done."
    assert not any(d.source == "dispatch_tool" for d in result.decisions)
