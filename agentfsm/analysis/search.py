"""Shortest runs that break a property, and the proof that there are none.

A question is asked of the table without its counters first. A run that is found is tried on the whole; if
a counter forbids it, that counter is followed too and the question asked again. What is never found is
proved: fewer counters only allow more runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from agentfsm.analysis.facts import Facts
from agentfsm.analysis.product import Config, Product
from agentfsm.analysis.properties import BROKEN, Property
from agentfsm.machine.graph import Graph

__all__ = ["Run", "Searcher", "follow", "names", "path_to", "run_to"]

N = TypeVar("N")


@dataclass(frozen=True, slots=True)
class Run:
    """A run as the places of the rows that it takes.

    Attributes:
        rows: The rows, from the start.
        loop: Rows that can follow again and again for ever, or none.
    """

    rows: tuple[int, ...]
    loop: tuple[int, ...] = ()


class Searcher:
    """Answers questions about every run of a table under its facts.

    Args:
        graph: The table.
        facts: What is known of it.
    """

    def __init__(self, graph: Graph, facts: Facts) -> None:
        self.graph = graph
        self.whole = Product(graph, facts)
        self._parts: dict[frozenset[str], Product] = {frozenset(self.whole.names): self.whole}

    def part(self, use: Iterable[str]) -> Product:
        """The product over some of the counters."""
        key = frozenset(use)
        if key not in self._parts:
            self._parts[key] = Product(self.graph, self.whole.facts, key)
        return self._parts[key]

    def breaks(self, wanted: Property) -> Run | None:
        """The shortest run that breaks a property, or None: then none does."""
        start, watch = wanted.watcher(self.graph)

        def find(part: Product) -> Run | None:
            rows = run_to(part, start, watch)
            return None if rows is None else Run(rows)

        return self.refine(find)

    def refine(self, find: Callable[[Product], Run | None]) -> Run | None:
        """What a search finds that is possible under all that is known, or None where it finds nothing.

        Args:
            find: A search over a product; what it does not find in one, it must not find in one with
                more counters.
        """
        use: frozenset[str] = frozenset()
        while True:
            found = find(self.part(use))
            if found is None or self.possible(found):
                return found
            use |= self._refuter(found, use)

    def _refuter(self, run: Run, use: frozenset[str]) -> frozenset[str]:
        """One counter that forbids a run, the first declared where there are several; or all, together."""
        for name in self.whole.names:
            if name not in use and not follow(self.part(use | {name}), run):
                return frozenset({name})
        return frozenset(self.whole.names)

    def possible(self, run: Run) -> bool:
        """Whether a run can happen under all that is known, its loop again and again."""
        return follow(self.whole, run)


def follow(product: Product, run: Run, start: Iterable[Config] = ()) -> bool:
    """Whether a run can happen in a product, its loop again and again.

    Args:
        product: The product.
        run: The run.
        start: Where it may start; where every run does, unless given.
    """
    here = set(start) or {product.start}
    for place in run.rows:
        here = _taken(product, here, place)
    seen: set[frozenset[Config]] = set()
    while here and run.loop and frozenset(here) not in seen:
        seen.add(frozenset(here))
        for place in run.loop:
            here = _taken(product, here, place)
    return bool(here)


def _taken(product: Product, here: set[Config], place: int) -> set[Config]:
    return {after for config in here for row, after in product.moves(config) if row == place}


def run_to(
    product: Product, state: int, watch: Callable[[int, int], int], goal: int = BROKEN
) -> tuple[int, ...] | None:
    """The rows of the shortest run after which a watcher is in the state ``goal``, or None."""
    start = (product.start, state)
    back: dict[tuple[Config, int], tuple[tuple[Config, int], int] | None] = {start: None}
    todo = deque([start])
    while todo:
        node = todo.popleft()
        for row, after in sorted(product.moves(node[0]), key=lambda move: product.ties[move[0]]):  # the freest first
            then = (after, watch(node[1], row))
            if then in back:
                continue
            back[then] = (node, row)
            if then[1] == goal:
                return path_to(back, then)
            todo.append(then)
    return None


def path_to(back: Mapping[N, tuple[N, int] | None], node: N) -> tuple[int, ...]:
    """The rows that lead to a node of a search, from the node before each and the row taken."""
    rows: list[int] = []
    while (step := back[node]) is not None:
        node, row = step
        rows.append(row)
    return tuple(reversed(rows))


def names(graph: Graph, rows: Sequence[int]) -> tuple[str, ...]:
    """The ids of rows given by their places."""
    return tuple(graph.transitions[row].id for row in rows)
