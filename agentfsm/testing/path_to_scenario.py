"""Turn a path into a test scenario: what the model, tools, people and clock must do for each row to be taken.

A model reply is written before it is judged, and a batch of calls before any of them runs, so what a row needs is often
decided several moves earlier. The path is read reply by reply: first what happens to the whole batch of tool calls,
then the reply that makes those calls. ``agentfsm.testing.path_runner`` plays the scenario to the real loop.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from agentfsm.errors import AgentfsmError
from agentfsm.loop import guards
from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.detectors import DEFAULT_RESULT, Example, invalid_arguments, repeated_error
from agentfsm.loop.failures import Action
from agentfsm.loop.human_input import ItDidNotRun, ItRan
from agentfsm.loop.messages import Message, Reply, ToolCall, ToolResult
from agentfsm.loop.outcomes import CALL_MODEL, CHOOSE_RECOVERY, JUDGE_RESULTS, RUN_CALLS
from agentfsm.loop.quorum import Approval
from agentfsm.machine.declaration import EffectSpec
from agentfsm.machine.graph import Graph, Guard, Transition
from agentfsm.runtime.control_tools import CONTROL_TOOLS
from agentfsm.runtime.tool_execution import validate_call
from agentfsm.runtime.tools import Tool
from agentfsm.testing.guard_examples import BY_APPROVAL_RULE, GuardExampleSet
from agentfsm.testing.path_assumptions import loop_guard, merged_start
from agentfsm.testing.path_generation import Path
from agentfsm.testing.simulation import DISMISSED, ESCALATED, EXPIRED, NO_SIDE_EVENT, ModelTurn, Scenario, SideEvent
from agentfsm.testing.tool_calls import OwnCalls, Votes, call_key, enveloped_call, requires_approval


@dataclass(frozen=True, slots=True)
class Step:
    """One transition of a path, known by what its state does and by its guard's function, whatever their names are.

    Attributes:
        row: The row that is taken.
        guard: Its guard; the loop's own, if the row's wraps one of these.
        effect: The effect of the state that it leaves, if that is one of the loop's.
        waits: Whether that state waits.
    """

    row: Transition
    guard: Guard | None
    effect: EffectSpec | None
    waits: bool

    @property
    def is_own(self) -> bool:
        """Whether the state that it leaves has a user-defined effect."""
        return self.effect is None and not self.waits


def steps_of(graph: Graph, rows: Sequence[Transition]) -> list[Step]:
    """The transitions of a path through a graph."""
    steps: list[Step] = []
    for row in rows:
        spec = graph.specs.get(row.source)
        effect = spec.effect if spec is not None and isinstance(spec.effect, EffectSpec) else None
        steps.append(Step(row, loop_guard(row), effect, spec is not None and spec.waits))
    return steps


@dataclass(slots=True)
class PlannedResult:
    """What a tool returns at one execution. Rows that come later on the path may still change it."""

    value: Any


_INSTEAD_OF_REPLIES: Mapping[object, object] = {
    guards.cancelled: DISMISSED,
    guards.expired: EXPIRED,
    guards.escalated: ESCALATED,
}
"""What happens in place of a reply, by the guard that a waiting run takes then."""


def _votes_by_request(steps: Sequence[Step]) -> dict[int, Votes]:
    """By the index of the transition at which approval is requested, what happens while the call waits."""
    found: dict[int, Votes] = {}
    for index, step in enumerate(steps):
        if step.effect is RUN_CALLS:
            waiting = [each.guard for each in takewhile(lambda each: each.waits, steps[index + 1 :])]
            found[index] = Votes(waiting.count(guards.vote_recorded), guards.escalated in waiting)
    return found


@dataclass(slots=True)
class PlannedCall:
    """One call of the batch.

    Attributes:
        call: The tool call; None for a default one.
        times: How many such calls the reply makes.
        results: What each execution returns.
        approved: Whether the call has been approved.
        needs_approval: Whether the call must be approved.
        rerun: Whether the call is executed again, unchanged.
        parallel: Whether it is executed together with other calls.
        executes: Whether it is executed at all; False if it fails before that.
        crashes: Whether the process dies while it is executed.
        asked_at: The indexes of the transitions at which its approval is requested, if the call is chosen last.
    """

    call: ToolCall | None = None
    times: int = 1
    results: list[PlannedResult] = field(default_factory=list[PlannedResult])
    approved: bool = False
    needs_approval: bool = False
    rerun: bool = False
    parallel: bool = False
    executes: bool = True
    crashes: bool = False
    asked_at: list[int] = field(default_factory=list[int])


def last_result_failed(planned: PlannedCall) -> bool:
    """Whether the last execution of a call fails."""
    return bool(planned.results) and isinstance(planned.results[-1].value, BaseException)


def unique_error(error: BaseException, number: int) -> BaseException:
    """A copy of an error with its own message: equal errors would make ``repeated_error`` fire."""
    other = copy.copy(error)
    other.args = (f"{error} ({number})",)
    return other


class BatchPlan:
    """The calls of one batch, planned transition by transition."""

    def __init__(self, planner: BatchPlanner, start: int, until: int) -> None:
        self._planner = planner
        self._range = range(start, until)
        self._calls: list[PlannedCall] = []
        self._due: list[PlannedCall] = []  # the current call comes last, after approved ones that run together with it
        self._ran: list[PlannedCall] = []
        self._queue: deque[PlannedCall] = deque()

    def planned_calls(self) -> list[PlannedCall]:
        """The calls, in order."""
        for index in self._range:
            step = self._planner.step_at(index)
            if step is None:
                break
            if step.effect is RUN_CALLS:
                self._on_dispatch(index, step)
            elif step.waits:
                self._on_human_reply(index, step)
            elif step.effect is CHOOSE_RECOVERY:
                self._on_recover(index, step)
        return self._calls

    def _add_call(self) -> PlannedCall:
        planned_call = PlannedCall()
        self._calls.append(planned_call)
        self._due.append(planned_call)
        return planned_call

    def _current_call(self) -> PlannedCall:
        if self._queue and not self._due:
            self._due.append(self._queue.popleft())
        return self._due[-1] if self._due else self._add_call()

    def _on_dispatch(self, index: int, step: Step) -> None:
        example = self._planner.example_at(index)
        planned_call = self._current_call()
        if example.needs_approval or step.guard is guards.approval_required:
            if planned_call.approved:  # it runs together with the next call, whose approval is requested now
                planned_call.parallel = True
                planned_call = self._add_call()
                planned_call.parallel = True
            planned_call.needs_approval = True
            if self._planner.chooses_call(index):
                planned_call.asked_at.append(index)
            elif example.call is not None:
                planned_call.call = example.call
        elif example.crash:
            planned_call.crashes = True
        elif not (example.cancel or example.abort):
            self._on_run(self._planner.judged_at(index + 1))

    def _on_run(self, result_index: int) -> None:
        """Execute the current call; the row taken at ``result_index`` says what it must return."""
        planner, need = self._planner, self._planner.example_at(result_index)
        step = planner.step_at(result_index)
        if step is not None and step.effect is not JUDGE_RESULTS:
            need = Example()
        *others, planned_call = self._due
        for other in others:
            planner.add_result(other, DEFAULT_RESULT)
        invalid = need.call is not None and not planner.is_valid_call(need.call)
        if invalid and not planned_call.needs_approval:
            planned_call.call, planned_call.executes = need.call, False
        elif invalid:  # no approval is requested for an invalid call, so it must be an earlier call of the batch
            earlier = next(
                (s for s in self._ran if not s.needs_approval and s.call is None and len(s.results) == 1), None
            )
            if earlier is not None:
                earlier.call, earlier.executes = need.call, False
                planner.results.remove(earlier.results.pop())
            planner.add_result(planned_call, DEFAULT_RESULT)
        elif need.times > 1 and planned_call.results:  # it is executed again and fails in the same way
            planner.repeat_result(planned_call, planned_call.results[-1].value)
        elif need.times > 1 and step is not None and step.guard is repeated_error:
            planner.repeat_last_failure(planned_call, need.result)
        elif need.call is not None:
            again = bool(planned_call.results) and step is not None and step.guard is guards.declared_done
            finish = "fsm_finish_again" if again else "fsm_finish"
            planned_call.call = ToolCall("", finish, {"n": 1}) if again or planned_call.parallel else need.call
            if planned_call.call.name == finish:
                planner.add_result(planned_call, 1)
            elif planned_call.call.name not in CONTROL_TOOLS:
                planner.add_result(planned_call, need.result)
        else:
            planned_call.times = max(planned_call.times, need.times)
            planned_call.parallel = planned_call.parallel or need.times > 1
            planner.add_result(planned_call, need.result, need.times)
        self._ran.append(planned_call)
        self._due.clear()

    def _on_human_reply(self, index: int, step: Step) -> None:
        planned_call = self._due[-1] if self._due else None
        if planned_call is None or step.guard in (guards.cancelled, guards.aborted, guards.expired):
            return
        following = self._planner.step_at(index + 1)
        example = self._planner.example_at(index + 1)
        if step.guard is guards.approval_decided:
            planned_call.approved = True
        elif step.guard is guards.doubt_settled and following is not None:
            other = example.needs_approval or (
                following.guard is None and self._needs_other_call(self._planner.judged_at(index + 2))
            )
            if other:
                self._planner.human_replies[index] = ItRan("it had run")
                self._due.clear()
            else:
                self._planner.human_replies[index] = ItDidNotRun()

    def _needs_other_call(self, result_index: int) -> bool:
        """Whether the result needed there must come from another call than the one in doubt."""
        need = self._planner.example_at(result_index)
        judged, following = self._planner.step_at(result_index), self._planner.step_at(result_index + 1)
        several = need.times > 1 and not (judged is not None and judged.guard is repeated_error)
        return need.call is not None or several or (following is not None and following.guard is guards.retry_tool)

    def _on_recover(self, index: int, step: Step) -> None:
        if any(planned_call.rerun for planned_call in self._ran if last_result_failed(planned_call)):
            self._planner.mark_rerunnable(index)
        if step.guard is not guards.retry_tool:
            return
        repeated = self._ran[-self._rerun_count(index + 1) :]
        error = next((s.results[-1].value for s in reversed(repeated) if last_result_failed(s)), None)
        for planned_call in repeated:
            planned_call.rerun = True
            if not last_result_failed(planned_call) and planned_call.results and error is not None:
                planned_call.results[-1].value = unique_error(
                    error, self._planner.results.index(planned_call.results[-1])
                )
        self._queue = deque(repeated)
        self._ran, self._due = [], []

    def _rerun_count(self, start: int) -> int:
        """How many calls are executed again: one, plus one for each ``calls_pending`` that follows."""
        count = 1
        for index in range(start, self._range.stop):
            step = self._planner.step_at(index)
            if step is not None and step.effect is JUDGE_RESULTS:
                if step.guard is not guards.calls_pending:
                    break
                count += 1
        return count


@dataclass(frozen=True, slots=True)
class OwnCallOptions:
    """How a path calls the agent's own tools.

    Attributes:
        calls: The calls to choose from.
        offset: Where to begin to choose, so that paths differ.
        limit: How often one path may make one call.
    """

    calls: OwnCalls
    offset: int
    limit: int


class BatchPlanner:
    """Plans the tool calls of each reply along a path.

    Args:
        default_call: The call to make where no example names one; None for one of ``DEFAULT_TOOLS``.
        steps: The transitions of the path.
        examples: The example of each of them.
        tools: The agent's tools.
        extra_call: Whether each batch has one call more than the path executes.
        own_calls: Calls of the agent's own tools; None if the path calls ``DEFAULT_TOOLS``.
        overridden: The indexes of the transitions whose examples are used as they are.

    Attributes:
        results: What the tools return, in the order of execution.
        human_replies: By transition index, the human replies that depend on the rows that follow.
        votes: By the index of the transition at which approval is requested, what happens while the call waits.
        asked_by_rule: The indexes of the transitions at which a tool's own rule requests approval.
        asked_by_hook: Those at which a hook does, because the call that an example names does not fit there.
    """

    def __init__(
        self,
        default_call: ToolCall | None,
        steps: Sequence[Step],
        examples: Sequence[Example],
        tools: Mapping[str, Tool],
        *,
        extra_call: bool = False,
        own_calls: OwnCallOptions | None = None,
        overridden: Collection[int] = (),
    ) -> None:
        self._default_call = default_call
        self._overridden = overridden
        self._extra_call = extra_call
        self._own_calls = own_calls
        self._times_called: Counter[str] = Counter()
        self.votes = _votes_by_request(steps)
        self.asked_by_rule: set[int] = set()
        self.asked_by_hook: set[int] = set()
        self._tools = tools
        self._steps = steps
        self._examples = examples
        self.results: list[PlannedResult] = []
        self.human_replies: dict[int, Any] = {}
        self._rerunnable: set[int] = set()
        self._call_count = 0
        self._last_failure: tuple[ToolCall, Any] | None = None

    def may_rerun(self, index: int) -> bool:
        """Whether the calls that failed before a visit to ``recover`` may be executed again, unchanged."""
        return index in self._rerunnable

    def plan(self, start: int, until: int) -> list[ToolCall]:
        """The calls of the reply whose transitions are those from ``start`` up to, not including, ``until``."""
        unexecuted = self._unexecuted_calls(start, until)
        if unexecuted is not None:
            return unexecuted
        if not self._runs_calls(start, until):
            return []
        planned = BatchPlan(self, start, until).planned_calls()
        if self._extra_call:
            planned.append(PlannedCall())
        calls: list[ToolCall] = []
        for planned_call in planned:
            if planned_call.call is None:
                self._choose_call(planned_call, alone=len(planned) == 1)
            calls += self._build_calls(planned_call)
        return calls

    def _runs_calls(self, start: int, until: int) -> bool:
        return any(self._steps[i].effect is RUN_CALLS for i in range(start, until))

    def _choose_call(self, planned_call: PlannedCall, *, alone: bool) -> None:
        """Let a planned call be the one that an example names, or one of an own tool with the options that it needs."""
        # a rule asks before the crash, a hook also after it
        interrupted = planned_call.crashes and planned_call.needs_approval
        plain = not (planned_call.rerun or planned_call.parallel or planned_call.times > 1 or interrupted)
        named = next((c for i in planned_call.asked_at if (c := self.example_at(i).call) is not None), None)
        if named is not None:
            if plain and self._waits_as_wanted(planned_call, named):
                planned_call.call = named
            else:
                self.asked_by_hook.update(planned_call.asked_at)
        elif plain and self._own_calls is not None:
            self._choose_own_call(planned_call, self._own_calls, alone=alone)

    def _choose_own_call(self, planned_call: PlannedCall, own: OwnCallOptions, *, alone: bool) -> None:
        fails, waits = last_result_failed(planned_call), bool(planned_call.asked_at)
        votes = {self.votes[index] for index in planned_call.asked_at}
        if self._default_call is not None and not waits:
            return
        if planned_call.needs_approval and not waits:
            return

        def fits(tool: Tool) -> bool:
            return (alone or not tool.parallel) and not (tool.idempotent and (planned_call.crashes or fails))

        if waits and not own.calls.any_waits:
            raise NoExampleError(
                "no call of the agent's own tools requires approval, as far as their rules tell: pass "
                "examples={'approval_required': Example(call=call(...))}, or Example(needs_approval=True) for a hook's"
            )
        if len(votes) > 1:
            return
        wanted = next(iter(votes), None)
        call = own.calls.pick(own.offset + self._call_count, fits, self._times_called, own.limit, votes=wanted)
        if call is not None:
            self._times_called[call_key(call)] += 1
            planned_call.call = call
            self.asked_by_rule.update(planned_call.asked_at)

    def _waits_as_wanted(self, planned_call: PlannedCall, call: ToolCall) -> bool:
        """Whether the rule of a call's tool needs as many approvals as the path gives."""
        tool = self._tools.get(call.name)
        rule = None if tool is None else requires_approval(tool, call.arguments)
        return all(index in self.voted_at or self.votes[index].fit(rule) for index in planned_call.asked_at)

    @property
    def voted_at(self) -> dict[int, Approval]:
        """By the index of the transition, the rule of each request that is voted on or escalated."""
        return {index: votes.rule for index, votes in self.votes.items() if votes != Votes()}

    def chooses_call(self, index: int) -> bool:
        """Whether the approval at a transition may be of a call that is chosen once the whole batch is planned."""
        example = self.example_at(index)
        return index not in self._overridden and (example is BY_APPROVAL_RULE or example.call is not None)

    def _unexecuted_calls(self, start: int, until: int) -> list[ToolCall] | None:
        """The calls of a reply none of which is executed; None if one is."""
        if self._runs_calls(start, until):
            return None
        for i in range(start, until):
            example = self._examples[i]
            if example.call is not None:
                return [example.call] * example.times
        return None

    def _build_calls(self, planned_call: PlannedCall) -> list[ToolCall]:
        call = planned_call.call
        if call is None:
            default = self._default_call
            if default is None or planned_call.rerun or planned_call.parallel or planned_call.times > 1:
                name = {(False, False): "fsm_act", (True, False): "fsm_steady", (False, True): "fsm_together"}.get(
                    (planned_call.rerun, planned_call.parallel or planned_call.times > 1), "fsm_both"
                )
                default = ToolCall("", name, {"n": 0})
            call = default
        calls: list[ToolCall] = []
        for _ in range(planned_call.times):
            self._call_count += 1
            arguments = dict(call.arguments)
            if call.name.startswith("fsm_"):  # equal calls would make ``loop_detected`` fire
                arguments["n"] = f"many {self._call_count}" if isinstance(arguments.get("n"), str) else self._call_count
            calls.append(ToolCall("", call.name, arguments))
        errors = [r.value for r in planned_call.results if isinstance(r.value, BaseException)]
        if errors or not planned_call.executes:
            self._last_failure = (calls[-1], errors[-1] if errors else None)
        return calls

    # -- used by BatchPlan -----------------------------------------------------------------------------

    def step_at(self, index: int) -> Step | None:
        """The transition at an index; None after the end of the path."""
        return self._steps[index] if index < len(self._steps) else None

    def judged_at(self, index: int) -> int:
        """The index, from a given one on, at which results are judged: user-defined states may come before."""
        while index < len(self._steps) and self._steps[index].is_own:
            index += 1
        return index

    def example_at(self, index: int) -> Example:
        """The example of the row taken at an index."""
        return self._examples[index] if index < len(self._examples) else Example()

    def add_result(self, planned_call: PlannedCall, value: Any, times: int = 1) -> None:
        """Plan the result of a call's next execution; an error is made different from all others."""
        if isinstance(value, BaseException) and times == 1:
            value = unique_error(value, len(self.results))
        for _ in range(times):
            result = PlannedResult(value)
            self.results.append(result)
            planned_call.results.append(result)

    def is_valid_call(self, call: ToolCall) -> bool:
        """Whether a call names an existing tool and has valid arguments."""
        return not isinstance(validate_call(call, self._tools), ToolResult)

    def repeat_result(self, planned_call: PlannedCall, value: Any) -> None:
        """Plan exactly the same result as before."""
        self.results.append(PlannedResult(value))
        planned_call.results.append(self.results[-1])

    def repeat_last_failure(self, planned_call: PlannedCall, value: Any) -> None:
        """Make a call fail exactly as the last one of an earlier batch did: equal errors of one batch are one."""
        if self._last_failure is not None:
            planned_call.call, value = self._last_failure
        if value is None:
            planned_call.executes = False
        else:
            self.repeat_result(planned_call, value)

    def mark_rerunnable(self, index: int) -> None:
        """Record that the calls which failed before a visit to ``recover`` may be executed again."""
        self._rerunnable.add(index)


class NoExampleError(AgentfsmError):
    """A guard of the path has no example: declare one with ``@detector(fires_on=[Example(...)])``."""


def scenario_for_path(
    path: Path,
    graph: Graph,
    examples: GuardExampleSet,
    *,
    tools: Mapping[str, Tool],
    envelope: bool,
    final_answer: Any,
    overrides: Mapping[int, Example] | None = None,
    extra_call: bool = False,
    own_calls: OwnCalls | None = None,
) -> Scenario:
    """The scenario in which a run takes a path.

    Args:
        path: The path.
        graph: The graph in which it is taken.
        examples: The examples of its guards.
        tools: The agent's tools.
        envelope: Whether the model replies with JSON envelopes.
        final_answer: A final answer that the agent accepts.
        overrides: By transition index, the example to use instead of the guard's first one.
        extra_call: Whether each batch has one call more than the path executes.
        own_calls: Calls of the agent's own tools, to make where no example names a call; None for ``DEFAULT_TOOLS``.

    Raises:
        NoExampleError: A guard has no example, or no own tool requires approval where the path asks for it.
    """
    builder = _ScenarioBuilder(
        path, graph, examples, overrides or {}, envelope=envelope, final_answer=final_answer, own_calls=own_calls
    )
    return builder.build(tools, extra_call=extra_call)


class _ScenarioBuilder:
    """Builds the scenario of one path."""

    def __init__(
        self,
        path: Path,
        graph: Graph,
        example_set: GuardExampleSet,
        overrides: Mapping[int, Example],
        *,
        envelope: bool,
        final_answer: Any,
        own_calls: OwnCalls | None,
    ) -> None:
        self._path = path
        self._own_calls = own_calls
        self._own_used: set[str] = set()
        self._overridden = frozenset(overrides)
        self._steps = steps_of(graph, path.rows)
        self._example_set = example_set
        self._envelope = envelope
        self._final_answer = final_answer
        self._examples = [self._example(i, step, overrides) for i, step in enumerate(self._steps)]
        self._side_events: dict[int, SideEvent] = {}
        self._turns: list[ModelTurn] = []
        self._last_reply: int | None = None

    def _example(self, index: int, step: Step, overrides: Mapping[int, Example]) -> Example:
        if index in overrides:
            return overrides[index]
        row = step.row
        examples = self._example_set.for_transition(row)
        if examples is None or not examples.fires_on:
            raise NoExampleError(
                f"{row.id} has no example: declare @detector(fires_on=[Example(...)]) on {row.name!r}, or pass "
                f"examples={{{row.name!r}: Example(...)}}"
            )
        return self._own_example(step, examples.fires_on[0])

    def _own_example(self, step: Step, example: Example) -> Example:
        """An example; one that calls a tool made for the purpose calls an own one instead, if one has what it takes."""
        if self._own_calls is None or example.call is None or example.call.name not in ("fsm_act", "fsm_finish"):
            return example
        # equal errors are ``repeated_error``, and in an envelope that is the same call once more
        if step.guard is invalid_arguments and step.row.id not in self._own_used and not self._envelope:
            self._own_used.add(step.row.id)
            return replace(example, call=self._own_calls.invalid_call(self._path.number) or example.call)
        if step.guard is guards.declared_done:
            return replace(example, call=self._own_calls.last_call(self._path.number) or example.call)
        return example

    def _own_call_options(self) -> OwnCallOptions | None:
        if self._own_calls is None:
            return None
        # one call less than makes ``loop_detected`` fire
        limit = max(1, self._path.guardrails.loop_hard_threshold - 1)
        return OwnCallOptions(self._own_calls, self._path.number, limit)

    def build(self, tools: Mapping[str, Tool], *, extra_call: bool) -> Scenario:
        """The scenario."""
        planner = BatchPlanner(
            self._example_set.default_call(),
            self._steps,
            self._examples,
            tools,
            extra_call=extra_call,
            own_calls=self._own_call_options(),
            overridden=self._overridden,
        )
        actions: list[Action | None] = []
        human_replies: list[Any] = []
        for index, step in enumerate(self._steps):
            example = self._examples[index]
            self._add_side_event(index, example)
            if step.effect is CALL_MODEL:
                self._turns.append(self._model_turn(planner, index, example))
                if not isinstance(self._turns[-1].entry, BaseException):
                    self._last_reply = len(self._turns) - 1
            elif step.effect is CHOOSE_RECOVERY:
                actions.append(_recovery_action(planner, index, example))
            elif step.waits and step.guard in _INSTEAD_OF_REPLIES:
                human_replies.append(_INSTEAD_OF_REPLIES[step.guard])
            elif example.answer is not None:
                human_replies.append(planner.human_replies.get(index, example.answer))
            if example.tokens or example.cost_usd:
                self._add_usage(example)
        for index in planner.asked_by_rule:
            del self._side_events[index]
        for index in planner.asked_by_hook:
            self._side_events[index] = SideEvent(needs_approval=True)
        for index in set(planner.voted_at) - planner.asked_by_rule:
            self._side_events[index] = SideEvent(approval=planner.voted_at[index])
        return Scenario(
            tuple(self._turns),
            tuple(result.value for result in planner.results),
            tuple(actions),
            tuple(human_replies),
            self._side_events,
            self._path.guardrails,
            **self._start(),
        )

    def _start(self) -> dict[str, Any]:
        """The metadata, tags and actor of the run."""
        start = merged_start(self._examples)
        if start is None:
            raise NoExampleError(
                f"no run takes {self._path.id}: the examples of its guards need different metadata, or different actors"
            )
        return start

    def _add_side_event(self, index: int, example: Example) -> None:
        side_event = SideEvent(
            example.duration_s,
            example.idle_s,
            example.cancel,
            example.abort,
            example.needs_approval,
            example.crash,
            example.state_result,
        )
        if side_event != NO_SIDE_EVENT:
            self._side_events[index] = side_event

    def _add_usage(self, example: Example) -> None:
        if self._last_reply is not None:
            turn = self._turns[self._last_reply]
            self._turns[self._last_reply] = ModelTurn(
                turn.entry, max(turn.tokens, example.tokens), max(turn.cost_usd, example.cost_usd)
            )

    def _model_turn(self, planner: BatchPlanner, index: int, example: Example) -> ModelTurn:
        """The model's turn: an exception, or the reply that the rows up to the next model call require."""
        if isinstance(example.reply, BaseException):
            return ModelTurn(example.reply)
        until = next(
            (i for i in range(index + 1, len(self._steps)) if self._steps[i].effect is CALL_MODEL), len(self._steps)
        )
        entry = example.reply
        if entry is None:
            entry = next((e.reply for e in self._examples[index + 1 : until] if e.reply is not None), None)
        calls = planner.plan(index + 1, until)
        if not calls:
            return ModelTurn(self._enveloped_text(entry))
        if self._envelope and len(calls) == 1:
            return ModelTurn(enveloped_call(calls[0]))
        return ModelTurn(_with_calls(entry, calls))  # an envelope holds one call; native ones are taken, too

    def _enveloped_text(self, entry: Any) -> Any:
        if entry is None:
            entry = self._final_answer
        if self._envelope and entry is self._final_answer:
            return canonical_json({"kind": "final", "content": entry})
        return entry


def _recovery_action(planner: BatchPlanner, index: int, example: Example) -> Action:
    """The policy's decision: the example's, or one that leads back to the model."""
    if example.action is not None:
        return example.action
    # after a failure of a call that may be executed again, ``retry`` would execute it again
    return Action.narrow_scope if planner.may_rerun(index) else Action.retry


def _with_calls(entry: Any, calls: Sequence[ToolCall]) -> Any:
    """A reply that makes these calls, with the text of an entry."""
    numbered = tuple(replace(call, id=f"{call.name}_{i}") for i, call in enumerate(calls, 1))
    if entry is None:
        return list(numbered)
    message = entry if isinstance(entry, Message) else Message.assistant(str(entry))
    reply = entry if isinstance(entry, Reply) else Reply(message)
    return replace(reply, message=replace(reply.message, tool_calls=numbered))
