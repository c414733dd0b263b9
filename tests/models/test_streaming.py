"""Streamed replies equal unstreamed ones, and streams of real servers are understood."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfsm.errors import ContextOverflowError, ModelError, ProviderError, TransientProviderError
from agentfsm.loop.messages import FinishReason, ToolCall, Usage
from agentfsm.loop.model import KeepAlive, ReasoningChunk, StreamChunk, TextChunk, ToolCallChunk
from agentfsm.models.openai_chat import ChatAccumulator
from tests.helpers.fake_model_server import (
    FramingStyle,
    ModelOutput,
    encode_events,
    stream_events,
    stream_type,
    whole_body,
)
from tests.helpers.model_clients import (
    GOOD_BODIES,
    TOOL_REQUEST,
    WIRES,
    AnyModel,
    build_model,
    request_error,
    request_reply,
    request_stream,
    respond_with,
    stream_error,
    stream_reply,
    streaming_model,
)

SSE_WIRES = [wire for wire in WIRES if wire != "ollama"]


def text_of(received: list[StreamChunk], kind: type[TextChunk] | type[ReasoningChunk] = TextChunk) -> str:
    return "".join(piece.text for piece in received if isinstance(piece, kind))


# -- streamed equals unstreamed ----------------------------------------------------------------------------


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ["\u2028\u2029\x85", "😀 naïve 漢字 🏳️‍🌈", "data: [DONE]\n\n", '{"a": "\\u0000"}', "\r\n\r\n", "\ufeff"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), values, max_size=3
)
calls = st.lists(arguments, max_size=3).map(
    lambda several: tuple((f"c{i}", f"tool_{i % 2}", a) for i, a in enumerate(several))
)
replies = st.builds(
    ModelOutput,
    text=words,
    thought=words,
    calls=calls,
    finish=st.sampled_from(["stop", "stop", "length"]),
    prompt_tokens=st.integers(0, 10**6),
    reply_tokens=st.integers(0, 499),
)
styles = st.builds(
    FramingStyle,
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    between=st.sampled_from(["", ": keep-alive", ":", "retry: 3"]),
    ascii=st.booleans(),
    lines=st.sampled_from([1, 2]),
    names=st.booleans(),
    space=st.sampled_from(["", " "]),
    bom=st.booleans(),
)


def cut_in_utf16(text: str, sizes: Iterator[int]) -> list[str]:
    """Split like a server that counts in UTF-16: a character outside the basic plane may be split in two."""
    units = text.encode("utf-16-le", "surrogatepass")
    parts: list[str] = []
    while units:
        size = 2 * next(sizes)
        parts.append(units[:size].decode("utf-16-le", "surrogatepass"))
        units = units[size:]
    return parts


@pytest.mark.slow
@given(wire=st.sampled_from(WIRES), model_output=replies, style=styles, data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_streamed_reply_equals_the_unstreamed_one_for_any_chunking(
    wire: str, model_output: ModelOutput, style: FramingStyle, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=9))
    endless = (size for _ in iter(int, 1) for size in sizes)
    if wire == "ollama" and style.end == "\r":
        style = FramingStyle(ascii=style.ascii)
    safe = FramingStyle(style.end, style.between, True, style.lines, style.names, style.space, style.bom)
    sent = encode_events(wire, stream_events(wire, model_output, lambda text: cut_in_utf16(text, endless)), safe)
    if style.ascii is False:  # split between characters, and send them unescaped
        cut = lambda text: [text[i : i + sizes[0]] for i in range(0, len(text), sizes[0])]  # noqa: E731
        sent = encode_events(wire, stream_events(wire, model_output, cut), style)
    places = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=12)))
    chunks = [sent[a:b] for a, b in zip([0, *places], [*places, len(sent)], strict=True)]
    whole = asyncio.run(
        build_model(wire, lambda _: httpx.Response(200, json=whole_body(wire, model_output))).reply(TOOL_REQUEST)
    )

    received, reply = request_stream(streaming_model(wire, *chunks))

    assert reply == whole
    assert text_of(received) == model_output.text
    blank = (
        wire == "anthropic" and not model_output.text.strip()
    )  # a blank block is dropped: the API would reject it later
    assert reply.message.content == ("" if blank else model_output.text)
    assert text_of(received, ReasoningChunk) == model_output.thought
    called = [(call.name, dict(call.arguments)) for call in reply.message.tool_calls]
    assert called == [(name, args) for _, name, args in model_output.calls]
    for place, (_, name, args) in enumerate(model_output.calls):
        shown = [piece for piece in received if isinstance(piece, ToolCallChunk) and piece.index == place]
        assert {piece.name for piece in shown} == {name}
        assert json.loads("".join(piece.arguments for piece in shown) or "{}") == args
    assert reply.usage == Usage(model_output.prompt_tokens, model_output.reply_tokens)


@pytest.mark.parametrize("wire", WIRES)
def test_every_byte_may_be_a_chunk(wire: str) -> None:
    model_output = ModelOutput("naïve 😀\u2028", "hm 漢", (("c1", "weather", {"city": "Łódź 😀"}),))
    sent = encode_events(wire, stream_events(wire, model_output))
    received, reply = request_stream(streaming_model(wire, *(sent[i : i + 1] for i in range(len(sent)))))
    assert reply.message.content == text_of(received) == "naïve 😀\u2028"
    assert reply.message.tool_calls == (ToolCall("c1", "weather", {"city": "Łódź 😀"}),)
    assert any(isinstance(piece, KeepAlive) for piece in received)


@pytest.mark.parametrize("wire", WIRES)
def test_a_lone_surrogate_in_a_stream_is_a_question_mark(wire: str) -> None:
    model_output = ModelOutput("half \ud83d of it")
    sent = encode_events(wire, stream_events(wire, model_output), FramingStyle(ascii=True))
    received, reply = request_stream(streaming_model(wire, sent))
    assert reply.message.content == "half ? of it"
    text_of(received).encode()


# -- the end of a stream -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
def test_a_stream_that_ends_before_the_reply_does_is_transient(wire: str) -> None:
    events = stream_events(wire, ModelOutput("Hello there", "hm", (("c1", "weather", {"city": "Paris"}),)))
    enough = {"openai": 2, "anthropic": 1}.get(wire, 0)  # optional: [DONE] and usage, message_stop
    for kept in range(len(events)):
        model = streaming_model(wire, encode_events(wire, events[:kept]))
        if kept < len(events) - enough:
            if kept:
                assert isinstance(stream_error(model), TransientProviderError), kept
        else:
            if kept == len(events) - 2 and wire == "openai":
                continue
            assert request_stream(model)[1].message.content == "Hello there"


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("wire", WIRES)
def test_a_stream_truncated_anywhere_is_never_taken_for_a_complete_reply(wire: str, step: int) -> None:
    model_output = ModelOutput("Hello", "", (("c1", "weather", {"city": "Paris"}),))
    sent = encode_events(wire, stream_events(wire, model_output))
    for end in range(len(sent) - 1, 0, -step):
        try:
            reply = request_stream(streaming_model(wire, sent[:end]))[1]
        except TransientProviderError:
            continue
        assert reply.message.content == "Hello"
        assert reply.message.tool_calls == (ToolCall("c1", "weather", {"city": "Paris"}),)


@pytest.mark.parametrize("wire", WIRES)
def test_an_empty_stream_is_a_failure(wire: str) -> None:
    assert "base_url" in str(stream_error(streaming_model(wire, b""))) or isinstance(
        stream_error(streaming_model(wire, b"")), TransientProviderError
    )
    assert isinstance(stream_error(streaming_model(wire, b": ping\n\n" if wire != "ollama" else b"\n")), ModelError)


def chat(*deltas: dict[str, Any], finish: str | None = "tool_calls", done: bool = True) -> AnyModel:
    """A chat completions stream of these deltas."""
    chunks: list[dict[str, Any] | str] = [
        {"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas
    ]
    if finish is not None:
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return streaming_model("openai", encode_events("openai", [*chunks, "[DONE]"] if done else chunks))


def test_a_stream_that_ends_with_neither_a_finish_reason_nor_the_done_marker_is_not_a_success() -> None:
    assert isinstance(stream_error(chat({"content": "Half a"}, finish=None, done=False)), TransientProviderError)


def test_a_finish_reason_without_the_done_marker_is_a_success() -> None:
    assert request_stream(chat({"content": "All of it"}, finish="stop", done=False))[1].message.content == "All of it"


@pytest.mark.parametrize("word", ["abort", "error"])
def test_a_reply_interrupted_by_the_server_is_transient(word: str) -> None:
    assert isinstance(stream_error(chat({"content": "Half a"}, finish=word)), TransientProviderError)


def test_nothing_after_the_last_event_is_read() -> None:
    sent = (
        encode_events("openai", stream_events("openai", ModelOutput("hello"))) + b'data: {"error": "late"}\n\nrubbish'
    )
    assert request_stream(streaming_model("openai", sent))[1].message.content == "hello"


# -- errors inside a stream --------------------------------------------------------------------------------


ERRORS: list[tuple[Any, type[ModelError]]] = [
    ({"error": {"message": "upstream", "code": 502}}, TransientProviderError),
    ({"error": {"message": "slow down", "type": "rate_limit_error"}}, TransientProviderError),
    ({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, TransientProviderError),
    ({"type": "error", "error": {"type": "authentication_error", "message": "who?"}}, ProviderError),
    ({"type": "error", "code": "server_error", "message": "oops", "param": None}, TransientProviderError),
    ({"type": "error", "code": "rate_limit_exceeded", "message": "slow down"}, TransientProviderError),
    ({"type": "error", "code": "invalid_prompt", "message": "no"}, ProviderError),
    ({"error": "an error was encountered while running the model"}, TransientProviderError),
    ({"error": {"message": "prompt is too long: 9 tokens > 8 maximum"}}, ContextOverflowError),
    ({"object": "error", "message": "boom", "code": 500}, TransientProviderError),
    (
        {
            "type": "response.failed",
            "response": {"status": "failed", "error": {"code": "server_error", "message": "x"}},
        },
        TransientProviderError,
    ),
    (
        {
            "type": "response.failed",
            "response": {"status": "failed", "error": {"code": "context_length_exceeded", "message": "x"}},
        },
        ContextOverflowError,
    ),
]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("event", "kind"), ERRORS)
@pytest.mark.parametrize("first", [True, False])
def test_an_error_in_a_stream_with_status_200_is_an_error(
    wire: str, event: dict[str, Any], kind: type[ModelError], first: bool
) -> None:
    begun = [] if first else stream_events(wire, ModelOutput("Hello"))[:3]
    assert type(stream_error(streaming_model(wire, encode_events(wire, [*begun, event])))) is kind


@pytest.mark.parametrize("wire", SSE_WIRES)
def test_an_event_named_error_is_an_error_whatever_its_data(wire: str) -> None:
    begun = encode_events(wire, stream_events(wire, ModelOutput("Hello"))[:3])
    for data in (b"internal server error", b'"gone"', b'{"detail": "gone"}'):
        assert isinstance(
            stream_error(streaming_model(wire, begun, b"event: error\ndata: " + data + b"\n\n")), TransientProviderError
        )


@pytest.mark.parametrize("wire", WIRES)
def test_an_event_that_is_not_json_fails_the_stream(wire: str) -> None:
    events = stream_events(wire, ModelOutput("Hello"))
    broken: list[Any] = [*events[:3], '{"choices": [', *events[3:]]
    assert isinstance(stream_error(streaming_model(wire, encode_events(wire, broken))), TransientProviderError)


@pytest.mark.parametrize("wire", WIRES)
def test_unknown_events_and_fields_are_ignored(wire: str) -> None:
    events = stream_events(wire, ModelOutput("Hello", "", (("c1", "weather", {}),)))
    strange: list[Any] = [{"type": "keepalive"}, {"type": "response.future.delta", "delta": 3}, {}, {"choices": None}]
    spiced = [part for event in events for part in (*strange, event)]
    reply = request_stream(streaming_model(wire, encode_events(wire, spiced)))[1]
    assert reply.message.content == "Hello"
    assert reply.message.tool_calls == (ToolCall("c1", "weather", {}),)


# -- servers that do not stream ----------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream", "text/plain"])
def test_a_plain_response_to_a_streaming_request_is_accepted(wire: str, kind: str) -> None:
    body = b" \n" + json.dumps(whole_body(wire, ModelOutput("hello"))).encode()
    _, reply = request_stream(streaming_model(wire, body[:7], body[7:], kind=kind))
    assert reply.message.content == "hello"


@pytest.mark.parametrize(
    "model_output", [ModelOutput("hello"), ModelOutput(calls=(("a", "weather", {"city": "Paris"}),))]
)
@pytest.mark.parametrize("wire", WIRES)
def test_a_stream_in_place_of_a_whole_response_is_accepted(wire: str, model_output: ModelOutput) -> None:
    stream = encode_events(wire, stream_events(wire, model_output))
    reply = request_reply(streaming_model(wire, b"\n" + stream, kind=stream_type(wire)))
    expected = request_reply(build_model(wire, respond_with(200, whole_body(wire, model_output))))
    assert reply.repairs == ("the server streamed its reply, although a whole one was requested",)
    assert replace(reply, repairs=()) == expected
    cut = stream[: len(stream) * 2 // 3]
    assert type(request_error(streaming_model(wire, cut, kind=stream_type(wire)))) is TransientProviderError


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("blank", [b" ", b"\n", b"\r\n"])
def test_blanks_after_a_whole_response_are_passed_over_in_time_that_grows_with_their_number(
    wire: str, blank: bytes
) -> None:
    body = json.dumps(whole_body(wire, ModelOutput("hello"))).encode() + blank * 400_000
    reply = request_reply(streaming_model(wire, body, kind="application/json"))  # quadratic: not within minutes
    assert (reply.message.content, reply.repairs) == ("hello", ())


@pytest.mark.parametrize("wire", WIRES)
def test_a_web_page_instead_of_a_stream_hints_at_the_address(wire: str) -> None:
    error = stream_error(streaming_model(wire, b"<html><title>Please log in</title></html>", kind="text/html"))
    assert type(error) is ProviderError
    assert "base_url" in str(error)


# -- streaming requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
def test_a_streamed_request_differs_only_in_asking_for_a_stream(wire: str) -> None:
    bodies: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json=GOOD_BODIES[wire])

    async def both() -> None:
        model = build_model(wire, handler)
        await model.reply(TOOL_REQUEST)
        await stream_reply(model)

    asyncio.run(both())
    whole, streamed = bodies
    assert streamed.pop("stream") is True
    assert streamed.pop("stream_options", {"include_usage": True}) == {"include_usage": True}
    assert whole.pop("stream", False) is False
    assert whole == streamed


# -- tool calls of chat completions, as servers stream them ------------------------------------------------


def piece(arguments: object = None, name: str | None = None, index: int | None = None, id_: str | None = None) -> Any:
    function = {k: v for k, v in (("name", name), ("arguments", arguments)) if v is not None}
    return {k: v for k, v in (("index", index), ("id", id_), ("function", function)) if v is not None}


def called(*deltas: Any) -> list[tuple[str, str, dict[str, Any]]]:
    """The calls in a stream of tool-call deltas, one or several per chunk."""
    chunks = [{"tool_calls": delta if isinstance(delta, list) else [delta]} for delta in deltas]
    reply = request_stream(chat(*chunks))[1]
    assert reply.finish_reason is FinishReason.TOOL_CALLS
    assert all(call.malformed is None for call in reply.message.tool_calls)
    return [(call.id, call.name, dict(call.arguments)) for call in reply.message.tool_calls]


PARIS, ROME = {"city": "Paris"}, {"city": "Rome"}
P, R = json.dumps(PARIS), json.dumps(ROME)
BOTH = [("a", "weather", PARIS), ("b", "weather", ROME)]


@pytest.mark.parametrize(
    ("deltas", "calls"),
    [
        pytest.param(
            [piece("", "weather", 0, "a"), piece("", "weather", 1, "b")]
            + [piece(x, index=i) for pair in zip(P, R.ljust(len(P)), strict=True) for i, x in enumerate(pair)],
            BOTH,
            id="interleaved, letter by letter",
        ),
        pytest.param(
            [piece("", "weather", 1, "b"), piece("", "weather", 0, "a"), piece(P, index=0), piece(R, index=1)],
            BOTH,
            id="begun in another order than they are counted",
        ),
        pytest.param([piece("", "weather", 1, "a"), piece(P, index=1)], BOTH[:1], id="counted from 1"),
        pytest.param(
            [piece("", "weather", None, "a"), piece(P[:5]), piece(P[5:]), piece(R, "weather", None, "b")],
            BOTH,
            id="no index (openai/openai-python#2806)",
        ),
        pytest.param(
            [piece(P, "weather", 0, "a"), piece(R, "weather", 0, "b")],
            BOTH,
            id="one index for all, with ids (ai-dynamo/dynamo#4723)",
        ),
        pytest.param(
            [piece(P, "weather", 0), piece(R, "weather", 0)],
            [("call_1", "weather", PARIS), ("call_2", "weather", ROME)],
            id="one index for all, without ids",
        ),
        pytest.param(
            [[piece(P, "weather"), piece(R, "weather")]],
            [("call_1", "weather", PARIS), ("call_2", "weather", ROME)],
            id="neither index nor id",
        ),
        pytest.param(
            [piece("{}", "one", 0, "a"), piece("{}", "two", 0, "b")],
            [("a", "one", {}), ("b", "two", {})],
            id="one index, another tool",
        ),
        pytest.param(
            [piece("", "weather", 0, "a"), *(piece(x, index=0, id_=f"z{i}") for i, x in enumerate(P))],
            BOTH[:1],
            id="a new id with every piece (NousResearch/hermes-agent#106943)",
        ),
        pytest.param(
            [piece("", "weather", 0, "a"), *(piece(x, "weather", 0, "a") for x in P)],
            BOTH[:1],
            id="id and name with every piece (SillyTavern/SillyTavern#5948)",
        ),
        pytest.param(
            [piece("", "weather", 0), *(piece(x, "weather", 0) for x in P)],
            [("call_1", "weather", PARIS)],
            id="the name with every piece (NousResearch/hermes-agent#11984)",
        ),
        pytest.param(
            [piece("", "weather", 0, "a"), piece(P, "", 0, "")],
            BOTH[:1],
            id="empty instead of absent",
        ),
        pytest.param([piece(PARIS, "weather", 0, "a")], BOTH[:1], id="an object for arguments"),
        pytest.param(
            [piece(PARIS, "weather", 0), piece(ROME, "weather", 0)],
            [("call_1", "weather", PARIS), ("call_2", "weather", ROME)],
            id="objects at one index",
        ),
        pytest.param([piece(None, "now", 0, "a")], [("a", "now", {})], id="no arguments"),
        pytest.param([piece("", "now", 0, "a")], [("a", "now", {})], id="empty arguments"),
        pytest.param([piece("null", "now", 0, "a")], [("a", "now", {})], id="null for arguments"),
        pytest.param(
            [piece(P, "weather", 0, "a"), piece(R, "weather", 1, "a")],
            [("a", "weather", PARIS), ("call_1", "weather", ROME)],
            id="one id for two calls",
        ),
        pytest.param(
            [piece("", "weather", 0, "a"), piece("", "weather", 1, "a"), piece(P, index=0), piece(R, index=1)],
            [("a", "weather", PARIS), ("call_1", "weather", ROME)],
            id="one id for two calls, in pieces",
        ),
        pytest.param([piece("", "weather", 0, "a"), piece(P, index=1)], BOTH[:1], id="the index shifts"),
        pytest.param(
            [piece(None, None, 0, "a"), piece(None, "weather", 0), piece(P, index=0)],
            BOTH[:1],
            id="a late name",
        ),
        pytest.param(
            [piece("", "weather", 0, "a"), piece(P, index=0), piece("", "weather", 0, "a")],
            BOTH[:1],
            id="all but the arguments once more at the end",
        ),
        pytest.param(
            [piece("", "now", 0, "a"), piece("", "now", 0, "b")],
            [("a", "now", {}), ("b", "now", {})],
            id="one index for two calls without arguments",
        ),
        pytest.param(
            [piece("", "weather", 0, "a"), piece(P, index=0), piece("", "weather", 0, "b"), piece(R, index=0)],
            BOTH,
            id="a second head at the index of a complete call",
        ),
        pytest.param(
            [piece("", "now", 0, "a"), *(piece(x, "now", 0, f"z{i}") for i, x in enumerate([*P, ""]))],
            [("a", "now", PARIS)],
            id="a new id and the name with every piece",
        ),
    ],
)
def test_the_deltas_of_a_call_are_joined(deltas: list[Any], calls: list[Any]) -> None:
    assert called(*deltas) == calls


@pytest.mark.parametrize(("index", "repairs"), [(0, 1), (1, 0)])
def test_a_reused_index_is_named_in_the_reply(index: int, repairs: int) -> None:
    pieces = [piece(P, "weather", 0, "a"), piece(R, "weather", index, "b")]
    reply = request_stream(chat(*({"tool_calls": [each]} for each in pieces)))[1]
    assert len(reply.repairs) == repairs
    assert all("at one index" in repair for repair in reply.repairs)


def test_calls_with_finish_reason_stop_are_calls() -> None:
    reply = request_stream(chat({"content": None, "tool_calls": [piece(P, "weather", 0, "a")]}, finish="stop"))[1]
    assert reply.finish_reason is FinishReason.TOOL_CALLS


def test_the_deprecated_function_call_is_read_from_a_stream() -> None:
    deltas = [{"function_call": {"name": "weather", "arguments": ""}}, {"function_call": {"arguments": P}}]
    reply = request_stream(chat(*deltas, finish="function_call"))[1]
    assert reply.message.tool_calls == (ToolCall("call_1", "weather", PARIS),)


def test_usage_comes_in_a_last_chunk_without_choices() -> None:
    assert request_stream(
        streaming_model("openai", encode_events("openai", stream_events("openai", ModelOutput("x"))))
    )[1].usage == Usage(11, 7)


def test_a_refusal_arrives_in_chunks() -> None:
    reply = request_stream(chat({"refusal": "I "}, {"refusal": "can't."}, finish="stop"))[1]
    assert (reply.finish_reason, reply.refusal) == (FinishReason.REFUSAL, "I can't.")


def test_content_may_arrive_as_parts() -> None:
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    received, reply = request_stream(
        chat({"content": [thinking, {"type": "text", "text": "a"}]}, {"content": "b"}, finish="stop")
    )
    assert text_of(received) == reply.message.content == "ab"


def test_a_last_chunk_may_repeat_what_was_streamed() -> None:
    """A few servers send the whole message there."""
    last = {"choices": [{"index": 0, "delta": {}, "message": {"content": "ab"}, "finish_reason": "stop"}]}
    events: list[Any] = [*({"choices": [{"index": 0, "delta": {"content": each}}]} for each in "ab"), last, "[DONE]"]
    received, reply = request_stream(streaming_model("openai", encode_events("openai", events)))
    assert text_of(received) == reply.message.content == "ab"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_is_read_from_either_field(key: str) -> None:
    received, reply = request_stream(chat({key: "h"}, {key: "m"}, {"content": "a"}, finish="stop"))
    assert text_of(received, ReasoningChunk) == "hm"
    assert reply.message.content == "a"


class Once(str):
    """A text that may be joined only once, at the end: joining after each chunk has quadratic cost."""

    __slots__ = ()

    def __add__(self, more: str) -> str:
        raise AssertionError("copied for each piece")


def details(*pieces: dict[str, Any]) -> list[Any]:
    """The reasoning blocks of OpenRouter in these deltas."""
    assembly = ChatAccumulator()
    for one in pieces:
        assert not list(assembly.add({"choices": [{"index": 0, "delta": {"reasoning_details": [one]}}]}))
    body: Any = assembly.body()
    return list(body["choices"][0]["message"].get("reasoning_details", []))


THOUGHT = {"type": "reasoning.text", "index": 0, "format": "anthropic-claude-v1"}


@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        ([THOUGHT | {"text": "a"}], [THOUGHT | {"text": "a"}]),
        ([THOUGHT | {"text": Once(t)} for t in "abc"], [THOUGHT | {"text": "abc"}]),
        (
            [THOUGHT | {"text": "a", "signature": None}, THOUGHT | {"text": None, "signature": "s"}],
            [THOUGHT | {"text": "a", "signature": "s"}],
        ),
        (
            [THOUGHT | {"text": "a"}, THOUGHT | {"index": 1, "text": "b"}, THOUGHT | {"index": 1, "text": "c"}],
            [THOUGHT | {"text": "a"}, THOUGHT | {"index": 1, "text": "bc"}],
        ),
        (
            [{"type": "reasoning.summary", "summary": "a"}, {"type": "reasoning.encrypted", "data": "b"}],
            [{"type": "reasoning.summary", "summary": "a"}, {"type": "reasoning.encrypted", "data": "b"}],
        ),
        ([{"text": "a"}, {}, {"text": "b"}], [{"text": "ab"}]),
        ([{}], []),
    ],
)
def test_chunks_of_a_reasoning_block_are_joined_and_its_signature_kept(pieces: list[Any], whole: list[Any]) -> None:
    assert details(*pieces) == whole


# -- the last event of a response --------------------------------------------------------------------------


@pytest.mark.parametrize("output", [[], None, "absent"])
def test_a_response_whose_last_event_has_no_output_is_built_from_its_items(output: object) -> None:
    """https://github.com/QuantumNous/new-api/issues/4362"""
    model_output = ModelOutput("Hello", "hm", (("c1", "weather", PARIS),))
    events = stream_events("responses", model_output)
    whole = request_stream(streaming_model("responses", encode_events("responses", events)))[1]
    last = events[-1]
    assert isinstance(last, dict)
    bare = {k: v for k, v in last["response"].items() if k != "output"}
    events[-1] = last | {"response": bare if output == "absent" else bare | {"output": output}}
    assert request_stream(streaming_model("responses", encode_events("responses", events)))[1] == whole
    few = [e for e in events if not isinstance(e, dict) or not e["type"].endswith("item.done")]
    assert (
        request_stream(streaming_model("responses", encode_events("responses", few)))[1].message.tool_calls
        == whole.message.tool_calls
    )


def test_a_message_without_message_stop_is_complete() -> None:
    """https://github.com/esengine/DeepSeek-Reasonix/pull/8756"""
    events = stream_events("anthropic", ModelOutput("Hello"))
    assert (
        request_stream(streaming_model("anthropic", encode_events("anthropic", events[:-1])))[1].message.content
        == "Hello"
    )


# -- calls truncated at the token limit --------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("cut", [{}, None])
def test_a_call_cut_at_the_token_limit_is_truncated_even_if_the_server_reports_it_complete(
    wire: str, streamed: bool, cut: dict[str, Any] | None
) -> None:
    """https://github.com/LibreChat-AI/agents/pull/280"""
    model_output = ModelOutput("", "", (("c1", "weather", {}),), reply_tokens=500)
    text = json.dumps(whole_body(wire, model_output))
    sent = encode_events(wire, stream_events(wire, model_output))
    if cut is None:  # the arguments end at their first bracket
        if wire in ("anthropic", "ollama"):
            return  # arguments are an object there, and cannot be truncated
        text = text.replace('"{}"', '"{"')
        sent = (
            sent.replace(b'"{}"', b'"{"')
            .replace(b'"arguments": "}"', b'"arguments": ""')
            .replace(b'"delta": "}"', b'"delta": ""')
        )
    model = streaming_model(wire, sent) if streamed else build_model(wire, lambda _: httpx.Response(200, text=text))
    reply = request_stream(model)[1] if streamed else asyncio.run(model.reply(TOOL_REQUEST))
    assert reply.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(("tokens", "truncated"), [(499, False), (500, True)])
def test_an_answer_that_used_up_the_limit_is_truncated_even_if_the_server_reports_it_complete(
    wire: str, streamed: bool, tokens: int, truncated: bool
) -> None:
    model_output = ModelOutput("The answer is fo", "", (), reply_tokens=tokens)
    body = json.dumps(whole_body(wire, model_output))
    sent = encode_events(wire, stream_events(wire, model_output))
    model = streaming_model(wire, sent) if streamed else build_model(wire, lambda _: httpx.Response(200, text=body))
    reply = request_stream(model)[1] if streamed else asyncio.run(model.reply(TOOL_REQUEST))
    assert reply.finish_reason is (FinishReason.LENGTH if truncated else FinishReason.STOP)


@pytest.mark.parametrize("wire", WIRES)
def test_a_call_below_the_cap_is_not_truncated(wire: str) -> None:
    model_output = ModelOutput("", "", (("c1", "now", {}),), reply_tokens=499)
    assert (
        request_stream(streaming_model(wire, encode_events(wire, stream_events(wire, model_output))))[1].finish_reason
        is FinishReason.TOOL_CALLS
    )


def test_a_call_whose_item_is_incomplete_is_truncated() -> None:
    body = whole_body("responses", ModelOutput("", "", (("c1", "weather", PARIS),)))
    body["output"][0]["status"] = "incomplete"
    reply = asyncio.run(build_model("responses", lambda _: httpx.Response(200, json=body)).reply(TOOL_REQUEST))
    assert reply.finish_reason is FinishReason.LENGTH


# -- limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
def test_an_event_above_the_limit_is_rejected(wire: str) -> None:
    sent = encode_events(wire, stream_events(wire, ModelOutput("x" * 2_000_000), lambda text: [text]))
    chunks = [sent[i : i + 65536] for i in range(0, len(sent), 65536)]
    error = stream_error(streaming_model(wire, *chunks))
    assert type(error) is ProviderError
    assert "longer than 1000000 bytes" in str(error)
