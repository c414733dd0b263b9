"""A graph as data to keep in a file, with digests of its code, and the graph of such data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from agentfsm.analysis.code_comparison import DigestOnly, code_digest
from agentfsm.errors import ConfigurationError
from agentfsm.loop.stored_table import read_table
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.declaration import Counter
from agentfsm.machine.graph import Graph, StateSpec, Transition

__all__ = ["format_reviewed", "graph_from_table", "reviewed_table"]


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
