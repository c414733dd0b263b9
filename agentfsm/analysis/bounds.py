"""Bounds on the length of a run: the longest stretch between two waits, and the most model and tool calls.

The result is the same as over the full state space; see ``counter_acceleration`` for how that is kept small.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from agentfsm.analysis.analysis_limits import Meter
from agentfsm.analysis.assumptions import Assumptions, GuardAssumption
from agentfsm.analysis.counter_acceleration import (
    AcceleratedGraph,
    Cost,
    CounterShift,
    PathSummary,
    UnboundedError,
    add_costs,
    elementwise_max,
    max_summary,
)
from agentfsm.analysis.liveness import dead_variables
from agentfsm.analysis.state_space import BreadthFirstSearch, Configuration, StateSpace
from agentfsm.loop.guards import approval_required, in_doubt
from agentfsm.loop.outcomes import CALL_MODEL, RUN_CALLS
from agentfsm.machine.graph import Graph, Transition

__all__ = ["Bounds", "compute_bounds", "max_path_cost"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long a run can get, for any behavior of model, tools and people. None means unbounded.

    Attributes:
        moves: Moves between two waits (or from the start, or to the end).
        model_calls: Model calls between two waits.
        tool_calls: Tool calls between two waits.
        model_calls_in_all: Model calls of a whole run, including all extensions by a person.
        tool_calls_in_all: Tool calls of a whole run.
        longest: The places of the rows of a run that ends with a longest stretch between two waits.
        reachable_rows: The places of the rows that some run takes, judged by the budget counters alone.
        assumptions: What the bounds depend on.
        from_counters: A bound on the moves between two waits that follows from the declared counters alone.
        limit: If they could not be computed, the limit of the analysis that was reached.
    """

    moves: int | None
    model_calls: int | None
    tool_calls: int | None
    model_calls_in_all: int | None
    tool_calls_in_all: int | None
    longest: tuple[int, ...] = ()
    reachable_rows: frozenset[int] = frozenset()
    assumptions: tuple[GuardAssumption, ...] = ()
    limit: str = ""
    from_counters: int | None = None


def compute_bounds(graph: Graph, assumptions: Assumptions, meter: Meter | None = None) -> Bounds:
    """The bounds of a graph's runs, computed over the counters that are declared as budgets.

    If moves are unbounded, these counters do not bound the run.

    Args:
        graph: The graph.
        assumptions: Its counters, and what is assumed about its guards.
        meter: Counts the configurations that are visited.

    Raises:
        AnalysisLimitError: The meter's limit is reached.
    """
    dead = dead_variables(graph, assumptions)
    space = StateSpace(graph, assumptions, [c.name for c in assumptions.counters if c.budget], meter, dead)
    try:
        bounds = _BoundsComputation(space, count_model_calls=True, count_tool_calls=True).result()
    except UnboundedError:
        rows = _reachable_rows(StateSpace(graph, assumptions, (), meter))
        return Bounds(None, None, None, None, None, reachable_rows=rows, assumptions=space.take_used())
    bounds = replace(bounds, assumptions=space.take_used())
    if bounds.model_calls_in_all is not None:
        return bounds
    # one of the two may be bounded
    model = _BoundsComputation(space, count_model_calls=True, count_tool_calls=False).result()
    tools = _BoundsComputation(space, count_model_calls=False, count_tool_calls=True).result()
    return replace(bounds, model_calls_in_all=model.model_calls_in_all, tool_calls_in_all=tools.tool_calls_in_all)


def _reachable_rows(space: StateSpace) -> frozenset[int]:
    """The rows that some run takes in a state space."""
    search = BreadthFirstSearch(space.initial, space.moves, space.meter)
    return frozenset(row for config in search for row, _ in space.moves(config))


def _row_cost(graph: Graph, row: Transition) -> Cost:
    """What taking a row costs: one move, and a model call or a tool call."""
    effect = graph.spec(row.source).effect
    blocked = row.guard in (approval_required, in_doubt)
    return (1, int(effect is CALL_MODEL), int(effect is RUN_CALLS and not blocked))


ZERO_COST: Cost = (0, 0, 0)

EDGES_PER_CONFIGURATION = 2
"""So many edges between hubs take as much memory as a configuration."""

_HubConfiguration = tuple[int, ...]
"""The index of a hub, then the values of the large counters."""


@dataclass(slots=True)
class _HubSuccessor:
    """A hub that can follow another, with one shift of the large counters.

    Attributes:
        hub: The index of the hub, or -1 for an end.
        apply_shift: From a configuration of the hub before to one of this hub.
        without_wait: The costliest segment that passes through no wait.
        with_waits: The costliest path, waits passed through.
        after_wait: The costliest segment that starts at a wait.
    """

    hub: int
    apply_shift: Callable[[_HubConfiguration], _HubConfiguration]
    without_wait: PathSummary | None = None
    with_waits: PathSummary | None = None
    after_wait: PathSummary | None = None


@dataclass(slots=True)
class _Hub:
    node: Configuration
    successors: dict[tuple[int, ...], list[_HubSuccessor]] = field(
        default_factory=dict[tuple[int, ...], list[_HubSuccessor]]
    )


class _BoundsComputation:
    """One computation: find every reachable configuration of a hub, then the maximum cost from each."""

    def __init__(self, space: StateSpace, *, count_model_calls: bool, count_tool_calls: bool) -> None:
        costs = [_row_cost(space.graph, row) for row in space.graph.transitions]
        costs = [(moves, model * count_model_calls, tool * count_tool_calls) for moves, model, tool in costs]
        self._accelerated = AcceleratedGraph(space, costs.__getitem__)
        self._hubs: list[_Hub] = []
        self._hub_numbers: dict[Configuration, int] = {}
        node, values = self._accelerated.fold(space.initial)
        self._start: _HubConfiguration = (self._hub(node), *values)  # treated as a hub, whether or not it is one
        self._predecessors: dict[_HubConfiguration, tuple[_HubConfiguration, tuple[int, ...]] | None] = {
            self._start: None
        }
        self._edges: dict[_HubConfiguration, list[tuple[_HubSuccessor, _HubConfiguration]]] = {}

    def result(self) -> Bounds:
        """The bounds.

        Raises:
            UnboundedError: A run can continue forever without waiting.
        """
        self._explore()
        most, rows = self._longest()
        total = None if self._accelerated.unbounded else max_path_cost(self._start, self._edge_costs())
        in_all = (None, None) if total is None else total[1:]
        return Bounds(most[0], most[1], most[2], in_all[0], in_all[1], rows, frozenset(self._accelerated.rows_seen))

    def _edge_costs(self) -> dict[_HubConfiguration, list[tuple[_HubConfiguration | None, Cost]]]:
        """The successors of each configuration when waits are passed through, with their costs."""
        return {
            here: [(after if s.hub >= 0 else None, s.with_waits.cost) for s, after in edges if s.with_waits is not None]
            for here, edges in self._edges.items()
        }

    def _hub(self, node: Configuration) -> int:
        if node not in self._hub_numbers:
            self._hub_numbers[node] = len(self._hubs)
            self._hubs.append(_Hub(node))
        return self._hub_numbers[node]

    # -- the successors of a hub ----------------------------------------------------------------------

    def _successors(self, hub_configuration: _HubConfiguration) -> list[_HubSuccessor]:
        graph, hub = self._accelerated, self._hubs[hub_configuration[0]]
        values = hub_configuration[1:]
        case = tuple([table[value] for table, value in zip(graph.case_tables[hub.node[0]], values, strict=True)])
        successors = hub.successors.get(case)
        if successors is None:
            successors = hub.successors[case] = self._compute_successors(graph.unfold(hub.node, values))
        return successors

    def _compute_successors(self, config: Configuration) -> list[_HubSuccessor]:
        graph = self._accelerated
        successors: dict[tuple[Configuration | None, CounterShift], _HubSuccessor] = {}
        for step in graph.moves(config):
            first = PathSummary(step.node, step.shift, step.cost, (step.row,))
            for rest in self._continuations(step.node):
                successor = self._successor(successors, first, rest)
                successor.without_wait = max_summary(successor.without_wait, graph.join(first, rest))
                if config[0] in graph.space.waits:
                    successor.after_wait = successor.without_wait
            for (node, shift), reached in graph.reachable_from(step.node).items():
                lead = PathSummary(node, shift, reached.cost, reached.rows)
                if not graph.is_hub(node):  # an end, or a wait that nothing may ever end
                    lead = replace(lead, node=None)
                successor = self._successor(successors, first, lead)
                successor.with_waits = max_summary(successor.with_waits, graph.join(first, lead))
                if reached.cost_after_wait is not None:
                    composed = graph.compose_shifts(step.shift, shift)
                    before = PathSummary(node, composed, reached.cost_after_wait, (step.row, *reached.rows))
                    for rest in self._continuations(node):
                        successor = self._successor(successors, before, rest)
                        tail = graph.join(before, rest)
                        successor.after_wait = max_summary(successor.after_wait, tail)
        return list(successors.values())

    def _successor(
        self,
        successors: dict[tuple[Configuration | None, CounterShift], _HubSuccessor],
        first: PathSummary,
        rest: PathSummary,
    ) -> _HubSuccessor:
        graph = self._accelerated
        shift = graph.no_shift if rest.node is None else graph.compose_shifts(first.shift, rest.shift)
        if (rest.node, shift) not in successors:
            hub = -1 if rest.node is None else self._hub(rest.node)
            successors[rest.node, shift] = _HubSuccessor(hub, _shift_function(hub, shift, graph.limits))
        return successors[rest.node, shift]

    def _continuations(self, node: Configuration) -> tuple[PathSummary, ...]:
        """The segments that continue from a node without passing through a wait."""
        graph = self._accelerated
        if graph.is_end(node):
            return (PathSummary(None, graph.no_shift, ZERO_COST, ()),)
        return (PathSummary(node, graph.no_shift, ZERO_COST, ()),) if graph.is_hub(node) else graph.summaries(node)

    # -- over all hubs --------------------------------------------------------------------------------

    def _explore(self) -> None:
        """Find every configuration of a hub that a run reaches, nearest first."""
        todo = deque([self._start])
        predecessors, edges = self._predecessors, self._edges
        while todo:
            here = todo.popleft()
            edges[here] = [(successor, successor.apply_shift(here)) for successor in self._successors(here)]
            self._accelerated.space.meter.count(1 + len(edges[here]) // EDGES_PER_CONFIGURATION)
            for successor, after in edges[here]:
                if successor.with_waits is not None and successor.hub >= 0 and after not in predecessors:
                    predecessors[after] = (here, successor.with_waits.rows)
                    todo.append(after)

    def _max_costs_from(self) -> dict[_HubConfiguration, tuple[Cost, _HubSuccessor | None]]:
        """The maximum costs from each configuration up to the next wait, and the first successor on a longest path.

        Raises:
            UnboundedError: There is a cycle.
        """
        values: dict[_HubConfiguration, tuple[Cost, _HubSuccessor | None]] = {}
        opened: set[_HubConfiguration] = set()
        stack = list(self._edges)
        while stack:
            here = stack[-1]
            if here in values:
                stack.pop()
                continue
            most = model = tool = longest_first = 0
            choice: _HubSuccessor | None = None
            missing: list[_HubConfiguration] = []
            for successor, after in self._edges[here]:
                segment = successor.without_wait
                if segment is None:
                    continue
                cost = segment.cost
                if successor.hub >= 0:
                    if after not in values:
                        missing.append(after)
                        continue
                    cost = add_costs(cost, values[after][0])
                model, tool = max(model, cost[1]), max(tool, cost[2])
                if cost[0] > most or (cost[0] == most and segment.cost[0] > longest_first):  # the longer segment first
                    most, longest_first, choice = cost[0], segment.cost[0], successor
            if missing:
                if here in opened:
                    raise UnboundedError
                opened.add(here)
                stack += missing
            else:
                values[here] = ((most, model, tool), choice)
                stack.pop()
        return values

    def _longest(self) -> tuple[Cost, tuple[int, ...]]:
        """The maximum costs between two waits, and the rows of a run that ends with the longest such stretch."""
        values = self._max_costs_from()
        here, most = self._start, values[self._start][0]
        successor = values[here][1]
        segment = None if successor is None else successor.without_wait
        for place, edges in self._edges.items():
            for each, after in edges:
                if each.after_wait is None:
                    continue
                cost = each.after_wait.cost if each.hub < 0 else add_costs(each.after_wait.cost, values[after][0])
                if cost[0] > most[0]:
                    here, successor, segment = place, each, each.after_wait
                most = elementwise_max(most, cost)
        rows = self._rows_to(here)
        while successor is not None and segment is not None:
            rows += segment.rows
            if successor.hub < 0:
                break
            here = successor.apply_shift(here)
            successor = values[here][1]
            segment = None if successor is None else successor.without_wait
        return most, tuple(rows)

    def _rows_to(self, here: _HubConfiguration) -> list[int]:
        parts: list[tuple[int, ...]] = []
        while (step := self._predecessors[here]) is not None:
            here, rows = step
            parts.append(rows)
        return [row for part in reversed(parts) for row in part]


def _shift_function(
    hub: int, shift: CounterShift, limits: CounterShift
) -> Callable[[_HubConfiguration], _HubConfiguration]:
    """A shift as a function: each counter is multiplied by 0 or 1, increased, and capped at its limit."""
    plan = [(0, -1 - s, limit) if s < 0 else (1, s, limit) for s, limit in zip(shift, limits, strict=True)]
    if len(plan) == 2:  # the common case, and the inner loop of the computation
        (m1, a1, l1), (m2, a2, l2) = plan

        def shift_two(here: _HubConfiguration) -> _HubConfiguration:
            x, y = here[1] * m1 + a1, here[2] * m2 + a2
            return (hub, l1 if x > l1 else x, l2 if y > l2 else y)

        return shift_two
    return lambda here: (hub, *(min(lim, v * m + a) for v, (m, a, lim) in zip(here[1:], plan, strict=True)))


N = TypeVar("N", bound=Hashable)


def max_path_cost(start: N, edges_of: Mapping[N, Sequence[tuple[N | None, Cost]]]) -> Cost | None:
    """The maximum number of model and tool calls on any path from a node; None if there is no maximum.

    Tarjan's algorithm finds the strongly connected components, sinks first. All nodes of a component have the
    same maximum if no edge within it costs anything; otherwise there is none.

    Args:
        start: The node.
        edges_of: The successors of each node with their costs; a successor of None is an end.
    """
    index: dict[N, int] = {}
    low: dict[N, int] = {}
    component_stack: list[N] = []
    values: dict[N, Cost] = {}
    stack: list[tuple[N, int]] = [(start, 0)]
    while stack:
        node, place = stack.pop()
        edges = edges_of[node]
        if place == 0:
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
                value = _component_cost(component, edges_of, values)
                if value is None:
                    return None
                values.update(dict.fromkeys(component, value))
    return values[start]


def _component_cost(
    component: list[N], edges_of: Mapping[N, Sequence[tuple[N | None, Cost]]], values: dict[N, Cost]
) -> Cost | None:
    """The maximum for all nodes of a component; None if an edge within it costs something."""
    model = tool = 0
    for node in component:
        for after, cost in edges_of[node]:
            beyond: Cost | None = (0, 0, 0) if after is None else values.get(after)
            if beyond is None:  # in this component, as all others are known
                if cost[1] or cost[2]:
                    return None
            else:
                model, tool = max(model, cost[1] + beyond[1]), max(tool, cost[2] + beyond[2])
    return (0, model, tool)
