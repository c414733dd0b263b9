"""Model clients on a fake HTTP transport, a raw loopback server, and canary secrets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from agentfsm.errors import ModelError
from agentfsm.loop.messages import Message, Reply
from agentfsm.loop.model import ModelRequest, ToolSpec
from agentfsm.models import AnthropicMessages, OllamaChat, OpenAIChat, OpenAIResponses
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
MODEL_CLASSES = {
    "openai": OpenAIChat,
    "responses": OpenAIResponses,
    "anthropic": AnthropicMessages,
    "ollama": OllamaChat,
}

Handler = Callable[[httpx.Request], httpx.Response]
AnyModel = OpenAIChat | OpenAIResponses | AnthropicMessages | OllamaChat


def build_model(
    wire: str,
    handler: Handler | None = None,
    *,
    base_url: str | None = "http://127.0.0.1:9/v1",
    api_key: str | None = CANARY_KEY,
    max_body_bytes: int = 1_000_000,
    clock: Callable[[], float] = lambda: 0.0,
) -> AnyModel:
    """A model of one wire, on a fake transport where a handler is given, else on the network."""
    http = HttpOptions(
        transport=None if handler is None else httpx.MockTransport(handler),
        max_body_bytes=max_body_bytes,
        clock=clock,
    )
    return MODEL_CLASSES[wire]("some-model", base_url=base_url, api_key=api_key, http=http)


def respond_with(status: int, body: object = None, **headers: str) -> Handler:
    """A handler that always gives one answer; a body of type str is sent as it is."""
    content = body if isinstance(body, str) else json.dumps(body)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _: httpx.Response(status, content=content, headers={"content-type": "application/json"} | names)


def request_reply(model: AnyModel, request: ModelRequest = REQUEST) -> Reply:
    """The reply, in an event loop of its own."""
    return asyncio.run(model.reply(request))


def request_error(model: AnyModel, request: ModelRequest = REQUEST) -> ModelError:
    """The error that the call ends in."""
    with pytest.raises(ModelError) as caught:
        request_reply(model, request)
    return caught.value


@asynccontextmanager
async def raw_server(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncGenerator[str]:
    """A server on loopback that reads one request and then does what ``talk`` does; gives its base URL."""
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
