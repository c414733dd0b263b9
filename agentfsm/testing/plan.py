"""One batch of calls, planned move by move: which slot is due at each visit, and what it must bring."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from agentfsm.core.examples import FINE, Example
from agentfsm.core.guards import approval_required, calls_pending, declared_done, retry_tool
from agentfsm.core.messages import ToolCall
from agentfsm.machine.graph import State, Transition
from agentfsm.runtime.replies import ItDidNotRun, ItRan
from agentfsm.testing.slots import CONTROL, Slot, fails, numbered

if TYPE_CHECKING:
    from agentfsm.testing.batches import Batch

__all__ = ["Plan"]


class Plan:
    """One batch, read move by move."""

    def __init__(self, batch: Batch, start: int, until: int) -> None:
        self._batch = batch
        self._range = range(start, until)
        self._slots: list[Slot] = []
        self._due: list[Slot] = []  # the slot at hand, behind others that were asked about and run with it
        self._ran: list[Slot] = []
        self._queue: deque[Slot] = deque()

    def slots(self) -> list[Slot]:
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

    def _new(self) -> Slot:
        slot = Slot()
        self._slots.append(slot)
        self._due.append(slot)
        return slot

    def _at_hand(self) -> Slot:
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
        if any(slot.again for slot in self._ran if fails(slot)):
            self._batch.mark_again(place)
        if row.guard is not retry_tool:
            return
        rounds = self._rounds(place + 1)
        repeated = self._ran[-rounds:]
        error = next((s.cells[-1].value for s in reversed(repeated) if fails(s)), None)
        for slot in repeated:
            slot.again = True
            if not fails(slot) and slot.cells and error is not None:
                slot.cells[-1].value = numbered(error, self._batch.cells.index(slot.cells[-1]))
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
