"""The diff of two graphs, and a graph as data to keep in a file and compare with later.

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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from typing import Any, cast

from agentfsm.analysis.code_comparison import DigestOnly, code_digest
from agentfsm.analysis.compared_table import (
    DeclarationChange,
    compared_table,
    counter_changes,
    declaration_changes,
    renamed_guards,
    renamed_states,
    rows_by_id,
    same_effect,
    same_guard,
    with_guards,
    with_states,
)
from agentfsm.analysis.decision_diff import DecisionChange, MovedRow, decision_changes, moved_rows, ranked_decisions
from agentfsm.errors import ConfigurationError
from agentfsm.loop.stored_table import read_table
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.declaration import Counter
from agentfsm.machine.graph import Graph, StateSpec, Transition

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
    before, after = compared_table(old), compared_table(new)
    states = renamed_states(before, after)
    before = with_states(before, states)
    guards = renamed_guards(before, after)
    before = with_guards(before, guards)
    common = [name for name in before.states if name in after.states]
    rows_before, rows_after = rows_by_id(before), rows_by_id(after)
    kept = [i for i in rows_before if i in rows_after]
    codes = {i: same_guard(rows_before[i], rows_after[i]) for i in kept}
    effects = {n: same_effect(before.states[n].effect, after.states[n].effect) for n in common}
    compared = {**codes, **effects}
    return GraphDiff(
        initial=None if before.initial == after.initial else (before.initial, after.initial),
        renamed=tuple(
            Renamed(what, a, b) for what, names in (("state", states), ("guard", guards)) for a, b in names.items()
        ),
        states_added=tuple(n for n in after.states if n not in before.states),
        states_removed=tuple(n for n in before.states if n not in after.states),
        states_changed=tuple(c for n in common for c in declaration_changes(n, before.states[n], after.states[n])),
        counters_changed=tuple(counter_changes(before.counters, after.counters)),
        added=tuple(str(row) for i, row in rows_after.items() if i not in rows_before),
        removed=tuple(str(row) for i, row in rows_before.items() if i not in rows_after),
        retargeted=tuple(
            (i, rows_before[i].target, rows_after[i].target)
            for i in kept
            if rows_before[i].target != rows_after[i].target
        ),
        rows_changed=tuple(
            c for i in kept for c in declaration_changes(i, rows_before[i].declared, rows_after[i].declared)
        ),
        guards_changed=tuple(i for i, same in codes.items() if same is False),
        effects_changed=tuple(n for n, same in effects.items() if same is False),
        moved=tuple(moved for n in common for moved in moved_rows(before.rows[n], after.rows[n])),
        decisions=ranked_decisions(d for n in common for d in decision_changes(n, before, after)),
        not_compared=tuple(name for name, same in compared.items() if same is None),
        before=old,
        after=new,
    )


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
