"""What an analysis assumes about a graph's guards, as data: counters, their updates, and guard conditions.

A guard without assumptions is *free*: it can hold or not at any time. For a guard that depends on counters, a
``GuardAssumption`` says where it *may* hold and where it *must*. A free guard can make an analysis report a run
that cannot happen, but never miss one that can.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from agentfsm.errors import ConfigurationError
from agentfsm.machine.graph import Graph, Guard, Transition


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison of a counter with a number, or with one of the counter's labels."""

    counter: str
    op: str
    value: int | str

    def __str__(self) -> str:
        return f"{self.counter} {self.op} {self.value}"


Condition = tuple[tuple[Comparison, ...], ...]
"""Alternatives, each a conjunction of comparisons."""

NumericCondition = tuple[tuple[tuple[str, str, int], ...], ...]
"""A condition as plain data: alternatives, each a conjunction of (counter, operator, number)."""

CounterUpdate = tuple[str, int, tuple[tuple[NumericCondition, int, tuple[int, ...]], ...]]
"""A counter, its largest value, and its cases: the first whose condition holds applies.

A case is a condition, a number to add, and the values to one of which the counter is set instead (or none).
"""

ALWAYS: Condition = ((),)
NEVER: Condition = ()

_COMPARISON = re.compile(r"\s*([^\W\d]\w*)\s*(==|!=|<=|>=|<|>)\s*(\w+)\s*")


@cache
def parse_condition(text: str) -> Condition:
    """Read a condition: ``"steps > 200"``, ``"a == 1 and b < 3 or c != off"``, ``"always"``, ``"never"``.

    Raises:
        ConfigurationError: The text is not a condition.
    """
    if text == "always":
        return ALWAYS
    if text == "never":
        return NEVER
    return tuple(tuple(_parse_comparison(part, text) for part in each.split(" and ")) for each in text.split(" or "))


def _parse_comparison(part: str, text: str) -> Comparison:
    match = _COMPARISON.fullmatch(part)
    if match is None:
        raise ConfigurationError(f"{text!r} is not a condition: write it as 'steps > 200 and calls == 0'")
    counter, op, value = match.groups()
    return Comparison(counter, op, int(value) if value.isdigit() else value)


def comparisons(text: str) -> Iterator[Comparison]:
    """Every comparison in the text of a condition."""
    return (test for tests in parse_condition(text) for test in tests)


@dataclass(frozen=True, slots=True)
class Update:
    """What taking a row does to a counter.

    Attributes:
        on: The rows, as a pattern: ``"call_llm.otherwise"``, ``"call_llm.*"``, ``"* -> pre_step"``.
        add: What is added. A counter stays between 0 and its limit.
        to: Instead of that, the values to one of which it is set (labels or numbers).
        when: A condition on the counters before the row is taken.
    """

    on: str
    add: int = 0
    to: tuple[int | str, ...] = ()
    when: str = "always"

    @classmethod
    def of(cls, row: Transition, add: int = 0, *, to: tuple[int | str, ...] = (), when: str = "always") -> Update:
        """An update of one row."""
        return cls(str(row), add, to, when)

    def applies_to(self, row: Transition) -> bool:
        """Whether it applies to a row."""
        text = str(row)
        if self.on == text or ("->" in self.on and "*" not in self.on):
            return self.on == text
        return _row_pattern(self.on).fullmatch(text) is not None


@cache
def _row_pattern(on: str) -> re.Pattern[str]:
    pattern = on if "->" in on else f"{on} -> *"
    return re.compile(re.escape(pattern).replace(r"\*", ".*").replace(r"\ ", " "))


@dataclass(frozen=True, slots=True)
class Variable:
    """A bounded number, or one of several labels, that is part of the state of a run.

    Attributes:
        name: Its name.
        limit: Its largest value, at which it saturates. Choose it so large that no condition compares beyond it.
        updates: What changes it. For a row, the first update that applies and whose condition holds is used.
        start: Its value when a run starts.
        labels: Names for its values, if it is not a number; ``limit`` is then one less than their number.
        budget: Whether the bounds on the length of a run depend on it.
        accelerated: Whether the computation of bounds may accelerate it, if it is large. That helps where few states
            read it, and not where it is set again and again.
        lower_bound: Whether the real value may be larger, because something besides the rows changes it.

    Raises:
        ConfigurationError: ``start`` is not between 0 and the limit.
    """

    name: str
    limit: int = 1
    updates: tuple[Update, ...] = ()
    start: int = 0
    labels: tuple[str, ...] = ()
    budget: bool = True
    accelerated: bool = True
    lower_bound: bool = False
    _exact: bool = field(init=False, repr=False, compare=False, default=True)
    _by_row: dict[str, list[Update]] = field(
        init=False, repr=False, compare=False, default_factory=dict[str, list[Update]]
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "_exact", not any("*" in u.on or "->" not in u.on for u in self.updates))
        for update in self.updates:
            self._by_row.setdefault(update.on, []).append(update)
        if self.labels:
            object.__setattr__(self, "limit", len(self.labels) - 1)
        if not 0 <= self.start <= self.limit:
            raise ConfigurationError(f"counter {self.name!r} starts at {self.start}, outside 0 to {self.limit}")

    def updates_for(self, row: Transition) -> Sequence[Update]:
        """Its updates that apply to a row, in order."""
        if not self._exact:
            return [u for u in self.updates if u.applies_to(row)]
        return self._by_row.get(str(row), ())

    def updates_by_row(self, rows: Mapping[str, Transition]) -> Iterator[tuple[str, Sequence[Update]]]:
        """The updates of each row that has any, with the text of the row.

        Args:
            rows: The rows of a graph, by their texts.
        """
        if self._exact:
            yield from ((text, updates) for text, updates in self._by_row.items() if text in rows)
            return
        for text, row in rows.items():
            if updates := self.updates_for(row):
                yield text, updates

    def value(self, value: int | str) -> int:
        """A value or a label as a number.

        Raises:
            ConfigurationError: The counter has no such label.
        """
        if isinstance(value, int):
            return value
        if value not in self.labels:
            raise ConfigurationError(f"counter {self.name!r} has no value {value!r}")
        return self.labels.index(value)

    def describe(self, value: int) -> str:
        """A value as text: its label, or the number."""
        return self.labels[value] if self.labels else str(value)


@dataclass(frozen=True, slots=True)
class GuardAssumption:
    """When a guard may hold, and when it must.

    Attributes:
        guard: The guard function; or the name of guards (``"runaway"``); or the id of one row
            (``"post_llm.otherwise"``), which can then be taken only where ``may`` holds.
        may: The guard holds only where this condition holds.
        must: The guard holds wherever this condition holds.
        why: The reason, reported for rows and paths that it rules out.
        enforced: Whether the engine or a guardrail enforces it, so that no verdict needs to mention it.
    """

    guard: Guard | str
    may: str = "always"
    must: str = "never"
    why: str = ""
    enforced: bool = False

    @property
    def text(self) -> str:
        """The assumption in words: its guard and the reason, or its conditions."""
        name = self.guard if isinstance(self.guard, str) else str(getattr(self.guard, "__name__", self.guard))
        if self.why:
            return f"{name}: {self.why}"
        may, must = f"may hold where {self.may}", f"must hold where {self.must}"
        return f"{name} " + (must if self.may == "always" else may if self.must == "never" else f"{may}, {must}")

    def applies_to(self, row: Transition) -> bool:
        """Whether it applies to a row."""
        if isinstance(self.guard, str):
            return self.guard in (row.name, row.id)
        return row.guard is self.guard


def iff(guard: Guard | str, when: str, why: str = "", *, enforced: bool = False) -> GuardAssumption:
    """The assumption that a guard holds exactly where a condition does."""
    return GuardAssumption(guard, may=when, must=when, why=why, enforced=enforced)


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Assumptions about a graph; add two with ``+``.

    Attributes:
        counters: Its counters.
        guards: Assumptions about its guards.

    Raises:
        ConfigurationError: A counter is declared twice.
    """

    counters: tuple[Variable, ...] = ()
    guards: tuple[GuardAssumption, ...] = ()
    _by_name: dict[str, Variable] = field(init=False, repr=False, compare=False, default_factory=dict[str, Variable])

    def __post_init__(self) -> None:
        for counter in self.counters:
            if counter.name in self._by_name:
                raise ConfigurationError(f"counter {counter.name!r} is declared twice")
            self._by_name[counter.name] = counter

    def check(self) -> None:
        """Check that every counter and label in a condition or update is declared.

        Raises:
            ConfigurationError: One is not declared.
        """
        texts = [text for k in self.guards for text in (k.may, k.must)]
        texts += [change.when for counter in self.counters for change in counter.updates]
        for test in (test for text in texts for each in parse_condition(text) for test in each):
            self.counter(test.counter).value(test.value)
        for counter in self.counters:
            for value in (value for change in counter.updates for value in change.to):
                counter.value(value)

    def counter(self, name: str) -> Variable:
        """The counter with a name.

        Raises:
            ConfigurationError: There is none.
        """
        if name not in self._by_name:
            raise ConfigurationError(f"there is no counter {name!r}: declare it with Variable({name!r}, ...)")
        return self._by_name[name]

    def guards_by_row(self, graph: Graph) -> dict[str, tuple[GuardAssumption, ...]]:
        """What is assumed about the guard of each row, by the row's id."""
        by_id: dict[str, list[int]] = {}
        others: list[int] = []
        ids = {row.id for row in graph}
        for place, each in enumerate(self.guards):
            if isinstance(each.guard, str) and each.guard in ids:
                by_id.setdefault(each.guard, []).append(place)
            else:
                others.append(place)
        found: dict[str, tuple[GuardAssumption, ...]] = {}
        for row in graph:
            places = by_id.get(row.id, []) + [n for n in others if self.guards[n].applies_to(row)]
            found[row.id] = tuple(self.guards[n] for n in sorted(places))
        return found

    def relevant(self) -> Assumptions:
        """The same without the variables on which no guard depends."""
        read = {test.counter for k in self.guards for text in (k.may, k.must) for test in comparisons(text)}
        while more := self._read_by_updates(read) - read:
            read |= more
        return Assumptions(tuple(v for v in self.counters if v.name in read), self.guards)

    def _read_by_updates(self, names: Container[str]) -> set[str]:
        updates = [update for variable in self.counters if variable.name in names for update in variable.updates]
        return {test.counter for update in updates for test in comparisons(update.when)}

    # -- as plain data, for exports (``agentfsm.diagrams.promela``) ---------------------------------------

    def initial_values(self) -> dict[str, int]:
        """The value of each counter when a run starts."""
        return {counter.name: counter.start for counter in self.counters}

    def may_conditions(self, row: Transition) -> list[NumericCondition]:
        """Conditions that must all hold for a row's guard to be able to hold."""
        return [self._numeric(k.may) for k in self.guards if k.may != "always" and k.applies_to(row)]

    def must_conditions(self, row: Transition) -> list[NumericCondition]:
        """Conditions of which each makes a row's guard hold."""
        return [self._numeric(k.must) for k in self.guards if k.must != "never" and k.applies_to(row)]

    def counter_updates(self, row: Transition) -> list[CounterUpdate]:
        """What taking a row does: for each counter its name, limit, and cases of (condition, add, values to set)."""
        changed = ((counter, counter.updates_for(row)) for counter in self.counters)
        return [
            (
                counter.name,
                counter.limit,
                tuple((self._numeric(u.when), u.add, tuple(counter.value(v) for v in u.to)) for u in updates),
            )
            for counter, updates in changed
            if any(u.add or u.to for u in updates)
        ]

    def forgotten(self, row: Transition) -> Mapping[str, NumericCondition]:
        """Nothing: every value is kept."""
        return {}

    def _numeric(self, text: str) -> NumericCondition:
        return tuple(
            tuple((t.counter, t.op, self.counter(t.counter).value(t.value)) for t in tests)
            for tests in parse_condition(text)
        )

    def __add__(self, other: Assumptions) -> Assumptions:
        return Assumptions((*self.counters, *other.counters), (*self.guards, *other.guards))
