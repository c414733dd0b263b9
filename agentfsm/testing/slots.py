"""What a batch of calls is made of while it is planned: slots, and what their tools bring."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from agentfsm.core.messages import ToolCall

__all__ = ["CONTROL", "Cell", "Slot", "fails", "numbered"]

CONTROL = frozenset({"ask_user", "return_done", "return_unable"})
"""The loop's own tools, which are never scripted."""


@dataclass(slots=True)
class Cell:
    """What a tool brings when it runs; may still be changed by what comes later on the path."""

    value: Any


@dataclass(slots=True)
class Slot:
    """One call of the batch."""

    call: ToolCall | None = None
    times: int = 1
    cells: list[Cell] = field(default_factory=list[Cell])
    allowed: bool = False
    asked: bool = False
    again: bool = False  # it will be run again as it stands
    together: bool = False  # it runs together with others
    runs: bool = True  # else it fails before it could


def fails(slot: Slot) -> bool:
    """Whether what a slot brought last is a failure."""
    return bool(slot.cells) and isinstance(slot.cells[-1].value, BaseException)


def numbered(error: BaseException, number: int) -> BaseException:
    """An error that is not equal to the same error elsewhere on the path: equal ones open the breaker."""
    other = copy.copy(error)
    other.args = (f"{error} ({number})",)
    return other
