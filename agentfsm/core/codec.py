"""A run's state as JSON data and back. Built on pydantic, so what is read back is validated."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import TypeAdapter

from agentfsm.core.state import RunState

__all__ = ["dump_state", "load_state"]


@cache
def _adapter() -> TypeAdapter[RunState]:
    return TypeAdapter(RunState)


def dump_state(run: RunState) -> dict[str, Any]:
    """Everything that a run knows, as JSON data."""
    data: dict[str, Any] = _adapter().dump_python(run, mode="json")
    return data


def load_state(data: dict[str, Any]) -> RunState:
    """The run that ``dump_state`` wrote down.

    Raises:
        pydantic.ValidationError: The data is not the state of a run.
    """
    return _adapter().validate_python(data)
