"""A product with its large counters folded away: hubs, where something asks them, and laps between hubs.

A budget of hundreds of steps makes a product of millions of configurations, almost all of which differ in
nothing but a large counter that is read in one or two states. So the *small* counters are followed as they
are, and the large ones only in those states (the *hubs*, such as ``pre_step``). What happens between two
hubs is summed up once, as a *lap*: to which hub it leads, what it does to the large counters, and how much
of each measure it costs at most. What comes out is the same as over the whole product.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product as combinations

from agentfsm.analysis.facts import Condition, Counter, condition
from agentfsm.analysis.product import Config, Product, Row

__all__ = ["LARGE", "Cost", "EndlessError", "Lap", "Laps", "Reached", "Shift", "Step", "add", "larger"]

LARGE = 4
"""A counter with a larger limit than this is folded away, unless it only has labels."""

Cost = tuple[int, int, int]
"""Moves, model calls and tool calls."""

Shift = tuple[int, ...]
"""What happens to each large counter: ``n`` adds n, ``-1 - n`` sets it to n."""


class EndlessError(Exception):
    """A measure has no bound; never leaves the analysis."""


@dataclass(frozen=True, slots=True)
class Step:
    """One move, as it is summed up."""

    row: int
    node: Config
    shift: Shift
    cost: Cost


@dataclass(frozen=True, slots=True)
class Lap:
    """The costliest way from one place to the next hub, or to an end (``node`` is then None).

    Attributes:
        node: The hub to which it leads.
        shift: What it does to the large counters.
        cost: The most of each measure, each on its own.
        rows: The rows of a longest such way.
    """

    node: Config | None
    shift: Shift
    cost: Cost
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reached:
    """How a node is reached with waits passed.

    Attributes:
        rows: The rows of a short way to it.
        most: The most of each measure but the first on any way to it.
        waited: Where some way comes straight from a wait, the most that its last move costs.
    """

    rows: tuple[int, ...]
    most: Cost
    waited: Cost | None


def add(a: Cost, b: Cost) -> Cost:
    """What two stretches cost together."""
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2])


def larger(a: Cost, b: Cost) -> Cost:
    """The larger of each measure."""
    return (max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]))


class Laps:
    """The moves of a product, with large counters folded away.

    Args:
        product: The product.
        measure: What taking a row costs.

    Attributes:
        unbounded: Whether, with waits passed, some measure but the first was found to have no bound.
        taken: The places of the rows that were met.
    """

    def __init__(self, product: Product, measure: Callable[[int], Cost]) -> None:
        self.product = product
        self._measure = measure
        self.large = tuple(i for i, c in enumerate(product.counters, 1) if _folds(c))
        self.limits = tuple(product.counters[i - 1].limit for i in self.large)
        self.same: Shift = (0,) * len(self.large)
        self._tests = tuple(self._large_tests(rows) for rows in product.rows)
        self._straight: dict[Config, tuple[Lap, ...]] = {}
        self.unbounded = False
        self.taken: set[int] = set()
        self._steps: dict[tuple[Config, tuple[bool, ...]], tuple[Step, ...]] = {}

    def _large_tests(self, rows: tuple[Row, ...]) -> tuple[Callable[[Config], bool], ...]:
        """Every comparison with a large counter that the rows of a state make."""
        names = {self.product.names[i - 1] for i in self.large}
        found: dict[Condition, None] = {}
        for row in rows:
            texts = [text for k in row.known for text in (k.may, k.must)]
            texts += [c.when for counter in self.product.counters for c in counter.changes if c.fits(row.transition)]
            for test in (test for text in texts for tests in condition(text) for test in tests):
                if test.counter in names:
                    found[((test,),)] = None
        return tuple(self.product.check(each) for each in found)

    def hub(self, node: Config) -> bool:
        """Whether something in a state asks a large counter."""
        return bool(self._tests[node[0]])

    def ends(self, node: Config) -> bool:
        """Whether a stretch ends in a state: it is final, or waits."""
        return node[0] in self.product.finals or node[0] in self.product.waits

    def fold(self, config: Config) -> tuple[Config, Config]:
        """A configuration as a node (large counters at 0) and the values of the large counters."""
        values = tuple(config[i] for i in self.large)
        return tuple(0 if i in self.large else v for i, v in enumerate(config)), values

    def unfold(self, node: Config, values: Config) -> Config:
        """The configuration again."""
        if len(self.large) == 2:  # the common case
            a, b = self.large
            return (*node[:a], values[0], *node[a + 1 : b], values[1], *node[b + 1 :])
        config = list(node)
        for slot, value in zip(self.large, values, strict=True):
            config[slot] = value
        return tuple(config)

    def case(self, config: Config) -> tuple[bool, ...]:
        """How the large counters' comparisons come out; within one case, a hub's moves are the same."""
        return tuple([check(config) for check in self._tests[config[0]]])  # a list is faster than a generator

    def shifted(self, shift: Shift, values: Config) -> Config:
        """The values of the large counters after a shift."""
        return tuple(
            min(limit, value + s) if s >= 0 else -1 - s
            for s, value, limit in zip(shift, values, self.limits, strict=True)
        )

    def then(self, first: Shift, second: Shift) -> Shift:
        """Two shifts in a row, as one."""
        return tuple(
            b if b < 0 else min(limit, a + b) if a >= 0 else -1 - min(limit, -1 - a + b)
            for a, b, limit in zip(first, second, self.limits, strict=True)
        )

    # -- moves ----------------------------------------------------------------------------------------

    def steps(self, config: Config) -> tuple[Step, ...]:
        """The moves out of a configuration; of rows that do and cost the same, the one tied to fewest facts.

        A hub's configuration must have its large counters unfolded.
        """
        key = (self.fold(config)[0], self.case(config))
        found = self._steps.get(key)
        if found is None:
            ties = self.product.ties
            different: dict[tuple[Config, Shift, Cost], Step] = {}
            for step in self._find(config):
                key_of = (step.node, step.shift, step.cost)
                self.taken.add(step.row)
                if key_of not in different or ties[step.row] < ties[different[key_of].row]:
                    different[key_of] = step
            found = self._steps[key] = tuple(different.values())
        return found

    def _find(self, config: Config) -> Iterator[Step]:
        for row in self.product.rows[config[0]]:
            if row.may(config):
                cost = self._measure(row.place)
                options = [self._shifts(row, i, config) for i in self.large]
                shifts = [tuple(shift) for shift in combinations(*options)]
                for node in dict.fromkeys(self.fold(after)[0] for after in self.product.after(row, config)):
                    yield from (Step(row.place, node, shift, cost) for shift in shifts)
            if row.must(config):
                return

    def _shifts(self, row: Row, slot: int, config: Config) -> list[int]:
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

    def straight(self, node: Config) -> tuple[Lap, ...]:
        """The laps from a node to the next hubs and ends, with nobody waited for.

        Raises:
            EndlessError: Some way from it never comes to either.
        """
        if node not in self._straight:
            self._fill(node, frozenset())
        return self._straight[node]

    def _fill(self, node: Config, above: frozenset[Config]) -> None:
        if node in self._straight:
            return
        if node in above:
            raise EndlessError
        laps: list[Lap] = []
        for step in self.steps(node):
            if self.ends(step.node):
                laps.append(Lap(None, self.same, step.cost, (step.row,)))
            elif self.hub(step.node):
                laps.append(Lap(step.node, step.shift, step.cost, (step.row,)))
            else:
                self._fill(step.node, above | {node})
                first = Lap(step.node, step.shift, step.cost, (step.row,))
                laps += [self.join(first, lap) for lap in self._straight[step.node]]
        self._straight[node] = _best(laps)

    def join(self, first: Lap, then: Lap) -> Lap:
        """Two laps in a row, as one."""
        shift = self.same if then.node is None else self.then(first.shift, then.shift)
        return Lap(then.node, shift, add(first.cost, then.cost), (*first.rows, *then.rows))

    def reached(self, node: Config) -> Mapping[tuple[Config, Shift], Reached]:
        """All that can be reached from a node with waits passed, up to and with the next hubs.

        Where some measure but the first grows without a bound on the way, ``unbounded`` is set.
        """
        start = (node, self.same)
        found = {start: Reached((), (0, 0, 0), None)}
        edges: list[tuple[tuple[Config, Shift], tuple[Config, Shift], Cost]] = []
        todo = deque([start])
        while todo:
            here = todo.popleft()
            if self.hub(here[0]):
                continue
            waits = here[0][0] in self.product.waits
            for step in self.steps(here[0]):
                then = (step.node, self.then(here[1], step.shift))
                edges.append((here, then, step.cost))
                old = found.get(then)
                if old is None:
                    old = Reached((*found[here].rows, step.row), (0, 0, 0), None)
                    todo.append(then)
                if waits:
                    old = replace(old, waited=step.cost if old.waited is None else larger(old.waited, step.cost))
                found[then] = old
        return self._most(start, found, edges)

    def _most(
        self,
        start: tuple[Config, Shift],
        found: dict[tuple[Config, Shift], Reached],
        edges: list[tuple[tuple[Config, Shift], tuple[Config, Shift], Cost]],
    ) -> dict[tuple[Config, Shift], Reached]:
        """With the most of each measure on any way to each node: Bellman and Ford, for longest ways."""
        most: dict[tuple[Config, Shift], Cost] = {start: (0, 0, 0)}
        for _ in range(len(found) + 1):
            changed = False
            for here, then, cost in edges:
                if here not in most:
                    continue
                new = (0, *add(most[here], cost)[1:])  # moves are not bounded across waits
                old = most.get(then)
                if old is None or new[1] > old[1] or new[2] > old[2]:
                    most[then] = new if old is None else larger(old, new)
                    changed = True
            if not changed:
                return {key: replace(way, most=most[key]) for key, way in found.items()}
        self.unbounded = True
        return found


def _folds(counter: Counter) -> bool:
    """Whether a counter is large, and such that its changes add up: it is only added to, and set."""
    return counter.limit > LARGE and not counter.labels and all(change.add >= 0 for change in counter.changes)


def _best(laps: list[Lap]) -> tuple[Lap, ...]:
    """Of laps with one goal and one shift, the most of each measure, with the rows of a longest."""
    found: dict[tuple[Config | None, Shift], Lap] = {}
    for lap in laps:
        key = (lap.node, lap.shift)
        old = found.get(key)
        if old is None:
            found[key] = lap
        else:
            cost = larger(old.cost, lap.cost)
            found[key] = Lap(*key, cost, lap.rows if lap.cost[0] > old.cost[0] else old.rows)
    return tuple(found.values())
