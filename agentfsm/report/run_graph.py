"""The graph of a stored run as its journal pins it, and the run's path through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentfsm.analysis import graph_from_table
from agentfsm.diagrams import RunPath
from agentfsm.errors import ConfigurationError
from agentfsm.journal.records import Record
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.graph import Graph

__all__ = ["graph_of_run", "path_of_run"]


def graph_of_run(run_records: Sequence[Record]) -> Graph:
    """The graph that a run's journal pins, or the last one if the run was migrated; its guards are names only.

    A preset's graph is returned as it is. In any other graph, states that the default loop also has get its
    notes and lanes, which a journal does not hold.
    """
    table = next(record.data["graph"] for record in reversed(run_records) if "graph" in record.data)
    graph = graph_from_table(table, str(table.get("name", "graph")))
    known = next((each.graph for each in PRESETS.values() if each.graph.fingerprint == graph.fingerprint), None)
    if known is not None:
        return known
    loop_states = {spec.name: spec for spec in LOOP.states}
    states = (
        replace(spec, note=loop_states[spec.name].note, lane=loop_states[spec.name].lane)
        if spec.name in loop_states
        else spec
        for spec in graph.states
    )
    return replace(graph, states=tuple(states))


def path_of_run(run_records: Sequence[Record], graph: Graph) -> RunPath:
    """The path of a run through a graph, without the rows it took on an earlier graph before a migration.

    Raises:
        ConfigurationError: The run is on another graph.
    """
    pinned_at = max(index for index, record in enumerate(run_records) if "graph" in record.data)
    ids = {row.id for row in graph}
    moves = [record.data for record in run_records if record.kind == "transition"]
    on_this_graph = [record.data for record in run_records[pinned_at:] if record.kind == "transition"]
    unknown = [move["transition"] for move in on_this_graph if move["transition"] not in ids]
    if unknown:
        raise ConfigurationError(f"the run took {unknown[0]}, but graph {graph.name!r} has no such row")
    state = run_records[0].data.get("state", {}).get("state", graph.initial)
    current = moves[-1]["to"] if moves else state
    return RunPath.from_ids((move["transition"] for move in moves if move["transition"] in ids), str(current))
