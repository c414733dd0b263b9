"""Which calls a reply must make, and what each must bring, so that a stretch of a path can happen.

One *slot* is one call of the batch (or several that run together). The moves between two model calls are
read in order: each visit to ``dispatch_tool`` asks about, cuts off or runs the slot that is due, and the
move behind ``post_tool`` says what the call must have brought.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentfsm.core.detectors import approval_required, calls_pending, declared_done, retry_tool
from agentfsm.core.examples import FINE, Example
from agentfsm.core.messages import ToolCall, ToolResult
from agentfsm.machine.graph import State, Transition
from agentfsm.runtime.calls import check_call
from agentfsm.runtime.replies import ItDidNotRun, ItRan
from agentfsm.runtime.tools import Tool

__all__ = ["Batch", "Cell"]

CONTROL = frozenset({"ask_user", "return_done", "return_unable"})
"""The loop's own tools, which are never scripted."""


@dataclass(slots=True)
class Cell:
    """What a tool brings when it runs; may still be changed by what comes later on the path."""

    value: Any


@dataclass(slots=True)
class _Slot:
    """One call of the batch."""

    call: ToolCall | None = None
    times: int = 1
    cells: list[Cell] = field(default_factory=list[Cell])
    allowed: bool = False
    asked: bool = False
    again: bool = False  # it will be run again as it stands
    together: bool = False  # it runs together with others
    runs: bool = True  # else it fails before it could


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
        slots = _Plan(self, start, until).slots()
        if self._spare:
            slots.append(_Slot())
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

    def _calls(self, slot: _Slot) -> list[ToolCall]:
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

    def bring(self, slot: _Slot, value: Any, times: int = 1) -> None:
        """Say what a slot brings at its next run; each failure is told apart from all others."""
        if isinstance(value, BaseException) and times == 1:
            value = _numbered(value, len(self.cells))
        for _ in range(times):
            cell = Cell(value)
            self.cells.append(cell)
            slot.cells.append(cell)

    def can_run(self, call: ToolCall) -> bool:
        """Whether a call names a tool that is there, with arguments that fit."""
        return not isinstance(check_call(call, self._tools), ToolResult)

    def repeat(self, slot: _Slot, value: Any) -> None:
        """Say that a slot brings what was brought before, to the letter."""
        self.cells.append(Cell(value))
        slot.cells.append(self.cells[-1])

    def as_before(self, slot: _Slot, value: Any) -> None:
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


def _numbered(error: BaseException, number: int) -> BaseException:
    """An error that is not equal to the same error elsewhere on the path: equal ones open the breaker."""
    other = copy.copy(error)
    other.args = (f"{error} ({number})",)
    return other


class _Plan:
    """One batch, read move by move."""

    def __init__(self, batch: Batch, start: int, until: int) -> None:
        self._batch = batch
        self._range = range(start, until)
        self._slots: list[_Slot] = []
        self._due: list[_Slot] = []  # the slot at hand, behind others that were asked about and run with it
        self._ran: list[_Slot] = []
        self._queue: deque[_Slot] = deque()

    def slots(self) -> list[_Slot]:
        """The slots, in the order of their calls."""
        for place in self._range:
            row = self._batch.row(place)
            if row is None:
                break
            if row.source == State.DISPATCH_TOOL:
                self._dispatch(place, row)
            elif row.source == State.SUSPENDED:
                self._answered(place, row)
            elif row.source == State.RECOVER:
                self._recovered(place, row)
        return self._slots

    def _new(self) -> _Slot:
        slot = _Slot()
        self._slots.append(slot)
        self._due.append(slot)
        return slot

    def _at_hand(self) -> _Slot:
        if self._queue and not self._due:
            self._due.append(self._queue.popleft())
        return self._due[-1] if self._due else self._new()

    def _dispatch(self, place: int, row: Transition) -> None:
        example = self._batch.example(place)
        slot = self._at_hand()
        if example.asks or row.guard is approval_required:
            if slot.allowed:  # it runs together with the next, which is asked about now
                slot.together = True
                slot = self._new()
                slot.together = True
            slot.asked = True
            if example.call is not None:
                slot.call = example.call
        elif not (example.cut or example.cancel or example.abort):
            self._run(place + 1)

    def _run(self, judged: int) -> None:
        """The slot at hand runs; the row taken at ``judged`` says what it must bring."""
        batch, need = self._batch, self._batch.example(judged)
        row = batch.row(judged)
        if row is not None and row.source != State.POST_TOOL:
            need = Example()
        *others, slot = self._due
        for other in others:
            batch.bring(other, FINE)
        unaskable = need.call is not None and not batch.can_run(need.call)
        if unaskable and not slot.asked:
            slot.call, slot.runs = need.call, False
        elif unaskable:  # then it was an earlier call of the batch
            earlier = next((s for s in self._ran if not s.asked and s.call is None and len(s.cells) == 1), None)
            if earlier is not None:
                earlier.call, earlier.runs = need.call, False
                batch.cells.remove(earlier.cells.pop())
            batch.bring(slot, FINE)
        elif need.times > 1 and slot.cells:  # it is run again, and fails in the same way
            batch.repeat(slot, slot.cells[-1].value)
        elif need.times > 1 and batch.single:
            batch.as_before(slot, need.result)
        elif need.call is not None:
            again = bool(slot.cells) and row is not None and row.guard is declared_done
            finish = "fsm_finish_again" if again else "fsm_finish"
            slot.call = ToolCall("", finish, {"n": 1}) if again or slot.together else need.call
            if slot.call.name == finish:
                batch.bring(slot, 1)
            elif slot.call.name not in CONTROL:
                batch.bring(slot, need.result)
        else:
            slot.times = max(slot.times, need.times)
            slot.together = slot.together or need.times > 1
            batch.bring(slot, need.result, need.times)
        self._ran.append(slot)
        self._due.clear()

    def _answered(self, place: int, row: Transition) -> None:
        slot = self._due[-1] if self._due else None
        if slot is None or row.name in ("cancelled", "expired"):
            return
        following = self._batch.row(place + 1)
        example = self._batch.example(place + 1)
        if row.name == "approval_decided":
            slot.allowed = True
        elif row.name == "doubt_settled" and following is not None:
            new = example.asks or (following.guard is None and self._needs_another(place + 2))
            if new and not self._batch.single:
                self._batch.answers[place] = ItRan("it had run")
                self._due.clear()
            else:
                self._batch.answers[place] = ItDidNotRun()

    def _needs_another(self, judged: int) -> bool:
        """Whether what is judged there must come of another call than the one that was in doubt."""
        need = self._batch.example(judged)
        then = self._batch.row(judged + 1)
        return need.call is not None or need.times > 1 or (then is not None and then.guard is retry_tool)

    def _recovered(self, place: int, row: Transition) -> None:
        if any(slot.again for slot in self._ran if _fails(slot)):
            self._batch.mark_again(place)
        if row.guard is not retry_tool:
            return
        rounds = self._rounds(place + 1)
        repeated = self._ran[-rounds:]
        error = next((s.cells[-1].value for s in reversed(repeated) if _fails(s)), None)
        for slot in repeated:
            slot.again = True
            if not _fails(slot) and slot.cells and error is not None:
                slot.cells[-1].value = _numbered(error, self._batch.cells.index(slot.cells[-1]))
        self._queue = deque(repeated)
        self._ran, self._due = [], []

    def _rounds(self, start: int) -> int:
        """How many calls run again: one, and one more for each ``calls_pending`` behind it."""
        count = 1
        for place in range(start, self._range.stop):
            row = self._batch.row(place)
            if row is not None and row.source == State.POST_TOOL:
                if row.guard is not calls_pending:
                    break
                count += 1
        return count


def _fails(slot: _Slot) -> bool:
    return bool(slot.cells) and isinstance(slot.cells[-1].value, BaseException)
