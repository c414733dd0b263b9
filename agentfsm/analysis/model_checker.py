"""The search for shortest counterexamples, with counterexample-guided refinement (CEGAR).

A counterexample is a finite run or an endless one (a lasso). A property is checked without counters first. A
counterexample is then replayed on the full state space; if a counter rules it out, that counter is added and the
search repeated. If none is found, there is none, because fewer counters only allow more runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice

from agentfsm.analysis.analysis_limits import Meter
from agentfsm.analysis.assumptions import Assumptions, GuardAssumption
from agentfsm.analysis.liveness import dead_variables
from agentfsm.analysis.safety_properties import VIOLATED, SafetyProperty
from agentfsm.analysis.state_space import BreadthFirstSearch, Configuration, StateSpace
from agentfsm.machine.graph import Graph


@dataclass(frozen=True, slots=True)
class Trace:
    """A run, as the places of the rows that it takes.

    Attributes:
        rows: The rows, from the start.
        loop: Rows that can then repeat forever, or none.
    """

    rows: tuple[int, ...]
    loop: tuple[int, ...] = ()


class ModelChecker:
    """Checks properties of every run of a graph under assumptions.

    Raises:
        ConfigurationError: The assumptions mention a counter or a label that is not declared.

    Attributes:
        used: What the last proof that nothing was found (``refine``) depends on.
    """

    def __init__(self, graph: Graph, assumptions: Assumptions, meter: Meter | None = None) -> None:
        self.graph = graph
        self.meter = meter or Meter()
        self.dead = dead_variables(graph, assumptions)
        self.full = StateSpace(graph, assumptions, None, self.meter, self.dead)
        self.used: tuple[GuardAssumption, ...] = ()
        self._table = StateSpace(graph, Assumptions(), meter=self.meter)
        self._projections: dict[frozenset[str], StateSpace] = {frozenset(self.full.counter_names): self.full}

    def projection(self, only: Iterable[str]) -> StateSpace:
        """The state space over some of the counters."""
        key = frozenset(only)
        if key not in self._projections:
            self._projections[key] = StateSpace(self.graph, self.full.assumptions, key, self.meter, self.dead)
        return self._projections[key]

    def find_violation(self, checked_property: SafetyProperty) -> Trace | None:
        """The shortest run that violates a property; None if no run does.

        Raises:
            ConfigurationError: The property names something that the graph does not have.
        """
        start, step = checked_property.automaton(self.graph)

        def find(space: StateSpace) -> Trace | None:
            rows = shortest_path_to(space, start, step)
            return None if rows is None else Trace(rows)

        return self.refine(find)

    def refine(self, find: Callable[[StateSpace], Trace | None]) -> Trace | None:
        """The first trace of a search that is feasible under all assumptions; None if there is none.

        Args:
            find: A search over a state space. If it finds nothing in one, it must find nothing in one with
                more counters.
        """
        self.used = ()
        if find(self._table) is None:  # the table alone rules it out, whatever the guards do
            return None
        followed: frozenset[str] = frozenset()
        while True:
            space = self.projection(followed)
            space.take_used()
            before = self.meter.visited
            trace = find(space)
            if trace is None:
                few = self.meter.visited - before <= MAX_CONFIGURATIONS_TO_REPEAT
                self.used = self._needed(find, followed, space.take_used()) if few else space.take_used()
                return None
            if self.is_feasible(trace):
                return trace
            followed |= self._refuting_counters(trace, followed)

    def _needed(
        self, find: Callable[[StateSpace], Trace | None], followed: frozenset[str], used: tuple[GuardAssumption, ...]
    ) -> tuple[GuardAssumption, ...]:
        """Of the assumptions that a proof used, those without which it fails."""
        needed = list(used)
        for each in used:
            fewer = Assumptions(self.full.assumptions.counters, tuple(k for k in needed if k is not each))
            if find(StateSpace(self.graph, fewer, followed, self.meter)) is None:
                needed.remove(each)
        return tuple(needed)

    def _refuting_counters(self, trace: Trace, followed: frozenset[str]) -> frozenset[str]:
        """Few counters that rule out a run, the smallest first: one of them, two, all small ones, or all."""
        by_size = sorted(self.full.counters, key=lambda c: c.limit)
        others = [c.name for c in by_size if c.name not in followed]
        small = [c.name for c in by_size if c.limit <= SMALL_LIMIT and c.name not in followed]
        candidates = chain(((name,) for name in others), combinations(small, 2), (small, others))
        for names in candidates:
            if not is_feasible_in(self.projection(followed.union(names)), trace):
                return frozenset(names)
        return frozenset(self.full.counter_names)

    def forget(self) -> None:
        """Free the memory of all searches so far."""
        for space in self._projections.values():
            space.forget()

    def is_feasible(self, trace: Trace) -> bool:
        """Whether a run is possible under all assumptions, with its loop repeated forever."""
        return is_feasible_in(self.full, trace)


def is_feasible_in(space: StateSpace, trace: Trace, start: Iterable[Configuration] = ()) -> bool:
    """Whether a run is possible in a state space, with its loop repeated forever."""
    here = set(start) or {space.initial}
    for place in trace.rows:
        here = _after_row(space, here, place)
    seen: set[frozenset[Configuration]] = set()
    while here and trace.loop and frozenset(here) not in seen:
        seen.add(frozenset(here))
        for place in trace.loop:
            here = _after_row(space, here, place)
    return bool(here)


def _after_row(space: StateSpace, configurations: set[Configuration], place: int) -> set[Configuration]:
    space.meter.count()
    space.meter.work(len(configurations))
    return {after for config in configurations for row, after in space.moves(config) if row == place}


def shortest_path_to(
    space: StateSpace, state: int, step: Callable[[int, int], int], goal: int = VIOLATED
) -> tuple[int, ...] | None:
    """The rows of the shortest run that brings an automaton from ``state`` to ``goal``; None if there is none.

    Args:
        space: The state space.
        state: The automaton's state at the start.
        step: The automaton's next state, from its state and the place of the row taken.
        goal: The state to reach, by at least one move.
    """
    constraints = space.constraint_counts

    def moves(node: tuple[Configuration, int]) -> Iterator[tuple[int, tuple[Configuration, int]]]:
        for row, after in sorted(space.moves(node[0]), key=lambda move: constraints[move[0]]):  # the freest first
            yield row, (after, step(node[1], row))

    search = BreadthFirstSearch((space.initial, state), moves, space.meter)
    for node in islice(search, 1, None):
        if node[1] == goal:
            return search.rows_to(node)
    return None


def row_ids(graph: Graph, rows: Sequence[int]) -> tuple[str, ...]:
    """The ids of rows given by their places."""
    return tuple(graph.transitions[row].id for row in rows)


SMALL_LIMIT = 20
"""Counters with larger limits are followed last: they multiply the configurations."""

MAX_CONFIGURATIONS_TO_REPEAT = 5_000
"""A proof that visited no more is repeated without each of its assumptions, to find those that it needs."""

MAX_STEM_CONFIGURATIONS = 20_000
"""How many configurations are tried as the start of a simple loop, before the general search."""

MAX_SIMPLE_CYCLES = 2_000
"""How many simple loops are tried."""

MAX_SIMPLE_PATHS = 20_000
"""How many paths are followed to find simple loops."""


def find_lasso(checker: ModelChecker) -> Trace | None:
    """A short run that can continue forever without waiting; None if there is none.

    A loop that visits no state twice is searched for first, because it is the simplest example. Only the search
    over whole configurations proves that there is none.
    """
    return _simple_lasso(checker) or checker.refine(_shortest_lasso)


# -- loops that visit no state twice ------------------------------------------------------------------


def _simple_lasso(checker: ModelChecker) -> Trace | None:
    space = checker.full
    loops = [loop for loop in islice(_simple_cycles(space), MAX_SIMPLE_CYCLES) if _survives_each_counter(checker, loop)]
    if not loops:
        return None
    rotations: dict[int, list[tuple[int, ...]]] = {}  # each loop by the state where it starts
    for loop in sorted(loops, key=len):
        for place, row in enumerate(loop):
            rotations.setdefault(_source_state(space, row), []).append((*loop[place:], *loop[:place]))
    best: Trace | None = None
    search = BreadthFirstSearch(space.initial, space.moves, space.meter)
    for config in islice(search, MAX_STEM_CONFIGURATIONS):
        stem = search.rows_to(config)
        for loop in rotations.get(config[0], ()):
            if best is not None and len(stem) + len(loop) >= len(best.rows) + len(best.loop):
                continue
            if is_feasible_in(space, Trace((), loop), (config,)):
                best = Trace(stem, loop)
        if best is not None and len(stem) + 1 >= len(best.rows) + len(best.loop):
            break
    return best


def _source_state(space: StateSpace, row: int) -> int:
    return space.state_index[space.graph.transitions[row].source]


def _survives_each_counter(checker: ModelChecker, loop: tuple[int, ...]) -> bool:
    """Whether no single counter, whatever its value, rules out a loop."""
    state = _source_state(checker.full, loop[0])
    for name in checker.full.counter_names:
        space = checker.projection({name})
        if not is_feasible_in(space, Trace((), loop), [(state, value) for value in range(space.counters[0].limit + 1)]):
            return False
    return True


def _simple_cycles(space: StateSpace) -> Iterator[tuple[int, ...]]:
    """Loops of rows that visit no state twice and none that waits, once each, shortest first; perhaps not all."""
    resting = space.waits | space.finals
    followed = 0
    for first in range(len(space.rows)):
        todo: deque[tuple[int, tuple[int, ...], frozenset[int]]] = deque()
        if first not in resting:
            todo.append((first, (), frozenset((first,))))
        while todo:
            state, rows, seen = todo.popleft()
            for row in space.rows[state]:
                if row.target == first:
                    yield (*rows, row.place)
                elif row.target > first and row.target not in seen and row.target not in resting:
                    followed += 1
                    if followed > MAX_SIMPLE_PATHS:
                        return
                    todo.append((row.target, (*rows, row.place), seen | {row.target}))


# -- any loop -----------------------------------------------------------------------------------------


def _shortest_lasso(space: StateSpace) -> Trace | None:
    """The shortest run with a loop that passes through no wait; None if there is none."""
    search = BreadthFirstSearch(space.initial, space.moves, space.meter)
    order = list(search)
    resting = space.waits | space.finals
    inner = {c: [m for m in space.moves(c) if m[1][0] not in resting] for c in order if c[0] not in resting}
    cyclic = _configurations_on_cycles(inner, space.meter)
    best: Trace | None = None
    for config in order:  # nearest first
        if config not in cyclic:
            continue
        stem = search.rows_to(config)
        if best is not None and len(stem) >= len(best.rows) + len(best.loop):
            break
        loop = _shortest_cycle(inner, cyclic, config, space.meter)
        if loop and (best is None or len(stem) + len(loop) < len(best.rows) + len(best.loop)):
            best = Trace(stem, loop)
    return best


def _shortest_cycle(
    moves: dict[Configuration, list[tuple[int, Configuration]]],
    cyclic: set[Configuration],
    start: Configuration,
    meter: Meter,
) -> tuple[int, ...]:
    """The shortest cycle through a configuration."""
    search = BreadthFirstSearch(start, lambda config: [move for move in moves[config] if move[1] in cyclic], meter)
    for config in search:
        for row, after in moves[config]:
            if after == start:
                return (*search.rows_to(config), row)
    return ()


def _configurations_on_cycles(
    moves: dict[Configuration, list[tuple[int, Configuration]]], meter: Meter
) -> set[Configuration]:
    """The configurations left after removing, again and again, those without successors or predecessors."""
    remaining = set(moves)
    for forward in (True, False):
        edges: dict[Configuration, list[Configuration]] = {c: [] for c in remaining}
        degree = dict.fromkeys(remaining, 0)
        for config in remaining:
            meter.work(1 + len(moves[config]))
            for _, after in moves[config]:
                if after in remaining:
                    source, target = (config, after) if forward else (after, config)
                    degree[source] += 1
                    edges[target].append(source)
        removable = [c for c in remaining if not degree[c]]
        while removable:
            config = removable.pop()
            remaining.discard(config)
            for source in edges[config]:
                degree[source] -= 1
                if not degree[source]:
                    removable.append(source)
    return remaining
