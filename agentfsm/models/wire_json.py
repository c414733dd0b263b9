"""Strict JSON of the wires: what is parsed can be encoded again, and what is not of an expected type is empty.

A response body is untrusted input: from a provider, a proxy, a local server, and in tool arguments from the model
itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any, cast

_SAFE_DEPTH = 200
"""A JSON text with at most this many brackets cannot be nested too deeply to be encoded again."""


def dumps(value: object) -> str:
    """The compact JSON text of a value, keys in their order; any ``Mapping`` is written as an object."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_as_dict)


def loads(text: str | bytes) -> object:
    """The value of a JSON text, safe to encode again.

    Python's parser accepts NaN and 1e999, which are not JSON numbers, and lone surrogates, which are not valid
    text. The numbers are rejected and the surrogates replaced, so that neither breaks a journal record or the
    next request.

    Raises:
        ValueError: The text is not JSON; the message says where, and quotes none of it.
    """
    value = loads_unrepaired(text)
    return repair_surrogates(value) if _may_need_repair(text) else value


def loads_unrepaired(text: str | bytes) -> object:
    """The value of one stream event. Lone surrogates stay, since the other half may come in the next event.

    Raises:
        ValueError: The text is not JSON; the message says where, and quotes none of it.
    """
    try:
        return cast("object", json.loads(text, parse_constant=_reject_constant, parse_float=_parse_finite_float))
    except RecursionError:
        raise ValueError("nested too deep") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None


def repair_surrogates(value: object) -> object:
    """A JSON value with surrogate pairs joined, and each lone surrogate replaced by ``?``.

    Raises:
        ValueError: The value is nested too deeply to be encoded.
    """
    try:
        text = json.dumps(value, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError:
            joined: object = json.loads(json.dumps(value))  # two adjacent escapes are parsed as one character
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
    """The value if it is a string, else an empty one."""
    return value if isinstance(value, str) else ""


def _as_dict(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Any]", value))
    raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")


def _may_need_repair(text: str | bytes) -> bool:
    """Whether a JSON text may hold a lone surrogate, or be nested too deeply to be encoded again.

    In bytes, which are UTF-8, a lone surrogate can only be an escape; a str may hold it unescaped.
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
    raise ValueError(f"{name} is not a JSON number")
