"""``paths``: the lists cover the criterion, are small and deterministic, and give reasons for what is left out."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest

from agentfsm import Agent
from agentfsm.analysis import Assumptions, GuardAssumption, Update, Variable
from agentfsm.errors import ConfigurationError
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.state import RunState
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.declaration import Counter
from agentfsm.machine.graph import Graph, StateSpec, Transition
from agentfsm.testing import ScriptedModel, paths
from tests.helpers.graphs import loop_rows


def hand_counted_pairs() -> set[tuple[str, str]]:
    """Every two rows of the hand-written table of which the second leaves the state that the first enters."""
    table = loop_rows()
    return {(f"{a}.{g}", f"{b}.{h}") for a, g, to in table for b, h, _ in table if to == b}


def impossible_pairs() -> set[tuple[str, str]]:
    """Those that the rules exclude, by hand: 30 of the 269."""
    table = loop_rows()
    entries = [f"{a}.{g}" for a, g, to in table if to == "recover"]
    found = {
        (e, "recover.retry_tool") for e in entries if e not in ("post_tool.tool_error", "post_tool.environment_error")
    }
    answers = {
        "dispatch_tool.approval_required": "approval_decided",
        "dispatch_tool.in_doubt": "doubt_settled",
        "post_tool.question_asked": "replied",
        "recover.ask_user": "replied",
    }
    for asked, fitting in answers.items():
        for other in ("approval_decided", "doubt_settled", "replied"):
            if other != fitting:
                found.add((asked, f"suspended.{other}"))
    found.add(("recover.retry_tool", "dispatch_tool.in_doubt"))  # only idempotent calls are run again
    return found


def covered(found) -> set[tuple[str, str]]:
    return {pair for path in found for pair in pairwise(path.ids)}


def test_pairs_of_the_loop_are_covered_but_for_those_that_the_rules_exclude() -> None:
    found = paths(LOOP)
    assert covered(found) == hand_counted_pairs() - impossible_pairs()
    assert {tuple(i.rows) for i in found.infeasible} == impossible_pairs()
    assert all(i.reason for i in found.infeasible)
    assert (found.required, len(found.infeasible)) == (269, 30)
    print(found)


def test_every_path_is_a_run_from_the_start_to_the_end() -> None:
    covered: set[tuple[object, object]] = set()
    for path in paths(LOOP):
        assert path.rows[0].source == "pre_step"
        assert path.rows[-1].target == "terminal"
        assert all(a.target == b.source for a, b in pairwise(path.rows))
        assert not covered.issuperset(pairwise(path.rows))  # each covers a pair that none before it does
        covered.update(pairwise(path.rows))


def test_the_list_is_small() -> None:
    """132 of the pairs end a run, so no list can be shorter than that."""
    ends = {pair for pair in hand_counted_pairs() - impossible_pairs() if pair[1] in ending_rows()}
    assert len(ends) == 132
    assert len(paths(LOOP)) <= 1.1 * len(ends)
    assert max(len(p.rows) for p in paths(LOOP)) < 50


def ending_rows() -> set[str]:
    return {f"{a}.{g}" for a, g, to in loop_rows() if to == "terminal"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_its_pairs(name: str) -> None:
    preset = PRESETS[name]
    found = paths(preset.graph, behavior=preset.behavior)
    feasible = found.required - len(found.infeasible)
    assert len(covered(found)) == feasible
    assert len(covered(found)) > 120
    print(found)


def test_native_calls_bring_a_preset_with_envelopes_to_pending_calls() -> None:
    feedback = PRESETS["feedback"]
    found = paths(feedback, "transitions")
    assert any("post_tool.calls_pending" in path.ids for path in found)
    assert {each.rows[0] for each in found.infeasible} == {"post_tool.declared_unable", "post_tool.question_asked"}


def test_what_a_preset_excludes_is_listed_with_the_reason() -> None:
    funnel = PRESETS["funnel"]
    why = {i.rows: i.reason for i in paths(funnel.graph, "transitions", behavior=funnel.behavior).infeasible}
    assert why[("post_llm.otherwise",)] == "otherwise: a text reply is not an answer here"
    strict = PRESETS["standard"]
    why = {i.rows: i.reason for i in paths(strict.graph, "transitions", behavior=strict.behavior).infeasible}
    assert why[("post_tool.declared_unable",)] == "declared_unable: the control tools are not registered"


def test_what_only_a_sub_agent_can_do_is_said_to_be_left_out() -> None:
    helper = Agent(ScriptedModel(), preset="funnel").as_tool("helper", "Helps.")
    reasons = {}
    for name, tools in (("with", [helper]), ("without", [])):
        found = paths(Agent(ScriptedModel(), tools=tools), "transitions").infeasible
        reasons[name] = {each.rows[0]: each.reason for each in found}["post_tool.question_asked"]
    assert reasons["without"] == "question_asked: the control tools are not registered"
    assert reasons["with"] == f"{reasons['without']} (paths leave out sub-agents and tools that ask)"


@pytest.mark.slow
def test_other_criteria_ask_for_more_or_less() -> None:
    rows_ = paths(LOOP, "transitions")
    assert {r for p in rows_ for r in p.ids} == {f"{a}.{g}" for a, g, _ in loop_rows()}
    assert len(rows_) < 30
    triples = paths(LOOP, "triples")
    assert triples.required - len(triples.infeasible) > 600
    windows = {w for p in triples for w in zip(p.ids, p.ids[1:], p.ids[2:], strict=False)}
    assert len(windows) >= triples.required - len(triples.infeasible)


def test_prime_paths_of_a_small_graph_are_those_of_the_book() -> None:
    """A figure of eight: counted by hand. Round trips begin and end in the same state."""

    def no(run: object) -> bool:
        return False

    graph = Graph(
        (StateSpec("a"), StateSpec("b"), StateSpec("end", final=True)),
        (
            Transition("a", no, "b", spends="rounds"),
            Transition("a", None, "end", ends="completed"),
            Transition("b", None, "a"),
        ),
        counters=(Counter("rounds", 2),),
    )
    found = paths(graph, "prime")
    assert (found.required, len(found.infeasible)) == (3, 0)  # a-b-a, b-a-b, b-a-end
    assert [" ".join(p.ids) for p in found] == ["a.no b.otherwise a.no b.otherwise a.otherwise"]


def test_a_limit_that_is_not_set_makes_its_row_impossible_with_the_reason() -> None:
    limits = AgentGuardrails(max_iterations=2, max_steps=4, repeated_error_threshold=2)
    why = {i.rows: i.reason for i in paths(LOOP, "transitions", guardrails=limits).infeasible}
    assert why == {
        ("pre_step.token_limit",): "token_limit: max_tokens is not set",
        ("pre_step.cost_limit",): "cost_limit: max_cost_usd is not set",
    }


def test_custom_assumptions_exclude_paths() -> None:
    assumptions = Assumptions((), (GuardAssumption("tool_error", may="never", why="tools here never fail"),))
    why = {i.rows: i.reason for i in paths(LOOP, "transitions", assumptions=assumptions).infeasible}
    assert why == {("post_tool.tool_error",): "tool_error: tools here never fail"}


@pytest.mark.slow
def test_more_generous_budgets_make_no_other_pair_possible() -> None:
    """So the short budgets under which paths are found hide nothing."""
    generous = AgentGuardrails(
        max_iterations=4, max_steps=9, max_tokens=9, max_cost_usd=1, max_continues=2, max_tool_retries=2
    )
    short, wide = paths(LOOP), paths(LOOP, guardrails=generous)
    assert {i.rows for i in short.infeasible} == {i.rows for i in wide.infeasible}


def test_there_are_four_criteria() -> None:
    with pytest.raises(ConfigurationError, match="unknown criterion 'everything'; available: transitions, pairs"):
        paths(LOOP, "everything")


@pytest.mark.slow
def test_the_list_is_the_same_under_any_hash_seed() -> None:
    code = (
        "from agentfsm.testing import paths; from agentfsm.loop.transition_table import LOOP;"
        "p = paths(LOOP); print(*p, *p.infeasible, sep='\\n')"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(texts) == 1
    assert texts.pop().startswith("001-")


def test_paths_keep_what_is_known_about_a_guard_of_your_own() -> None:
    def costly(run: RunState) -> bool:
        return run.usage.total_tokens > 500

    graph = LOOP.with_transition(Transition("post_llm", costly, "recover"), before="tool_calls")
    place = [row.id for row in graph.rows("post_llm")].index("post_llm.costly")
    lower = {row.id for row in graph.rows("post_llm")[place + 1 :]}

    def is_false_again(ids: tuple[str, ...]) -> bool:
        return "post_llm.costly" in ids and bool(lower & set(ids[ids.index("post_llm.costly") :]))

    spent = Variable("spent", 1, (Update("post_llm.costly", to=(1,)),), budget=False)
    stays = GuardAssumption("costly", must="spent == 1", why="usage only grows")
    assert any(is_false_again(path.ids) for path in paths(graph, "pairs"))
    known = Assumptions(counters=(spent,), guards=(stays,))
    assert not any(is_false_again(path.ids) for path in paths(graph, "pairs", assumptions=known))
