"""The diff of two graphs: in what they declare, in the code of guards and effects, and in what they decide.

Two graphs with the same rows in another order are different programs. So the whole truth table is compared
too: for every combination of guard results in a state, which row each graph takes. Combinations that cannot occur,
because the source of two guards says that they exclude each other, do not count.

A state or a guard with a new name is recognized by its rows and its code, and is one change. The rest is compared
under the new names.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, cast

from agentfsm.analysis.code_comparison import DigestOnly, code_digest, code_key, same_code
from agentfsm.analysis.exclusive_guards import Required, required_values
from agentfsm.errors import ConfigurationError
from agentfsm.loop.stored_table import read_table
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.declaration import Counter, Exhausted
from agentfsm.machine.graph import Graph, Guard, StateSpec, Transition

__all__ = [
    "DecisionChange",
    "DeclarationChange",
    "GraphDiff",
    "MovedRow",
    "Renamed",
    "diff",
    "format_reviewed",
    "graph_from_table",
    "reviewed_table",
]


MAX_COMMENT = 60_000
"""Characters of a difference as Markdown; GitHub accepts comments of up to 65,536."""

MAX_PICTURE = 40_000
"""Characters of its picture."""

_DIAGRAMS = "agentfsm.diagrams"
"""The package that draws a difference: it reads analyses, so this module names it and loads it on first use."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """A state or a guard that has a new name.

    Attributes:
        what: ``state`` or ``guard``.
        old: Its old name.
        new: Its new name.
    """

    what: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.what} {self.old} is now {self.new}"


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


@dataclass(frozen=True, slots=True)
class GraphDiff:
    """How a new graph differs from an old one. States and guards have their new names, except in ``removed``.

    Attributes:
        initial: The old and the new initial state, if a run starts elsewhere; else None.
        renamed: States and guards that have a new name and are otherwise the same.
        states_added: States that are new.
        states_removed: States that were removed.
        states_changed: What states declare differently: whether they wait or end, what they spend...
        counters_changed: Counters that are new, that were removed, or that have another limit.
        added: Rows that are new, as ``id -> target``.
        removed: Rows that were removed.
        retargeted: Rows with another target: id, old target, new target.
        rows_changed: What rows declare differently: how the run ends, what they spend...
        guards_changed: Rows whose guard has another code, by id.
        effects_changed: States whose effect is another one, or has another code.
        moved: Rows at another place in their state.
        decisions: Where the tables decide differently, the changes that lead elsewhere first. It is supposed that
            guards with another code answer as before.
        not_compared: Rows and states whose code is not known on both sides.
        before: The old graph, for the picture; None for a diff that was made by hand.
        after: The new graph.
    """

    initial: tuple[str, str] | None = None
    renamed: tuple[Renamed, ...] = ()
    states_added: tuple[str, ...] = ()
    states_removed: tuple[str, ...] = ()
    states_changed: tuple[DeclarationChange, ...] = ()
    counters_changed: tuple[DeclarationChange, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    retargeted: tuple[tuple[str, str, str], ...] = ()
    rows_changed: tuple[DeclarationChange, ...] = ()
    guards_changed: tuple[str, ...] = ()
    effects_changed: tuple[str, ...] = ()
    moved: tuple[MovedRow, ...] = ()
    decisions: tuple[DecisionChange, ...] = field(default=())
    not_compared: tuple[str, ...] = ()
    before: Graph | None = field(default=None, repr=False, compare=False)
    after: Graph | None = field(default=None, repr=False, compare=False)

    @property
    def same(self) -> bool:
        """Whether nothing differs of what could be compared."""
        return replace(self, not_compared=()) == GraphDiff()

    @property
    def behaves_alike(self) -> bool:
        """Whether runs of both do the same, whatever the guards return, as far as could be compared."""
        return replace(self, renamed=(), moved=(), not_compared=(), **self._idle_rows()) == GraphDiff()

    def _idle_rows(self) -> dict[str, Any]:
        """Rows that are new, removed or retargeted change nothing by themselves: the decisions say what they do."""
        return {"added": (), "removed": (), "retargeted": ()}

    def to_dict(self) -> dict[str, Any]:
        """The diff as JSON-compatible data."""
        data = asdict(replace(self, before=None, after=None))
        del data["before"], data["after"]
        return {"same": self.same, "behaves_alike": self.behaves_alike, **data}

    def diagram(self, format: str = "svg") -> str:  # noqa: A002  # the usual name for it
        """The new graph with the difference on it.

        Args:
            format: ``svg``, ``dot``, ``mermaid``, ``markdown``, ``text`` or ``plantuml``.

        Raises:
            ConfigurationError: There is no such format, it shows no difference, or the graphs are not known.
        """
        if self.before is None or self.after is None:
            raise ConfigurationError("a diff that was made by hand has no graphs to draw: make it with diff(old, new)")
        diagrams: Any = import_module(_DIAGRAMS)
        elsewhere = [str(each) for each in self.decisions if each.leads_elsewhere]
        overlay = diagrams.DiffOverlay(self.before, elsewhere, len(self.decisions) - len(elsewhere))
        return cast("str", diagrams.diagram(self.after, format, overlay=overlay))

    def markdown(self) -> str:
        """The difference as Markdown with a picture, in at most 60,000 characters: it fits a comment on GitHub."""
        verdict = (
            "no difference" if self.same else "the same behavior" if self.behaves_alike else "the behavior changes"
        )
        picture = "" if self.same or self.after is None else f"\n```mermaid\n{self.diagram('mermaid')}```\n"
        if len(picture) > MAX_PICTURE:
            picture = "\nThe picture is too large for a comment.\n"
        name = "" if self.after is None else f" of {' '.join(self.after.name.split())}"
        room = MAX_COMMENT - len(picture) - len(name) - 200
        text = str(self)
        if len(text) > room:
            text = f"{text[:room].rpartition(chr(10))[0]}\n... and more: agentfsm diff shows all of it"
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
        return f"### Difference{name}: {verdict}\n\n{fence}diff\n{text}\n{fence}\n{picture}"

    def _repr_markdown_(self) -> str:
        return self.markdown()

    def _repr_html_(self) -> str:
        """What a notebook shows: the changes, and the picture."""
        picture = "" if self.same or self.after is None else self.diagram()
        return f"<pre>{html.escape(str(self))}</pre>{picture}"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.same:
            yield "the two tables are the same"
        else:
            yield from self._declaration_lines()
            yield from self._decision_lines()
        if self.not_compared:
            count = len(self.not_compared)
            yield f"not compared: the code of {count} guard{'s' if count > 1 else ''} or effects, known by name only"

    def _declaration_lines(self) -> Iterator[str]:
        if self.initial is not None:
            yield f"~ runs start in {self.initial[1]}, not in {self.initial[0]}"
        yield from (f"~ {each}" for each in self.renamed)
        for sign, names in (("+ state", self.states_added), ("- state", self.states_removed)):
            yield from (f"{sign} {name}" for name in names)
        yield from (f"~ state {each}" for each in self.states_changed)
        yield from (f"~ state {name}: changed code of its effect" for name in self.effects_changed)
        yield from (f"~ counter {each}" for each in self.counters_changed)
        yield from (f"+ {row}" for row in self.added)
        yield from (f"- {row}" for row in self.removed)
        yield from (f"~ {row} -> {new}, was -> {old}" for row, old, new in self.retargeted)
        yield from (f"~ {each}" for each in self.rows_changed)
        yield from (f"~ {row}: changed code of its guard" for row in self.guards_changed)
        yield from (f"~ {m.row} is evaluated at place {m.new}, was at {m.old}" for m in self.moved)

    def _decision_lines(self) -> Iterator[str]:
        if not self.decisions:
            if self.behaves_alike:
                yield "every decision stays the same, whatever the guards return"
            else:
                yield "what runs do changes as listed; for equal results of the guards, the same rows are taken"
            return
        total = sum(d.cases for d in self.decisions)
        every = sum({d.state: d.of for d in self.decisions}.values())
        yield f"decisions that change ({total:,} of {every:,} rows of the truth tables of these states):"
        yield from (f"  {d}" for d in self.decisions if d.leads_elsewhere)
        rest = [d for d in self.decisions if not d.leads_elsewhere]
        if rest:
            yield f"by another row to the same state ({sum(d.cases for d in rest):,} of them):"
            yield from (f"  {d}" for d in rest)


def diff(old: Graph, new: Graph) -> GraphDiff:
    """How a graph differs from another: in its declaration, in the code of guards and effects, in its decisions.

    ::

        changes = diff(LOOP, LOOP.without("post_llm.loop_detected"))
        print(changes)
        assert not changes.behaves_alike

    Args:
        old: The old graph.
        new: The new graph.
    """
    before, after = _table(old), _table(new)
    states = _renamed_states(before, after)
    before = _with_states(before, states)
    guards = _renamed_guards(before, after)
    before = _with_guards(before, guards)
    common = [name for name in before.states if name in after.states]
    rows_before, rows_after = _rows_by_id(before), _rows_by_id(after)
    kept = [i for i in rows_before if i in rows_after]
    codes = {i: _same_guard(rows_before[i], rows_after[i]) for i in kept}
    effects = {n: _same_effect(before.states[n].effect, after.states[n].effect) for n in common}
    compared = {**codes, **effects}
    return GraphDiff(
        initial=None if before.initial == after.initial else (before.initial, after.initial),
        renamed=tuple(
            Renamed(what, a, b) for what, names in (("state", states), ("guard", guards)) for a, b in names.items()
        ),
        states_added=tuple(n for n in after.states if n not in before.states),
        states_removed=tuple(n for n in before.states if n not in after.states),
        states_changed=tuple(c for n in common for c in _changes(n, before.states[n], after.states[n])),
        counters_changed=tuple(_counter_changes(before.counters, after.counters)),
        added=tuple(str(row) for i, row in rows_after.items() if i not in rows_before),
        removed=tuple(str(row) for i, row in rows_before.items() if i not in rows_after),
        retargeted=tuple(
            (i, rows_before[i].target, rows_after[i].target)
            for i in kept
            if rows_before[i].target != rows_after[i].target
        ),
        rows_changed=tuple(c for i in kept for c in _changes(i, rows_before[i].declared, rows_after[i].declared)),
        guards_changed=tuple(i for i, same in codes.items() if same is False),
        effects_changed=tuple(n for n, same in effects.items() if same is False),
        moved=tuple(moved for n in common for moved in _moved_rows(before.rows[n], after.rows[n])),
        decisions=_ranked(d for n in common for d in _decisions(n, before, after)),
        not_compared=tuple(name for name, same in compared.items() if same is None),
        before=old,
        after=new,
    )


# -- tables under other names -------------------------------------------------------------------------


class _Row(NamedTuple):
    """A row, whose guard may go by another name than that of its function."""

    source: str
    name: str
    target: str
    declared: Transition

    @property
    def id(self) -> str:
        return f"{self.source}.{self.name}"

    @property
    def guard(self) -> Guard | None:
        return self.declared.guard

    @property
    def ends(self) -> str:
        return self.declared.ends

    def __str__(self) -> str:
        return f"{self.id} -> {self.target}"


class _Table(NamedTuple):
    states: Mapping[str, StateSpec]
    rows: Mapping[str, Sequence[_Row]]
    initial: str
    counters: Mapping[str, object]


def _table(graph: Graph) -> _Table:
    return _Table(
        {str(s.name): s for s in graph.states},
        {
            str(s.name): [_Row(str(t.source), t.name, str(t.target), t) for t in graph.rows(s.name)]
            for s in graph.states
        },
        str(graph.initial),
        {c.name: c.limit for c in graph.counters},
    )


def _rows_by_id(table: _Table) -> dict[str, _Row]:
    return {row.id: row for rows in table.rows.values() for row in rows}


def _with_states(table: _Table, names: Mapping[str, str]) -> _Table:
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


def _with_guards(table: _Table, names: Mapping[str, str]) -> _Table:
    rows = {n: [row._replace(name=names.get(row.name, row.name)) for row in rows] for n, rows in table.rows.items()}
    return table._replace(rows=rows)


def _renamed_states(old: _Table, new: _Table) -> dict[str, str]:
    """States that have a new name, and the same declaration, the same effect and the same rows in and out."""
    gone = [name for name in old.states if name not in new.states]
    come = [name for name in new.states if name not in old.states]
    names: dict[str, str] = {}
    for name in gone:
        alike = [n for n in come if n not in names.values() and _similar_states(old, name, new, n)]
        if alike:
            names[name] = alike[0]
    while names:  # with all these names in place, what was similar must be equal
        renamed = _with_states(old, names)
        wrong = [name for name, other in names.items() if not _equal_states(renamed, new, other)]
        if not wrong:
            break
        names = {name: other for name, other in names.items() if name not in wrong}
    return names


def _similar_states(old: _Table, name: str, new: _Table, other: str) -> bool:
    """Whether two states may be one, before it is known which names are new."""
    if not _same_declaration(old.states[name], new.states[other]):
        return False
    pairs = zip(old.rows[name], new.rows[other], strict=False)
    return len(old.rows[name]) == len(new.rows[other]) and all(
        (a.target == b.target or a.target not in new.states) and _same_row(a, b) for a, b in pairs
    )


def _equal_states(old: _Table, new: _Table, name: str) -> bool:
    """Whether the rows of a state lead to the same states in both tables, and rows of one other state lead to it."""
    targets = [[row.target for row in table.rows[name]] for table in (old, new)]
    sources = [{r.source for rows in table.rows.values() for r in rows if r.target == name} for table in (old, new)]
    return targets[0] == targets[1] and (not sources[0] or bool(sources[0] & sources[1]))


def _same_row(a: _Row, b: _Row) -> bool:
    return (a.name == b.name or _same_guard(a, b) is True) and not list(_changes("", a.declared, b.declared))


def _same_declaration(a: StateSpec, b: StateSpec) -> bool:
    return not list(_changes("", a, b)) and _same_effect(a.effect, b.effect) is not False


def _renamed_guards(old: _Table, new: _Table) -> dict[str, str]:
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


def _rows_by_guard(table: _Table, other: _Table) -> dict[str, list[_Row]]:
    """The rows of each guard whose name the other table does not have."""
    known = {row.name for rows in other.rows.values() for row in rows}
    found: dict[str, list[_Row]] = {}
    for rows in table.rows.values():
        for row in rows:
            if row.guard is not None and row.name not in known:
                found.setdefault(row.name, []).append(row)
    return found


def _places(rows: Sequence[_Row]) -> list[tuple[str, str]]:
    return sorted((row.source, row.target) for row in rows)


# -- what is declared ---------------------------------------------------------------------------------

_COMPARED_OTHERWISE = frozenset({"name", "note", "lane", "effect", "source", "guard", "target"})
"""Fields that are compared by other means, or that only a picture shows."""


def _changes(name: str, old: StateSpec | Transition, new: StateSpec | Transition) -> Iterator[DeclarationChange]:
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


def _counter_changes(old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[DeclarationChange]:
    for name in {**old, **new}:
        limits = str(old.get(name, "")), str(new.get(name, ""))
        if limits[0] != limits[1]:
            yield DeclarationChange(name, "limit", *limits)


def _same_guard(old: _Row, new: _Row) -> bool | None:
    if old.guard is None or new.guard is None:
        return old.guard is new.guard
    if isinstance(old.guard, Exhausted) and isinstance(new.guard, Exhausted):  # a counter's limit is compared with it
        a, b = old.guard, new.guard
        return (a.counter.name, a.past) == (b.counter.name, b.past) and same_code(_described(a), _described(b))
    return same_code(old.guard, new.guard)


def _described(guard: Exhausted) -> object:
    return getattr(guard, "__wrapped__", None)


def _same_effect(old: object, new: object) -> bool | None:
    if old is None or new is None or not (callable(old) and callable(new)):
        return old == new
    return same_code(old, new)


# -- what is decided ----------------------------------------------------------------------------------


def _moved_rows(old: Sequence[_Row], new: Sequence[_Row]) -> Iterator[MovedRow]:
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


def _decisions(state: str, old: _Table, new: _Table) -> Iterator[DecisionChange]:
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


def _first_match_cases(rows: Sequence[_Row]) -> Iterator[tuple[_Row | None, frozenset[str], frozenset[str]]]:
    """Each row that can be taken, with the guards that then hold and those that do not; None for no row."""
    earlier: list[str] = []
    for row in rows:
        yield row, frozenset(() if row.guard is None else (row.name,)), frozenset(earlier)
        if row.guard is None:
            return
        earlier.append(row.name)
    yield None, frozenset(), frozenset(earlier)


def _exclusive_names(before: Sequence[_Row], after: Sequence[_Row]) -> dict[str, frozenset[str]]:
    """Each guard of a state, in order, with those that can never hold together with it."""
    rows: dict[str, list[_Row]] = {}
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
    return bool(mine and theirs) and all(_disjoint(a, b) for a in mine for b in theirs)


def _one_needs_what_is_empty(a: _Row, b: _Row) -> bool:
    """Whether one of two rows spends a counter, and the other one holds only where that counter is empty."""
    return any(
        isinstance(empty.guard, Exhausted) and empty.guard.counter.name in spending.declared.spends
        for spending, empty in ((a, b), (b, a))
    )


def _disjoint(a: Required, b: Required) -> bool:
    return any(path in b and a[path].isdisjoint(b[path]) for path in a)


def _count(names: frozenset[str], exclusive: Mapping[str, Collection[str]]) -> int:
    """How many combinations of results of some guards can occur."""

    @cache
    def count(left: frozenset[str]) -> int:
        linked = next((name for name in sorted(left) if left & frozenset(exclusive[name])), None)
        if linked is None:
            return 1 << len(left)
        return count(left - {linked}) + count(left - {linked} - frozenset(exclusive[linked]))

    return count(names)


def _ranked(decisions: Iterator[DecisionChange]) -> tuple[DecisionChange, ...]:
    """The changes that lead elsewhere first."""
    return tuple(sorted(decisions, key=lambda each: not each.leads_elsewhere))


def _decided(row: _Row | None) -> tuple[str, str, str] | None:
    return None if row is None else (row.name, row.target, row.ends)


def _destination(row: _Row | None) -> tuple[str, str] | None:
    return None if row is None else (row.target, row.ends)


def _row_text(row: _Row | None, other: _Row | None) -> str:
    """A row as text, with its ending where only that tells it from another one."""
    if row is None:
        return ""
    ends = f" ({row.ends})" if other is not None and row.target == other.target and row.ends != other.ends else ""
    return f"{row.name} -> {row.target}{ends}"


# -- tables as data -----------------------------------------------------------------------------------


def reviewed_table(graph: Graph) -> dict[str, Any]:
    """A graph as JSON-compatible data to keep in a file: its table, and digests of the code of guards and effects.

    ``graph_from_table`` reads it, and ``diff`` then compares the code as well. The digests come from the source, so
    they are the same in every version of Python; code without source has none.

    Args:
        graph: The graph.
    """
    guards = {row.id: code_digest(row.guard) for row in graph if row.guard is not None}
    effects = {s.name: code_digest(s.effect) for s in graph.states if callable(s.effect)}
    outcomes = {s.name: list(s.outcomes) for s in graph.states if s.outcomes}
    return {"name": graph.name, **graph.table, "code": {"guards": guards, "effects": effects, "outcomes": outcomes}}


def format_reviewed(graph: Graph) -> str:
    """``reviewed_table`` as JSON text with a line for each state and row, so that a change of it is easy to read.

    Args:
        graph: The graph.
    """
    parts: list[str] = []
    for key, value in reviewed_table(graph).items():
        if isinstance(value, str):
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
        elif isinstance(value, list):
            lines = ",\n".join(f"  {json.dumps(item)}" for item in cast("list[object]", value))
            parts.append(f"{json.dumps(key)}: [\n{lines}\n ]" if lines else f"{json.dumps(key)}: []")
        else:
            parts.append(f"{json.dumps(key)}: " + json.dumps(value, indent=2).replace("\n", "\n "))
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def graph_from_table(table: Mapping[str, Any], name: str = "") -> Graph:
    """The graph of a table as data (``graph.table``, or the one in a run's journal), with guards by name only.

    Args:
        table: What ``graph.table`` or ``reviewed_table`` returned.
        name: The name of the graph; by default the table's own.

    Raises:
        ConfigurationError: The data is not a table.
        GraphError: The table breaks a rule of graphs.
    """
    try:
        stored = read_table(table)
        code = table.get("code", {"guards": {}, "effects": {}, "outcomes": {}})
        guards = dict(code["guards"])
        states = tuple(_named_effect(spec, code) for spec in stored.states.values())
        rows = tuple(_named_guard(row, guards) for row in stored.rows.values())
        counters = tuple(Counter(str(name), limit) for name, limit in table.get("counters", ())) or LOOP.counters
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigurationError(f"this is not the table of a graph: {type(error).__name__}: {error}") from error
    return Graph(states, rows, name or str(table.get("name", "graph")), counters, stored=True)


def _named_guard(row: Transition, digests: Mapping[str, str]) -> Transition:
    return row if row.guard is None else replace(row, guard=DigestOnly(row.name, str(digests.get(row.id, ""))))


def _named_effect(spec: StateSpec, code: Mapping[str, Any]) -> StateSpec:
    if spec.effect_name != "custom":
        return spec
    digest = str(code["effects"].get(spec.name, ""))
    return replace(spec, effect=DigestOnly(spec.name, digest), outcomes=tuple(code["outcomes"].get(spec.name, ())))
