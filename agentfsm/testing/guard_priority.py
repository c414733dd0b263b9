"""Tests of guard order: two guards of a state hold at once, and the one that is listed first must win.

Path coverage takes every row, but with one guard at a time, so it does not notice when two rows are swapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from agentfsm.analysis.state_space import Configuration, StateSpace, reconstruct_path
from agentfsm.loop.detectors import DEFAULT_RESULT, Example
from agentfsm.loop.guardrails import Behavior
from agentfsm.loop.guards import calls_pending
from agentfsm.loop.messages import FinishReason, Message, Reply
from agentfsm.machine.graph import Graph, State, Transition
from agentfsm.testing.path_drivers import PathRun, WitnessDriver
from agentfsm.testing.path_generation import Path, shortest_run_to_end, small_guardrails, state_space_for

__all__ = ["GuardConflict", "check_priority", "guard_conflicts"]


@dataclass(frozen=True, slots=True)
class GuardConflict:
    """A path at one move of which two guards are to hold.

    Attributes:
        path: The path; at that move it takes the first of the two rows.
        move_index: How many moves come before.
        rival: The row that stands behind the other.
    """

    path: Path
    move_index: int
    rival: Transition

    @property
    def id(self) -> str:
        """A name for tests: ``state.first-before-second``."""
        return f"{self.path.rows[self.move_index].id}-before-{self.rival.name}"


def guard_conflicts(graph: Graph, behavior: Behavior | None = None) -> list[GuardConflict]:
    """A contest for any two guards of a state that can be asked in one moment, in the order of the table.

    ::

        witness = WitnessDriver(LOOP)
        for contest in guard_conflicts(LOOP)[:3]:
            walk = check_priority(witness, contest)
            if walk is not None:  # else no examples make both hold
                assert walk.decisions[contest.place].transition == contest.path.rows[contest.place]
    """
    product = state_space_for(graph, small_guardrails(behavior), behavior)
    found: list[GuardConflict] = []
    for spec in graph.states:
        for first, second in combinations(graph.rows(spec.name), 2):
            if second.guard is not None:
                rows = _path_to_conflict(product, first, second)
                if rows is not None:
                    path = Path(len(found) + 1, rows[0], 1, small_guardrails(behavior), behavior)
                    found.append(GuardConflict(path, rows[1], second))
    return found


def check_priority(driver: WitnessDriver, conflict: GuardConflict) -> PathRun | None:
    """Hold a contest with the real loop: the walk, or None where the two guards do not hold together.

    It is held in each way that the guards' examples allow, until both hold.
    """
    first, rival = conflict.path.rows[conflict.move_index], conflict.rival
    examples = driver.examples_for(conflict.path)
    ours, theirs = examples.for_transition(first), examples.for_transition(rival)
    if ours is None or theirs is None:
        return None
    for mine in ours.fires_on:
        for other in theirs.fires_on:
            for changes in _example_overrides(conflict, mine, other):
                walk = driver.run(
                    conflict.path,
                    overrides=changes,
                    probe_moves=frozenset((conflict.move_index,)),
                    extra_call=rival.guard is calls_pending,
                )
                asked = walk.simulation_result.guard_results
                held = asked.get((conflict.move_index, first.id)) and asked.get((conflict.move_index, rival.id))
                if held:
                    return walk
    return None


def _example_overrides(conflict: GuardConflict, mine: Example, other: Example) -> Iterator[dict[int, Example]]:
    """How two examples can be told to happen in one moment."""
    place, first = conflict.move_index, conflict.path.rows[conflict.move_index]
    if first.source == State.POST_TOOL:  # an earlier call of the batch brings what the rival looks for
        if first.guard is calls_pending:
            yield {place: other}
        elif place >= 2 and conflict.path.rows[place - 2].guard is calls_pending:
            yield {place - 2: other}
    both = _merge_examples(mine, other)
    if both is not None:
        yield {place: both}


def _merge_examples(a: Example, b: Example) -> Example | None:
    """One example in which two things happen; None where they exclude each other."""
    reply = _merge_replies(a.reply, b.reply)
    if (
        reply is _INCOMPATIBLE
        or (a.call and b.call and a.times == b.times)
        or (a.action and b.action)
        or (a.answer and b.answer)
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
    )


_INCOMPATIBLE = object()


def _merge_replies(a: object, b: object) -> object:
    """One reply that is like two; ``_INCOMPATIBLE`` where there is none."""
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
    product: StateSpace, first: Transition, rival: Transition
) -> tuple[tuple[Transition, ...], int] | None:
    """The rows of a run in which the first is taken where the rival might be, and the place of that move."""
    graph = product.graph
    compiled = {row.transition.id: row for rows in product.rows for row in rows}
    one, other = compiled[first.id], compiled[rival.id]
    pending = first.source == State.POST_TOOL and calls_pending not in (first.guard, rival.guard)
    start: tuple[Configuration, int] = (product.initial, 0)
    back: dict[tuple[Configuration, int], tuple[tuple[Configuration, int], int] | None] = {start: None}
    todo: list[tuple[Configuration, int]] = [start]
    for node in todo:
        config, since = node
        for row, after in product.moves(config):
            if row == one.place and other.may(config) and (since == 2 or not pending):
                rows = (*reconstruct_path(back, node), row)
                home = shortest_run_to_end(product, after)
                return tuple(graph.transitions[r] for r in (*rows, *home)), len(rows) - 1
            taken = graph.transitions[row]
            then = (after, 1 if taken.guard is calls_pending else 2 if since == 1 and _runs_tool(taken) else 0)
            if then not in back:
                back[then] = (node, row)
                todo.append(then)
    return None


def _runs_tool(row: Transition) -> bool:
    return row.source == State.DISPATCH_TOOL and row.guard is None
