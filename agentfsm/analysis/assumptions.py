"""What an analysis assumes about a graph's guards, as data: counters, their updates, and guard conditions.

A guard without assumptions is *free*: it may hold or not at any time. A guard that depends on counters is
declared with ``GuardAssumption``: where it *may* hold, and where it *must*. A free guard can make an
analysis report a run that cannot happen, but never miss one that can.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache

from agentfsm.errors import ConfigurationError
from agentfsm.machine.graph import Guard, Transition

__all__ = [
    "ALWAYS",
    "NEVER",
    "Assumptions",
    "Comparison",
    "Condition",
    "Counter",
    "GuardAssumption",
    "NumericCondition",
    "Update",
    "iff",
    "parse_condition",
]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison of a counter with a number, or with one of the counter's labels."""

    counter: str
    op: str
    value: int | str

    __test__ = False  # no test class, whatever pytest thinks of its name

    def __str__(self) -> str:
        return f"{self.counter} {self.op} {self.value}"


Condition = tuple[tuple[Comparison, ...], ...]
"""Alternatives, each of them comparisons that must all hold."""

NumericCondition = tuple[tuple[tuple[str, str, int], ...], ...]
"""A condition as plain data: alternatives, each a conjunction of (counter, operator, number)."""

ALWAYS: Condition = ((),)
NEVER: Condition = ()

_COMPARISON = re.compile(r"\s*([A-Za-z_]\w*)\s*(==|!=|<=|>=|<|>)\s*(\w+)\s*")


@cache
def parse_condition(text: str) -> Condition:
    """Read a condition: ``"steps > 200"``, ``"a == 1 and b < 3 or c != off"``, ``"always"``, ``"never"``.

    Raises:
        ConfigurationError: The text is no condition.
    """
    if text == "always":
        return ALWAYS
    if text == "never":
        return NEVER
    return tuple(tuple(_parse_comparison(part, text) for part in each.split(" and ")) for each in text.split(" or "))


def _parse_comparison(part: str, text: str) -> Comparison:
    found = _COMPARISON.fullmatch(part)
    if found is None:
        raise ConfigurationError(f"{text!r} is no condition: write it as 'steps > 200 and calls == 0'")
    counter, op, value = found.groups()
    return Comparison(counter, op, int(value) if value.isdigit() else value)


@dataclass(frozen=True, slots=True)
class Update:
    """What taking a row does to a counter.

    Attributes:
        on: The rows, as a pattern: ``"call_llm.otherwise"``, ``"call_llm.*"``, ``"* -> pre_step"``.
        add: What is added; a counter never goes below 0 nor above its limit.
        to: In place of that, the values to one of which it is set (labels or numbers).
        when: A condition on the counters before the row is taken.
    """

    on: str
    add: int = 0
    to: tuple[int | str, ...] = ()
    when: str = "always"

    def applies_to(self, row: Transition) -> bool:
        """Whether it is about a row."""
        return _row_pattern(self.on).fullmatch(str(row)) is not None


@cache
def _row_pattern(on: str) -> re.Pattern[str]:
    whole = on if "->" in on else f"{on} -> *"
    return re.compile(re.escape(whole).replace(r"\*", ".*").replace(r"\ ", " "))


@dataclass(frozen=True, slots=True)
class Counter:
    """A bounded number, or one of a few labels, that a run carries along.

    Attributes:
        name: Its name.
        limit: Its largest value; it stays there. Choose it so large that nothing asks beyond it.
        updates: What changes it; for one row, the first that fits counts, and the others do not.
        start: Its value when a run starts.
        labels: Names for its values, for one that is no number; ``limit`` is then one less than these.
        budget: Whether the bounds on the length of a run depend on it.
    """

    name: str
    limit: int = 1
    updates: tuple[Update, ...] = ()
    start: int = 0
    labels: tuple[str, ...] = ()
    budget: bool = True

    def __post_init__(self) -> None:
        if self.labels:
            object.__setattr__(self, "limit", len(self.labels) - 1)
        if not 0 <= self.start <= self.limit:
            raise ConfigurationError(f"counter {self.name!r} starts at {self.start}, outside 0 to {self.limit}")

    def value(self, given: int | str) -> int:
        """A value or a label as a number.

        Raises:
            ConfigurationError: The counter has no such label.
        """
        if isinstance(given, int):
            return given
        if given not in self.labels:
            raise ConfigurationError(f"counter {self.name!r} has no value {given!r}")
        return self.labels.index(given)

    def describe(self, value: int) -> str:
        """A value as people read it."""
        return self.labels[value] if self.labels else str(value)


@dataclass(frozen=True, slots=True)
class GuardAssumption:
    """What is known of a guard: where it may hold, and where it must.

    Attributes:
        guard: The guard: the function itself; or a name (``"runaway"``), or the id of one row
            (``"post_llm.otherwise"``), which then may be taken only there.
        may: It holds only where this holds.
        must: It holds wherever this holds.
        why: The reason, for people who ask why a path is impossible.
    """

    guard: Guard | str
    may: str = "always"
    must: str = "never"
    why: str = ""

    def applies_to(self, row: Transition) -> bool:
        """Whether it is about a row."""
        if isinstance(self.guard, str):
            return self.guard in (row.name, row.id)
        return row.guard is self.guard


def iff(guard: Guard | str, when: str, why: str = "") -> GuardAssumption:
    """A guard that holds where a condition does, and nowhere else."""
    return GuardAssumption(guard, may=when, must=when, why=why)


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Everything that is known of a table: its counters and its guards.

    Raises:
        ConfigurationError: A counter is declared twice.
    """

    counters: tuple[Counter, ...] = ()
    guards: tuple[GuardAssumption, ...] = ()
    _by_name: dict[str, Counter] = field(init=False, repr=False, compare=False, default_factory=dict[str, Counter])

    def __post_init__(self) -> None:
        for counter in self.counters:
            if counter.name in self._by_name:
                raise ConfigurationError(f"counter {counter.name!r} is declared twice")
            self._by_name[counter.name] = counter

    def check(self) -> None:
        """Make sure that every counter and label that is spoken of is declared.

        Raises:
            ConfigurationError: One is not.
        """
        texts = [text for k in self.guards for text in (k.may, k.must)]
        texts += [change.when for counter in self.counters for change in counter.updates]
        for test in (test for text in texts for each in parse_condition(text) for test in each):
            self.counter(test.counter).value(test.value)
        for counter in self.counters:
            for value in (value for change in counter.updates for value in change.to):
                counter.value(value)

    def counter(self, name: str) -> Counter:
        """The counter of a name.

        Raises:
            ConfigurationError: There is none.
        """
        if name not in self._by_name:
            raise ConfigurationError(f"there is no counter {name!r}: declare it with Counter({name!r}, ...)")
        return self._by_name[name]

    # -- as plain data, for exports (``agentfsm.diagrams.promela.CounterModel``) ---------------------------

    def initial_values(self) -> dict[str, int]:
        """The value of each counter when a run starts."""
        return {counter.name: counter.start for counter in self.counters}

    def may_conditions(self, row: Transition) -> list[NumericCondition]:
        """Conditions that must all hold for a row's guard to be able to hold."""
        return [self._numeric(k.may) for k in self.guards if k.may != "always" and k.applies_to(row)]

    def must_conditions(self, row: Transition) -> list[NumericCondition]:
        """Conditions of which each makes a row's guard hold."""
        return [self._numeric(k.must) for k in self.guards if k.must != "never" and k.applies_to(row)]

    def counter_updates(
        self, row: Transition
    ) -> list[tuple[str, int, tuple[tuple[NumericCondition, int, tuple[int, ...]], ...]]]:
        """What taking a row does: for each counter its name, limit, and cases of (condition, add, values to set)."""
        changed = ((counter, [u for u in counter.updates if u.applies_to(row)]) for counter in self.counters)
        return [
            (
                counter.name,
                counter.limit,
                tuple((self._numeric(u.when), u.add, tuple(counter.value(v) for v in u.to)) for u in updates),
            )
            for counter, updates in changed
            if any(u.add or u.to for u in updates)
        ]

    def _numeric(self, text: str) -> NumericCondition:
        return tuple(
            tuple((t.counter, t.op, self.counter(t.counter).value(t.value)) for t in tests)
            for tests in parse_condition(text)
        )

    def __add__(self, other: Assumptions) -> Assumptions:
        return Assumptions((*self.counters, *other.counters), (*self.guards, *other.guards))
