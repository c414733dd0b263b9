"""Declared graphs: states, transitions, and the checks that every graph must pass.

A graph is data, and its order is behavior: in each state the transitions are tried in the order in which they are
declared, and the first whose guard holds is taken. ``check_graph`` runs when a graph is built and reads nothing else:

1. State, guard and counter names are identifiers; no state is declared twice, no guard is used twice in one state.
2. Every transition joins declared states, and none leaves a final state. A row into a final state says how the run
   ends, and no other row does.
3. A guard is a plain function: a coroutine function or a generator would always be truthy.
4. Every state except a waiting or final one ends with a transition without a guard, so no run is ever stuck;
   no transition follows it, because it could never be tried. That transition spends nothing.
5. The guards that ``first`` names come first in every state that is not final.
6. What a state's effect may come back with is taken by a row of that state.
7. Every state is reachable, and a final state is reachable from every state.
8. Every counter that is spent is declared. Every cycle spends a counter that is not refilled in the same cycle, or
   waits for an external event, so every run ends or waits within ``Graph.max_moves`` moves.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from types import MappingProxyType
from typing import Any, cast

from agentfsm.errors import GraphError
from agentfsm.machine.declaration import (
    ENDINGS,
    OTHERWISE,
    Counter,
    EffectSpec,
    Exhausted,
    Guard,
    State,
    StateSpec,
    Transition,
    guard_name,
    outcomes_taken,
)

__all__ = ["OTHERWISE", "Graph", "Guard", "State", "StateSpec", "Transition", "check_graph", "table_fingerprint"]


_READERS = {"diagram": "agentfsm.diagrams", "analyse": "agentfsm.analysis"}
"""The packages behind two methods of a graph: they import this module, so it names them and loads them on first use."""


def table_fingerprint(table: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of a table as JSON data: ``Graph.table``, or what a journal pinned of it."""
    return hashlib.sha256(json.dumps(table, separators=(",", ":")).encode()).hexdigest()


def _reader(name: str) -> Callable[..., Any]:
    """A function of a package that reads graphs."""
    return cast("Callable[..., Any]", getattr(import_module(_READERS[name]), name))


@dataclass(frozen=True)
class Graph:
    """A checked table of transitions, in the order in which their guards are evaluated.

    Attributes:
        states: The declared states; the first is where a run starts.
        transitions: The rows. Their order within one source state is part of the behavior.
        name: Its name in diagrams and journals.
        counters: The counters that its states and rows may spend.
        first: The guards that come first, in this order, in every state that is not final.
        stored: Whether it was read from a stored table. It was checked when it was built, and its guards are names
            only, so what follows from their code is not checked again.

    Raises:
        GraphError: The table breaks a rule; the error names the edge and the rule.
    """

    states: tuple[StateSpec, ...]
    transitions: tuple[Transition, ...]
    name: str = "graph"
    counters: tuple[Counter, ...] = ()
    first: tuple[Guard, ...] = ()
    stored: bool = field(default=False, repr=False, compare=False)
    _specs: dict[str, StateSpec] = field(init=False, repr=False, compare=False, default_factory=dict[str, "StateSpec"])
    _rows: dict[str, tuple[Transition, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict[str, tuple["Transition", ...]]
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "states", tuple(self.states))
        object.__setattr__(self, "transitions", tuple(self.transitions))
        object.__setattr__(self, "counters", tuple(self.counters))
        object.__setattr__(self, "first", tuple(self.first))
        self._specs.update((spec.name, spec) for spec in self.states)
        for spec in self.states:
            self._rows[spec.name] = tuple(t for t in self.transitions if t.source == spec.name)
        check_graph(self)

    @property
    def initial(self) -> str:
        """The name of the state in which a run starts."""
        return self.states[0].name

    def rows(self, state: str) -> tuple[Transition, ...]:
        """The transitions that leave a state, in the order in which their guards are evaluated.

        Raises:
            GraphError: There is no such state.
        """
        self.spec(state)
        return self._rows[state]

    def spec(self, state: str) -> StateSpec:
        """The declaration of a state.

        Raises:
            GraphError: There is no such state.
        """
        if state in self._specs:
            return self._specs[state]
        raise GraphError("there is no such state", state, f"states: {', '.join(s.name for s in self.states)}")

    def transition(self, transition_id: str) -> Transition:
        """The transition with an id such as ``post_llm.tool_calls``.

        Raises:
            GraphError: There is no such transition.
        """
        for transition in self.transitions:
            if transition.id == transition_id:
                return transition
        raise GraphError("there is no such transition", transition_id)

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.states)} states, {len(self.transitions)} transitions)"

    def __iter__(self) -> Iterator[Transition]:
        return iter(self.transitions)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the table: states, guard names, targets, order and counters, but not the guards' code."""
        return table_fingerprint(self.table)

    @cached_property
    def table(self) -> dict[str, list[list[Any]]]:
        """The table as JSON data, as each run's journal records it; ``fingerprint`` is its hash."""
        return {
            "states": [[s.name, s.waits, s.final, list(s.spends), s.effect_name] for s in self.states],
            "transitions": [
                [t.source, t.name, t.target, list(t.spends), list(t.refills), t.ends, t.extends]
                for s in self.states
                for t in self._rows[s.name]
            ],
            "counters": [[c.name, c.limit] for c in self.counters],
        }

    @property
    def specs(self) -> Mapping[str, StateSpec]:
        """The declared states by name."""
        return MappingProxyType(self._specs)

    def takes(self, state: str, outcome: str) -> bool:
        """Whether a guard of a state takes an outcome."""
        return outcome in outcomes_taken(self._rows[state])

    def max_moves(self, limit: Callable[[Counter], int | None]) -> int:
        """The most moves that any run can make between two waits, whatever its guards return.

        It follows from the counters alone and is an upper bound; ``analyse`` finds a closer one.

        Args:
            limit: The limit of each counter in the run; None for no limit.
        """
        by_name = {c.name: limit(c) for c in self.counters}
        inner = frozenset(s.name for s in self.states if not (s.waits or s.final))
        edges = [t for t in self.transitions if t.source in inner and t.target in inner]
        return _longest_walk(self, inner, edges, by_name) + 2

    def diagram(self, format: str = "svg") -> str:  # noqa: A002  # the usual name for it
        """The graph as a diagram or in another format; ``agentfsm.diagrams`` has themes, overlays and images.

        Args:
            format: ``svg``, ``dot``, ``mermaid``, ``markdown``, ``text``, ``plantuml``, ``scxml``,
                ``xstate`` or ``promela``.

        Raises:
            ConfigurationError: There is no such format.
        """
        return cast("str", _reader("diagram")(self, format))

    def analyse(self, *properties: Any, guardrails: Any = None) -> Any:
        """What can be proved about the graph, as an ``agentfsm.analysis.Analysis``.

        ``agentfsm.analysis.analyse`` takes more options.

        Args:
            *properties: Properties to prove: ``must_pass(...)``, ``never_after(...)``.
            guardrails: The ``AgentGuardrails`` of its runs; defaults to ``AgentGuardrails()``.
        """
        return _reader("analyse")(self, *properties, guardrails=guardrails)

    # Each of the following returns a new, checked graph; this one never changes.

    def with_transition(self, transition: Transition, *, before: str | None = None) -> Graph:
        """A graph with one more row.

        Args:
            transition: The new row.
            before: The guard before which the new one is evaluated. By default it is the last one evaluated, just
                before the row without a guard.

        Raises:
            GraphError: ``before`` names no row of that state, or the new table breaks a rule.
        """
        return replace(self, transitions=self._insert_row(transition, before))

    def with_counter(self, counter: Counter) -> Graph:
        """A graph with one more counter, or with another limit for one that it has.

        Raises:
            GraphError: Its name is not an identifier.
        """
        others = (c for c in self.counters if c.name != counter.name)
        rows = (
            replace(t, guard=t.guard.of(counter))
            if isinstance(t.guard, Exhausted) and t.guard.counter.name == counter.name
            else t
            for t in self.transitions
        )
        return replace(self, counters=(*others, counter), transitions=tuple(rows))

    def with_detector(
        self, state: str, detector: Guard, *, before: str | None = None, target: str = State.RECOVER, ends: str = ""
    ) -> Graph:
        """A graph in which a state evaluates one more detector, and goes to ``recover`` when it finds a failure.

        Args:
            state: The state that evaluates it.
            detector: A pure function of the read-only ``RunView`` that returns a ``Failure`` or None.
            before: The guard before which it is evaluated; by default it is evaluated last.
            target: The state that a failure leads to.
            ends: How the run ends, if that state is final.

        Raises:
            GraphError: ``before`` names no row of that state, or the new table breaks a rule.
        """
        return self.with_transition(Transition(state, detector, target, ends=ends), before=before)

    def with_state(
        self,
        spec: StateSpec,
        transitions: Iterable[Transition],
        *,
        entered_by: Transition | str,
        before: str | None = None,
    ) -> Graph:
        """A graph with one more state.

        Args:
            spec: The new state; its ``effect`` is what it does.
            transitions: The rows that leave it. A state that is not final also gets the rows of ``first``
                (``cancelled`` and ``aborted``) in front, as the initial state has them, unless it has its own.
            entered_by: How it is entered: a new transition to it, or the id of an existing one
                (``"post_llm.otherwise"``), which then leads to the new state.
            before: For a new transition, the guard before which it is evaluated.

        Raises:
            GraphError: The new table breaks a rule.
        """
        rows = list(transitions)
        if not spec.final:
            inherited = {t.guard: replace(t, source=spec.name) for t in self.rows(self.initial)}
            stops = {**inherited, **{t.guard: t for t in rows}}
            rows = [*(stops[guard] for guard in self.first), *(t for t in rows if t.guard not in self.first)]
        if isinstance(entered_by, str):
            old = self.transition(entered_by)
            entering = replace(old, target=spec.name, ends=old.ends if spec.final else "")
            table = tuple(entering if t is old else t for t in self.transitions)
        else:
            table = self._insert_row(entered_by, before)
        return replace(self, states=(*self.states, spec), transitions=(*table, *rows))

    def without(self, *names: str) -> Graph:
        """A graph without some transitions (by id) or states (by name, with every row that touches them).

        Raises:
            GraphError: A name is unknown, or the smaller table breaks a rule.
        """
        states = {s.name for s in self.states}
        removed_states = {n for n in names if n in states}
        removed_rows = {self.transition(n).id for n in names if n not in states}
        remaining = tuple(
            t
            for t in self.transitions
            if t.id not in removed_rows and t.source not in removed_states and t.target not in removed_states
        )
        return replace(
            self, states=tuple(s for s in self.states if s.name not in removed_states), transitions=remaining
        )

    def _insert_row(self, new: Transition, before: str | None) -> tuple[Transition, ...]:
        table = list(self.transitions)
        rows = [i for i, t in enumerate(table) if t.source == new.source]
        if before is None:
            last = rows[-1] if rows else len(table) - 1
            index = last if rows and table[last].guard is None and new.guard is not None else last + 1
        else:
            named = [i for i in rows if table[i].name == before]
            if not named:
                names = ", ".join(table[i].name for i in rows)
                raise GraphError(f"there is no row {before!r} to insert it before", new.id, f"rows: {names}")
            index = named[0]
        return (*table[:index], new, *table[index:])


def check_graph(graph: Graph) -> None:
    """Check every rule of the module's docstring.

    Raises:
        GraphError: A rule is broken; it names the first such rule and the edge.
    """
    for rule in (_check_names, _check_endpoints, _check_guards, _check_default_rows, _check_reachability):
        rule(graph)
    if not graph.stored:
        for rule in (_check_first_rows, _check_endings, _check_outcomes, _check_counters, _check_cycles):
            rule(graph)


def _check_names(graph: Graph) -> None:
    if not graph.states:
        raise GraphError("a graph needs at least one state", graph.name)
    _check_unique((s.name for s in graph.states), "the state is declared twice")
    for spec in graph.states:
        if not spec.name.isidentifier():
            raise GraphError("a state's name must be an identifier", repr(spec.name))
    for transition in graph.transitions:
        if not transition.name.isidentifier():
            raise GraphError(
                "a guard's name must be an identifier", transition.id, "name the function: a lambda has no name"
            )
    _check_unique((t.id for t in graph.transitions), "the guard is used twice in one state")


def _check_unique(names: Iterable[str], rule: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise GraphError(rule, name)
        seen.add(name)


def _check_endpoints(graph: Graph) -> None:
    specs = {s.name: s for s in graph.states}
    for transition in graph.transitions:
        for end in (transition.source, transition.target):
            if end not in specs:
                known = ", ".join(specs)
                raise GraphError(f"{end!r} is not a declared state", transition.id, f"declared: {known}")
        if specs[transition.source].final:
            raise GraphError("no transition may leave a final state", transition.id)


def _check_guards(graph: Graph) -> None:
    for transition in graph.transitions:
        guard = transition.guard
        if guard is None:
            continue
        if not callable(guard):
            raise GraphError("a guard must be a function of the run", transition.id)
        if _returns_unawaited(guard) or _returns_unawaited(type(guard).__call__):
            raise GraphError(
                "a guard must be a plain function, not a coroutine function or a generator",
                transition.id,
                "await in an effect",
            )


def _returns_unawaited(function: object) -> bool:
    """Whether calling the function returns a coroutine or a generator, which is always truthy."""
    return (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    )


def _check_default_rows(graph: Graph) -> None:
    for spec in graph.states:
        rows = graph.rows(spec.name)
        if spec.final:
            continue
        if not rows:
            raise GraphError("no transition leaves the state", spec.name, "declare it final, or add a row")
        for earlier, later in pairwise(rows):
            if earlier.guard is None:
                raise GraphError(f"can never be evaluated: {earlier.id} comes before it and has no guard", later.id)
        if rows[-1].guard is not None and not spec.waits:
            raise GraphError(
                "the last transition of a state that does not wait must have no guard",
                rows[-1].id,
                f"add Transition({str(spec.name)!r}, None, ...) after it",
            )


def _check_reachability(graph: Graph) -> None:
    reached = _reachable({graph.initial}, graph.transitions, lambda t: (t.source, t.target))
    finals = {s.name for s in graph.states if s.final}
    if not finals:
        raise GraphError("a graph needs a final state", graph.name)
    ending = _reachable(finals, graph.transitions, lambda t: (t.target, t.source))
    for spec in graph.states:
        if spec.name not in reached:
            raise GraphError(f"the state cannot be reached from {graph.initial!r}", spec.name)
        if spec.name not in ending:
            raise GraphError("no final state can be reached from the state", spec.name)


def _reachable(
    start: set[str], transitions: Iterable[Transition], ends: Callable[[Transition], tuple[str, str]]
) -> set[str]:
    pairs = [ends(t) for t in transitions]
    reached = set(start)
    while more := {b for a, b in pairs if a in reached} - reached:
        reached |= more
    return reached


def _check_first_rows(graph: Graph) -> None:
    for spec in graph.states:
        if spec.final:
            continue
        for place, guard in enumerate(graph.first):
            name = guard_name(guard)
            rows = graph.rows(spec.name)
            if len(rows) <= place or rows[place].guard is not guard:
                there = next((t for t in rows if t.guard is guard), None)
                raise GraphError(
                    f"{name!r} must be row {place + 1} of every state that is not final",
                    there.id if there is not None else spec.name,
                    f"rows: {', '.join(t.name for t in rows)}",
                )
            if not graph.spec(rows[place].target).final:
                raise GraphError(f"{name!r} must lead to a final state", rows[place].id)


def _check_endings(graph: Graph) -> None:
    for row in graph.transitions:
        final = graph.spec(row.target).final
        if final and row.ends not in ENDINGS:
            raise GraphError(
                "a row into a final state must say how the run ends",
                row.id,
                f"ends=... is one of {', '.join(ENDINGS)}" + (f", not {row.ends!r}" if row.ends else ""),
            )
        if row.ends and not final:
            raise GraphError(f"it ends the run ({row.ends}) and leads to {row.target!r}, which is not final", row.id)


def _check_outcomes(graph: Graph) -> None:
    """Each outcome of a state's effect must be taken by a row of the state."""
    for spec in graph.states:
        taken = outcomes_taken(graph.rows(spec.name))
        needed = spec.effect.exceptional if isinstance(spec.effect, EffectSpec) else spec.outcomes
        for outcome in needed:
            if outcome not in taken:
                raise GraphError(
                    f"its effect may come back with {outcome!r}, and no row of the state takes that",
                    spec.name,
                    "add a row whose guard takes it",
                )


def _check_counters(graph: Graph) -> None:
    for counter in graph.counters:
        if not counter.name.isidentifier():
            raise GraphError("a counter's name must be an identifier", repr(counter.name))
        if isinstance(counter.limit, int) and counter.limit < 0:
            raise GraphError(f"the counter's limit is {counter.limit}; it must be 0 or more", counter.name)
    _check_unique((c.name for c in graph.counters), "the counter is declared twice")
    declared = {c.name for c in graph.counters}
    uses = [(s.name, s.spends) for s in graph.states]
    uses += [(t.id, (*t.spends, *t.refills)) for t in graph.transitions]
    for where, names in uses:
        for name in names:
            if name not in declared:
                raise GraphError(
                    f"it spends or refills {name!r}, which is not a declared counter",
                    where,
                    f"declare Counter({name!r}, limit) in Graph(counters=...); declared: {', '.join(sorted(declared))}",
                )
    for row in graph.transitions:
        if row.guard is None and row.spends and not graph.spec(row.source).waits:
            raise GraphError("a transition without a guard must not spend: a run that cannot would be stuck", row.id)
        if isinstance(row.guard, Exhausted) and row.guard.counter not in graph.counters:
            raise GraphError(f"its guard is made from {row.guard.counter}, which is not a declared counter", row.id)
    for spec in graph.states:
        for name in spec.spends:
            if not (spec.waits or spec.final) and not any(_ends_counter(t, name) for t in graph.rows(spec.name)):
                raise GraphError(
                    f"it spends {name!r} and has no row for the counter's end",
                    spec.name,
                    f"add a row whose guard is made with exhausted({name!r}, past=True)",
                )


def _ends_counter(row: Transition, counter: str) -> bool:
    return isinstance(row.guard, Exhausted) and row.guard.counter.name == counter


def _check_cycles(graph: Graph) -> None:
    graph.max_moves(lambda counter: 1)


def _longest_walk(
    graph: Graph, states: frozenset[str], edges: Sequence[Transition], limits: Mapping[str, int | None]
) -> int:
    """An upper bound on the number of rows that a run can take in a row, all of them among ``edges``.

    A strongly connected part of the graph is left at the latest when what its rows spend is used up. So the rows that
    spend a counter which no row of the part refills are taken a limited number of times, and what lies between two of
    them is a walk without these rows, which is bounded in the same way.

    Raises:
        GraphError: A cycle spends nothing that bounds it.
    """
    parts = _strongly_connected(states, edges)
    total = len(parts) - 1
    for part in parts:
        inside = [t for t in edges if t.source in part and t.target in part]
        if not inside:
            continue
        spent = _bounded_rows(graph, part, inside, limits)
        if not spent:
            raise _cycle_error(inside)
        times = sum(spent.values())
        rest = [t for t in inside if not any(t in rows for rows in spent)]
        total += times + (times + 1) * _longest_walk(graph, part, rest, limits)
    return total


def _bounded_rows(
    graph: Graph, part: frozenset[str], inside: Sequence[Transition], limits: Mapping[str, int | None]
) -> dict[tuple[Transition, ...], int]:
    """The rows of a part that can be taken a limited number of times, and how often, by the counter that they spend."""
    bounded: dict[tuple[Transition, ...], int] = {}
    for counter in graph.counters:
        name, limit = counter.name, limits[counter.name]
        if limit is None or any(name in t.refills for t in inside):
            continue
        if rows := tuple(t for t in inside if name in t.spends):
            bounded[rows] = bounded.get(rows, 0) + limit
        for state in sorted(part):
            if name in graph.spec(state).spends and _left_at_the_end(graph, state, name, part):
                entries = tuple(t for t in inside if t.target == state)
                bounded[entries] = bounded.get(entries, 0) + limit + 1
    return bounded


def _left_at_the_end(graph: Graph, state: str, counter: str, part: frozenset[str]) -> bool:
    """Whether a run leaves a part of the graph for good when a state finds the counter spent that it spends."""
    for row in graph.rows(state):
        if row.target in part:
            return False
        if _ends_counter(row, counter):
            return True
    return False


def _strongly_connected(states: frozenset[str], edges: Iterable[Transition]) -> list[frozenset[str]]:
    """The strongly connected parts of a graph."""
    pairs = [(t.source, t.target) for t in edges]
    after = {state: _reach(state, pairs) for state in states}
    parts: list[frozenset[str]] = []
    for state in sorted(states):
        if not any(state in part for part in parts):
            parts.append(frozenset(other for other in after[state] if state in after[other]) | {state})
    return parts


def _reach(start: str, pairs: Sequence[tuple[str, str]]) -> set[str]:
    reached: set[str] = set()
    todo = [start]
    while todo:
        state = todo.pop()
        more = {b for a, b in pairs if a == state} - reached
        reached |= more
        todo += more
    return reached


def _cycle_error(inside: Sequence[Transition]) -> GraphError:
    """The error about a cycle in a strongly connected part that spends nothing to bound it."""
    first = inside[0]
    came_from: dict[str, Transition | None] = {first.target: None}
    todo = deque([first.target])
    while todo and first.source not in came_from:
        state = todo.popleft()
        for each in inside:
            if each.source == state and each.target not in came_from:
                came_from[each.target] = each
                todo.append(each.target)
    path: list[Transition] = []
    row: Transition | None = came_from.get(first.source)
    while row is not None:
        path.append(row)
        row = came_from[row.source]
    cycle = [first, *reversed(path)]
    names = " -> ".join([first.source, *(str(t.target) for t in cycle)])
    spent = sorted({name for t in cycle for name in t.spends})
    why = f"spends {', '.join(spent)}, which it also refills," if spent else "spends no counter"
    return GraphError(
        f"closes a cycle that {why} and never waits: {names}",
        cycle[-1].id,
        "give a row of it spends=... with a declared counter, or route it through a state that spends one",
    )
