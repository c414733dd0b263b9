"""Runs that can go on for ever without waiting for anybody."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from agentfsm.analysis.product import Config, Product
from agentfsm.analysis.search import Run, Searcher, follow, path_to

__all__ = ["endless"]

LOOKED_AT = 20_000
"""How many configurations are looked at for the start of a simple loop, before the search becomes general."""

LOOPS = 2_000
"""How many simple loops are looked at."""


def endless(searcher: Searcher) -> Run | None:
    """A short run that can go on for ever without waiting for anybody, or None: then none can.

    A loop that comes to no state twice is looked for first, since it makes the plainest example; only a
    search over whole configurations proves that there is none.
    """
    return _simple(searcher) or searcher.refine(_shortest)


# -- loops that come to no state twice ----------------------------------------------------------------


def _simple(searcher: Searcher) -> Run | None:
    whole = searcher.whole
    loops = [loop for loop in islice(_cycles(whole), LOOPS) if _plausible(searcher, loop)]
    if not loops:
        return None
    turned: dict[int, list[tuple[int, ...]]] = {}
    for loop in sorted(loops, key=len):
        for place, row in enumerate(loop):
            turned.setdefault(_source(whole, row), []).append((*loop[place:], *loop[:place]))
    best: Run | None = None
    for config, stem in islice(_outward(whole), LOOKED_AT):
        for loop in turned.get(config[0], ()):
            if best is not None and len(stem) + len(loop) >= len(best.rows) + len(best.loop):
                continue
            if follow(whole, Run((), loop), (config,)):
                best = Run(stem, loop)
        if best is not None and len(stem) + 1 >= len(best.rows) + len(best.loop):
            break
    return best


def _source(product: Product, row: int) -> int:
    return product.index[product.graph.transitions[row].source]


def _plausible(searcher: Searcher, loop: tuple[int, ...]) -> bool:
    """Whether no counter alone, whatever its value, ends a loop."""
    state = _source(searcher.whole, loop[0])
    for name in searcher.whole.names:
        part = searcher.part({name})
        if not follow(part, Run((), loop), [(state, value) for value in range(part.counters[0].limit + 1)]):
            return False
    return True


def _cycles(product: Product) -> Iterator[tuple[int, ...]]:
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


def _outward(product: Product) -> Iterator[tuple[Config, tuple[int, ...]]]:
    """Every configuration that a run comes to, nearest first, with the rows that lead there."""
    back: dict[Config, tuple[Config, int] | None] = {product.start: None}
    todo = deque([product.start])
    while todo:
        config = todo.popleft()
        yield config, path_to(back, config)
        for row, after in product.moves(config):
            if after not in back:
                back[after] = (config, row)
                todo.append(after)


# -- any loop -----------------------------------------------------------------------------------------


def _shortest(product: Product) -> Run | None:
    """The shortest run with a loop in which nobody is waited for, or None."""
    back: dict[Config, tuple[Config, int] | None] = {product.start: None}
    order: list[Config] = []
    todo = deque([product.start])
    while todo:
        config = todo.popleft()
        order.append(config)
        for row, after in product.moves(config):
            if after not in back:
                back[after] = (config, row)
                todo.append(after)
    still = product.waits | product.finals
    inner = {c: [m for m in product.moves(c) if m[1][0] not in still] for c in order if c[0] not in still}
    cyclic = _on_cycles(inner)
    best: Run | None = None
    for config in order:  # nearest first
        if config not in cyclic:
            continue
        stem = path_to(back, config)
        if best is not None and len(stem) >= len(best.rows) + len(best.loop):
            break
        loop = _cycle(inner, cyclic, config)
        if loop and (best is None or len(stem) + len(loop) < len(best.rows) + len(best.loop)):
            best = Run(stem, loop)
    return best


def _cycle(inner: dict[Config, list[tuple[int, Config]]], cyclic: set[Config], start: Config) -> tuple[int, ...]:
    """The shortest cycle through a configuration."""
    back: dict[Config, tuple[Config, int] | None] = {start: None}
    todo = deque([start])
    while todo:
        config = todo.popleft()
        for row, after in inner[config]:
            if after == start:
                return (*path_to(back, config), row)
            if after in cyclic and after not in back:
                back[after] = (config, row)
                todo.append(after)
    return ()


def _on_cycles(inner: dict[Config, list[tuple[int, Config]]]) -> set[Config]:
    """What is left when everything is taken away that no cycle can pass: first what leads nowhere, and so on."""
    left = set(inner)
    for forward in (True, False):
        edges: dict[Config, list[Config]] = {c: [] for c in left}
        degree = dict.fromkeys(left, 0)
        for config in left:
            for _, after in inner[config]:
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
