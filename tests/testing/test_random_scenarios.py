"""Random scenarios: the same ones each time, and runs in which much meets."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import pytest

from agentfsm import (
    LOOP,
    Agent,
    Approval,
    Edit,
    Example,
    Reply,
    Role,
    RunCancelled,
    RunState,
    Transition,
    detector,
    tool,
    with_votes,
)
from agentfsm.journal.records import read_records
from agentfsm.testing import ModelTurn, Scenario, ScriptedModel, SideEvent, Simulator, call, random_scenarios
from agentfsm.testing.guard_examples import DEFAULT_TOOLS
from agentfsm.testing.simulation import SIMULATION_RUN_ID, SimulationResult


@tool
def look(n: int) -> str:
    """Look at a number."""
    return str(n)


@tool(requires_approval=Approval(2))
def close(n: int) -> str:
    """Close an account."""
    return "closed"


AGENT = Agent(ScriptedModel(), tools=[look])
VOTED = Agent(ScriptedModel(), tools=[look, close])


def first_record(result: SimulationResult) -> dict[str, object]:
    records, _ = result.read_journal()
    return dict(read_records(records, SIMULATION_RUN_ID)[0].data)


def test_a_seed_gives_the_same_scenarios_each_time() -> None:
    assert random_scenarios(VOTED, 20) == random_scenarios(VOTED, 20)
    assert random_scenarios(VOTED, 20) == random_scenarios(VOTED, 30)[:20]
    assert random_scenarios(VOTED, 20) != random_scenarios(VOTED, 20, seed=1)


def test_another_process_draws_the_same_scenarios() -> None:
    code = (
        "from tests.testing.test_random_scenarios import VOTED, random_scenarios\n"
        "print([scenario.model_turns for scenario in random_scenarios(VOTED, 10)])"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


@pytest.mark.slow
def test_votes_crashes_refusals_and_limits_happen() -> None:
    agent = Agent(ScriptedModel(), tools=DEFAULT_TOOLS, graph=with_votes(LOOP))
    taken = {row for each in random_scenarios(agent, 150) for row in Simulator(agent).run_sync(each).ids}
    assert taken >= {
        "pre_step.iteration_limit",
        "pre_step.time_limit",
        "pre_step.token_limit",
        "call_llm.transient_provider",
        "post_llm.output_truncated",
        "post_llm.loop_detected",
        "dispatch_tool.in_doubt",
        "dispatch_tool.approval_required",
        "post_tool.repeated_error",
        "post_tool.policy_violation",
        "suspended.vote_recorded",
        "suspended.escalated",
        "suspended.expired",
    }


def batches(result: SimulationResult) -> list[list[str]]:
    """What the calls of each reply came back with; an empty text is a success."""
    found: list[list[str]] = []
    for message in result.run_result.messages:
        if message.tool_calls:
            found.append([])
        elif message.role is Role.TOOL:
            found[-1].append(message.content.partition("\n")[0] if message.is_error else "")
    return found


@pytest.mark.slow
def test_two_errors_take_turns_in_a_reply_and_one_of_several_calls_is_repeated_alone() -> None:
    scenarios = random_scenarios(AGENT, 60)
    turns = [
        batch
        for scenario in scenarios
        for batch in batches(Simulator(AGENT).run_sync(scenario))
        if all(batch) and not any("Not run" in text for text in batch)
        if len(batch) > 2 and batch[0] == batch[2] != batch[1]
    ]
    assert len(turns) >= 2
    replies = [[turn.entry.message.tool_calls for turn in each.model_turns if is_reply(turn)] for each in scenarios]
    pairs = [pair for each in replies for pair in pairwise(each)]
    assert any(len(several) > 1 and len(alone) == 1 and alone[0] in several for several, alone in pairs)


def is_reply(turn: ModelTurn) -> bool:
    return isinstance(turn.entry, Reply)


def test_a_task_that_stops_waiting_cancels_the_run_and_no_time_is_charged_for_it() -> None:
    result = Simulator(AGENT).run_sync(Scenario(side_events={1: SideEvent(duration_s=2, interrupt=True)}))
    assert isinstance(result.run_result.outcome, RunCancelled)
    assert result.ids[-1] == "call_llm.cancelled"
    assert result.run_result.run_state.elapsed_s == 2


def test_a_run_is_dismissed_where_the_rule_of_an_approval_refuses_the_reply() -> None:
    scenario = Scenario([ModelTurn(call("close", n=1))], human_replies=[Edit({"n": 2})])
    result = Simulator(VOTED).run_sync(scenario)
    assert isinstance(result.run_result.outcome, RunCancelled)
    assert result.started_tools == []


def test_a_run_does_not_record_what_simulates_it() -> None:
    one, other = (Simulator(AGENT, final_answer=answer).run_sync(Scenario()) for answer in ("one", "two"))
    assert first_record(one)["approvals"] == first_record(other)["approvals"]


def test_runs_are_started_as_the_examples_of_the_graphs_guards_need_it() -> None:
    @detector(fires_on=[Example(metadata={"plan": "free"})])
    def is_free(run: RunState) -> bool:
        return run.metadata.get("plan") == "free"

    @detector(fires_on=[Example(metadata={"plan": "pro"}), Example(tags=["beta"], actor="ann")])
    def is_pro(run: RunState) -> bool:
        return run.metadata.get("plan") == "pro"

    graph = LOOP
    for each in (is_free, is_pro):
        graph = graph.with_transition(Transition("pre_step", each, "recover"), before="otherwise")
    found = random_scenarios(Agent(ScriptedModel(), graph=graph), 40)
    starts = {(str(dict(each.metadata or {})), tuple(each.tags), each.actor) for each in found}
    free, pro = "{'plan': 'free'}", "{'plan': 'pro'}"
    assert {("{}", (), None), (free, (), None), (pro, (), None), (pro, ("beta",), "ann")} <= starts
    assert not any(each.metadata or each.tags or each.actor for each in random_scenarios(AGENT, 20))
