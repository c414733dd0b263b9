"""``LayeredGraph`` and ``LongestPaths``: reached nodes and maxima, compared with visiting every layer one by one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from agentfsm.analysis.analysis_limits import Meter
from agentfsm.analysis.layered_graph import Cost, LayeredEdge, LayeredGraph, LongestPaths, UnboundedError

Edge = LayeredEdge[str, int]
Rules = dict[str, list[tuple[Edge, Cost, tuple[int, int]]]]
"""For each node, its edges, what each costs, and the first and last layer that has it."""


class Case:
    """A random layered graph, and every maximum of its paths by definition."""

    def __init__(self, seed: int, *, entry_every: int = 3) -> None:
        dice = random.Random(seed)
        uniform = dice.random() < 0.5  # the same edges in all layers, so that many are solved at once
        self.last = 150 if uniform else dice.choice((0, 1, 5, 40, 150))
        reach = dice.choice((1, 1, 2, 3))
        names: str = "abcdef"[: dice.randint(1, 6)]
        self.changes = sorted({0, *(dice.randint(0, self.last) for _ in range(dice.choice((0, 1, 3))))})
        bounds = [*self.changes, self.last + 1]
        self.start = (min(self.last, dice.choice((0, 0, 1))), names[0])
        self.costs: list[Cost] = []
        self.entries: set[int] = set()
        self.rules: Rules = {name: [] for name in names}
        if uniform and dice.random() < 0.6:
            self.add_chain(dice, names, reach)
        else:
            self.add_random_edges(dice, names, reach, entry_every, bounds, uniform=uniform)
        if dice.random() < 0.8:  # the last layer has no cycles
            for name, edges in self.rules.items():
                self.rules[name] = [
                    (edge, cost, (first, min(end, self.last - 1) if edge.node else end))
                    for edge, cost, (first, end) in edges
                ]
            self.changes = sorted({*self.changes, self.last})

    def add(self, node: str, ahead: int, target: str | None, cost: Cost, layers: tuple[int, int]) -> Edge:
        edge = LayeredEdge(ahead, target, len(self.costs), followed=True)
        self.costs.append(cost)
        self.rules[node].append((edge, cost, layers))
        return edge

    def add_random_edges(
        self, dice: random.Random, names: str, reach: int, entry_every: int, bounds: list[int], *, uniform: bool
    ) -> None:
        backwards = dice.random() < 0.3
        for name in names:
            for _ in range(dice.randint(0, 4)):
                target = dice.choice((*names, None))
                within = target is not None and dice.random() < 0.1 and (backwards or target > name)
                ahead = 0 if target is None or within else dice.randint(1, reach)
                first = dice.choice((0, 0, *self.changes))
                end = self.last if uniform else dice.choice((self.last, *(b - 1 for b in bounds[1:])))
                edge = LayeredEdge(ahead, target, len(self.costs), dice.random() < 0.9)
                most = dice.choice((3, 30)) if target else 200  # so that ends are overtaken after many layers
                cost = (dice.randint(0, most), dice.randint(0, 2 if target else 90), dice.randint(0, most))
                if edge.followed and dice.randrange(entry_every) == 0:
                    self.entries.add(edge.label)
                self.costs.append(cost)
                self.rules[name].append((edge, cost, (first, end)))

    def add_chain(self, dice: random.Random, names: str, reach: int) -> None:
        """Each node costs more per layer than the one before it, and less at its end: it pays after many layers."""
        for place, name in enumerate(names):
            slope = [place + dice.randint(0, 2) for _ in range(3)]
            end = [dice.randint(0, 300) // (place + 1) for _ in range(3)]
            everywhere = (0, self.last)
            self.add(name, dice.randint(1, reach), name, (slope[0], slope[1], slope[2]), everywhere)
            self.add(name, 0, None, (end[0], end[1], end[2]), everywhere)
            for after in names[place + 1 :]:
                if dice.random() < 0.6:
                    edge = self.add(name, dice.randint(1, reach), after, (dice.randint(0, 9), 0, 0), everywhere)
                    self.entries |= {edge.label} if dice.random() < 0.2 else set()

    def edges_of(self, layer: int, node: str) -> list[Edge]:
        return [edge for edge, _, (first, end) in self.rules[node] if first <= layer <= end]

    def after(self, layer: int, edge: Edge) -> tuple[int, str]:
        assert edge.node is not None
        return min(self.last, layer + edge.ahead), edge.node

    def reached(self) -> set[tuple[int, str]]:
        found: set[tuple[int, str]] = {self.start}
        todo: list[tuple[int, str]] = [self.start]
        while todo:
            layer, node = todo.pop()
            for edge in self.edges_of(layer, node):
                if edge.node is not None and edge.followed and (after := self.after(layer, edge)) not in found:
                    found.add(after)
                    todo.append(after)
        return found

    def maxima(self, place: int) -> dict[tuple[int, str], int] | None:
        """The maximum of one cost from each node that is reached; None if it has no bound. Layer by layer."""
        most = dict.fromkeys(self.reached(), 0)
        for layer in range(self.last, -1, -1):
            names = [name for name in self.rules if (layer, name) in most]
            for _ in range(len(names) + 1):
                changed = False
                for name in names:
                    for edge in (e for e in self.edges_of(layer, name) if e.followed):
                        beyond = 0 if edge.node is None else most[self.after(layer, edge)]
                        if (total := self.costs[edge.label][place] + beyond) > most[layer, name]:
                            most[layer, name], changed = total, True
                if not changed:
                    break
            else:
                return None
        return most

    def layered(self) -> LayeredGraph[str, int]:
        return LayeredGraph(self.start, self.edges_of, self.last, self.changes, Meter())

    def cost_of(self, graph: LayeredGraph[str, int]) -> Callable[[int], Cost | None]:
        followed = {edge.label for edges in self.rules.values() for edge, *_ in edges if edge.followed}
        return lambda label: self.costs[label] if label in followed else None


def test_the_reached_nodes_are_those_of_a_search_through_every_layer() -> None:
    for seed in range(400):
        case = Case(seed)
        graph = case.layered()
        found = {(layer, node) for layer in range(case.start[0], case.last + 1) for node in graph.at(layer)}
        assert found == case.reached(), seed
        for layer, node in random.Random(seed).sample(sorted(found), min(10, len(found))):
            here = case.start
            for edge in graph.path_to(layer, node):
                assert edge in case.edges_of(*here), seed
                here = case.after(here[0], edge)
            assert here == (layer, node), seed


@pytest.mark.slow
def test_maxima_are_those_of_computing_every_layer() -> None:
    bounded = 0
    for seed in range(600):
        case = Case(seed)
        graph = case.layered()
        expected = [case.maxima(place) for place in range(3)]
        if any(each is None for each in expected):
            with pytest.raises(UnboundedError):
                LongestPaths(graph, case.cost_of(graph))
            continue
        bounded += 1
        by_place = [each for each in expected if each is not None]
        paths = LongestPaths(
            graph, case.cost_of(graph), lambda label, own=case: own.costs[label] if label in own.entries else None
        )
        assert paths.from_start == tuple(each[case.start] for each in by_place), seed
        begun = [[each[case.start] for each in by_place]] + [
            [
                case.costs[edge.label][n] + (each[case.after(layer, edge)] if edge.node else 0)
                for n, each in enumerate(by_place)
            ]
            for layer, node in case.reached()
            for edge in case.edges_of(layer, node)
            if edge.label in case.entries
        ]
        assert paths.most == tuple(map(max, zip(*begun, strict=True))), seed
        if paths.entry is None:
            assert moves(case, paths, *case.start) == paths.most[0], seed
        else:
            layer, node, edge = paths.entry
            assert edge in case.edges_of(layer, node)
            beyond = moves(case, paths, *case.after(layer, edge)) if edge.node else 0
            assert case.costs[edge.label][0] + beyond == paths.most[0], seed
        for layer, node in random.Random(seed).sample(sorted(by_place[0]), min(25, len(by_place[0]))):
            assert moves(case, paths, layer, node) == by_place[0][layer, node], seed
    assert bounded > 200


def moves(case: Case, paths: LongestPaths[str, int], layer: int, node: str) -> int:
    """The moves of a longest path from a node, each of whose edges is there."""
    here, total = (layer, node), 0
    for edge in paths.path_from(layer, node):
        assert edge in case.edges_of(*here)
        total += case.costs[edge.label][0]
        if edge.node is not None:
            here = case.after(here[0], edge)
    return total


def test_layers_that_repeat_are_visited_once() -> None:
    """By hand: two moves at each of a million layers, and a model call and three tool calls in the last ten."""

    def edges_of(layer: int, node: str) -> list[Edge]:
        if layer == 1_000_000:
            return [LayeredEdge(0, None, 0, followed=True)]
        calls = [LayeredEdge(1, "a", 2, followed=True)] if layer >= 999_990 else []
        return [LayeredEdge(1, "a", 1, followed=True), *calls]

    meter = Meter()
    graph = LayeredGraph((0, "a"), edges_of, 1_000_000, [0, 999_990, 1_000_000], meter)
    costs: list[Cost] = [(1, 0, 0), (2, 0, 0), (2, 1, 3)]
    paths = LongestPaths(graph, costs.__getitem__)
    assert paths.from_start == (2_000_001, 10, 30)
    assert meter.visited < 100
