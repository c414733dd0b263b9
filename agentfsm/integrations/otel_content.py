"""What was said, in the form in which the GenAI conventions want it on spans: a JSON text of messages and parts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from agentfsm.core.messages import Message, Role

__all__ = ["messages_json", "value_json"]


def value_json(value: Any) -> str:
    """A value as JSON text."""
    return json.dumps(value, ensure_ascii=False, default=str)


def messages_json(messages: Iterable[Message], finish_reason: str | None = None) -> str:
    """Messages as JSON text.

    Args:
        messages: The messages.
        finish_reason: For a model's reply, why it stopped.
    """
    more = {} if finish_reason is None else {"finish_reason": finish_reason}
    return value_json([{"role": m.role.value, "parts": _parts(m), **more} for m in messages])


def _parts(message: Message) -> list[dict[str, Any]]:
    if message.role is Role.TOOL and message.tool_call_id is not None:
        return [{"type": "tool_call_response", "id": message.tool_call_id, "response": message.content}]
    parts: list[dict[str, Any]] = []
    if message.content:
        parts.append({"type": "text", "content": message.content})
    parts += [
        {"type": "tool_call", "id": c.id, "name": c.name, "arguments": dict(c.arguments)} for c in message.tool_calls
    ]
    return parts
