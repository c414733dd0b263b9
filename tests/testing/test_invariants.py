"""The invariants fail on runs that break them."""

from __future__ import annotations

import pytest

from agentfsm import Agent, AgentGuardrails, Deny, Extend
from agentfsm.journal.records import open_record
from agentfsm.loop.transition_table import LOOP
from agentfsm.runtime.tools import tool
from agentfsm.testing import ScriptedModel, WitnessDriver, call, paths
from agentfsm.testing.invariants import counted_as_declared
from agentfsm.testing.simulation import ModelTurn, Scenario, SideEvent, SimulationResult, Simulator


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return "paid"


def result() -> SimulationResult:
    agent = Agent(ScriptedModel(), tools=[pay])
    scenario = Scenario([ModelTurn(""), ModelTurn([call("pay", amount=1)])])
    return Simulator(agent).run_sync(scenario)


def test_a_counter_that_was_spent_by_no_row_is_noticed() -> None:
    simulated = result()
    counted_as_declared(simulated)
    simulated.run_result.run_state.counters["steps"] += 1
    with pytest.raises(AssertionError, match=r"steps is 3, and was spent 2 times"):
        counted_as_declared(simulated)


def test_a_model_call_that_was_not_counted_is_noticed_on_a_path() -> None:
    path_run = WitnessDriver(LOOP).run(paths(LOOP, "transitions")[0]).check()
    path_run.run_result.run_state.turns += 1
    with pytest.raises(AssertionError, match="turns of"):
        path_run.check()


def test_a_move_that_an_extension_is_checked_with_is_no_move_of_the_run() -> None:
    turns = [ModelTurn([call("pay", amount=n)]) for n in range(2)]
    scenario = Scenario(turns, human_replies=[Deny("no"), Extend()], guardrails=AgentGuardrails(max_iterations=1))
    simulated = Simulator(Agent(ScriptedModel(), tools=[pay])).run_sync(scenario)
    recorded = [open_record(each) for each in simulated.read_journal()[0]]
    assert "suspended.replied" in simulated.ids
    assert [each["transition"] for each in recorded if each["kind"] == "transition"] == list(simulated.ids)
    counted_as_declared(simulated)


def test_a_simulation_without_side_events_has_only_the_hooks_of_the_agent() -> None:
    agent = Agent(ScriptedModel(), tools=[pay])
    scenario = Scenario([ModelTurn("fine")], side_events={1: SideEvent(cancel=True)})
    assert Simulator(agent).run_sync(scenario).ids[-1] == "call_llm.cancelled"
    assert Simulator(agent, side_events=False).run_sync(scenario).ids[-1] == "post_llm.otherwise"
