"""What all wires share: strict JSON, tool calls and token counts from responses, images, and cached message encoding.

Response bodies come from strangers (providers, proxies, local servers, and the model itself for arguments), so each
parsing function accepts any value and either returns a clean one or says what is wrong with it. Requests only grow, so
a run caches the messages that it has encoded already (``ModelRequest.memo``) and each request encodes only new ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import count
from math import isfinite
from typing import Any, Protocol, cast

from agentfsm.errors import TransientProviderError
from agentfsm.loop.messages import Image, Message, Role, ToolCall, Usage
from agentfsm.loop.model import ModelRequest
from agentfsm.loop.prompts import Transcript

__all__ = [
    "MessageEncoder",
    "PerMessageEncoder",
    "RequestCache",
    "as_list",
    "as_object",
    "as_text",
    "cached_encoding",
    "call_ids",
    "data_url",
    "dumps",
    "finish_reason",
    "join_body",
    "loads",
    "loads_unrepaired",
    "mark_unpriced",
    "parse_tool_calls",
    "repair_surrogates",
    "safe_tool_name",
    "token_count",
    "visible_message",
]


_SAFE_DEPTH = 200
"""Brackets up to which no value can be nested too deep."""


def dumps(value: object) -> str:
    """The JSON text of a value, keys in their order; mappings of any type are objects."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_as_dict)


def loads(text: str | bytes) -> object:
    """The value of a JSON text, which every later JSON writer will take.

    Python reads NaN and 1e999, which are no JSON numbers, and half a surrogate pair, which is no text; the
    first are refused here and the second replaced, so that none breaks a journal record or the next request.

    Raises:
        ValueError: The text is no JSON; the message says where, and quotes nothing of it.
    """
    value = loads_unrepaired(text)
    return repair_surrogates(value) if _may_need_repair(text) else value


def loads_unrepaired(text: str | bytes) -> object:
    """The value of one event of a stream: half a letter stays, since the other half may come with the next.

    Raises:
        ValueError: The text is no JSON; the message says where, and quotes nothing of it.
    """
    try:
        return cast("object", json.loads(text, parse_constant=_reject_constant, parse_float=_parse_finite_float))
    except RecursionError:
        raise ValueError("nested too deep") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None


def repair_surrogates(value: object) -> object:
    """A JSON value with every surrogate pair made one letter, and every half without its other a ``?``.

    Raises:
        ValueError: It is nested deeper than a JSON writer goes.
    """
    try:
        text = json.dumps(value, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError:
            joined: object = json.loads(json.dumps(value))  # escapes of two halves in a row are read as one letter
            return cast("object", json.loads(json.dumps(joined, ensure_ascii=False).encode(errors="replace")))
    except RecursionError:
        raise ValueError("nested too deep") from None
    return value


def as_object(value: object) -> dict[str, Any]:
    """The value if it is a JSON object, else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """The value if it is a JSON array, else an empty one."""
    return cast("list[object]", value) if isinstance(value, list) else []


def as_text(value: object) -> str:
    """The value if it is a text, else an empty one."""
    return value if isinstance(value, str) else ""


def finish_reason(body: Mapping[str, Any], key: str) -> str:
    """Why an answer ended, in its server's word.

    Without a word nobody knows whether it did. OpenAI's own servers have sent whole answers so, by a fault that
    another try did not meet (https://github.com/openai/openai-openapi/pull/20), and Azure's send null where an
    answer is not complete (https://github.com/MicrosoftDocs/azure-docs/issues/109589).

    Raises:
        TransientProviderError: There is none.
    """
    if word := as_text(body.get(key)):
        return word
    raise TransientProviderError(f"the server does not say that the reply has ended (it gives no {key})")


def token_count(usage: Mapping[str, Any], key: str) -> int:
    """A number of tokens; 0 where the field is missing or no such number."""
    value = usage.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def mark_unpriced(usage: Usage) -> Usage:
    """Usage whose price nobody has said yet."""
    return usage if usage.cost_usd else replace(usage, unpriced_tokens=usage.total_tokens)


def safe_tool_name(name: str) -> str:
    """A tool's name as every wire takes it.

    A model may call ``"foo.bar"``. The next request quotes that call, and a provider that checks names would
    refuse the whole transcript for it, now and ever after.
    """
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64] or "unnamed"


def call_ids(messages: Iterable[Message]) -> set[str]:
    """The ids of all calls of a transcript."""
    return {call.id for message in messages for call in message.tool_calls}


def parse_tool_calls(
    raw: Iterable[tuple[object, object, object]], used_ids: Collection[str] = ()
) -> tuple[ToolCall, ...]:
    """The calls of a reply, from each one's id, name and arguments as they came over the wire.

    An id that is missing, that stands twice, or that an earlier reply of the transcript used already
    (``used_ids``) is replaced by the first free one of ``call_1``, ``call_2``... : the same reply to the same
    transcript gets the same ids, and a result can never be read as the answer to another call.
    """
    raw = list(raw)
    reserved = {*used_ids, *(id_ for id_, _, _ in raw if isinstance(id_, str))}
    fresh = (made for n in count(1) if (made := f"call_{n}") not in reserved)
    seen = set(used_ids)
    calls: list[ToolCall] = []
    for id_, name, arguments in raw:
        call_id = id_ if isinstance(id_, str) and id_ and id_ not in seen else next(fresh)
        seen.add(call_id)
        parsed, malformed = _parse_arguments(arguments)
        if not isinstance(name, str) or not name:
            name, parsed, malformed = "unnamed", {}, "the call names no tool"
        calls.append(ToolCall(call_id, name, parsed, malformed))
    return tuple(calls)


def _parse_arguments(value: object) -> tuple[dict[str, Any], str | None]:
    """The arguments of a call, and why they are none."""
    if isinstance(value, str):
        if not value.strip():
            return {}, None
        try:
            value = loads(value)
        except ValueError as error:
            return {}, f"the arguments are no valid JSON: {error}"
    if value is None:
        return {}, None
    if isinstance(value, dict):
        return cast("dict[str, Any]", value), None
    return {}, f"the arguments are a JSON {type(value).__name__}, not an object"


def _as_dict(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Any]", value))
    raise TypeError(f"{type(value).__name__} is no JSON")


def _may_need_repair(text: str | bytes) -> bool:
    """Whether a JSON text may hold half a letter, or be nested too deep to be written again.

    Half a surrogate pair comes escaped in bytes, which otherwise are UTF-8; a text may hold it as it is.
    """
    if isinstance(text, str):
        return "\\u" in text or not text.isascii() or text.count("[") + text.count("{") > _SAFE_DEPTH
    return b"\\u" in text or text.count(b"[") + text.count(b"{") > _SAFE_DEPTH


def _parse_finite_float(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError("a number is out of JSON's range")
    return value


def _reject_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


IMAGES_OMITTED = "[Pictures are not shown here.]"


def visible_message(message: Message, images: bool) -> Message:
    """The message as the model sees it.

    Pictures are left out, with a word that they are, where the model takes none, and where a tool's message
    answers no call of the wire: those are for models that were given no tools, and are all text.

    Args:
        message: The message.
        images: Whether the model takes pictures.
    """
    if not message.images or (images and (message.role is not Role.TOOL or message.tool_call_id is not None)):
        return message
    return replace(message, images=(), content=f"{message.content}\n{IMAGES_OMITTED}".lstrip())


def data_url(image: Image) -> str:
    """A picture as a ``data:`` address."""
    return f"data:{image.media_type};base64,{image.data}"


def labelled_images(messages: Iterable[Message]) -> Iterable[tuple[str, Image]]:
    """Each picture of a run of tools' messages, and the words that say whose it is."""
    for message in messages:
        for place, image in enumerate(message.images, 1):
            which = f", image {place} of {len(message.images)}" if len(message.images) > 1 else ""
            yield f"From {message.name or 'a tool'} (call {message.tool_call_id}{which}):", image


class MessageEncoder(Protocol):
    """A wire's form of a transcript, written as it grows."""

    def add(self, message: Message) -> None:
        """Write a message that stands in every later request."""
        ...

    def encoded_items(self, tail: Iterable[Message]) -> list[str]:
        """The JSON of all units, in pieces without a comma between, with more messages behind for this once."""
        ...


class PerMessageEncoder:
    """Units that no later message changes: each message is so many of them.

    Args:
        encode_message: The units of a message.
        encode_after_results: The units that stand behind the last of several tools' messages in a row; none unless given.
    """

    def __init__(
        self,
        encode_message: Callable[[Message], list[dict[str, Any]]],
        encode_after_results: Callable[[list[Message]], list[dict[str, Any]]] | None = None,
    ) -> None:
        self._encode_message = encode_message
        self._encode_after_results = encode_after_results
        self._pending_results: list[Message] = []
        self._encoded: list[str] = []

    def add(self, message: Message) -> None:
        """Write a message that stands in every later request."""
        self._encoded += map(dumps, self._encode_one(message, self._pending_results))

    def encoded_items(self, tail: Iterable[Message]) -> list[str]:
        """The JSON of all units."""
        new = [dumps(unit) for unit in self._encode_rest(tail, self._pending_results.copy())]
        if len(self._encoded) > 1:
            self._encoded = [",".join(self._encoded)]
        return [*self._encoded, *new]

    def encode_all(self, messages: Iterable[Message]) -> list[dict[str, Any]]:
        """The units of a whole transcript."""
        return self._encode_rest(messages, [])

    def _encode_one(self, message: Message, pending: list[Message]) -> list[dict[str, Any]]:
        """The units of a message, and before it what was due behind a row of tools' messages, if it ends one."""
        if self._encode_after_results is None:
            return self._encode_message(message)
        if message.role is Role.TOOL and message.tool_call_id is not None:
            if message.images:
                pending.append(message)
            return self._encode_message(message)
        due = self._encode_after_results(pending) if pending else []
        pending.clear()
        return [*due, *self._encode_message(message)]

    def _encode_rest(self, messages: Iterable[Message], pending: list[Message]) -> list[dict[str, Any]]:
        units = [unit for message in messages for unit in self._encode_one(message, pending)]
        return (
            [*units, *self._encode_after_results(pending)]
            if pending and self._encode_after_results is not None
            else units
        )


class RequestCache:
    """A transcript as far as it is written.

    Attributes:
        encoder: Its messages in the wire's form.
        system: Those of them that are instructions.
        call_ids: The ids of its calls.
    """

    def __init__(self, messages: list[Message], encoder: MessageEncoder) -> None:
        self.encoder = encoder
        self.system: list[Message] = []
        self.call_ids: set[str] = set()
        self._messages = messages
        self._encoded_count = 0

    def is_prefix_of(self, transcript: Transcript) -> bool:
        """Whether a transcript goes on where this one is."""
        return transcript.head is self._messages and transcript.stable_count >= self._encoded_count

    def extend(self, transcript: Transcript) -> None:
        """Write what is new."""
        for message in self._messages[self._encoded_count : transcript.stable_count]:
            self.encoder.add(message)
            if message.role is Role.SYSTEM:
                self.system.append(message)
            self.call_ids.update(call.id for call in message.tool_calls)
        self._encoded_count = transcript.stable_count


def cached_encoding(
    request: ModelRequest, key: object, new_encoder: Callable[[], MessageEncoder]
) -> tuple[RequestCache, list[Message]]:
    """A request's transcript, written as far as it is settled, and the messages behind that.

    Args:
        request: The request.
        key: Who writes; what is kept in the request's memo is theirs.
        new_encoder: The wire's form of an empty transcript.
    """
    messages = request.messages
    transcript = messages if isinstance(messages, Transcript) else Transcript(list(messages), len(messages))
    kept = request.cache.get(key)
    if not isinstance(kept, RequestCache) or not kept.is_prefix_of(transcript):
        kept = request.cache[key] = RequestCache(transcript.head, new_encoder())
    kept.extend(transcript)
    return kept, list(transcript.tail)


def join_body(body: dict[str, Any], key: str, encoded_items: list[str]) -> bytes:
    """The JSON text of a body, with units that are written already as the list under a key."""
    at = list(body).index(key)
    items = list(body.items())
    before = "".join(f"{dumps(k)}:{dumps(v)}," for k, v in items[:at])
    after = "".join(f",{dumps(k)}:{dumps(v)}" for k, v in items[at + 1 :])
    text = "".join(("{", before, dumps(key), ":[", ",".join(encoded_items), "]", after, "}"))
    return text.encode(errors="replace")
