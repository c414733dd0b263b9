"""The diff of two graphs: in their rows, and in what they decide.

Two graphs with the same rows in another order are different programs. So the whole truth table is compared
too: for every combination of guard answers in a state, which row each graph takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from agentfsm.errors import ConfigurationError
from agentfsm.machine.graph import OTHERWISE, Graph, StateSpec, Transition

__all__ = ["DecisionChange", "GraphDiff", "MovedRow", "diff", "graph_from_table"]


@dataclass(frozen=True, slots=True)
class MovedRow:
    """A row that is asked at another place of its state than before.

    Attributes:
        row: Its id.
        old: Its place, from 1.
        new: Its place now.
    """

    row: str
    old: int
    new: int


@dataclass(frozen=True, slots=True)
class DecisionChange:
    """Answers of the guards on which the two tables decide differently.

    Attributes:
        state: The state.
        where: The guards that hold.
        unless: The guards that must not hold for it.
        old: The row that the old table takes, as ``guard -> target``; empty where it takes none.
        new: The row that the new table takes.
        cases: How many rows of the state's truth table this is.
        of: How many rows that has.
    """

    state: str
    where: tuple[str, ...]
    unless: tuple[str, ...]
    old: str
    new: str
    cases: int
    of: int

    def __str__(self) -> str:
        where = f"where {' and '.join(self.where)} hold" if self.where else "where no guard holds"
        if len(self.where) == 1:
            where += "s"
        return f"{self.state}, {where}: was {self.old or 'nothing'}, is {self.new or 'nothing'}"


@dataclass(frozen=True, slots=True)
class GraphDiff:
    """How a new table differs from an old one.

    Attributes:
        states_added: States that are new.
        states_removed: States that are gone.
        states_changed: States that are declared differently (what they spend, whether they wait or end).
        added: Rows that are new, as ``id -> target``.
        removed: Rows that are gone.
        retargeted: Rows that lead elsewhere: id, old target, new target.
        moved: Rows that are asked at another place.
        decisions: Where the tables decide differently, state by state.
    """

    states_added: tuple[str, ...] = ()
    states_removed: tuple[str, ...] = ()
    states_changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    retargeted: tuple[tuple[str, str, str], ...] = ()
    moved: tuple[MovedRow, ...] = ()
    decisions: tuple[DecisionChange, ...] = field(default=())

    @property
    def same(self) -> bool:
        """Whether nothing differs at all."""
        return self == GraphDiff()

    @property
    def behaves_alike(self) -> bool:
        """Whether the two tables decide alike, whatever the guards answer: nothing but order or notes differs."""
        return not (self.decisions or self.states_added or self.states_removed or self.states_changed)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON data."""
        return {"same": self.same, "behaves_alike": self.behaves_alike, **asdict(self)}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.same:
            yield "the two tables are the same"
            return
        for sign, names in (("+ state", self.states_added), ("- state", self.states_removed)):
            yield from (f"{sign} {name}" for name in names)
        yield from (f"~ state {name} is declared differently" for name in self.states_changed)
        yield from (f"+ {row}" for row in self.added)
        yield from (f"- {row}" for row in self.removed)
        yield from (f"~ {row} -> {new}, was -> {old}" for row, old, new in self.retargeted)
        yield from (f"~ {m.row} is asked at place {m.new}, was at {m.old}" for m in self.moved)
        if not self.decisions:
            yield "every decision stays the same, whatever the guards answer"
            return
        total = sum(d.cases for d in self.decisions)
        every = sum({d.state: d.of for d in self.decisions}.values())
        yield f"decisions that change ({total:,} of {every:,} rows of the truth tables of these states):"
        yield from (f"  {d}" for d in self.decisions)


def diff(old: Graph, new: Graph) -> GraphDiff:
    """How a table differs from another, in its rows and in what it decides.

    Guards are told apart by name. A guard's own code is not looked at.

    ::

        found = diff(LOOP, LOOP.without("post_llm.loop_detected"))
        print(found)
        assert not found.behaves_alike

    Args:
        old: The table as it was.
        new: The table as it is.
    """
    before, after = {s.name: s for s in old.states}, {s.name: s for s in new.states}
    common = [name for name in before if name in after]
    rows_before, rows_after = {t.id: t for t in old}, {t.id: t for t in new}
    changed = [n for n in common if _declaration(old, before[n]) != _declaration(new, after[n])]
    return GraphDiff(
        tuple(n for n in after if n not in before),
        tuple(n for n in before if n not in after),
        tuple(changed),
        tuple(str(t) for i, t in rows_after.items() if i not in rows_before),
        tuple(str(t) for i, t in rows_before.items() if i not in rows_after),
        tuple(
            (i, str(t.target), str(rows_after[i].target))
            for i, t in rows_before.items()
            if i in rows_after and rows_after[i].target != t.target
        ),
        tuple(moved for name in common for moved in _moved_rows(old, new, name)),
        tuple(each for name in common for each in _decisions(name, old.rows(name), new.rows(name))),
    )


def _declaration(graph: Graph, spec: StateSpec) -> tuple[object, ...]:
    return (spec.waits, spec.final, bool(spec.spends), graph.initial == spec.name)


def _moved_rows(old: Graph, new: Graph, state: str) -> Iterator[MovedRow]:
    """The fewest rows of which one must say that they moved, so that the others kept their order."""
    before, after = ([t.id for t in graph.rows(state)] for graph in (old, new))
    common = [i for i in before if i in after]
    kept = _longest_common([i for i in after if i in before], common)
    for i in common:
        if i not in kept:
            yield MovedRow(i, before.index(i) + 1, after.index(i) + 1)


def _longest_common(a: list[str], b: list[str]) -> set[str]:
    """A longest common subsequence of two orders of the same ids."""
    lengths = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in range(len(a) - 1, -1, -1):
        for j in range(len(b) - 1, -1, -1):
            both = lengths[i + 1][j + 1] + 1 if a[i] == b[j] else 0
            lengths[i][j] = max(both, lengths[i + 1][j], lengths[i][j + 1])
    found: set[str] = set()
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            found.add(a[i])
            i, j = i + 1, j + 1
        elif lengths[i + 1][j] >= lengths[i][j + 1]:
            i += 1
        else:
            j += 1
    return found


def _decisions(state: str, old: tuple[Transition, ...], new: tuple[Transition, ...]) -> Iterator[DecisionChange]:
    """Each pair of first rows that some answers bring about and of which the decisions differ.

    Where a row is the first to hold, its guard holds and none in front of it does; so two first rows are
    possible together unless one asks a guard to hold that the other asks not to.
    """
    order = list(dict.fromkeys(t.name for t in (*old, *new) if t.guard is not None))
    for first, holds, fails in _first_match_cases(old):
        for second, also, not_either in _first_match_cases(new):
            true, false = holds | also, fails | not_either
            if true & false or _row_text(first) == _row_text(second):
                continue
            yield DecisionChange(
                str(state),
                tuple(n for n in order if n in true),
                tuple(n for n in order if n in false),
                _row_text(first),
                _row_text(second),
                2 ** (len(order) - len(true | false)),
                2 ** len(order),
            )


def _first_match_cases(
    rows: tuple[Transition, ...],
) -> Iterator[tuple[Transition | None, frozenset[str], frozenset[str]]]:
    """Each row that can be the first to hold, with the guards that then hold and those that do not."""
    front: list[str] = []
    for row in rows:
        yield row, frozenset(() if row.guard is None else (row.name,)), frozenset(front)
        if row.guard is None:
            return
        front.append(row.name)
    yield None, frozenset(), frozenset(front)


def _row_text(row: Transition | None) -> str:
    return "" if row is None else f"{row.name} -> {row.target}"


def graph_from_table(table: Mapping[str, Any], name: str = "") -> Graph:
    """The graph of a table as data (``graph.table``, or what a run's journal pins), with guards by name only.

    Args:
        table: ``{"states": [[name, waits, final, spends]...], "transitions": [[source, guard, target, spends]...]}``.
        name: What to call it; the table's own name unless given.

    Raises:
        ConfigurationError: The data is no table.
        GraphError: The table breaks a rule.
    """
    try:
        states = tuple(StateSpec(str(n), waits=bool(w), final=bool(f), spends=str(s)) for n, w, f, s in table["states"])
        rows = tuple(
            Transition(
                str(source), None if guard == OTHERWISE else _unknown_guard(str(guard)), str(target), spends=str(spends)
            )
            for source, guard, target, spends in table["transitions"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"this is no table of a graph: {type(error).__name__}: {error}") from error
    return Graph(states, rows, name or str(table.get("name", "graph")))


def _unknown_guard(name: str) -> Any:
    """A guard of which nothing but the name is known."""

    def unknown(run: object) -> bool:
        raise ConfigurationError(f"the guard {name!r} is known by name only, and cannot be asked")

    unknown.__name__ = name
    return unknown
