"""Limits on an analysis: what it cannot decide within them is open, with what it explored, and it takes no longer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from agentfsm.analysis import AgentTraits, AnalysisLimits, analyse, must_pass
from agentfsm.analysis.analysis_limits import AnalysisLimitError, Meter
from agentfsm.analysis.layered_graph import LayeredEdge, LayeredGraph, LongestPaths
from agentfsm.errors import ConfigurationError
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.guards import calls_pending
from agentfsm.loop.transition_table import LOOP
from tests.helpers.graphs import pipeline


def ticking_clock(seconds_per_reading: float) -> Callable[[], float]:
    """A clock that is later each time it is read."""
    readings = count()
    return lambda: next(readings) * seconds_per_reading


def test_what_cannot_be_decided_within_the_limits_is_open_with_what_was_explored() -> None:
    found = analyse(LOOP, must_pass("call_llm", through="pre_step"), limits=AnalysisLimits(max_configurations=3))
    opened = [v for v in found.verdicts if v.holds is None]
    assert [v.text for v in opened] == ["call_llm only after pre_step"]
    assert all(v.detail == "explored 3 configurations until max_configurations was reached" for v in opened)
    assert not found.ok
    assert "other and closer bounds: open (explored 3 configurations until max_configurations was reached)" in str(
        found
    )
    assert "at most 50 model calls between two waits, at most 200 model calls in a whole run" in str(found)
    assert found.to_dict()["bounds"]["limit"] == "explored 3 configurations until max_configurations was reached"


def test_an_analysis_stops_at_its_time_limit() -> None:
    limits = AnalysisLimits(max_seconds=10, clock=ticking_clock(6))
    few = AgentGuardrails(max_iterations=3, max_calls_per_reply=2)
    found = analyse(LOOP, must_pass("call_llm", through="pre_step"), guardrails=few, limits=limits)
    (verdict,) = [v for v in found.verdicts if v.holds is None]
    assert "until max_seconds was reached" in verdict.detail
    assert "until max_seconds was reached" in found.bounds.limit


def test_that_every_run_ends_is_known_from_the_declared_counters_alone() -> None:
    """By hand: each of five rounds visits at most 20 stages."""
    found = analyse(pipeline(20), limits=AnalysisLimits(max_configurations=1))
    (verdict,) = [v for v in found.verdicts if v.text == "every run ends, or waits for a person"]
    assert verdict.holds
    assert verdict.assumptions == ()
    assert found.bounds.from_counters is not None
    assert 6 * 20 <= found.bounds.from_counters < 7 * 21


@pytest.mark.parametrize("stages", [20, 34, 50])
def test_a_pipeline_whose_stages_can_be_skipped_is_decided(stages: int) -> None:
    """It has more simple loops than could be listed: each stage may skip one or two others."""
    found = analyse(pipeline(stages))
    assert [v.text for v in found.verdicts if v.holds is None] == []
    assert found.explored < 200_000


def test_an_agent_with_sub_agents_is_decided_at_default_limits() -> None:
    """A question in the middle of a call adds no move, model call or tool call between two waits."""
    plain = analyse(LOOP, traits=AgentTraits())
    found = analyse(LOOP, traits=AgentTraits(sub_agents=True))
    assert [v.text for v in found.verdicts if not v.holds] == []
    assert found.explored < 4 * plain.explored
    for bound in ("moves", "model_calls", "tool_calls", "model_calls_in_all"):
        assert getattr(found.bounds, bound) == getattr(plain.bounds, bound) is not None


def test_calls_that_are_left_may_come_before_denials_and_questions() -> None:
    """As first of the rows that do not stop a run; to decide it once took more memory than an analysis may."""
    stops, others = LOOP.rows("post_tool")[:2], LOOP.rows("post_tool")[2:]
    pending = next(row for row in others if row.guard is calls_pending)
    rows = [*stops, pending, *(row for row in others if row is not pending)]
    graph = replace(LOOP, transitions=(*(row for row in LOOP if row.source != "post_tool"), *rows))
    found = analyse(graph, limits=AnalysisLimits(max_configurations=200_000))
    assert found.ok
    assert found.bounds.limit == ""


def test_a_search_counts_what_it_visits_and_each_search_has_its_own_count() -> None:
    meter = Meter(AnalysisLimits(max_configurations=10))
    for _ in range(2):
        with meter.search():
            meter.count(10)
            with pytest.raises(AnalysisLimitError):
                meter.count()
    assert meter.visited == 22


def test_passes_over_what_was_visited_end_with_the_time_and_have_no_other_limit() -> None:
    now = 0.0
    meter = Meter(AnalysisLimits(max_configurations=10, max_seconds=5, clock=lambda: now))
    with meter.search():
        meter.count(5)
        meter.work(10**6)
        now = 6.0
        with pytest.raises(AnalysisLimitError, match="explored 5 configurations until max_seconds was reached"):
            meter.work(10**6)
    assert meter.visited == 5


@pytest.mark.slow
@pytest.mark.parametrize("layers", [0, 1_000])
def test_longest_paths_end_with_the_time_after_their_graph_was_found_in_time(layers: int) -> None:
    """By hand: 1,001 nodes, each with two edges to later ones, all in one layer, or in a layer each."""

    def edges(layer: int, node: int) -> list[LayeredEdge[int, int]]:
        after = [node + 1, node + 2] if node < 1_000 else []
        return [LayeredEdge(min(layers, 1), each, 1, followed=True) for each in after]

    now = 0.0
    meter = Meter(AnalysisLimits(max_seconds=5, clock=lambda: now))
    with meter.search():
        graph = LayeredGraph((0, 0), edges, layers, range(layers), meter)
        now = 6.0
        with pytest.raises(AnalysisLimitError, match="until max_seconds was reached"):
            LongestPaths(graph, lambda cost: (cost, 0, 0))


def test_a_meter_without_limits_never_stops() -> None:
    meter = Meter()
    meter.count(10**9)
    meter.work(10**9)
    assert meter.visited == 10**9


def test_limits_must_be_greater_than_zero() -> None:
    with pytest.raises(ConfigurationError, match="max_seconds must be greater than 0, not 0"):
        AnalysisLimits(max_seconds=0)
