"""What a list of paths is to cover: rows, pairs or triples of rows, or the prime paths of the states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from agentfsm.analysis.product import Config, Product
from agentfsm.machine.graph import Graph

__all__ = ["COVERS", "Goal", "Infeasible", "feasible", "goals", "named", "prime_paths", "why_not"]

COVERS = ("transitions", "pairs", "triples", "prime")
"""The criteria, from the weakest to the strongest."""

_LENGTHS = {"transitions": 1, "pairs": 2, "triples": 3}

Goal = tuple[tuple[int, ...], ...]
"""Moves in a row; each is the places of the rows of which one must be taken."""


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Something that no run can cover.

    Attributes:
        rows: The ids of the rows, in order.
        why: What keeps it from happening.
    """

    rows: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        return f"{' > '.join(self.rows)}: {self.why}"


def goals(graph: Graph, cover: str) -> list[Goal]:
    """Everything that a criterion asks for, in the order of the table, feasible or not."""
    if cover == "prime":
        return [_between(graph, path) for path in _prime(graph)]
    windows: list[tuple[int, ...]] = [(i,) for i in range(len(graph.transitions))]
    for _ in range(_LENGTHS[cover] - 1):
        windows = [
            (*window, i)
            for window in windows
            for i, t in enumerate(graph.transitions)
            if t.source == graph.transitions[window[-1]].target
        ]
    return [tuple((i,) for i in window) for window in windows]


def named(graph: Graph, goal: Goal) -> tuple[str, ...]:
    """A goal by the ids of its rows; ``a|b`` where either may be taken."""
    return tuple("|".join(graph.transitions[row].id for row in rows) for rows in goal)


def prime_paths(graph: Graph) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The prime paths of a graph: the names of their states, and what ``named`` calls their goals."""
    return [(path, named(graph, _between(graph, path))) for path in _prime(graph)]


def _between(graph: Graph, path: tuple[str, ...]) -> Goal:
    """The rows that lead from each state of a path to the next."""
    return tuple(
        tuple(i for i, t in enumerate(graph.transitions) if (t.source, t.target) == step) for step in pairwise(path)
    )


def _prime(graph: Graph) -> list[tuple[str, ...]]:
    """The simple paths of states (a cycle may end where it began) that are no part of a longer one."""
    nexts = {s.name: list(dict.fromkeys(t.target for t in graph.rows(s.name))) for s in graph.states}
    found: list[tuple[str, ...]] = []
    todo: list[tuple[str, ...]] = [(s.name,) for s in graph.states]
    while todo:
        path = todo.pop(0)
        longer = [
            (*path, n)
            for n in nexts[path[-1]]
            if (path[0] != path[-1] or len(path) == 1) and (n not in path or n == path[0])
        ]
        todo += longer
        if not longer and len(path) > 1:
            found.append(path)
    whole = [p for p in found if not any(_inside(p, other) for other in found)]
    return [tuple(map(str, path)) for path in sorted(whole, key=len)]


def _inside(path: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return len(path) < len(other) and any(other[i : i + len(path)] == path for i in range(len(other) - len(path) + 1))


def feasible(product: Product, wanted: list[Goal]) -> dict[Goal, set[Config]]:
    """For each goal, the configurations in which some run has just reached it; none where no run can."""
    after: dict[int, dict[Config, None]] = {}
    starts: dict[int, dict[Config, None]] = {}
    for config in _reachable(product):
        for row, then in product.moves(config):
            after.setdefault(row, {})[then] = None
            starts.setdefault(row, {})[config] = None
    found: dict[Goal, set[Config]] = {}
    for goal in wanted:
        if goal[:-1] in found:  # the pairs of a pair list share their first rows
            here = found[goal[:-1]]
            found[goal] = {then for c in here for row, then in product.moves(c) if row in goal[-1]}
            continue
        here = {then for row in goal[0] for then in after.get(row, ())}
        found[goal[:1]] = here
        for length in range(1, len(goal)):
            here = {then for c in here for row, then in product.moves(c) if row in goal[length]}
            found[goal[: length + 1]] = here
    return found


def _reachable(product: Product) -> Iterator[Config]:
    seen = {product.start: None}
    for config in (todo := [product.start]):
        yield config
        for _, after in product.moves(config):
            if after not in seen:
                seen[after] = None
                todo.append(after)


def why_not(product: Product, goal: Goal, found: dict[Goal, set[Config]]) -> str:
    """Why no run reaches a goal, from what is known of the first row in it that cannot be taken."""
    length = next(n for n in range(1, len(goal) + 1) if not found[goal[:n]])
    names = product.graph.transitions
    wanted = goal[length - 1]
    here = found[goal[: length - 1]] if length > 1 else set(_reachable(product))
    off: dict[str, None] = {}
    own: dict[str, None] = {}
    others: dict[str, None] = {}
    sources = {product.index[names[row].source] for row in wanted}
    for config in sorted(c for c in here if c[0] in sources):
        for row in product.rows[config[0]]:
            if row.place in wanted:
                for known in (k for k in row.known if not row.allows(k, config)):
                    (off if known.may == "never" else own)[f"{row.transition.name}: {known.why or known.may}"] = None
                break
            if row.must(config):
                others[f"{row.transition.id} holds first"] = None
                break
    return "; ".join(off or own or others) or f"no run comes to {names[wanted[0]].source}"
