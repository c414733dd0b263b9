"""The rows and states of two graphs side by side: what they declare differently, and which of them have a new name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, cast

from agentfsm.analysis.code_comparison import DigestOnly, code_key, same_code
from agentfsm.machine.declaration import Exhausted
from agentfsm.machine.graph import Graph, Guard, StateSpec, Transition


@dataclass(frozen=True, slots=True)
class DeclarationChange:
    """Something that is declared differently about a state, a row or a counter.

    Attributes:
        name: The state, the id of the row, or the counter.
        what: What is declared: ``waits``, ``spends``, ``ends``, ``limit``...
        old: The old value as text; empty for none.
        new: The new value as text.
    """

    name: str
    what: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what} {self.new or 'nothing'}, was {self.old or 'nothing'}"


class ComparedRow(NamedTuple):
    """A row, whose guard may go by another name than that of its function."""

    source: str
    name: str
    target: str
    declared: Transition

    @property
    def id(self) -> str:
        """Its id: the state and the name of its guard."""
        return f"{self.source}.{self.name}"

    @property
    def guard(self) -> Guard | None:
        """Its guard, or None."""
        return self.declared.guard

    @property
    def ends(self) -> str:
        """How it ends the run, or an empty string."""
        return self.declared.ends

    def __str__(self) -> str:
        return f"{self.id} -> {self.target}"


class ComparedTable(NamedTuple):
    """A graph whose states and guards may go by other names than their own."""

    states: Mapping[str, StateSpec]
    rows: Mapping[str, Sequence[ComparedRow]]
    initial: str
    counters: Mapping[str, object]


def compared_table(graph: Graph) -> ComparedTable:
    """The table of a graph under its own names."""
    return ComparedTable(
        {str(s.name): s for s in graph.states},
        {
            str(s.name): [ComparedRow(str(t.source), t.name, str(t.target), t) for t in graph.rows(s.name)]
            for s in graph.states
        },
        str(graph.initial),
        {c.name: c.limit for c in graph.counters},
    )


def rows_by_id(table: ComparedTable) -> dict[str, ComparedRow]:
    """All rows of a table by their ids."""
    return {row.id: row for rows in table.rows.values() for row in rows}


def with_states(table: ComparedTable, names: Mapping[str, str]) -> ComparedTable:
    """A table in which some states have other names."""

    def new(name: str) -> str:
        return names.get(name, name)

    return table._replace(
        states={new(name): spec for name, spec in table.states.items()},
        rows={
            new(name): [row._replace(source=new(row.source), target=new(row.target)) for row in rows]
            for name, rows in table.rows.items()
        },
        initial=new(table.initial),
    )


def with_guards(table: ComparedTable, names: Mapping[str, str]) -> ComparedTable:
    """A table in which some guards have other names."""
    rows = {n: [row._replace(name=names.get(row.name, row.name)) for row in rows] for n, rows in table.rows.items()}
    return table._replace(rows=rows)


def renamed_states(old: ComparedTable, new: ComparedTable) -> dict[str, str]:
    """States that have a new name, and the same declaration, the same effect and the same rows in and out."""
    gone = [name for name in old.states if name not in new.states]
    come = [name for name in new.states if name not in old.states]
    names: dict[str, str] = {}
    for name in gone:
        alike = [n for n in come if n not in names.values() and _similar_states(old, name, new, n)]
        if alike:
            names[name] = alike[0]
    while names:  # with all these names in place, what was similar must be equal
        renamed = with_states(old, names)
        wrong = [name for name, other in names.items() if not _equal_states(renamed, new, other)]
        if not wrong:
            break
        names = {name: other for name, other in names.items() if name not in wrong}
    return names


def _similar_states(old: ComparedTable, name: str, new: ComparedTable, other: str) -> bool:
    """Whether two states may be one, before it is known which names are new."""
    if not _same_declaration(old.states[name], new.states[other]):
        return False
    pairs = zip(old.rows[name], new.rows[other], strict=False)
    return len(old.rows[name]) == len(new.rows[other]) and all(
        (a.target == b.target or a.target not in new.states) and _same_row(a, b) for a, b in pairs
    )


def _equal_states(old: ComparedTable, new: ComparedTable, name: str) -> bool:
    """Whether the rows of a state lead to the same states in both tables, and rows of one other state lead to it."""
    targets = [[row.target for row in table.rows[name]] for table in (old, new)]
    sources = [{r.source for rows in table.rows.values() for r in rows if r.target == name} for table in (old, new)]
    return targets[0] == targets[1] and (not sources[0] or bool(sources[0] & sources[1]))


def _same_row(a: ComparedRow, b: ComparedRow) -> bool:
    return (a.name == b.name or same_guard(a, b) is True) and not list(declaration_changes("", a.declared, b.declared))


def _same_declaration(a: StateSpec, b: StateSpec) -> bool:
    return not list(declaration_changes("", a, b)) and same_effect(a.effect, b.effect) is not False


def renamed_guards(old: ComparedTable, new: ComparedTable) -> dict[str, str]:
    """Guards that have a new name and the same code; of several that do the same, those with the same rows first."""
    gone, come = _rows_by_guard(old, new), _rows_by_guard(new, old)
    if not (gone and come):
        return {}
    sources = any(isinstance(rows[0].guard, DigestOnly) for rows in (*gone.values(), *come.values()))
    keys = {name: code_key(rows[0].guard, sources=sources) for name, rows in {**gone, **come}.items()}
    names: dict[str, str] = {}
    for same_place in (True, False):
        for name, rows in gone.items():
            alike = [
                other
                for other, others in come.items()
                if keys[name] == keys[other] != ""
                and other not in names.values()
                and (not same_place or _places(rows) == _places(others))
            ]
            if name not in names and (len(alike) == 1 or (alike and same_place)):
                names[name] = alike[0]
    return names


def _rows_by_guard(table: ComparedTable, other: ComparedTable) -> dict[str, list[ComparedRow]]:
    """The rows of each guard whose name the other table does not have."""
    known = {row.name for rows in other.rows.values() for row in rows}
    found: dict[str, list[ComparedRow]] = {}
    for rows in table.rows.values():
        for row in rows:
            if row.guard is not None and row.name not in known:
                found.setdefault(row.name, []).append(row)
    return found


def _places(rows: Sequence[ComparedRow]) -> list[tuple[str, str]]:
    return sorted((row.source, row.target) for row in rows)


_COMPARED_OTHERWISE = frozenset({"name", "note", "lane", "effect", "source", "guard", "target"})
"""Fields that are compared by other means, or that only a picture shows."""


def declaration_changes(
    name: str, old: StateSpec | Transition, new: StateSpec | Transition
) -> Iterator[DeclarationChange]:
    """What two states or rows declare differently."""
    for each in fields(old):
        if each.name not in _COMPARED_OTHERWISE and not (each.name == "outcomes" and _is_unknown(old, new)):
            values = _text(getattr(old, each.name)), _text(getattr(new, each.name))
            if values[0] != values[1]:
                yield DeclarationChange(name, each.name, *values)


def _is_unknown(*declared: StateSpec | Transition) -> bool:
    """Whether of the effect of one of these states only the name is known: a table does not say its outcomes either."""
    effects = [getattr(each, "effect", None) for each in declared]
    return any(isinstance(effect, DigestOnly) and not effect.digest for effect in effects)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " and ".join(sorted(map(str, cast("tuple[object, ...]", value))))
    return str(value)


def counter_changes(old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[DeclarationChange]:
    """What two tables declare differently about counters."""
    for name in {**old, **new}:
        limits = str(old.get(name, "")), str(new.get(name, ""))
        if limits[0] != limits[1]:
            yield DeclarationChange(name, "limit", *limits)


def same_guard(old: ComparedRow, new: ComparedRow) -> bool | None:
    """Whether two rows have the same guard; None if its code is not known."""
    if old.guard is None or new.guard is None:
        return old.guard is new.guard
    if isinstance(old.guard, Exhausted) and isinstance(new.guard, Exhausted):  # a counter's limit is compared with it
        a, b = old.guard, new.guard
        return (a.counter.name, a.past) == (b.counter.name, b.past) and same_code(_described(a), _described(b))
    return same_code(old.guard, new.guard)


def _described(guard: Exhausted) -> object:
    return getattr(guard, "__wrapped__", None)


def same_effect(old: object, new: object) -> bool | None:
    """Whether two effects are the same; None if their code is not known."""
    if old is None or new is None or not (callable(old) and callable(new)):
        return old == new
    return same_code(old, new)
