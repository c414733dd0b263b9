"""The limits of a run hold whatever the states of its graph are called."""

from __future__ import annotations

import pytest

from agentfsm import Agent, Extend, Host, UserInputRequested
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.messages import Message, Reply, Usage
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.graph import Graph
from agentfsm.testing import ScriptedModel, call
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


def costing(usd: float, name: str, **arguments: str) -> Reply:
    """A reply that calls a tool and costs so much."""
    return Reply(Message.assistant("", (call(name, **arguments),)), usage=Usage(cost_usd=usd))


def note(text: str) -> str:
    """Note."""
    return text


def noting(usd: float) -> ScriptedModel:
    """A model that calls ``note`` twenty times, with another text each time, for so much a reply."""
    return ScriptedModel([costing(usd, "note", text=str(i)) for i in range(20)])


@pytest.mark.parametrize(("usd", "limit", "calls"), [(0.1, 1, 10), (0.1, 0.9, 9), (0.2, 1.4, 7), (0.0001, 0.001, 10)])
def test_replies_that_cost_exactly_as_much_as_the_limit_reach_it(usd: float, limit: float, calls: int) -> None:
    """Ten times 0.1 is 1, though the sum of ten floats is a little less."""
    model = noting(usd)
    agent = Agent(model, tools=[note], guardrails=AgentGuardrails(max_cost_usd=limit, on_limit="stop"))
    result = agent.run_sync("go")
    assert (model.calls, result.usage.cost_usd) == (calls, limit)


def test_replies_that_cost_exactly_as_much_as_a_person_granted_reach_the_limit() -> None:
    model = noting(0.1)
    limits = AgentGuardrails(max_cost_usd=0.1)
    agent = Agent(model, tools=[note], guardrails=limits, host=Host(secret=b"kept by the tests of limits"))
    outcome = agent.run_sync("go").outcome
    assert isinstance(outcome, UserInputRequested)
    agent.resume_sync(outcome.suspension_record, Extend(usd=0.2))
    assert model.calls == 3  # the sum of the floats 0.1 and 0.2 is more than 0.3


def test_a_sub_agent_spends_exactly_what_its_caller_has_left() -> None:
    model = noting(0.1)
    helper = Agent(model, tools=[note]).as_tool("helper", "Helps.")
    script = ScriptedModel([costing(0.7, "helper", task="x")])
    limits = AgentGuardrails(max_cost_usd=0.8, on_limit="stop")
    result = Agent(script, tools=[helper], guardrails=limits).run_sync("go")
    assert (model.calls, result.usage.cost_usd) == (1, 0.8)  # the floats 0.8 and 0.7 differ by more than 0.1
