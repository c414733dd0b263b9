"""Bounds on the length of a run: the longest stretch between two waits, and the most model and tool calls.

Budgets of hundreds of steps would make millions of configurations that differ only in a large counter read
in one or two states. So small counters are followed as they are, and large ones only in those states (the
*hubs*, such as ``pre_step``); the paths between two hubs are summarised once (acceleration). The result is
the same as over the full state space.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product as combinations
from typing import TypeVar

from agentfsm.analysis.assumptions import Assumptions, Condition, Counter, parse_condition
from agentfsm.analysis.state_space import CompiledRow, Configuration, StateSpace
from agentfsm.machine.graph import Graph, State

__all__ = [
    "FOLDING_THRESHOLD",
    "AcceleratedGraph",
    "Bounds",
    "Cost",
    "CostedMove",
    "CounterShift",
    "PathSummary",
    "ReachedNode",
    "UnboundedError",
    "add_costs",
    "compute_bounds",
    "elementwise_max",
    "max_path_cost",
]


FOLDING_THRESHOLD = 4
"""A counter with a larger limit than this is folded away, unless it only has labels."""

Cost = tuple[int, int, int]
"""Moves, model calls and tool calls."""

CounterShift = tuple[int, ...]
"""What happens to each large counter: ``n`` adds n, ``-1 - n`` sets it to n."""


class UnboundedError(Exception):
    """A measure has no bound; never leaves the analysis."""


@dataclass(frozen=True, slots=True)
class CostedMove:
    """One move, as it is summed up."""

    row: int
    node: Configuration
    shift: CounterShift
    cost: Cost


@dataclass(frozen=True, slots=True)
class PathSummary:
    """The costliest way from one place to the next hub, or to an end (``node`` is then None).

    Attributes:
        node: The hub to which it leads.
        shift: What it does to the large counters.
        cost: The most of each measure, each on its own.
        rows: The rows of a longest such way.
    """

    node: Configuration | None
    shift: CounterShift
    cost: Cost
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReachedNode:
    """How a node is reached with waits passed.

    Attributes:
        rows: The rows of a short way to it.
        most: The most of each measure but the first on any way to it.
        waited: Where some way comes straight from a wait, the most that its last move costs.
    """

    rows: tuple[int, ...]
    most: Cost
    waited: Cost | None


def add_costs(a: Cost, b: Cost) -> Cost:
    """What two stretches cost together."""
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2])


def elementwise_max(a: Cost, b: Cost) -> Cost:
    """The larger of each measure."""
    return (max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]))


class AcceleratedGraph:
    """The moves of a product, with large counters folded away.

    Args:
        space: The product.
        measure: What taking a row costs.

    Attributes:
        unbounded: Whether, with waits passed, some measure but the first was found to have no bound.
        rows_seen: The places of the rows that were met.
    """

    def __init__(self, space: StateSpace, measure: Callable[[int], Cost]) -> None:
        self.space = space
        self._measure = measure
        self.large = tuple(i for i, c in enumerate(space.counters, 1) if _is_foldable(c))
        self.limits = tuple(space.counters[i - 1].limit for i in self.large)
        self.no_shift: CounterShift = (0,) * len(self.large)
        self._large_comparisons = tuple(self._comparisons_with_large(rows) for rows in space.rows)
        self._summaries: dict[Configuration, tuple[PathSummary, ...]] = {}
        self.unbounded = False
        self.rows_seen: set[int] = set()
        self._moves: dict[tuple[Configuration, tuple[bool, ...]], tuple[CostedMove, ...]] = {}

    def _comparisons_with_large(self, rows: tuple[CompiledRow, ...]) -> tuple[Callable[[Configuration], bool], ...]:
        """Every comparison with a large counter that the rows of a state make."""
        names = {self.space.counter_names[i - 1] for i in self.large}
        found: dict[Condition, None] = {}
        for row in rows:
            texts = [text for k in row.assumptions for text in (k.may, k.must)]
            texts += [
                c.when for counter in self.space.counters for c in counter.updates if c.applies_to(row.transition)
            ]
            for test in (test for text in texts for tests in parse_condition(text) for test in tests):
                if test.counter in names:
                    found[((test,),)] = None
        return tuple(self.space.compile_condition(each) for each in found)

    def is_hub(self, node: Configuration) -> bool:
        """Whether something in a state asks a large counter."""
        return bool(self._large_comparisons[node[0]])

    def is_end(self, node: Configuration) -> bool:
        """Whether a stretch ends in a state: it is final, or waits."""
        return node[0] in self.space.finals or node[0] in self.space.waits

    def fold(self, config: Configuration) -> tuple[Configuration, Configuration]:
        """A configuration as a node (large counters at 0) and the values of the large counters."""
        values = tuple(config[i] for i in self.large)
        return tuple(0 if i in self.large else v for i, v in enumerate(config)), values

    def unfold(self, node: Configuration, values: Configuration) -> Configuration:
        """The configuration again."""
        if len(self.large) == 2:  # the common case
            a, b = self.large
            return (*node[:a], values[0], *node[a + 1 : b], values[1], *node[b + 1 :])
        config = list(node)
        for slot, value in zip(self.large, values, strict=True):
            config[slot] = value
        return tuple(config)

    def hub_case(self, config: Configuration) -> tuple[bool, ...]:
        """How the large counters' comparisons come out; within one case, a hub's moves are the same."""
        return tuple(
            [check(config) for check in self._large_comparisons[config[0]]]
        )  # a list is faster than a generator

    def shift_values(self, shift: CounterShift, values: Configuration) -> Configuration:
        """The values of the large counters after a shift."""
        return tuple(
            min(limit, value + s) if s >= 0 else -1 - s
            for s, value, limit in zip(shift, values, self.limits, strict=True)
        )

    def compose_shifts(self, first: CounterShift, second: CounterShift) -> CounterShift:
        """Two shifts in a row, as one."""
        return tuple(
            b if b < 0 else min(limit, a + b) if a >= 0 else -1 - min(limit, -1 - a + b)
            for a, b, limit in zip(first, second, self.limits, strict=True)
        )

    # -- moves ----------------------------------------------------------------------------------------

    def moves(self, config: Configuration) -> tuple[CostedMove, ...]:
        """The moves out of a configuration; of rows that do and cost the same, the one tied to fewest facts.

        A hub's configuration must have its large counters unfolded.
        """
        key = (self.fold(config)[0], self.hub_case(config))
        found = self._moves.get(key)
        if found is None:
            ties = self.space.constraint_counts
            different: dict[tuple[Configuration, CounterShift, Cost], CostedMove] = {}
            for step in self._compute_moves(config):
                key_of = (step.node, step.shift, step.cost)
                self.rows_seen.add(step.row)
                if key_of not in different or ties[step.row] < ties[different[key_of].row]:
                    different[key_of] = step
            found = self._moves[key] = tuple(different.values())
        return found

    def _compute_moves(self, config: Configuration) -> Iterator[CostedMove]:
        for row in self.space.rows[config[0]]:
            if row.may(config):
                cost = self._measure(row.place)
                options = [self._row_shifts(row, i, config) for i in self.large]
                shifts = [tuple(shift) for shift in combinations(*options)]
                for node in dict.fromkeys(self.fold(after)[0] for after in self.space.successors(row, config)):
                    yield from (CostedMove(row.place, node, shift, cost) for shift in shifts)
            if row.must(config):
                return

    def _row_shifts(self, row: CompiledRow, slot: int, config: Configuration) -> list[int]:
        for changed, _, changes in row.updates:
            if changed != slot:
                continue
            found: list[int] = []
            for add, to, when, certain in changes:
                if when(config):
                    found += [-1 - value for value in to] or [add]
                    if certain:
                        return found
            return [*found, 0]
        return [0]

    # -- laps -----------------------------------------------------------------------------------------

    def summaries(self, node: Configuration) -> tuple[PathSummary, ...]:
        """The laps from a node to the next hubs and ends, with nobody waited for.

        Raises:
            EndlessError: Some way from it never comes to either.
        """
        if node not in self._summaries:
            self._summarize(node, frozenset())
        return self._summaries[node]

    def _summarize(self, node: Configuration, above: frozenset[Configuration]) -> None:
        if node in self._summaries:
            return
        if node in above:
            raise UnboundedError
        laps: list[PathSummary] = []
        for step in self.moves(node):
            if self.is_end(step.node):
                laps.append(PathSummary(None, self.no_shift, step.cost, (step.row,)))
            elif self.is_hub(step.node):
                laps.append(PathSummary(step.node, step.shift, step.cost, (step.row,)))
            else:
                self._summarize(step.node, above | {node})
                first = PathSummary(step.node, step.shift, step.cost, (step.row,))
                laps += [self.join(first, lap) for lap in self._summaries[step.node]]
        self._summaries[node] = _best_summaries(laps)

    def join(self, first: PathSummary, second: PathSummary) -> PathSummary:
        """Two laps in a row, as one."""
        shift = self.no_shift if second.node is None else self.compose_shifts(first.shift, second.shift)
        return PathSummary(second.node, shift, add_costs(first.cost, second.cost), (*first.rows, *second.rows))

    def reachable_from(self, node: Configuration) -> Mapping[tuple[Configuration, CounterShift], ReachedNode]:
        """All that can be reached from a node with waits passed, up to and with the next hubs.

        Where some measure but the first grows without a bound on the way, ``unbounded`` is set.
        """
        start = (node, self.no_shift)
        found = {start: ReachedNode((), (0, 0, 0), None)}
        edges: list[tuple[tuple[Configuration, CounterShift], tuple[Configuration, CounterShift], Cost]] = []
        todo = deque([start])
        while todo:
            here = todo.popleft()
            if self.is_hub(here[0]):
                continue
            waits = here[0][0] in self.space.waits
            for step in self.moves(here[0]):
                then = (step.node, self.compose_shifts(here[1], step.shift))
                edges.append((here, then, step.cost))
                old = found.get(then)
                if old is None:
                    old = ReachedNode((*found[here].rows, step.row), (0, 0, 0), None)
                    todo.append(then)
                if waits:
                    old = replace(
                        old, waited=step.cost if old.waited is None else elementwise_max(old.waited, step.cost)
                    )
                found[then] = old
        return self._longest_costs(start, found, edges)

    def _longest_costs(
        self,
        start: tuple[Configuration, CounterShift],
        nodes: dict[tuple[Configuration, CounterShift], ReachedNode],
        edges: list[tuple[tuple[Configuration, CounterShift], tuple[Configuration, CounterShift], Cost]],
    ) -> dict[tuple[Configuration, CounterShift], ReachedNode]:
        """With the most of each measure on any way to each node: Bellman and Ford, for longest ways."""
        most: dict[tuple[Configuration, CounterShift], Cost] = {start: (0, 0, 0)}
        for _ in range(len(nodes) + 1):
            changed = False
            for here, then, cost in edges:
                if here not in most:
                    continue
                new = (0, *add_costs(most[here], cost)[1:])  # moves are not bounded across waits
                old = most.get(then)
                if old is None or new[1] > old[1] or new[2] > old[2]:
                    most[then] = new if old is None else elementwise_max(old, new)
                    changed = True
            if not changed:
                return {key: replace(way, most=most[key]) for key, way in nodes.items()}
        self.unbounded = True
        return nodes


def _is_foldable(counter: Counter) -> bool:
    """Whether a counter is large, and such that its changes add up: it is only added to, and set."""
    return (
        counter.limit > FOLDING_THRESHOLD and not counter.labels and all(change.add >= 0 for change in counter.updates)
    )


def _best_summaries(summaries: list[PathSummary]) -> tuple[PathSummary, ...]:
    """Of laps with one goal and one shift, the most of each measure, with the rows of a longest."""
    found: dict[tuple[Configuration | None, CounterShift], PathSummary] = {}
    for lap in summaries:
        key = (lap.node, lap.shift)
        old = found.get(key)
        if old is None:
            found[key] = lap
        else:
            cost = elementwise_max(old.cost, lap.cost)
            found[key] = PathSummary(*key, cost, lap.rows if lap.cost[0] > old.cost[0] else old.rows)
    return tuple(found.values())


N = TypeVar("N", bound=Hashable)


def max_path_cost(start: N, edges_of: Mapping[N, Sequence[tuple[N | None, Cost]]]) -> Cost | None:
    """The most of each measure but the first on any way from a node; None where there is no most.

    Tarjan's algorithm gives the strongly connected components, those that lead nowhere first. Within one,
    every node can go on as every other can, provided that nothing on the way costs anything.

    Args:
        start: The node.
        edges_of: What can follow each node, and what that costs; None for an end.
    """
    index: dict[N, int] = {}
    low: dict[N, int] = {}
    open_: list[N] = []
    values: dict[N, Cost] = {}
    stack: list[tuple[N, int]] = [(start, 0)]
    while stack:
        node, place = stack.pop()
        edges = edges_of[node]
        if place == 0:
            index[node] = low[node] = len(index)
            open_.append(node)
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
                    component.append(open_.pop())
                value = _component_cost(component, edges_of, values)
                if value is None:
                    return None
                values.update(dict.fromkeys(component, value))
    return values[start]


def _component_cost(
    component: list[N], edges_of: Mapping[N, Sequence[tuple[N | None, Cost]]], values: dict[N, Cost]
) -> Cost | None:
    """What all nodes of a component can come to; None where going round in it costs something."""
    model = tool = 0
    for node in component:
        for after, cost in edges_of[node]:
            beyond: Cost | None = (0, 0, 0) if after is None else values.get(after)
            if beyond is None:  # it is of this component, as all others are known
                if cost[1] or cost[2]:
                    return None
            else:
                model, tool = max(model, cost[1] + beyond[1]), max(tool, cost[2] + beyond[2])
    return (0, model, tool)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The longest that a run can get, whatever happens outside. None stands for no bound.

    Attributes:
        moves: Moves between two waits (or from the start, or to the end).
        model_calls: Model calls between two waits.
        tool_calls: Tool calls between two waits.
        model_calls_in_all: Model calls of a whole run, however often a person lets it go on.
        tool_calls_in_all: Tool calls of a whole run.
        longest: The places of the rows of a run that ends with a longest stretch.
        reachable_rows: The places of the rows that some run takes, as far as the budgets alone know.
    """

    moves: int | None
    model_calls: int | None
    tool_calls: int | None
    model_calls_in_all: int | None
    tool_calls_in_all: int | None
    longest: tuple[int, ...] = ()
    reachable_rows: frozenset[int] = frozenset()


def compute_bounds(graph: Graph, assumptions: Assumptions) -> Bounds:
    """The bounds of a graph's runs, over the counters that are declared as budgets.

    No bound on moves means that a run may go on for ever without waiting, as far as these counters know.
    """
    product = StateSpace(graph, assumptions, [c.name for c in assumptions.counters if c.budget])
    try:
        found = _BoundsComputation(product, MODEL_AND_TOOLS).result()
    except UnboundedError:
        return Bounds(None, None, None, None, None, reachable_rows=_reachable_rows(StateSpace(graph, assumptions, ())))
    if found.model_calls_in_all is not None:
        return found
    model, tools = (
        _BoundsComputation(product, (1, 0)).result(),
        _BoundsComputation(product, (0, 1)).result(),
    )  # one may be bounded
    return replace(found, model_calls_in_all=model.model_calls_in_all, tool_calls_in_all=tools.tool_calls_in_all)


MODEL_AND_TOOLS = (1, 1)
"""What counts of the calls: both kinds."""


def _reachable_rows(space: StateSpace) -> frozenset[int]:
    """The rows that some run takes, counters apart."""
    seen, rows = {space.initial}, set[int]()
    todo = [space.initial]
    while todo:
        for row, after in space.moves(todo.pop()):
            rows.add(row)
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return frozenset(rows)


def _row_cost(graph: Graph, row: int, counted: tuple[int, int]) -> Cost:
    """One move; a model call; a tool call. ``counted`` says which calls count."""
    transition = graph.transitions[row]
    runs = transition.source == State.DISPATCH_TOOL and transition.guard is None
    return (1, counted[0] * (transition.source == State.CALL_LLM), counted[1] * runs)


ZERO_COST: Cost = (0, 0, 0)

_HubConfiguration = tuple[int, ...]
"""The number of a hub, then the values of the large counters."""


@dataclass(slots=True)
class _HubSuccessor:
    """A hub that can come next, in one way of moving the large counters (``hub`` is -1 for an end)."""

    hub: int
    apply_shift: Callable[[_HubConfiguration], _HubConfiguration]
    without_wait: PathSummary | None = None
    with_waits: PathSummary | None = None
    after_wait: PathSummary | None = None


@dataclass(slots=True)
class _Hub:
    node: Configuration
    successors: dict[tuple[bool, ...], list[_HubSuccessor]] = field(
        default_factory=dict[tuple[bool, ...], list[_HubSuccessor]]
    )


class _BoundsComputation:
    """One computation: find every hub's configuration, then the most from each on."""

    def __init__(self, space: StateSpace, counted: tuple[int, int]) -> None:
        costs = [_row_cost(space.graph, i, counted) for i in range(len(space.graph.transitions))]
        self._accelerated = laps = AcceleratedGraph(space, costs.__getitem__)
        self._hubs: list[_Hub] = []
        self._hub_numbers: dict[Configuration, int] = {}
        node, values = laps.fold(space.initial)
        self._start: _HubConfiguration = (self._hub(node), *values)  # it is treated as a hub, whether or not it is one
        self._predecessors: dict[_HubConfiguration, tuple[_HubConfiguration, tuple[int, ...]] | None] = {
            self._start: None
        }
        self._edges: dict[_HubConfiguration, list[tuple[_HubSuccessor, _HubConfiguration]]] = {}

    def result(self) -> Bounds:
        """The bounds.

        Raises:
            EndlessError: A run may go on for ever without waiting.
        """
        self._explore()
        most, run = self._longest()
        total = None if self._accelerated.unbounded else max_path_cost(self._start, self._edge_costs())
        in_all = (None, None) if total is None else total[1:]
        return Bounds(most[0], most[1], most[2], in_all[0], in_all[1], run, frozenset(self._accelerated.rows_seen))

    def _edge_costs(self) -> dict[_HubConfiguration, list[tuple[_HubConfiguration | None, Cost]]]:
        """What can follow each hub, waits passed."""
        return {
            here: [(after if g.hub >= 0 else None, g.with_waits.cost) for g, after in nexts if g.with_waits is not None]
            for here, nexts in self._edges.items()
        }

    def _hub(self, node: Configuration) -> int:
        if node not in self._hub_numbers:
            self._hub_numbers[node] = len(self._hubs)
            self._hubs.append(_Hub(node))
        return self._hub_numbers[node]

    # -- what follows a hub ---------------------------------------------------------------------------

    def _successors(self, hub_configuration: _HubConfiguration) -> list[_HubSuccessor]:
        laps, hub = self._accelerated, self._hubs[hub_configuration[0]]
        config = laps.unfold(hub.node, hub_configuration[1:])
        case = laps.hub_case(config)
        if case not in hub.successors:
            hub.successors[case] = self._compute_successors(config)
        return hub.successors[case]

    def _compute_successors(self, config: Configuration) -> list[_HubSuccessor]:
        laps = self._accelerated
        goals: dict[tuple[Configuration | None, CounterShift], _HubSuccessor] = {}
        for step in laps.moves(config):
            first = PathSummary(step.node, step.shift, step.cost, (step.row,))
            for rest in self._continuations(step.node):
                goal = self._successor(goals, first, rest)
                goal.without_wait = _max_summary(goal.without_wait, laps.join(first, rest))
                if config[0] in laps.space.waits:
                    goal.after_wait = goal.without_wait
            for (node, shift), way in laps.reachable_from(step.node).items():
                lead = PathSummary(node, shift, way.most, way.rows)
                if not laps.is_hub(node):  # an end, or a wait that may be the last: nobody ever comes
                    lead = replace(lead, node=None)
                goal = self._successor(goals, first, lead)
                goal.with_waits = _max_summary(goal.with_waits, laps.join(first, lead))
                if way.waited is not None:
                    before = PathSummary(
                        node, laps.compose_shifts(step.shift, shift), way.waited, (step.row, *way.rows)
                    )
                    for rest in self._continuations(node):
                        goal = self._successor(goals, before, rest)
                        tail = laps.join(before, rest)
                        goal.after_wait = _max_summary(goal.after_wait, tail)
        return list(goals.values())

    def _successor(
        self,
        successors: dict[tuple[Configuration | None, CounterShift], _HubSuccessor],
        first: PathSummary,
        rest: PathSummary,
    ) -> _HubSuccessor:
        laps = self._accelerated
        shift = laps.no_shift if rest.node is None else laps.compose_shifts(first.shift, rest.shift)
        if (rest.node, shift) not in successors:
            hub = -1 if rest.node is None else self._hub(rest.node)
            successors[rest.node, shift] = _HubSuccessor(hub, _shift_function(hub, shift, laps.limits))
        return successors[rest.node, shift]

    def _continuations(self, node: Configuration) -> tuple[PathSummary, ...]:
        """What follows a node, with nobody waited for."""
        laps = self._accelerated
        if laps.is_end(node):
            return (PathSummary(None, laps.no_shift, ZERO_COST, ()),)
        return (PathSummary(node, laps.no_shift, ZERO_COST, ()),) if laps.is_hub(node) else laps.summaries(node)

    # -- over all hubs --------------------------------------------------------------------------------

    def _explore(self) -> None:
        """Every hub's configuration that some run comes to, nearest first."""
        todo = deque([self._start])
        back, nexts = self._predecessors, self._edges
        while todo:
            here = todo.popleft()
            found = nexts[here] = [(goal, goal.apply_shift(here)) for goal in self._successors(here)]
            for goal, after in found:
                if goal.with_waits is not None and goal.hub >= 0 and after not in back:
                    back[after] = (here, goal.with_waits.rows)
                    todo.append(after)

    def _max_costs_from(self) -> dict[_HubConfiguration, tuple[Cost, _HubSuccessor | None]]:
        """The most of each measure from each configuration on with nobody waited for, and the first goal of a longest.

        Raises:
            EndlessError: There is a cycle, so there is no most.
        """
        values: dict[_HubConfiguration, tuple[Cost, _HubSuccessor | None]] = {}
        opened: set[_HubConfiguration] = set()
        stack = list(self._edges)
        while stack:
            here = stack[-1]
            if here in values:
                stack.pop()
                continue
            most = model = tool = widest = 0
            choice: _HubSuccessor | None = None
            missing: list[_HubConfiguration] = []
            for goal, after in self._edges[here]:
                lap = goal.without_wait
                if lap is None:
                    continue
                cost = lap.cost
                if goal.hub >= 0:
                    if after not in values:
                        missing.append(after)
                        continue
                    cost = add_costs(cost, values[after][0])
                model, tool = max(model, cost[1]), max(tool, cost[2])
                if cost[0] > most or (cost[0] == most and lap.cost[0] > widest):  # the longer lap first
                    most, widest, choice = cost[0], lap.cost[0], goal
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
        """The most between two waits, and the rows of a run that ends with the longest such stretch."""
        values = self._max_costs_from()
        here, most = self._start, values[self._start][0]
        goal = values[here][1]
        lap = None if goal is None else goal.without_wait
        for place, nexts in self._edges.items():
            for each, after in nexts:
                if each.after_wait is None:
                    continue
                cost = each.after_wait.cost if each.hub < 0 else add_costs(each.after_wait.cost, values[after][0])
                if cost[0] > most[0]:
                    here, goal, lap = place, each, each.after_wait
                most = elementwise_max(most, cost)
        rows = self._rows_to(here)
        while goal is not None and lap is not None:
            rows += lap.rows
            if goal.hub < 0:
                break
            here = goal.apply_shift(here)
            goal = values[here][1]
            lap = None if goal is None else goal.without_wait
        return most, tuple(rows)

    def _rows_to(self, here: _HubConfiguration) -> list[int]:
        parts: list[tuple[int, ...]] = []
        while (step := self._predecessors[here]) is not None:
            here, rows = step
            parts.append(rows)
        return [row for part in reversed(parts) for row in part]


def _max_summary(a: PathSummary | None, b: PathSummary) -> PathSummary:
    """Of two laps with one goal, the most of each measure and the rows of the longer."""
    if a is None:
        return b
    return PathSummary(a.node, a.shift, elementwise_max(a.cost, b.cost), b.rows if b.cost[0] > a.cost[0] else a.rows)


def _shift_function(
    hub: int, shift: CounterShift, limits: CounterShift
) -> Callable[[_HubConfiguration], _HubConfiguration]:
    """A shift as a function: each counter is multiplied by 0 or 1, added to, and kept within its limit."""
    plan = [(0, -1 - s, limit) if s < 0 else (1, s, limit) for s, limit in zip(shift, limits, strict=True)]
    if len(plan) == 2:  # the common case, and the inner loop of the whole computation
        (m1, a1, l1), (m2, a2, l2) = plan
        return lambda here: (hub, min(l1, here[1] * m1 + a1), min(l2, here[2] * m2 + a2))
    return lambda here: (hub, *(min(lim, v * m + a) for v, (m, a, lim) in zip(here[1:], plan, strict=True)))
