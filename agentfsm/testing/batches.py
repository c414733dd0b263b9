"""Which calls a reply must make, and what each must bring, so that a stretch of a path can happen.

One *slot* is one call of the batch (or several that run together). The moves between two model calls are
read in order: each visit to ``dispatch_tool`` asks about, cuts off or runs the slot that is due, and the
move behind ``post_tool`` says what the call must have brought.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentfsm.core.examples import Example
from agentfsm.core.messages import ToolCall, ToolResult
from agentfsm.machine.graph import State, Transition
from agentfsm.runtime.calls import check_call
from agentfsm.runtime.tools import Tool
from agentfsm.testing.plan import Plan
from agentfsm.testing.slots import Cell, Slot, numbered

__all__ = ["Batch"]


class Batch:
    """Plans one batch after the other along a path.

    Args:
        usual: The call to make where no example names one, or None for the bench's own.
        rows: The path.
        examples: The example of each of its rows.
        tools: The agent's tools.
        single: Whether a reply makes one call at most.
        spare: Whether each batch has a call more than the path runs.

    Attributes:
        cells: What the tools bring, in the order in which they run.
        answers: By place, what a person answers where that depends on what comes.
    """

    def __init__(
        self,
        usual: ToolCall | None,
        rows: Sequence[Transition],
        examples: Sequence[Example],
        tools: Mapping[str, Tool],
        *,
        single: bool,
        spare: bool = False,
    ) -> None:
        self._usual = usual
        self._spare = spare
        self._tools = tools
        self._rows = rows
        self._examples = examples
        self._single = single
        self.cells: list[Cell] = []
        self.answers: dict[int, Any] = {}
        self._again: set[int] = set()
        self._made = 0
        self._failed: tuple[ToolCall, Any] | None = None
        self._last: ToolCall | None = None

    def rerunnable(self, place: int) -> bool:
        """Whether the calls that failed before a visit to ``recover`` may be run again as they stand."""
        return place in self._again

    def plan(self, start: int, until: int) -> list[ToolCall]:
        """The calls of the reply whose moves are those from ``start`` to ``until``."""
        named = self._named(start, until)
        if named is not None:
            return named
        if not any(self._rows[i].source == State.DISPATCH_TOOL for i in range(start, until)):
            return []
        slots = Plan(self, start, until).slots()
        if self._spare:
            slots.append(Slot())
        calls: list[ToolCall] = []
        for slot in slots:
            calls += self._calls(slot)
        self._last = calls[-1]
        return calls

    def _named(self, start: int, until: int) -> list[ToolCall] | None:
        """The calls of a reply that is judged without any of them being run."""
        if any(self._rows[i].source == State.DISPATCH_TOOL for i in range(start, until)):
            return None
        for i in range(start, until):
            example = self._examples[i]
            if example.call is not None:
                if self._single and example.times > 1 and self._last is not None:
                    return [self._last]
                return [example.call] * example.times
        return None

    def _calls(self, slot: Slot) -> list[ToolCall]:
        call = slot.call
        if call is None:
            usual = self._usual
            if usual is None or slot.again or slot.together or slot.times > 1:
                name = {(False, False): "fsm_act", (True, False): "fsm_steady", (False, True): "fsm_together"}.get(
                    (slot.again, slot.together or slot.times > 1), "fsm_both"
                )
                usual = ToolCall("", name, {"n": 0})
            call = usual
        made: list[ToolCall] = []
        for _ in range(slot.times):
            self._made += 1
            arguments = dict(call.arguments)
            if call.name.startswith("fsm_"):  # no two calls are equal, or they would count as a loop
                arguments["n"] = f"many {self._made}" if isinstance(arguments.get("n"), str) else self._made
            made.append(ToolCall("", call.name, arguments))
        errors = [cell.value for cell in slot.cells if isinstance(cell.value, BaseException)]
        if errors or not slot.runs:
            self._failed = (made[-1], errors[-1] if errors else None)
        return made

    # what a plan asks of its batch

    def row(self, place: int) -> Transition | None:
        """The row taken at a place, or None behind the path's end."""
        return self._rows[place] if place < len(self._rows) else None

    def example(self, place: int) -> Example:
        """The example of that row."""
        return self._examples[place] if place < len(self._examples) else Example()

    def bring(self, slot: Slot, value: Any, times: int = 1) -> None:
        """Say what a slot brings at its next run; each failure is told apart from all others."""
        if isinstance(value, BaseException) and times == 1:
            value = numbered(value, len(self.cells))
        for _ in range(times):
            cell = Cell(value)
            self.cells.append(cell)
            slot.cells.append(cell)

    def can_run(self, call: ToolCall) -> bool:
        """Whether a call names a tool that is there, with arguments that fit."""
        return not isinstance(check_call(call, self._tools), ToolResult)

    def repeat(self, slot: Slot, value: Any) -> None:
        """Say that a slot brings what was brought before, to the letter."""
        self.cells.append(Cell(value))
        slot.cells.append(self.cells[-1])

    def as_before(self, slot: Slot, value: Any) -> None:
        """Let a slot fail as the last one did, for where one call alone must repeat an error."""
        if self._failed is not None:
            slot.call, value = self._failed
        if value is None:
            slot.runs = False
        else:
            self.repeat(slot, value)

    def mark_again(self, place: int) -> None:
        """Note that the calls which failed before a visit to ``recover`` may be run again."""
        self._again.add(place)

    @property
    def single(self) -> bool:
        """Whether a reply makes one call at most."""
        return self._single
