"""The conformance checks of the loop: ``LOOP`` passes each of them, and a graph that changes a rule fails its check."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from agentfsm import LOOP, Graph, Transition
from agentfsm.loop.state import RunView
from agentfsm.testing import LOOP_CHECKS, LoopCheck
from agentfsm.testing.table_mutants import Mutant, mutant_graph


@pytest.mark.parametrize("check", LOOP_CHECKS, ids=lambda check: check.__name__)
def test_the_loop_keeps_its_rules(check: LoopCheck) -> None:
    asyncio.run(check(LOOP))


def broken(change: str, *rows: str) -> Graph:
    """``LOOP`` with one change to its table."""
    return mutant_graph(replace(LOOP, name="broken"), Mutant(change, *rows))


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        ("model_calls_are_limited", broken("drop", "pre_step.iteration_limit")),
        ("time_is_limited", broken("drop", "pre_step.time_limit")),
        ("repeated_calls_are_noticed", broken("drop", "post_llm.loop_detected")),
        ("equal_errors_open_the_breaker", broken("drop", "post_tool.repeated_error")),
        ("each_failure_has_its_action", broken("drop", "post_tool.capability_gap")),
        ("retryable_tools_are_run_again", broken("drop", "recover.retry_tool")),
        ("answers_are_bound_to_what_was_asked", broken("drop", "suspended.expired")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_graph_that_changes_a_rule_fails_its_check(name: str, graph: Graph) -> None:
    (check,) = [each for each in LOOP_CHECKS if each.__name__ == name]
    with pytest.raises(AssertionError):
        asyncio.run(check(graph))


def at_once(run: RunView) -> bool:
    return True


WITHOUT_A_RUN = ("amounts_are_checked", "a_machine_takes_the_first_row_that_holds", "declarations_do_not_change")


@pytest.mark.parametrize("check", [c for c in LOOP_CHECKS if c.__name__ not in WITHOUT_A_RUN], ids=lambda c: c.__name__)
def test_every_check_that_runs_something_fails_on_a_graph_whose_runs_end_at_once(check: LoopCheck) -> None:
    """It neither passes, as one that runs another graph would, nor waits for what never comes."""
    graph = LOOP.with_transition(Transition("pre_step", at_once, "terminal", ends="partial"), before="runaway")
    with pytest.raises(AssertionError):
        asyncio.run(check(graph))
