"""What every wire needs of a body: strict JSON, tool calls from it, ids that never clash, counts.

Bodies are written by strangers (providers, proxies, local servers, and the model itself for arguments), so
each function here takes any value and either gives a clean one or says in words what is wrong with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import count
from math import isfinite
from typing import Any, cast

from agentfsm.core.messages import Message, ToolCall, Usage
from agentfsm.errors import TransientProviderError

__all__ = [
    "as_list",
    "as_object",
    "call_ids",
    "dumps",
    "ended",
    "loads",
    "loads_as_it_is",
    "mended",
    "text_of",
    "token_count",
    "tool_calls",
    "unpriced",
    "wire_name",
]

_DEEP = 200
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
    value = loads_as_it_is(text)
    return mended(value) if _may_be_odd(text) else value


def loads_as_it_is(text: str | bytes) -> object:
    """The value of one event of a stream: half a letter stays, since the other half may come with the next.

    Raises:
        ValueError: The text is no JSON; the message says where, and quotes nothing of it.
    """
    try:
        return cast("object", json.loads(text, parse_constant=_refuse_constant, parse_float=_finite))
    except RecursionError:
        raise ValueError("nested too deep") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None


def mended(value: object) -> object:
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


def text_of(value: object) -> str:
    """The value if it is a text, else an empty one."""
    return value if isinstance(value, str) else ""


def ended(answer: Mapping[str, Any], key: str) -> str:
    """Why an answer ended, in its server's word.

    Without a word nobody knows whether it did. OpenAI's own servers have sent whole answers so, by a fault that
    another try did not meet (https://github.com/openai/openai-openapi/pull/20), and Azure's send null where an
    answer is not complete (https://github.com/MicrosoftDocs/azure-docs/issues/109589).

    Raises:
        TransientProviderError: There is none.
    """
    if word := text_of(answer.get(key)):
        return word
    raise TransientProviderError(f"the server does not say that the reply has ended (it gives no {key})")


def token_count(usage: Mapping[str, Any], key: str) -> int:
    """A number of tokens; 0 where the field is missing or no such number."""
    value = usage.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def unpriced(usage: Usage) -> Usage:
    """Usage whose price nobody has said yet."""
    return usage if usage.cost_usd else replace(usage, unpriced_tokens=usage.total_tokens)


def wire_name(name: str) -> str:
    """A tool's name as every wire takes it.

    A model may call ``"foo.bar"``. The next request quotes that call, and a provider that checks names would
    refuse the whole transcript for it, now and ever after.
    """
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64] or "unnamed"


def call_ids(messages: Iterable[Message]) -> set[str]:
    """The ids of all calls of a transcript."""
    return {call.id for message in messages for call in message.tool_calls}


def tool_calls(raw: Iterable[tuple[object, object, object]], taken: Collection[str] = ()) -> tuple[ToolCall, ...]:
    """The calls of a reply, from each one's id, name and arguments as they came over the wire.

    An id that is missing, that stands twice, or that an earlier reply of the transcript used already
    (``taken``) is replaced by the first free one of ``call_1``, ``call_2``... : the same reply to the same
    transcript gets the same ids, and a result can never be read as the answer to another call.
    """
    raw = list(raw)
    reserved = {*taken, *(id_ for id_, _, _ in raw if isinstance(id_, str))}
    fresh = (made for n in count(1) if (made := f"call_{n}") not in reserved)
    seen = set(taken)
    calls: list[ToolCall] = []
    for id_, name, arguments in raw:
        call_id = id_ if isinstance(id_, str) and id_ and id_ not in seen else next(fresh)
        seen.add(call_id)
        parsed, malformed = _arguments(arguments)
        if not isinstance(name, str) or not name:
            name, parsed, malformed = "unnamed", {}, "the call names no tool"
        calls.append(ToolCall(call_id, name, parsed, malformed))
    return tuple(calls)


def _arguments(value: object) -> tuple[dict[str, Any], str | None]:
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


def _may_be_odd(text: str | bytes) -> bool:
    """Whether a JSON text may hold half a letter, or be nested too deep to be written again.

    Half a surrogate pair comes escaped in bytes, which otherwise are UTF-8; a text may hold it as it is.
    """
    if isinstance(text, str):
        return "\\u" in text or not text.isascii() or text.count("[") + text.count("{") > _DEEP
    return b"\\u" in text or text.count(b"[") + text.count(b"{") > _DEEP


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError("a number is out of JSON's range")
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")
