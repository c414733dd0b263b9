"""Random graphs by seed that users might write, right or wrong: a preset's, with some changes.

Each change takes a graph, dice, the world that its guards and effects ask what to do, and a number for new names.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from agentfsm import with_votes
from agentfsm.errors import AgentfsmError, GraphError
from agentfsm.loop.failures import Failure, FailureKind
from agentfsm.loop.guards import approval_decided, came_back, expired, replied
from agentfsm.loop.messages import Message
from agentfsm.loop.outcomes import StateResult
from agentfsm.loop.transition_table import BUILT_IN_GUARDS
from agentfsm.machine.declaration import Counter, EffectSpec, Exhausted, StateSpec, Transition, exhausted, extends_limit
from agentfsm.machine.graph import Graph
from agentfsm.testing import FakeClock

__all__ = ["CHANGES", "World", "draw_graph"]

ENDINGS = ("completed", "handed_off", "partial")


class World:
    """Everything outside the loop, drawn by seed; the agent's guards, tools, effects and policy ask it what to do.

    Attributes:
        dice: What decides.
        clock: The clock of the current run.
        envelopes: How often the model calls tools in an envelope.
        tool_calls: How many calls of replies have run, or begun to, in the current run.
    """

    def __init__(self, seed: int = 0) -> None:
        self.dice = random.Random(seed)
        self.clock = FakeClock()
        self.envelopes = 0.0
        self.tool_calls = 0

    def start(self, seed: int) -> None:
        self.dice.seed(seed)
        self.clock = FakeClock()
        self.tool_calls = 0

    @contextmanager
    def calls_of_a_state(self) -> Generator[None]:
        """Tool calls that an own state makes are no calls of a reply."""
        before = self.tool_calls
        try:
            yield
        finally:
            self.tool_calls = before

    def happens(self, chance: float) -> bool:
        return self.dice.random() < chance

    def pass_time(self) -> None:
        if self.happens(0.1):
            self.clock.advance(self.dice.choice((0.5, 31, 70)))


Change = Callable[[Graph, random.Random, World, int], Graph]


def _inner(graph: Graph) -> list[str]:
    return [s.name for s in graph.states if not s.final]


def _movable(graph: Graph, state: str) -> list[Transition]:
    return [t for t in graph.rows(state) if t.guard is not None and t.guard not in graph.first]


def _replace_row(graph: Graph, row: Transition, new: Transition) -> Graph:
    return replace(graph, transitions=tuple(new if each is row else each for each in graph.transitions))


def _changeable(graph: Graph) -> list[Transition]:
    return [row for row in graph.transitions if row.guard not in graph.first]


def _ending(graph: Graph, target: str, dice: random.Random) -> str:
    return dice.choice(ENDINGS) if graph.spec(target).final else ""


def _drop_row(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    return graph.without(dice.choice([t.id for s in _inner(graph) for t in _movable(graph, s)]))


def _row(graph: Graph, source: str, guard: Any, target: str, dice: random.Random) -> Transition:
    ends = _ending(graph, target, dice)
    spends = [c.name for c in graph.counters]
    return Transition(source, guard, target, ends=ends, spends=dice.choice(["", "", *spends]))


def _add_row(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    source = dice.choice(_inner(graph))
    row = _row(
        graph, source, _guard(f"chance_{number}", world, 0.15), dice.choice([s.name for s in graph.states]), dice
    )
    before = dice.choice([t.name for t in _movable(graph, source)] or [None])
    return graph.with_transition(row, before=before)


def _guard(name: str, world: World, chance: float) -> Callable[[Any], bool]:
    def guard(run: Any) -> bool:
        return world.happens(chance)

    guard.__name__ = name
    return guard


def _reorder(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    state = dice.choice(_inner(graph))
    rows = list(graph.rows(state))
    moved = _movable(graph, state)
    if dice.random() < 0.5:
        dice.shuffle(moved)
    elif len(moved) > 1:
        i = dice.randrange(len(moved) - 1)
        moved[i], moved[i + 1] = moved[i + 1], moved[i]
    fixed_first = [t for t in rows if t.guard in graph.first]
    last = [t for t in rows if t.guard is None]
    others = [t for t in graph.transitions if t.source != state]
    return replace(graph, transitions=(*others, *fixed_first, *moved, *last))


def _retarget(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    row = dice.choice(_changeable(graph))
    target = dice.choice([s.name for s in graph.states])
    return _replace_row(graph, row, replace(row, target=target, ends=_ending(graph, target, dice)))


def _effect(world: World, outcomes: tuple[str, ...], raises: float) -> Callable[[Any], Any]:
    async def effect(run: Any) -> Any:
        world.pass_time()
        await asyncio.sleep(0)
        if world.happens(raises):
            raise RuntimeError("the effect raises")
        text = (Message.user("a note"),) if world.happens(0.3) else ()
        return StateResult("value", text, world.dice.choice(("", *outcomes)))

    return effect


def _counter(graph: Graph, name: str, dice: random.Random) -> tuple[Graph, Counter]:
    counter = Counter(name, dice.choice((1, 2, 3)))
    return graph.with_counter(counter), counter


def _add_state(graph: Graph, dice: random.Random, world: World, number: int, raises: float = 0.0) -> Graph:
    graph, counter = _counter(graph, f"visits_{number}", dice)
    name = f"own_{number}"

    def describe(run: Any) -> Failure:
        return Failure(kind=dice.choice(list(FailureKind)), explanation="visited too often")

    describe.__name__ = f"visited_{number}"
    end = exhausted(counter, past=True)(describe)
    rows = [Transition(name, end, "terminal", ends="partial")]
    outcomes = ("approved", "rejected") if dice.random() < 0.5 else ()
    for outcome in outcomes:
        rows.append(_row(graph, name, came_back(outcome), dice.choice(_inner(graph)), dice))
    target = dice.choice(_inner(graph))
    rows.append(Transition(name, None, target))
    spec = StateSpec(name, effect=_effect(world, outcomes, raises), spends=counter.name, outcomes=outcomes)
    entered = dice.choice(_changeable(graph)).id
    if dice.random() < 0.5:
        source = dice.choice(_inner(graph))
        return graph.with_state(spec, rows, entered_by=Transition(source, _guard(f"enter_{number}", world, 0.3), name))
    return graph.with_state(spec, [replace(t, ends=t.ends) for t in rows], entered_by=entered)


def _add_raising_state(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    return _add_state(graph, dice, world, number, raises=0.4)


def _add_wait(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    name = f"wait_{number}"
    rows = [Transition(name, expired, "terminal", ends="cancelled")]
    if dice.random() < 0.7:
        rows.append(Transition(name, approval_decided, dice.choice(("dispatch_tool", "pre_step"))))
    target = dice.choice(_inner(graph))
    rows.append(Transition(name, replied if dice.random() < 0.5 else _has_answered, target))
    waits = [t.id for t in graph.transitions if graph.spec(t.target).waits]
    entered: Any = (
        dice.choice(waits)
        if waits and dice.random() < 0.7
        else Transition(dice.choice(_inner(graph)), _guard(f"hold_{number}", world, 0.1), name)
    )
    return graph.with_state(StateSpec(name, waits=True), rows, entered_by=entered)


def _add_counter(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    graph, counter = _counter(graph, f"budget_{number}", dice)
    source = dice.choice(_inner(graph))
    target = dice.choice([s.name for s in graph.states])
    ends = _ending(graph, target, dice)
    row = Transition(source, _guard(f"paid_{number}", world, 0.4), target, spends=counter.name, ends=ends)
    graph = graph.with_transition(row, before=dice.choice([t.name for t in _movable(graph, source)] or [None]))
    if dice.random() < 0.5:
        refilling = dice.choice(_changeable(graph))
        graph = _replace_row(graph, refilling, replace(refilling, refills=(*refilling.refills, counter.name)))
    return graph


def _add_detector(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    kind = dice.choice(list(FailureKind))

    def detect(run: Any) -> Failure | None:
        return Failure(kind=kind, explanation="own") if world.happens(0.25) else None

    detect.__name__ = f"own_{kind}_{number}" if dice.random() < 0.5 or number else str(kind)
    state = dice.choice([s for s in _inner(graph) if s != "recover"])
    before = dice.choice([None, *(t.name for t in _movable(graph, state))])
    return graph.with_detector(state, detect, before=before)


def _add_raising_guard(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    def explode(run: Any) -> bool:
        if world.happens(0.2):
            raise RuntimeError("the guard raises")
        return world.happens(0.05)

    explode.__name__ = f"explode_{number}"
    source = dice.choice(_inner(graph))
    row = _row(graph, source, explode, dice.choice([s.name for s in graph.states]), dice)
    return graph.with_transition(row, before=dice.choice([t.name for t in _movable(graph, source)] or [None]))


def _copy_state(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    """Another state with one of the loop's own effects: most of its rows are copied, some with other targets."""
    copied = dice.choice([spec for spec in graph.states if isinstance(spec.effect, EffectSpec)])
    name = f"copy_{number}"
    rows: list[Transition] = []
    for row in graph.rows(copied.name):
        if row.guard in graph.first or (row.guard is not None and dice.random() < 0.15):
            continue
        target, ends = row.target, row.ends
        if dice.random() < 0.25:
            target = dice.choice([spec.name for spec in graph.states])
            ends = _ending(graph, target, dice)
        rows.append(replace(row, source=name, target=target, ends=ends))
    if dice.random() < 0.3:
        guarded = [row for row in rows if row.guard is not None]
        dice.shuffle(guarded)
        rows = [*guarded, *(row for row in rows if row.guard is None)]
    by_guard = Transition(dice.choice(_inner(graph)), _guard(f"enter_{number}", world, 0.3), name)
    entered = dice.choice(_changeable(graph)).id if dice.random() < 0.6 else by_guard
    return graph.with_state(replace(copied, name=name), rows, entered_by=entered)


def _add_built_in_guard(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    """A row with one of the loop's own guards, in any state."""
    guards = sorted((each for each in BUILT_IN_GUARDS if each not in graph.first), key=lambda each: each.__name__)
    source = dice.choice(_inner(graph))
    row = _row(graph, source, dice.choice(guards), dice.choice([spec.name for spec in graph.states]), dice)
    return graph.with_transition(row, before=dice.choice([each.name for each in _movable(graph, source)] or [None]))


def _wrap_guard(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    """A function of the user's in place of one of the loop's guards, which it asks most of the time."""
    row = dice.choice([each for each in _changeable(graph) if each.guard in BUILT_IN_GUARDS])
    guard: Any = row.guard

    @functools.wraps(guard)
    def wrapper(run: Any) -> Any:
        return None if world.happens(0.2) else guard(run)

    return _replace_row(graph, row, replace(row, guard=wrapper))


def _spend_more(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    """A row that spends another counter, perhaps twice, and may refill one."""
    row = dice.choice([each for each in _changeable(graph) if each.guard is not None])
    names = [counter.name for counter in graph.counters]
    spent = (dice.choice(names),) * dice.choice((1, 2))
    refilled = (dice.choice(names),) if dice.random() < 0.4 else ()
    changed = replace(row, spends=(*row.spends, *spent), refills=(*row.refills, *refilled))
    return _replace_row(graph, row, changed)


def _spend_in_state(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    """A state that spends a counter when it is entered, and ends the run once that is spent."""
    spec = dice.choice([each for each in graph.states if not each.final])
    counter = dice.choice(graph.counters)

    @exhausted(counter, past=True)
    def describe(run: Any) -> bool:
        return True

    describe.__name__ = f"spent_{number}"
    changed = replace(spec, spends=(*spec.spends, counter.name))
    first = [row for row in graph.rows(spec.name) if row.guard in graph.first]
    others = [row for row in graph.rows(spec.name) if row not in first]
    rows = [*first, Transition(spec.name, describe, "terminal", ends="partial"), *others]
    elsewhere = [row for row in graph.transitions if row.source != spec.name]
    states = tuple(changed if each is spec else each for each in graph.states)
    return replace(graph, states=states, transitions=(*elsewhere, *rows))


def _start_elsewhere(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    first = dice.choice([spec for spec in graph.states[1:] if not spec.final])
    return replace(graph, states=(first, *(spec for spec in graph.states if spec is not first)))


def _limit_counter(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    """A counter with another limit; the guards made from it mostly follow."""
    counter = dice.choice(graph.counters)
    limited = replace(counter, limit=dice.choice((0, 1, 2, 3)))

    def follow(row: Transition) -> Transition:
        if isinstance(row.guard, Exhausted) and row.guard.counter == counter and dice.random() < 0.7:
            return replace(row, guard=row.guard.of(limited))
        return row

    counters = tuple(limited if each is counter else each for each in graph.counters)
    return replace(graph, counters=counters, transitions=tuple(map(follow, graph.transitions)))


def _toggle_extends(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    """A row out of a wait extends a limit if its guard did not, and otherwise not."""
    row = dice.choice([each for each in _changeable(graph) if graph.spec(each.source).waits and each.guard])
    own: Any = row.guard

    def wrapper(run: Any) -> Any:
        return own(run)

    wrapper.__name__ = row.name
    return _replace_row(graph, row, replace(row, guard=wrapper if row.extends else extends_limit(wrapper)))


def _has_answered(run: Any) -> bool:
    return run.human_reply is not None


def _add_calling_state(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    """An own state whose effect asks the model and calls tools."""
    graph, counter = _counter(graph, f"calls_{number}", dice)
    name = f"caller_{number}"

    async def effect(context: Any) -> StateResult:
        world.pass_time()
        said = ""
        for _ in range(world.dice.choice((0, 1, 2))):
            try:
                if world.happens(0.5):
                    said += (await context.ask_model("Which?")).message.content
                else:
                    with world.calls_of_a_state():
                        said += (await context.call_tool("plain", {"text": "1"})).content
            except AgentfsmError:
                if world.happens(0.3):
                    raise
        return StateResult(said, (), world.dice.choice(("", "asked")))

    @exhausted(counter, past=True)
    def describe(run: Any) -> bool:
        return True

    describe.__name__ = f"called_{number}"
    rows = [
        Transition(name, describe, "terminal", ends="partial"),
        _row(graph, name, came_back("asked"), dice.choice(_inner(graph)), dice),
        Transition(name, None, dice.choice(_inner(graph))),
    ]
    spec = StateSpec(name, effect=effect, spends=counter.name, outcomes=("asked",))
    return graph.with_state(spec, rows, entered_by=dice.choice(_changeable(graph)).id)


def _count_votes(graph: Graph, dice: random.Random, world: World, number: int) -> Graph:
    return with_votes(graph)


CHANGES: Mapping[str, Change] = {
    "row dropped": _drop_row,
    "row added": _add_row,
    "rows reordered": _reorder,
    "row retargeted": _retarget,
    "own state": _add_state,
    "own wait": _add_wait,
    "own counter": _add_counter,
    "own detector": _add_detector,
    "guard that raises": _add_raising_guard,
    "effect that raises": _add_raising_state,
    "copied state": _copy_state,
    "built-in guard elsewhere": _add_built_in_guard,
    "wrapped guard": _wrap_guard,
    "row that spends more": _spend_more,
    "state that spends": _spend_in_state,
    "other initial state": _start_elsewhere,
    "counter with another limit": _limit_counter,
    "extension elsewhere": _toggle_extends,
    "own state that makes calls": _add_calling_state,
    "votes": _count_votes,
}
"""Each kind of change, by the feature that it gives a graph."""


def draw_graph(graph: Graph, dice: random.Random, world: World, features: set[str]) -> Graph:
    """A graph with some changes. One that is refused is mostly left out; the rest is for the agent to refuse."""
    for number in range(dice.choice((2, 3, 4, 5, 6))):
        feature = dice.choice(list(CHANGES))
        for attempt in range(4):
            try:
                graph = CHANGES[feature](graph, dice, world, 10 * number + attempt)
            except GraphError:
                if dice.random() < 0.03:
                    raise
                continue
            features.add(feature)
            break
    return graph
