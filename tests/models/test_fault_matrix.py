"""Every way for a model call to fail, on every wire, streamed or not, against a raw socket server.

Each case is a run of an agent whose first model call gets the fault and whose later calls get valid responses. The
fault must become the declared kind of failure, the run must continue or end as the policy says, and nothing may be
left open: no task, no busy connection, no exception.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import re
import socket
import struct
import zlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from agentfsm import Agent, AgentGuardrails, Event
from agentfsm.loop.events import Handoff, ModelReplied, RecoveryStarted, RunCompleted
from agentfsm.loop.failures import Failure, FailureKind
from agentfsm.models.http_client import HttpOptions
from agentfsm.runtime.host import Host
from agentfsm.testing import FakeClock
from tests.helpers.fake_model_server import Events, ModelOutput, encode_events, stream_events, whole_body
from tests.helpers.model_clients import MODEL_CLASSES, WIRES, AnyModel

TRANSIENT, REFUSED, OVERFLOW = "transient_provider", "provider_error", "context_overflow"

LIMIT = 50_000
"""Maximum size of a response, or of one event, for the models of these tests."""

Talk = Callable[["Case", asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        kind: The failure that it must become.
        talk: What the server does once it has the request.
        hangs: Whether it ends by a time limit alone.
        modes: In which modes it can happen.
    """

    kind: str
    talk: Talk
    hangs: bool = False
    modes: tuple[str, ...] = ("whole", "streamed")


@dataclass(frozen=True)
class Case:
    """One fault on one wire in one mode."""

    fault: str
    wire: str
    mode: str

    @property
    def streamed(self) -> bool:
        return self.mode == "streamed"

    @property
    def label(self) -> str:
        return "-".join((self.fault, self.wire, self.mode))


# -- responses of a server ---------------------------------------------------------------------------------


GOOD = ModelOutput("All is well.")


def head(status: int = 200, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def kind_of(case: Case) -> str:
    whole = "application/json"
    return whole if not case.streamed else "application/x-ndjson" if case.wire == "ollama" else "text/event-stream"


def good(case: Case) -> bytes:
    """The body of a valid response."""
    if case.streamed:
        return encode_events(case.wire, stream_events(case.wire, GOOD))
    return json.dumps(whole_body(case.wire, GOOD)).encode()


def no_end(case: Case) -> bytes:
    """A valid response without a finish reason, and with nothing in it that could be taken as complete."""
    body = whole_body(case.wire, ModelOutput(""))
    holder = body["choices"][0] if case.wire == "openai" else body
    del holder[{"openai": "finish_reason", "responses": "status", "anthropic": "stop_reason"}.get(case.wire, "done")]
    return json.dumps(body).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def forever() -> None:
    await asyncio.Event().wait()


def says(status: int, body: object = "", **headers: str) -> Talk:
    """A complete response with a status and a body."""
    content = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()

    async def talk(case: Case, writer: asyncio.StreamWriter) -> None:
        length = str(len(content))
        await send(
            writer, head(status, content_length=length, **{"content_type": "application/json"} | headers) + content
        )

    return talk


def answers(make: Callable[[Case], bytes], *, end: str = "length", **headers: str) -> Talk:
    """A response with status 200 and a body; its end is marked by its length, by chunks, or by closing the connection.

    ``cut``: a length is promised that never comes; ``half``: chunks that stop in the middle of one.
    """

    async def talk(case: Case, writer: asyncio.StreamWriter) -> None:
        body = make(case)
        named = {"content_type": kind_of(case)} | headers
        match end:
            case "length":
                await send(writer, head(content_length=str(len(body)), **named) + body)
            case "chunks":
                await send(writer, head(transfer_encoding="chunked", **named) + chunk(body) + b"0\r\n\r\n")
            case "cut":
                await send(writer, head(content_length=str(len(body) + 500), **named) + body)
                writer.close()
            case "half":
                await send(writer, head(transfer_encoding="chunked", **named) + chunk(body) + b"500\r\nabc")
                writer.close()
            case _:
                await send(writer, head(connection="close", **named) + body)
                writer.close()

    return talk


def raw(data: bytes) -> Talk:
    """These bytes, and then the connection is closed."""

    async def talk(case: Case, writer: asyncio.StreamWriter) -> None:
        await send(writer, data)
        writer.close()

    return talk


def silent_after(make: Callable[[Case], bytes]) -> Talk:
    """The start of a response, and then nothing more."""

    async def talk(case: Case, writer: asyncio.StreamWriter) -> None:
        await send(writer, make(case))
        await forever()

    return talk


def drips(make: Callable[[Case], bytes], before: Callable[[Case], bytes] = lambda case: b"") -> Talk:
    """The same few bytes repeated without end."""

    async def talk(case: Case, writer: asyncio.StreamWriter) -> None:
        await send(writer, before(case))
        while True:
            await send(writer, make(case))
            await asyncio.sleep(0.02)

    return talk


def floods(data: bytes) -> Talk:
    """Endless bytes, as fast as possible."""

    async def talk(case: Case, writer: asyncio.StreamWriter) -> None:
        await send(writer, head(content_type=kind_of(case), connection="close"))
        while True:
            await send(writer, data)

    return talk


async def reset(case: Case, writer: asyncio.StreamWriter) -> None:
    """A connection that is reset, not closed."""
    await send(writer, head(content_length="100"))
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def begun(case: Case, *, of_length: int | None = None) -> bytes:
    """The headers of a response and the start of its body."""
    body = good(case)
    part = body[: len(body) // 2] if not case.streamed else some_events(case)
    if of_length is not None:
        return head(content_type=kind_of(case), content_length=str(of_length)) + part
    return head(content_type=kind_of(case), transfer_encoding="chunked") + chunk(part)


def some_events(case: Case, count: int = 3) -> bytes:
    return encode_events(case.wire, stream_events(case.wire, GOOD)[:count])


def with_event(case: Case, event: dict[str, Any] | str) -> bytes:
    """A valid start and then this event; without streaming the event alone."""
    if not case.streamed:
        return (event if isinstance(event, str) else json.dumps(event)).encode()
    events: Events = [*stream_events(case.wire, GOOD)[:3], event, *stream_events(case.wire, GOOD)[3:]]
    return encode_events(case.wire, events)


def half(case: Case) -> bytes:
    """The first half of a valid response, truncated inside an event."""
    body = good(case)
    return body[: len(body) // 2 + (b"\n" in body[len(body) // 2 - 1 : len(body) // 2 + 1])]


def too_long_words(case: Case) -> bytes:
    """Each vendor's error for a prompt that is too long."""
    words: dict[str, Any] = {
        "openai": {"error": {"message": "no", "type": "invalid_request_error", "code": "context_length_exceeded"}},
        "responses": {"error": {"message": "Your input exceeds the context window of this model.", "code": None}},
        "anthropic": {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 > 8"},
        },
        "ollama": {"error": "input length exceeds maximum context length"},
    }
    return json.dumps(words[case.wire]).encode()


async def too_long(case: Case, writer: asyncio.StreamWriter) -> None:
    body = too_long_words(case)
    await send(writer, head(400, content_length=str(len(body)), content_type="application/json") + body)


def packed(data: bytes) -> bytes:
    return gzip.compress(data)


def bomb(case: Case) -> bytes:
    """A small body that decompresses to 40 MB of blanks."""
    engine = zlib.compressobj(9, wbits=31)
    blanks = b" " * 1_000_000
    return b"".join(engine.compress(blanks) for _ in range(40)) + engine.flush()


NO_END = {"openai": 3, "responses": 1, "anthropic": 2, "ollama": 1}
"""The number of events at the end of a stream that mark it as complete."""


def without_end(case: Case) -> bytes:
    events = stream_events(case.wire, GOOD)
    return encode_events(case.wire, events[: len(events) - NO_END[case.wire]])


def gave_up(case: Case) -> bytes:
    """The error of a server that failed while generating a response with status 200."""
    bodies: dict[str, Any] = {
        "openai": {"choices": [{"message": {"content": "Ha"}, "finish_reason": "error"}]},
        "responses": {"status": "failed", "output": [], "error": {"code": "server_error", "message": "x"}},
        "anthropic": {"type": "error", "error": {"type": "api_error", "message": "x"}},
        "ollama": {"error": {"message": "x", "code": 500}},
    }
    return json.dumps(bodies[case.wire]).encode()


BOTH, WHOLE, STREAMED = ("whole", "streamed"), ("whole",), ("streamed",)

FAULTS: dict[str, Fault] = {
    # the connection
    "hangs up at once": Fault(TRANSIENT, raw(b"")),
    "hangs up in the status line": Fault(TRANSIENT, raw(b"HTTP/1.1 20")),
    "hangs up in the head": Fault(TRANSIENT, raw(b"HTTP/1.1 200 OK\r\ncontent-ty")),
    "hangs up behind the head": Fault(TRANSIENT, raw(head(content_length="100"))),
    "is reset": Fault(TRANSIENT, reset),
    "speaks no HTTP": Fault(TRANSIENT, raw(b"\x00\x01\x02 hello\r\n\r\n")),
    "an endless head": Fault(TRANSIENT, raw(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000)),
    "says nothing": Fault(TRANSIENT, silent_after(lambda _: b""), hangs=True),
    "falls silent in the head": Fault(TRANSIENT, silent_after(lambda _: b"HTTP/1.1 200 OK\r\n"), hangs=True),
    "drips its head": Fault(TRANSIENT, drips(lambda _: b"x-a: b\r\n", lambda _: b"HTTP/1.1 200 OK\r\n"), hangs=True),
    # statuses
    **{
        f"status {s}": Fault(TRANSIENT, says(s, {"error": {"message": "busy"}})) for s in (408, 409, 425, 500, 502, 529)
    },
    "status 429 with a wait": Fault(TRANSIENT, says(429, {"error": {"message": "slow down"}}, retry_after="3")),
    "status 529 with a date": Fault(TRANSIENT, says(529, {}, retry_after="Thu, 01 Jan 1970 00:00:09 GMT")),
    "status 503 with nonsense for a wait": Fault(TRANSIENT, says(503, "<html>", retry_after="soon")),
    "status 500, packed as nobody asked": Fault(TRANSIENT, says(500, b"\x00\x01", content_encoding="br")),
    **{f"status {s}": Fault(REFUSED, says(s, {"error": {"message": "no"}})) for s in (400, 401, 403, 404, 422)},
    "status 307, elsewhere": Fault(REFUSED, says(307, "", location="http://127.0.0.1:1/")),
    "status 413": Fault(OVERFLOW, says(413, "too large")),
    "the prompt is too long": Fault(OVERFLOW, too_long),
    # bodies
    "half a body of known length": Fault(TRANSIENT, answers(half, end="cut")),
    "half a chunked body": Fault(TRANSIENT, answers(half, end="half")),
    "half a body of unknown length": Fault(TRANSIENT, answers(half, end="close")),
    "an empty body": Fault(REFUSED, answers(lambda _: b""), modes=WHOLE),
    "no JSON": Fault(REFUSED, answers(lambda _: b"hello"), modes=WHOLE),
    "NaN": Fault(REFUSED, answers(lambda _: b'{"a": NaN}'), modes=WHOLE),
    "bytes that are no letters": Fault(REFUSED, answers(lambda _: b'{"a": "\xff\xfe"}'), modes=WHOLE),
    "a web page": Fault(REFUSED, answers(lambda _: b"<html>hi</html>", content_type="text/html")),
    "brackets without an end": Fault(REFUSED, answers(lambda _: b"[" * 40_000)),
    "nothing that is a reply": Fault(REFUSED, answers(lambda _: b"{}"), modes=WHOLE),
    "a list": Fault(REFUSED, answers(lambda _: b"[1, 2]")),
    "too long a body": Fault(REFUSED, answers(lambda _: b'{"a": "' + b"x" * 2 * LIMIT + b'"}')),
    "a bomb": Fault(REFUSED, answers(bomb, content_encoding="gzip")),
    "packed as nobody asked": Fault(REFUSED, answers(good, content_encoding="br")),
    "packed wrongly": Fault(TRANSIENT, answers(good, content_encoding="gzip")),
    "packed, and cut": Fault(TRANSIENT, answers(lambda c: packed(good(c))[:-20], end="cut", content_encoding="gzip")),
    "an overloaded server": Fault(
        TRANSIENT, answers(lambda c: with_event(c, {"type": "error", "error": {"type": "overloaded_error"}}))
    ),
    "an error of status 502": Fault(
        TRANSIENT, answers(lambda c: with_event(c, {"error": {"code": 502, "message": "x"}}))
    ),
    "a wrong key, in the body": Fault(
        REFUSED, answers(lambda c: with_event(c, {"error": {"type": "authentication_error", "message": "x"}}))
    ),
    "too long, in the body": Fault(
        OVERFLOW, answers(lambda c: with_event(c, {"error": {"message": "prompt is too long: 9 tokens"}}))
    ),
    "gives up": Fault(TRANSIENT, answers(gave_up), modes=WHOLE),
    "does not say that it has ended": Fault(TRANSIENT, answers(no_end), modes=WHOLE),
    "falls silent in the body": Fault(TRANSIENT, silent_after(lambda c: begun(c, of_length=900)), hangs=True),
    "drips its body": Fault(
        TRANSIENT, drips(lambda _: b" ", lambda c: head(content_type=kind_of(c), content_length="90000")), hangs=True
    ),
    # streams
    "a stream without its end": Fault(TRANSIENT, answers(without_end, end="chunks"), modes=STREAMED),
    "a stream without its end, hung up": Fault(TRANSIENT, answers(without_end, end="close"), modes=STREAMED),
    "a stream that breaks off": Fault(TRANSIENT, answers(some_events, end="half"), modes=STREAMED),
    "a stream of nothing": Fault(TRANSIENT, answers(lambda _: b"\n\n", end="chunks"), modes=STREAMED),
    "falls silent in mid-stream": Fault(TRANSIENT, silent_after(begun), hangs=True, modes=STREAMED),
    "keeps alive and says nothing": Fault(
        TRANSIENT,
        drips(
            lambda c: chunk(b"\n" if c.wire == "ollama" else b": keep-alive\n\n"),
            lambda c: head(content_type=kind_of(c), transfer_encoding="chunked"),
        ),
        hangs=True,
        modes=STREAMED,
    ),
    "keeps alive in mid-stream": Fault(
        TRANSIENT,
        drips(lambda c: chunk(b"\n" if c.wire == "ollama" else b": keep-alive\n\n"), begun),
        hangs=True,
        modes=STREAMED,
    ),
    "an event that is no JSON": Fault(TRANSIENT, answers(lambda c: with_event(c, '{"a": ')), modes=STREAMED),
    "an event of letters that are none": Fault(
        TRANSIENT, answers(lambda c: some_events(c) + b'data: {"a": "\xff"}\n\n'), modes=STREAMED
    ),
    "an endless line": Fault(REFUSED, floods(b"data: " + b"x" * 9_000), modes=STREAMED),
    "an endless event": Fault(REFUSED, floods(b"data: " + b"x" * 9_000 + b"\n"), modes=STREAMED),
    "an error without a name": Fault(
        TRANSIENT, answers(lambda c: with_event(c, {"error": "something broke"})), modes=STREAMED
    ),
}
# JSON a line has no events of several lines, and no comments: there an endless event is many lines that are not JSON.
EXCEPTIONS = {("an endless event", "ollama"): TRANSIENT}

CASES = [Case(name, wire, mode) for name, fault in FAULTS.items() for wire in WIRES for mode in fault.modes]


# -- the server --------------------------------------------------------------------------------------------


class Server:
    """Serves the fault of each case to its first call, and valid responses to later ones; tracks its connections."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self._open: set[asyncio.Task[None]] = set()
        self._cases = {str(place): case for place, case in enumerate(CASES)}

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def all_gone(self) -> None:
        """Wait until all connections are closed."""
        async with asyncio.timeout(10):
            while self._open:
                await asyncio.wait(self._open)

    def url(self, case: Case) -> str:
        return f"http://127.0.0.1:{self.port}/{CASES.index(case)}/v1"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            while await self._serve(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self._open.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        top = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", top, re.IGNORECASE)
        assert length is not None
        await reader.readexactly(int(length[1]))
        place = top.split(b" ")[1].split(b"/")[1].decode()
        case = self._cases[place]
        self.calls[case.label] = self.calls.get(case.label, 0) + 1
        if self.calls[case.label] > 1:
            await answers(good)(case, writer)
            return True
        talking = asyncio.ensure_future(FAULTS[case.fault].talk(case, writer))
        gone = asyncio.ensure_future(_until_gone(reader, writer))
        await asyncio.wait({talking, gone}, return_when=asyncio.FIRST_COMPLETED)
        reusable = talking.done() and not writer.is_closing() and talking.exception() is None
        for task in (talking, gone):
            task.cancel()
        await asyncio.gather(talking, gone, return_exceptions=True)
        return reusable


async def _until_gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Wait until the client closes the connection, without reading more of it."""
    while not reader.at_eof() and not writer.is_closing():
        await asyncio.sleep(0.01)


# -- the matrix --------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """The result of a case."""

    events: list[Event]
    busy: list[str]


def model_of(case: Case, url: str) -> AnyModel:
    http = HttpOptions(max_body_bytes=LIMIT, max_stream_bytes=4 * LIMIT, clock=lambda: 0.0)
    return MODEL_CLASSES[case.wire]("some-model", base_url=url, api_key="sk-test-0123456789", http=http)


async def run_case(case: Case, server: Server) -> Seen:
    """Run an agent against the fault, with streaming if there is a listener."""
    hangs = FAULTS[case.fault].hangs
    limits = AgentGuardrails(llm_timeout_s=1.2 if hangs else 20, stream_heartbeat_s=0.6 if hangs else 20)
    model = model_of(case, server.url(case))
    agent = Agent(model, guardrails=limits, host=Host(clock=FakeClock()))
    events: list[Event] = []
    try:
        run = agent.run("hello")
        if case.streamed:
            events = [event async for event in run]
        else:
            result = await run
            kinds = [d.guard_result.kind for d in result.decisions if isinstance(d.guard_result, Failure)]
            events = [_Stood(kind) for kind in kinds]  # type: ignore[misc]
            events.append(result.outcome)
        busy = [repr(c) for c in connections(model) if not (c.is_idle() or c.is_closed())]
    finally:
        await model.aclose()
    return Seen(events, busy)


@dataclass
class _Stood:
    """A failure in a run without listeners."""

    kind: FailureKind


def connections(model: AnyModel) -> list[Any]:
    """The open connections of a model."""
    clients = vars(vars(model)["_http"])["_pool"]._clients
    return [c for held in clients.values() for c in held.client._transport._pool.connections]


def failures(seen: Seen) -> list[str]:
    """The kinds of failure in a run, in order."""
    found: list[str] = []
    for event in seen.events:
        match event:
            case RecoveryStarted(failure=failure) | Handoff(failure=failure) if failure is not None:
                found.append(failure.kind.value)
            case _Stood(kind):
                found.append(kind.value)
            case _:
                pass
    return found


@pytest.fixture(scope="session")
def matrix() -> dict[str, Seen | BaseException]:
    """Run all cases concurrently in one event loop, and check that nothing is left open."""
    unhandled: list[dict[str, Any]] = []

    async def main() -> dict[str, Seen | BaseException]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        turns = asyncio.Semaphore(40)

        async def one(case: Case) -> Seen:
            async with turns:
                return await run_case(case, server)

        async with Server() as server:
            found = await asyncio.gather(*(one(case) for case in CASES), return_exceptions=True)
            await server.all_gone()
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        return {case.label: seen for case, seen in zip(CASES, found, strict=True)}

    result = asyncio.run(main())
    gc.collect()  # a socket left open raises a ResourceWarning here, and warnings are errors
    assert unhandled == []
    return result


def test_the_matrix_is_large_enough() -> None:
    assert len(CASES) >= 200
    assert len({case.label for case in CASES}) == len(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_a_fault_has_its_declared_failure_kind_and_the_run_follows_the_policy(
    case: Case, matrix: dict[str, Seen | BaseException]
) -> None:
    seen = matrix[case.label]
    assert isinstance(seen, Seen), seen
    assert seen.busy == []
    kind = EXCEPTIONS.get((case.fault, case.wire), FAULTS[case.fault].kind)
    assert failures(seen)[0] == kind
    last = seen.events[-1]
    if kind == REFUSED:
        assert isinstance(last, Handoff), last
    else:
        assert isinstance(last, RunCompleted), last
        assert last.output == GOOD.text
        replied = [event for event in seen.events if isinstance(event, ModelReplied)]
        assert len(replied) == (1 if case.streamed else 0)
