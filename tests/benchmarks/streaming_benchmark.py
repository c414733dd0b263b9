"""Streaming and requests: how time and memory grow, run with ``make bench``.

Each figure stands next to what it should be compared with, measured in the same process.
"""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import httpx

from agentfsm import Agent, AgentGuardrails, Message, ModelRequest, ToolSpec, tool
from agentfsm.loop.messages import Reply, Role, ToolCall, Transcript
from agentfsm.models import AnthropicMessages, OllamaChat, OpenAIChat, OpenAIResponses
from agentfsm.models.http_client import HttpOptions

WIRES: dict[str, Any] = {
    "openai": OpenAIChat,
    "openai-responses": OpenAIResponses,
    "anthropic": AnthropicMessages,
    "ollama": OllamaChat,
}
PIECE = "twenty letters more "
KEY = "k" * 20


def events(wire: str) -> tuple[str, str, str]:
    """The start of a stream of a wire, a chunk with some text, and its end."""
    piece = json.dumps(PIECE)
    match wire:
        case "openai":
            chunk = 'data: {{"choices":[{{"index":0,"delta":{{"content":{}}},"finish_reason":{}}}]}}\n\n'
            return "", chunk.format(piece, "null"), chunk.format('""', '"stop"') + "data: [DONE]\n\n"
        case "openai-responses":
            item: dict[str, Any] = {"type": "message", "id": "m", "role": "assistant", "content": []}
            begin = {"type": "response.output_item.added", "output_index": 0, "item": item}
            delta = f'data: {{"type":"response.output_text.delta","output_index":0,"delta":{piece}}}\n\n'
            end = {"type": "response.completed", "response": {"status": "completed"}}
            return f"data: {json.dumps(begin)}\n\n", delta, f"data: {json.dumps(end)}\n\n"
        case "anthropic":
            begin = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
            kind = '"delta":{"type":"text_delta","text":'
            delta = f'event: x\ndata: {{"type":"content_block_delta","index":0,{kind}{piece}}}}}\n\n'
            end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}
            stop = 'data: {"type":"message_stop"}\n\n'
            return f"data: {json.dumps(begin)}\n\n", delta, f"data: {json.dumps(end)}\n\n{stop}"
        case _:
            line = f'{{"message":{{"role":"assistant","content":{piece}}},"done":false}}\n'
            return "", line, '{"message":{"role":"assistant","content":""},"done":true,"done_reason":"stop"}\n'


class Body(httpx.AsyncByteStream):
    """A stream of a given text size in chunks of 20 characters, in blocks as a socket returns them."""

    def __init__(self, wire: str, letters: int) -> None:
        self._begin, self._piece, self._end = (part.encode() for part in events(wire))
        self._pieces = letters // len(PIECE)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._begin or b"\n"
        block = 64 * 1024 // len(self._piece)
        for at in range(0, self._pieces, block):
            yield self._piece * min(block, self._pieces - at)
        yield self._end


async def stream(wire: str, letters: int) -> int:
    """The number of text deltas that an observer gets for a given text size."""
    handler = httpx.MockTransport(lambda _: httpx.Response(200, stream=Body(wire, letters)))
    model = WIRES[wire]("m", base_url="http://127.0.0.1:9", api_key=KEY, http=HttpOptions(transport=handler))
    told = 0
    async for piece in model.stream(ModelRequest((Message.user("go"),), timeout_s=600)):
        told += 1
        if isinstance(piece, Reply):
            assert len(piece.message.content) == letters // len(PIECE) * len(PIECE)
    await model.aclose()
    return told


def seconds_of(work: Callable[[], Awaitable[object]]) -> float:
    """The least duration, in seconds."""
    times: list[float] = []
    for _ in range(2):
        start = time.perf_counter()
        asyncio.run(_awaited(work))
        times.append(time.perf_counter() - start)
    return min(times)


def megabytes_of(work: Callable[[], Awaitable[object]]) -> float:
    """The peak memory; measured in a run of its own, because measuring slows it down."""
    tracemalloc.start()
    try:
        asyncio.run(_awaited(work))
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


async def _awaited(work: Callable[[], Awaitable[object]]) -> None:
    await work()


def bench_stream() -> None:
    """Time and memory of a stream of deltas, by size."""
    small, large = 2_500_000, 10_000_000
    print("A stream of text in pieces of 20 letters: 10 MB of it next to 2.5 MB, four times the size")
    print(
        f"{'wire':>18} {'2.5 MB':>8} {'10 MB':>8} {'time':>8} {'us a piece':>11} {'peak':>8} {'peak':>8} {'memory':>8}"
    )
    for wire in WIRES:
        times = [seconds_of(partial(stream, wire, size)) for size in (small, large)]
        peaks = [megabytes_of(partial(stream, wire, size)) for size in (small, large)]
        print(
            f"{wire:>18} {times[0]:>6.2f} s {times[1]:>6.2f} s {'x':>4}{times[1] / times[0]:>4.1f}"
            f" {times[1] / large * len(PIECE) * 1e6:>11.1f}"
            f" {peaks[0]:>5.0f} MB {peaks[1]:>5.0f} MB {'x':>4}{peaks[1] / peaks[0]:>4.1f}"
        )
    print()


# -- many runs at once -------------------------------------------------------------------------------------


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A chat completions server: two tool calls one after the other, then an answer; streamed if requested."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length"))
            body = json.loads(await reader.readexactly(length))
            step = sum(message["role"] == "tool" for message in body["messages"])
            delta: dict[str, Any] = {"content": "All is done."}
            if step < 2:
                function = {"name": "add", "arguments": json.dumps({"a": step, "b": 1})}
                delta = {"tool_calls": [{"index": 0, "id": f"c{step}", "type": "function", "function": function}]}
            choice = {"index": 0, "delta": delta, "finish_reason": "stop"}
            events = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n".encode()
            top = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {len(events)}\r\n\r\n"
            writer.write(top.encode() + events)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def many_runs(runs: int) -> float:
    """Seconds for a number of concurrent, observed runs of three model calls each, over sockets."""
    served: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.add(asyncio.ensure_future(serve(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    model = OpenAIChat("m", base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY)
    agent = Agent(model, tools=[add], guardrails=AgentGuardrails(llm_timeout_s=120))

    async def one() -> None:
        run = agent.run("go")
        async for _ in run:
            pass
        assert (await run).output == "All is done."

    await one()
    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(runs)))
    seconds = time.perf_counter() - start
    await model.aclose()
    await asyncio.gather(*served)
    server.close()
    await server.wait_closed()
    return seconds


def bench_many_runs() -> None:
    """Many runs in one event loop, with the server in the same process."""
    print("Runs at once on one event loop, three streamed calls each, the server in the same process")
    base = 0.0
    for runs in (10, 50, 200):
        each = asyncio.run(many_runs(runs)) / runs * 1e3
        base = base or each
        print(f"{runs:>6} runs: {each:>6.1f} ms a run  ({each / base:.2f} of that of 10)")
    print()


# -- building a request ------------------------------------------------------------------------------------


WEATHER = ToolSpec("weather", "Tells the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})


def build(wire: str, steps: int) -> tuple[float, float, int]:
    """The microseconds to build the request of a step, the microseconds to copy its bytes, and its size in bytes."""
    model = WIRES[wire]("m", base_url="http://127.0.0.1:9", api_key=KEY)
    said = [Message.system("Be brief."), Message.user("Go.")]
    memo: dict[object, object] = {}
    times: list[float] = []
    content = b""
    for step in range(steps + 5):
        said.append(Message.assistant("Looking.", (ToolCall(f"c{step}", "weather", {"city": "Paris", "n": step}),)))
        said.append(Message(Role.TOOL, "sunny and warm " * 20, tool_call_id=f"c{step}", name="weather"))
        request = ModelRequest(Transcript(said, len(said)), tools=(WEATHER,), cache=memo)
        start = time.perf_counter()
        content = model._request_body(request, stream=True)
        times.append(time.perf_counter() - start)
    copies: list[float] = []
    for _ in range(20):
        start = time.perf_counter()
        bytearray(content)
        copies.append(time.perf_counter() - start)
    return min(times[-6:]) * 1e6, min(copies) * 1e6, len(content)


def bench_requests() -> None:
    """Building a request late in a run, relative to early in the run."""
    print("Building the request of a step, microseconds; beyond: less one copy of the bytes that it sends")
    print(f"{'wire':>18} {'step 10':>9} {'bytes':>9} {'step 1000':>10} {'bytes':>9} {'beyond / beyond':>16}")
    for wire in WIRES:
        early, late = (min(build(wire, steps) for _ in range(3)) for steps in (10, 1000))
        beyond = (late[0] - late[1]) / (early[0] - early[1])
        print(f"{wire:>18} {early[0]:>9.1f} {early[2]:>9,} {late[0]:>10.1f} {late[2]:>9,} {beyond:>16.2f}")
    print()


if __name__ == "__main__":
    bench_stream()
    bench_many_runs()
    bench_requests()
