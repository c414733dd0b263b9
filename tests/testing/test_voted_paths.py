"""Paths on which people vote and requests are escalated: the real loop takes each, with several approvals."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentfsm import LOOP, Agent, Approval, tool, with_votes
from agentfsm.journal.verification import GOOD, verify
from agentfsm.testing import ESCALATED, ModelTurn, Scenario, ScriptedModel, Simulator, WitnessDriver, call, paths
from agentfsm.testing.simulation import SIMULATION_RUN_ID

VOTING = with_votes(LOOP)
VOTED = {"suspended.vote_recorded", "suspended.escalated"}


def pay_needing(approval: Any) -> Any:
    @tool(requires_approval=approval)
    def pay(amount: int) -> str:
        """Pay."""
        return f"paid {amount}"

    return pay


@tool(requires_approval=Approval(roles=("clerk",), escalate_to=("manager",), escalate_after_s=3600))
def refund(amount: int) -> str:
    """Pay back."""
    return "paid back"


@tool
def look() -> str:
    """Look."""
    return "seen"


BY_TWO = Approval(2, ("clerk",), not_requester=True, escalate_to=("manager",), escalate_after_s=3600)


def agent(approval: Approval = BY_TWO) -> Agent:
    return Agent(ScriptedModel(), tools=[pay_needing(approval), refund, look], graph=VOTING)


@pytest.mark.slow
def test_every_pair_of_a_table_that_counts_votes_is_witnessed() -> None:
    driver, found = WitnessDriver(VOTING), paths(VOTING)
    assert driver.undriven_rows() == []
    for path in found:
        driver.run(path).check()
    assert {row for path in found for row in path.ids} >= VOTED


@pytest.mark.slow
def test_rules_of_own_tools_are_voted_on_and_verify_counts_the_votes() -> None:
    source = agent()
    driver, paid = WitnessDriver(source, tools="real"), 0
    for path in paths(source):
        result = driver.run(path).check().simulation_result
        if VOTED.isdisjoint(path.ids):
            continue
        records = asyncio.run(result.store.records(SIMULATION_RUN_ID))
        assert verify(SIMULATION_RUN_ID, records, asyncio.run(result.store.head(SIMULATION_RUN_ID))).code == GOOD
        paid += sum(started.tool == "pay" and started.approved for started in result.started_tools)
    assert paid > 0


def test_a_rule_that_needs_fewer_people_now_is_noticed() -> None:
    source = agent()
    driver, changed = WitnessDriver(source, tools="checked"), Simulator(agent(Approval(1)))
    noticed = 0
    for path in (path for path in paths(source) if not VOTED.isdisjoint(path.ids)):
        scenario = driver.run(path).scenario
        assert scenario is not None
        noticed += changed.run_sync(scenario).ids != path.ids
    assert noticed > 0


def test_a_scenario_may_escalate_a_request() -> None:
    scenario = Scenario([ModelTurn(call("refund", amount=1))], human_replies=(ESCALATED, ESCALATED))
    result = Simulator(agent()).run_sync(scenario)
    assert result.ids[-2:] == ("suspended.escalated", "suspended.cancelled")  # it is escalated once
