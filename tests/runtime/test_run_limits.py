"""The limits of a run hold whatever the states of its graph are called."""

from __future__ import annotations

import pytest

from agentfsm import Agent
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.graph import Graph
from agentfsm.testing import ScriptedModel
from agentfsm.testing.simulation import ModelTurn, Scenario, SideEvent, Simulator
from tests.helpers.graphs import renamed

GRAPHS = {"loop": LOOP, "renamed": renamed(LOOP, "my_")}

EMPTY = ModelTurn("")

CASES = {
    "iteration_limit": Scenario([EMPTY, EMPTY], guardrails=AgentGuardrails(max_iterations=1)),
    "time_limit": Scenario(side_events={0: SideEvent(duration_s=300.0)}),
    "token_limit": Scenario([ModelTurn("", tokens=10)], guardrails=AgentGuardrails(max_tokens=10)),
    "cost_limit": Scenario([ModelTurn("", cost_usd=0.5)], guardrails=AgentGuardrails(max_cost_usd=0.5)),
    "no_progress": Scenario([EMPTY], side_events={4: SideEvent(idle_s=31.0)}),  # when it comes back to check budgets
}
"""For each limit that is checked before a model call, a run that comes to it."""


def run(graph: Graph, scenario: Scenario) -> list[str]:
    result = Simulator(Agent(ScriptedModel(), graph=graph), final_answer="fine").run_sync(scenario)
    return [each.removeprefix("my_") for each in result.ids]


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("limit", CASES)
def test_each_limit_is_noticed_before_a_model_call(graph: Graph, limit: str) -> None:
    taken = [each for each in run(graph, CASES[limit]) if each.startswith("pre_step.") and "otherwise" not in each]
    assert taken[0] == f"pre_step.{limit}"


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_an_empty_reply_is_judged_once_and_is_no_stall(graph: Graph) -> None:
    """The same guard finds both: one when a reply is judged, the other before the next model call."""
    taken = run(graph, Scenario([EMPTY]))
    assert [each for each in taken if "no_progress" in each] == ["post_llm.no_progress"]
    assert taken[-1] == "post_llm.otherwise"
