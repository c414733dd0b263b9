"""Search for shortest counterexamples, finite or endless (lassos), with counterexample-guided refinement.

A property is checked without counters first. A counterexample is then tried on the full state space; if a
counter rules it out, that counter is added and the search repeated. What is never found is proved absent:
fewer counters only allow more runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from agentfsm.analysis.assumptions import Assumptions
from agentfsm.analysis.properties import VIOLATED, Property
from agentfsm.analysis.state_space import Configuration, StateSpace
from agentfsm.machine.graph import Graph

__all__ = ["ModelChecker", "Trace", "find_lasso", "is_feasible_in", "reconstruct_path", "row_ids", "shortest_path_to"]


N = TypeVar("N")


@dataclass(frozen=True, slots=True)
class Trace:
    """A run as the places of the rows that it takes.

    Attributes:
        rows: The rows, from the start.
        loop: Rows that can follow again and again for ever, or none.
    """

    rows: tuple[int, ...]
    loop: tuple[int, ...] = ()


class ModelChecker:
    """Answers questions about every run of a table under its facts.

    Args:
        graph: The table.
        assumptions: What is known of it.
    """

    def __init__(self, graph: Graph, assumptions: Assumptions) -> None:
        self.graph = graph
        self.full = StateSpace(graph, assumptions)
        self._projections: dict[frozenset[str], StateSpace] = {frozenset(self.full.counter_names): self.full}

    def projection(self, only: Iterable[str]) -> StateSpace:
        """The product over some of the counters."""
        key = frozenset(only)
        if key not in self._projections:
            self._projections[key] = StateSpace(self.graph, self.full.assumptions, key)
        return self._projections[key]

    def find_violation(self, wanted_property: Property) -> Trace | None:
        """The shortest run that breaks a property, or None: then none does."""
        start, watch = wanted_property.automaton(self.graph)

        def find(part: StateSpace) -> Trace | None:
            rows = shortest_path_to(part, start, watch)
            return None if rows is None else Trace(rows)

        return self.refine(find)

    def refine(self, find: Callable[[StateSpace], Trace | None]) -> Trace | None:
        """What a search finds that is possible under all that is known, or None where it finds nothing.

        Args:
            find: A search over a product; what it does not find in one, it must not find in one with
                more counters.
        """
        use: frozenset[str] = frozenset()
        while True:
            found = find(self.projection(use))
            if found is None or self.is_feasible(found):
                return found
            use |= self._refuting_counters(found, use)

    def _refuting_counters(self, trace: Trace, followed: frozenset[str]) -> frozenset[str]:
        """One counter that forbids a run, the first declared where there are several; or all, together."""
        for name in self.full.counter_names:
            if name not in followed and not is_feasible_in(self.projection(followed | {name}), trace):
                return frozenset({name})
        return frozenset(self.full.counter_names)

    def is_feasible(self, trace: Trace) -> bool:
        """Whether a run can happen under all that is known, its loop again and again."""
        return is_feasible_in(self.full, trace)


def is_feasible_in(space: StateSpace, trace: Trace, start: Iterable[Configuration] = ()) -> bool:
    """Whether a run can happen in a product, its loop again and again.

    Args:
        space: The product.
        trace: The run.
        start: Where it may start; where every run does, unless given.
    """
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
    return {after for config in configurations for row, after in space.moves(config) if row == place}


def shortest_path_to(
    space: StateSpace, state: int, step: Callable[[int, int], int], goal: int = VIOLATED
) -> tuple[int, ...] | None:
    """The rows of the shortest run after which a watcher is in the state ``goal``, or None."""
    start = (space.initial, state)
    back: dict[tuple[Configuration, int], tuple[tuple[Configuration, int], int] | None] = {start: None}
    todo = deque([start])
    while todo:
        node = todo.popleft()
        for row, after in sorted(
            space.moves(node[0]), key=lambda move: space.constraint_counts[move[0]]
        ):  # the freest first
            then = (after, step(node[1], row))
            if then in back:
                continue
            back[then] = (node, row)
            if then[1] == goal:
                return reconstruct_path(back, then)
            todo.append(then)
    return None


def reconstruct_path(predecessors: Mapping[N, tuple[N, int] | None], node: N) -> tuple[int, ...]:
    """The rows that lead to a node of a search, from the node before each and the row taken."""
    rows: list[int] = []
    while (step := predecessors[node]) is not None:
        node, row = step
        rows.append(row)
    return tuple(reversed(rows))


def row_ids(graph: Graph, rows: Sequence[int]) -> tuple[str, ...]:
    """The ids of rows given by their places."""
    return tuple(graph.transitions[row].id for row in rows)


MAX_STEM_CONFIGURATIONS = 20_000
"""How many configurations are looked at for the start of a simple loop, before the search becomes general."""

MAX_SIMPLE_CYCLES = 2_000
"""How many simple loops are looked at."""


def find_lasso(checker: ModelChecker) -> Trace | None:
    """A short run that can go on for ever without waiting for anybody, or None: then none can.

    A loop that comes to no state twice is looked for first, since it makes the plainest example; only a
    search over whole configurations proves that there is none.
    """
    return _simple_lasso(checker) or checker.refine(_shortest_lasso)


# -- loops that come to no state twice ----------------------------------------------------------------


def _simple_lasso(checker: ModelChecker) -> Trace | None:
    whole = checker.full
    loops = [loop for loop in islice(_simple_cycles(whole), MAX_SIMPLE_CYCLES) if _survives_each_counter(checker, loop)]
    if not loops:
        return None
    turned: dict[int, list[tuple[int, ...]]] = {}
    for loop in sorted(loops, key=len):
        for place, row in enumerate(loop):
            turned.setdefault(_source_state(whole, row), []).append((*loop[place:], *loop[:place]))
    best: Trace | None = None
    for config, stem in islice(_breadth_first(whole), MAX_STEM_CONFIGURATIONS):
        for loop in turned.get(config[0], ()):
            if best is not None and len(stem) + len(loop) >= len(best.rows) + len(best.loop):
                continue
            if is_feasible_in(whole, Trace((), loop), (config,)):
                best = Trace(stem, loop)
        if best is not None and len(stem) + 1 >= len(best.rows) + len(best.loop):
            break
    return best


def _source_state(product: StateSpace, row: int) -> int:
    return product.state_index[product.graph.transitions[row].source]


def _survives_each_counter(checker: ModelChecker, loop: tuple[int, ...]) -> bool:
    """Whether no counter alone, whatever its value, ends a loop."""
    state = _source_state(checker.full, loop[0])
    for name in checker.full.counter_names:
        part = checker.projection({name})
        if not is_feasible_in(part, Trace((), loop), [(state, value) for value in range(part.counters[0].limit + 1)]):
            return False
    return True


def _simple_cycles(product: StateSpace) -> Iterator[tuple[int, ...]]:
    """Every loop of rows that comes to no state twice and to none that waits, once each, shortest paths first."""
    still = product.waits | product.finals
    for first in range(len(product.rows)):
        todo: deque[tuple[int, tuple[int, ...], frozenset[int]]] = deque()
        if first not in still:
            todo.append((first, (), frozenset((first,))))
        while todo:
            state, rows, seen = todo.popleft()
            for row in product.rows[state]:
                if row.target == first:
                    yield (*rows, row.place)
                elif row.target > first and row.target not in seen and row.target not in still:
                    todo.append((row.target, (*rows, row.place), seen | {row.target}))


def _breadth_first(product: StateSpace) -> Iterator[tuple[Configuration, tuple[int, ...]]]:
    """Every configuration that a run comes to, nearest first, with the rows that lead there."""
    back: dict[Configuration, tuple[Configuration, int] | None] = {product.initial: None}
    todo = deque([product.initial])
    while todo:
        config = todo.popleft()
        yield config, reconstruct_path(back, config)
        for row, after in product.moves(config):
            if after not in back:
                back[after] = (config, row)
                todo.append(after)


# -- any loop -----------------------------------------------------------------------------------------


def _shortest_lasso(product: StateSpace) -> Trace | None:
    """The shortest run with a loop in which nobody is waited for, or None."""
    back: dict[Configuration, tuple[Configuration, int] | None] = {product.initial: None}
    order: list[Configuration] = []
    todo = deque([product.initial])
    while todo:
        config = todo.popleft()
        order.append(config)
        for row, after in product.moves(config):
            if after not in back:
                back[after] = (config, row)
                todo.append(after)
    still = product.waits | product.finals
    inner = {c: [m for m in product.moves(c) if m[1][0] not in still] for c in order if c[0] not in still}
    cyclic = _configurations_on_cycles(inner)
    best: Trace | None = None
    for config in order:  # nearest first
        if config not in cyclic:
            continue
        stem = reconstruct_path(back, config)
        if best is not None and len(stem) >= len(best.rows) + len(best.loop):
            break
        loop = _shortest_cycle(inner, cyclic, config)
        if loop and (best is None or len(stem) + len(loop) < len(best.rows) + len(best.loop)):
            best = Trace(stem, loop)
    return best


def _shortest_cycle(
    moves: dict[Configuration, list[tuple[int, Configuration]]], cyclic: set[Configuration], start: Configuration
) -> tuple[int, ...]:
    """The shortest cycle through a configuration."""
    back: dict[Configuration, tuple[Configuration, int] | None] = {start: None}
    todo = deque([start])
    while todo:
        config = todo.popleft()
        for row, after in moves[config]:
            if after == start:
                return (*reconstruct_path(back, config), row)
            if after in cyclic and after not in back:
                back[after] = (config, row)
                todo.append(after)
    return ()


def _configurations_on_cycles(moves: dict[Configuration, list[tuple[int, Configuration]]]) -> set[Configuration]:
    """What is left when everything is taken away that no cycle can pass: first what leads nowhere, and so on."""
    left = set(moves)
    for forward in (True, False):
        edges: dict[Configuration, list[Configuration]] = {c: [] for c in left}
        degree = dict.fromkeys(left, 0)
        for config in left:
            for _, after in moves[config]:
                if after in left:
                    source, target = (config, after) if forward else (after, config)
                    degree[source] += 1
                    edges[target].append(source)
        gone = [c for c in left if not degree[c]]
        while gone:
            config = gone.pop()
            left.discard(config)
            for source in edges[config]:
                degree[source] -= 1
                if not degree[source]:
                    gone.append(source)
    return left
