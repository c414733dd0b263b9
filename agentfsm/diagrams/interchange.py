"""Formats for other tools: SCXML, XState and Promela (the SPIN model checker).

In SCXML and XState the event ``step`` evaluates a state's rows in document order, and the first whose
condition holds is taken, as our engine does. They carry structure, order and names, not the guards' code.
In Promela every guard may hold or not, and spending is counted up to a bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from agentfsm.diagrams.escaping import ascii_identifier, escape_xml
from agentfsm.diagrams.style import Theme
from agentfsm.diagrams.view import View
from agentfsm.machine.graph import Graph, StateSpec

__all__ = ["promela", "scxml", "xstate"]


SCXML_NAMESPACE = "urn:agentfsm"
"""The XML namespace of what SCXML has no word for: number, id and cost of a row, and a state's note."""


def scxml(view: View, theme: Theme = "auto") -> str:
    """A graph as SCXML (W3C). A condition is the guard's name, to be bound by who loads it."""
    return "\n".join(_scxml(view.graph)) + "\n"


def _scxml(graph: Graph) -> Iterator[str]:
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    yield (
        f'<scxml xmlns="http://www.w3.org/2005/07/scxml" xmlns:fsm="{SCXML_NAMESPACE}" version="1.0" '
        f'name="{escape_xml(" ".join(graph.name.split()))}" initial="{escape_xml(graph.initial)}">'
    )
    for spec in graph.states:
        element = "final" if spec.final else "state"
        more = "".join(f' fsm:{name}="{escape_xml(text)}"' for name, text in _state_attributes(spec))
        if not graph.rows(spec.name):
            yield f'  <{element} id="{escape_xml(spec.name)}"{more}/>'
            continue
        yield f'  <{element} id="{escape_xml(spec.name)}"{more}>'
        for order, row in enumerate(graph.rows(spec.name), 1):
            cond = "" if row.guard is None else f' cond="{escape_xml(row.name)}"'
            spends = f' fsm:spends="{escape_xml(row.spends)}"' if row.spends else ""
            ours = f'fsm:order="{order}" fsm:id="{escape_xml(row.id)}"{spends}'
            yield f'    <transition event="step"{cond} target="{escape_xml(row.target)}" {ours}/>'
        yield f"  </{element}>"
    yield "</scxml>"


def _state_attributes(spec: StateSpec) -> Iterator[tuple[str, str]]:
    if spec.note:
        yield "note", " ".join(spec.note.split())
    if spec.spends:
        yield "spends", spec.spends
    if spec.waits:
        yield "waits", "true"


def xstate(view: View, theme: Theme = "auto") -> str:
    """A graph as the JSON configuration of an XState (v5) machine; guards are named, to be implemented there."""
    graph = view.graph
    states: dict[str, Any] = {}
    for spec in graph.states:
        state: dict[str, Any] = dict(_state_attributes(spec))
        if "note" in state:
            state = {"description": state.pop("note"), **({"meta": state} if state else {})}
        elif state:
            state = {"meta": state}
        if spec.final:
            state["type"] = "final"
        rows: list[dict[str, Any]] = []
        for order, row in enumerate(graph.rows(spec.name), 1):
            guard = {} if row.guard is None else {"guard": row.name}
            meta = {"order": order, "id": row.id, **({"spends": row.spends} if row.spends else {})}
            rows.append({**guard, "target": str(row.target), "meta": meta})
        if rows:
            state["on"] = {"step": rows}
        states[str(spec.name)] = state
    machine = {"id": graph.name, "initial": str(graph.initial), "states": states}
    return json.dumps(machine, indent=2, ensure_ascii=False) + "\n"


PROMELA_SPEND_LIMIT = 8
"""How much a run of the model may spend before it stops."""


def promela(view: View, theme: Theme = "auto") -> str:
    """A graph as Promela, with one property: every run ends, or comes to a state that waits, again and again."""
    return "\n".join(_promela(view.graph)) + "\n"


def _promela(graph: Graph) -> Iterator[str]:
    rest = [s for s in graph.states if s.final or s.waits]
    yield f"/* {_promela_comment(graph.name)}: a guard that is asked may hold or not; rows are asked in their order. */"
    yield f"#define BOUND {PROMELA_SPEND_LIMIT}"
    yield f"mtype = {{ {', '.join('S_' + ascii_identifier(s.name) for s in graph.states)} }};"
    yield f"mtype state = S_{ascii_identifier(graph.initial)};"
    yield "byte spent = 0;"
    yield "bool over = false;"
    yield ""
    yield "inline spend() { if :: spent < BOUND -> spent++ :: else -> goto bound fi }"
    yield ""
    yield "active proctype run_of_graph()"
    yield "{"
    for spec in graph.states:
        yield from _promela_state(graph, spec)
    yield "bound: over = true"
    yield "}"
    yield ""
    resting = " || ".join(["over", *(f"state == S_{ascii_identifier(s.name)}" for s in rest)])
    yield f"ltl ends_or_waits {{ []<>({resting}) }}"


def _promela_state(graph: Graph, spec: StateSpec) -> Iterator[str]:
    name = ascii_identifier(spec.name)
    note = f" /* {_promela_comment(spec.note)} */" if spec.note else ""
    yield f"at_{name}:{note}"
    yield f"  state = S_{name};"
    if spec.final:
        yield "  goto bound;"
        return
    if spec.spends:
        yield f"  spend(); /* {_promela_comment(spec.spends)} */"
    for order, row in enumerate(graph.rows(spec.name), 1):
        spend = "spend(); " if row.spends else ""
        go = f"{spend}goto at_{ascii_identifier(row.target)}"
        said = f"/* {order} {row.id}{f', spends {_promela_comment(row.spends)}' if row.spends else ''} */"
        if row.guard is None:
            yield f"  {go}; {said}"
        else:
            yield f"  if :: {go} :: skip fi; {said}"
    if graph.rows(spec.name)[-1].guard is not None:
        yield f"  goto at_{name}; /* nothing came: it waits on */"


def _promela_comment(text: str) -> str:
    return " ".join(text.split()).replace("*/", "* /").replace("/*", "/ *")
