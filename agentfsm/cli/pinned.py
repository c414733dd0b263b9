"""What a run of the store tells of its table: the graph that its journal pins, and the way that it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agentfsm.analysis import from_table
from agentfsm.cli.runs import default_store, open_store
from agentfsm.core.loop import LOOP
from agentfsm.core.presets import PRESETS
from agentfsm.diagrams import RunPath
from agentfsm.errors import ConfigurationError
from agentfsm.journal.records import Record
from agentfsm.journal.restore import records
from agentfsm.machine.graph import Graph

__all__ = ["graph_of_run", "path_of_run", "records_of"]


def records_of(run_id: str, store: Path | None, what: str) -> list[Record]:
    """The records of a run.

    Args:
        run_id: The run.
        store: The file of the store; the default one unless given.
        what: What the word could have been, for the error.

    Raises:
        ConfigurationError: There is no such run.
    """
    if not (store or default_store()).exists():
        raise ConfigurationError(f"{run_id!r} is {what}: there is no store at {store or default_store()}")
    rows = open_store(store).rows(run_id)
    if not rows:
        raise ConfigurationError(f"{run_id!r} is {what}")
    return records(rows, run_id)


def graph_of_run(found: Sequence[Record]) -> Graph:
    """The graph that a run's journal pins, the last one where it changed; with guards by name only.

    A table of this library's comes back as itself. Of any other, states that the default loop has too keep
    their notes and lanes, which no journal holds.
    """
    table = next(record.data["graph"] for record in reversed(found) if "graph" in record.data)
    graph = from_table(table, str(table.get("name", "graph")))
    for known in (LOOP, *(preset.graph for preset in PRESETS.values())):
        if known.fingerprint == graph.fingerprint:
            return known
    ours = {spec.name: spec for spec in LOOP.states}
    dressed = (
        replace(spec, note=ours[spec.name].note, lane=ours[spec.name].lane) if spec.name in ours else spec
        for spec in graph.states
    )
    return replace(graph, states=tuple(dressed))


def path_of_run(found: Sequence[Record], graph: Graph) -> RunPath:
    """The way that a run took through a graph; moves of a table that it ran on before are left out.

    Raises:
        ConfigurationError: The run is on another graph.
    """
    first = max(place for place, record in enumerate(found) if "graph" in record.data)
    ids = {row.id for row in graph}
    moves = [record.data for record in found if record.kind == "transition"]
    late = [record.data for record in found[first:] if record.kind == "transition"]
    strange = [move["transition"] for move in late if move["transition"] not in ids]
    if strange:
        raise ConfigurationError(f"the run took {strange[0]}, and graph {graph.name!r} has no such row")
    state = found[0].data.get("state", {}).get("state", graph.initial)
    current = moves[-1]["to"] if moves else state
    return RunPath.of((move["transition"] for move in moves if move["transition"] in ids), str(current))
