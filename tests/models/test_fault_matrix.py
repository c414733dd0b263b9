"""Every way for a model call to fail, on every wire, streamed or not, against a raw socket server.

Each case is a run of an agent whose first model calls get the fault and whose later calls get valid responses. The
fault must become the declared kind of failure and name a cause that a person can act on, the run must continue or end
as the policy says, and nothing may be left open: no task, no busy connection, no exception.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import re
import socket
import ssl
import struct
import zlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest

from agentfsm import Agent, AgentGuardrails, Event
from agentfsm.loop.events import Handoff, ModelReplied, RecoveryStarted, RunCompleted, RunWarning
from agentfsm.loop.failures import Failure
from agentfsm.loop.messages import Role
from agentfsm.models.http_client import HttpOptions
from agentfsm.models.providers import ApiKey
from agentfsm.runtime.host import Host
from agentfsm.testing import FakeClock
from tests.helpers.company_network import Authority, certificate_authority
from tests.helpers.event_frames import chunk_frame, event_frame
from tests.helpers.fake_model_server import Events, ModelOutput, encode_events, stream_events, stream_type, whole_body
from tests.helpers.model_clients import ALL_MODEL_CLASSES, AnyModel

TRANSIENT, REFUSED, OVERFLOW = "transient_provider", "provider_error", "context_overflow"
NONE = ""
"""A fault that is accommodated: no failure, and a warning if something was put right."""

__all__ = ["certificate_authority"]

LIMIT = 50_000
"""Maximum size of a response, or of one event, for the models of these tests."""

Talk = Callable[["Case", asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        kind: The failure that it must become, or ``NONE``.
        cause: What its explanation must contain, a regular expression; of an accommodated fault the only warning.
        talk: What the server does once it has the request.
        hangs: Whether it ends by a time limit alone.
        modes: In which modes it can happen.
        wires: On which wires it can happen.
        times: How many requests get it.
        requests: How many requests the server gets in all, if that is the point.
        handed_off: Whether the run ends with it, although its kind is retried.
        results: The results of the tools that run.
        reach: How the model reaches the server.
    """

    kind: str
    cause: str
    talk: Talk
    hangs: bool = False
    modes: tuple[str, ...] = ("whole", "streamed")
    wires: tuple[str, ...] = tuple(ALL_MODEL_CLASSES)
    times: int = 1
    requests: int | None = None
    handed_off: bool = False
    results: tuple[str, ...] = ()
    reach: Reach = field(default_factory=lambda: Reach())


@dataclass(frozen=True)
class Reach:
    """How a model reaches the server.

    Attributes:
        host: Another host than the server's, with a port, or an empty string.
        tls: Whether it speaks TLS with a server whose authority nobody knows.
        https: Whether it speaks TLS with a server that does not.
        proxy: The address of a proxy, or None.
        keys: What a function returns as its key, one after the other; empty for one fixed key.
    """

    host: str = ""
    tls: bool = False
    https: bool = False
    proxy: str | None = None
    keys: tuple[str, ...] = ()


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
    def api(self) -> str:
        """The wire whose messages it carries."""
        return "anthropic" if self.wire in ("bedrock", "vertex") else self.wire

    @property
    def label(self) -> str:
        return "-".join((self.fault, self.wire, self.mode))


# -- responses of a server ---------------------------------------------------------------------------------


GOOD = ModelOutput("All is well.")


def head(status: int = 200, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def kind_of(case: Case) -> str:
    return stream_type(case.wire) if case.streamed else "application/json"


def good(case: Case) -> bytes:
    """The body of a valid response."""
    if case.streamed:
        return encode_events(case.wire, stream_events(case.wire, GOOD))
    return json.dumps(whole_body(case.wire, GOOD)).encode()


def no_end(case: Case) -> bytes:
    """A valid response without a finish reason, and with nothing in it that could be taken as complete."""
    body = whole_body(case.wire, ModelOutput(""))
    holder = body["choices"][0] if case.wire == "openai" else body
    del holder[{"openai": "finish_reason", "responses": "status", "anthropic": "stop_reason"}.get(case.api, "done")]
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


async def streams(case: Case, writer: asyncio.StreamWriter) -> None:
    """A stream, whatever was requested."""
    await answers(good, content_type=stream_type(case.wire))(replace(case, mode="streamed"), writer)


def some_events(case: Case, count: int = 3) -> bytes:
    return encode_events(case.wire, stream_events(case.wire, GOOD)[:count])


def with_event(case: Case, event: dict[str, Any] | str) -> bytes:
    """A valid start and then this event; without streaming the event alone."""
    if not case.streamed:
        return (event if isinstance(event, str) else json.dumps(event)).encode()
    events: Events = [*stream_events(case.wire, GOOD)[:3], event, *stream_events(case.wire, GOOD)[3:]]
    return encode_events(case.wire, events)


def keep_alive(case: Case) -> bytes:
    """What keeps a connection open and is no event."""
    frames = {"ollama": b"\n", "bedrock": event_frame(b"{}", message_type="event", event_type="metering")}
    return chunk(frames.get(case.wire, b": keep-alive\n\n"))


def with_broken_letters(case: Case) -> bytes:
    """A valid start, and then an event that is not in UTF-8."""
    broken = b'{"a": "\xff"}'
    return some_events(case) + (chunk_frame(broken) if case.wire == "bedrock" else b"data: " + broken + b"\n\n")


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
    return json.dumps(words[case.api]).encode()


async def too_long(case: Case, writer: asyncio.StreamWriter) -> None:
    body = too_long_words(case)
    await send(writer, head(400, content_length=str(len(body)), content_type="application/json") + body)


def packed(data: bytes) -> bytes:
    return gzip.compress(data)


def bomb(case: Case) -> bytes:
    return blanks_packed()


@cache
def blanks_packed() -> bytes:
    """A small body that decompresses to 40 MB of blanks; made once, because this takes as long as all other cases."""
    engine = zlib.compressobj(9, wbits=31)
    blanks = b" " * 1_000_000
    return b"".join(engine.compress(blanks) for _ in range(40)) + engine.flush()


NO_END = {"openai": 3, "responses": 1, "anthropic": 2, "ollama": 1}
"""The number of events at the end of a stream that mark it as complete."""


def without_end(case: Case) -> bytes:
    events = stream_events(case.wire, GOOD)
    return encode_events(case.wire, events[: len(events) - NO_END[case.api]])


def gave_up(case: Case) -> bytes:
    """The error of a server that failed while generating a response with status 200."""
    bodies: dict[str, Any] = {
        "openai": {"choices": [{"message": {"content": "Ha"}, "finish_reason": "error"}]},
        "responses": {"status": "failed", "output": [], "error": {"code": "server_error", "message": "x"}},
        "anthropic": {"type": "error", "error": {"type": "api_error", "message": "x"}},
        "ollama": {"error": {"message": "x", "code": 500}},
    }
    return json.dumps(bodies[case.api]).encode()


# -- deviations that are accommodated ----------------------------------------------------------------------


CITIES = (("a", "weather", {"city": "Paris"}), ("b", "weather", {"city": "Rome"}))
SEEN = ("sunny in Paris", "sunny in Rome")


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def without_reason(case: Case, said: ModelOutput = GOOD) -> bytes:
    """A response that is complete, but for its finish reason."""
    holder, key = {
        "openai": ("finish_reason", None),
        "responses": ("status", None),
        "anthropic": ("stop_reason", None),
    }[case.api]
    if not case.streamed:
        body = whole_body(case.wire, said)
        (body["choices"][0] if case.api == "openai" else body)[holder] = key
        return json.dumps(body).encode()
    events = (
        [e for e in stream_events(case.wire, said) if isinstance(e, str) or e["type"] != "message_delta"]
        if (case.api == "anthropic")
        else stream_events(case.wire, said)
    )
    for event in events:
        for choice in event.get("choices", ()) if isinstance(event, dict) else ():
            choice["finish_reason"] = None
    return encode_events(case.wire, events)


def reused_index(case: Case) -> bytes:
    """Two calls, of which the second begins at the index of the first."""
    events = stream_events(case.wire, ModelOutput(calls=CITIES[:1]))
    more = stream_events(case.wire, ModelOutput(calls=CITIES[1:]))
    return encode_events(case.wire, [*events[:-3], *more[1:]])


def with_nulls(case: Case) -> bytes:
    """A response in which everything that it need not have is ``null``."""
    if not case.streamed:
        return json.dumps(_nulls(case.api, whole_body(case.wire, GOOD))).encode()
    events = stream_events(case.wire, GOOD)
    return encode_events(case.wire, [e if isinstance(e, str) else _nulls(case.api, e) for e in events])


def _nulls(api: str, body: dict[str, Any]) -> dict[str, Any]:
    optional = {
        "openai": ("content", "tool_calls", "function_call", "refusal", "reasoning_content", "audio", "annotations"),
        "responses": ("annotations", "logprobs", "encrypted_content"),
        "anthropic": ("citations", "stop_sequence", "container"),
        "ollama": ("thinking", "tool_calls", "images"),
    }[api]
    body = {"error": None, "usage": None, "system_fingerprint": None} | body
    for holder in ("message", "content_block", "item"):
        if isinstance(body.get(holder), dict):
            body[holder] = dict.fromkeys(optional) | body[holder]
    for choice in body.get("choices", ()):
        choice["logprobs"] = None
        for holder in choice.keys() & {"message", "delta"}:
            choice[holder] = dict.fromkeys(optional) | choice[holder]
    return body


async def slowly(case: Case, writer: asyncio.StreamWriter) -> None:
    """A stream that takes longer than a call without streaming may take, and never stops for long."""
    body = good(case)
    await send(writer, head(content_type=kind_of(case), transfer_encoding="chunked"))
    size = len(body) // 20 + 1
    for start in range(0, len(body), size):
        await send(writer, chunk(body[start : start + size]))
        await asyncio.sleep(1.1)
    await send(writer, b"0\r\n\r\n")


async def nothing(case: Case, writer: asyncio.StreamWriter) -> None:
    """Nothing: the request does not get here."""
    raise AssertionError("this server was not to be reached")


def exception(case: Case) -> bytes:
    """A stream of Bedrock's that ends with an exception of the service."""
    payload = b'{"message": "too many tokens"}'
    return some_events(case) + event_frame(payload, exception_type="throttlingException", message_type="exception")


def with_flipped_bit(case: Case) -> bytes:
    body = bytearray(good(case))
    body[-40] ^= 1
    return bytes(body)


LOST = "the connection was lost before the response was complete"
NOT_HTTP = "the server does not speak HTTP: is base_url right"
SILENT = r"sent no reply within [\d.]+ s|no complete response within [\d.]+ s|the stream sent nothing for [\d.]+ s"
NOT_JSON = "the response is [a-z./-]+, not JSON .*is base_url right"
NO_REPLY = "the response has no .*(does base_url speak|is Ollama at base_url)"
TOO_LONG = "longer than [0-9]+ bytes"
CORRUPT = "the stream is corrupt"
ADVICE = {
    400: "rejects the request",
    401: "rejects the API key from api_key",
    403: "no permission for this",
    404: "did not find the resource",
    422: "rejects the request",
}
FIELD = "no such field"
REASON = "the model is being moved to another accelerator"

BOTH, WHOLE, STREAMED = ("whole", "streamed"), ("whole",), ("streamed",)

FAULTS: dict[str, Fault] = {
    "a stream that flows slowly": Fault(NONE, "", slowly, modes=STREAMED, requests=1),  # first, since it takes longest
    # the connection
    "hangs up at once": Fault(TRANSIENT, LOST, raw(b"")),
    "hangs up in the status line": Fault(TRANSIENT, LOST, raw(b"HTTP/1.1 20")),
    "hangs up in the head": Fault(TRANSIENT, LOST, raw(b"HTTP/1.1 200 OK\r\ncontent-ty")),
    "hangs up behind the head": Fault(TRANSIENT, LOST, raw(head(content_length="100"))),
    "is reset": Fault(TRANSIENT, LOST, reset),
    "speaks no HTTP": Fault(TRANSIENT, NOT_HTTP, raw(b"\x00\x01\x02 hello\r\n\r\n")),
    "an endless head": Fault(TRANSIENT, NOT_HTTP, raw(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000)),
    "says nothing": Fault(TRANSIENT, SILENT, silent_after(lambda _: b""), hangs=True),
    "falls silent in the head": Fault(TRANSIENT, SILENT, silent_after(lambda _: b"HTTP/1.1 200 OK\r\n"), hangs=True),
    "drips its head": Fault(
        TRANSIENT, SILENT, drips(lambda _: b"x-a: b\r\n", lambda _: b"HTTP/1.1 200 OK\r\n"), hangs=True
    ),
    # statuses
    **{
        f"status {s}": Fault(TRANSIENT, rf"unavailable \({s}.*says: busy$", says(s, {"error": {"message": "busy"}}))
        for s in (408, 409, 425, 500, 502, 529)
    },
    "status 429 with a wait": Fault(
        TRANSIENT,
        r"called too often \(429 .*slow down; it asks to wait 3 s$",
        says(429, {"error": {"message": "slow down"}}, retry_after="3"),
    ),
    "status 529 with a date": Fault(
        TRANSIENT,
        r"unavailable \(529\); it asks to wait 9 s$",
        says(529, {}, retry_after="Thu, 01 Jan 1970 00:00:09 GMT"),
    ),
    "status 503 with nonsense for a wait": Fault(
        TRANSIENT, r"unavailable \(503 Service Unavailable\)$", says(503, "<html>", retry_after="soon")
    ),
    "status 500, packed as nobody asked": Fault(
        TRANSIENT, r"unavailable \(500 Internal Server Error\)$", says(500, b"\x00\x01", content_encoding="br")
    ),
    **{
        f"status {s}": Fault(
            REFUSED, rf"{says_what}.*\({s} .*; the server says: no$", says(s, {"error": {"message": "no"}})
        )
        for s, says_what in ADVICE.items()
    },
    "status 500, packed wrongly": Fault(
        TRANSIENT, r"unavailable \(500 Internal Server Error\)$", says(500, b"\x00\x01", content_encoding="gzip")
    ),
    "status 400, in a list": Fault(
        REFUSED,
        r"rejects the request \(400 .*; the server says: no such field$",
        says(400, [{"error": {"message": FIELD}}]),
    ),
    "status 400, with a reason from behind the gateway": Fault(
        REFUSED,
        "the server says: Provider returned error: no such field$",
        says(400, {"error": {"message": "Provider returned error", "metadata": {"raw": json.dumps({"error": FIELD})}}}),
    ),
    "status 403, on a page": Fault(
        REFUSED,
        "no permission for this.*; the server says: Blocked by ACME$",
        says(403, "<html><title>Blocked by ACME</title>", content_type="text/html"),
    ),
    "status 200, and a reason": Fault(
        REFUSED, f"{NO_REPLY}.*; the server says: no such field$", says(200, {"code": 7, "msg": FIELD}), modes=WHOLE
    ),
    "status 307, elsewhere": Fault(
        REFUSED,
        "redirects to another address.*is base_url the final address",
        says(307, "", location="http://127.0.0.1:1/"),
    ),
    "status 413": Fault(OVERFLOW, "prompt is too long", says(413, "too large")),
    "the prompt is too long": Fault(OVERFLOW, "prompt is too long", too_long),
    # bodies
    "half a body of known length": Fault(TRANSIENT, LOST, answers(half, end="cut")),
    "half a chunked body": Fault(TRANSIENT, LOST, answers(half, end="half")),
    "half a body of unknown length": Fault(
        TRANSIENT, "was truncated|ended before the reply", answers(half, end="close")
    ),
    "an empty body": Fault(REFUSED, "the response is empty.*is base_url right", answers(lambda _: b""), modes=WHOLE),
    "no JSON": Fault(REFUSED, NOT_JSON, answers(lambda _: b"hello"), modes=WHOLE),
    "NaN": Fault(REFUSED, NOT_JSON, answers(lambda _: b'{"a": NaN}'), modes=WHOLE),
    "bytes that are no letters": Fault(REFUSED, NOT_JSON, answers(lambda _: b'{"a": "\xff\xfe"}'), modes=WHOLE),
    "a web page": Fault(
        REFUSED,
        "the response is text/html, not JSON.*is base_url right",
        answers(lambda _: b"<html>hi</html>", content_type="text/html"),
    ),
    "brackets without an end": Fault(REFUSED, NOT_JSON, answers(lambda _: b"[" * 40_000)),
    "nothing that is a reply": Fault(REFUSED, NO_REPLY, answers(lambda _: b"{}"), modes=WHOLE),
    "a list": Fault(REFUSED, NO_REPLY, answers(lambda _: b"[1, 2]")),
    "too long a body": Fault(REFUSED, TOO_LONG, answers(lambda _: b'{"a": "' + b"x" * 2 * LIMIT + b'"}')),
    "a bomb": Fault(REFUSED, TOO_LONG, answers(bomb, content_encoding="gzip")),
    "packed as nobody asked": Fault(
        REFUSED, "compressed in a way that was not requested .'br'", answers(good, content_encoding="br")
    ),
    "packed wrongly": Fault(TRANSIENT, "compressed and cannot be decompressed", answers(good, content_encoding="gzip")),
    "packed, and cut": Fault(
        TRANSIENT, LOST, answers(lambda c: packed(good(c))[:-20], end="cut", content_encoding="gzip")
    ),
    "an overloaded server": Fault(
        TRANSIENT,
        r"unavailable \(529\).*overloaded_error",
        answers(lambda c: with_event(c, {"type": "error", "error": {"type": "overloaded_error"}})),
    ),
    "an error of status 502": Fault(
        TRANSIENT,
        r"unavailable \(502 Bad Gateway\); the server says: x",
        answers(lambda c: with_event(c, {"error": {"code": 502, "message": "x"}})),
    ),
    "a wrong key, in the body": Fault(
        REFUSED,
        "rejects the API key from api_key.*is it the right one",
        answers(lambda c: with_event(c, {"error": {"type": "authentication_error", "message": "x"}})),
    ),
    "too long, in the body": Fault(
        OVERFLOW,
        "prompt is too long",
        answers(lambda c: with_event(c, {"error": {"message": "prompt is too long: 9 tokens"}})),
    ),
    "gives up": Fault(TRANSIENT, "server interrupted the reply|temporarily unavailable", answers(gave_up), modes=WHOLE),
    "does not say that it has ended": Fault(
        TRANSIENT, "does not say that the reply has ended", answers(no_end), modes=WHOLE
    ),
    "falls silent in the body": Fault(TRANSIENT, SILENT, silent_after(lambda c: begun(c, of_length=900)), hangs=True),
    "drips its body": Fault(
        TRANSIENT,
        SILENT,
        drips(lambda _: b" ", lambda c: head(content_type=kind_of(c), content_length="90000")),
        hangs=True,
    ),
    # streams
    "a stream without its end": Fault(
        TRANSIENT, "the stream ended before the reply did", answers(without_end, end="chunks"), modes=STREAMED
    ),
    "a stream without its end, hung up": Fault(
        TRANSIENT, "the stream ended before the reply did", answers(without_end, end="close"), modes=STREAMED
    ),
    "a stream that breaks off": Fault(TRANSIENT, LOST, answers(some_events, end="half"), modes=STREAMED),
    "a stream of nothing": Fault(
        TRANSIENT, "the stream ended before the reply did", answers(lambda _: b"\n\n", end="chunks"), modes=STREAMED
    ),
    "falls silent in mid-stream": Fault(TRANSIENT, SILENT, silent_after(begun), hangs=True, modes=STREAMED),
    "keeps alive and says nothing": Fault(
        TRANSIENT,
        SILENT,
        drips(
            keep_alive,
            lambda c: head(content_type=kind_of(c), transfer_encoding="chunked"),
        ),
        hangs=True,
        modes=STREAMED,
    ),
    "keeps alive in mid-stream": Fault(
        TRANSIENT,
        SILENT,
        drips(keep_alive, begun),
        hangs=True,
        modes=STREAMED,
    ),
    "an event that is no JSON": Fault(TRANSIENT, CORRUPT, answers(lambda c: with_event(c, '{"a": ')), modes=STREAMED),
    "an event of letters that are none": Fault(TRANSIENT, CORRUPT, answers(with_broken_letters), modes=STREAMED),
    "an endless line": Fault(
        REFUSED,
        f"{TOO_LONG}|not an event stream of Amazon's.*is base_url right",
        floods(b"data: " + b"x" * 9_000),
        modes=STREAMED,
    ),
    "an endless event": Fault(
        REFUSED,
        f"{TOO_LONG}|{CORRUPT}|not an event stream of Amazon's.*is base_url right",
        floods(b"data: " + b"x" * 9_000 + b"\n"),
        modes=STREAMED,
    ),
    "an error without a name": Fault(
        TRANSIENT,
        "the server says: something broke",
        answers(lambda c: with_event(c, {"error": "something broke"})),
        modes=STREAMED,
    ),
    # accounts and keys
    "an exhausted quota": Fault(
        REFUSED,
        "has no credit.*check its billing.*You exceeded your current quota",
        says(429, {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}),
        requests=1,
    ),
    "says not to try again": Fault(
        REFUSED,
        "the server says: gone for today",
        says(503, {"error": {"message": "gone for today"}}, x_should_retry="false"),
        requests=1,
    ),
    "a reason in every attempt": Fault(
        TRANSIENT, REASON, says(503, {"error": {"message": REASON}}), times=9, requests=4, handed_off=True
    ),
    "a wait beyond the run's time": Fault(
        TRANSIENT,
        "too often .429 .*slow down; it asks to wait 7200 s",
        says(429, {"error": {"message": "slow down"}}, retry_after="7200"),
        requests=1,
        handed_off=True,
    ),
    "an expired key": Fault(
        NONE, "", says(401, {"error": {"message": "expired"}}), requests=2, reach=Reach(keys=("old-key-1", "new-key-2"))
    ),
    "a key that stays rejected": Fault(
        REFUSED,
        "rejects the API key from api_key.*is it the right one, and still valid",
        says(401, {"error": {"message": "expired"}}),
        times=9,
        requests=2,
        reach=Reach(keys=("old-key-1", "new-key-2", "newer-key-3")),
    ),
    # the way to the server
    "a certificate of an unknown authority": Fault(
        REFUSED,
        "certificate of https://.* cannot be verified .*--ca-bundle",
        nothing,
        requests=0,
        reach=Reach(tls=True),
    ),
    "TLS with a server that has none": Fault(
        REFUSED,
        "does not speak TLS: should its address begin with http://",
        nothing,
        requests=0,
        reach=Reach(https=True),
    ),
    "an unknown host": Fault(
        REFUSED, "there is no host 'nowhere.invalid'", nothing, requests=0, reach=Reach(host="nowhere.invalid")
    ),
    "nothing at the port": Fault(
        TRANSIENT,
        "cannot connect to http://127.0.0.1:1/.*base_url right",
        nothing,
        requests=0,
        handed_off=True,
        reach=Reach(host="127.0.0.1:1"),
    ),
    "a dead proxy": Fault(
        TRANSIENT,
        "the proxy does not connect to .*is it running",
        nothing,
        requests=0,
        handed_off=True,
        reach=Reach(proxy="http://127.0.0.1:1"),
    ),
    # deviations
    "packed, and cut in the middle, with the length of the half": Fault(
        TRANSIENT,
        "truncated|ended before the reply",
        answers(lambda c: packed(good(c))[: len(packed(good(c))) // 2], content_encoding="gzip"),
    ),
    "packed, and without the sum of the pack": Fault(
        NONE, "", answers(lambda c: packed(good(c))[:-8], content_encoding="gzip"), requests=1
    ),
    "no finish reason": Fault(
        NONE,
        "gave no finish reason",
        answers(without_reason),
        wires=("openai", "anthropic", "bedrock", "vertex"),
        requests=1,
    ),
    "no finish reason, whole": Fault(
        NONE, "gave no finish reason", answers(without_reason), modes=WHOLE, wires=("responses",), requests=1
    ),
    "calls without a finish reason": Fault(
        NONE,
        "gave no finish reason",
        answers(lambda c: without_reason(c, ModelOutput(calls=CITIES))),
        wires=("openai", "anthropic", "bedrock", "vertex"),
        requests=2,
        results=SEEN,
    ),
    "a reused index": Fault(
        NONE, "index", answers(reused_index), modes=STREAMED, wires=("openai",), requests=2, results=SEEN
    ),
    "a stream, though a whole reply was requested": Fault(
        NONE, "", streams, modes=WHOLE, wires=("openai", "responses", "anthropic", "ollama", "vertex"), requests=1
    ),
    "a usage that no model can have": Fault(
        NONE,
        "",
        answers(lambda c: good(c).replace(b" 11", b" 1" + b"0" * 30)),
        wires=("openai", "responses", "anthropic", "ollama", "vertex"),
        requests=1,
    ),
    "packed in two members": Fault(
        NONE, "", answers(lambda c: packed(good(c)[:50]) + packed(good(c)[50:]), content_encoding="gzip"), requests=1
    ),
    "null for what is not there": Fault(NONE, "", answers(with_nulls), requests=1),
    # the frames of Bedrock
    "an exception in the stream": Fault(
        TRANSIENT,
        "called too often .429 .*; the server says: too many tokens",
        answers(exception),
        modes=STREAMED,
        wires=("bedrock",),
    ),
    "a flipped bit": Fault(TRANSIENT, CORRUPT, answers(with_flipped_bit), modes=STREAMED, wires=("bedrock",)),
}
# JSON a line has no events of several lines, and no comments: there an endless event is many lines that are not JSON.
EXCEPTIONS = {("an endless event", "ollama"): TRANSIENT}

CASES = [Case(name, wire, mode) for name, fault in FAULTS.items() for wire in fault.wires for mode in fault.modes]


# -- the server --------------------------------------------------------------------------------------------


class Server:
    """Serves the fault of each case to its first calls, and valid responses to later ones; tracks its connections.

    Args:
        context: For the second port, which speaks TLS.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self.calls: dict[str, int] = {}
        self._open: set[asyncio.Task[None]] = set()
        self._cases = {str(place): case for place, case in enumerate(CASES)}

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self._tls_server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._context)
        return self

    async def __aexit__(self, *raised: object) -> None:
        for server in (self._server, self._tls_server):
            server.close()
            await server.wait_closed()

    async def all_gone(self) -> None:
        """Wait until all connections are closed."""
        async with asyncio.timeout(10):
            while self._open:
                await asyncio.wait(self._open)

    def url(self, case: Case) -> str:
        reach = FAULTS[case.fault].reach
        port = (self._tls_server if reach.tls else self._server).sockets[0].getsockname()[1]
        scheme = "https" if reach.tls or reach.https else "http"
        return f"{scheme}://{reach.host or f'127.0.0.1:{port}'}/{CASES.index(case)}/v1"

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
        first = await reader.readexactly(1)
        if first == b"\x16":  # a TLS handshake, which servers without TLS take for a bad request
            await send(writer, head(400, connection="close"))
            return False
        top = first + await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", top, re.IGNORECASE)
        assert length is not None
        await reader.readexactly(int(length[1]))
        place = top.split(b" ")[1].split(b"/")[1].decode()
        case = self._cases[place]
        self.calls[case.label] = self.calls.get(case.label, 0) + 1
        if self.calls[case.label] > FAULTS[case.fault].times:
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
    results: tuple[str, ...]
    busy: list[str]


def model_of(case: Case, url: str) -> AnyModel:
    reach = FAULTS[case.fault].reach
    http = HttpOptions(max_body_bytes=LIMIT, max_stream_bytes=4 * LIMIT, clock=lambda: 0.0, proxy=reach.proxy)
    keys = iter(reach.keys)
    key: ApiKey = (lambda: next(keys)) if reach.keys else "sk-test-0123456789"
    return ALL_MODEL_CLASSES[case.wire]("some-model", base_url=url, api_key=key, http=http)


async def run_case(case: Case, server: Server) -> Seen:
    """Run an agent against the fault, with streaming if there is a listener."""
    fault = FAULTS[case.fault]
    timeout_s, heartbeat_s = (2.4, 1.2) if fault.hangs else (20, 60) if fault.talk is slowly else (60, 60)
    limits = AgentGuardrails(llm_timeout_s=timeout_s, stream_heartbeat_s=heartbeat_s, max_execution_time_s=600)
    model = model_of(case, server.url(case))
    host = Host(clock=FakeClock(), watchdog_s=None)  # hundreds of runs at once may well keep a loop busy for a second
    agent = Agent(model, tools=[weather], guardrails=limits, host=host)
    events: list[Event] = []
    try:
        run = agent.run("hello")
        if case.streamed:
            events = [event async for event in run]
        result = await run
        if not case.streamed:
            found = [d.guard_result for d in result.decisions if isinstance(d.guard_result, Failure)]
            events = [_Stood(failure) for failure in found]  # type: ignore[misc]
            events.append(result.outcome)
        busy = [repr(c) for c in connections(model) if not (c.is_idle() or c.is_closed())]
    finally:
        await model.aclose()
    results = tuple(message.content for message in result.messages if message.role is Role.TOOL)
    return Seen(events, results, busy)


@dataclass
class _Stood:
    """A failure in a run without listeners."""

    failure: Failure


def connections(model: AnyModel) -> list[Any]:
    """The open connections of a model."""
    clients = vars(vars(model)["_http"])["_pool"]._clients
    transports = [
        transport
        for held in clients.values()
        for transport in (held.client._transport, *held.client._mounts.values())
        if transport is not None
    ]
    return [connection for transport in transports for connection in transport._pool.connections]


def failures(seen: Seen) -> list[Failure]:
    """The failures in a run, in order."""
    found: list[Failure] = []
    for event in seen.events:
        match event:
            case RecoveryStarted(failure=failure) | Handoff(failure=failure) | _Stood(failure) if failure:
                found.append(failure)
            case _:
                pass
    return found


def run_all(authority: Authority) -> dict[str, tuple[Seen | BaseException, int]]:
    """The result of every case, and how many requests the server got.

    All run concurrently in one event loop, and nothing may be left open.
    """
    unhandled: list[dict[str, Any]] = []

    async def main() -> dict[str, tuple[Seen | BaseException, int]]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        working, waiting = asyncio.Semaphore(8), asyncio.Semaphore(40)  # few, so that nobody waits long for this loop

        async def one(case: Case) -> Seen:
            fault = FAULTS[case.fault]
            async with waiting if fault.hangs or fault.talk is slowly else working:
                return await run_case(case, server)

        async with Server(authority.context) as server:
            found = await asyncio.gather(*(one(case) for case in CASES), return_exceptions=True)
            await server.all_gone()
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        return {c.label: (seen, server.calls.get(c.label, 0)) for c, seen in zip(CASES, found, strict=True)}

    blanks_packed()  # which would hold up all the others for a second or more
    result = asyncio.run(main())
    gc.collect()  # a socket left open raises a ResourceWarning here, and warnings are errors
    assert unhandled == []
    return result


def _unknown_host(look_up: Callable[..., Any]) -> Callable[..., Any]:
    """Name servers that say of one host that it does not exist, also on a machine without a network."""

    def find(host: Any, *more: Any, **named: Any) -> Any:
        if host in ("nowhere.invalid", b"nowhere.invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(host, *more, **named)

    return find


def test_the_matrix_is_large_enough() -> None:
    assert len(CASES) >= 800
    assert len({case.label for case in CASES}) == len(CASES)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_fault_has_its_declared_failure_kind_and_cause_and_the_run_follows_the_policy(
    authority: Authority, counted: Callable[[str], None]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", _unknown_host(socket.getaddrinfo))
        found = run_all(authority)
    wrong: dict[str, str] = {}
    for case in CASES:
        try:
            check(case, *found[case.label])
        except AssertionError as error:
            wrong[case.label] = str(error)
    assert wrong == {}
    counted(f"faults of servers: {len(CASES)} cases, {len(FAULTS)} faults on {len(ALL_MODEL_CLASSES)} wires")


def check(case: Case, seen: Seen | BaseException, requests: int) -> None:
    fault = FAULTS[case.fault]
    assert isinstance(seen, Seen), seen
    assert seen.busy == []
    assert fault.requests in (None, requests)
    kind = EXCEPTIONS.get((case.fault, case.wire), fault.kind)
    found, last = failures(seen), seen.events[-1]
    if kind == NONE:
        assert found == []
        warnings = [event.text for event in seen.events if isinstance(event, RunWarning)]
        expected = [True] if fault.cause and case.streamed else []  # without a listener nobody is warned
        assert [bool(re.search(fault.cause, text)) for text in warnings] == expected
    else:
        assert found[0].kind == kind
        assert [each.explanation for each in found if not re.search(fault.cause, each.explanation)] == []
    assert seen.results == fault.results
    if kind == REFUSED or fault.handed_off:
        assert isinstance(last, Handoff), last
    else:
        assert isinstance(last, RunCompleted), last
        assert last.output == GOOD.text
        replied = [event for event in seen.events if isinstance(event, ModelReplied)]
        assert len(replied) == (0 if not case.streamed else 2 if fault.results else 1)
