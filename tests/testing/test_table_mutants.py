"""Mutants of a table: what each kind changes, and that everybody who holds the table has the mutant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agentfsm import LOOP, Agent, ConfigurationError, Failure, FailureKind, Graph, GraphError, RunState, tool
from agentfsm.analysis import diff
from agentfsm.machine.engine import Machine
from agentfsm.testing import ScriptedModel, Simulator, WitnessDriver, call, paths
from agentfsm.testing.table_mutants import KINDS, Mutant, apply_mutant, mutant_graph, table_mutants


def never(run: RunState) -> Failure | None:
    """A detector that finds nothing."""
    return None


def own_graph() -> Graph:
    """A graph that no other test shares."""
    return replace(LOOP.with_detector("post_llm", never, before="tool_calls"), name="own")


def large(arguments: Mapping[str, Any]) -> bool:
    return arguments["amount"] > 100


def paying(graph: Graph) -> Agent:
    @tool(requires_approval=large)
    def pay(amount: int) -> str:
        """Pay."""
        return "paid"

    return Agent(ScriptedModel(), tools=[pay], graph=graph)


def test_every_row_every_guard_and_every_rule_has_its_mutants() -> None:
    graph = own_graph()
    found = table_mutants(paying(graph))
    rows, states = len(graph.transitions), sum(bool(graph.rows(s.name)) for s in graph.states)
    guards = sum(t.guard is not None for t in graph)
    counts = {kind: sum(m.kind == kind for m in found) for kind in KINDS}
    assert counts == {"drop": rows, "swap": rows - states, "retarget": rows, "negate": guards, "approval": 1}
    assert len({m.id for m in found}) == len(found)


def test_the_graph_of_each_kind() -> None:
    graph = own_graph()
    ids = [t.id for t in graph]
    first, second = "post_llm.output_refused", "post_llm.output_malformed"
    at = ids.index(first)
    dropped = mutant_graph(graph, Mutant("drop", first))
    assert [t.id for t in dropped] == ids[:at] + ids[at + 1 :]
    swapped = mutant_graph(graph, Mutant("swap", first, second))
    assert [t.id for t in swapped] == [*ids[:at], second, first, *ids[at + 2 :]]
    led = mutant_graph(graph, Mutant("retarget", first, "pre_step"))
    assert {t.id: t.target for t in led if t.target != graph.transition(t.id).target} == {first: "pre_step"}


def test_a_row_is_led_to_a_state_that_the_library_accepts() -> None:
    graph = own_graph()
    for mutant in (m for m in table_mutants(graph) if m.kind == "retarget" and m.other):
        row = mutant_graph(graph, mutant).transition(mutant.subject)
        assert row.target == mutant.other != graph.transition(mutant.subject).target


def test_a_negated_guard_answers_the_opposite_and_a_detector_finds_a_failure() -> None:
    graph = own_graph()
    run: Any = SimpleNamespace(batch=[])
    calls = mutant_graph(graph, Mutant("negate", "post_llm.tool_calls")).transition("post_llm.tool_calls")
    assert calls.guard is not None
    assert (calls.guard(run), calls.name) == (True, "tool_calls")
    run.batch = [call("pay", amount=1)]
    assert calls.guard(run) is False
    found = mutant_graph(graph, Mutant("negate", "post_llm.never")).transition("post_llm.never")
    assert found.guard is not None
    assert found.guard(run) == Failure(kind=FailureKind.tool_error, explanation="not never")


def test_what_the_library_refuses_is_refused() -> None:
    with pytest.raises(GraphError):
        mutant_graph(LOOP, Mutant("drop", "post_llm.otherwise"))
    with pytest.raises(GraphError):
        mutant_graph(LOOP, Mutant("swap", "post_llm.tool_calls", "post_llm.otherwise"))


@pytest.mark.slow
def test_whoever_holds_the_graph_has_the_mutant() -> None:
    """Agents made before and after, a graph imported by its name, and a default argument."""
    graph = own_graph()
    before = paying(graph)

    def make(of: Graph = graph) -> Agent:
        return paying(of)

    def taken(agent: Agent) -> tuple[str, ...]:
        return tuple(d.transition.id for d in agent.run_sync("go").decisions)

    model = ScriptedModel([call("pay", amount=1), "done"])
    running = before.with_config(replace(before.config, model=model))
    apply_mutant(before, Mutant("retarget", "post_llm.tool_calls", "pre_step"))
    assert graph.transition("post_llm.tool_calls").target == "pre_step"
    assert before.graph is graph
    assert diff(LOOP.with_detector("post_llm", never, before="tool_calls"), graph).retargeted
    assert taken(running)[:4] == (
        "pre_step.otherwise",
        "call_llm.otherwise",
        "post_llm.tool_calls",
        "pre_step.otherwise",
    )
    assert make().graph.transition("post_llm.tool_calls").target == "pre_step"
    assert Machine(graph).graph.fingerprint == graph.fingerprint != own_graph().fingerprint


@pytest.mark.slow
def test_a_removed_rule_is_gone_for_every_agent_and_driver_that_has_the_tool() -> None:
    agent = paying(own_graph())
    driver, simulator = WitnessDriver(agent), Simulator(agent)
    apply_mutant(agent, Mutant("approval", "pay"))
    assert agent.config.tools["pay"].requires_approval is False
    path = next(p for p in paths(agent, "transitions") if "dispatch_tool.approval_required" not in p.ids)
    assert driver.run(path).divergence is None
    assert all(tool.requires_approval is False for tool in simulator._config.tools.values())


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="there is no tool 'fly'"):
        apply_mutant(paying(own_graph()), Mutant("approval", "fly"))
    with pytest.raises(ConfigurationError, match="neither a graph nor a preset nor an agent"):
        apply_mutant(3, Mutant("drop", "post_llm.never"))
    with pytest.raises(GraphError, match="no such transition"):
        apply_mutant(own_graph(), Mutant("drop", "post_llm.nothing"))
