"""Invariants of every run, as functions that assert; choose the ones that your tests need.

``check_stored_run`` says of a stored run whether it kept to the model of its proofs, as the monitor (``Host.monitor``)
does while a run runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from agentfsm.agent import Agent
from agentfsm.agent.config import proof_traits
from agentfsm.analysis import AgentTraits
from agentfsm.analysis.run_monitor import ModelMismatch, ProofModel
from agentfsm.errors import JournalError
from agentfsm.journal.records import SealedRecord, read_record
from agentfsm.journal.rehydrate import RehydratedRun
from agentfsm.journal.verification import verify
from agentfsm.loop.messages import Role
from agentfsm.loop.outcomes import count_tool_calls
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.state import RunState
from agentfsm.machine.declaration import EffectSpec
from agentfsm.machine.graph import Graph
from agentfsm.testing.simulation import SIMULATION_RUN_ID, Scenario, SimulationResult, Simulator
from agentfsm.testing.tool_calls import requires_approval

__all__ = [
    "approved_before_run",
    "check_stored_run",
    "counted_as_declared",
    "ended_once",
    "journal_verifies",
    "one_result_per_call",
    "resumes_identically",
    "within_budgets",
]


def one_result_per_call(run: RunState) -> None:
    """Every tool call in the transcript has exactly one result, except for the current batch, which has none yet."""
    open_ids = {c.call.id for c in run.batch}
    calls = [c.id for m in run.messages for c in m.tool_calls]
    results = [m.tool_call_id for m in run.messages if m.role is Role.TOOL and m.tool_call_id is not None]
    assert len(set(calls)) == len(calls), f"two calls share an id: {calls}"  # noqa: S101
    assert sorted(results) == sorted(set(calls) - open_ids), f"calls {calls} have results {results}"  # noqa: S101


def within_budgets(run: RunState) -> None:
    """No budget is exceeded: steps, model calls, limit extensions, and retries of a call."""
    limits = run.guardrails
    assert run.steps <= limits.step_limit + 1, f"{run.steps} steps, but {limits.step_limit} are allowed"  # noqa: S101
    if limits.max_iterations is not None:
        assert run.iterations <= limits.max_iterations, f"{run.iterations} model calls"  # noqa: S101
    assert run.continues <= limits.max_continues, f"extended {run.continues} times"  # noqa: S101
    assert all(c.retries <= limits.max_tool_retries for c in run.batch), "a call was retried too often"  # noqa: S101


def approved_before_run(agent: Agent[Any, Any], result: SimulationResult) -> None:
    """No tool call that requires approval was executed before it was approved."""
    tools = agent.config.tools
    for started in result.started_tools:
        tool = tools.get(started.tool)
        if tool is not None and requires_approval(tool, started.arguments):
            assert started.approved, f"{started.tool} was executed without approval: {started.arguments}"  # noqa: S101


def ended_once(result: SimulationResult) -> None:
    """The run has ended, and took exactly one transition into a final state."""
    finals = {s.name for s in result.run_result.graph.states if s.final}
    into = [d for d in result.decisions if d.target in finals]
    assert len(into) == 1, f"the run ended {len(into)} times"  # noqa: S101
    assert result.decisions[-1] is into[0], "the run took transitions after its end"  # noqa: S101


def counted_as_declared(result: SimulationResult) -> None:
    """Each counter was spent and refilled by exactly what the states and rows on the way declare.

    Counters that an effect charges, or a person extends, are left out; model calls are counted by the calls made.
    """
    run, graph = result.run_result.run_state, result.run_result.graph
    effects = [spec.effect for spec in graph.states]
    charged = {name for effect in effects if isinstance(effect, EffectSpec) for name in effect.charges} | {"continues"}
    expected = Counter(graph.states[0].spends)
    for decision in result.decisions:
        row = decision.transition
        expected.update({name: -expected[name] for name in row.refills})
        expected.update((*row.spends, *graph.spec(row.target).spends))
    for counter in graph.counters:
        if counter.name not in charged:
            spent, declared = run.counters.get(counter.name, 0), expected[counter.name]
            assert spent == declared, f"{counter.name} is {spent}, and was spent {declared} times"  # noqa: S101
    if not any(callable(effect) for effect in effects):
        assert run.turns == result.model_calls, f"{run.turns} turns of {result.model_calls} model calls"  # noqa: S101


def journal_verifies(result: SimulationResult) -> None:
    """The journal of the run is complete, and every transition in it is legal."""
    verification = verify(SIMULATION_RUN_ID, *result.read_journal())
    assert verification.code == 0, f"record {verification.seq}: {verification.reason}"  # noqa: S101


def resumes_identically(agent: Agent[Any, Any], scenario: Scenario) -> None:
    """A run resumed from its store at every suspension equals the run resumed from its suspension records.

    Crashes in the scenario are left out: a run without a store cannot survive them.
    """
    without_crashes = {i: replace(e, crash=False, state_result=None) for i, e in scenario.side_events.items()}
    same = replace(scenario, side_events=without_crashes)
    stored, recorded = Simulator(agent).run_sync(same), Simulator(agent, from_records=True).run_sync(same)
    assert stored.ids == recorded.ids, f"{stored.ids} != {recorded.ids}"  # noqa: S101
    assert stored.run_result.messages == recorded.run_result.messages, "the messages differ"  # noqa: S101


# -- of stored runs ---------------------------------------------------------------------------------------


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
