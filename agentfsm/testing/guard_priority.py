"""Tests of guard order: two guards of a state hold at once, and the one that is listed first must win.

Path coverage takes every row, but with one guard at a time, so it does not notice when two rows are swapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from agentfsm.analysis.loop_assumptions import AgentTraits
from agentfsm.analysis.state_space import Configuration, StateSpace, reconstruct_path
from agentfsm.loop.detectors import DEFAULT_RESULT, Example
from agentfsm.loop.guardrails import Behavior
from agentfsm.loop.guards import calls_pending
from agentfsm.loop.messages import FinishReason, Message, Reply
from agentfsm.loop.outcomes import JUDGE_RESULTS, RUN_CALLS
from agentfsm.machine.graph import Graph, Transition
from agentfsm.testing.path_assumptions import loop_guard, merged_start
from agentfsm.testing.path_generation import Path, shortest_run_to_end, small_guardrails, state_space_for
from agentfsm.testing.path_runner import PathRun, WitnessDriver
from agentfsm.testing.path_to_scenario import Step, steps_of
from agentfsm.testing.simulation import run_in_own_loop


@dataclass(frozen=True, slots=True)
class GuardConflict:
    """A path with a transition at which two guards should be true at once.

    Attributes:
        path: The path. At that transition it takes the first of the two rows.
        move_index: The index of that transition.
        rival: The other row, which comes later in the table.
    """

    path: Path
    move_index: int
    rival: Transition

    @property
    def id(self) -> str:
        """A name for tests: ``state.first-before-second``."""
        return f"{self.path.rows[self.move_index].id}-before-{self.rival.name}"


def guard_conflicts(graph: Graph, behavior: Behavior | None = None) -> list[GuardConflict]:
    """One conflict for every two guards of a state that can be true at the same time, in table order.

    ::

        driver = WitnessDriver(LOOP)
        for conflict in guard_conflicts(LOOP)[:3]:
            path_run = check_priority(driver, conflict)
            if path_run is not None:  # None: no examples make both guards true
                taken = path_run.decisions[conflict.move_index].transition
                assert taken == conflict.path.rows[conflict.move_index]

    Args:
        graph: The graph.
        behavior: The behavior of the runs; None allows any.
    """
    space = state_space_for(graph, small_guardrails(behavior), AgentTraits(behavior))
    conflicts: list[GuardConflict] = []
    for spec in graph.states:
        for first, second in combinations(graph.rows(spec.name), 2):
            if second.guard is not None:
                rows = _path_to_conflict(space, first, second)
                if rows is not None:
                    path = Path(len(conflicts) + 1, rows[0], small_guardrails(behavior), behavior)
                    conflicts.append(GuardConflict(path, rows[1], second))
    return conflicts


def check_priority(driver: WitnessDriver, conflict: GuardConflict) -> PathRun | None:
    """The run in which both guards of a conflict are true; in an async test, await ``check_priority_async`` instead."""
    return run_in_own_loop(check_priority_async(driver, conflict), "await check_priority_async(driver, conflict)")


async def check_priority_async(driver: WitnessDriver, conflict: GuardConflict) -> PathRun | None:
    """The run in which both guards of a conflict are true; None if no examples make both true.

    Every combination of the two guards' examples is tried, and each of these examples alone, in the real loop, until
    both guards are true. Whether the first row won is for the caller to check: see ``PathRun.divergence``.

    Args:
        driver: The driver, for the agent or graph under test.
        conflict: The conflict.

    Raises:
        agentfsm.testing.path_to_scenario.NoExampleError: A guard of the path has no example.
    """
    first, rival = conflict.path.rows[conflict.move_index], conflict.rival
    examples = driver.examples_for(conflict.path)
    first_examples, rival_examples = examples.for_transition(first), examples.for_transition(rival)
    if first_examples is None or rival_examples is None:
        return None
    index = conflict.move_index
    pairs = ((a, b) for a in first_examples.fires_on for b in rival_examples.fires_on)
    together = [overrides for a, b in pairs for overrides in _example_overrides(driver.graph, conflict, a, b)]
    alone = [{index: each} for each in (*first_examples.fires_on, *rival_examples.fires_on)]
    for overrides in [*together, *alone]:
        path_run = await driver.run_async(
            conflict.path,
            overrides=overrides,
            probe_moves=frozenset((index,)),
            extra_call=loop_guard(rival) is calls_pending,
        )
        results = path_run.simulation_result.guard_results
        if all(results.get((index, row.id)) for row in (first, rival)):
            return path_run
    return None


def _example_overrides(
    graph: Graph, conflict: GuardConflict, example: Example, rival: Example
) -> Iterator[dict[int, Example]]:
    """The ways in which two examples can happen at the same transition, as overrides."""
    index = conflict.move_index
    steps = steps_of(graph, conflict.path.rows)
    if steps[index].effect is JUDGE_RESULTS:  # an earlier call of the batch returns what the rival guard looks for
        if steps[index].guard is calls_pending:
            yield {index: rival}
        elif index >= 2 and steps[index - 2].guard is calls_pending:
            yield {index - 2: rival}
    both = _merge_examples(example, rival)
    if both is not None:
        yield {index: both}


def _merge_examples(a: Example, b: Example) -> Example | None:
    """One example in which both happen; None if they exclude each other."""
    reply, start = _merge_replies(a.reply, b.reply), merged_start((a, b))
    if (
        reply is _INCOMPATIBLE
        or start is None
        or (a.call and b.call and a.times == b.times)
        or (a.action and b.action)
        or (a.answer and b.answer)
        or None not in (a.state_result, b.state_result)
    ):
        return None
    return replace(
        a,
        reply=reply,
        call=a.call if b.call is None or a.times > b.times else b.call,
        times=max(a.times, b.times),
        result=b.result if a.result is DEFAULT_RESULT else a.result,
        duration_s=max(a.duration_s, b.duration_s),
        idle_s=max(a.idle_s, b.idle_s),
        tokens=max(a.tokens, b.tokens),
        cost_usd=max(a.cost_usd, b.cost_usd),
        action=a.action or b.action,
        answer=a.answer or b.answer,
        needs_approval=a.needs_approval or b.needs_approval,
        crash=a.crash or b.crash,
        cancel=a.cancel or b.cancel,
        abort=a.abort or b.abort,
        state_result=b.state_result if a.state_result is None else a.state_result,
        **start,
    )


_INCOMPATIBLE = object()


def _merge_replies(a: object, b: object) -> object:
    """One reply with the properties of both; ``_INCOMPATIBLE`` if there is none."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, BaseException) or isinstance(b, BaseException):
        return _INCOMPATIBLE
    x, y = _as_reply(a), _as_reply(b)
    reasons = {r.finish_reason for r in (x, y)} - {FinishReason.STOP}
    if len(reasons) > 1:
        return _INCOMPATIBLE
    content = next((r.message.content for r, given in ((x, a), (y, b)) if isinstance(given, str)), x.message.content)
    return Reply(
        Message.assistant(content),
        reasons.pop() if reasons else FinishReason.STOP,
        refusal=x.refusal or y.refusal,
    )


def _as_reply(entry: object) -> Reply:
    return entry if isinstance(entry, Reply) else Reply(Message.assistant(str(entry)))


def _path_to_conflict(
    space: StateSpace, first: Transition, rival: Transition
) -> tuple[tuple[Transition, ...], int] | None:
    """The rows of a run that takes the first row where the rival may be true too, and the index of that transition."""
    graph = space.graph
    compiled = {row.transition.id: row for rows in space.rows for row in rows}
    one, other = compiled[first.id], compiled[rival.id]
    judges = graph.spec(first.source).effect is JUDGE_RESULTS
    pending = judges and calls_pending not in (loop_guard(first), loop_guard(rival))
    steps = steps_of(graph, graph.transitions)
    start: tuple[Configuration, int] = (space.initial, 0)
    back: dict[tuple[Configuration, int], tuple[tuple[Configuration, int], int] | None] = {start: None}
    todo: list[tuple[Configuration, int]] = [start]
    for node in todo:
        config, since = node
        for row, after in space.moves(config):
            if row == one.place and other.may(config) and (since == 2 or not pending):
                rows = (*reconstruct_path(back, node), row)
                to_end = shortest_run_to_end(space, after)
                return tuple(graph.transitions[r] for r in (*rows, *to_end)), len(rows) - 1
            taken = steps[row]
            then = (after, 1 if taken.guard is calls_pending else 2 if since == 1 and _runs_tool(taken) else 0)
            if then not in back:
                back[then] = (node, row)
                todo.append(then)
    return None


def _runs_tool(step: Step) -> bool:
    return step.effect is RUN_CALLS and step.guard is None
