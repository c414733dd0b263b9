"""Interchange formats for other state machine engines: SCXML and XState.

In both, the event ``step`` evaluates a state's rows in document order and takes the first whose condition holds,
as our engine does. They carry structure, order and names, but not the guards' code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from agentfsm.diagrams.style import Theme, escape_xml
from agentfsm.diagrams.view import View
from agentfsm.machine.graph import Graph, StateSpec, Transition

SCXML_NAMESPACE = "urn:agentfsm"
"""The XML namespace of what SCXML has no attribute for: counters, the number, id and cost of a row, a state's note."""


def scxml(view: View, theme: Theme = "auto") -> str:
    """A graph as SCXML (W3C). A condition is the name of its guard, which the program that loads it must define."""
    return "\n".join(_scxml(view.graph)) + "\n"


def _scxml(graph: Graph) -> Iterator[str]:
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    yield (
        f'<scxml xmlns="http://www.w3.org/2005/07/scxml" xmlns:fsm="{SCXML_NAMESPACE}" version="1.0" '
        f'name="{escape_xml(" ".join(graph.name.split()))}" initial="{escape_xml(graph.initial)}"'
        f"{_scxml_counters(graph)}>"
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
            spends = "".join(f' fsm:{name}="{escape_xml(value)}"' for name, value in _declared(row).items())
            ours = f'fsm:order="{order}" fsm:id="{escape_xml(row.id)}"{spends}'
            yield f'    <transition event="step"{cond} target="{escape_xml(row.target)}" {ours}/>'
        yield f"  </{element}>"
    yield "</scxml>"


def _scxml_counters(graph: Graph) -> str:
    listed = " ".join(f"{each.name}={each.limit}" for each in graph.counters)
    return f' fsm:counters="{escape_xml(listed)}"' if listed else ""


def _declared(row: Transition) -> dict[str, str]:
    """What a row spends and refills, and how it ends the run."""
    declared = {"spends": " ".join(row.spends), "refills": " ".join(row.refills), "ends": row.ends}
    return {name: text for name, text in declared.items() if text}


def _state_attributes(spec: StateSpec) -> Iterator[tuple[str, str]]:
    if spec.note:
        yield "note", " ".join(spec.note.split())
    if spec.spends:
        yield "spends", " ".join(spec.spends)
    if spec.waits:
        yield "waits", "true"


def xstate(view: View, theme: Theme = "auto") -> str:
    """A graph as the JSON configuration of an XState (v5) machine, with guards by name, to be implemented there."""
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
            meta = {"order": order, "id": row.id, **_declared(row)}
            rows.append({**guard, "target": str(row.target), "meta": meta})
        if rows:
            state["on"] = {"step": rows}
        states[str(spec.name)] = state
    counters = {each.name: each.limit for each in graph.counters}
    meta = {"meta": {"counters": counters}} if counters else {}
    machine = {"id": graph.name, "initial": str(graph.initial), **meta, "states": states}
    return json.dumps(machine, indent=2, ensure_ascii=False) + "\n"
