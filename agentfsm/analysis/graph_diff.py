"""The diff of two graphs: in their rows, and in what they decide.

Two graphs with the same rows in another order are different programs. So the whole truth table is compared
too: for every combination of guard results in a state, which row each graph takes.
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
        cases: How many rows of the state's truth table this covers.
        of: How many rows the truth table has.
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
    """How a new graph differs from an old one.

    Attributes:
        states_added: States that are new.
        states_removed: States that were removed.
        states_changed: States that are declared differently (what they spend, whether they wait or end).
        added: Rows that are new, as ``id -> target``.
        removed: Rows that were removed.
        retargeted: Rows with another target: id, old target, new target.
        moved: Rows at another place in their state.
        decisions: Where the tables decide differently, by state.
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
        """Whether nothing differs."""
        return self == GraphDiff()

    @property
    def behaves_alike(self) -> bool:
        """Whether both tables make the same decisions, whatever the guards return."""
        return not (self.decisions or self.states_added or self.states_removed or self.states_changed)

    def to_dict(self) -> dict[str, Any]:
        """The diff as JSON-compatible data."""
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
        yield from (f"~ {m.row} is evaluated at place {m.new}, was at {m.old}" for m in self.moved)
        if not self.decisions:
            yield "every decision stays the same, whatever the guards return"
            return
        total = sum(d.cases for d in self.decisions)
        every = sum({d.state: d.of for d in self.decisions}.values())
        yield f"decisions that change ({total:,} of {every:,} rows of the truth tables of these states):"
        yield from (f"  {d}" for d in self.decisions)


def diff(old: Graph, new: Graph) -> GraphDiff:
    """How a graph differs from another, in its rows and in its decisions.

    Guards are compared by name; their code is not compared.

    ::

        changes = diff(LOOP, LOOP.without("post_llm.loop_detected"))
        print(changes)
        assert not changes.behaves_alike

    Args:
        old: The old graph.
        new: The new graph.
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
    """The smallest set of rows that must have moved so that the others kept their order."""
    before, after = ([t.id for t in graph.rows(state)] for graph in (old, new))
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


def _decisions(state: str, old: tuple[Transition, ...], new: tuple[Transition, ...]) -> Iterator[DecisionChange]:
    """Each pair of different rows that the two tables take for the same guard results.

    A table takes a row if the row's guard holds and none before it does. So two rows can be taken for the same
    results unless one needs a guard to hold that must not hold for the other.
    """
    order = list(dict.fromkeys(t.name for t in (*old, *new) if t.guard is not None))
    for first, holds, fails in _first_match_cases(old):
        for second, holds_too, fails_too in _first_match_cases(new):
            true, false = holds | holds_too, fails | fails_too
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
    """Each row that can be taken, with the guards that then hold and those that do not; None for no row."""
    earlier: list[str] = []
    for row in rows:
        yield row, frozenset(() if row.guard is None else (row.name,)), frozenset(earlier)
        if row.guard is None:
            return
        earlier.append(row.name)
    yield None, frozenset(), frozenset(earlier)


def _row_text(row: Transition | None) -> str:
    return "" if row is None else f"{row.name} -> {row.target}"


def graph_from_table(table: Mapping[str, Any], name: str = "") -> Graph:
    """The graph of a table as data (``graph.table``, or the one in a run's journal), with guards by name only.

    Args:
        table: ``{"states": [[name, waits, final, spends]...], "transitions": [[source, guard, target, spends]...]}``.
        name: The name of the graph; by default the table's own.

    Raises:
        ConfigurationError: The data is not a table.
        GraphError: The table breaks a rule of graphs.
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
        raise ConfigurationError(f"this is not the table of a graph: {type(error).__name__}: {error}") from error
    return Graph(states, rows, name or str(table.get("name", "graph")))


def _unknown_guard(name: str) -> Any:
    """A guard of which only the name is known."""

    def unknown(run: object) -> bool:
        raise ConfigurationError(f"the guard {name!r} is known by name only and cannot be evaluated")

    unknown.__name__ = name
    return unknown
