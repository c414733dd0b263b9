"""Deliberate faults in the table of the loop: the path tests must catch every one of them.

The paths come from the hand-written table; a mutant is caught when the real loop, on
the table of the mutant, leaves a path or decides a guard conflict differently.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest

from agentfsm.errors import GraphError
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.graph import Graph, Transition
from agentfsm.testing import GuardConflict, Path, WitnessDriver, check_priority, guard_conflicts, paths
from tests.helpers.graphs import reference_loop, unchecked_graph

DROPPED = """
pre_step.runaway
pre_step.iteration_limit
pre_step.token_limit
pre_step.no_progress
call_llm.transient_provider
call_llm.context_overflow
post_llm.output_truncated
post_llm.loop_detected
post_llm.no_progress
dispatch_tool.in_doubt
post_tool.environment_error
post_tool.policy_violation
post_tool.calls_pending
post_tool.repeated_error
recover.stop
recover.retry_tool
suspended.expired
"""

SWAPPED = """
pre_step.cancelled/pre_step.aborted
pre_step.runaway/pre_step.iteration_limit
pre_step.iteration_limit/pre_step.time_limit
pre_step.token_limit/pre_step.no_progress
call_llm.cancelled/call_llm.transient_provider
post_llm.output_truncated/post_llm.tool_calls
post_llm.output_refused/post_llm.no_progress
post_llm.loop_detected/post_llm.tool_calls
dispatch_tool.cancelled/dispatch_tool.approval_required
post_tool.declared_done/post_tool.calls_pending
post_tool.question_asked/post_tool.calls_pending
post_tool.policy_violation/post_tool.calls_pending
post_tool.unknown_tool/post_tool.tool_error
post_tool.repeated_error/post_tool.tool_error
recover.cancelled/recover.ask_user
"""

MOVED = """
pre_step.runaway>recover
pre_step.time_limit>call_llm
call_llm.provider_error>terminal
call_llm.transient_provider>pre_step
post_llm.output_refused>terminal
post_llm.output_malformed>post_tool
post_llm.otherwise>pre_step
dispatch_tool.approval_required>post_tool
post_tool.question_asked>recover
post_tool.calls_pending>recover
post_tool.otherwise>call_llm
recover.ask_user>terminal
recover.retry_tool>pre_step
recover.otherwise>call_llm
suspended.approval_decided>pre_step
suspended.replied>call_llm
"""


def mutant(rows: Iterable[Transition]) -> Graph:
    """The loop with other rows. The checks of graphs would refuse some of these before any path is tried."""
    return unchecked_graph(LOOP.states, rows, LOOP.name, LOOP.counters, LOOP.first)


def dropped(row: str) -> Graph:
    return mutant(t for t in LOOP if t.id != row)


def swapped(pair: str) -> Graph:
    first, second = (LOOP.transition(each) for each in pair.split("/"))
    change = {first.id: second, second.id: first}
    return mutant(change.get(t.id, t) for t in LOOP)


def moved(where: str) -> Graph:
    row, target = where.split(">")
    ends = "partial" if target == "terminal" else ""
    return mutant(replace(t, target=target, ends=ends) if t.id == row else t for t in LOOP)


MUTANTS = {
    **{f"drop {row}": dropped(row) for row in DROPPED.split()},
    **{f"swap {pair}": swapped(pair) for pair in SWAPPED.split()},
    **{f"move {where}": moved(where) for where in MOVED.split()},
}


@cache
def rows() -> list[Path]:
    return list(paths(reference_loop(), "transitions"))


@cache
def pairs() -> list[Path]:
    return list(paths(reference_loop()))


@cache
def conflicts() -> list[GuardConflict]:
    return list(guard_conflicts(reference_loop()))


def caught_by(graph: Graph) -> str:
    """The first path that the real loop does not take on a graph, or the first conflict that the wrong row wins.

    All are tried until one catches; those that are likely to come first, so that it takes less time.
    """
    try:
        driver = WitnessDriver(graph)
    except GraphError:
        return "no agent may have such a graph"
    changed = {s.name for s in LOOP.states if LOOP.rows(s.name) != graph.rows(s.name)}
    near = [c for c in conflicts() if c.rival.source in changed]
    far = [c for c in conflicts() if c.rival.source not in changed]
    for tried in (rows(), near, pairs(), far):
        for each in tried:
            if _catches(driver, each):
                return each.id
    return ""


def _catches(driver: WitnessDriver, each: Path | GuardConflict) -> bool:
    if isinstance(each, Path):
        return driver.run(each).divergence is not None
    path_run = check_priority(driver, each)
    return (
        path_run is not None and path_run.divergence is not None and path_run.divergence.move_index == each.move_index
    )


@pytest.mark.slow
def test_the_table_itself_passes() -> None:
    assert caught_by(LOOP) == ""


@pytest.mark.slow
def test_every_mutant_is_caught() -> None:
    caught = {name: caught_by(graph) for name, graph in MUTANTS.items()}
    by_order = sum("-before-" in path for path in caught.values())
    alive = [name for name, path in caught.items() if not path]
    print(f"{len(caught) - len(alive)} of {len(caught)} mutants caught, {by_order} of them by guard conflicts")
    assert not alive
    assert len(caught) >= 30


@pytest.mark.slow
def test_of_two_true_guards_the_first_row_wins() -> None:
    driver = WitnessDriver(LOOP)
    held = 0
    for conflict in conflicts():
        path_run = check_priority(driver, conflict)
        if path_run is not None:  # else the two never hold together in what the examples can bring about
            held += 1
            assert (
                path_run.decisions[conflict.move_index].transition.id == conflict.path.rows[conflict.move_index].id
            ), conflict.id
    print(f"{held} of {len(conflicts())} guard conflicts held")
    assert held > 150
