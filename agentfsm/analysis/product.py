"""A table and its facts as one finite graph: every configuration of state and counters, and its moves.

It may be built over some of the counters only. What it then does not know it leaves free, so it has every
run of the whole and perhaps more: what never happens in it never happens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from agentfsm.analysis.facts import Change, Condition, Facts, Known, condition
from agentfsm.machine.graph import Graph, Transition

__all__ = ["Config", "Move", "Product", "Row"]

Config = tuple[int, ...]
"""The place of a state among the graph's states, then the value of each counter."""

Move = tuple[int, Config]
"""The place of a row among the graph's transitions, and the configuration to which it leads."""

_OPS: Mapping[str, Callable[[int, int], bool]] = MappingProxyType(
    {
        "==": operator.eq,
        "!=": operator.ne,
        "<": operator.lt,
        "<=": operator.le,
        ">": operator.gt,
        ">=": operator.ge,
    }
)

_Check = Callable[[Config], bool]
_Update = tuple[int, tuple[int, ...], _Check, bool]
"""What is added; or the values to one of which it is set; where; and whether that is known for certain."""


class Row:
    """One row, compiled.

    Attributes:
        place: Its place among the graph's transitions.
        transition: The row itself.
        may: Whether it can be taken in a configuration, as far as its own guard goes.
        must: Whether its guard certainly holds there.
        known: What was declared of its guard.
        reads: The counters that its guard depends on, by name.
        ties: How many facts speak of it; of rows that do the same, the one with the fewest is the freest.
    """

    def __init__(self, product: Product, place: int, transition: Transition, known: tuple[Known, ...]) -> None:
        self.place = place
        self.transition = transition
        self.known = known
        self.target = product.index[transition.target]
        mays = [condition(k.may) for k in known]
        musts = [condition(k.must) for k in known]
        self.reads = {test.counter for each in (*mays, *musts) for tests in each for test in tests}
        self._mays = tuple(product.check(product.weaker(each)) for each in mays)
        self._each = dict(zip(known, self._mays, strict=True))
        self._musts = tuple(product.check(product.stronger(each)) for each in musts)
        self.always = transition.guard is None
        changed = sum(any(c.fits(transition) for c in counter.changes) for counter in product.facts.counters)
        self.ties = changed + len(known)
        self.updates = tuple(product.updates(transition))

    def may(self, config: Config) -> bool:
        """Whether it can be taken, as far as its own guard goes."""
        return all(check(config) for check in self._mays)

    def allows(self, known: Known, config: Config) -> bool:
        """Whether one of the things that are known of its guard lets it hold."""
        return self._each[known](config)

    def must(self, config: Config) -> bool:
        """Whether its guard certainly holds."""
        return self.always or any(check(config) for check in self._musts)


class Product:
    """The finite graph of a table under its facts.

    Args:
        graph: The table.
        facts: What is known of it.
        use: The names of the counters to follow; all of them by default.

    Raises:
        ConfigurationError: The facts speak of a counter or a label that is not declared.

    Attributes:
        start: The configuration in which a run starts.
        names: The counters that it follows, in the order of a configuration.
        index: The place of each state.
        rows: The compiled rows of each state, by its place, in order.
        ties: How many facts speak of each row, by its place.
        waits: The places of the states that wait.
        finals: The places of the final states.
    """

    def __init__(self, graph: Graph, facts: Facts, use: Iterable[str] | None = None) -> None:
        facts.check()
        self.graph = graph
        self.facts = facts
        followed = {c.name for c in facts.counters} if use is None else set(use)
        self.counters = tuple(c for c in facts.counters if c.name in followed)
        self.names = tuple(c.name for c in self.counters)
        self._slot = {name: i for i, name in enumerate(self.names, 1)}
        self.index = {spec.name: i for i, spec in enumerate(graph.states)}
        self.waits = frozenset(i for i, spec in enumerate(graph.states) if spec.waits)
        self.finals = frozenset(i for i, spec in enumerate(graph.states) if spec.final)
        places = {id(t): i for i, t in enumerate(graph.transitions)}
        self.rows = tuple(
            tuple(
                Row(self, places[id(t)], t, tuple(k for k in facts.known if k.about(t))) for t in graph.rows(spec.name)
            )
            for spec in graph.states
        )
        self.ties = {row.place: row.ties for rows in self.rows for row in rows}
        self.start: Config = (0, *(c.start for c in self.counters))
        self._moves: dict[Config, tuple[Move, ...]] = {}

    # -- reading what is declared ---------------------------------------------------------------------

    def weaker(self, given: Condition) -> Condition:
        """A condition without the counters that are not followed: it holds wherever the given one may."""
        return tuple(tuple(t for t in tests if t.counter in self._slot) for tests in given)

    def stronger(self, given: Condition) -> Condition:
        """A condition without the counters that are not followed: it holds only where the given one must."""
        return tuple(tests for tests in given if all(t.counter in self._slot for t in tests))

    def check(self, given: Condition) -> _Check:
        """A condition as a function of a configuration."""
        if any(not tests for tests in given):
            return _yes
        compiled = tuple(
            tuple((self._slot[t.counter], _OPS[t.op], self.facts.counter(t.counter).value(t.value)) for t in tests)
            for tests in given
        )
        if not compiled:
            return _no
        if len(compiled) == 1 and len(compiled[0]) == 1:
            slot, compare, value = compiled[0][0]
            return lambda config: compare(config[slot], value)
        return lambda config: any(
            all(compare(config[slot], value) for slot, compare, value in tests) for tests in compiled
        )

    def updates(self, transition: Transition) -> Iterable[tuple[int, int, tuple[_Update, ...]]]:
        """For each followed counter that a row may change: its slot, its limit, and the changes in order."""
        for counter in self.counters:
            fitting: list[_Update] = []
            for change in counter.changes:
                if not change.fits(transition):
                    continue
                fitting.append(self._update(change, tuple(counter.value(v) for v in change.to)))
                if change.when == "always":
                    break
            if any(to or add for add, to, _, _ in fitting):
                yield self._slot[counter.name], counter.limit, tuple(fitting)

    def _update(self, change: Change, to: tuple[int, ...]) -> _Update:
        when = condition(change.when)
        return change.add, to, self.check(self.weaker(when)), self.stronger(when) == when

    # -- moving ---------------------------------------------------------------------------------------

    def moves(self, config: Config) -> tuple[Move, ...]:
        """Every move out of a configuration, in the order of the table."""
        found = self._moves.get(config)
        if found is None:
            found = self._moves[config] = tuple(self._find(config))
        return found

    def _find(self, config: Config) -> Iterable[Move]:
        for row in self.rows[config[0]]:
            if row.may(config):
                for after in self.after(row, config):
                    yield row.place, after
            if row.must(config):
                return

    def after(self, row: Row, config: Config) -> list[Config]:
        """The configurations to which a row leads, whether or not its guard can hold there."""
        results = [(row.target, *config[1:])]
        for slot, limit, changes in row.updates:
            values = _changed(config, slot, limit, changes)
            results = [(*r[:slot], value, *r[slot + 1 :]) for value in values for r in results]
        return results

    def text(self, config: Config) -> str:
        """A configuration as people read it."""
        values = ", ".join(f"{c.name}={c.text(v)}" for c, v in zip(self.counters, config[1:], strict=True))
        return self.graph.states[config[0]].name + (f" ({values})" if values else "")


def _changed(config: Config, slot: int, limit: int, changes: tuple[_Update, ...]) -> tuple[int, ...]:
    """The values that a counter may have after a row."""
    old = config[slot]
    values: dict[int, None] = {}
    for add, to, when, certain in changes:
        if when(config):
            for value in to or (min(limit, max(0, old + add)),):
                values[value] = None
            if certain:
                return tuple(values)
    values[old] = None
    return tuple(values)


def _yes(config: Config) -> bool:
    return True


def _no(config: Config) -> bool:
    return False
