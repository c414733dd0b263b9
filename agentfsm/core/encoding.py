"""The C encoder of ``json``, made once: the standard library makes one for each text, at the cost of a small text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

__all__ = ["encoder"]


def encoder(*, ensure_ascii: bool) -> Callable[[Any], str]:
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
