"""Stored runs against the model of their proofs: the monitor (``Host.monitor``), after the fact."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from agentfsm.agent.agent import Agent
from agentfsm.agent.config import proof_traits
from agentfsm.analysis import AgentTraits
from agentfsm.analysis.run_monitor import ModelMismatch, ProofModel
from agentfsm.errors import JournalError
from agentfsm.journal.records import SealedRecord, read_record
from agentfsm.journal.rehydrate import RehydratedRun
from agentfsm.loop.outcomes import count_tool_calls
from agentfsm.loop.presets import PRESETS
from agentfsm.machine.graph import Graph

__all__ = ["StoredRunCheck", "check_stored_run"]


@dataclass(frozen=True, slots=True)
class StoredRunCheck:
    """Whether a stored run stayed inside the model of its proofs.

    Attributes:
        inside: Whether it did; None if that cannot be checked.
        reason: Why it did not, or cannot be checked.
        moves: How many moves were checked.
    """

    inside: bool | None
    reason: str
    moves: int


def check_stored_run(records: Iterable[SealedRecord], agent: Agent[Any, Any] | None = None) -> StoredRunCheck:
    """Follow a stored run through the model of its proofs: every move, and the counters after it.

    Args:
        records: The run's journal, from its first record.
        agent: The agent that made it. Without one, the graph must be a preset's, and nothing is assumed about tools.

    Raises:
        JournalError: The journal cannot be read.
    """
    sealed = list(records)
    graph = _graph_of(sealed, agent)
    if graph is None:
        return StoredRunCheck(None, "its graph is not a preset's: name the agent that made it", 0)
    reader, moves = RehydratedRun(), 0
    monitor = None
    for record in sealed:
        reader.add(record)
        body = read_record(record, reader.run.run_id)
        if body.kind == "run.migrated":
            return StoredRunCheck(None, f"it was migrated to another graph after {moves} moves", moves)
        run = reader.run
        if monitor is None:
            traits = _unknown_traits(reader) if agent is None else proof_traits(agent.config)
            monitor = ProofModel(graph, traits).monitor(run)
        elif body.kind == "transition":
            row = graph.transition(body.data["transition"])
            mismatch: ModelMismatch | None = monitor.record_move(row, run, count_tool_calls(reader.outcome))
            if monitor.lacks_bounds:
                mismatch = monitor.compare_bounds()
            if mismatch is not None:
                return StoredRunCheck(False, f"record {record.seq}: {mismatch}", moves)
            moves += 1
    return StoredRunCheck(True, "", moves)


def _graph_of(sealed: list[SealedRecord], agent: Agent[Any, Any] | None) -> Graph | None:
    """The graph of a run, with the code of its guards."""
    if not sealed:
        raise JournalError("the journal is empty")
    first = RehydratedRun()
    first.add(sealed[0])
    graphs = [agent.graph] if agent is not None else [preset.graph for preset in PRESETS.values()]
    return next((graph for graph in graphs if graph.fingerprint == first.graph["fingerprint"]), None)


def _unknown_traits(reader: RehydratedRun) -> AgentTraits:
    """What a journal tells about the agent: the behavior of its preset, and nothing about its tools and its model."""
    return AgentTraits(reader.run.behavior, sub_agents=True, secrets=True, fallbacks=True, asks=True, gives_up=True)
