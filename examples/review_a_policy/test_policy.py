"""The tests of the policy: every pair of rows, with no model, in a few seconds.

Run them in this folder::

    pytest --fsm-graph=test_policy:AGENT --fsm-report=term --fsm-fail-under=100
"""

from __future__ import annotations

import pytest
from app import GRAPH, HURRIED, NEEDS_LEAVE, NEVER, support
from hypothesis import given, settings

from agentfsm.analysis import analyse, diff, never_after
from agentfsm.testing import (
    Example,
    PathDivergenceError,
    ScriptedModel,
    Simulator,
    WitnessDriver,
    call,
    force,
    invariants,
    paths,
)
from agentfsm.testing.strategies import scenarios

AGENT = support(ScriptedModel())
EXAMPLES = {"tool_calls": Example(call=call("look_up", order="A-1"))}
WITNESS = WitnessDriver(AGENT, examples=EXAMPLES)


@pytest.mark.fsm(graph=AGENT)
def test_the_real_loop_takes_every_path(fsm_path) -> None:
    """Each path is brought about by the examples of its guards: scripted replies, results, people and time."""
    WITNESS.run(fsm_path).check()


@pytest.mark.fsm(graph=AGENT, cover="transitions")
def test_on_every_path_the_run_comes_to_an_end(fsm_path) -> None:
    """Whatever the guards would say: this is how a screen or a hook of yours meets every path."""
    assert force(AGENT, fsm_path).run_result.state == "terminal"


def test_the_detector_is_right_about_its_own_examples() -> None:
    assert WITNESS.check_examples() > 50


def test_what_is_proved() -> None:
    found = analyse(
        GRAPH,
        never_after("dispatch_tool", "too_much", until="pre_step"),
        never_after("dispatch_tool", "output_truncated", until="pre_step"),
        guardrails=AGENT.guardrails,
        behavior=AGENT.behavior,
    )
    assert found.ok, str(found)


@settings(max_examples=200, deadline=None)
@given(scenarios(AGENT, max_turns=3))
def test_no_money_leaves_without_leave(script) -> None:
    played = Simulator(AGENT).run_sync(script)
    for started in played.started_tools:
        if started.tool == "refund":
            assert started.arguments["amount"] <= NEVER
            assert started.approved or started.arguments["amount"] <= NEEDS_LEAVE
    invariants.approved_before_run(AGENT, played)
    invariants.within_budgets(played.run_result.run_state)


# -- the planted bug, and three ways in which it shows ------------------------------------------------


def test_the_difference_shows_it() -> None:
    """Every edge is as it was; a decision is not."""
    found = diff(GRAPH, HURRIED)
    assert (found.added, found.removed, found.retargeted) == ((), (), ())
    (changed,) = found.decisions
    assert (changed.state, changed.where) == ("post_llm", ("too_much", "tool_calls"))
    assert (changed.old, changed.new) == ("too_much -> recover", "tool_calls -> dispatch_tool")


def test_its_path_shows_it() -> None:
    """The path that was reviewed is not taken any more, and the guard that stole it is named."""
    path = next(p for p in paths(AGENT, "transitions") if "post_llm.too_much" in p.ids)
    with pytest.raises(
        PathDivergenceError, match=r"should be post_llm.too_much -> recover, but it was post_llm.tool_calls"
    ):
        WitnessDriver(support(ScriptedModel(), HURRIED), examples=EXAMPLES).run(path).check()


def test_a_run_shows_it() -> None:
    """And this is what it would have cost: asked for 501, a person away, and nothing in the way but the approval."""
    model = ScriptedModel([call("refund", order="A-1", amount=501)])
    assert support(model, GRAPH).run_sync("Give me 501 back").outcome.rationale == f"no refund may be more than {NEVER}"
    model = ScriptedModel([call("refund", order="A-1", amount=501)])
    asked = support(model, HURRIED).run_sync("Give me 501 back").outcome
    assert (asked.kind, asked.tool) == ("approval", "refund")  # one careless click from paid
