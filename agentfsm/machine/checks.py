"""The rules that a graph must keep. ``check`` runs when a graph is built and reads nothing but the graph.

1. Names are identifiers; no state is declared twice, no guard asked twice in one state.
2. Every transition joins declared states, and none leaves a final one.
3. A guard is a plain function: a coroutine function or a generator would always read as true.
4. Every state but a waiting or final one ends in a transition without a guard, so no run is ever stuck;
   nothing stands behind it, where it could never be asked.
5. Every state can be reached, and a final state can be reached from every state.
6. Every cycle spends something or waits for an event from outside, so every run ends or waits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from agentfsm.errors import GraphError

if TYPE_CHECKING:
    from agentfsm.machine.graph import Graph, Transition

__all__ = ["check"]


def check(graph: Graph) -> None:
    """Raise ``GraphError`` for the first rule that a graph breaks, naming the edge."""
    for rule in (_names, _ends, _guards, _last_rows, _reach, _cycles):
        rule(graph)


def _names(graph: Graph) -> None:
    if not graph.states:
        raise GraphError("a graph needs at least one state", graph.name)
    _no_twice((s.name for s in graph.states), "the state is declared twice")
    for spec in graph.states:
        if not spec.name.isidentifier():
            raise GraphError("a state's name must be an identifier", repr(spec.name))
    for transition in graph.transitions:
        if not transition.name.isidentifier():
            raise GraphError(
                "a guard's name must be an identifier", transition.id, "give the function a name: no lambda"
            )
    _no_twice((t.id for t in graph.transitions), "the guard is asked twice in one state")


def _no_twice(names: Iterable[str], rule: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise GraphError(rule, name)
        seen.add(name)


def _ends(graph: Graph) -> None:
    specs = {s.name: s for s in graph.states}
    for transition in graph.transitions:
        for end in (transition.source, transition.target):
            if end not in specs:
                known = ", ".join(specs)
                raise GraphError(f"{end!r} is not a declared state", transition.id, f"declared: {known}")
        if specs[transition.source].final:
            raise GraphError("nothing may leave a final state", transition.id)


def _guards(graph: Graph) -> None:
    for transition in graph.transitions:
        guard = transition.guard
        if guard is None:
            continue
        if not callable(guard):
            raise GraphError("a guard must be a function of the run", transition.id)
        if _always_true(guard) or _always_true(type(guard).__call__):
            raise GraphError(
                "a guard must be a plain function, not a coroutine function or a generator",
                transition.id,
                "await in an effect",
            )


def _always_true(function: object) -> bool:
    """Whether what a function returns is an object that waits to be run, and never its answer."""
    return (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    )


def _last_rows(graph: Graph) -> None:
    for spec in graph.states:
        rows = graph.rows(spec.name)
        if spec.final:
            continue
        if not rows:
            raise GraphError("no transition leaves the state", spec.name, "declare it final, or add a row")
        for earlier, later in pairwise(rows):
            if earlier.guard is None:
                raise GraphError(f"can never be asked: {earlier.id} stands in front of it and has no guard", later.id)
        if rows[-1].guard is not None and not spec.waits:
            raise GraphError(
                "the last transition of a state that does not wait must have no guard",
                rows[-1].id,
                f"add Transition({str(spec.name)!r}, None, ...) behind it",
            )


def _reach(graph: Graph) -> None:
    reached = _closure({graph.initial}, graph.transitions, lambda t: (t.source, t.target))
    finals = {s.name for s in graph.states if s.final}
    if not finals:
        raise GraphError("a graph needs a final state", graph.name)
    ending = _closure(finals, graph.transitions, lambda t: (t.target, t.source))
    for spec in graph.states:
        if spec.name not in reached:
            raise GraphError(f"the state cannot be reached from {graph.initial!r}", spec.name)
        if spec.name not in ending:
            raise GraphError("no final state can be reached from the state", spec.name)


def _closure(
    start: set[str], transitions: Iterable[Transition], ends: Callable[[Transition], tuple[str, str]]
) -> set[str]:
    pairs = [ends(t) for t in transitions]
    found = set(start)
    while more := {b for a, b in pairs if a in found} - found:
        found |= more
    return found


def _cycles(graph: Graph) -> None:
    """Refuse a cycle in what is left when all that spends or waits is taken out."""
    bounded = {s.name for s in graph.states if s.spends or s.waits}
    free = [t for t in graph.transitions if not t.spends and t.source not in bounded and t.target not in bounded]
    on_path: list[Transition] = []
    done: set[str] = set()

    def walk(state: str) -> None:
        for transition in (t for t in free if t.source == state):
            path = [t.source for t in on_path] + [state]
            if transition.target in path:
                loop = [*path[path.index(transition.target) :], transition.target]
                raise GraphError(
                    f"closes a cycle that spends nothing and waits for nobody: {' -> '.join(loop)}",
                    transition.id,
                    "say what it uses up with spends=..., or lead it through a state that spends",
                )
            if transition.target not in done:
                on_path.append(transition)
                walk(transition.target)
                on_path.pop()
        done.add(state)

    for spec in graph.states:
        if spec.name not in done:
            walk(spec.name)
