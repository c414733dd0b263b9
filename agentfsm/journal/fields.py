"""Values of the loop as JSON data, field by field, whatever their classes hold.

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
from agentfsm.journal.records import Hider

__all__ = ["HIDDEN", "fields", "written"]

Data = dict[str, Any]

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


class _Shape(NamedTuple):
    """What there is to write of a class.

    Attributes:
        fields: Each field's name, its default and whether it is hidden.
        get: Gives the fields of a value, all at once.
        single: Whether there is one field, which ``get`` gives as it is.
        failure: Whether it is a failure; to ask a class of pydantic's what is an instance of it takes long.
    """

    fields: tuple[tuple[str, Any, bool], ...]
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
    get = attrgetter(*defaults) if defaults else _nothing
    fields = tuple((name, default, name in HIDDEN) for name, default in defaults.items())
    return _Shape(fields, get, len(fields) == 1, issubclass(kind, Failure))


def _nothing(value: object) -> tuple[()]:
    return ()


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return _NO_DEFAULT if field.default_factory is dataclasses.MISSING else field.default_factory()


def written(value: Any, hider: Hider) -> Any:
    """A value of the loop's as JSON data, with what is to be hidden put aside."""
    kind = value.__class__
    if kind in _AS_IT_IS:
        return value
    if kind is tuple or kind is list:
        return [written(item, hider) for item in value]
    shape = _shape(kind)
    if shape is not None:
        return fields(value, hider, shape)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [written(item, hider) for item in cast("Sequence[Any]", value)]
    return hider.hide(dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else value)


def fields(value: Any, hider: Hider, shape: _Shape | None = None, without: str = "") -> Data:
    """A value's fields that are not what they are by default.

    Args:
        value: A dataclass or a model of pydantic.
        hider: Takes what is to be hidden.
        shape: The shape of its class, where that is known.
        without: A field to leave out.

    Raises:
        TypeError: It is something else.
    """
    shape = shape or _shape(value.__class__)
    if shape is None:
        raise TypeError(f"{type(value).__name__} has no fields to write")
    names, get, single, failure = shape
    data: Data = {}
    for (name, default, hidden), held in zip(names, (get(value),) if single else get(value), strict=True):
        if held is default or name == without:
            continue
        kind = held.__class__
        if not hidden:
            if kind not in _AS_IT_IS:
                held = written(held, hider)
        elif name == "arguments":
            held = hider.arguments(str(getattr(value, "tool", "") or getattr(value, "name", "")), held)
        elif kind not in _AS_IT_IS and isinstance(held, (BaseModel, PersonReply)):
            held = written(held, hider)
        else:
            held = hider.hide(held)
        if not _is_default(held, default):
            data[name] = held
    if failure and value.suggested_action is DEFAULT_ACTIONS[value.kind]:
        del data["suggested_action"]
    return data


_AS_IT_IS = frozenset({type(None), bool, int, float, str})


def _is_default(held: Any, default: Any) -> bool:
    if held:
        return bool(held == default)
    if held == {}:
        return default == {} or dataclasses.is_dataclass(default)
    if held == []:
        return default in ((), [])
    return bool(held == default)
