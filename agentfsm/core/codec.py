"""A run's state as JSON data and back. Built on pydantic, so what is read back is validated."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from agentfsm.core.messages import canonical_json
from agentfsm.core.state import RunState

__all__ = ["dump_state", "load_state"]


@cache
def _adapter() -> TypeAdapter[RunState]:
    return TypeAdapter(RunState)


def dump_state(run: RunState) -> dict[str, Any]:
    """Everything that a run knows, as JSON data; lone surrogates in texts become ``?``, NaN becomes null."""
    try:
        data: dict[str, Any] = _adapter().dump_python(run, mode="json")
        canonical_json(data).encode()
    except ValueError:  # NaN and infinity, or a lone surrogate, which has no UTF-8: JSON has none of them
        loose = json.dumps(_adapter().dump_python(run), ensure_ascii=False, default=_plain)
        data = json.loads(loose.encode("utf-8", "replace"), parse_constant=lambda _: None)
    return data


def _plain(value: Any) -> Any:
    return to_jsonable_python(value, fallback=repr)


def load_state(data: dict[str, Any]) -> RunState:
    """The run that ``dump_state`` wrote down.

    Raises:
        pydantic.ValidationError: The data is not the state of a run.
    """
    return _adapter().validate_python(data)
