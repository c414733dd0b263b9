"""The messages wire's form of a transcript: turns that alternate, and marks where a prompt cache may begin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from agentfsm.core.messages import Message, Role, ToolCall
from agentfsm.core.render import Transcript
from agentfsm.models.pictures import seen
from agentfsm.models.wire import as_list, as_object, dumps, wire_name

__all__ = ["EXTRA", "Mark", "Turns", "mark_of", "tool_use", "turns"]

EXTRA = "anthropic"
"""Where ``Message.extra`` keeps a reply's blocks: thinking is signed, and must come back to its thinker as it was."""

Mark = dict[str, str]
"""The value of ``cache_control``."""

_OPEN = 4
"""How many turns, from the last, may still change: by messages that join the last, and by marks."""


def mark_of(cache: str) -> Mark | None:
    """The mark for a time to keep a prompt: ``5m``, ``1h``, or ``off`` for none."""
    return None if cache == "off" else {"type": "ephemeral"} | ({"ttl": cache} if cache != "5m" else {})


class Turns:
    """The turns of a transcript, written as it grows.

    Args:
        mark: The mark to set, or None.
        voice: Who is asked.
        images: Whether they take pictures.
    """

    def __init__(self, mark: Mark | None, voice: str = "", images: bool = True) -> None:
        self._mark = mark
        self._asked = _Asked(voice, images)
        self._old: list[str] = []
        self._open: list[dict[str, Any]] = []

    def add(self, message: Message) -> None:
        """Write a message that stands in every later request."""
        _extend(self._open, (message,), self._asked)
        if len(self._open) > _OPEN:
            self._old.append(dumps(self._open.pop(0)))

    def text(self, tail: Iterable[Message]) -> list[str]:
        """The JSON of all turns."""
        last = [{"role": turn["role"], "content": list(turn["content"])} for turn in self._open]
        if len(self._old) > 1:
            self._old = [",".join(self._old)]
        return [*self._old, *map(dumps, _finished(last, tail, self._mark, self._asked))]


def turns(
    messages: Sequence[Message], mark: Mark | None = None, *, voice: str = "", images: bool = True
) -> list[dict[str, Any]]:
    """The transcript as turns that alternate; a user's must have its results before its text.

    With a mark, the server keeps what stands up to there (it counts tools and system first, and takes four
    marks, https://docs.anthropic.com/en/docs/build-with-claude/prompt-caching). One stands behind the last
    message that no later request changes; one where the request before had it, since the server looks back
    only 20 blocks from a mark.
    """
    settled = messages.settled if isinstance(messages, Transcript) else len(messages)
    found: list[dict[str, Any]] = []
    asked = _Asked(voice, images)
    _extend(found, islice(messages, settled), asked)
    return _finished(found, islice(messages, settled, None), mark, asked)


class _Asked(NamedTuple):
    """Who is asked, and whether they take pictures."""

    voice: str
    images: bool


def _finished(
    settled: list[dict[str, Any]], tail: Iterable[Message], mark: Mark | None, asked: _Asked
) -> list[dict[str, Any]]:
    """The turns with their marks, and with what stands in this request alone behind them."""
    if mark is not None:
        for blocks in _last_markable(settled):
            blocks[-1] = blocks[-1] | {"cache_control": mark}
    _extend(settled, tail, asked)
    return settled


def _extend(turns: list[dict[str, Any]], messages: Iterable[Message], asked: _Asked) -> None:
    for message in messages:
        if message.role is Role.SYSTEM:
            continue
        role = "assistant" if message.role is Role.ASSISTANT else "user"
        if role == "assistant":
            blocks = _assistant_blocks(message, asked.voice)
        else:  # of a call that failed the wire takes text alone (https://github.com/vellum-ai/vellum-assistant/pull/18387)
            blocks = _user_blocks(seen(message, asked.images and not message.is_error))
        if not blocks:
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
            if role == "user":
                turns[-1]["content"].sort(key=_is_no_result)
        else:
            turns.append({"role": role, "content": blocks})


def _last_markable(turns: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The content of the last turn and of the user's turn before it; a thought takes no mark."""
    users: list[list[dict[str, Any]]] = [turn["content"] for turn in turns[-3:] if turn["role"] == "user"]
    last: list[dict[str, Any]] = turns[-1]["content"] if turns else []
    if not last or any(last is content for content in users[-1:]):
        return users[-2:]
    thought = last[-1]["type"] in ("thinking", "redacted_thinking")
    return users[-1:] if thought else [*users[-1:], last]


def _user_blocks(message: Message) -> list[dict[str, Any]]:
    if message.role is Role.TOOL and message.tool_call_id is not None:
        result: dict[str, Any] = {"type": "tool_result", "tool_use_id": message.tool_call_id}
        result["content"] = message.content if message.content.strip() else "(empty)"
        if message.images:
            result["content"] = [*_text(message.content), *_pictures(message)]
        return [result | {"is_error": True} if message.is_error else result]
    return [*_pictures(message), *_text(message.content)]


def _pictures(message: Message) -> list[dict[str, Any]]:
    return [
        {"type": "image", "source": {"type": "base64", "media_type": image.media_type, "data": image.data}}
        for image in message.images
    ]


def _assistant_blocks(message: Message, voice: str) -> list[dict[str, Any]]:
    """A reply's blocks: as they came, where who is asked said them, and they still say what the message says."""
    plain = _text(message.content) + [tool_use(call) for call in message.tool_calls]
    extra = as_object((message.extra or {}).get(EXTRA))
    kept = [dict(as_object(block)) for block in as_list(extra.get("blocks"))]
    if not kept or extra.get("voice") != voice:
        return plain
    text = "".join(str(block.get("text")) for block in kept if block.get("type") == "text")
    uses = [block for block in kept if block.get("type") == "tool_use"]
    if text == message.content and uses == [tool_use(call) for call in message.tool_calls]:
        return kept
    return [block for block in kept if block.get("type") in ("thinking", "redacted_thinking")] + plain


def _is_no_result(block: dict[str, Any]) -> bool:
    return str(block["type"]) != "tool_result"


def _text(text: str) -> list[dict[str, Any]]:
    """A block of text; none for a blank one, which the wire refuses."""
    return [{"type": "text", "text": text}] if text.strip() else []


def tool_use(call: ToolCall) -> dict[str, Any]:
    """A call as a block."""
    return {"type": "tool_use", "id": call.id, "name": wire_name(call.name), "input": dict(call.arguments)}
