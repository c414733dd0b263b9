"""Turn a path into a test scenario: what the model, tools, people and clock must do for each row to be taken.

A model reply is written before it is judged, and a batch of calls before any of them runs, so what a row needs is often
decided several moves earlier. The path is read reply by reply: first what happens to the whole batch of tool calls,
then the reply that makes those calls.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentfsm.errors import AgentfsmError
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.detectors import DEFAULT_RESULT, Example
from agentfsm.loop.failures import Action
from agentfsm.loop.guards import approval_required, calls_pending, declared_done, retry_tool
from agentfsm.loop.messages import Message, Reply, ToolCall, ToolResult
from agentfsm.machine.graph import State, Transition
from agentfsm.runtime.approval import ItDidNotRun, ItRan
from agentfsm.runtime.tool_execution import validate_call
from agentfsm.runtime.tools import Tool
from agentfsm.testing.guard_examples import GuardExampleSet
from agentfsm.testing.path_generation import Path
from agentfsm.testing.simulation import DISMISSED, EXPIRED, NO_SIDE_EVENT, ModelTurn, Scenario, SideEvent

__all__ = [
    "CONTROL_TOOLS",
    "BatchPlan",
    "BatchPlanner",
    "NoExampleError",
    "PlannedCall",
    "PlannedResult",
    "last_result_failed",
    "scenario_for_path",
    "unique_error",
]


CONTROL_TOOLS = frozenset({"ask_user", "return_done", "return_unable"})
"""The loop's own tools, which are never scripted."""


@dataclass(slots=True)
class PlannedResult:
    """What a tool brings when it runs; may still be changed by what comes later on the path."""

    value: Any


@dataclass(slots=True)
class PlannedCall:
    """One call of the batch."""

    call: ToolCall | None = None
    times: int = 1
    results: list[PlannedResult] = field(default_factory=list[PlannedResult])
    approved: bool = False
    needs_approval: bool = False
    rerun: bool = False  # it will be run again as it stands
    parallel: bool = False  # it runs together with others
    executes: bool = True  # else it fails before it could


def last_result_failed(planned: PlannedCall) -> bool:
    """Whether what a slot brought last is a failure."""
    return bool(planned.results) and isinstance(planned.results[-1].value, BaseException)


def unique_error(error: BaseException, number: int) -> BaseException:
    """An error that is not equal to the same error elsewhere on the path: equal ones open the breaker."""
    other = copy.copy(error)
    other.args = (f"{error} ({number})",)
    return other


class BatchPlan:
    """One batch, read move by move."""

    def __init__(self, batch: BatchPlanner, start: int, until: int) -> None:
        self._planner = batch
        self._range = range(start, until)
        self._calls: list[PlannedCall] = []
        self._due: list[PlannedCall] = []  # the slot at hand, behind others that were asked about and run with it
        self._ran: list[PlannedCall] = []
        self._queue: deque[PlannedCall] = deque()

    def planned_calls(self) -> list[PlannedCall]:
        """The slots, in the order of their calls."""
        for place in self._range:
            row = self._planner.row_at(place)
            if row is None:
                break
            if row.source == State.DISPATCH_TOOL:
                self._on_dispatch(place, row)
            elif row.source == State.SUSPENDED:
                self._on_human_reply(place, row)
            elif row.source == State.RECOVER:
                self._on_recover(place, row)
        return self._calls

    def _add_call(self) -> PlannedCall:
        slot = PlannedCall()
        self._calls.append(slot)
        self._due.append(slot)
        return slot

    def _current_call(self) -> PlannedCall:
        if self._queue and not self._due:
            self._due.append(self._queue.popleft())
        return self._due[-1] if self._due else self._add_call()

    def _on_dispatch(self, place: int, row: Transition) -> None:
        example = self._planner.example_at(place)
        slot = self._current_call()
        if example.needs_approval or row.guard is approval_required:
            if slot.approved:  # it runs together with the next, which is asked about now
                slot.parallel = True
                slot = self._add_call()
                slot.parallel = True
            slot.needs_approval = True
            if example.call is not None:
                slot.call = example.call
        elif not (example.crash or example.cancel or example.abort):
            self._on_run(place + 1)

    def _on_run(self, judged: int) -> None:
        """The slot at hand runs; the row taken at ``judged`` says what it must bring."""
        batch, need = self._planner, self._planner.example_at(judged)
        row = batch.row_at(judged)
        if row is not None and row.source != State.POST_TOOL:
            need = Example()
        *others, slot = self._due
        for other in others:
            batch.add_result(other, DEFAULT_RESULT)
        unaskable = need.call is not None and not batch.is_valid_call(need.call)
        if unaskable and not slot.needs_approval:
            slot.call, slot.executes = need.call, False
        elif unaskable:  # then it was an earlier call of the batch
            earlier = next(
                (s for s in self._ran if not s.needs_approval and s.call is None and len(s.results) == 1), None
            )
            if earlier is not None:
                earlier.call, earlier.executes = need.call, False
                batch.results.remove(earlier.results.pop())
            batch.add_result(slot, DEFAULT_RESULT)
        elif need.times > 1 and slot.results:  # it is run again, and fails in the same way
            batch.repeat_result(slot, slot.results[-1].value)
        elif need.times > 1 and batch.single_call:
            batch.repeat_last_failure(slot, need.result)
        elif need.call is not None:
            again = bool(slot.results) and row is not None and row.guard is declared_done
            finish = "fsm_finish_again" if again else "fsm_finish"
            slot.call = ToolCall("", finish, {"n": 1}) if again or slot.parallel else need.call
            if slot.call.name == finish:
                batch.add_result(slot, 1)
            elif slot.call.name not in CONTROL_TOOLS:
                batch.add_result(slot, need.result)
        else:
            slot.times = max(slot.times, need.times)
            slot.parallel = slot.parallel or need.times > 1
            batch.add_result(slot, need.result, need.times)
        self._ran.append(slot)
        self._due.clear()

    def _on_human_reply(self, place: int, row: Transition) -> None:
        slot = self._due[-1] if self._due else None
        if slot is None or row.name in ("cancelled", "expired"):
            return
        following = self._planner.row_at(place + 1)
        example = self._planner.example_at(place + 1)
        if row.name == "approval_decided":
            slot.approved = True
        elif row.name == "doubt_settled" and following is not None:
            new = example.needs_approval or (following.guard is None and self._needs_other_call(place + 2))
            if new and not self._planner.single_call:
                self._planner.human_replies[place] = ItRan("it had run")
                self._due.clear()
            else:
                self._planner.human_replies[place] = ItDidNotRun()

    def _needs_other_call(self, judged: int) -> bool:
        """Whether what is judged there must come of another call than the one that was in doubt."""
        need = self._planner.example_at(judged)
        then = self._planner.row_at(judged + 1)
        return need.call is not None or need.times > 1 or (then is not None and then.guard is retry_tool)

    def _on_recover(self, place: int, row: Transition) -> None:
        if any(slot.rerun for slot in self._ran if last_result_failed(slot)):
            self._planner.mark_rerunnable(place)
        if row.guard is not retry_tool:
            return
        rounds = self._rerun_count(place + 1)
        repeated = self._ran[-rounds:]
        error = next((s.results[-1].value for s in reversed(repeated) if last_result_failed(s)), None)
        for slot in repeated:
            slot.rerun = True
            if not last_result_failed(slot) and slot.results and error is not None:
                slot.results[-1].value = unique_error(error, self._planner.results.index(slot.results[-1]))
        self._queue = deque(repeated)
        self._ran, self._due = [], []

    def _rerun_count(self, start: int) -> int:
        """How many calls run again: one, and one more for each ``calls_pending`` behind it."""
        count = 1
        for place in range(start, self._range.stop):
            row = self._planner.row_at(place)
            if row is not None and row.source == State.POST_TOOL:
                if row.guard is not calls_pending:
                    break
                count += 1
        return count


class BatchPlanner:
    """Plans one batch after the other along a path.

    Args:
        default_call: The call to make where no example names one, or None for the bench's own.
        rows: The path.
        examples: The example of each of its rows.
        tools: The agent's tools.
        single_call: Whether a reply makes one call at most.
        extra_call: Whether each batch has a call more than the path runs.

    Attributes:
        results: What the tools bring, in the order in which they run.
        human_replies: By place, what a person answers where that depends on what comes.
    """

    def __init__(
        self,
        default_call: ToolCall | None,
        rows: Sequence[Transition],
        examples: Sequence[Example],
        tools: Mapping[str, Tool],
        *,
        single_call: bool,
        extra_call: bool = False,
    ) -> None:
        self._default_call = default_call
        self._extra_call = extra_call
        self._tools = tools
        self._rows = rows
        self._examples = examples
        self._single_call = single_call
        self.results: list[PlannedResult] = []
        self.human_replies: dict[int, Any] = {}
        self._rerunnable: set[int] = set()
        self._call_count = 0
        self._last_failure: tuple[ToolCall, Any] | None = None
        self._last_call: ToolCall | None = None

    def may_rerun(self, place: int) -> bool:
        """Whether the calls that failed before a visit to ``recover`` may be run again as they stand."""
        return place in self._rerunnable

    def plan(self, start: int, until: int) -> list[ToolCall]:
        """The calls of the reply whose moves are those from ``start`` to ``until``."""
        named = self._unexecuted_calls(start, until)
        if named is not None:
            return named
        if not any(self._rows[i].source == State.DISPATCH_TOOL for i in range(start, until)):
            return []
        slots = BatchPlan(self, start, until).planned_calls()
        if self._extra_call:
            slots.append(PlannedCall())
        calls: list[ToolCall] = []
        for slot in slots:
            calls += self._build_calls(slot)
        self._last_call = calls[-1]
        return calls

    def _unexecuted_calls(self, start: int, until: int) -> list[ToolCall] | None:
        """The calls of a reply that is judged without any of them being run."""
        if any(self._rows[i].source == State.DISPATCH_TOOL for i in range(start, until)):
            return None
        for i in range(start, until):
            example = self._examples[i]
            if example.call is not None:
                if self._single_call and example.times > 1 and self._last_call is not None:
                    return [self._last_call]
                return [example.call] * example.times
        return None

    def _build_calls(self, slot: PlannedCall) -> list[ToolCall]:
        call = slot.call
        if call is None:
            usual = self._default_call
            if usual is None or slot.rerun or slot.parallel or slot.times > 1:
                name = {(False, False): "fsm_act", (True, False): "fsm_steady", (False, True): "fsm_together"}.get(
                    (slot.rerun, slot.parallel or slot.times > 1), "fsm_both"
                )
                usual = ToolCall("", name, {"n": 0})
            call = usual
        made: list[ToolCall] = []
        for _ in range(slot.times):
            self._call_count += 1
            arguments = dict(call.arguments)
            if call.name.startswith("fsm_"):  # no two calls are equal, or they would count as a loop
                arguments["n"] = f"many {self._call_count}" if isinstance(arguments.get("n"), str) else self._call_count
            made.append(ToolCall("", call.name, arguments))
        errors = [cell.value for cell in slot.results if isinstance(cell.value, BaseException)]
        if errors or not slot.executes:
            self._last_failure = (made[-1], errors[-1] if errors else None)
        return made

    # what a plan asks of its batch

    def row_at(self, place: int) -> Transition | None:
        """The row taken at a place, or None behind the path's end."""
        return self._rows[place] if place < len(self._rows) else None

    def example_at(self, place: int) -> Example:
        """The example of that row."""
        return self._examples[place] if place < len(self._examples) else Example()

    def add_result(self, slot: PlannedCall, value: Any, times: int = 1) -> None:
        """Say what a slot brings at its next run; each failure is told apart from all others."""
        if isinstance(value, BaseException) and times == 1:
            value = unique_error(value, len(self.results))
        for _ in range(times):
            cell = PlannedResult(value)
            self.results.append(cell)
            slot.results.append(cell)

    def is_valid_call(self, call: ToolCall) -> bool:
        """Whether a call names a tool that is there, with arguments that fit."""
        return not isinstance(validate_call(call, self._tools), ToolResult)

    def repeat_result(self, slot: PlannedCall, value: Any) -> None:
        """Say that a slot brings what was brought before, to the letter."""
        self.results.append(PlannedResult(value))
        slot.results.append(self.results[-1])

    def repeat_last_failure(self, slot: PlannedCall, value: Any) -> None:
        """Let a slot fail as the last one did, for where one call alone must repeat an error."""
        if self._last_failure is not None:
            slot.call, value = self._last_failure
        if value is None:
            slot.executes = False
        else:
            self.repeat_result(slot, value)

    def mark_rerunnable(self, place: int) -> None:
        """Note that the calls which failed before a visit to ``recover`` may be run again."""
        self._rerunnable.add(place)

    @property
    def single_call(self) -> bool:
        """Whether a reply makes one call at most."""
        return self._single_call


class NoExampleError(AgentfsmError):
    """A guard of the path has no example: declare one with ``@detector(fires_on=[Example(...)])``."""


def scenario_for_path(
    path: Path,
    examples: GuardExampleSet,
    *,
    tools: Mapping[str, Tool],
    envelope: bool,
    final_answer: Any,
    overrides: Mapping[int, Example] | None = None,
    extra_call: bool = False,
) -> Scenario:
    """The script that makes a run take a path.

    Args:
        path: The path.
        examples: The examples.
        tools: The agent's tools.
        envelope: Whether the model answers in envelopes.
        final_answer: A final answer of the model.
        overrides: Examples to use at some moves in place of the guard's first.
        extra_call: Whether each batch has a call more than the path runs.

    Raises:
        NoExampleError: A guard has no example.
    """
    batch = (tools, envelope, extra_call)
    return _ScenarioBuilder(path, examples, batch, final_answer, overrides or {}).build()


class _ScenarioBuilder:
    def __init__(
        self,
        path: Path,
        witnesses: GuardExampleSet,
        batch: tuple[Mapping[str, Tool], bool, bool],
        answer: Any,
        instead: Mapping[int, Example],
    ) -> None:
        tools, envelope, spare = batch
        self._path = path
        self._rows = path.rows
        self._example_set = witnesses
        self._envelope = envelope
        self._final_answer = answer
        self._examples = [self._example(i, row, instead) for i, row in enumerate(path.rows)]
        self._side_events: dict[int, SideEvent] = {}
        self._turns: list[ModelTurn] = []
        self._last_reply: int | None = None
        self._batch = BatchPlanner(
            witnesses.default_call(), self._rows, self._examples, tools, single_call=envelope, extra_call=spare
        )

    def _example(self, place: int, row: Transition, instead: Mapping[int, Example]) -> Example:
        if place in instead:
            return instead[place]
        found = self._example_set.for_transition(row)
        if found is None or not found.fires_on:
            raise NoExampleError(
                f"{row.id} has no example: declare @detector(fires_on=[Example(...)]) on {row.name!r}, or pass "
                f"examples={{{row.name!r}: Example(...)}}"
            )
        return found.fires_on[0]

    def build(self) -> Scenario:
        """The script."""
        actions: list[Action | None] = []
        people: list[Any] = []
        for place, row in enumerate(self._rows):
            example = self._examples[place]
            self._add_side_event(place, example)
            if row.source == State.CALL_LLM:
                self._turns.append(self._model_turn(place, example))
                if not isinstance(self._turns[-1].entry, BaseException):
                    self._last_reply = len(self._turns) - 1
            elif row.source == State.RECOVER:
                actions.append(self._recovery_action(place, example))
            elif row.name in ("cancelled", "expired") and self._is_suspended(row):
                people.append(EXPIRED if row.name == "expired" else DISMISSED)
            elif example.answer is not None:
                people.append(self._batch.human_replies.get(place, example.answer))
            if example.tokens or example.cost_usd:
                self._add_usage(example)
        return Scenario(
            tuple(self._turns),
            tuple(cell.value for cell in self._batch.results),
            tuple(actions),
            tuple(people),
            self._side_events,
            self._path.guardrails,
        )

    def _is_suspended(self, row: Transition) -> bool:
        return row.source == State.SUSPENDED

    def _add_side_event(self, place: int, example: Example) -> None:
        moment = SideEvent(
            example.duration_s,
            example.idle_s,
            example.cancel,
            example.abort,
            example.needs_approval,
            example.crash,
            example.state_result,
        )
        if moment != NO_SIDE_EVENT:
            self._side_events[place] = moment

    def _add_usage(self, example: Example) -> None:
        if self._last_reply is not None:
            said = self._turns[self._last_reply]
            self._turns[self._last_reply] = ModelTurn(
                said.entry, max(said.tokens, example.tokens), max(said.cost_usd, example.cost_usd)
            )

    def _recovery_action(self, place: int, example: Example) -> Action:
        if example.action is not None:
            return example.action
        # behind a failure of a call that may be run again, a retry would run it again
        return Action.narrow_scope if self._batch.may_rerun(place) else Action.retry

    # -- replies --------------------------------------------------------------------------------------

    def _model_turn(self, place: int, example: Example) -> ModelTurn:
        """What the model says at a call: an exception, or what the moves up to the next call ask for."""
        if isinstance(example.reply, BaseException):
            return ModelTurn(example.reply)
        until = next(
            (i for i in range(place + 1, len(self._rows)) if self._rows[i].source == State.CALL_LLM), len(self._rows)
        )
        entry = example.reply
        if entry is None:
            entry = next((e.reply for e in self._examples[place + 1 : until] if e.reply is not None), None)
        calls = self._batch.plan(place + 1, until)
        if not calls:
            return ModelTurn(self._enveloped_text(entry))
        if self._envelope:
            name, arguments = calls[0].name, dict(calls[0].arguments)
            return ModelTurn(canonical_json({"kind": "tool_call", "tool_name": name, "arguments": arguments}))
        return ModelTurn(_with_calls(entry, calls))

    def _enveloped_text(self, entry: Any) -> Any:
        if entry is None:
            entry = self._final_answer
        if self._envelope and entry is self._final_answer:
            return canonical_json({"kind": "final", "content": entry})
        return entry


def _with_calls(entry: Any, calls: Sequence[ToolCall]) -> Any:
    """A reply that also makes calls."""
    numbered = tuple(replace(call, id=f"{call.name}_{i}") for i, call in enumerate(calls, 1))
    if entry is None:
        return list(numbered)
    message = entry if isinstance(entry, Message) else Message.assistant(str(entry))
    reply = entry if isinstance(entry, Reply) else Reply(message)
    return replace(reply, message=replace(reply.message, tool_calls=numbered))
