"""What a model is told of the value that a tool returned: a text, and the pictures that belong to it."""

from __future__ import annotations

from typing import Any, cast

from pydantic_core import PydanticSerializationError, to_json

from agentfsm.core.images import Image

__all__ = ["told"]


def told(value: Any) -> tuple[str, tuple[Image, ...]]:
    """The text and the pictures of a value.

    A text stands as it is and None says ``done``; an ``Image`` is shown and leaves a note in the text, and so
    does each one in a list or tuple, between its other parts; anything else is told as JSON, or by ``str``.
    """
    if isinstance(value, str):
        return value, ()
    if isinstance(value, Image):
        return value.note, (value,)
    if isinstance(value, (list, tuple)):
        parts = [part for part in cast("list[object]", value) if part is not None]
        if images := tuple(part for part in parts if isinstance(part, Image)):
            return "\n".join(part.note if isinstance(part, Image) else _text(part) for part in parts), images
    return _text(cast("object", value)), ()


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return "done"
    try:
        return to_json(value).decode()
    except (PydanticSerializationError, UnicodeEncodeError, ValueError):
        return str(value)
