"""Counter acceleration: the moves of a state space with its large counters folded.

Budgets of hundreds of steps would make millions of configurations that differ only in a large counter, which is
read in one or two states. So small counters are part of a node, and large ones are followed only in those states
(the *hubs*, such as ``pre_step``). Each path between two hubs is summarised once as a *segment*: its cost, and
what it does to the large counters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product as combinations
from typing import TypeAlias

from agentfsm.analysis.analysis_limits import Meter
from agentfsm.analysis.assumptions import Comparison, GuardAssumption, Variable, parse_condition
from agentfsm.analysis.layered_graph import Cost, UnboundedError, add_costs, elementwise_max, max_path_costs
from agentfsm.analysis.state_space import CompiledRow, Configuration, StateSpace

FOLDING_THRESHOLD = 4
"""A counter with a larger limit is *folded* (kept out of the nodes), unless its values are labels."""

CounterShift = tuple[int, ...]
"""The change of each large counter: ``n`` adds n, ``-1 - n`` sets it to n."""

_Reached = tuple[Configuration, CounterShift]
"""A node, and what a path to it does to the large counters."""

NestedRows: TypeAlias = "tuple[int | NestedRows, ...]"
"""The rows of a path, in parts that paths share: thus two are joined without a copy of either."""

_Cases = tuple[list[int], list[int]]
"""Values at which ranges of values start, in order, and a number for each range."""


@dataclass(frozen=True, slots=True)
class CostedMove:
    """One move with its cost."""

    row: int
    node: Configuration
    shift: CounterShift
    cost: Cost


@dataclass(frozen=True, slots=True)
class PathSummary:
    """The costliest path from one node to the next hub, or to an end (``node`` is then None).

    Attributes:
        node: The hub at which it ends.
        shift: What it does to the large counters.
        cost: The maximum of each cost, each on its own.
        rows: The rows of a longest such path.
    """

    node: Configuration | None
    shift: CounterShift
    cost: Cost
    rows: NestedRows = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ReachedNode:
    """How a node is reached when waits are passed through.

    Attributes:
        rows: The rows of a short path to it.
        cost: The maximum number of model and tool calls on any path to it.
        cost_after_wait: If a path reaches it straight from a waiting state, the most that the last move costs.
    """

    rows: NestedRows = field(repr=False, compare=False)
    cost: Cost
    cost_after_wait: Cost | None


class AcceleratedGraph:
    """The moves of a state space with its large counters folded.

    Attributes:
        large: The slots of the large counters.
        limits: Their limits.
        no_shift: The shift that changes none of them.
        increased: The places, among the large counters, of those that are never set.
        unbounded: Whether the number of model or tool calls was found to have no bound when waits are passed through.
        rows_seen: The places of the rows taken so far.
    """

    def __init__(self, space: StateSpace, row_cost: Callable[[int], Cost]) -> None:
        self.space = space
        self._row_cost = row_cost
        self.large = tuple(i for i, c in enumerate(space.counters, 1) if is_foldable(c))
        self.limits = tuple(space.counters[i - 1].limit for i in self.large)
        self.increased = [n for n, i in enumerate(self.large) if not any(u.to for u in space.counters[i - 1].updates)]
        self.no_shift: CounterShift = (0,) * len(self.large)
        tests = [self._tests_of_large(rows) for rows in space.rows]
        self._large_comparisons = tuple(tuple(space.compile_condition(((t,),)) for t in each) for each in tests)
        self._case_tables = tuple(tuple(self._cases(slot, each) for slot in self.large) for each in tests)
        self._summaries: dict[Configuration, tuple[PathSummary, ...]] = {}
        self.unbounded = False
        self.rows_seen: set[int] = set()
        self._moves: dict[tuple[Configuration, tuple[bool, ...]], tuple[CostedMove, ...]] = {}

    def _cases(self, slot: int, tests: Iterable[Comparison]) -> _Cases:
        """The ranges of values of a large counter for which comparisons have the same results."""
        counter = self.space.counters[slot - 1]
        own = [t for t in tests if t.counter == counter.name]
        compared = [self.space.compile_condition(((t,),)) for t in own]
        numbers = {counter.value(t.value) for t in own}
        starts = sorted(n for n in {0, *numbers, *(n + 1 for n in numbers)} if n <= counter.limit)
        cases: dict[tuple[bool, ...], int] = {}
        config = [0] * (len(self.space.counters) + 1)
        found: list[int] = []
        for config[slot] in starts:
            found.append(cases.setdefault(tuple(check(tuple(config)) for check in compared), len(cases)))
        return starts, found

    def case_of(self, state: int, values: Configuration) -> tuple[int, ...]:
        """A number for the value of each large counter: with equal numbers, a hub in a state has the same moves."""
        return tuple(
            [
                cases[bisect_right(starts, value) - 1]
                for (starts, cases), value in zip(self._case_tables[state], values, strict=True)
            ]
        )

    def case_changes(self, place: int) -> list[int]:
        """The values of a large counter, given by its place, from which on the moves of a hub may differ, in order."""
        return sorted({start for tables in self._case_tables for start in tables[place][0]})

    def _tests_of_large(self, rows: tuple[CompiledRow, ...]) -> tuple[Comparison, ...]:
        """Every comparison with a large counter in the assumptions about the rows of a state."""
        names = {self.space.counter_names[i - 1] for i in self.large}
        comparisons: dict[Comparison, None] = {}
        for row in rows:
            texts = [text for k in row.assumptions for text in (k.may, k.must)]
            texts += [c.when for counter in self.space.counters for c in counter.updates_for(row.transition)]
            for test in (test for text in texts for tests in parse_condition(text) for test in tests):
                if test.counter in names:
                    comparisons[test] = None
        return tuple(comparisons)

    def is_hub(self, node: Configuration) -> bool:
        """Whether something in a state depends on a large counter."""
        return bool(self._large_comparisons[node[0]])

    def is_end(self, node: Configuration) -> bool:
        """Whether a node's state is final or waits."""
        return node[0] in self.space.finals or node[0] in self.space.waits

    def fold(self, config: Configuration) -> tuple[Configuration, Configuration]:
        """A configuration as a node (large counters at 0) and the values of the large counters."""
        values = tuple(config[i] for i in self.large)
        return tuple(0 if i in self.large else v for i, v in enumerate(config)), values

    def unfold(self, node: Configuration, values: Configuration) -> Configuration:
        """The configuration of a node and the values of the large counters."""
        if len(self.large) == 2:  # the common case
            a, b = self.large
            return (*node[:a], values[0], *node[a + 1 : b], values[1], *node[b + 1 :])
        config = list(node)
        for slot, value in zip(self.large, values, strict=True):
            config[slot] = value
        return tuple(config)

    def hub_case(self, config: Configuration) -> tuple[bool, ...]:
        """The results of the comparisons with large counters; in one case, a hub's moves are the same."""
        checks = self._large_comparisons[config[0]]
        return tuple([check(config) for check in checks])  # a list is faster than a generator

    def compose_shifts(self, first: CounterShift, second: CounterShift) -> CounterShift:
        """The shift that has the effect of two, one after the other."""
        return tuple(
            b if b < 0 else min(limit, a + b) if a >= 0 else -1 - min(limit, -1 - a + b)
            for a, b, limit in zip(first, second, self.limits, strict=True)
        )

    # -- moves ----------------------------------------------------------------------------------------

    def moves(self, config: Configuration) -> tuple[CostedMove, ...]:
        """The moves out of a configuration.

        Of rows with the same effect and cost, the one with the fewest assumptions. A hub's configuration must
        have its large counters unfolded.
        """
        key = (self.fold(config)[0], self.hub_case(config))
        moves = self._moves.get(key)
        if moves is None:
            constraints = self.space.constraint_counts
            distinct: dict[tuple[Configuration, CounterShift, Cost], CostedMove] = {}
            for step in self._compute_moves(config):
                key_of = (step.node, step.shift, step.cost)
                self.rows_seen.add(step.row)
                if key_of not in distinct or constraints[step.row] < constraints[distinct[key_of].row]:
                    distinct[key_of] = step
            moves = self._moves[key] = tuple(distinct.values())
            self.space.meter.count(1 + len(moves))
        return moves

    def _compute_moves(self, config: Configuration) -> Iterator[CostedMove]:
        used: list[GuardAssumption] = []
        for row in self.space.possible_rows(config, used):
            cost = self._row_cost(row.place)
            options = [self._row_shifts(row, i, config) for i in self.large]
            shifts = [tuple(shift) for shift in combinations(*options)]
            for node in dict.fromkeys(self.fold(after)[0] for after in self.space.successors(row, config)):
                yield from (CostedMove(row.place, node, shift, cost) for shift in shifts)
        self.space.note_used(used)

    def _row_shifts(self, row: CompiledRow, slot: int, config: Configuration) -> list[int]:
        for changed, _, changes in row.updates:
            if changed != slot:
                continue
            shifts: list[int] = []
            for add, to, when, certain in changes:
                if when(config):
                    shifts += [-1 - value for value in to] or [add]
                    if certain:
                        return shifts
            return [*shifts, 0]
        return [0]

    # -- segments: paths from a node to the next hub or end -------------------------------------------

    def summaries(self, node: Configuration) -> tuple[PathSummary, ...]:
        """The segments from a node to the next hubs and ends, without passing through a wait.

        Raises:
            UnboundedError: A path from the node reaches neither.
            AnalysisLimitError: The meter's limit is reached.
        """
        if node not in self._summaries:
            self._summarize(node)
        return self._summaries[node]

    def _summarize(self, start: Configuration) -> None:
        """Summarise the paths from a node, those from later nodes first.

        With a stack of its own: a path through small counters can be longer than Python's recursion may get deep.
        """
        ahead = {start: iter(self._inner_nodes(start))}  # the nodes of the path that is followed, in order
        path = [start]
        while path:
            node = path[-1]
            after = next((each for each in ahead[node] if each not in self._summaries), None)
            if after is None:
                self._summaries[node] = self._summaries_of(node)
                del ahead[path.pop()]
            elif after in ahead:
                raise UnboundedError
            else:
                ahead[after] = iter(self._inner_nodes(after))
                path.append(after)

    def _inner_nodes(self, node: Configuration) -> list[Configuration]:
        """The next nodes at which a segment does not end."""
        return [m.node for m in self.moves(node) if not self.is_end(m.node) and not self.is_hub(m.node)]

    def _summaries_of(self, node: Configuration) -> tuple[PathSummary, ...]:
        """The segments from a node, from those of the next nodes."""
        segments: list[PathSummary] = []
        for step in self.moves(node):
            if self.is_end(step.node):
                segments.append(PathSummary(None, self.no_shift, step.cost, (step.row,)))
            elif self.is_hub(step.node):
                segments.append(PathSummary(step.node, step.shift, step.cost, (step.row,)))
            else:
                first = PathSummary(step.node, step.shift, step.cost, (step.row,))
                rest = self._summaries[step.node]
                self.space.meter.work(len(rest))
                segments += [self.join(first, each) for each in rest]
        best = _best_summaries(segments)
        self.space.meter.count(len(best))
        return best

    def join(self, first: PathSummary, second: PathSummary) -> PathSummary:
        """Two segments, one after the other, as one."""
        shift = self.no_shift if second.node is None else self.compose_shifts(first.shift, second.shift)
        return PathSummary(second.node, shift, add_costs(first.cost, second.cost), (first.rows, second.rows))

    def reachable_from(self, node: Configuration) -> Mapping[_Reached, ReachedNode]:
        """All nodes reachable from a node when waits are passed through, up to and including the next hubs.

        Sets ``unbounded`` if the number of model or tool calls grows without a bound on the way.
        """
        start = (node, self.no_shift)
        reached = {start: ReachedNode((), (0, 0, 0), None)}
        edges: list[tuple[_Reached, _Reached, Cost]] = []
        todo = deque([start])
        while todo:
            here = todo.popleft()
            if self.is_hub(here[0]):
                continue
            waits = here[0][0] in self.space.waits
            for step in self.moves(here[0]):
                then = (step.node, self.compose_shifts(here[1], step.shift))
                self.space.meter.work()
                edges.append((here, then, step.cost))
                old = reached.get(then)
                if old is None:
                    old = ReachedNode((reached[here].rows, step.row), (0, 0, 0), None)
                    self.space.meter.count()
                    todo.append(then)
                if waits:
                    before = old.cost_after_wait
                    old = replace(old, cost_after_wait=elementwise_max(before, step.cost) if before else step.cost)
                reached[then] = old
        try:
            return _with_max_calls(reached, edges, self.space.meter)
        except UnboundedError:
            self.unbounded = True
            return reached


def shift_values(values: Configuration, shift: CounterShift, limits: Configuration) -> Configuration:
    """The values of counters with given limits after a shift."""
    changes = zip(values, shift, limits, strict=True)
    return tuple([-1 - by if by < 0 else min(limit, value + by) for value, by, limit in changes])


def is_foldable(counter: Variable) -> bool:
    """Whether a counter is large, and its changes compose: it is only increased or set."""
    return (
        counter.accelerated
        and counter.limit > FOLDING_THRESHOLD
        and not counter.labels
        and all(change.add >= 0 for change in counter.updates)
    )


def _with_max_calls(
    nodes: Mapping[_Reached, ReachedNode], edges: Iterable[tuple[_Reached, _Reached, Cost]], meter: Meter
) -> dict[_Reached, ReachedNode]:
    """Nodes with the maximum number of model and tool calls on any path to each from the first.

    Raises:
        UnboundedError: It grows without a bound.
        AnalysisLimitError: The meter's limit is reached.
    """
    back: dict[_Reached, list[tuple[_Reached | None, Cost]]] = {key: [] for key in nodes}
    for here, then, cost in edges:
        back[then].append((here, (0, *cost[1:])))  # moves are not bounded across waits
    most = max_path_costs(back, meter)  # backwards, each path can go on to the first node
    return {key: replace(node, cost=most[key]) for key, node in nodes.items()}


def _best_summaries(summaries: list[PathSummary]) -> tuple[PathSummary, ...]:
    """Of segments with the same end and shift, the maximum of each cost and the rows of a longest."""
    best: dict[tuple[Configuration | None, CounterShift], PathSummary] = {}
    for each in summaries:
        key = (each.node, each.shift)
        best[key] = max_summary(best.get(key), each)
    return tuple(best.values())


def flatten_rows(rows: NestedRows) -> Iterator[int]:
    """The rows of a path, one by one."""
    todo: list[int | NestedRows] = [rows]
    while todo:
        part = todo.pop()
        if isinstance(part, int):
            yield part
        else:
            todo += reversed(part)


def max_summary(a: PathSummary | None, b: PathSummary) -> PathSummary:
    """Of two segments with the same end and shift, the maximum of each cost and the rows of the longer."""
    if a is None:
        return b
    return PathSummary(a.node, a.shift, elementwise_max(a.cost, b.cost), b.rows if b.cost[0] > a.cost[0] else a.rows)
