"""Which rows two tables take for the same guard results, and which of their rows have another place.

Every combination of guard results in a state is compared, but for those that cannot occur because the source of two
guards says that they exclude each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from agentfsm.analysis.code_comparison import DigestOnly
from agentfsm.analysis.compared_table import ComparedRow, ComparedTable
from agentfsm.analysis.exclusive_guards import Required, are_disjoint, required_values
from agentfsm.machine.declaration import Exhausted


@dataclass(frozen=True, slots=True)
class MovedRow:
    """A row whose place in its state has changed.

    Attributes:
        row: Its id.
        old: Its old place, from 1.
        new: Its new place.
    """

    row: str
    old: int
    new: int


@dataclass(frozen=True, slots=True)
class DecisionChange:
    """A combination of guard results for which the two tables take different rows.

    Attributes:
        state: The state.
        where: The guards that hold.
        unless: The guards that do not hold.
        old: The row that the old table takes, as ``guard -> target``; empty if it takes none.
        new: The row that the new table takes.
        cases: How many rows of the state's truth table this covers, of those that can occur.
        of: How many rows of the truth table can occur.
        leads_elsewhere: Whether the run goes to another state, or ends in another way.
    """

    state: str
    where: tuple[str, ...]
    unless: tuple[str, ...]
    old: str
    new: str
    cases: int
    of: int
    leads_elsewhere: bool = True

    def __str__(self) -> str:
        where = f"where {' and '.join(self.where)} hold" if self.where else "where no guard holds"
        if len(self.where) == 1:
            where += "s"
        return f"{self.state}, {where}: was {self.old or 'nothing'}, is {self.new or 'nothing'}"


def moved_rows(old: Sequence[ComparedRow], new: Sequence[ComparedRow]) -> Iterator[MovedRow]:
    """The smallest set of rows that must have moved so that the others kept their order."""
    before, after = [t.id for t in old], [t.id for t in new]
    common = [i for i in before if i in after]
    unmoved = _longest_common([i for i in after if i in before], common)
    for i in common:
        if i not in unmoved:
            yield MovedRow(i, before.index(i) + 1, after.index(i) + 1)


def _longest_common(a: list[str], b: list[str]) -> set[str]:
    """A longest common subsequence of two orders of the same ids."""
    lengths = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in range(len(a) - 1, -1, -1):
        for j in range(len(b) - 1, -1, -1):
            both = lengths[i + 1][j + 1] + 1 if a[i] == b[j] else 0
            lengths[i][j] = max(both, lengths[i + 1][j], lengths[i][j + 1])
    common: set[str] = set()
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            common.add(a[i])
            i, j = i + 1, j + 1
        elif lengths[i + 1][j] >= lengths[i][j + 1]:
            i += 1
        else:
            j += 1
    return common


def decision_changes(state: str, old: ComparedTable, new: ComparedTable) -> Iterator[DecisionChange]:
    """Each pair of different rows that the two tables take for the same guard results.

    A table takes a row if the row's guard holds and none before it does. So two rows can be taken for the same
    results unless one needs a guard to hold that must not hold for the other, or that the other excludes.
    """
    before, after = old.rows[state], new.rows[state]
    if [_decided(row) for row in before] == [_decided(row) for row in after]:
        return
    exclusive = _exclusive_names(before, after)
    order = frozenset(exclusive)
    every = _count(order, exclusive)
    for first, holds, fails in _first_match_cases(before):
        for second, holds_too, fails_too in _first_match_cases(after):
            true, false = holds | holds_too, fails | fails_too
            if true & false or _decided(first) == _decided(second) or any(exclusive[n] & true for n in true):
                continue
            excluded = frozenset[str]().union(*(exclusive[n] for n in true))
            yield DecisionChange(
                state,
                tuple(n for n in exclusive if n in true),
                tuple(n for n in exclusive if n in false),
                _row_text(first, second),
                _row_text(second, first),
                _count(order - true - false - excluded, exclusive),
                every,
                _destination(first) != _destination(second),
            )


def _first_match_cases(
    rows: Sequence[ComparedRow],
) -> Iterator[tuple[ComparedRow | None, frozenset[str], frozenset[str]]]:
    """Each row that can be taken, with the guards that then hold and those that do not; None for no row."""
    earlier: list[str] = []
    for row in rows:
        yield row, frozenset(() if row.guard is None else (row.name,)), frozenset(earlier)
        if row.guard is None:
            return
        earlier.append(row.name)
    yield None, frozenset(), frozenset(earlier)


def _exclusive_names(before: Sequence[ComparedRow], after: Sequence[ComparedRow]) -> dict[str, frozenset[str]]:
    """Each guard of a state, in order, with those that can never hold together with it."""
    rows: dict[str, list[ComparedRow]] = {}
    for row in (*before, *after):
        if row.guard is not None:
            rows.setdefault(row.name, []).append(row)
    for name, each in rows.items():  # of a guard that one table knows by name only, the other one says what it is
        rows[name] = [row for row in each if not isinstance(row.guard, DigestOnly)] or each
    required = {name: [known for row in each if (known := required_values(row.guard))] for name, each in rows.items()}
    return {
        name: frozenset(
            other
            for other, theirs in rows.items()
            if other != name
            and (
                _values_differ(required[name], required[other])
                or all(_one_needs_what_is_empty(a, b) for a in mine for b in theirs)
            )
        )
        for name, mine in rows.items()
    }


def _values_differ(mine: Sequence[Required], theirs: Sequence[Required]) -> bool:
    """Whether two guards need the same value to be equal to different constants, whichever of their versions runs."""
    return bool(mine and theirs) and all(are_disjoint(a, b) for a in mine for b in theirs)


def _one_needs_what_is_empty(a: ComparedRow, b: ComparedRow) -> bool:
    """Whether one of two rows spends a counter, and the other one holds only where that counter is empty."""
    return any(
        isinstance(empty.guard, Exhausted) and empty.guard.counter.name in spending.declared.spends
        for spending, empty in ((a, b), (b, a))
    )


def _count(names: frozenset[str], exclusive: Mapping[str, Collection[str]]) -> int:
    """How many combinations of results of some guards can occur."""

    @cache
    def count(left: frozenset[str]) -> int:
        linked = next((name for name in sorted(left) if left & frozenset(exclusive[name])), None)
        if linked is None:
            return 1 << len(left)
        return count(left - {linked}) + count(left - {linked} - frozenset(exclusive[linked]))

    return count(names)


def ranked_decisions(decisions: Iterator[DecisionChange]) -> tuple[DecisionChange, ...]:
    """The changes that lead elsewhere first."""
    return tuple(sorted(decisions, key=lambda each: not each.leads_elsewhere))


def _decided(row: ComparedRow | None) -> tuple[str, str, str] | None:
    return None if row is None else (row.name, row.target, row.ends)


def _destination(row: ComparedRow | None) -> tuple[str, str] | None:
    return None if row is None else (row.target, row.ends)


def _row_text(row: ComparedRow | None, other: ComparedRow | None) -> str:
    """A row as text, with its ending where only that tells it from another one."""
    if row is None:
        return ""
    ends = f" ({row.ends})" if other is not None and row.target == other.target and row.ends != other.ends else ""
    return f"{row.name} -> {row.target}{ends}"
