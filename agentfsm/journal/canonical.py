"""Canonical JSON: one text for a value, and the same value back from it.

The text is RFC 8785, made by the C encoder of the standard library. What JSON has no faithful way to write
stands in a tagged object:

- ``{"$float": "1.0"}``: a float that RFC 8785 would turn into an integer, or write otherwise than Python
- ``{"$int": "..."}``: an integer beyond 2**53 - 1
- ``{"$str": "..."}``: a text with lone surrogates, as the hex of UTF-8 that lets them pass
- ``{"$items": [[key, value], ...]}``: an object one of whose keys begins with ``$`` or holds a lone surrogate

Few values need one, so the text is searched for signs of them, and only a hit is walked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from agentfsm.core.encoding import encoder

__all__ = ["MAX_INT", "decode", "encode"]

MAX_INT = 2**53 - 1
"""The largest integer that every JSON reader keeps exactly."""

_STRICT = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_STRING = json.encoder.encode_basestring
_ORDERED = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode

# A number in compact JSON stands behind one of these; a hit inside a string would cost time and nothing else.
_NUMBER = re.compile(r"[:,\[]-?(?:\d{16}|\d+(?:\.0(?!\d)|(?:\.\d+)?e))")

_TEXTS = frozenset({str})

_FAST = encoder(ensure_ascii=False)  # it looks for no circle: where there is no end, ``_STRICT`` is asked


def encode(value: Any) -> str:
    """The one text of a JSON value.

    Args:
        value: None, booleans, numbers (NaN and the infinities too), strings, lists, tuples (they come back as
            lists) and mappings with string keys.

    Raises:
        TypeError: The value is none of these.
        ValueError: The value holds itself, or is nested too deeply.
    """
    if type(value) is str and (value.isascii() or not _lone(value)):
        return _STRING(value)
    try:
        text = _FAST(value)
    except ValueError as error:
        if "Circular" in str(error):
            raise
        text = None  # NaN or an infinity
    except TypeError:
        text = None  # a mapping that is no dict, or no JSON at all
    except RecursionError:
        raise _endless(value) from None
    if text is not None and not _odd(value, text):
        return text
    return _ORDERED(_tagged(value))


def _endless(value: Any) -> ValueError:
    """Why a value has no end: it holds itself, or is nested too deeply."""
    try:
        _STRICT.encode(value)
    except ValueError as error:
        return error
    except RecursionError:
        pass
    return ValueError("the value is nested too deeply for JSON")


def _odd(value: Any, text: str) -> bool:
    """Whether a value's text may hold what must be tagged, or keys that Python sorts otherwise than RFC 8785."""
    # A text is searched for one character in no time, for two it takes longer, and a pattern is slow to look
    # through all that people said: it sees what stands outside the strings.
    if text[:1] not in "{[" or ("$" in text and '"$' in text) or (not text.isascii() and _wide(text)):
        return True
    if type(value) is dict and _TEXTS.issuperset(map(type, cast("dict[str, object]", value).values())):
        return False  # arguments that are texts, as many are: there is no number anywhere
    outside = text if "\\" in text and '\\"' in text else "".join(text.split('"')[::2])
    return _NUMBER.search(outside) is not None


def _wide(text: str) -> bool:
    """Whether a text has characters that UTF-16 writes as two, or lone surrogates."""
    try:
        return len(text.encode("utf-16-le")) > 2 * len(text)
    except UnicodeEncodeError:
        return True


def _lone(text: str) -> bool:
    """Whether a text has lone surrogates."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _tagged(value: Any) -> Any:
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        text = str.__str__(value)
        return {"$str": text.encode("utf-8", "surrogatepass").hex()} if _lone(text) else text
    if isinstance(value, int):
        number = int(value)
        return number if -MAX_INT <= number <= MAX_INT else {"$int": str(number)}
    if isinstance(value, float):
        text = float.__repr__(value)
        plain = "e" not in text and not text.endswith(".0") and value == value and abs(value) != float("inf")
        return float(value) if plain else {"$float": text}
    if isinstance(value, (list, tuple)):
        return [_tagged(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, Mapping):
        return _tagged_object(cast("Mapping[str, Any]", value))
    raise TypeError(f"{type(value).__name__} is no JSON")


def _tagged_object(value: Mapping[str, Any]) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # what callers promise
            raise TypeError(f"the key {key!r} of an object is no string")
    names = sorted(value, key=lambda key: key.encode("utf-16-be", "surrogatepass"))
    if any(name.startswith("$") or _lone(name) for name in names):
        return {"$items": [[_tagged(name), _tagged(value[name])] for name in names]}
    return {str.__str__(name): _tagged(value[name]) for name in names}


def decode(text: str) -> Any:
    """The value of a text that ``encode`` made.

    Raises:
        ValueError: The text is not JSON, or holds a tag that ``encode`` never makes.
    """
    try:
        value = json.loads(text)
        return _plain(value) if '"$' in text else value
    except RecursionError:
        raise ValueError("the text is nested too deeply") from None


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    found = cast("dict[str, Any]", value)
    tag = next((name for name in found if name.startswith("$")), None)
    if tag is None:
        return {name: _plain(item) for name, item in found.items()}
    if len(found) != 1 or tag not in _READ:
        raise ValueError(f"{tag!r} is no tag of canonical JSON")
    return _READ[tag](found[tag])


def _items(pairs: Any) -> dict[str, Any]:
    return {cast("str", _plain(name)): _plain(item) for name, item in pairs}


def _text(digits: str) -> str:
    return bytes.fromhex(digits).decode("utf-8", "surrogatepass")


_READ: dict[str, Callable[[Any], Any]] = {"$float": float, "$int": int, "$str": _text, "$items": _items}
