"""Values of the loop as canonical JSON, field by field, whatever their classes hold.

A field that has its default is left out. What somebody said, and all JSON of the user's, is hidden; names,
ids, kinds and counts stand in the record itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, cast

from pydantic import BaseModel

from agentfsm.core.failures import DEFAULT_ACTIONS, Failure
from agentfsm.core.state import PersonReply
from agentfsm.journal.canonical import MAX_INT, encode
from agentfsm.journal.records import Hider

__all__ = ["HIDDEN", "fields", "written"]

HIDDEN = frozenset(
    {
        "answer",
        "arguments",
        "blockers",
        "by",
        "choices",
        "content",
        "context",
        "data",
        "denied",
        "ending_value",
        "explanation",
        "extra",
        "malformed",
        "metadata",
        "partial_data",
        "question",
        "recalled",
        "record",
        "refusal",
        "text",
        "value",
    }
)
"""The fields that hold what somebody said, or JSON of the user's; mappings are hidden wherever they stand."""

_NO_DEFAULT = object()
_EMPTY: Mapping[str, tuple[Any, ...]] = {"{}": ({},), "[]": ((), [])}  # and the defaults that it stands for
_NOTHING: Mapping[str, str] = {}


class _Field(NamedTuple):
    name: str
    key: str  # its name as it stands in an object
    default: Any
    hidden: bool


class _Shape(NamedTuple):
    """What there is to write of a class.

    Attributes:
        fields: Its fields, in the order in which canonical JSON has them.
        get: Gives the fields of a value, all at once.
        single: Whether there is one field, which ``get`` gives as it is.
        failure: Whether it is a failure; to ask a class of pydantic's what is an instance of it takes long.
    """

    fields: tuple[_Field, ...]
    get: Callable[[Any], Any]
    single: bool
    failure: bool


@cache
def _shape(kind: type[object]) -> _Shape | None:
    """The shape of a dataclass or of a model of pydantic; None for any other class."""
    if issubclass(kind, BaseModel):
        defaults = {n: f.get_default(call_default_factory=False) for n, f in kind.model_fields.items()}
    elif dataclasses.is_dataclass(kind):
        defaults = {f.name: _default(f) for f in dataclasses.fields(kind)}
    else:
        return None
    names = sorted(defaults)
    get = attrgetter(*names) if names else _nothing
    fields = tuple(_Field(name, f'"{name}":', defaults[name], name in HIDDEN) for name in names)
    return _Shape(fields, get, len(fields) == 1, issubclass(kind, Failure))


def _nothing(value: object) -> tuple[()]:
    return ()


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return _NO_DEFAULT if field.default_factory is dataclasses.MISSING else field.default_factory()


def written(value: Any, hider: Hider) -> str:
    """The JSON of a value of the loop's, with what is to be hidden put aside."""
    kind = value.__class__
    if kind is str:
        return encode(value)
    if kind is tuple or kind is list:
        return f"[{','.join([written(item, hider) for item in value])}]"
    shape = _shape(kind)
    if shape is not None:
        return fields(value, hider, shape=shape)
    if isinstance(value, Enum):
        return encode(value.value)
    if kind is int and -MAX_INT <= value <= MAX_INT:
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return encode(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join([written(item, hider) for item in cast('Sequence[Any]', value)])}]"
    return hider.put(dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else value)


def fields(value: Any, hider: Hider, instead: Mapping[str, str] = _NOTHING, shape: _Shape | None = None) -> str:
    """The JSON of a value's fields that are not what they are by default.

    Args:
        value: A dataclass or a model of pydantic.
        hider: Takes what is to be hidden.
        instead: What is written for some of the fields, where they are not what they are by default.
        shape: The shape of its class, where that is known.

    Raises:
        TypeError: It is something else.
    """
    shape = shape or _shape(value.__class__)
    if shape is None:
        raise TypeError(f"{type(value).__name__} has no fields to write")
    said: list[str] = []
    for (name, key, default, hidden), held in zip(
        shape.fields, (shape.get(value),) if shape.single else shape.get(value), strict=True
    ):
        if held is default:
            continue
        kind = held.__class__
        if name in instead:
            text = instead[name]
        elif kind in _PLAIN and held == default:
            continue
        elif not hidden:
            text = written(held, hider)
        elif name == "arguments":
            text = hider.arguments(str(getattr(value, "tool", "") or getattr(value, "name", "")), held)
        elif kind not in _PLAIN and isinstance(held, (BaseModel, PersonReply)):
            text = written(held, hider)
        else:
            text = hider.put(held)
        if text and (text not in _EMPTY or not _is_empty(text, default)):
            said.append(key + text)
    if shape.failure and value.suggested_action is DEFAULT_ACTIONS[value.kind]:
        said = [each for each in said if not each.startswith('"suggested_action":')]
    return f"{{{','.join(said)}}}"


_PLAIN = frozenset({type(None), bool, int, float, str})


def _is_empty(text: str, default: Any) -> bool:
    """Whether an empty value is what there is by default."""
    return default in _EMPTY[text] or (text == "{}" and dataclasses.is_dataclass(default))
