"""Properties of the default table: calls are counted, cycles spend, no state is stuck."""

from __future__ import annotations

import graphlib
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfsm.loop.failures import Action, Failure, FailureKind
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.human_input import PendingRequest
from agentfsm.loop.messages import FinishReason, Message, Reply, ToolCall, ToolResult, Usage
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.state import CallState, RunState
from agentfsm.loop.transition_table import BUILT_IN_GUARDS, LOOP
from agentfsm.machine.engine import Machine
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
    kinds = {k.value for k in FailureKind} - {"aborted"}
    assert {t.name for t in LOOP if t.target == "recover"} == kinds
    assert {t.name for t in LOOP if t.source == "recover"} >= {"ask_user", "handoff", "stop", "retry_tool"}


def test_a_loop_says_what_each_state_does():
    assert all(s.note for s in LOOP.states)


# -- guards that are silent while fields have their usual values -----------------------------------------------

FAILURES = {kind: Failure(kind=kind, explanation="it failed") for kind in FailureKind}
CALL = ToolCall("c1", "add", {"a": 1})
DONE = CallState(CALL, CALL.signature, result=ToolResult("c1", "add", "3"))
RUNS = st.builds(
    RunState,
    st.just("r1"),
    state=st.sampled_from([str(spec.name) for spec in LOOP.states if not spec.final and not spec.waits]),
    guardrails=st.builds(
        AgentGuardrails,
        max_tokens=st.sampled_from([None, 5]),
        max_cost_usd=st.sampled_from([None, 0.5]),
        max_execution_time_s=st.sampled_from([None, 9]),
    ),
    reply=st.one_of(
        st.none(),
        st.builds(
            Reply,
            st.sampled_from([Message.assistant("Hi."), Message.assistant("", (CALL,))]),
            st.sampled_from([FinishReason.STOP, FinishReason.STOP, *FinishReason]),
            refusal=st.sampled_from([None, None, "No."]),
        ),
    ),
    reply_judged=st.booleans(),
    malformed=st.sampled_from([None, "not JSON"]),
    batch=st.sampled_from([[], [CallState(CALL, CALL.signature)], [DONE]]),
    counters=st.dictionaries(st.sampled_from([c.name for c in LOOP.counters]), st.sampled_from([0, 1, 10_000])),
    usage=st.builds(Usage, input_tokens=st.sampled_from([0, 9]), cost_usd=st.sampled_from([0.0, 1.0])),
    elapsed_s=st.sampled_from([0.0, 10.0]),
    silence_s=st.sampled_from([0.0, 99.0]),
    failure=st.sampled_from([None, *FAILURES.values()]),
    action=st.sampled_from([None, *Action]),
    retry_calls=st.booleans(),
    call_failures=st.sampled_from([{}, *({kind: failure} for kind, failure in FAILURES.items())]),
    error_key=st.sampled_from([None, ("tool_error", "add", "", "it failed")]),
    error_streak=st.sampled_from([0, 9]),
    denials=st.sampled_from([0, 9]),
    pending_request=st.sampled_from([None, PendingRequest("approval", "?"), PendingRequest("in_doubt", "?")]),
    ending=st.sampled_from([None, "done", "unable", "ask"]),
    cancelled=st.sampled_from([None, None, None, "", "stopped"]),
    aborted=st.sampled_from([None, None, None, FAILURES[FailureKind.aborted]]),
)


@pytest.mark.slow
@given(RUNS)
@settings(max_examples=400)
def test_a_guard_does_not_hold_while_its_fields_have_the_values_it_declares(run):
    usual = RunState("r2")
    for guard in BUILT_IN_GUARDS:
        declared = getattr(guard, "silent_while", ())
        quiet = deepcopy(run)
        for name, value in declared:
            where, _, field = name.rpartition(".")
            if where == "guardrails":
                quiet.guardrails = quiet.guardrails.model_copy(update={field: value})
            elif where == "reply":
                quiet.reply = replace(quiet.reply or Reply(Message.assistant("Hi.")), **{field: value})
                assert getattr(Reply(Message.assistant()), field) == value
            else:
                setattr(quiet, name, value)
                assert getattr(usual, name) == value
        assert not declared or not guard(quiet)


@pytest.mark.slow
@given(RUNS)
@settings(max_examples=400)
def test_the_engine_decides_as_if_each_guard_were_asked(run):
    """A plain loop over the rows, which knows nothing of silent guards, is the oracle."""
    graph = LOOP
    expected, tried = None, []
    for row in graph.rows(run.state):
        expected = row
        tried.append((row.name, row.guard is None or bool(row.guard(run))))
        charged = [c for c in graph.counters if c.name in row.spends and c.name not in row.refills]
        if tried[-1][1] and any(counter.is_empty(run) for counter in charged):
            tried[-1] = (row.name, False)
        if tried[-1][1]:
            break
    decision = Machine(graph, BUILT_IN_GUARDS).step(run)
    assert (decision.transition, decision.tried) == (expected, tuple(tried))
