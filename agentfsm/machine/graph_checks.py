"""The rules that every graph keeps; ``check_graph`` checks them when a graph is built.

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
   waits for an external event, so every run ends or waits within ``max_moves`` moves.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

from agentfsm.errors import GraphError
from agentfsm.machine.declaration import (
    ENDINGS,
    Counter,
    EffectSpec,
    Exhausted,
    Guard,
    StateSpec,
    Transition,
    guard_name,
    outcomes_taken,
)


class Table(Protocol):
    """What the checks read of a graph; its attributes are those of ``Graph``."""

    @property
    def name(self) -> str:
        """Its name in errors."""
        ...

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The declared states."""
        ...

    @property
    def initial(self) -> str:
        """The name of the state in which a run starts."""
        ...

    @property
    def transitions(self) -> tuple[Transition, ...]:
        """The rows, in order."""
        ...

    @property
    def counters(self) -> tuple[Counter, ...]:
        """The declared counters."""
        ...

    @property
    def first(self) -> tuple[Guard, ...]:
        """The guards that come first in every state that is not final."""
        ...

    @property
    def stored(self) -> bool:
        """Whether it was read from a stored table, whose guards are names only."""
        ...

    def rows(self, state: str) -> tuple[Transition, ...]:
        """The transitions that leave a state, in order."""
        ...

    def spec(self, state: str) -> StateSpec:
        """The declaration of a state."""
        ...


def check_graph(graph: Table) -> None:
    """Check every rule of the module's docstring.

    Raises:
        GraphError: A rule is broken; it names the first such rule and the edge.
    """
    for rule in (_check_names, _check_endpoints, _check_guards, _check_default_rows, _check_reachability):
        rule(graph)
    if not graph.stored:
        for rule in (_check_first_rows, _check_endings, _check_outcomes, _check_counters, _check_cycles):
            rule(graph)


def _check_names(graph: Table) -> None:
    if not graph.states:
        raise GraphError("a graph needs at least one state", graph.name)
    _check_unique((s.name for s in graph.states), "the state is declared twice")
    for spec in graph.states:
        if not spec.name.isidentifier():
            raise GraphError("a state's name must be an identifier", repr(spec.name))
    for transition in graph.transitions:
        if not transition.name.isidentifier():
            unnamed = transition.name == (lambda: None).__name__
            hint = "name the function: a lambda has no name" if unnamed else "give the guard such a __name__"
            raise GraphError("a guard's name must be an identifier", transition.id, hint)
    _check_unique((t.id for t in graph.transitions), "the guard is used twice in one state")


def _check_unique(names: Iterable[str], rule: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise GraphError(rule, name)
        seen.add(name)


def _check_endpoints(graph: Table) -> None:
    specs = {s.name: s for s in graph.states}
    for transition in graph.transitions:
        for end in (transition.source, transition.target):
            if end not in specs:
                known = ", ".join(specs)
                raise GraphError(f"{end!r} is not a declared state", transition.id, f"declared: {known}")
        if specs[transition.source].final:
            raise GraphError("no transition may leave a final state", transition.id)


def _check_guards(graph: Table) -> None:
    for transition in graph.transitions:
        guard = transition.guard
        if guard is None:
            continue
        if not callable(guard):
            raise GraphError("a guard must be a function of the run", transition.id)
        if type(guard).__hash__ is None:
            raise GraphError(
                "a guard must be hashable, because proofs look up what is known about it",
                transition.id,
                "give its class a __hash__, or no __eq__ of its own",
            )
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


def _check_default_rows(graph: Table) -> None:
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


def _check_reachability(graph: Table) -> None:
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


def _check_first_rows(graph: Table) -> None:
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


def _check_endings(graph: Table) -> None:
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


def _check_outcomes(graph: Table) -> None:
    """Each outcome of a state's effect must be taken by a row of the state."""
    for spec in graph.states:
        taken = outcomes_taken(graph.rows(spec.name))
        built_in = isinstance(spec.effect, EffectSpec)
        needed = spec.effect.exceptional if isinstance(spec.effect, EffectSpec) else spec.outcomes
        for outcome in needed:
            if outcome not in taken:
                raise GraphError(
                    f"its effect may come back with {outcome!r}, and no row of the state takes that",
                    spec.name,
                    "add a row whose guard takes it"
                    + ("" if built_in else f", such as came_back({outcome!r}); a row without a guard takes no outcome"),
                )


def _check_counters(graph: Table) -> None:
    for counter in graph.counters:
        if not counter.name.isidentifier():
            raise GraphError("a counter's name must be an identifier", repr(counter.name))
        if isinstance(counter.limit, bool) or not isinstance(counter.limit, int | str):  # pyright: ignore[reportUnnecessaryIsInstance]
            problem = f"the counter's limit is {counter.limit!r}; it must be a whole number or the name of a guardrail"
            raise GraphError(problem, counter.name)
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


def _check_cycles(graph: Table) -> None:
    max_moves(graph, lambda counter: 1)


def max_moves(graph: Table, limit: Callable[[Counter], int | None]) -> int:
    """The most moves that any run can make between two waits, whatever its guards return.

    Raises:
        GraphError: A cycle spends nothing that bounds it.
    """
    by_name = {c.name: limit(c) for c in graph.counters}
    inner = frozenset(s.name for s in graph.states if not (s.waits or s.final))
    edges = [t for t in graph.transitions if t.source in inner and t.target in inner]
    return _longest_walk(graph, inner, edges, by_name) + 2


def _longest_walk(
    graph: Table, states: frozenset[str], edges: Sequence[Transition], limits: Mapping[str, int | None]
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
    graph: Table, part: frozenset[str], inside: Sequence[Transition], limits: Mapping[str, int | None]
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


def _left_at_the_end(graph: Table, state: str, counter: str, part: frozenset[str]) -> bool:
    """Whether a run leaves a part of the graph and never returns when a state finds its counter spent.

    The row for the counter's end does not hold where another counter is empty that it spends.
    """
    for row in graph.rows(state):
        if row.target in part:
            return False
        if _ends_counter(row, counter) and not row.spends:
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
