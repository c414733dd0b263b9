"""Contests: two guards of a state hold at once, and the one that stands in front must win.

A list of pairs takes every row, but with one guard at a time, so it does not notice when two rows change
places. A contest does: it stages both, asks both guards, and sees which row is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from agentfsm.analysis.product import Config, Product
from agentfsm.analysis.search import path_to
from agentfsm.core.examples import FINE, Example
from agentfsm.core.guards import calls_pending
from agentfsm.core.messages import FinishReason, Message, Reply
from agentfsm.core.rules import Rules
from agentfsm.machine.graph import Graph, State, Transition
from agentfsm.testing.pathfinder import Path, short
from agentfsm.testing.ways import product_of, way_home
from agentfsm.testing.witness import Walk, Witness

__all__ = ["Contest", "contests", "hold"]


@dataclass(frozen=True, slots=True)
class Contest:
    """A path at one move of which two guards are to hold.

    Attributes:
        path: The path; at that move it takes the first of the two rows.
        place: How many moves come before.
        rival: The row that stands behind the other.
    """

    path: Path
    place: int
    rival: Transition

    @property
    def id(self) -> str:
        """A name for tests: ``state.first-before-second``."""
        return f"{self.path.rows[self.place].id}-before-{self.rival.name}"


def contests(graph: Graph, rules: Rules | None = None) -> list[Contest]:
    """A contest for any two guards of a state that can be asked in one moment, in the order of the table.

    ::

        witness = Witness(LOOP)
        for contest in contests(LOOP)[:3]:
            walk = hold(witness, contest)
            if walk is not None:  # else no examples make both hold
                assert walk.decisions[contest.place].transition == contest.path.rows[contest.place]
    """
    product = product_of(graph, short(rules), rules)
    found: list[Contest] = []
    for spec in graph.states:
        for first, second in combinations(graph.rows(spec.name), 2):
            if second.guard is not None:
                rows = _way(product, first, second)
                if rows is not None:
                    path = Path(len(found) + 1, rows[0], 1, short(rules), rules)
                    found.append(Contest(path, rows[1], second))
    return found


def hold(witness: Witness, contest: Contest) -> Walk | None:
    """Hold a contest with the real loop: the walk, or None where the two guards do not hold together.

    It is held in each way that the guards' examples allow, until both hold.
    """
    first, rival = contest.path.rows[contest.place], contest.rival
    examples = witness.examples(contest.path)
    ours, theirs = examples.of(first), examples.of(rival)
    if ours is None or theirs is None:
        return None
    for mine in ours.fires_on:
        for other in theirs.fires_on:
            for changes in _ways(contest, mine, other):
                walk = witness.walk(
                    contest.path, instead=changes, watch=frozenset((contest.place,)), spare=rival.guard is calls_pending
                )
                asked = walk.played.asked
                held = asked.get((contest.place, first.id)) and asked.get((contest.place, rival.id))
                if held:
                    return walk
    return None


def _ways(contest: Contest, mine: Example, other: Example) -> Iterator[dict[int, Example]]:
    """How two examples can be told to happen in one moment."""
    place, first = contest.place, contest.path.rows[contest.place]
    if first.source == State.POST_TOOL:  # an earlier call of the batch brings what the rival looks for
        if first.guard is calls_pending:
            yield {place: other}
        elif place >= 2 and contest.path.rows[place - 2].guard is calls_pending:
            yield {place - 2: other}
    both = _both(mine, other)
    if both is not None:
        yield {place: both}


def _both(a: Example, b: Example) -> Example | None:
    """One example in which two things happen; None where they exclude each other."""
    reply = _one(a.reply, b.reply)
    if (
        reply is _CLASH
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
        result=b.result if a.result is FINE else a.result,
        took_s=max(a.took_s, b.took_s),
        silent_s=max(a.silent_s, b.silent_s),
        tokens=max(a.tokens, b.tokens),
        cost_usd=max(a.cost_usd, b.cost_usd),
        action=a.action or b.action,
        answer=a.answer or b.answer,
        asks=a.asks or b.asks,
        cut=a.cut or b.cut,
        cancel=a.cancel or b.cancel,
        abort=a.abort or b.abort,
    )


_CLASH = object()


def _one(a: object, b: object) -> object:
    """One reply that is like two; ``_CLASH`` where there is none."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, BaseException) or isinstance(b, BaseException):
        return _CLASH
    x, y = _reply(a), _reply(b)
    reasons = {r.finish_reason for r in (x, y)} - {FinishReason.STOP}
    if len(reasons) > 1:
        return _CLASH
    content = next((r.message.content for r, given in ((x, a), (y, b)) if isinstance(given, str)), x.message.content)
    return Reply(
        Message.assistant(content),
        reasons.pop() if reasons else FinishReason.STOP,
        refusal=x.refusal or y.refusal,
    )


def _reply(entry: object) -> Reply:
    return entry if isinstance(entry, Reply) else Reply(Message.assistant(str(entry)))


def _way(product: Product, first: Transition, rival: Transition) -> tuple[tuple[Transition, ...], int] | None:
    """The rows of a run in which the first is taken where the rival might be, and the place of that move."""
    graph = product.graph
    compiled = {row.transition.id: row for rows in product.rows for row in rows}
    one, other = compiled[first.id], compiled[rival.id]
    pending = first.source == State.POST_TOOL and calls_pending not in (first.guard, rival.guard)
    start: tuple[Config, int] = (product.start, 0)
    back: dict[tuple[Config, int], tuple[tuple[Config, int], int] | None] = {start: None}
    todo: list[tuple[Config, int]] = [start]
    for node in todo:
        config, since = node
        for row, after in product.moves(config):
            if row == one.place and other.may(config) and (since == 2 or not pending):
                rows = (*path_to(back, node), row)
                home = way_home(product, after)
                return tuple(graph.transitions[r] for r in (*rows, *home)), len(rows) - 1
            taken = graph.transitions[row]
            then = (after, 1 if taken.guard is calls_pending else 2 if since == 1 and _runs(taken) else 0)
            if then not in back:
                back[then] = (node, row)
                todo.append(then)
    return None


def _runs(row: Transition) -> bool:
    return row.source == State.DISPATCH_TOOL and row.guard is None
