"""A run's state as JSON data and back. Built on pydantic, so what is read back is validated."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from agentfsm.core.messages import canonical_json
from agentfsm.core.state import RunState

__all__ = ["dump_state", "load_state"]


@cache
def _adapter() -> TypeAdapter[RunState]:
    return TypeAdapter(RunState)


def dump_state(run: RunState) -> dict[str, Any]:
    """Everything that a run knows, as JSON data; lone surrogates in texts become ``?``, NaN becomes null."""
    data: dict[str, Any] = _adapter().dump_python(run, mode="json")
    try:
        text = canonical_json(data)
    except ValueError:  # JSON has no NaN and no infinity
        data = json.loads(json.dumps(data), parse_constant=lambda _: None)
        text = canonical_json(data)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8: no JSON reader would take it back
        data = json.loads(text.encode("utf-8", "replace"))
    return data


def load_state(data: dict[str, Any]) -> RunState:
    """The run that ``dump_state`` wrote down.

    Raises:
        pydantic.ValidationError: The data is not the state of a run.
    """
    return _adapter().validate_python(data)
