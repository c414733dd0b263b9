"""Hypothesis over whole runs: what is drawn fits, all of it ends well, and faults shrink to short runs."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from agentfsm import Agent, AgentGuardrails, Failure, RunState, ToolCall, tool
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.transition_table import LOOP
from agentfsm.testing import (
    ModelTurn,
    Scenario,
    ScriptedModel,
    SideEvent,
    Simulator,
    WitnessDriver,
    call,
    default_agent,
    paths,
)
from agentfsm.testing import invariants as must
from agentfsm.testing.path_runner import scenarios_through_rows
from agentfsm.testing.strategies import AgentStateMachine, arguments, scenarios

FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
ANY_EXAMPLE = settings(max_examples=5_000, deadline=None, phases=[Phase.generate])
SOAK = settings(max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


@tool
def look(place: str, deep: bool = False) -> str:
    """Look somewhere."""
    return place


@tool(requires_approval=lambda given: given["amount"] > 100)
def pay(amount: int) -> str:
    """Pay."""
    return "paid"


@tool(idempotent=True, retryable=True, parallel=True)
def fetch(url: str, tries: int | None = None, tags: list[str] | None = None) -> str:
    """Fetch."""
    return url


LIMITS = AgentGuardrails(max_iterations=5, max_tokens=6_000, repeated_error_threshold=3, loop_hard_threshold=4)


def agent(preset: str = "funnel") -> Agent:
    return Agent(ScriptedModel(), tools=[look, pay, fetch], preset=preset, guardrails=LIMITS)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_random_scenarios_keep_the_invariants_of_every_preset(name: str) -> None:
    an_agent = agent(name)
    ends: Counter[str] = Counter()

    @FEW
    @given(scenarios(an_agent))
    def check(scenario) -> None:
        result = Simulator(an_agent).run_sync(scenario)
        ends[type(result.run_result.outcome).__name__] += 1
        must.ended_once(result)
        must.within_budgets(result.run_result.run_state)
        must.approved_before_run(an_agent, result)
        must.journal_verifies(result)
        if not an_agent.behavior.envelope:
            must.one_result_per_call(result.run_result.run_state)

    check()
    assert len(ends) >= 2, ends  # the draws go to several places


@pytest.mark.slow
@FEW
@given(scenarios(agent()))
def test_a_run_resumes_identically_from_its_store_and_from_its_records(scenario) -> None:
    must.resumes_identically(agent(), scenario)


class Rules(AgentStateMachine):
    agent = agent()


TestRules = pytest.mark.slow(Rules.TestCase)
TestRules.settings = SOAK


class LoopRules(AgentStateMachine):
    agent = default_agent(LOOP)


TestLoopRules = pytest.mark.slow(LoopRules.TestCase)
TestLoopRules.settings = SOAK

CHOICE = st.sampled_from([look, pay, fetch]).flatmap(lambda t: st.tuples(st.just(t), arguments(t.spec.parameters)))


@FEW
@given(CHOICE)
def test_drawn_arguments_fit_the_tool(drawn) -> None:
    chosen, given_ = drawn
    json.dumps(given_)
    assert set(chosen.arguments(given_)) >= set(chosen.spec.parameters.get("required", ()))


@pytest.mark.slow
def test_a_fault_shrinks_to_the_shortest_run() -> None:
    """The fault: more than 100 was spent. The shortest run: one reply with one call, of 101."""

    @tool
    def spend(amount: int) -> str:
        """Spend."""
        return "spent"

    spender = Agent(ScriptedModel(), tools=[look, spend], guardrails=LIMITS)

    def spent_too_much(scenario) -> bool:
        result = Simulator(spender).run_sync(scenario)
        return any(s.tool == "spend" and s.arguments["amount"] > 100 for s in result.started_tools)

    often = settings(max_examples=2_000, deadline=None, database=None)
    scenario = find(scenarios(spender, max_turns=2), spent_too_much, settings=often, random=random.Random(3))
    assert [turn.entry for turn in scenario.model_turns] == [[ToolCall("", "spend", {"amount": 101})]]
    assert (list(scenario.tool_results), scenario.side_events, list(scenario.human_replies)) == ([], {}, [])


def test_a_crash_while_parallel_tools_start() -> None:
    both = [call("fetch", url="a"), call("fetch", url="b")]
    result = Simulator(agent("standard")).run_sync(
        Scenario(model_turns=[ModelTurn(both)], side_events={3: SideEvent(crash=True)})
    )
    assert result.run_result.ok
    assert {s.arguments["url"] for s in result.started_tools} == {"a", "b"}
    assert len(result.started_tools) > 2  # what was cut off is made again


@pytest.mark.slow
def test_an_open_approval_gate_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the approval check, the loop executes calls that were not approved."""

    async def open_gate(*_: object) -> None:
        return None

    monkeypatch.setattr("agentfsm.runtime.tool_dispatch.check_approval", open_gate)
    payer = agent("standard")

    def caught(scenario) -> bool:
        try:
            must.approved_before_run(payer, Simulator(payer).run_sync(scenario))
        except AssertionError:
            return True
        return False

    try:
        find(scenarios(payer, max_turns=2), caught, settings=ANY_EXAMPLE)
    except NoSuchExample:
        pytest.fail("an open approval gate was not found")


REACH = settings(
    max_examples=500, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
def test_five_hundred_scenarios_reach_every_row_of_the_loop(counted: Callable[[str], None]) -> None:
    an_agent = default_agent(LOOP)
    reached: Counter[str] = Counter()
    failed_batches: Counter[str] = Counter()

    @REACH
    @given(scenarios(an_agent))
    def draw(scenario) -> None:
        result = Simulator(an_agent).run_sync(scenario)
        reached.update(set(result.ids))
        if any(isinstance(turn.entry, list) and len(turn.entry) > 1 for turn in scenario.model_turns):
            failed_batches.update(set(result.ids) & {"post_tool.tool_error", "post_tool.environment_error"})

    draw()
    assert [row.id for row in LOOP if not reached[row.id]] == []
    assert len(failed_batches) == 2
    rarest = min(reached[row.id] for row in LOOP)
    counted(f"500 scenarios reached every row of the loop; the rarest was taken in {rarest} of them")


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "standard"])
def test_five_hundred_scenarios_reach_every_row_of_a_preset_that_a_run_can_take(name: str) -> None:
    an_agent = default_agent(PRESETS[name].graph, PRESETS[name].behavior)
    reached: set[str] = set()

    @REACH
    @given(scenarios(an_agent))
    def draw(scenario) -> None:
        reached.update(Simulator(an_agent).run_sync(scenario).ids)

    draw()
    assert {row for path in paths(an_agent, "transitions") for row in path.ids} - reached == set()


@pytest.mark.slow
def test_an_agent_without_the_default_tools_is_led_along_paths_with_its_own() -> None:
    an_agent = agent("standard")
    reached: Counter[str] = Counter()
    unknown: Counter[str] = Counter()

    @settings(REACH, max_examples=200)
    @given(scenarios(an_agent, max_turns=4))
    def draw(scenario) -> None:
        reached.update(set(Simulator(an_agent).run_sync(scenario).ids))
        calls = [c for turn in scenario.model_turns if isinstance(turn.entry, list) for c in turn.entry]
        unknown.update(c.name for c in calls if c.name not in an_agent.config.tools)

    draw()
    feasible = {row for path in paths(an_agent, "transitions") for row in path.ids}
    missing = feasible - reached.keys()
    assert len(missing) <= 3, missing  # none of its tools ends a run, for example
    assert unknown.keys() <= {"no_such_tool", "fsm_nowhere"}


def test_a_warning_names_the_rows_that_no_scenario_follows_because_a_guard_has_no_example() -> None:
    def secret(run: RunState) -> Failure | None:
        return None

    own = Agent(ScriptedModel(), graph=LOOP.with_detector("post_llm", secret))
    with pytest.warns(UserWarning, match=r"no scenario is made for post_llm\.secret: .*undriven_rows") as warned:
        drawn = list(scenarios_through_rows(own))
    assert len(warned) == 1
    assert len(drawn) > 40
    assert [each.rows for each in WitnessDriver(own).undriven_rows() if "secret" in each.rows[0]] == [
        ("post_llm.secret",)
    ]
