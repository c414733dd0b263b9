"""Tests of the policy: every pair of consecutive rows, without a model, in a few seconds.

Run them in this folder::

    pytest --fsm-graph=test_policy:AGENT --fsm-report=term --fsm-fail-under=100
"""

from __future__ import annotations

import pytest
from app import APPROVAL_ABOVE, GRAPH, HURRIED, MAX_REFUND, support
from hypothesis import given, settings

from agentfsm import Guard, Handoff, UserInputRequested
from agentfsm.analysis import analyse, diff, never_after
from agentfsm.testing import (
    Example,
    Path,
    PathDivergenceError,
    Scenario,
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
EXAMPLES: dict[Guard | str, Example] = {"tool_calls": Example(call=call("look_up", order="A-1"))}
WITNESS = WitnessDriver(AGENT, examples=EXAMPLES)


@pytest.mark.fsm(graph=AGENT)
def test_the_real_loop_takes_every_path(fsm_path: Path) -> None:
    """The examples of the guards on a path make up its scenario: model replies, tool results, human replies, time."""
    WITNESS.run(fsm_path).check()


@pytest.mark.fsm(graph=AGENT, cover="transitions")
def test_on_every_path_the_run_ends(fsm_path: Path) -> None:
    """With the guards overridden: this is how to run your own user interface or hooks on every path."""
    assert force(AGENT, fsm_path).run_result.state == "terminal"


def test_the_detector_agrees_with_its_own_examples() -> None:
    assert WITNESS.check_examples() > 50


def test_the_policy_is_proved() -> None:
    analysis = analyse(
        GRAPH,
        never_after("dispatch_tool", "too_much", until="pre_step"),
        never_after("dispatch_tool", "output_truncated", until="pre_step"),
        guardrails=AGENT.guardrails,
        behavior=AGENT.behavior,
    )
    assert analysis.ok, str(analysis)


@settings(max_examples=200, deadline=None)
@given(scenarios(AGENT, max_turns=3))
def test_no_refund_without_approval(scenario: Scenario) -> None:
    result = Simulator(AGENT).run_sync(scenario)
    for started in result.started_tools:
        if started.tool == "refund":
            assert started.arguments["amount"] <= MAX_REFUND
            assert started.approved or started.arguments["amount"] <= APPROVAL_ABOVE
    invariants.approved_before_run(AGENT, result)
    invariants.within_budgets(result.run_result.run_state)


# -- the deliberate bug, and three ways to find it ----------------------------------------------------


def test_the_diff_shows_the_bug() -> None:
    """No edge has changed, but a decision has."""
    difference = diff(GRAPH, HURRIED)
    assert (difference.added, difference.removed, difference.retargeted) == ((), (), ())
    (changed,) = difference.decisions
    assert (changed.state, changed.where) == ("post_llm", ("too_much", "tool_calls"))
    assert (changed.old, changed.new) == ("too_much -> recover", "tool_calls -> dispatch_tool")


def test_a_path_shows_the_bug() -> None:
    """The run leaves the reviewed path, and the error names the guard that decided otherwise."""
    path = next(p for p in paths(AGENT, "transitions") if "post_llm.too_much" in p.ids)
    with pytest.raises(
        PathDivergenceError, match=r"should be post_llm.too_much -> recover, but it was post_llm.tool_calls"
    ):
        WitnessDriver(support(ScriptedModel(), HURRIED), examples=EXAMPLES).run(path).check()


def test_a_run_shows_the_bug() -> None:
    """The refund of 501 is no longer refused; only the approval stands between the model and the money."""
    model = ScriptedModel([call("refund", order="A-1", amount=501)])
    outcome = support(model, GRAPH).run_sync("Give me 501 back").outcome
    assert isinstance(outcome, Handoff)
    assert outcome.rationale == f"no refund may be more than {MAX_REFUND}"
    model = ScriptedModel([call("refund", order="A-1", amount=501)])
    outcome = support(model, HURRIED).run_sync("Give me 501 back").outcome
    assert isinstance(outcome, UserInputRequested)
    assert (outcome.kind, outcome.tool) == ("approval", "refund")
