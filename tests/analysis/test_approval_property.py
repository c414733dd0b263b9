"""``needs_approvals``: proved where votes are counted, broken by any other way from a request to where calls run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentfsm import LOOP, StateContext, StateSpec, Transition, with_votes
from agentfsm.analysis import AgentTraits, Verdict, analyse, needs_approvals
from agentfsm.errors import ConfigurationError
from agentfsm.loop import guards
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.presets import PRESETS
from agentfsm.machine.graph import Graph
from tests.helpers.graphs import unasked_guard

FEW = AgentGuardrails(max_iterations=2, max_calls_per_reply=2)
ASKED = ("pre_step.otherwise", "call_llm.otherwise", "post_llm.tool_calls", "dispatch_tool.approval_required")
VOTING = with_votes(LOOP)


def verdict(graph: Graph, approvals: int = 2, traits: AgentTraits | None = None) -> Verdict:
    return analyse(graph, needs_approvals("pay", approvals), guardrails=FEW, traits=traits).verdicts[-1]


def renamed(graph: Graph) -> Graph:
    def name(state: str) -> str:
        return f"my_{state}"

    states = tuple(replace(s, name=name(s.name)) for s in graph.states)
    rows = tuple(replace(t, source=name(t.source), target=name(t.target)) for t in graph.transitions)
    return replace(graph, states=states, transitions=rows)


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_with_votes_has_it_and_without_them_does_not(preset: str) -> None:
    graph = PRESETS[preset].graph
    assert verdict(with_votes(graph)).holds
    without = verdict(graph)
    assert without.holds is False
    assert without.path[-1] == "suspended.approval_decided"
    assert verdict(graph, approvals=1).holds


def test_the_verdict_says_what_it_depends_on() -> None:
    found = verdict(VOTING)
    assert found.text == "no effect of pay before 2 approvals"
    assert found.assumptions[:2] == (
        "pay: each call of it requires 2 approval(s)",
        "approval_decided: while approvals are missing, it holds only for a denial, which runs nothing",
    )


@pytest.mark.slow
def test_names_of_states_do_not_matter() -> None:
    assert verdict(renamed(VOTING)).holds
    assert verdict(renamed(LOOP)).holds is False


def test_a_row_from_the_wait_to_where_calls_run_breaks_it() -> None:
    broken = verdict(VOTING.with_transition(Transition("suspended", unasked_guard("hurry"), "dispatch_tool")))
    assert broken.holds is False
    assert broken.path == (*ASKED, "suspended.hurry")


def test_a_longer_way_round_the_votes_breaks_it_too() -> None:
    broken = verdict(VOTING.with_transition(Transition("suspended", unasked_guard("skip"), "post_tool")))
    assert broken.path == (*ASKED, "suspended.skip", "post_tool.calls_pending")


def test_a_guard_that_only_has_the_name_of_the_decision_is_none() -> None:
    named = replace(
        VOTING,
        transitions=tuple(
            replace(t, guard=unasked_guard("approval_decided")) if t.guard is guards.approval_decided else t
            for t in VOTING.transitions
        ),
    )
    assert verdict(named).path == (*ASKED, "suspended.approval_decided")


def test_a_state_of_your_own_may_run_calls() -> None:
    async def act(context: StateContext) -> None: ...

    entry = Transition("post_llm", unasked_guard("extra"), "act")
    graph = VOTING.with_state(StateSpec("act", effect=act), [Transition("act", None, "pre_step")], entered_by=entry)
    assert verdict(graph).holds
    broken = verdict(graph.with_transition(Transition("suspended", unasked_guard("extra"), "act")))
    assert broken.path == (*ASKED, "suspended.extra")


def test_a_denied_or_abandoned_request_does_not_count_against_the_next_batch() -> None:
    """A row back to the start drops the open calls, and what runs next was asked for again."""
    assert verdict(VOTING.with_transition(Transition("suspended", unasked_guard("give_up"), "pre_step"))).holds


@pytest.mark.parametrize("approvals", [0, 17])
def test_how_many_approvals_there_can_be_is_checked(approvals: int) -> None:
    with pytest.raises(ConfigurationError, match=f"from 1 to 16 approvals, not {approvals}"):
        needs_approvals("pay", approvals)
