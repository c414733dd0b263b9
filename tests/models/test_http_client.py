"""HTTP calls: every error has its kind and a helpful text, and no secret leaks."""

from __future__ import annotations

import asyncio
import copy
import gc
import gzip
import json
import logging
import pickle
import socket
import subprocess
import sys
import threading
import time
import traceback
import tracemalloc
import weakref
import zlib
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import AsyncMock

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm import Agent, Handoff, Host, observer
from agentfsm.errors import (
    ConfigurationError,
    ContextOverflowError,
    ModelError,
    ProviderError,
    TransientProviderError,
)
from agentfsm.loop.events import RecoveryStarted
from agentfsm.loop.messages import Message, ToolCall
from agentfsm.loop.model import ModelRequest
from agentfsm.models.error_mapping import retry_after_s
from agentfsm.models.http_client import Decompressor, HttpOptions
from agentfsm.testing import FakeClock
from tests.helpers.model_clients import (
    CANARY_KEY,
    CANARY_PROMPT,
    GOOD_BODIES,
    REQUEST,
    WIRES,
    build_model,
    raw_server,
    request_error,
    request_reply,
    respond_with,
)

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
SOON = ModelRequest(REQUEST.messages, timeout_s=0.2)


# -- statuses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 529, 599])
def test_a_retryable_status_is_transient(wire: str, status: int) -> None:
    error = request_error(build_model(wire, respond_with(status, {"error": {"message": "busy"}})))
    assert isinstance(error, TransientProviderError)
    assert error.status == status
    assert str(status) in str(error)
    assert "busy" in str(error)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("status", "code"), [(429, "insufficient_quota"), (429, "billing_hard_limit_reached"), (402, "x")]
)
def test_an_account_without_credit_is_not_retried(wire: str, status: int, code: str) -> None:
    body = {"error": {"message": "You exceeded your current quota", "type": "rate_limit", "code": code}}
    error = request_error(build_model(wire, respond_with(status, body, retry_after="1")))
    assert type(error) is ProviderError
    assert "no credit" in str(error)
    assert "exceeded your current quota" in str(error)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("status", "header", "kind"),
    [
        (500, "false", ProviderError),
        (429, "False", ProviderError),
        (429, "true", TransientProviderError),
        (400, "true", TransientProviderError),
        (503, "perhaps", TransientProviderError),
    ],
)
def test_a_server_may_say_whether_to_retry(wire: str, status: int, header: str, kind: type[ModelError]) -> None:
    answer = respond_with(status, {"error": {"message": "no"}}, x_should_retry=header)
    assert type(request_error(build_model(wire, answer))) is kind


@pytest.mark.parametrize("wire", WIRES)
def test_the_reason_of_a_provider_is_quoted_in_every_attempt(wire: str) -> None:
    reason = "the upstream region eu-7 is draining for maintenance"
    model = build_model(wire, respond_with(503, {"error": {"message": reason}}))
    told: list[str] = []
    note = observer(
        lambda event: told.append(event.failure.explanation) if isinstance(event, RecoveryStarted) else None
    )
    result = Agent(model, hooks=[note], host=Host(clock=FakeClock())).run_sync("What is the weather in Paris?")
    assert len(told) > 2
    assert all(reason in text for text in told)
    assert isinstance(result.outcome, Handoff)
    assert reason in str(result.outcome)


def test_a_host_that_does_not_exist_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for code, kind in ((socket.EAI_NONAME, ProviderError), (socket.EAI_AGAIN, TransientProviderError)):
        failing = AsyncMock(side_effect=socket.gaierror(code, "no such name"))
        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", failing)
        error = request_error(build_model("openai", base_url="http://models.example/v1"))
        assert type(error) is kind
        assert "models.example" in str(error)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 405, 422, 301, 302, 307])
def test_a_status_that_is_not_retryable_is_a_provider_error(wire: str, status: int) -> None:
    error = request_error(build_model(wire, respond_with(status, {"error": {"message": "no"}})))
    assert type(error) is ProviderError
    assert error.status == status


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"error": {"message": "too long", "code": "context_length_exceeded"}}),
        (400, {"error": {"message": "This model's maximum context length is 8192 tokens. However..."}}),
        (400, {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 2 > 1"}}),
        (400, {"error": {"message": "input length and `max_tokens` exceed context limit: 9 + 9 > 10"}}),
        (400, {"error": {"code": 400, "message": "x", "type": "exceed_context_size_error", "n_ctx": 8192}}),
        (500, {"error": {"message": "the request exceeds the available context size. try increasing it"}}),
        (200, {"error": {"message": "the request exceeds the available context size."}}),
        (400, {"object": "error", "message": "This model's maximum context length is 4096 tokens", "code": 400}),
        (400, {"error": {"message": "You passed 9 tokens. However, the model's context length is only 8 tokens"}}),
        (400, {"error": "prompt too long; exceeded max context length by 7 tokens"}),
        (400, {"error": "input exceeds context length"}),
        (413, {"error": {"message": "Request exceeds the maximum size", "type": "request_too_large"}}),
        (413, "<html>nginx</html>"),
        # too many images: old images are removed with old results
        (400, {"error": {"message": "Too much media: 0 document pages + 103 images > 100"}}),
        (400, {"error": {"message": "too many images and documents: 120 + 0 > 100"}}),
        (
            400,
            {
                "error": {
                    "message": "messages.19.content.27.image.source.base64.data: At least one of the image "
                    "dimensions exceed max allowed size for many-image requests: 2000 pixels"
                }
            },
        ),
        (400, {"error": {"message": "Too many images in request. Max is 10."}}),
        (400, {"error": {"message": "Too many images in request: 11 images provided, but the model supports 10"}}),
        (400, {"object": "error", "message": "At most 5 image(s) may be provided in one request.", "code": 400}),
        (400, {"error": {"message": "request contains 52 images, exceeding the maximum of 50 allowed per request"}}),
    ],
)
def test_every_vendors_error_text_for_a_long_prompt_is_recognised(status: int, body: object) -> None:
    error = request_error(build_model("openai", respond_with(status, body)))
    assert isinstance(error, ContextOverflowError)
    assert "too long" in str(error)


def test_too_many_tokens_per_minute_is_not_a_long_prompt() -> None:
    body = {"error": {"message": "over the maximum context length of your plan's minute", "type": "tokens"}}
    assert isinstance(request_error(build_model("openai", respond_with(429, body))), TransientProviderError)


# -- Retry-After -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"}, 90.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:01:40 -0000"}, 90.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:01 GMT"}, 0.0),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "in a while"}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("wire", WIRES)
def test_the_retry_after_header_is_read_in_seconds(wire: str, headers: dict[str, str], seconds: float | None) -> None:
    named = {name.replace("-", "_"): value for name, value in headers.items()}
    error = request_error(build_model(wire, respond_with(429, {}, **named), clock=lambda: 10.0))
    assert error.retry_after_s == seconds


def test_a_retry_date_without_a_zone_is_utc_in_any_local_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert retry_after_s({"retry-after": "Thu, 01 Jan 1970 00:01:40 -0000"}, 10.0) == 90.0
    finally:
        monkeypatch.undo()
        time.tzset()


@given(st.text(max_size=40))
def test_any_retry_after_value_is_parsed_or_ignored(text: str) -> None:
    wait = retry_after_s({"retry-after": text}, 0.0)
    assert wait is None or wait >= 0


# -- invalid responses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, TransientProviderError),
        ({"error": {"code": 429, "message": "slow down"}}, TransientProviderError),
        ({"error": {"code": "502", "message": "upstream"}}, TransientProviderError),
        ({"error": {"type": "authentication_error", "message": "who?"}}, ProviderError),
        ({"error": "something"}, ProviderError),
        ({"choices": [{"error": {"code": 503, "message": "gone"}, "finish_reason": "error"}]}, TransientProviderError),
    ],
)
def test_an_error_in_a_response_with_status_200_is_an_error(wire: str, body: object, kind: type[ModelError]) -> None:
    assert type(request_error(build_model(wire, respond_with(200, body)))) is kind


@pytest.mark.parametrize("wire", WIRES)
def test_a_null_error_field_is_not_an_error(wire: str) -> None:
    assert (
        request_reply(build_model(wire, respond_with(200, GOOD_BODIES[wire] | {"error": None}))).message.content
        == "hello"
    )


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    "body", ["", "<html>hi</html>", "{", "[1, NaN]", "\xff", "[" * 100_000, "{}", "[]", "3", "null"]
)
def test_a_response_without_a_reply_is_a_provider_error_with_a_hint(wire: str, body: str) -> None:
    error = request_error(build_model(wire, lambda _: httpx.Response(200, content=body.encode("latin-1"))))
    assert type(error) is ProviderError
    assert "base_url" in str(error)


@pytest.mark.parametrize("wire", WIRES)
def test_a_response_above_the_limit_is_rejected_however_small_when_compressed(wire: str) -> None:
    bomb = gzip.compress(b" " * 5_000_000)
    assert len(bomb) < 10_000
    error = request_error(build_model(wire, packed(bomb), max_body_bytes=1000))
    assert type(error) is ProviderError
    assert "longer than 1000 bytes" in str(error)


def packed(body: bytes, how: str = "gzip", status: int = 200) -> Callable[[httpx.Request], httpx.Response]:
    """A server that sends these bytes unchanged, and declares them as compressed."""
    headers = {"content-encoding": how}
    return lambda _: httpx.Response(status, stream=httpx.ByteStream(body), headers=headers)


def test_a_long_error_page_does_not_hide_its_status() -> None:
    error = request_error(build_model("openai", respond_with(503, "x" * 1_000_000), max_body_bytes=1000))
    assert isinstance(error, TransientProviderError)
    assert len(str(error)) < 1000


def test_a_response_that_cannot_be_decompressed_is_transient() -> None:
    with pytest.raises(TransientProviderError, match="decompressed"):
        request_reply(build_model("openai", packed(b"no gzip")))


@pytest.mark.parametrize("wbits", [15, -15])
@pytest.mark.parametrize("wire", WIRES)
def test_both_variants_of_deflate_are_decompressed(wire: str, wbits: int) -> None:
    engine = zlib.compressobj(wbits=wbits)
    body = engine.compress(json.dumps(GOOD_BODIES[wire]).encode()) + engine.flush()
    assert request_reply(build_model(wire, packed(body, "deflate"))).message.content == "hello"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_body_may_be_packed_in_several_members_and_what_follows_is_ignored(size: int) -> None:
    text = b"All is well. " * 100
    sent = gzip.compress(text[:50]) + gzip.compress(b"") + gzip.compress(text[50:])
    engine = Decompressor("gzip")
    assert (
        b"".join(piece for start in range(0, len(sent), size) for piece in engine.feed(sent[start : start + size]))
        == text
    )
    assert not engine.is_truncated
    assert list(engine.feed(b"garbage")) == []


def test_a_response_in_an_unrequested_encoding_is_rejected_and_an_error_keeps_its_status() -> None:
    """Brotli and zstd cannot be decompressed in bounded chunks, so a request does not accept them."""
    error = request_error(build_model("openai", packed(b"??", "br")))
    assert type(error) is ProviderError
    assert "compressed" in str(error)
    assert isinstance(request_error(build_model("openai", packed(b"??", "zstd", 503))), TransientProviderError)


@pytest.mark.slow
def test_a_decompression_bomb_is_decompressed_only_up_to_the_limit() -> None:
    bomb = zlib.compressobj(9, wbits=31)
    body = b"".join(bomb.compress(b" " * 1_000_000) for _ in range(300)) + bomb.flush()
    model = build_model("openai", packed(body), max_body_bytes=1_000_000)
    tracemalloc.start()
    try:
        assert "longer" in str(request_error(model))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000


def test_a_lone_surrogate_in_a_reply_is_replaced_by_one_that_can_be_stored() -> None:
    body = r'{"choices": [{"message": {"content": "\ud83d!"}, "finish_reason": "stop"}]}'
    content = request_reply(build_model("openai", respond_with(200, body))).message.content
    assert content.encode() == b"?!"


def test_a_lone_surrogate_in_a_prompt_is_sent_as_a_question_mark() -> None:
    sent: list[bytes] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(request.content)
        return httpx.Response(200, json=GOOD_BODIES["openai"])

    request_reply(build_model("openai", handler), ModelRequest((Message.user("a\ud83d"),)))
    assert json.loads(sent[0])["messages"] == [{"role": "user", "content": "a?"}]


# -- the network -------------------------------------------------------------------------------------------


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def over_raw_server(talk: Talk, request: ModelRequest = SOON) -> ModelError | str:
    """The result of a call to a server that runs ``talk`` once it has the request."""

    async def main() -> ModelError | str:
        async with raw_server(talk) as url:
            model = build_model("openai", base_url=url)
            try:
                return (await model.reply(request)).message.content
            except ModelError as error:
                return error
            finally:
                await model.aclose()

    return asyncio.run(main())


def test_a_well_behaved_raw_server_works() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = json.dumps(GOOD_BODIES["openai"]).encode()
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        await reader.read()

    assert over_raw_server(talk, REQUEST) == "hello"  # however busy the machine is


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="hangs up at once"),
        pytest.param(b"HTTP/1.1 20", id="hangs up in the status line"),
        pytest.param(HEAD + b"content-length: 500\r\n\r\n{", id="half a body of known length"),
        pytest.param(HEAD + b'transfer-encoding: chunked\r\n\r\n5\r\n{"a":\r\n', id="half a chunked body"),
        pytest.param(HEAD + b'\r\n{"choices": [', id="half a body of unknown length"),
        pytest.param(b"\x00\x01garbage\r\n\r\n", id="no HTTP at all"),
    ],
)
def test_a_connection_that_breaks_is_transient(sent: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    assert isinstance(over_raw_server(talk), TransientProviderError)


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def stop_inside_the_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"content-length: 500\r\n\r\n{")
    await asyncio.Event().wait()


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"content-length: 100000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("talk", [say_nothing, stop_inside_the_body, drip])
def test_the_deadline_applies_to_the_whole_call_however_slow_the_body(talk: Talk) -> None:
    error = over_raw_server(talk)
    assert isinstance(error, TransientProviderError)


@pytest.mark.parametrize("wire", WIRES)
def test_an_unreachable_server_is_transient_and_named(wire: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        error = request_error(build_model(wire, base_url=url))
    assert isinstance(error, TransientProviderError)
    assert url.removesuffix("/v1") in str(error)
    assert "running" in str(error)
    assert str(error).endswith("(Connection refused)")


@pytest.mark.parametrize(
    ("wire", "path"),
    [
        *(("openai", "/v1/chat/completions"), ("responses", "/v1/responses/"), ("anthropic", "/v1/messages")),
        ("ollama", "/api/chat"),
    ],
)
def test_an_address_that_names_the_whole_path_is_rejected_with_the_part_to_leave_out(wire: str, path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"base_url ends with /.*, which is added to it: leave that out"):
        build_model(wire, base_url=f"http://127.0.0.1:9{path}")


@pytest.mark.parametrize(
    ("exception", "kind", "said"),
    [
        (httpx.ConnectTimeout, TransientProviderError, "cannot connect"),
        (httpx.ReadTimeout, TransientProviderError, "nothing in time"),
        (httpx.WriteTimeout, TransientProviderError, "nothing in time"),
        (httpx.PoolTimeout, TransientProviderError, "nothing in time"),
        (httpx.WriteError, TransientProviderError, "lost"),
        (httpx.RemoteProtocolError, TransientProviderError, "does not speak HTTP: is base_url right"),
        (httpx.ProxyError, TransientProviderError, "the proxy does not connect"),
        (httpx.LocalProtocolError, ProviderError, "LocalProtocolError"),
    ],
)
def test_every_connection_error_has_its_kind(exception: type[httpx.TransportError], kind: type, said: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise exception(f"Bearer {CANARY_KEY}", request=request)

    error = request_error(build_model("openai", handler))
    assert type(error) is kind
    assert said in str(error)
    assert CANARY_KEY not in str(error)


def test_cancellation_is_not_a_failure_of_the_model() -> None:
    async def main() -> None:
        async with raw_server(say_nothing) as url:
            model = build_model("openai", base_url=url)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await model.reply(REQUEST)
            await model.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("wire", WIRES)
def test_a_redirect_is_not_followed_and_the_key_is_not_sent_there(wire: str) -> None:
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return httpx.Response(307, headers={"location": "http://elsewhere.example/v1"})

    error = request_error(build_model(wire, handler))
    assert type(error) is ProviderError
    assert "redirect" in str(error)
    assert asked == ["127.0.0.1"]


# -- event loops -------------------------------------------------------------------------------------------


class Answering(BaseHTTPRequestHandler):
    """Answers every call and keeps the connection open, as real servers do."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps(GOOD_BODIES["openai"]).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def setup(self) -> None:
        super().setup()
        self.server.opened += 1  # type: ignore[attr-defined]

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def lasting_server() -> Iterator[ThreadingHTTPServer]:
    """A server that outlives event loops; ``opened`` counts its connections."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.daemon_threads = True
    server.opened = 0  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_one_model_works_in_consecutive_event_loops_and_leaves_no_socket_open(
    lasting_server: ThreadingHTTPServer,
) -> None:
    model = build_model("openai", base_url=f"http://127.0.0.1:{lasting_server.server_port}/v1")
    for _ in range(3):
        assert request_reply(model).message.content == "hello"
        gc.collect()  # a socket left open raises a ResourceWarning here, and warnings are errors


@pytest.mark.slow
def test_a_model_drops_the_clients_of_closed_event_loops() -> None:
    model = build_model("openai", respond_with(200, GOOD_BODIES["openai"]))
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def main() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await model.reply(REQUEST)

    for _ in range(4):
        asyncio.run(main())
    gc.collect()
    assert [loop() for loop in loops[:-1]] == [None] * 3


@pytest.mark.slow
def test_one_model_works_in_event_loops_of_several_threads(lasting_server: ThreadingHTTPServer) -> None:
    model = build_model("openai", base_url=f"http://127.0.0.1:{lasting_server.server_port}/v1")
    with ThreadPoolExecutor(4) as pool:
        replies = [job.result() for job in [pool.submit(request_reply, model) for _ in range(12)]]
    assert {reply.message.content for reply in replies} == {"hello"}
    gc.collect()


def test_calls_of_one_event_loop_share_a_connection(lasting_server: ThreadingHTTPServer) -> None:
    model = build_model("openai", base_url=f"http://127.0.0.1:{lasting_server.server_port}/v1")

    async def main() -> None:
        for _ in range(3):
            await model.reply(REQUEST)

    asyncio.run(main())
    assert lasting_server.opened == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("wire", WIRES)
def test_a_closed_model_may_be_closed_again_and_used_again(wire: str) -> None:
    model = build_model(wire, respond_with(200, GOOD_BODIES[wire]))

    async def main() -> None:
        await model.aclose()
        await model.reply(REQUEST)
        await model.aclose()
        await model.aclose()
        await model.reply(REQUEST)

    asyncio.run(main())
    asyncio.run(main())


# -- secrets -----------------------------------------------------------------------------------------------


def echo(status: int) -> Callable[[httpx.Request], httpx.Response]:
    """A server that echoes the whole request, in several encodings."""

    def handler(request: httpx.Request) -> httpx.Response:
        key = request.headers.get("authorization", request.headers.get("x-api-key", ""))
        body = json.loads(request.content)
        prompt = body.get("messages", body.get("input"))[0]["content"]
        prompt = prompt if isinstance(prompt, str) else prompt[0]["text"]
        message = f"key {key} is bad; key {key[:-6]}***; you said {prompt!r}; input was {prompt[5:]}"
        return httpx.Response(status, json={"error": {"message": message}}, headers={"location": f"http://x/{key}"})

    return handler


def everything_said(error: BaseException) -> str:
    """An error as tracebacks, logs and reports show it, its whole chain included."""
    seen: list[str] = ["".join(traceback.format_exception(error))]
    link: BaseException | None = error
    while link is not None:
        seen += [str(link), repr(link), repr(vars(link)), repr(link.args)]
        link = link.__cause__ or link.__context__
    return "\n".join(seen)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("status", [200, 302, 400, 401, 403, 404, 413, 429, 500])
def test_an_error_never_contains_the_key_or_the_prompt(
    wire: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        said = everything_said(request_error(build_model(wire, echo(status))))
    for text in (said, caplog.text):
        assert CANARY_KEY not in text
        assert CANARY_KEY[:-6] not in text
        assert CANARY_PROMPT not in text
        assert "launch code" not in text
        assert "tangerine" not in text


def test_tool_arguments_and_results_are_removed_from_errors_too() -> None:
    secret = "swordfish on a bicycle"
    call = ToolCall("c1", "login", {"password": {"deep": [secret]}})
    messages = (
        Message.user("go"),
        Message.assistant("", (call,)),
        Message.user("the weather in Reykjavik is fine"),
    )
    body = {"error": {"message": f"bad: {secret} / the weather in Reykjavik is fine"}}
    text = str(request_error(build_model("openai", respond_with(400, body)), ModelRequest(messages)))
    assert secret not in text
    assert "Reykjavik" not in text


@pytest.mark.parametrize("wire", WIRES)
def test_a_lost_connection_error_holds_no_request_and_so_no_key(wire: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError(f"lost {CANARY_KEY}", request=request)

    error = request_error(build_model(wire, handler))
    assert isinstance(error, TransientProviderError)
    assert error.__cause__ is None
    assert error.__context__ is None
    assert CANARY_KEY not in everything_said(error)


@pytest.mark.parametrize("wire", WIRES)
def test_the_key_reaches_the_server_and_nothing_that_prints(wire: str, caplog: pytest.LogCaptureFixture) -> None:
    sent: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.extend(request.headers.values())
        return httpx.Response(200, json=GOOD_BODIES[wire])

    model = build_model(wire, handler)
    with caplog.at_level(logging.DEBUG):
        logging.getLogger().info("%r %s %r", model, model, vars(model))
        request_reply(model)
    assert any(CANARY_KEY in value for value in sent)
    http = vars(model)["_http"]
    shown = [repr(model), str(model), model.name, repr(vars(model)), repr(vars(http)), caplog.text]
    shown += [repr(vars(vars(http)["_auth"])), repr(model.settings)]
    assert CANARY_KEY not in "\n".join(shown)


@pytest.mark.parametrize("wire", WIRES)
def test_a_model_is_never_pickled_and_copies_share_its_key(wire: str) -> None:
    model = build_model(wire, respond_with(200, GOOD_BODIES[wire]))
    with pytest.raises(TypeError, match="never pickled") as caught:
        pickle.dumps(model)
    assert CANARY_KEY not in str(caught.value)
    assert request_reply(copy.deepcopy(model)).message.content == "hello"


@pytest.mark.parametrize("key", ["two\nlines-secret", "k\x00ey-secret", "clé-secret"])
def test_a_key_that_is_invalid_in_a_header_is_rejected_without_showing_it(key: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build_model("openai", api_key=key)
    assert "secret" not in everything_said(caught.value)


def test_blanks_around_a_key_are_removed() -> None:
    sent: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers["authorization"])
        return httpx.Response(200, json=GOOD_BODIES["openai"])

    request_reply(build_model("openai", handler, api_key=f" {CANARY_KEY}\n"))
    assert sent == [f"Bearer {CANARY_KEY}"]


# -- texts -------------------------------------------------------------------------------------------------


def test_a_rejected_key_is_described_by_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", CANARY_KEY)
    text = str(request_error(build_model("openai", respond_with(401, {}), base_url=None, api_key=None)))
    assert "OPENAI_API_KEY" in text
    assert CANARY_KEY not in text


def test_an_error_for_a_missing_key_says_how_to_pass_one() -> None:
    assert "api_key" in str(request_error(build_model("openai", respond_with(401, {}), api_key=None)))


def test_an_unknown_model_is_named() -> None:
    assert "some-model" in str(request_error(build_model("openai", respond_with(404, {}))))


@pytest.mark.parametrize(
    "options", [{"connect_timeout_s": 0}, {"max_body_bytes": -1}, {"connect_timeout_s": float("nan")}]
)
def test_options_out_of_range_are_rejected_by_name(options: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        HttpOptions(**options)  # type: ignore[arg-type]


def test_importing_the_packages_imports_no_http_library() -> None:
    code = (
        "import sys, agentfsm, agentfsm.models, agentfsm.models.model_registry\n"
        "assert 'httpx' not in sys.modules\n"
        "agentfsm.models.OpenAIChat\n"
        "assert 'httpx' in sys.modules\n"
        "assert 'resolve' in dir(agentfsm.models)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
