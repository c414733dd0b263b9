"""The other side of each wire, written from the providers' documents and not from our readers.

A ``Said`` is what a model said. ``whole_body`` is how a server answers it in one piece, ``stream_events`` how it
does so in many, and ``as_bytes`` what of that travels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Cut = Callable[[str], list[str]]
Events = list[dict[str, Any] | str]


@dataclass(frozen=True)
class Said:
    """What a model said.

    ``finish`` is ``stop``, ``length`` or ``filter``; ``calls`` are id, tool and arguments.
    """

    text: str = ""
    thought: str = ""
    calls: tuple[tuple[str, str, dict[str, Any]], ...] = ()
    finish: str = "stop"
    prompt_tokens: int = 11
    reply_tokens: int = 7
    cached_tokens: int = 0


def letters(text: str) -> list[str]:
    """Cut after each character."""
    return list(text)


def _usage_chat(said: Said) -> dict[str, Any]:
    return {
        "prompt_tokens": said.prompt_tokens,
        "completion_tokens": said.reply_tokens,
        "prompt_tokens_details": {"cached_tokens": said.cached_tokens},
    }


def _finish_chat(said: Said) -> str:
    words = {"length": "length", "filter": "content_filter"}
    return words.get(said.finish, "tool_calls" if said.calls else "stop")


def _chat_whole(said: Said) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text or None}
    if said.thought:
        message["reasoning_content"] = said.thought
    if said.calls:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": n, "arguments": json.dumps(a)}} for i, n, a in said.calls
        ]
    choice = {"index": 0, "message": message, "finish_reason": _finish_chat(said)}
    return {"id": "x", "model": "m-1", "choices": [choice], "usage": _usage_chat(said)}


def _chat_events(said: Said, cut: Cut) -> Events:
    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {"id": "x", "model": "m-1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    events: Events = [chunk({"role": "assistant", "content": ""})]
    events += [chunk({"reasoning_content": piece}) for piece in cut(said.thought)]
    events += [chunk({"content": piece}) for piece in cut(said.text)]
    tails: list[list[dict[str, Any]]] = []
    for place, (call_id, name, arguments) in enumerate(said.calls):
        first = {"index": place, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
        events.append(chunk({"tool_calls": [first]}))
        pieces = cut(json.dumps(arguments))
        tails.append([chunk({"tool_calls": [{"index": place, "function": {"arguments": p}}]}) for p in pieces])
    while any(tails):  # interleaved, a piece of each in turn
        events += [tail.pop(0) for tail in tails if tail]
    events.append(chunk({}, _finish_chat(said)))
    events.append({"id": "x", "model": "m-1", "choices": [], "usage": _usage_chat(said)})
    return [*events, "[DONE]"]


def _responses_output(said: Said, *, empty: bool = False) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if said.thought:
        summary = [{"type": "summary_text", "text": said.thought}]
        items.append({"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": "sealed"})
    if said.text:
        part = {"type": "output_text", "text": said.text, "annotations": []}
        items.append({"type": "message", "id": "msg_1", "role": "assistant", "content": [part], "status": "completed"})
    for place, (call_id, name, arguments) in enumerate(said.calls):
        call = {"type": "function_call", "id": f"fc_{place}", "call_id": call_id, "name": name, "status": "completed"}
        items.append(call | {"arguments": json.dumps(arguments)})
    if empty:
        blank = {"summary": [], "content": [], "arguments": "", "encrypted_content": None}
        items = [item | {k: v for k, v in blank.items() if k in item} for item in items]
    return items


def _responses_whole(said: Said) -> dict[str, Any]:
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


def _responses_events(said: Said, cut: Cut) -> Events:
    response = _responses_whole(said)
    begun = response | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
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


def _finish_messages(said: Said) -> str:
    words = {"length": "max_tokens", "filter": "refusal"}
    return words.get(said.finish, "tool_use" if said.calls else "end_turn")


def _messages_blocks(said: Said) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if said.thought:
        blocks.append({"type": "thinking", "thinking": said.thought, "signature": "c2ln"})
    if said.text:
        blocks.append({"type": "text", "text": said.text})
    return blocks + [{"type": "tool_use", "id": i, "name": n, "input": a} for i, n, a in said.calls]


def _messages_usage(said: Said) -> dict[str, Any]:
    return {"input_tokens": said.prompt_tokens, "cache_read_input_tokens": said.cached_tokens}


def _messages_whole(said: Said) -> dict[str, Any]:
    return {
        "type": "message",
        "role": "assistant",
        "model": "m-1",
        "content": _messages_blocks(said),
        "stop_reason": _finish_messages(said),
        "stop_sequence": None,
        "usage": _messages_usage(said) | {"output_tokens": said.reply_tokens},
    }


def _messages_events(said: Said, cut: Cut) -> Events:
    begun = _messages_whole(said) | {"content": [], "stop_reason": None}
    begun["usage"] = _messages_usage(said) | {"output_tokens": 1}
    events: Events = [{"type": "message_start", "message": begun}, {"type": "ping"}]
    for index, block in enumerate(_messages_blocks(said)):
        blank = block | {
            k: v for k, v in {"thinking": "", "signature": "", "text": "", "input": {}}.items() if k in block
        }
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


def _ollama_end(said: Said) -> dict[str, Any]:
    reason = "length" if said.finish == "length" else "stop"
    counts = {"prompt_eval_count": said.prompt_tokens, "eval_count": said.reply_tokens}
    return {"model": "m-1", "done": True, "done_reason": reason, **counts}


def _ollama_message(said: Said) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text}
    if said.thought:
        message["thinking"] = said.thought
    if said.calls:
        message["tool_calls"] = [{"id": i, "function": {"name": n, "arguments": a}} for i, n, a in said.calls]
    return message


def _ollama_whole(said: Said) -> dict[str, Any]:
    return _ollama_end(said) | {"message": _ollama_message(said)}


def _ollama_events(said: Said, cut: Cut) -> Events:
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
    "ollama": _ollama_whole,
}
_EVENTS = {
    "openai": _chat_events,
    "responses": _responses_events,
    "anthropic": _messages_events,
    "ollama": _ollama_events,
}


def whole_body(wire: str, said: Said) -> dict[str, Any]:
    """The answer in one piece."""
    return _WHOLE[wire](said)


def stream_events(wire: str, said: Said, cut: Cut = letters) -> Events:
    """The answer in many: JSON events, or the text of one."""
    return _EVENTS[wire](said, cut)


@dataclass(frozen=True)
class Style:
    """How events are written down: which line end, what stands between them, and whether JSON is escaped."""

    end: str = "\n"
    between: str = ""
    ascii: bool = False
    lines: int = 1
    names: bool = True
    space: str = " "
    bom: bool = False


def as_bytes(wire: str, events: Events, style: Style = Style()) -> bytes:  # frozen
    """What travels: server-sent events, or JSON a line for Ollama."""
    written: list[str] = []
    for event in events:
        text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=style.ascii)
        if wire == "ollama":
            written.append(text + style.end)
            continue
        lines = _broken(text, style.lines) if isinstance(event, dict) else [text]
        name = event.get("type", "") if isinstance(event, dict) else ""
        head = f"event: {name}{style.end}" if name and style.names else ""
        data = "".join(f"data:{style.space}{line}{style.end}" for line in lines)
        written.append(head + data + style.end + (style.between + style.end if style.between else ""))
    return (b"\xef\xbb\xbf" if style.bom else b"") + "".join(written).encode("utf-8", "surrogatepass")


def _broken(text: str, lines: int) -> list[str]:
    """A JSON text on several lines; it may be broken where a blank may stand: after a comma between members."""
    if lines < 2 or '", "' not in text:
        return [text]
    before, _, after = text.partition('", "')
    return [before + '",', '"' + after]


@dataclass
class Shop:
    """Replies that stand ready for a server to give, in order; the last is given again and again."""

    said: list[Said] = field(default_factory=list[Said])
    given: int = 0

    def next(self) -> Said:
        self.given += 1
        return self.said[min(self.given, len(self.said)) - 1]
