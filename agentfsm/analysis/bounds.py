"""How long a run can get: the longest stretch between two waits, and the most model and tool calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from agentfsm.analysis.facts import Facts
from agentfsm.analysis.laps import Cost, EndlessError, Lap, Laps, Shift, add, larger
from agentfsm.analysis.longest import costliest
from agentfsm.analysis.product import Config, Product
from agentfsm.machine.graph import Graph, State

__all__ = ["Bounds", "bounds"]


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
        taken: The places of the rows that some run takes, as far as the budgets alone know.
    """

    moves: int | None
    model_calls: int | None
    tool_calls: int | None
    model_calls_in_all: int | None
    tool_calls_in_all: int | None
    longest: tuple[int, ...] = ()
    taken: frozenset[int] = frozenset()


def bounds(graph: Graph, facts: Facts) -> Bounds:
    """The bounds of a graph's runs, over the counters that are declared as budgets.

    No bound on moves means that a run may go on for ever without waiting, as far as these counters know.
    """
    product = Product(graph, facts, [c.name for c in facts.counters if c.budget])
    try:
        found = _Bounding(product, MODEL_AND_TOOLS).result()
    except EndlessError:
        return Bounds(None, None, None, None, None, taken=_taken(Product(graph, facts, ())))
    if found.model_calls_in_all is not None:
        return found
    model, tools = _Bounding(product, (1, 0)).result(), _Bounding(product, (0, 1)).result()  # one may be bounded
    return replace(found, model_calls_in_all=model.model_calls_in_all, tool_calls_in_all=tools.tool_calls_in_all)


MODEL_AND_TOOLS = (1, 1)
"""What counts of the calls: both kinds."""


def _taken(product: Product) -> frozenset[int]:
    """The rows that some run takes, counters apart."""
    seen, rows = {product.start}, set[int]()
    todo = [product.start]
    while todo:
        for row, after in product.moves(todo.pop()):
            rows.add(row)
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return frozenset(rows)


def _cost(graph: Graph, row: int, counted: tuple[int, int]) -> Cost:
    """One move; a model call; a tool call. ``counted`` says which calls count."""
    transition = graph.transitions[row]
    runs = transition.source == State.DISPATCH_TOOL and transition.guard is None
    return (1, counted[0] * (transition.source == State.CALL_LLM), counted[1] * runs)


NONE: Cost = (0, 0, 0)

_Here = tuple[int, ...]
"""The number of a hub, then the values of the large counters."""


@dataclass(slots=True)
class _Goal:
    """A hub that can come next, in one way of moving the large counters (``hub`` is -1 for an end)."""

    hub: int
    move: Callable[[_Here], _Here]
    straight: Lap | None = None
    onward: Lap | None = None
    tail: Lap | None = None


@dataclass(slots=True)
class _Hub:
    node: Config
    outs: dict[tuple[bool, ...], list[_Goal]] = field(default_factory=dict[tuple[bool, ...], list[_Goal]])


class _Bounding:
    """One computation: find every hub's configuration, then the most from each on."""

    def __init__(self, product: Product, counted: tuple[int, int]) -> None:
        costs = [_cost(product.graph, i, counted) for i in range(len(product.graph.transitions))]
        self._laps = laps = Laps(product, costs.__getitem__)
        self._hubs: list[_Hub] = []
        self._number: dict[Config, int] = {}
        node, values = laps.fold(product.start)
        self._start: _Here = (self._hub(node), *values)  # it is treated as a hub, whether or not it is one
        self._back: dict[_Here, tuple[_Here, tuple[int, ...]] | None] = {self._start: None}
        self._nexts: dict[_Here, list[tuple[_Goal, _Here]]] = {}

    def result(self) -> Bounds:
        """The bounds.

        Raises:
            EndlessError: A run may go on for ever without waiting.
        """
        self._explore()
        most, run = self._longest()
        total = None if self._laps.unbounded else costliest(self._start, self._onward())
        in_all = (None, None) if total is None else total[1:]
        return Bounds(most[0], most[1], most[2], in_all[0], in_all[1], run, frozenset(self._laps.taken))

    def _onward(self) -> dict[_Here, list[tuple[_Here | None, Cost]]]:
        """What can follow each hub, waits passed."""
        return {
            here: [(after if g.hub >= 0 else None, g.onward.cost) for g, after in nexts if g.onward is not None]
            for here, nexts in self._nexts.items()
        }

    def _hub(self, node: Config) -> int:
        if node not in self._number:
            self._number[node] = len(self._hubs)
            self._hubs.append(_Hub(node))
        return self._number[node]

    # -- what follows a hub ---------------------------------------------------------------------------

    def _goals(self, here: _Here) -> list[_Goal]:
        laps, hub = self._laps, self._hubs[here[0]]
        config = laps.unfold(hub.node, here[1:])
        case = laps.case(config)
        if case not in hub.outs:
            hub.outs[case] = self._build(config)
        return hub.outs[case]

    def _build(self, config: Config) -> list[_Goal]:
        laps = self._laps
        goals: dict[tuple[Config | None, Shift], _Goal] = {}
        for step in laps.steps(config):
            first = Lap(step.node, step.shift, step.cost, (step.row,))
            for rest in self._rest(step.node):
                goal = self._goal(goals, first, rest)
                goal.straight = _most(goal.straight, laps.join(first, rest))
                if config[0] in laps.product.waits:
                    goal.tail = goal.straight
            for (node, shift), way in laps.reached(step.node).items():
                lead = Lap(node, shift, way.most, way.rows)
                if not laps.hub(node):  # an end, or a wait that may be the last: nobody ever comes
                    lead = replace(lead, node=None)
                goal = self._goal(goals, first, lead)
                goal.onward = _most(goal.onward, laps.join(first, lead))
                if way.waited is not None:
                    before = Lap(node, laps.then(step.shift, shift), way.waited, (step.row, *way.rows))
                    for rest in self._rest(node):
                        goal = self._goal(goals, before, rest)
                        tail = laps.join(before, rest)
                        goal.tail = _most(goal.tail, tail)
        return list(goals.values())

    def _goal(self, goals: dict[tuple[Config | None, Shift], _Goal], first: Lap, rest: Lap) -> _Goal:
        laps = self._laps
        shift = laps.same if rest.node is None else laps.then(first.shift, rest.shift)
        if (rest.node, shift) not in goals:
            hub = -1 if rest.node is None else self._hub(rest.node)
            goals[rest.node, shift] = _Goal(hub, _mover(hub, shift, laps.limits))
        return goals[rest.node, shift]

    def _rest(self, node: Config) -> tuple[Lap, ...]:
        """What follows a node, with nobody waited for."""
        laps = self._laps
        if laps.ends(node):
            return (Lap(None, laps.same, NONE, ()),)
        return (Lap(node, laps.same, NONE, ()),) if laps.hub(node) else laps.straight(node)

    # -- over all hubs --------------------------------------------------------------------------------

    def _explore(self) -> None:
        """Every hub's configuration that some run comes to, nearest first."""
        todo = deque([self._start])
        back, nexts = self._back, self._nexts
        while todo:
            here = todo.popleft()
            found = nexts[here] = [(goal, goal.move(here)) for goal in self._goals(here)]
            for goal, after in found:
                if goal.onward is not None and goal.hub >= 0 and after not in back:
                    back[after] = (here, goal.onward.rows)
                    todo.append(after)

    def _values(self) -> dict[_Here, tuple[Cost, _Goal | None]]:
        """The most of each measure from each configuration on with nobody waited for, and the first goal of a longest.

        Raises:
            EndlessError: There is a cycle, so there is no most.
        """
        values: dict[_Here, tuple[Cost, _Goal | None]] = {}
        opened: set[_Here] = set()
        stack = list(self._nexts)
        while stack:
            here = stack[-1]
            if here in values:
                stack.pop()
                continue
            most = model = tool = widest = 0
            choice: _Goal | None = None
            missing: list[_Here] = []
            for goal, after in self._nexts[here]:
                lap = goal.straight
                if lap is None:
                    continue
                cost = lap.cost
                if goal.hub >= 0:
                    if after not in values:
                        missing.append(after)
                        continue
                    cost = add(cost, values[after][0])
                model, tool = max(model, cost[1]), max(tool, cost[2])
                if cost[0] > most or (cost[0] == most and lap.cost[0] > widest):  # the longer lap first
                    most, widest, choice = cost[0], lap.cost[0], goal
            if missing:
                if here in opened:
                    raise EndlessError
                opened.add(here)
                stack += missing
            else:
                values[here] = ((most, model, tool), choice)
                stack.pop()
        return values

    def _longest(self) -> tuple[Cost, tuple[int, ...]]:
        """The most between two waits, and the rows of a run that ends with the longest such stretch."""
        values = self._values()
        here, most = self._start, values[self._start][0]
        goal = values[here][1]
        lap = None if goal is None else goal.straight
        for place, nexts in self._nexts.items():
            for each, after in nexts:
                if each.tail is None:
                    continue
                cost = each.tail.cost if each.hub < 0 else add(each.tail.cost, values[after][0])
                if cost[0] > most[0]:
                    here, goal, lap = place, each, each.tail
                most = larger(most, cost)
        rows = self._way_to(here)
        while goal is not None and lap is not None:
            rows += lap.rows
            if goal.hub < 0:
                break
            here = goal.move(here)
            goal = values[here][1]
            lap = None if goal is None else goal.straight
        return most, tuple(rows)

    def _way_to(self, here: _Here) -> list[int]:
        parts: list[tuple[int, ...]] = []
        while (step := self._back[here]) is not None:
            here, rows = step
            parts.append(rows)
        return [row for part in reversed(parts) for row in part]


def _most(a: Lap | None, b: Lap) -> Lap:
    """Of two laps with one goal, the most of each measure and the rows of the longer."""
    if a is None:
        return b
    return Lap(a.node, a.shift, larger(a.cost, b.cost), b.rows if b.cost[0] > a.cost[0] else a.rows)


def _mover(hub: int, shift: Shift, limits: Shift) -> Callable[[_Here], _Here]:
    """A shift as a function: each counter is multiplied by 0 or 1, added to, and kept within its limit."""
    plan = [(0, -1 - s, limit) if s < 0 else (1, s, limit) for s, limit in zip(shift, limits, strict=True)]
    if len(plan) == 2:  # the common case, and the inner loop of the whole computation
        (m1, a1, l1), (m2, a2, l2) = plan
        return lambda here: (hub, min(l1, here[1] * m1 + a1), min(l2, here[2] * m2 + a2))
    return lambda here: (hub, *(min(lim, v * m + a) for v, (m, a, lim) in zip(here[1:], plan, strict=True)))
