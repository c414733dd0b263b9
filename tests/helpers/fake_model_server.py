"""The server side of each wire: response bodies and streams by the providers' documentation, and a loopback server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.helpers.event_frames import chunk_frame

Splitter = Callable[[str], list[str]]
Events = list[dict[str, Any] | str]


@dataclass(frozen=True)
class ModelOutput:
    """The output of a model.

    ``finish`` is ``stop``, ``length`` or ``filter``; ``calls`` are id, tool and arguments.
    """

    text: str = ""
    thought: str = ""
    calls: tuple[tuple[str, str, dict[str, Any]], ...] = ()
    finish: str = "stop"
    prompt_tokens: int = 11
    reply_tokens: int = 7
    cached_tokens: int = 0


def split_letters(text: str) -> list[str]:
    """Split after each character."""
    return list(text)


def _usage_chat(said: ModelOutput) -> dict[str, Any]:
    return {
        "prompt_tokens": said.prompt_tokens,
        "completion_tokens": said.reply_tokens,
        "total_tokens": said.prompt_tokens + said.reply_tokens,
        "prompt_tokens_details": {"cached_tokens": said.cached_tokens},
    }


def _finish_chat(said: ModelOutput) -> str:
    words = {"length": "length", "filter": "content_filter"}
    return words.get(said.finish, "tool_calls" if said.calls else "stop")


_CHAT_HEAD = {"id": "x", "model": "m-1", "created": 1_760_000_000}


def _chat_whole(said: ModelOutput) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text or None}
    if said.thought:
        message["reasoning_content"] = said.thought
    if said.calls:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": n, "arguments": json.dumps(a)}} for i, n, a in said.calls
        ]
    choice = {"index": 0, "message": message, "finish_reason": _finish_chat(said)}
    return {"object": "chat.completion", **_CHAT_HEAD, "choices": [choice], "usage": _usage_chat(said)}


def _chat_events(said: ModelOutput, cut: Splitter) -> Events:
    head = {"object": "chat.completion.chunk", **_CHAT_HEAD}

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    events: Events = [chunk({"role": "assistant", "content": ""})]
    events += [chunk({"reasoning_content": piece}) for piece in cut(said.thought)]
    events += [chunk({"content": piece}) for piece in cut(said.text)]
    tails: list[list[dict[str, Any]]] = []
    for place, (call_id, name, arguments) in enumerate(said.calls):
        first = {"index": place, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
        events.append(chunk({"tool_calls": [first]}))
        pieces = cut(json.dumps(arguments))
        tails.append([chunk({"tool_calls": [{"index": place, "function": {"arguments": p}}]}) for p in pieces])
    while any(tails):  # interleaved, one chunk of each in turn
        events += [tail.pop(0) for tail in tails if tail]
    events.append(chunk({}, _finish_chat(said)))
    events.append(head | {"choices": [], "usage": _usage_chat(said)})
    return [*events, "[DONE]"]


def _responses_output(said: ModelOutput, *, empty: bool = False) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if said.thought:
        summary = [{"type": "summary_text", "text": said.thought}]
        items.append({"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": "sealed"})
    if said.text:
        part: dict[str, Any] = {"type": "output_text", "text": said.text, "annotations": []}
        items.append({"type": "message", "id": "msg_1", "role": "assistant", "content": [part], "status": "completed"})
    for place, (call_id, name, arguments) in enumerate(said.calls):
        call = {"type": "function_call", "id": f"fc_{place}", "call_id": call_id, "name": name, "status": "completed"}
        items.append(call | {"arguments": json.dumps(arguments)})
    if empty:
        blank: dict[str, Any] = {"summary": [], "content": [], "arguments": "", "encrypted_content": None}
        items = [item | {k: v for k, v in blank.items() if k in item} for item in items]
    return items


def _responses_whole(said: ModelOutput) -> dict[str, Any]:
    why = {"length": "max_output_tokens", "filter": "content_filter"}.get(said.finish)
    return {
        "id": "resp_1",
        "object": "response",
        "model": "m-1",
        "status": "incomplete" if why else "completed",
        "incomplete_details": {"reason": why} if why else None,
        "error": None,
        "output": _responses_output(said),
        "usage": {
            "input_tokens": said.prompt_tokens,
            "input_tokens_details": {"cached_tokens": said.cached_tokens},
            "output_tokens": said.reply_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _responses_events(said: ModelOutput, cut: Splitter) -> Events:
    response = _responses_whole(said)
    blanks: dict[str, Any] = {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    begun = response | blanks
    events: Events = [{"type": "response.created", "response": begun}]
    for index, (item, blank) in enumerate(zip(response["output"], _responses_output(said, empty=True), strict=True)):
        at = {"output_index": index, "item_id": item["id"]}
        events.append({"type": "response.output_item.added", "output_index": index, "item": blank})
        if item["type"] == "reasoning":
            events += [{"type": "response.reasoning_summary_text.delta", **at, "delta": p} for p in cut(said.thought)]
        elif item["type"] == "message":
            events.append({"type": "response.content_part.added", **at, "part": {"type": "output_text", "text": ""}})
            events += [{"type": "response.output_text.delta", **at, "delta": p} for p in cut(said.text)]
            events.append({"type": "response.output_text.done", **at, "text": said.text})
        else:
            pieces = cut(item["arguments"])
            events += [{"type": "response.function_call_arguments.delta", **at, "delta": p} for p in pieces]
            events.append({"type": "response.function_call_arguments.done", **at, "arguments": item["arguments"]})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    return [*events, {"type": f"response.{response['status']}", "response": response}]


def _finish_messages(said: ModelOutput) -> str:
    words = {"length": "max_tokens", "filter": "refusal"}
    return words.get(said.finish, "tool_use" if said.calls else "end_turn")


def _messages_blocks(said: ModelOutput) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if said.thought:
        blocks.append({"type": "thinking", "thinking": said.thought, "signature": "c2ln"})
    if said.text:
        blocks.append({"type": "text", "text": said.text})
    return blocks + [{"type": "tool_use", "id": i, "name": n, "input": a} for i, n, a in said.calls]


def _messages_usage(said: ModelOutput) -> dict[str, Any]:
    return {"input_tokens": said.prompt_tokens, "cache_read_input_tokens": said.cached_tokens}


def _messages_whole(said: ModelOutput) -> dict[str, Any]:
    return {
        "type": "message",
        "role": "assistant",
        "model": "m-1",
        "content": _messages_blocks(said),
        "stop_reason": _finish_messages(said),
        "stop_sequence": None,
        "usage": _messages_usage(said) | {"output_tokens": said.reply_tokens},
    }


def _messages_events(said: ModelOutput, cut: Splitter) -> Events:
    begun: dict[str, Any] = _messages_whole(said) | {"content": [], "stop_reason": None}
    begun["usage"] = _messages_usage(said) | {"output_tokens": 1}
    empty: dict[str, Any] = {"thinking": "", "signature": "", "text": "", "input": {}}
    events: Events = [{"type": "message_start", "message": begun}, {"type": "ping"}]
    for index, block in enumerate(_messages_blocks(said)):
        blank = block | {k: v for k, v in empty.items() if k in block}
        events.append({"type": "content_block_start", "index": index, "content_block": blank})
        deltas: list[dict[str, Any]]
        match block["type"]:
            case "thinking":
                deltas = [{"type": "thinking_delta", "thinking": p} for p in cut(block["thinking"])]
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
            case "text":
                deltas = [{"type": "text_delta", "text": p} for p in cut(block["text"])]
            case _:
                pieces = cut(json.dumps(block["input"])) if block["input"] else []
                deltas = [{"type": "input_json_delta", "partial_json": p} for p in ["", *pieces]]
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    end = {"stop_reason": _finish_messages(said), "stop_sequence": None}
    events.append({"type": "message_delta", "delta": end, "usage": {"output_tokens": said.reply_tokens}})
    return [*events, {"type": "message_stop"}]


def _ollama_end(said: ModelOutput) -> dict[str, Any]:
    reason = "length" if said.finish == "length" else "stop"
    counts = {"prompt_eval_count": said.prompt_tokens, "eval_count": said.reply_tokens}
    return {"model": "m-1", "done": True, "done_reason": reason, **counts}


def _ollama_message(said: ModelOutput) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text}
    if said.thought:
        message["thinking"] = said.thought
    if said.calls:
        message["tool_calls"] = [{"id": i, "function": {"name": n, "arguments": a}} for i, n, a in said.calls]
    return message


def _ollama_whole(said: ModelOutput) -> dict[str, Any]:
    return _ollama_end(said) | {"message": _ollama_message(said)}


def _ollama_events(said: ModelOutput, cut: Splitter) -> Events:
    def line(**message: Any) -> dict[str, Any]:
        return {"model": "m-1", "message": {"role": "assistant", "content": "", **message}, "done": False}

    events: Events = [line(thinking=piece) for piece in cut(said.thought)]
    events += [line(content=piece) for piece in cut(said.text)]
    events += [line(tool_calls=[{"id": i, "function": {"name": n, "arguments": a}}]) for i, n, a in said.calls]
    return [*events, _ollama_end(said) | {"message": {"role": "assistant", "content": ""}}]


_WHOLE = {
    "openai": _chat_whole,
    "responses": _responses_whole,
    "anthropic": _messages_whole,
    "bedrock": _messages_whole,
    "vertex": _messages_whole,
    "ollama": _ollama_whole,
}
_EVENTS = {
    "openai": _chat_events,
    "responses": _responses_events,
    "anthropic": _messages_events,
    "bedrock": _messages_events,
    "vertex": _messages_events,
    "ollama": _ollama_events,
}


def whole_body(wire: str, said: ModelOutput) -> dict[str, Any]:
    """The response without streaming."""
    return _WHOLE[wire](said)


def stream_events(wire: str, said: ModelOutput, cut: Splitter = split_letters) -> Events:
    """The response as a stream: JSON events, or the text of one."""
    return _EVENTS[wire](said, cut)


@dataclass(frozen=True)
class FramingStyle:
    """How events are encoded: the line ending, what is between events, and whether JSON is escaped."""

    end: str = "\n"
    between: str = ""
    ascii: bool = False
    lines: int = 1
    names: bool = True
    space: str = " "
    bom: bool = False


def encode_events(wire: str, events: Events, style: FramingStyle = FramingStyle()) -> bytes:  # frozen
    """The encoded stream: server-sent events, one JSON value per line for Ollama, or frames for Bedrock."""
    if wire == "bedrock":
        return b"".join(chunk_frame(event.encode() if isinstance(event, str) else event) for event in events)
    written: list[str] = []
    for event in events:
        text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=style.ascii)
        if wire == "ollama":
            written.append(text + style.end)
            continue
        lines = _split_lines(text, style.lines) if isinstance(event, dict) else [text]
        name = event.get("type", "") if isinstance(event, dict) else ""
        head = f"event: {name}{style.end}" if name and style.names else ""
        data = "".join(f"data:{style.space}{line}{style.end}" for line in lines)
        written.append(head + data + style.end + (style.between + style.end if style.between else ""))
    return (b"\xef\xbb\xbf" if style.bom else b"") + "".join(written).encode("utf-8", "surrogatepass")


def stream_type(wire: str) -> str:
    """The content type of a stream."""
    kinds = {"ollama": "application/x-ndjson", "bedrock": "application/vnd.amazon.eventstream"}
    return kinds.get(wire, "text/event-stream")


def _split_lines(text: str, lines: int) -> list[str]:
    """A JSON text on several lines, split where whitespace is allowed: after a comma between members."""
    if lines < 2 or '", "' not in text:
        return [text]
    before, _, after = text.partition('", "')
    return [before + '",', '"' + after]


JsonBody = dict[str, Any]


@dataclass(frozen=True)
class ServerError:
    """An error response."""

    status: int
    error: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class NoResponse:
    """Nothing is sent; ``received`` is called when the request has arrived."""

    received: Callable[[], None]


@dataclass(frozen=True)
class BrokenResponse:
    """A response of which only the first part is sent."""

    said: ModelOutput


ServerReply = ModelOutput | int | ServerError | NoResponse | BrokenResponse | Callable[[JsonBody], ModelOutput]
"""A response, the status of an error, a fault, or a function from the request body to a response."""

WIRE_BY_PATH = {
    "/chat/completions": "openai",
    "/responses": "responses",
    "/messages": "anthropic",
    "/api/chat": "ollama",
    "/invoke": "bedrock",
    "/invoke-with-response-stream": "bedrock",
    ":rawPredict": "vertex",
    ":streamRawPredict": "vertex",
}


def wire_of_path(path: str, body: JsonBody) -> tuple[str, bool]:
    """The wire of a request, and whether it asks for a stream."""
    place, wire = next(entry for entry in WIRE_BY_PATH.items() if path.partition("?")[0].endswith(entry[0]))
    return wire, "stream" in place or body.get("stream") is True


def text_output(words: str) -> ModelOutput:
    """A text reply."""
    return ModelOutput(words, prompt_tokens=10, reply_tokens=5)


def tool_call_output(*wanted: tuple[str, JsonBody]) -> ModelOutput:
    """A reply with tool calls: pairs of name and arguments."""
    numbered = tuple((f"c{i}", name, arguments) for i, (name, arguments) in enumerate(wanted))
    return ModelOutput(calls=numbered, prompt_tokens=10, reply_tokens=5)


class FakeModelServer:
    """The running server.

    Attributes:
        host: Its address without a path.
        url: What ``--base-url`` takes for chat completions.
        requests: The bodies of all requests so far.
        asked: Set as soon as there is one.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.url = f"{host}/v1"
        self.requests: list[JsonBody] = []
        self.asked = threading.Event()


@contextmanager
def fake_model_server(*replies: ServerReply, hang: bool = False) -> Generator[FakeModelServer]:
    """A server that gives the responses of a script, one per request; the last one is repeated.

    Args:
        replies: What it answers.
        hang: Whether to give no answer at all.
    """
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            served.requests.append(body)
            served.asked.set()
            entry = replies[min(len(served.requests), len(replies)) - 1] if replies else 500
            if hang or isinstance(entry, NoResponse):
                if isinstance(entry, NoResponse):
                    entry.received()
                over.wait()
                return
            if isinstance(entry, int):
                entry = ServerError(entry, {"message": "not now"})
            if isinstance(entry, ServerError):
                content = json.dumps({"error": entry.error}).encode()
                self._send(entry.status, "application/json", content, headers=entry.headers)
                return
            broken = isinstance(entry, BrokenResponse)
            said = entry.said if isinstance(entry, BrokenResponse) else entry
            said = said if isinstance(said, ModelOutput) else said(body)
            wire, streamed = wire_of_path(self.path, body)
            if streamed:
                self._send(200, stream_type(wire), encode_events(wire, stream_events(wire, said)), broken)
            else:
                self._send(200, "application/json", json.dumps(whole_body(wire, said)).encode(), broken)

        def _send(
            self, status: int, kind: str, content: bytes, broken: bool = False, headers: dict[str, str] | None = None
        ) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if broken else content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
            """Log nothing: the tests check the output of the command line."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    http = Server(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    http.block_on_close = False
    served = FakeModelServer(f"http://127.0.0.1:{http.server_address[1]}")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        over.set()
        http.shutdown()
        http.server_close()
        thread.join()
