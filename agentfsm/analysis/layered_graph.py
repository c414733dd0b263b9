"""Longest paths in a graph whose nodes lie in layers, one for each value of a counter that is never set back.

Edges lead to the same layer or to later ones, so maxima are computed from the last layer to the first. In a long row of
equal layers the maxima soon grow by the same amounts from layer to layer. How long they will do so follows from one
layer: until an edge that grows faster overtakes the best. So all layers up to there are done at once, and the result is
that of visiting each.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agentfsm.analysis.analysis_limits import Meter

N = TypeVar("N", bound=Hashable)
E = TypeVar("E")

Cost = tuple[int, int, int]
"""Moves, model calls and tool calls."""

NO_COST: Cost = (0, 0, 0)

EDGES_PER_CONFIGURATION = 2
"""So many edges take as much memory as a configuration."""


class UnboundedError(Exception):
    """A cost has no bound. Internal to the analysis: callers see a bound of None."""


def add_costs(a: Cost, b: Cost) -> Cost:
    """The sum of two costs."""
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2])


def elementwise_max(a: Cost, b: Cost) -> Cost:
    """The maximum of each cost."""
    return (max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]))


@dataclass(frozen=True, slots=True)
class LayeredEdge(Generic[N, E]):
    """An edge.

    Attributes:
        ahead: How many layers ahead it leads; beyond the last layer, it leads to the last.
        node: The node to which it leads; None for an end.
        label: What it stands for.
        followed: Whether a search follows it.
    """

    ahead: int
    node: N | None
    label: E
    followed: bool


@dataclass(slots=True)
class _Layer(Generic[N, E]):
    """The nodes of a layer with their edges, and how each was found: layers back, the node there, and the edge."""

    edges: dict[N, Sequence[LayeredEdge[N, E]]] = field(default_factory=dict[N, Sequence[LayeredEdge[N, E]]])
    predecessors: dict[N, tuple[int, N, LayeredEdge[N, E]] | None] = field(
        default_factory=dict[N, tuple[int, N, LayeredEdge[N, E]] | None]
    )
    onward: dict[int, dict[N, tuple[N, LayeredEdge[N, E]]]] = field(
        default_factory=dict[int, dict[N, tuple[N, LayeredEdge[N, E]]]]
    )


class LayeredGraph(Generic[N, E]):
    """The nodes that are reachable from one node, by layer.

    Args:
        start: The layer and the node from which the search starts.
        edges_of: The edges of a node in a layer.
        last: The last layer.
        changes: The layers at which the edges of nodes may differ from those in the layer before, in order.
        meter: Counts the nodes that are visited.

    Raises:
        AnalysisLimitError: The meter's limit is reached.
    """

    def __init__(
        self,
        start: tuple[int, N],
        edges_of: Callable[[int, N], Sequence[LayeredEdge[N, E]]],
        last: int,
        changes: Sequence[int],
        meter: Meter,
    ) -> None:
        self.start = start
        self.last = last
        self.reach = 0
        self._edges_of = edges_of
        self._changes = changes
        self.meter = meter
        self._firsts: list[int] = []
        self._layers: list[_Layer[N, E]] = []  # each stands for all layers up to the next that is kept
        self._search()

    def at(self, layer: int) -> Mapping[N, Sequence[LayeredEdge[N, E]]]:
        """The nodes of a layer with their edges."""
        return self._layer(layer).edges

    def ranges(self) -> Iterator[tuple[int, int, Mapping[N, Sequence[LayeredEdge[N, E]]]]]:
        """Ranges of equal layers, from the last to the first: the first and last of each, and its nodes with edges."""
        end = self.last
        for first, layer in zip(reversed(self._firsts), reversed(self._layers), strict=True):
            yield first, end, layer.edges
            end = first - 1

    def path_to(self, layer: int, node: N) -> list[LayeredEdge[N, E]]:
        """The edges of a path from the start to a node."""
        path: list[LayeredEdge[N, E]] = []
        while (step := self._layer(layer).predecessors[node]) is not None:
            back, node, edge = step
            layer -= back
            path.append(edge)
        return path[::-1]

    def _layer(self, layer: int) -> _Layer[N, E]:
        return self._layers[bisect_right(self._firsts, layer) - 1]

    def _search(self) -> None:
        layer, node = self.start
        self._keep(layer, {node: None})
        equal = 0  # so many layers in a row have the same nodes and edges as the layer before
        while layer < self.last:
            layer += 1
            if equal >= max(1, self.reach):  # then further ones are equal, too, until edges change
                place = bisect_left(self._changes, layer)
                layer = self._changes[place] if place < len(self._changes) else self.last
            before = self._layers[-1].edges
            self._keep(layer, dict(self._found_from_earlier(layer)))
            alike = layer not in self._changes and self._layers[-1].edges.keys() == before.keys()
            equal = equal + 1 if alike else 0

    def _found_from_earlier(self, layer: int) -> Iterator[tuple[N, tuple[int, N, LayeredEdge[N, E]]]]:
        found: set[N] = set()
        for back in range(min(self.reach, layer - self.start[0]), 0, -1):
            for ahead, nodes in self._layer(layer - back).onward.items():
                if ahead == back or (ahead > back and layer == self.last):
                    for node, (before, edge) in nodes.items():
                        if node not in found:
                            found.add(node)
                            yield node, (back, before, edge)

    def _keep(self, at: int, found: dict[N, tuple[int, N, LayeredEdge[N, E]] | None]) -> None:
        """Visit the nodes of a layer: those given, and those found from them in the same layer."""
        layer = _Layer[N, E](predecessors=found)
        for node in (todo := list(found)):
            edges = layer.edges[node] = self._edges_of(at, node)
            self.meter.count(1 + len(edges) // EDGES_PER_CONFIGURATION)
            for edge in edges:
                if edge.node is None or not edge.followed:
                    continue
                self.reach = max(self.reach, edge.ahead)
                if edge.ahead and at < self.last:
                    layer.onward.setdefault(edge.ahead, {}).setdefault(edge.node, (node, edge))
                elif edge.node not in found:
                    found[edge.node] = (0, node, edge)
                    todo.append(edge.node)
        self._firsts.append(at)
        self._layers.append(layer)


_Option = tuple[Cost, Cost, LayeredEdge[N, E] | None]

_Candidates = dict[N, list[tuple[Cost, LayeredEdge[N, E]]]]
"""For each node of a layer, the edges that count, with their costs."""


class LongestPaths(Generic[N, E]):
    """The maximum of each cost over all paths from each node of a graph.

    Args:
        graph: The graph.
        cost_of: What an edge costs; None for an edge that does not count.
        entry_cost_of: What an edge costs where a path may also begin with it, wherever it is; None where none may.

    Raises:
        UnboundedError: There is a cycle that costs something.
        AnalysisLimitError: The time of the graph's meter is up.

    Attributes:
        from_start: The maximum of each cost over the paths from the start.
        most: The same over these paths and all that begin with an edge that costs ``entry_cost_of``.
        entry: If one of the latter has more moves than any path from the start, its layer, node and edge.
    """

    def __init__(
        self,
        graph: LayeredGraph[N, E],
        cost_of: Callable[[E], Cost | None],
        entry_cost_of: Callable[[E], Cost | None] = lambda label: None,
    ) -> None:
        self._graph = graph
        self._meter = graph.meter
        self._values: dict[int, dict[N, Cost]] = {}
        self._firsts: list[int] = []  # in falling order, as the maxima are computed
        self._choices: list[dict[N, LayeredEdge[N, E] | None]] = []
        self._longest_entry = -1
        self.most = NO_COST
        self.entry: tuple[int, N, LayeredEdge[N, E]] | None = None
        for first, last, edges in graph.ranges():
            candidates = {n: self._with_costs(each, cost_of) for n, each in edges.items()}
            entries = {n: self._with_costs(each, entry_cost_of) for n, each in edges.items()}
            self._solve_range(first, last, candidates, entries)
        start, node = graph.start
        self.from_start = self._values[start][node]
        if self.most[0] <= self.from_start[0]:
            self.entry = None
        self.most = elementwise_max(self.most, self.from_start)

    def path_from(self, layer: int, node: N) -> Iterator[LayeredEdge[N, E]]:
        """The edges of a path with the most moves from a node."""
        firsts = self._firsts[::-1]
        while (edge := self._choices[-bisect_right(firsts, layer)][node]) is not None:
            yield edge
            if edge.node is None:
                return
            layer, node = min(layer + edge.ahead, self._graph.last), edge.node

    def _solve_range(self, first: int, last: int, candidates: _Candidates[N, E], entries: _Candidates[N, E]) -> None:
        """Solve a range of equal layers, from the last to the first."""
        reach = self._graph.reach
        ordered = not _has_edges_within(candidates)
        growth: dict[N, Cost] = {}
        steady = 0  # so many layers grew alike
        layer = last
        while layer >= first:
            self._solve(layer, candidates, entries)
            if first < last and layer < last and ordered:
                here, above = self._values[layer], self._values[layer + 1]
                now = {node: _difference(cost, above[node]) for node, cost in here.items()}
                steady = steady + 1 if now == growth else 1
                growth = now
                if steady > reach and (skipped := min(layer - first, self._alike(layer, candidates, growth))) > 0:
                    layer -= skipped
                    self._values = {
                        layer + up: {node: _grown(cost, growth[node], skipped - up) for node, cost in here.items()}
                        for up in range(reach + 1)
                    }
                    self._firsts[-1] = layer
                    self._note_entries(layer, entries)
            layer -= 1

    def _solve(self, layer: int, candidates: _Candidates[N, E], entries: _Candidates[N, E]) -> None:
        end = self._graph.last
        if layer == end or _has_edges_within(candidates):
            self._values[layer] = self._solve_within(layer, candidates)
        nothing: dict[N, Cost] = {}
        later = [self._values.get(min(layer + ahead, end), nothing) for ahead in range(self._graph.reach + 1)]
        values: dict[N, Cost] = {}
        choices: dict[N, LayeredEdge[N, E] | None] = {}
        for node, each in candidates.items():
            self._meter.work(1 + len(each))
            most = model = tool = longest_first = 0
            choice: LayeredEdge[N, E] | None = None
            for (moves, models, tools), edge in each:
                first = moves
                if edge.node is not None:
                    beyond = later[edge.ahead][edge.node]
                    moves, models, tools = moves + beyond[0], models + beyond[1], tools + beyond[2]
                if models > model:
                    model = models
                if tools > tool:
                    tool = tools
                if moves > most or (moves == most and first > longest_first):  # the longer edge first
                    most, longest_first, choice = moves, first, edge
            values[node], choices[node] = (most, model, tool), choice
        self._values[layer] = values
        self._values.pop(layer + self._graph.reach + 2, None)
        self._firsts.append(layer)
        self._choices.append(choices)
        self._note_entries(layer, entries)

    def _solve_within(self, layer: int, candidates: _Candidates[N, E]) -> dict[N, Cost]:
        """The maxima of a layer in which edges lead to nodes of the same layer."""
        edges_of: dict[N, list[tuple[N | None, Cost]]] = {}
        for node, each in candidates.items():
            edges = edges_of[node] = []
            for cost, edge in each:
                after = min(layer + edge.ahead, self._graph.last)
                if edge.node is None or after == layer:
                    edges.append((edge.node, cost))
                else:
                    edges.append((None, add_costs(cost, self._values[after][edge.node])))
        return max_path_costs(edges_of, self._meter)

    def _alike(self, layer: int, candidates: _Candidates[N, E], growth: Mapping[N, Cost]) -> int:
        """How many earlier layers of a range certainly grow as this layer and those within reach of it did.

        A maximum goes on growing as it does while an edge that attains it grows alike, and no edge that grows faster
        has caught up.
        """
        here, choices = self._values[layer], self._choices[-1]
        certain = layer  # no more than there are
        for node, each in candidates.items():
            # What is missing to the maximum, and growth: of ending here.
            options: list[_Option[N, E]] = [(here[node], NO_COST, None)]
            for cost, edge in each:
                if edge.node is None:
                    options.append((_difference(here[node], cost), NO_COST, edge))
                else:
                    total = add_costs(cost, self._values[layer + edge.ahead][edge.node])
                    options.append((_difference(here[node], total), growth[edge.node], edge))
            for place, mine in enumerate(growth[node]):
                attained = False
                for missing, grows, option in options:
                    if grows[place] > mine:
                        certain = min(certain, missing[place] // (grows[place] - mine))
                    elif grows[place] == mine and not missing[place]:
                        attained = attained or place > 0 or option is choices[node]
                if not attained:
                    return 0
        return certain

    def _with_costs(
        self, edges: Sequence[LayeredEdge[N, E]], cost_of: Callable[[E], Cost | None]
    ) -> list[tuple[Cost, LayeredEdge[N, E]]]:
        self._meter.work(1 + len(edges))
        costs = ((cost_of(edge.label), edge) for edge in edges)
        return [(cost, edge) for cost, edge in costs if cost is not None]

    def _note_entries(self, layer: int, entries: _Candidates[N, E]) -> None:
        longest, found = -1, None
        for node, each in entries.items():
            for cost, edge in each:
                if edge.node is not None:
                    cost = add_costs(cost, self._values[min(layer + edge.ahead, self._graph.last)][edge.node])
                if cost[0] > longest:
                    longest, found = cost[0], (layer, node, edge)
                self.most = elementwise_max(self.most, cost)
        if found is not None and longest >= self._longest_entry:  # of equal ones the nearest to the start
            self._longest_entry, self.entry = longest, found


def _has_edges_within(candidates: _Candidates[N, E]) -> bool:
    """Whether an edge leads to a node of the same layer."""
    return any(edge.node is not None and not edge.ahead for each in candidates.values() for _, edge in each)


def _difference(a: Cost, b: Cost) -> Cost:
    return (a[0] - b[0], a[1] - b[1], a[2] - b[2])


def _grown(cost: Cost, growth: Cost, times: int) -> Cost:
    return (cost[0] + growth[0] * times, cost[1] + growth[1] * times, cost[2] + growth[2] * times)


def max_path_costs(edges_of: Mapping[N, Sequence[tuple[N | None, Cost]]], meter: Meter) -> dict[N, Cost]:
    """The maximum of each cost over all paths from each node.

    Tarjan's algorithm finds the strongly connected components, sinks first. All nodes of a component have the
    same maximum if no edge within it costs anything; otherwise there is none.

    Args:
        edges_of: The successors of each node with their costs; a successor of None is an end.
        meter: Counts the edges.

    Raises:
        UnboundedError: There is a cycle that costs something.
        AnalysisLimitError: The meter's time is up.
    """
    index: dict[N, int] = {}
    low: dict[N, int] = {}
    component_stack: list[N] = []
    values: dict[N, Cost] = {}
    for start in edges_of:
        stack: list[tuple[N, int]] = [] if start in index else [(start, 0)]
        while stack:
            node, place = stack.pop()
            edges = edges_of[node]
            if place == 0:
                meter.work(1 + len(edges))
                index[node] = low[node] = len(index)
                component_stack.append(node)
            else:
                child = edges[place - 1][0]
                if child is not None and child not in values:
                    low[node] = min(low[node], low[child])
            for at in range(place, len(edges)):
                after = edges[at][0]
                if after is None or after in values:
                    continue
                if after not in index:
                    stack += [(node, at + 1), (after, 0)]
                    break
                low[node] = min(low[node], index[after])
            else:
                if low[node] == index[node]:
                    component: list[N] = []
                    while not component or component[-1] != node:
                        component.append(component_stack.pop())
                    values.update(dict.fromkeys(component, _component_cost(component, edges_of, values)))
    return values


def _component_cost(
    component: list[N], edges_of: Mapping[N, Sequence[tuple[N | None, Cost]]], values: Mapping[N, Cost]
) -> Cost:
    """The maximum for all nodes of a component."""
    most = NO_COST
    for node in component:
        for after, cost in edges_of[node]:
            beyond = NO_COST if after is None else values.get(after)
            if beyond is not None:
                most = elementwise_max(most, add_costs(cost, beyond))
            elif any(cost):  # in this component, as all others are known
                raise UnboundedError
    return most
