"""A state of the user's that does nothing, put on any row of the loop, changes nothing but the moves through it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from agentfsm import LOOP, Agent, Graph, StateContext, StateSpec, Transition, tool
from agentfsm.testing import Scenario, ScriptedModel, Simulator, random_scenarios

COUNT, MOST = 20, 6

LOST = "recover.retry_tool"
"""The row on which it does: failed calls are run again only where it leads straight to them, as docs/graphs.md says."""

ROWS = [row.id for row in LOOP if not LOOP.spec(row.target).final and row.id != LOST]


@tool
def look(at: str = "") -> str:
    """Look."""
    return f"seen {at}"


@tool(requires_approval=lambda arguments: arguments["amount"] > 100)
def pay(amount: int) -> str:
    """Pay."""
    return "paid"


@tool(idempotent=True, retryable=True, parallel=True)
def fetch(number: int) -> str:
    """Fetch."""
    return str(number)


def agent(graph: Graph) -> Agent[Any, Any]:
    return Agent(ScriptedModel(), tools=[look, pay, fetch], graph=graph)


def nothing(context: StateContext[Any]) -> str:
    return "done"


@cache
def scenarios() -> list[Scenario]:
    """Without events that happen after so many moves: there are more moves."""
    return [replace(each, side_events={}) for each in random_scenarios(agent(LOOP), COUNT)]


def runs(graph: Graph, played: list[Scenario]) -> list[dict[str, Any]]:
    """What the model was asked and what became of each run, without the moves through the state."""
    found = [Simulator(agent(graph)).run_sync(each) for each in played]
    return [
        {
            "moves": [row for row in each.ids if not row.startswith("idle.")],
            "outcome": type(each.run_result.outcome),
            "messages": each.run_result.messages,
            "requests": [request.messages for request in each.requests],
            "usage": each.run_result.usage,
            "counters": each.run_result.run_state.counters,
        }
        for each in found
    ]


@cache
def expected() -> list[dict[str, Any]]:
    return runs(LOOP, scenarios())


def test_the_scenarios_take_most_rows_of_the_loop() -> None:
    assert len({row for run in expected() for row in run["moves"]} & set(ROWS)) > len(ROWS) / 2


@pytest.mark.parametrize("row", ROWS)
def test_a_state_that_does_nothing_changes_nothing_else(row: str) -> None:
    """It is played in the scenarios that take its row, of which the shortest are enough, and in one at least."""
    target = next(each.target for each in LOOP if each.id == row)
    graph = LOOP.with_state(StateSpec("idle", effect=nothing), [Transition("idle", None, target)], entered_by=row)
    chosen = sorted(range(COUNT), key=lambda n: (row not in expected()[n]["moves"], len(expected()[n]["moves"])))
    chosen = [n for n in chosen if row in expected()[n]["moves"]][:MOST] or chosen[:1]
    assert runs(graph, [scenarios()[n] for n in chosen]) == [expected()[n] for n in chosen]
