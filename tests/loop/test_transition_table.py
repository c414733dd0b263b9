"""Properties of the default table: calls are counted, cycles spend, no state is stuck."""

from __future__ import annotations

import graphlib

import pytest

from agentfsm.loop.presets import PRESETS
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.graph import Graph

GRAPHS = {name: preset.graph for name, preset in PRESETS.items()}


def into(graph: Graph, state: str) -> set[str]:
    return {t.source for t in graph if t.target == state}


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_every_model_call_passes_pre_step(graph):
    assert into(graph, "call_llm") == {"pre_step"}
    assert [t.id for t in graph if t.target == "call_llm"] == ["pre_step.otherwise"]


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_every_cycle_spends_a_step_a_call_or_a_retry_or_waits_for_a_person(graph):
    """Without pre_step, suspended, and the rows that spend, what is left can be put in an order."""
    gone, spending = {"pre_step", "suspended"}, {"post_tool.calls_pending", "recover.retry_tool"}
    left = [t for t in graph if not {t.source, t.target} & gone and t.id not in spending]
    order = graphlib.TopologicalSorter({s.name: [] for s in graph.states})
    for row in left:
        order.add(row.target, row.source)
    list(order.static_order())  # raises CycleError where there is a cycle


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_every_state_that_does_something_can_be_cancelled_and_aborted_first(graph):
    for spec in graph.states:
        if not spec.final and not spec.waits:
            first, second, *_ = graph.rows(spec.name)
            assert [(first.name, first.target), (second.name, second.target)] == [
                ("cancelled", "terminal"), ("aborted", "terminal"),
            ]  # fmt: skip


def test_failures_lead_to_recover_and_nothing_else_does():
    from agentfsm.loop.failures import FailureKind

    kinds = {k.value for k in FailureKind} - {"aborted"}
    assert {t.name for t in LOOP if t.target == "recover"} == kinds
    assert {t.name for t in LOOP if t.source == "recover"} >= {"ask_user", "handoff", "stop", "retry_tool"}


def test_a_loop_says_what_each_state_does():
    assert all(s.note for s in LOOP.states)
