"""Promela for the SPIN model checker: states, and rows in their order, with guards that may answer anything.

A verdict about this model holds for every run of the graph, whatever its guards compute; a counterexample
may be one that the real guards rule out. What spends is counted, up to ``BOUND`` of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from agentfsm.diagrams.quoting import ascii_name
from agentfsm.diagrams.style import Theme
from agentfsm.diagrams.view import View
from agentfsm.machine.graph import Graph, StateSpec

__all__ = ["promela"]

BOUND = 8
"""How much a run of the model may spend before it stops."""


def promela(view: View, theme: Theme = "auto") -> str:
    """A graph as Promela, with one property: every run ends, or comes to a state that waits, again and again."""
    return "\n".join(_promela(view.graph)) + "\n"


def _promela(graph: Graph) -> Iterator[str]:
    rest = [s for s in graph.states if s.final or s.waits]
    yield f"/* {_comment(graph.name)}: a guard that is asked may hold or not; rows are asked in their order. */"
    yield f"#define BOUND {BOUND}"
    yield f"mtype = {{ {', '.join('S_' + ascii_name(s.name) for s in graph.states)} }};"
    yield f"mtype state = S_{ascii_name(graph.initial)};"
    yield "byte spent = 0;"
    yield "bool over = false;"
    yield ""
    yield "inline spend() { if :: spent < BOUND -> spent++ :: else -> goto bound fi }"
    yield ""
    yield "active proctype run_of_graph()"
    yield "{"
    for spec in graph.states:
        yield from _state(graph, spec)
    yield "bound: over = true"
    yield "}"
    yield ""
    resting = " || ".join(["over", *(f"state == S_{ascii_name(s.name)}" for s in rest)])
    yield f"ltl ends_or_waits {{ []<>({resting}) }}"


def _state(graph: Graph, spec: StateSpec) -> Iterator[str]:
    name = ascii_name(spec.name)
    note = f" /* {_comment(spec.note)} */" if spec.note else ""
    yield f"at_{name}:{note}"
    yield f"  state = S_{name};"
    if spec.final:
        yield "  goto bound;"
        return
    if spec.spends:
        yield f"  spend(); /* {_comment(spec.spends)} */"
    for order, row in enumerate(graph.rows(spec.name), 1):
        spend = "spend(); " if row.spends else ""
        go = f"{spend}goto at_{ascii_name(row.target)}"
        said = f"/* {order} {row.id}{f', spends {_comment(row.spends)}' if row.spends else ''} */"
        if row.guard is None:
            yield f"  {go}; {said}"
        else:
            yield f"  if :: {go} :: skip fi; {said}"
    if graph.rows(spec.name)[-1].guard is not None:
        yield f"  goto at_{name}; /* nothing came: it waits on */"


def _comment(text: str) -> str:
    return " ".join(text.split()).replace("*/", "* /").replace("/*", "/ *")
