"""Independent oracles of what providers reject: transcript rules, and request bodies validated by the vendors' types.

They are written from the providers' documents and know nothing of the loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from pydantic import TypeAdapter

from agentfsm.loop.messages import Message, Role
from agentfsm.loop.model import ModelRequest

__all__ = [
    "check_requests",
    "check_transcript",
    "gemini_errors",
    "mistral_errors",
    "request_errors",
    "role_errors",
    "transcript_errors",
]


def check_transcript(messages: Sequence[Message], *, request: bool = True) -> None:
    """Assert that both APIs accept a transcript.

    Args:
        messages: The messages.
        request: Whether they are a request, which may not end with the assistant; False for the
            transcript of a run that is over.
    """
    found = transcript_errors(messages, request=request)
    assert not found, "\n".join([*found, "", *map(_describe_message, range(len(messages)), messages)])


def check_requests(requests: Iterable[ModelRequest]) -> None:
    """Assert that both APIs accept each of the recorded requests."""
    for request in requests:
        check_transcript(request.messages)


def transcript_errors(messages: Sequence[Message], *, request: bool = True) -> list[str]:
    """What the APIs would reject, each with the position of the message."""
    found: list[str] = []
    seen: set[str] = set()
    due: list[str] = []
    for place, message in enumerate(messages):
        if message.role is Role.TOOL and message.tool_call_id is not None:
            if not message.tool_call_id:
                found.append(f"{place}: the answer has an empty id")
            elif message.tool_call_id in due:
                due.remove(message.tool_call_id)
            else:
                found.append(f"{place}: {message.tool_call_id!r} answers no call of the message in front, or once more")
            continue
        if due:
            found.append(f"{place}: stands in front of the answers to {due}")
            due = []
        if message.role is not Role.ASSISTANT:
            if message.tool_calls:
                found.append(f"{place}: only an assistant calls tools")
            continue
        for call in message.tool_calls:
            if not call.id:
                found.append(f"{place}: a call of {call.name!r} has an empty id")
            if call.id in seen:
                found.append(f"{place}: the id {call.id!r} was used before")
            seen.add(call.id)
            due.append(call.id)
    if due:
        found.append(f"end: nothing answers {due}")
    turns = [m for m in messages if m.role is not Role.SYSTEM]
    if not turns:
        found.append("there is no turn but the system's")
    elif turns[0].role is not Role.USER:
        found.append(f"the first turn is the {turns[0].role.value}'s")
    if request and turns and turns[-1].role is Role.ASSISTANT:
        found.append("the request ends with the assistant")
    return found


def _describe_message(place: int, message: Message) -> str:
    calls = "".join(f" {c.id}={c.name}" for c in message.tool_calls)
    answers = "" if message.tool_call_id is None else f" -> {message.tool_call_id}"
    return f"{place:3} {message.role.value}{answers}:{calls} {message.content[:60]!r}"


def request_errors(wire: str, body: dict[str, Any]) -> list[str]:
    """All errors in the body of a request."""
    body = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    return [*_type_errors(wire, body), *_RULES[wire](body)]


def _type_errors(wire: str, body: dict[str, Any]) -> list[str]:
    import jsonschema  # type: ignore[import-untyped]  # it has no types, and types-jsonschema is not installed

    validator: Any = jsonschema.Draft202012Validator(_request_schema(wire))
    return [f"{'.'.join(map(str, e.absolute_path))}: {e.message[:300]}" for e in validator.iter_errors(body)]


@cache
def _request_schema(wire: str) -> dict[str, Any]:
    """The schema of a request body, from the vendor's types."""
    name = {"openai": "openai", "responses": "openai", "anthropic": "anthropic", "ollama": "ollama"}[wire]
    pytest.importorskip(name, reason=f"{name} is not installed, whose types are the oracle")
    kind: Any
    match wire:
        case "openai":
            from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as kind
        case "responses":
            from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as kind
        case "anthropic":
            from anthropic.types.message_create_params import MessageCreateParamsNonStreaming as kind
        case _:
            from ollama._types import ChatRequest as kind
    schema = TypeAdapter(kind).json_schema()
    _forbid_extra_fields(schema)
    kinds = schema["$defs"]
    if wire == "ollama":
        # The package is older than its server, which has call ids since 0.12 (``api/types.go``) and accepts any
        # JSON schema for tool arguments. An image is base64 text after encoding by the package.
        kinds["Image"] = {"type": "string", "pattern": "^[A-Za-z0-9+/]+={0,2}$"}
        kinds["Message"]["properties"]["tool_call_id"] = {"type": "string"}
        kinds["ToolCall"]["properties"]["id"] = {"type": "string"}
        kinds["Parameters"] = kinds["Property"] = {"type": "object"}
        schema["properties"]["messages"] = {"type": "array", "items": {"$ref": "#/$defs/Message"}}
    if wire == "responses":
        # The types require an id; without storage the server would look it up and not find it, and OpenAI's
        # own client sends none (``codex-rs/protocol/src/models.rs``).
        kinds["ResponseReasoningItemParam"]["required"].remove("id")
    return schema


def _forbid_extra_fields(node: dict[str, Any] | list[Any] | str | float | None) -> None:
    """Allow no fields except those in the types."""
    if isinstance(node, list):
        for item in node:
            _forbid_extra_fields(item)
    elif isinstance(node, dict):
        if isinstance(node.get("properties"), dict):
            node.setdefault("additionalProperties", False)
        for item in node.values():
            _forbid_extra_fields(item)


def _chat_errors(body: dict[str, Any]) -> list[str]:
    found: list[str] = []
    due: list[str] = []
    for place, message in enumerate(body["messages"]):
        if message["role"] == "tool":
            if message.get("tool_call_id") in due:
                due.remove(message["tool_call_id"])
            else:
                found.append(f"{place}: answers no call of the message in front, or once more")
            if not isinstance(message["content"], str):
                found.append(f"{place}: a tool's message takes text alone")
            continue
        if due:
            found.append(f"{place}: stands in front of the answers to {due}")
        due = [call["id"] for call in message.get("tool_calls") or ()]
        if len(set(due)) < len(due) or "" in due:
            found.append(f"{place}: its calls' ids are not each their own")
        if message["role"] not in ("system", "user", "assistant"):
            found.append(f"{place}: {message['role']!r} is no role")
    return [*found, f"the end: {due} are not answered"] if due else found


def _responses_errors(body: dict[str, Any]) -> list[str]:
    found: list[str] = []
    calls: dict[str, int] = {}
    for place, item in enumerate(body["input"]):
        if item.get("type") == "function_call":
            if item["call_id"] in calls:
                found.append(f"{place}: the id of the call stands twice")
            calls[item["call_id"]] = 0
        elif item.get("type") == "function_call_output":
            if item["call_id"] not in calls:
                found.append(f"{place}: there is no call in front of this output")
            calls[item["call_id"]] = calls.get(item["call_id"], 0) + 1
    return found + [f"{call} has {n} outputs" for call, n in calls.items() if n != 1]


def _messages_errors(body: dict[str, Any]) -> list[str]:
    found: list[str] = []
    due: list[str] = []
    seen: set[str] = set()
    turns = body["messages"]
    if not turns or turns[0]["role"] != "user" or turns[-1]["role"] != "user":
        found.append("the first and the last turn are the user's")
    for place, turn in enumerate(turns):
        blocks = turn["content"]
        results = [b["tool_use_id"] for b in blocks if b["type"] == "tool_result"]
        if sorted(results) != sorted(due):
            found.append(f"{place}: results for {results}, and {due} are due")
        if any(b["type"] != "tool_result" for b in blocks[: len(results)]):
            found.append(f"{place}: something stands in front of a result")
        due = [b["id"] for b in blocks if b["type"] == "tool_use"]
        if seen & set(due) or len(set(due)) < len(due) or (due and turn["role"] != "assistant"):
            found.append(f"{place}: a call's id stands twice, or is the user's")
        seen.update(due)
        if any(b["type"] == "text" and not b["text"].strip() for b in blocks):
            found.append(f"{place}: a blank text")
    return found


_AFTER = {
    "system": {"user", "assistant", "system"},
    "user": {"assistant", "system", "user"},
    "assistant": {"assistant", "user", "tool"},
    "tool": {"assistant", "tool"},
}
"""What may follow a message of a role at Mistral (``mistral-common``, ``MistralRequestValidator``)."""


def mistral_errors(body: dict[str, Any]) -> list[str]:
    """What Mistral would reject of a chat completions request."""
    found = _chat_errors(body)
    messages = body["messages"]
    for place, (before, message) in enumerate(pairwise(messages), 1):
        if message["role"] not in _AFTER[before["role"]]:
            found.append(f"{place}: the role {message['role']!r} after {before['role']!r}")
    if messages[-1]["role"] not in ("user", "tool"):
        found.append("the last message is neither the user's nor a tool's")
    for place, message in enumerate(messages):
        if message["role"] == "assistant" and not (message.get("content") or message.get("tool_calls")):
            found.append(f"{place}: a reply without text and calls")
        for call in message.get("tool_calls") or ():
            if not re.fullmatch(r"[a-zA-Z0-9]{9}", call["id"]):
                found.append(f"{place}: the id {call['id']!r} is not nine letters long")
    return found


def gemini_errors(body: dict[str, Any]) -> list[str]:
    """What Gemini would reject (https://ai.google.dev/gemini-api/docs/function-calling)."""
    found = _chat_errors(body)
    messages = [message for message in body["messages"] if message["role"] != "system"]
    if not messages or messages[0]["role"] != "user" or messages[-1]["role"] not in ("user", "tool"):
        found.append("the first content is the user's, the last is the user's or a function's")
    for place, (before, message) in enumerate(pairwise(messages), 1):
        if message.get("tool_calls") and before["role"] not in ("user", "tool"):
            found.append(f"{place}: a function call comes after the user or a function response")
    for place, message in enumerate(messages):
        if not (message.get("content") or message.get("tool_calls")) and message["role"] != "tool":
            found.append(f"{place}: a content without parts")
    return found


_RULES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "openai": _chat_errors,
    "responses": _responses_errors,
    "anthropic": _messages_errors,
    "ollama": _chat_errors,
}


def role_errors(wire: str, body: dict[str, Any]) -> list[str]:
    """What is wrong with the order of the messages in the body of a request, and with the ids of its calls."""
    return _RULES[wire](body)


def show_body(body: dict[str, Any]) -> str:
    """A response body."""
    return json.dumps(body, indent=1, ensure_ascii=False)[:4000]
