"""``analyse``: proofs for LOOP and the presets, with bounds counted by hand, and what it finds in faulty tables."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any, get_type_hints

import pytest

from agentfsm.analysis import (
    AgentTraits,
    Analysis,
    AnalysisLimits,
    Assumptions,
    GuardAssumption,
    Update,
    Variable,
    analyse,
    bounds,
    iff,
    must_pass,
    never_after,
)
from agentfsm.analysis.loop_assumptions import graph_assumptions
from agentfsm.analysis.state_space import StateSpace
from agentfsm.errors import ConfigurationError
from agentfsm.loop.approval_rows import with_votes
from agentfsm.loop.detectors import tool_error
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.guards import vote_recorded
from agentfsm.loop.history import KeepLast, Summarize
from agentfsm.loop.outcomes import CALL_MODEL
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine import declaration
from agentfsm.machine.declaration import GraphAnalysis, GraphBounds, GraphVerdict
from agentfsm.machine.graph import Graph, StateSpec, Transition
from agentfsm.runtime.compaction import with_compaction
from tests.helpers.graphs import (
    endless_retry,
    random_graph_with_assumptions,
    retry_bypassing_budget,
    unasked_guard,
    unchecked_graph,
)


def never(run: object) -> bool:
    return False


FEW = AgentGuardrails(max_iterations=3, max_steps=6, max_calls_per_reply=2)


def broken(analysis: Analysis) -> dict[str, tuple[str, ...]]:
    return {v.text: v.path for v in analysis.verdicts if not v.holds}


@pytest.mark.slow
def test_every_preset_passes_whatever_its_policy() -> None:
    for preset in PRESETS.values():
        found = analyse(preset.graph, guardrails=preset.guardrails, behavior=preset.behavior)
        assert found.ok, str(found)


def test_the_bounds_of_the_default_limits_match_a_count_by_hand() -> None:
    """One lap with a model call: pre_step, call_llm, post_llm; four calls of two moves each; retry_tool; the
    four again; recover back to pre_step: 3 + 8 + 1 (to recover) ... = 21 moves. 50 of them use up the
    iterations. The other 750 of the 4 * 50 * (1 + 3) steps are spent on a policy that retries the spent budget:
    two moves each. The 801st step is the runaway's.
    """
    found = analyse(LOOP, guardrails=AgentGuardrails(max_calls_per_reply=4))
    assert found.bounds.moves == 50 * 21 + 750 * 2 + 1
    assert found.bounds.model_calls == 50
    assert found.bounds.tool_calls == 50 * (4 + 4)
    # a person extends the iterations three times; there are steps enough for all of them
    assert found.bounds.model_calls_in_all == 50 * 4
    assert found.bounds.tool_calls_in_all == 50 * 4 * 8
    assert found.exact


@pytest.mark.slow
@pytest.mark.parametrize(("iterations", "calls", "retries"), [(1, 1, 0), (1, 1, 1), (2, 3, 0), (3, 2, 2), (2, 40, 19)])
def test_bounds_follow_the_guardrails(iterations: int, calls: int, retries: int) -> None:
    limits = AgentGuardrails(
        max_iterations=iterations, max_steps=iterations, max_tool_retries=retries, max_calls_per_reply=calls
    )
    found = analyse(LOOP, guardrails=limits)
    rounds = 1 + retries
    assert found.bounds.tool_calls == iterations * calls * rounds
    # 3 moves to the calls, 2 for each call, 1 to recover and back to pre_step; the end is the runaway
    assert found.bounds.moves == iterations * (3 + rounds * (2 * calls + 1)) + 1
    assert found.exact


@pytest.mark.slow
@pytest.mark.parametrize("policy", [KeepLast(turns=2), Summarize(above_tokens=50_000)], ids=["kept", "summarized"])
def test_a_history_policy_leaves_the_bounds_of_the_default_limits_as_they_are(policy: KeepLast | Summarize) -> None:
    """No lap that shortens the history is longer than one of the 750 that the longest run spends without a call."""
    found = analyse(with_compaction(LOOP, policy))
    assert found.ok
    plain = analyse(LOOP).bounds
    assert found.bounds == replace(
        found.bounds,
        moves=plain.moves,
        tool_calls=plain.tool_calls,
        tool_calls_in_all=plain.tool_calls_in_all,
        model_calls=50,
        model_calls_in_all=200,
    )
    assert found.explored < 100_000


def test_counters_that_no_bound_needs_are_left_free_if_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds are then at least as large, and only where other counters bound the moves."""
    graph = with_compaction(LOOP, KeepLast(turns=2, max_compactions=5))
    known = graph_assumptions(graph, FEW)
    close = bounds.compute_bounds(graph, known)
    monkeypatch.setattr(bounds, "MAX_LAYER_VALUES", 0)
    free = bounds.compute_bounds(graph, known)
    assert close.moves is not None
    assert free.moves is not None
    assert close.moves <= free.moves < 2 * close.moves
    needed = Graph(
        (StateSpec("work"), StateSpec("end", final=True)),
        (Transition("work", never, "work", spends="tries"), Transition("work", None, "end", ends="completed")),
        counters=(declaration.Counter("tries", 5),),
    )
    assert analyse(needed).bounds.moves == 6


def test_counters_of_ones_own_are_left_free_if_following_them_reaches_a_limit() -> None:
    """``max_iterations`` and the steps bound each lap of theirs, so that the longest run is the same without them."""
    graph = LOOP
    for number in range(5):

        def again(run: object) -> bool:
            return False

        again.__name__ = f"again_{number}"
        graph = graph.with_counter(declaration.Counter(again.__name__, 2)).with_transition(
            Transition("recover", again, "pre_step", spends=again.__name__)
        )
    plain = analyse(LOOP)
    limits = AnalysisLimits(max_configurations=3 * plain.explored, max_seconds=600)
    found = analyse(graph, limits=limits)
    assert found.ok
    assert found.bounds.limit == ""
    assert (found.bounds.moves, found.bounds.tool_calls) == (plain.bounds.moves, plain.bounds.tool_calls)


def test_bounds_under_limits_that_are_too_large_for_an_analysis_are_left_open() -> None:
    few = AnalysisLimits(max_configurations=50_000)
    found = analyse(LOOP, guardrails=AgentGuardrails(max_calls_per_reply=200, max_tool_retries=99), limits=few)
    assert found.bounds.limit == "explored 50,000 configurations until max_configurations was reached"
    assert found.bounds.moves is None
    assert [v.holds for v in found.verdicts] == [True] * 4


@pytest.mark.slow
def test_rows_disabled_by_the_limits_are_listed_with_the_reason() -> None:
    assert {d.row: d.why for d in analyse(LOOP).dead} == {
        "pre_step.token_limit": "max_tokens is not set",
        "pre_step.cost_limit": "max_cost_usd is not set",
    }
    limits = AgentGuardrails(max_tokens=1, max_cost_usd=1, max_tool_retries=0)
    (dead,) = analyse(LOOP, guardrails=limits).dead
    assert dead.row == "recover.retry_tool"
    assert "tool_retries can be spent 0 time(s)" in dead.why


def test_declared_properties_hold_or_have_a_shortest_counterexample() -> None:
    found = analyse(
        LOOP,
        must_pass("call_llm", through="pre_step"),
        must_pass("dispatch_tool", through="approval_decided", when="approval_required"),
        never_after("dispatch_tool", "output_truncated", until="pre_step"),
        must_pass("terminal", through="call_llm"),
        never_after("call_llm", "suspended"),
        guardrails=FEW,
    )
    assert broken(found) == {
        "terminal only after call_llm": ("pre_step.cancelled",),
        "never call_llm after suspended": (
            "pre_step.time_limit",
            "recover.ask_user",
            "suspended.replied",
            "pre_step.otherwise",
        ),
    }


def test_a_property_with_an_unknown_name_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match="'dispach_tool' is not a state, guard or row"):
        analyse(LOOP, must_pass("dispach_tool", through="pre_step"), guardrails=FEW)


def test_attempts_that_reset_on_success_make_an_endless_retry() -> None:
    graph, assumptions = endless_retry(resets=True)
    (verdict,) = [v for v in analyse(graph, assumptions=assumptions).verdicts if not v.holds]
    assert verdict.text == "every run ends, or waits for a person"
    assert (verdict.path, verdict.loop) == ((), ("ask.otherwise", "read.unreadable", "recover.otherwise"))
    graph, assumptions = endless_retry(resets=False)
    assert analyse(graph, assumptions=assumptions).ok


def test_a_retry_that_goes_straight_to_the_model_bypasses_the_budget() -> None:
    graph, _ = retry_bypassing_budget()
    found = broken(analyse(graph, must_pass("call_llm", through="pre_step"), guardrails=FEW))
    assert found["call_llm only after pre_step"] == (
        "pre_step.otherwise",
        "call_llm.transient_provider",
        "recover.otherwise",
    )
    assert "every run ends, or waits for a person" in found


@pytest.mark.slow
def test_approval_that_is_requested_too_late_is_found() -> None:
    """A faulty table: the flag is read, but the calls run anyway."""
    needs = unasked_guard("needs_approval")
    wrong = LOOP.with_transition(Transition("post_llm", needs, "dispatch_tool"), before="tool_calls")
    rule = must_pass("dispatch_tool", through="approval_required", when="needs_approval")
    (path,) = broken(analyse(wrong, rule, guardrails=FEW)).values()
    assert path == ("pre_step.otherwise", "call_llm.otherwise", "post_llm.needs_approval")


def test_a_shadowed_row_is_named() -> None:
    low, high = unasked_guard("low"), unasked_guard("high")
    graph = Graph(
        (StateSpec("a"), StateSpec("b", waits=True), StateSpec("end", final=True)),
        (
            Transition("a", low, "end", ends="completed"),
            Transition("a", high, "end", ends="completed"),
            Transition("a", None, "b"),
            Transition("b", None, "a"),
        ),
    )
    count = Variable("n", 9, (Update("* -> a", 1),))
    assumptions = Assumptions((count,), (iff(low, "n >= 2"), iff(high, "n >= 5")))
    found = analyse(graph, assumptions=assumptions)
    assert [d.row for d in found.dead] == ["a.high"]
    assert "shadowed: a.high" in str(found)
    assert not found.ok


def test_a_run_that_can_no_longer_end_is_found() -> None:
    stuck = unasked_guard("stuck")
    graph = Graph(
        (StateSpec("a"), StateSpec("b", waits=True), StateSpec("end", final=True)),
        (
            Transition("a", stuck, "b"),
            Transition("a", None, "end", ends="completed"),
            Transition("b", unasked_guard("released"), "a"),
        ),
    )
    tried = Variable("tried", 1, (Update("b.released", to=(1,)),))
    found = analyse(graph, assumptions=Assumptions((tried,), (iff(stuck, "tried == 1 or tried == 0"),)))
    (verdict,) = [v for v in found.verdicts if v.text == "from everywhere, the end can still be reached"]
    assert verdict.holds is False
    assert verdict.detail.startswith("not from a (")
    assert [d.row for d in found.dead] == ["a.otherwise"]


def test_a_state_of_your_own_is_bounded_by_the_counter_that_it_declares() -> None:
    """By hand: each of three steps may be followed by two reviews, which cost no model call."""
    reviews = declaration.Counter("reviews", 2)

    @declaration.exhausted(reviews, past=True)
    def reviewed_too_often(run: object) -> bool:
        return True

    def graph(refills: str) -> Graph:
        base = LOOP.with_counter(reviews).with_state(
            StateSpec("review", spends="reviews", effect=print),
            [
                Transition("review", reviewed_too_often, "terminal", ends="partial"),
                Transition("review", None, "post_tool"),
            ],
            entered_by=Transition("post_tool", unasked_guard("reviewable"), "review"),
            before="tool_error",
        )
        rows = (replace(r, refills=refills) if r.id == "pre_step.otherwise" else r for r in base)
        return replace(base, transitions=tuple(rows))

    limits = AgentGuardrails(max_iterations=3, max_steps=3, max_tool_retries=0, max_calls_per_reply=1)
    plain = analyse(LOOP, guardrails=limits).bounds.moves
    assert plain is not None
    once, each_step = (analyse(graph(refills), guardrails=limits) for refills in ("", "reviews"))
    assert once.ok
    assert each_step.ok
    # in all two reviews of two moves; the third is one move more, and ends the run: no longer than that
    assert once.bounds.moves == plain + 2 * 2
    assert each_step.bounds.moves == plain + 3 * 2 * 2


RETURN = Transition("first", None, "pre_step")


def plan(run: object) -> None:
    """The effect of a state of the user's."""


def test_nothing_stalls_before_the_first_step_unless_the_model_has_replied_by_then() -> None:
    def first(**options: Any) -> Graph:
        calls_model = options["effect"] is CALL_MODEL
        rows = LOOP.rows("call_llm") if calls_model else (LOOP.transition("pre_step.runaway"), RETURN)
        return LOOP.with_state(
            StateSpec("first", **options), [replace(t, source="first") for t in rows], entered_by=None
        )

    def assumed(graph: Graph) -> bool:
        names = (each.guard for each in graph_assumptions(graph, FEW, AgentTraits()).guards)
        return "pre_step.no_progress" in names

    assert assumed(LOOP)
    assert assumed(first(effect=plan))
    assert not assumed(first(effect=CALL_MODEL))
    assert not assumed(first(effect=plan, spends="steps"))


def test_a_guard_made_from_a_counter_is_exact_and_its_row_needs_nothing_else() -> None:
    """By hand: the row that spends is taken twice, and then no longer holds."""
    tries = declaration.Counter("tries", 2)
    again = unasked_guard("again")
    graph = Graph(
        (StateSpec("work"), StateSpec("end", final=True)),
        (Transition("work", again, "work", spends="tries"), Transition("work", None, "end", ends="completed")),
        counters=(tries,),
    )
    found = analyse(graph)
    assert found.ok
    assert found.bounds.moves == 2 + 1
    assert found.verdicts[2].assumptions == ()


@pytest.mark.slow
def test_a_user_guard_with_a_known_name_is_free() -> None:
    mine = LOOP.without("post_tool.tool_error").with_detector("post_tool", unasked_guard("tool_error"))
    assert analyse(mine, guardrails=FEW).ok
    assert mine.transition("post_tool.tool_error").guard is not tool_error


@pytest.mark.slow
def test_an_analysis_is_the_same_under_any_hash_seed_and_converts_to_json() -> None:
    code = (
        "import json; from agentfsm.analysis import analyse, must_pass;"
        "from agentfsm.loop.transition_table import LOOP; from agentfsm.loop.guardrails import AgentGuardrails;"
        "a = analyse(LOOP, must_pass('terminal', through='call_llm'), guardrails=AgentGuardrails(max_iterations=3));"
        "print(json.dumps(a.to_dict()), a.bounds.longest, a)"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(texts) == 1
    data = json.loads(texts.pop().partition("}] ")[0].partition("} (")[0] + "}")
    assert data["ok"] is False


def test_each_verdict_and_the_bounds_are_printed_with_what_they_assume() -> None:
    """The ending rests on the counters alone; what must be approved rests on what is known about requests."""
    approved = must_pass("dispatch_tool", through="suspended.approval_decided", when="dispatch_tool.approval_required")
    analysis = analyse(LOOP, approved, guardrails=FEW)
    lines = str(analysis).splitlines()
    for verdict in analysis.verdicts:
        at = next(i for i, line in enumerate(lines) if line[10:].startswith(verdict.text))
        printed = lines[at + 1 : at + 1 + len(verdict.assumptions)]
        assert [line.strip().removeprefix("if ") for line in printed] == list(verdict.assumptions)
    assert [bool(each.assumptions) for each in analysis.verdicts] == [False, False, False, False, True]
    at = lines.index(
        "    the most moves, tool calls between two waits, model calls in a whole run"
        " and tool calls in a whole run, if:"
    )
    assumed = analysis.to_dict()["bounds"]["assumptions"]
    assert [line.strip() for line in lines[at + 1 : at + 1 + len(assumed["moves"])]] == assumed["moves"] != []
    assert assumed["model_calls"] == []  # max_iterations bounds them; the step limit leaves fewer in a whole run
    assert assumed["tool_calls"] == assumed["tool_calls_in_all"] == assumed["model_calls_in_all"] == assumed["moves"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loop", *PRESETS])
def test_a_bound_that_is_printed_without_assumptions_holds_without_them(name: str) -> None:
    """Computed over a model in which every guard is free that the engine itself does not decide."""
    graph, behavior = (LOOP, None) if name == "loop" else (PRESETS[name].graph, PRESETS[name].behavior)
    least = AgentGuardrails(max_iterations=2, max_steps=2, max_calls_per_reply=1, max_tool_retries=0, max_continues=1)
    bounds_found = analyse(graph, guardrails=least, behavior=behavior).bounds
    known = graph_assumptions(graph, least, AgentTraits(behavior))
    free = bounds.compute_bounds(graph, replace(known, guards=tuple(each for each in known.guards if each.enforced)))
    without = [each for each in ("model_calls", "model_calls_in_all") if not bounds_found.assumptions_of(each)]
    assert without
    assert [getattr(free, each) for each in without] == [getattr(bounds_found, each) for each in without]


def test_assumptions_with_unknown_names_are_rejected() -> None:
    assumptions = Assumptions((), (iff("tool_error", "tries >= 2"),))
    with pytest.raises(ConfigurationError, match="there is no counter 'tries'"):
        analyse(LOOP, assumptions=assumptions, guardrails=FEW)
    with pytest.raises(ConfigurationError, match="'>= 2' is not a condition"):
        analyse(LOOP, assumptions=Assumptions((), (iff("tool_error", ">= 2"),)), guardrails=FEW)
    with pytest.raises(ConfigurationError, match="declared twice"):
        analyse(LOOP, assumptions=Assumptions((Variable("steps", 3),)), guardrails=FEW)
    with pytest.raises(ConfigurationError, match="no value 'red'"):
        Assumptions((Variable("light", labels=("green",), updates=(Update("*", to=("red",)),)),)).check()
    with pytest.raises(ConfigurationError, match="outside 0 to 2"):
        Variable("n", 2, start=3)


def test_an_analysis_converts_to_text() -> None:
    text = str(analyse(replace(LOOP, name="mine"), must_pass("terminal", through="call_llm")))
    assert text.startswith("mine: 8 states, ")
    assert "BROKEN  terminal only after call_llm\n          by: pre_step.cancelled" in text
    bounds = "at most 14,551 moves, at most 50 model calls, at most 6,400 tool calls"
    assert f"between two waits: {bounds}" in text


@pytest.mark.slow
def test_graph_analyse_returns_an_analysis() -> None:
    found = LOOP.analyse(must_pass("call_llm", through="pre_step"), guardrails=FEW)
    assert isinstance(found, Analysis)
    assert found.ok


def test_whether_the_end_can_be_reached_agrees_with_a_search_from_everywhere() -> None:
    lost = 0
    for seed in range(60):
        graph, assumptions = random_graph_with_assumptions(seed)
        product = StateSpace(graph, assumptions)
        everywhere = walk(product, product.initial)
        expected = all(any(c[0] in product.finals for c in walk(product, config)) for config in everywhere)
        (verdict,) = [
            v for v in analyse(graph, assumptions=assumptions).verdicts if v.text.startswith("from everywhere")
        ]
        assert verdict.holds is expected, graph.name
        lost += not expected
    assert 5 < lost < 55  # both results occur


def walk(product: StateSpace, start: tuple[int, ...]) -> set[tuple[int, ...]]:
    seen, todo = {start}, [start]
    while todo:
        for _, after in product.moves(todo.pop()):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return seen


def test_calls_before_a_wait_that_never_ends_are_counted() -> None:
    """By hand: one model call, then a wait for a guard that never holds."""
    never = unasked_guard("never")
    graph = unchecked_graph(
        (StateSpec("call_llm", effect=CALL_MODEL), StateSpec("wait", waits=True), StateSpec("end", final=True)),
        (Transition("call_llm", None, "wait"), Transition("wait", never, "end", ends="completed")),
    )
    most = analyse(graph, assumptions=Assumptions((), (GuardAssumption(never, may="never"),))).bounds
    assert (most.model_calls, most.model_calls_in_all, most.tool_calls_in_all) == (1, 1, 0)


def test_one_kind_of_call_can_be_bounded_when_the_other_is_not() -> None:
    """By hand: a person may request model calls forever; no tool ever runs."""
    graph = unchecked_graph(
        (StateSpec("call_llm", effect=CALL_MODEL), StateSpec("wait", waits=True), StateSpec("end", final=True)),
        (
            Transition("call_llm", None, "wait"),
            Transition("wait", unasked_guard("again"), "call_llm"),
            Transition("wait", unasked_guard("enough"), "end", ends="completed"),
        ),
    )
    most = analyse(graph).bounds
    assert (most.model_calls_in_all, most.tool_calls_in_all) == (None, 0)


@pytest.mark.slow
def test_the_rows_that_count_votes_change_neither_verdicts_nor_bounds_nor_the_size_of_the_proof() -> None:
    plain, counting = (analyse(graph, guardrails=FEW) for graph in (LOOP, with_votes(LOOP)))
    assert counting.ok, str(counting)
    assert counting.exact == plain.exact
    bounds = [{**each.to_dict()["bounds"], "assumptions": ()} for each in (counting, plain)]
    assert bounds[0] == bounds[1]
    assert counting.dead == plain.dead
    assert counting.explored <= 1.1 * plain.explored


def test_a_row_for_votes_that_leads_elsewhere_is_not_taken_for_one_that_keeps_waiting() -> None:
    graph = with_votes(LOOP)
    around = replace(
        graph,
        transitions=tuple(
            replace(row, target="dispatch_tool") if row.guard is vote_recorded else row for row in graph.transitions
        ),
    )
    known = {variable.name for variable in graph_assumptions(graph, FEW).counters}
    assert "together" in known
    assert "votes" not in known
    unsure = {variable.name for variable in graph_assumptions(around, FEW).counters}
    assert "together" not in unsure
    assert "votes" in unsure


def test_what_a_graph_says_of_itself_is_typed_and_no_name_of_it_is_missing() -> None:
    assert get_type_hints(Graph.analyse)["return"] is GraphAnalysis
    analysis = LOOP.analyse(guardrails=FEW)
    for declared, value in (
        (GraphAnalysis, analysis),
        (GraphVerdict, analysis.verdicts[0]),
        (GraphBounds, analysis.bounds),
    ):
        names = [name for name in vars(declared) if not name.startswith("_")]
        assert names
        assert [name for name in names if not hasattr(value, name)] == []
