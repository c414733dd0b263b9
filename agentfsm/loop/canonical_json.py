"""Canonical JSON (RFC 8785, with tags for what JSON cannot represent): one text per value, and back.

The text is RFC 8785. What JSON cannot represent faithfully is written as a tagged object:

- ``{"$float": "1.0"}``: a float that RFC 8785 would turn into an integer, or format differently from Python
- ``{"$int": "..."}``: an integer beyond 2**53 - 1
- ``{"$str": "..."}``: a string with lone surrogates, as hex of its UTF-8 with surrogates passed through
- ``{"$items": [[key, value], ...]}``: an object with a key that starts with ``$`` or holds a lone surrogate

Few values need a tag, so the text is scanned for signs of one first, and only a hit is walked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

__all__ = ["MAX_INT", "decode", "encode", "make_json_encoder"]


def make_json_encoder(*, ensure_ascii: bool) -> Callable[[Any], str]:
    """What writes a value as JSON: keys sorted, no spaces, no NaN, and no mapping that is no ``dict``.

    It looks for no circle: a value that holds itself ends in ``RecursionError``.

    Args:
        ensure_ascii: Whether all other characters are written as escapes.
    """
    strict = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=ensure_ascii, allow_nan=False)
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:  # an interpreter without the C encoder
        return strict.encode
    string = json.encoder.encode_basestring_ascii if ensure_ascii else json.encoder.encode_basestring
    run = make(None, strict.default, string, None, ":", ",", True, False, False)
    return lambda value: "".join(run(value, 0))


MAX_INT = 2**53 - 1
"""The largest integer that every JSON reader keeps exactly."""

_STRICT = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_ENCODE_STRING = json.encoder.encode_basestring
_ENCODE_ORDERED = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode

# A number in compact JSON stands behind one of these; a hit inside a string would cost time and nothing else.
_NUMBER = re.compile(r"[:,\[]-?(?:\d{16}|\d+(?:\.0(?!\d)|(?:\.\d+)?e))")

_STR_ONLY = frozenset({str})

_ENCODE_FAST = make_json_encoder(
    ensure_ascii=False
)  # it looks for no circle: where there is no end, ``_STRICT`` is asked


def encode(value: Any) -> str:
    """The one text of a JSON value.

    Args:
        value: None, booleans, numbers (NaN and the infinities too), strings, lists, tuples (they come back as
            lists) and mappings with string keys.

    Raises:
        TypeError: The value is none of these.
        ValueError: The value holds itself, or is nested too deeply.
    """
    if type(value) is str and (value.isascii() or not _has_lone_surrogate(value)):
        return _ENCODE_STRING(value)
    try:
        text = _ENCODE_FAST(value)
    except ValueError as error:
        if "Circular" in str(error):
            raise
        text = None  # NaN or an infinity
    except TypeError:
        text = None  # a mapping that is no dict, or no JSON at all
    except RecursionError:
        raise _nesting_error(value) from None
    if text is not None and not _needs_tags(value, text):
        return text
    return _ENCODE_ORDERED(_tag(value))


def _nesting_error(value: Any) -> ValueError:
    """Why a value has no end: it holds itself, or is nested too deeply."""
    try:
        _STRICT.encode(value)
    except ValueError as error:
        return error
    except RecursionError:
        pass
    return ValueError("the value is nested too deeply for JSON")


def _needs_tags(value: Any, text: str) -> bool:
    """Whether a value's text may hold what must be tagged, or keys that Python sorts otherwise than RFC 8785."""
    # A text is searched for one character in no time, for two it takes longer, and a pattern is slow to look
    # through all that people said: it sees what stands outside the strings.
    if text[:1] not in "{[" or ("$" in text and '"$' in text) or (not text.isascii() and _beyond_bmp(text)):
        return True
    if type(value) is dict and _STR_ONLY.issuperset(map(type, cast("dict[str, object]", value).values())):
        return False  # arguments that are texts, as many are: there is no number anywhere
    outside = text if "\\" in text and '\\"' in text else "".join(text.split('"')[::2])
    return _NUMBER.search(outside) is not None


def _beyond_bmp(text: str) -> bool:
    """Whether a text has characters that UTF-16 writes as two, or lone surrogates."""
    try:
        return len(text.encode("utf-16-le")) > 2 * len(text)
    except UnicodeEncodeError:
        return True


def _has_lone_surrogate(text: str) -> bool:
    """Whether a text has lone surrogates."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _tag(value: Any) -> Any:
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        text = str.__str__(value)
        return {"$str": text.encode("utf-8", "surrogatepass").hex()} if _has_lone_surrogate(text) else text
    if isinstance(value, int):
        number = int(value)
        return number if -MAX_INT <= number <= MAX_INT else {"$int": str(number)}
    if isinstance(value, float):
        text = float.__repr__(value)
        plain = "e" not in text and not text.endswith(".0") and value == value and abs(value) != float("inf")
        return float(value) if plain else {"$float": text}
    if isinstance(value, (list, tuple)):
        return [_tag(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, Mapping):
        return _tag_object(cast("Mapping[str, Any]", value))
    raise TypeError(f"{type(value).__name__} is no JSON")


def _tag_object(value: Mapping[str, Any]) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # what callers promise
            raise TypeError(f"the key {key!r} of an object is no string")
    names = sorted(value, key=lambda key: key.encode("utf-16-be", "surrogatepass"))
    if any(name.startswith("$") or _has_lone_surrogate(name) for name in names):
        return {"$items": [[_tag(name), _tag(value[name])] for name in names]}
    return {str.__str__(name): _tag(value[name]) for name in names}


def decode(text: str) -> Any:
    """The value of a text that ``encode`` made.

    Raises:
        ValueError: The text is not JSON, or holds a tag that ``encode`` never makes.
    """
    try:
        value = json.loads(text)
        return _untag(value) if '"$' in text else value
    except RecursionError:
        raise ValueError("the text is nested too deeply") from None


def _untag(value: Any) -> Any:
    if isinstance(value, list):
        return [_untag(item) for item in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    found = cast("dict[str, Any]", value)
    tag = next((name for name in found if name.startswith("$")), None)
    if tag is None:
        return {name: _untag(item) for name, item in found.items()}
    if len(found) != 1 or tag not in _UNTAG:
        raise ValueError(f"{tag!r} is no tag of canonical JSON")
    return _UNTAG[tag](found[tag])


def _dict_from_pairs(pairs: Any) -> dict[str, Any]:
    return {cast("str", _untag(name)): _untag(item) for name, item in pairs}


def _text_from_hex(digits: str) -> str:
    return bytes.fromhex(digits).decode("utf-8", "surrogatepass")


_UNTAG: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$int": int,
    "$str": _text_from_hex,
    "$items": _dict_from_pairs,
}
