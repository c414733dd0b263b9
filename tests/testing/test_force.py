"""``force``: an agent with its own hooks and tools takes every path, with the guards overridden."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from agentfsm import Agent, Handoff, PartialRunSummary, RunAborted, RunCancelled, RunCompleted, hook, observer
from agentfsm.errors import RunError
from agentfsm.loop.events import Transitioned, UserInputRequested
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.graph import Transition
from agentfsm.runtime.host import Host
from agentfsm.testing import FakeClock, Path, ScriptedModel, default_agent, force, paths
from agentfsm.testing.path_generation import small_guardrails
from tests.helpers.graphs import reference_loop


def test_every_path_is_taken_and_observed() -> None:
    seen: list[str] = []

    @observer
    def watch(event) -> None:
        if isinstance(event, Transitioned):
            seen.append(event.decision.transition.id)

    agent = Agent(ScriptedModel(), graph=LOOP, hooks=[watch], host=Host(clock=FakeClock()))
    covered = set()
    for path in paths(reference_loop()):
        seen.clear()
        path_run = force(agent, path)
        assert tuple(seen) == path.ids
        assert tuple(d.transition.id for d in path_run.decisions) == path.ids
        covered |= set(pairwise(path.ids))
    assert len(covered) == 239


def test_a_run_ends_as_its_last_row_says() -> None:
    ends = {
        "pre_step.cancelled": RunCancelled,
        "pre_step.aborted": RunAborted,
        "pre_step.runaway": PartialRunSummary,
        "post_llm.otherwise": RunCompleted,
        "post_tool.declared_done": RunCompleted,
        "post_tool.declared_unable": Handoff,
        "recover.handoff": Handoff,
        "recover.stop": PartialRunSummary,
        "suspended.cancelled": RunCancelled,
        "suspended.aborted": RunAborted,
    }
    agent = default_agent(LOOP)
    met: Counter[str] = Counter()
    for path in paths(LOOP):
        expected = ends.get(path.rows[-1].id)
        if expected is not None:
            met[path.rows[-1].id] += 1
            assert isinstance(force(agent, path).run_result.outcome, expected), path.id
    assert met.keys() == ends.keys()


def test_every_suspension_on_the_path_suspends_the_run() -> None:
    agent = default_agent(LOOP)
    for path in paths(LOOP, "transitions"):
        path_run = force(agent, path)
        waits = sum(isinstance(r.outcome, UserInputRequested) for r in path_run.simulation_result.run_results)
        assert waits == sum(row.target == "suspended" for row in path.rows)


def test_hooks_run_in_every_state_of_the_path() -> None:
    doors: list[str] = []

    @hook("recover")
    def at_recover(seen) -> None:
        doors.append(str(seen.run.failure.kind))

    agent = Agent(ScriptedModel(), hooks=[at_recover])
    for path in paths(LOOP, "transitions"):
        doors.clear()
        force(agent, path)
        entered = [row.name for row in path.rows if row.target == "recover"]
        assert doors == entered  # each failure is of the kind that its row stands for


def test_a_path_of_another_graph_is_refused() -> None:
    agent = default_agent(LOOP)
    astray = Path(1, (LOOP.transition("post_llm.otherwise"),), small_guardrails())
    with pytest.raises(RunError, match="cannot be taken in"):
        force(agent, astray)
    other = Path(2, (Transition("pre_step", None, "terminal", ends="completed"),), small_guardrails())
    with pytest.raises(RunError, match="is not a path of this graph"):
        force(agent, other)
    short_one = Path(3, (LOOP.transition("pre_step.otherwise"),), small_guardrails())
    with pytest.raises(RunError, match="does not lead to an end"):
        force(agent, short_one)
