"""Calls that run in parallel run in one move: bounds on tool calls allow for them, whatever the table is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Counter,
    Graph,
    Host,
    KeepLast,
    RunState,
    Transition,
    tool,
    with_votes,
)
from agentfsm.agent.config import proof_traits
from agentfsm.analysis import analyse
from agentfsm.analysis.bounds import runs_one_by_one
from agentfsm.loop.detectors import STEPS
from agentfsm.loop.guards import retry_tool
from agentfsm.loop.presets import PRESETS
from agentfsm.machine.declaration import exhausted
from agentfsm.testing import ScriptedModel, call

LIMITS = AgentGuardrails(max_iterations=2, max_calls_per_reply=4, max_tool_retries=0, max_continues=0, on_limit="stop")


@tool(parallel=True)
async def together(text: str) -> str:
    """It may run with others."""
    return text


@tool
async def alone(text: str) -> str:
    """It runs alone."""
    return text


def changed(row_id: str, **changes: Any) -> Graph:
    row = LOOP.transition(row_id)
    return replace(LOOP, transitions=tuple(replace(r, **changes) if r is row else r for r in LOOP))


def large(run: RunState) -> bool:
    return False


def with_own_budget() -> Graph:
    row = LOOP.transition("post_tool.calls_pending")
    graph = LOOP.with_counter(Counter("rounds", 1))
    return replace(graph, transitions=tuple(replace(r, spends="rounds") if r is row else r for r in graph))


def with_a_counter_that_decides_first() -> Graph:
    @exhausted(STEPS, past=True)
    def late(run: RunState) -> bool:
        return True

    return LOOP.with_transition(Transition("post_tool", late, "terminal", ends="partial"), before="policy_violation")


def calls_anything(run: RunState) -> bool:
    return bool(run.batch)


def with_calls_that_begin_without_a_refill() -> Graph:
    row = Transition("post_llm", calls_anything, "dispatch_tool", spends="begun")
    return LOOP.with_counter(Counter("begun", 5)).with_transition(row, before="tool_calls")


def again(run: RunState) -> bool:
    return run.retry_calls


def with_calls_that_run_again_without_a_refill() -> Graph:
    """Failed calls lead to a recovery of their own, which has no other row that runs them again."""
    copied = [r for r in LOOP.rows("recover") if r.guard not in LOOP.first and r.guard is not retry_tool]
    rows = [Transition("mend", again, "dispatch_tool", spends="mends"), *(replace(r, source="mend") for r in copied)]
    mend = replace(LOOP.spec("recover"), name="mend")
    graph = LOOP.with_counter(Counter("mends", 1)).with_state(mend, rows, entered_by="post_tool.tool_error")
    other = graph.transition("post_tool.environment_error")
    return replace(graph, transitions=tuple(replace(r, target="mend") if r is other else r for r in graph))


NOT_ONE_BY_ONE: dict[str, Callable[[], Graph]] = {
    "no row leads back": lambda: LOOP.without("post_tool.calls_pending"),
    "another counter bounds the rows that lead back": with_own_budget,
    "a row that leads back spends more": lambda: changed("post_tool.calls_pending", spends=("pending_calls",) * 3),
    "calls begin without a refill": with_calls_that_begin_without_a_refill,
    "calls run again without a refill": with_calls_that_run_again_without_a_refill,
    "a counter decides before a row that leads back": with_a_counter_that_decides_first,
    "a row leads past the judgement": lambda: LOOP.with_transition(Transition("dispatch_tool", large, "pre_step")),
    "an approved call is not run next": lambda: changed("suspended.approval_decided", target="post_tool"),
}


@pytest.mark.parametrize("name", NOT_ONE_BY_ONE)
def test_tables_in_which_parallel_calls_cannot_run_one_by_one(name: str) -> None:
    assert not runs_one_by_one(NOT_ONE_BY_ONE[name]())


@pytest.mark.parametrize("name", PRESETS)
def test_in_every_preset_parallel_calls_might_run_one_by_one(name: str) -> None:
    shortened = Agent(ScriptedModel(), preset=name, history=KeepLast(turns=1)).graph
    assert all(runs_one_by_one(graph) for graph in (PRESETS[name].graph, with_votes(PRESETS[name].graph), shortened))


@pytest.mark.parametrize("name", list(NOT_ONE_BY_ONE)[:4])
def test_a_run_makes_no_more_parallel_calls_than_proved(name: str) -> None:
    """By hand: two replies, each with the four calls that one may have."""
    script = [[call("together", text=f"{reply}.{n}") for n in range(4)] for reply in range(2)]
    agent = Agent(
        ScriptedModel(script),
        tools=[together],
        graph=NOT_ONE_BY_ONE[name](),
        guardrails=LIMITS,
        host=Host(monitor="raise"),
    )
    result = agent.run_sync("go")
    assert sum(message.role == "tool" and not message.is_error for message in result.messages) == 8
    most = tool_calls(agent)
    assert most is not None
    assert most >= 8


def test_a_run_makes_no_more_parallel_calls_that_run_again_than_proved() -> None:
    """By hand: four calls fail, and all of them run again."""
    ran: list[int] = []

    @tool(parallel=True, idempotent=True, retryable=True)
    async def fragile(number: int) -> str:
        """It always fails."""
        ran.append(number)
        raise ValueError("broken")

    agent = Agent(
        ScriptedModel([[call("fragile", number=n) for n in range(4)]]),
        tools=[fragile],
        graph=with_calls_that_run_again_without_a_refill(),
        guardrails=LIMITS.model_copy(update={"max_iterations": 1, "max_steps": 2, "max_tool_retries": 1}),
        host=Host(monitor="raise"),
    )
    agent.run_sync("go")
    assert len(ran) == 8
    most = tool_calls(agent)
    assert most is not None
    assert most >= 8


def test_an_agent_whose_tools_run_alone_makes_one_call_in_each_move() -> None:
    """By hand: each of two replies leads to one move, after which no row leads back."""
    graph = LOOP.without("post_tool.calls_pending")
    assert tool_calls(Agent(ScriptedModel(), tools=[alone], graph=graph, guardrails=LIMITS)) == 2
    assert tool_calls(Agent(ScriptedModel(), tools=[together], graph=graph, guardrails=LIMITS)) == 8


def tool_calls(agent: Agent) -> int | None:
    traits = proof_traits(agent.config)
    return analyse(agent.graph, guardrails=agent.guardrails, traits=traits).bounds.tool_calls
