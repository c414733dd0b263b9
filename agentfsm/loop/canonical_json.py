"""Canonical JSON: one text per value, for journals, signatures and hashes.

``canonical_json`` writes plain JSON with sorted keys. ``encode`` writes RFC 8785 text that ``decode`` reads back
without loss: what JSON cannot represent faithfully becomes a tagged object:

- ``{"$float": "1.0"}``: a float that RFC 8785 would turn into an integer, or format differently from Python
- ``{"$int": "..."}``: an integer beyond 2**53 - 1
- ``{"$str": "..."}``: a string with lone surrogates, as hex of its UTF-8 with surrogates passed through
- ``{"$items": [[key, value], ...]}``: an object with a key that starts with ``$`` or contains a lone surrogate

Few values need a tag, so ``encode`` first searches the text for signs of one, and walks the value only on a hit.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, cast

from agentfsm.loop.read_only import FrozenDict

MAX_INT = 2**53 - 1
"""The largest integer that every JSON reader represents exactly (RFC 8785, I-JSON)."""


def _own_sha256() -> Callable[[bytes], Any]:
    """The interpreter's own SHA-256: for a few bytes, OpenSSL's costs a tool step 1.4 microseconds more."""
    for module in ("_sha2", "_sha256"):  # since Python 3.12, and before
        with suppress(ImportError, AttributeError):
            return cast("Callable[[bytes], Any]", import_module(module).sha256)
    return hashlib.sha256  # in an interpreter that was built without


_sha256 = _own_sha256()
_encoder = partial(json.JSONEncoder, separators=(",", ":"), allow_nan=False)
_SORTED = _encoder(sort_keys=True, ensure_ascii=False)
_IN_ORDER = _encoder(ensure_ascii=False)


def _sorted_encoder(*, ensure_ascii: bool) -> Callable[[object, int], Iterable[str]]:
    """What ``JSONEncoder`` encodes with, with sorted keys and no check for cycles, which end in RecursionError.

    ``JSONEncoder`` makes one for each text. Made once, a small text takes 1 microsecond instead of 2.7.
    """
    encoder = _encoder(sort_keys=True, ensure_ascii=ensure_ascii, check_circular=False)
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:  # an interpreter without it
        return lambda value, _: (encoder.encode(value),)
    encode_text = json.encoder.encode_basestring_ascii if ensure_ascii else json.encoder.encode_basestring
    return make(None, encoder.default, encode_text, None, ":", ",", True, False, False)  # type: ignore[no-any-return]


_sorted_parts = _sorted_encoder(ensure_ascii=False)
_sorted_ascii_parts = _sorted_encoder(ensure_ascii=True)
_encode_string = json.encoder.encode_basestring


def canonical_json(value: object, *, ensure_ascii: bool = False) -> str:
    """Plain JSON with sorted keys and no spaces.

    Equal values give equal texts. For ASCII keys and integers the text is RFC 8785.

    Args:
        value: What ``json.dumps`` takes.
        ensure_ascii: Whether to escape all other characters.

    Raises:
        TypeError: The value is not JSON.
        ValueError: The value contains NaN, an infinity or itself, or is nested too deeply.
    """
    try:
        return "".join(_sorted_ascii_parts(value, 0) if ensure_ascii else _sorted_parts(value, 0))
    except RecursionError:
        raise _nesting_error(value) from None


# In compact JSON a number follows one of these characters; a match inside a string only costs time.
_NUMBER = re.compile(r"[:,\[]-?(?:\d{16}|\d+(?:\.0(?!\d)|(?:\.\d+)?e))")

_STR_ONLY = frozenset({str})


def encode(value: Any) -> str:
    """RFC 8785 text of a JSON value, with tags where needed; ``decode`` reads it back.

    Args:
        value: None, booleans, numbers (including NaN and the infinities), strings, lists, tuples (read back as
            lists) and mappings with string keys.

    Raises:
        TypeError: The value is not one of these.
        ValueError: The value contains itself, or is nested too deeply.
    """
    if type(value) is str and (value.isascii() or not has_lone_surrogate(value)):
        return _encode_string(value)
    try:
        text = "".join(_sorted_parts(value, 0))
    except (TypeError, ValueError):
        text = None  # a mapping that is not a dict, NaN, an infinity, or not JSON at all
    except RecursionError:
        raise _nesting_error(value) from None
    if text is not None and not _needs_tags(value, text):
        return text
    return _IN_ORDER.encode(_tag(value))


def _nesting_error(value: Any) -> ValueError:
    """The error for a value that contains itself, or is nested too deeply."""
    try:
        _SORTED.encode(value)
    except ValueError as error:
        return error
    except RecursionError:
        pass
    return ValueError("the value is nested too deeply for JSON")


def _needs_tags(value: Any, text: str) -> bool:
    """Whether the value may need tags, or has keys that Python sorts differently from RFC 8785."""
    # Searching for one character is fastest, for two slower, for a pattern slowest: so the pattern only sees what is
    # outside the strings.
    if text[:1] not in "{[" or ("$" in text and '"$' in text) or (not text.isascii() and _beyond_bmp(text)):
        return True
    if (value.__class__ is dict or value.__class__ is FrozenDict) and _STR_ONLY.issuperset(map(type, value.values())):
        return False  # only strings, as in many tool arguments: no numbers
    outside = text if "\\" in text and '\\"' in text else "".join(text.split('"')[::2])
    return _NUMBER.search(outside) is not None


def _beyond_bmp(text: str) -> bool:
    """Whether a text has characters outside the basic multilingual plane, or lone surrogates."""
    try:
        return len(text.encode("utf-16-le")) > 2 * len(text)
    except UnicodeEncodeError:
        return True


_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


def is_storable(text: str | bytes) -> bool:
    """Whether every database can store a text: it has no NUL and no lone surrogate.

    It can store any bytes, which an id is once somebody has changed its type in a file.
    """
    return isinstance(text, bytes) or _UNSTORABLE.search(text) is None


def storable_text(text: str) -> str:
    """A text as every database can store it: with U+FFFD for NUL and lone surrogates."""
    return _UNSTORABLE.sub("\ufffd", text)


def has_lone_surrogate(text: str) -> bool:
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
        return {"$str": text.encode("utf-8", "surrogatepass").hex()} if has_lone_surrogate(text) else text
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
    raise TypeError(f"{type(value).__name__} is not JSON")


def _tag_object(value: Mapping[str, Any]) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # not checked before
            raise TypeError(f"the key {key!r} of an object is not a string")
    names = sorted(value, key=lambda key: key.encode("utf-16-be", "surrogatepass"))
    if any(name.startswith("$") or has_lone_surrogate(name) for name in names):
        return {"$items": [[_tag(name), _tag(value[name])] for name in names]}
    return {str.__str__(name): _tag(value[name]) for name in names}


def decode(text: str, replace: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """The value of a text that ``encode`` wrote.

    Args:
        text: The text.
        replace: Called with each object that is not a tag, the innermost first; what it returns takes its place.

    Raises:
        ValueError: The text is not JSON, or contains a tag that ``encode`` never writes.
    """

    def untag(items: dict[str, Any]) -> Any:
        for name in items:
            if name[:1] == "$":
                if len(items) != 1 or name not in _UNTAG:
                    raise ValueError(f"{name!r} is not a tag of canonical JSON")
                return _UNTAG[name](items[name])
        return items if replace is None else replace(items)

    try:
        return json.loads(text, object_hook=untag if '"$' in text else replace)
    except RecursionError:
        raise ValueError("the text is nested too deeply") from None


def _dict_from_pairs(pairs: Any) -> dict[str, Any]:
    return {name: item for name, item in pairs}  # noqa: C416  # "dict" would take an object, too


def _text_from_hex(digits: str) -> str:
    return bytes.fromhex(digits).decode("utf-8", "surrogatepass")


_UNTAG: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$int": int,
    "$str": _text_from_hex,
    "$items": _dict_from_pairs,
}


def call_signature(tool: str, arguments: Mapping[str, Any]) -> str:
    """``tool:digest`` of a call, for loop detection; ``_ui_message`` is left out.

    Raises:
        TypeError: The arguments are not JSON.
        ValueError: They contain NaN, an infinity or themselves, or are nested too deeply.
    """
    if "_ui_message" in arguments or arguments.__class__ is not FrozenDict:
        arguments = {name: value for name, value in arguments.items() if name != "_ui_message"}
    text = canonical_json(arguments, ensure_ascii=True)
    sha256 = _sha256 if len(text) < 200 else hashlib.sha256  # which needs a fifth of the time for long texts
    return f"{tool}:{sha256(text.encode()).hexdigest()[:8]}"
