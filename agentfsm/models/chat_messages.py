"""The chat completions wire's form of a transcript: a message each, and pictures where the wire takes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentfsm.core.messages import Message, Role
from agentfsm.models.pictures import data_url, seen, shown_by
from agentfsm.models.wire import as_list, as_object, dumps, wire_name
from agentfsm.models.written import Items

__all__ = ["EXTRA", "THOUGHTS", "ChatMessages", "chat_messages"]

EXTRA = "openai_chat"
"""Where ``Message.extra`` keeps what must come back to whoever said it.

DeepSeek refuses a call's transcript without the reasoning before it
(https://api-docs.deepseek.com/guides/thinking_mode), Gemini one without the signature beside the call
(https://ai.google.dev/gemini-api/docs/thought-signatures), and OpenRouter passes both on
(https://openrouter.ai/docs/use-cases/reasoning-tokens). It is kept for replies with calls alone: elsewhere
none needs it, and DeepSeek's older models refuse it.
"""

THOUGHTS = ("reasoning_content", "reasoning", "reasoning_details")


class ChatMessages(Items):
    """A transcript, written as it grows.

    Pictures stand in a user's message behind the last result of a batch: a tool's message takes text alone
    (https://github.com/OpenHands/OpenHands/issues/7700), and nothing may stand between the results of one batch.

    Args:
        voice: Who is asked.
        images: Whether they take pictures.
    """

    def __init__(self, voice: str, images: bool) -> None:
        super().__init__(lambda message: _written(seen(message, images), voice), _pictures if images else None)


def chat_messages(messages: Iterable[Message], voice: str, images: bool) -> list[dict[str, Any]]:
    """All of a transcript. Arguments as for ``ChatMessages``."""
    return ChatMessages(voice, images).all(messages)


def _pictures(results: list[Message]) -> list[dict[str, Any]]:
    """What tools showed, as a user's message."""
    parts: list[dict[str, Any]] = []
    for words, image in shown_by(results):
        parts += [{"type": "text", "text": words}, {"type": "image_url", "image_url": {"url": data_url(image)}}]
    return [{"role": "user", "content": parts}] if parts else []


def _user(message: Message) -> dict[str, Any]:
    if not message.images:
        return {"role": "user", "content": message.content}
    text = [{"type": "text", "text": message.content}] if message.content else []
    pictures = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in message.images]
    return {"role": "user", "content": [*text, *pictures]}


def _written(message: Message, voice: str) -> list[dict[str, Any]]:
    match message.role:
        case Role.TOOL if message.tool_call_id is not None:
            return [{"role": "tool", "tool_call_id": message.tool_call_id, "content": message.content}]
        case Role.TOOL | Role.USER:
            return [_user(message)]
        case Role.SYSTEM:
            return [{"role": "system", "content": message.content}]
        case Role.ASSISTANT if not message.tool_calls:
            return [{"role": "assistant", "content": message.content}]
        case Role.ASSISTANT:
            return [_calling(message, voice)]


def _calling(message: Message, voice: str) -> dict[str, Any]:
    """A reply with calls, and what it brought along if they who said it are asked again."""
    kept = as_object((message.extra or {}).get(EXTRA))
    kept = kept if kept.get("voice") == voice else {}
    beside = as_list(kept.get("calls"))
    beside = beside if len(beside) == len(message.tool_calls) else [None] * len(message.tool_calls)
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": wire_name(call.name), "arguments": dumps(call.arguments)},
        }
        | as_object(more)
        for call, more in zip(message.tool_calls, beside, strict=True)
    ]
    thoughts = {key: kept[key] for key in THOUGHTS if key in kept}
    return {"role": "assistant", "content": message.content or None, "tool_calls": calls} | thoughts
