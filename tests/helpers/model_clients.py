"""Models on a fake HTTP transport or a raw loopback server, scripted streams, and canary secrets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest

from agentfsm.errors import ModelError
from agentfsm.loop.messages import Message, Reply
from agentfsm.loop.model import ModelRequest, StreamChunk, ToolSpec
from agentfsm.models import AnthropicMessages, OllamaChat, OpenAIChat, OpenAIResponses
from agentfsm.models.anthropic_clouds import BedrockMessages, VertexMessages
from agentfsm.models.http_client import HttpOptions

CANARY_KEY = "sk-canary-5d41402abc4b2a76b971"
CANARY_PROMPT = "canary: the launch code is tangerine, 'twice' over"
REQUEST = ModelRequest((Message.user(CANARY_PROMPT),))
WEATHER = ToolSpec("weather", "Tells the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})

GOOD_BODIES: dict[str, dict[str, Any]] = {
    "openai": {"choices": [{"message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}]},
    "responses": {
        "status": "completed",
        "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hello"}]}],
    },
    "anthropic": {"content": [{"type": "text", "text": "hello"}], "stop_reason": "end_turn"},
    "ollama": {"message": {"role": "assistant", "content": "hello"}, "done": True, "done_reason": "stop"},
}
WIRES = sorted(GOOD_BODIES)
AnyModel = OpenAIChat | OpenAIResponses | AnthropicMessages | OllamaChat
MODEL_CLASSES: dict[str, type[AnyModel]] = {
    "openai": OpenAIChat,
    "responses": OpenAIResponses,
    "anthropic": AnthropicMessages,
    "ollama": OllamaChat,
}
ALL_MODEL_CLASSES: dict[str, type[AnyModel]] = {
    **MODEL_CLASSES,
    "bedrock": BedrockMessages,
    "vertex": VertexMessages,
}
"""Also the wires that carry the messages of another one in paths and frames of their own."""

Handler = Callable[[httpx.Request], httpx.Response]


def build_model(
    wire: str,
    handler: Handler | None = None,
    *,
    base_url: str | None = "http://127.0.0.1:9/v1",
    api_key: str | None = CANARY_KEY,
    max_body_bytes: int = 1_000_000,
    clock: Callable[[], float] = lambda: 0.0,
) -> AnyModel:
    """A model of one wire, on a fake transport if a handler is given, else on the network."""
    http = HttpOptions(
        transport=None if handler is None else httpx.MockTransport(handler),
        max_body_bytes=max_body_bytes,
        clock=clock,
    )
    return MODEL_CLASSES[wire]("some-model", base_url=base_url, api_key=api_key, http=http)


def respond_with(status: int, body: object = None, **headers: str) -> Handler:
    """A handler that always sends one response; a body of type str is sent unchanged."""
    content = body if isinstance(body, str) else json.dumps(body)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _: httpx.Response(status, content=content, headers={"content-type": "application/json"} | names)


def request_reply(model: AnyModel, request: ModelRequest = REQUEST) -> Reply:
    """The reply, in a new event loop."""
    return asyncio.run(model.reply(request))


def request_error(model: AnyModel, request: ModelRequest = REQUEST) -> ModelError:
    """The error that the call ends with."""
    with pytest.raises(ModelError) as caught:
        request_reply(model, request)
    return caught.value


@asynccontextmanager
async def raw_server(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncGenerator[str]:
    """A loopback server that reads one request and then runs ``talk``; yields its base URL."""
    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length"))
            await reader.readexactly(length)
            await talk(reader, writer)
        except (asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await server.wait_closed()


# -- streams ----------------------------------------------------------------------------------------------

TOOL_REQUEST = ModelRequest(REQUEST.messages, tools=(WEATHER,), max_output_tokens=500)


class ByteChunks(httpx.AsyncByteStream):
    """A response body that arrives in the given chunks."""

    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk


def streaming_model(wire: str, *chunks: bytes, kind: str = "text/event-stream") -> AnyModel:
    """A model whose server streams the given chunks."""
    headers = {"content-type": kind}
    return build_model(wire, lambda _: httpx.Response(200, stream=ByteChunks(list(chunks)), headers=headers))


async def stream_reply(model: AnyModel, request: ModelRequest = TOOL_REQUEST) -> tuple[list[StreamChunk], Reply]:
    """The chunks of a stream, and the reply at its end."""
    parts = [part async for part in model.stream(request)]
    reply = parts.pop()
    assert isinstance(reply, Reply)
    assert not any(isinstance(part, Reply) for part in parts)
    return [part for part in parts if not isinstance(part, Reply)], reply


def request_stream(model: AnyModel, request: ModelRequest = TOOL_REQUEST) -> tuple[list[StreamChunk], Reply]:
    """The chunks of a stream and its reply, in a new event loop."""
    return asyncio.run(stream_reply(model, request))


def stream_error(model: AnyModel, request: ModelRequest = TOOL_REQUEST) -> ModelError:
    """The error that a stream ends with."""
    with pytest.raises(ModelError) as caught:
        request_stream(model, request)
    return caught.value


class ScriptedStream:
    """A model that streams from a script: one list of chunks for each call.

    A reply ends the stream, an exception is raised, and a function is awaited.
    """

    name = "scripted-stream"

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.calls: list[str] = []
        self.closed = 0

    async def reply(self, request: ModelRequest) -> Reply:
        self.calls.append("whole")
        return Reply(Message.assistant("whole"))

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply, None]:
        self.calls.append("streamed")
        try:
            for entry in self.scripts[min(len(self.calls), len(self.scripts)) - 1]:
                if isinstance(entry, Exception):
                    raise entry
                if callable(entry):
                    await cast("Awaitable[object]", entry())
                else:
                    yield entry
        finally:
            self.closed += 1


async def hang() -> None:
    """Wait until cancelled."""
    await asyncio.Event().wait()
