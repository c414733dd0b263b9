"""``diff``: rows and decisions, compared with counts over the whole truth table, by hand and by brute force."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from agentfsm.analysis import diff, graph_from_table, reviewed_table
from agentfsm.errors import ConfigurationError, GraphError
from agentfsm.loop import detectors
from agentfsm.loop.guards import came_back
from agentfsm.loop.presets import PRESETS, STRICT
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.declaration import Counter, exhausted
from agentfsm.machine.graph import Graph, StateSpec, Transition
from tests.helpers.graphs import random_graph_with_assumptions, unasked_guard

RISKY, NORMAL, LATE = unasked_guard("risky"), unasked_guard("normal"), unasked_guard("late")


def small(*rows: Transition, **states: bool) -> Graph:
    wait = StateSpec("ask", waits=True)
    return Graph((StateSpec("go", **states), wait, StateSpec("end", final=True)), (*rows, *ASK), "small")


ASK = (Transition("ask", unasked_guard("allowed"), "end", ends="completed"),)
FIRST = small(
    Transition("go", RISKY, "ask"),
    Transition("go", NORMAL, "end", ends="completed"),
    Transition("go", None, "end", ends="completed"),
)
SWAPPED = small(
    Transition("go", NORMAL, "end", ends="completed"),
    Transition("go", RISKY, "ask"),
    Transition("go", None, "end", ends="completed"),
)


def test_a_table_does_not_differ_from_itself() -> None:
    for preset in PRESETS.values():
        found = diff(preset.graph, preset.graph)
        assert found.same
        assert found.behaves_alike
    assert str(diff(LOOP, LOOP)) == "the two tables are the same"


def test_swapping_two_rows_keeps_every_edge_and_is_reported() -> None:
    found = diff(FIRST, SWAPPED)
    assert (found.added, found.removed, found.retargeted) == ((), (), ())
    assert [(m.row, m.old, m.new) for m in found.moved] == [("go.normal", 2, 1)]
    (changed,) = found.decisions
    assert (changed.where, changed.old, changed.new) == (("risky", "normal"), "risky -> ask", "normal -> end")
    assert (changed.cases, changed.of) == (1, 4)
    assert not found.behaves_alike
    assert str(changed) == "go, where risky and normal hold: was risky -> ask, is normal -> end"


def test_a_removed_row_and_a_new_one() -> None:
    old = FIRST
    new = small(
        Transition("go", RISKY, "ask"),
        Transition("go", LATE, "end", ends="completed"),
        Transition("go", None, "end", ends="completed"),
    )
    found = diff(old, new)
    assert found.added == ("go.late -> end",)
    assert found.removed == ("go.normal -> end",)
    cases = {(d.where, d.old, d.new): d.cases for d in found.decisions}
    assert cases == {
        (("normal", "late"), "normal -> end", "late -> end"): 1,
        (("normal",), "normal -> end", "otherwise -> end"): 1,
        (("late",), "otherwise -> end", "late -> end"): 1,
    }


def test_a_row_with_another_target() -> None:
    new = small(
        Transition("go", RISKY, "end", ends="completed"),
        Transition("go", NORMAL, "ask"),
        Transition("go", None, "end", ends="completed"),
    )
    found = diff(FIRST, new)
    assert found.retargeted == (("go.risky", "ask", "end"), ("go.normal", "end", "ask"))
    assert sum(d.cases for d in found.decisions) == 3  # of four: only where neither holds is all as it was


def test_the_order_of_rows_of_different_states_does_not_matter() -> None:
    """Only the order within a state matters; the fingerprint agrees."""
    shuffled = replace(LOOP, transitions=tuple(sorted(LOOP.transitions, key=lambda t: t.source)))
    assert diff(LOOP, shuffled).same
    assert LOOP.fingerprint == shuffled.fingerprint


def test_states_that_are_added_removed_or_declared_differently() -> None:
    more = LOOP.with_state(
        StateSpec("review", effect=print),
        [Transition("review", None, "post_tool")],
        entered_by=Transition("post_llm", unasked_guard("reviewable"), "review"),
        before="tool_calls",
    )
    found = diff(LOOP, more)
    assert found.states_added == ("review",)
    assert not found.behaves_alike
    assert diff(more, LOOP).states_removed == ("review",)
    waiting = replace(FIRST, states=tuple(replace(s, waits=True) if s.name == "go" else s for s in FIRST.states))
    assert [str(each) for each in diff(FIRST, waiting).states_changed] == ["go: waits yes, was no"]


def test_the_diff_of_the_loop_and_strict_is_reported() -> None:
    text = str(diff(LOOP, STRICT.graph))
    assert "- post_tool.tool_error -> recover" in text
    assert "post_tool, where tool_error holds: was tool_error -> recover, is otherwise -> pre_step" in text


def swapped(graph: Graph, one: str, other: str) -> Graph:
    """The graph with two rows in each other's place."""
    rows = list(graph.transitions)
    i, j = ([row.id for row in rows].index(each) for each in (one, other))
    rows[i], rows[j] = rows[j], rows[i]
    return replace(graph, transitions=tuple(rows))


def with_guard(graph: Graph, row: str, guard: Any) -> Graph:
    return replace(graph, transitions=tuple(replace(t, guard=guard) if t.id == row else t for t in graph))


def with_new_state_name(graph: Graph, old: str, new: str) -> Graph:
    def name(state: str) -> str:
        return new if state == old else state

    return replace(
        graph,
        states=tuple(replace(s, name=name(s.name)) for s in graph.states),
        transitions=tuple(replace(t, source=name(t.source), target=name(t.target)) for t in graph),
    )


def audit_log(run: Any) -> None:
    """Writes nothing."""


def audit_aloud(run: Any) -> str:
    return "audited"


AUDITED = LOOP.with_state(
    StateSpec("audit", effect=audit_log),
    [Transition("audit", None, "post_tool")],
    entered_by="dispatch_tool.otherwise",
)


def my_truncated(run: Any) -> object:
    """Another name for the same."""
    return detectors.output_truncated(run)


def output_truncated(run: Any) -> None:
    """The name of one of the loop's guards, and the opposite code."""


def test_a_guard_of_equal_name_and_other_code_is_reported() -> None:
    found = diff(LOOP, with_guard(LOOP, "post_llm.output_truncated", output_truncated))
    assert found.guards_changed == ("post_llm.output_truncated",)
    assert not found.behaves_alike
    assert "~ post_llm.output_truncated: changed code of its guard" in str(found)
    assert "every decision stays the same" not in str(found)


def test_a_guard_with_a_new_name_is_one_change_and_changes_no_decision() -> None:
    found = diff(LOOP, with_guard(LOOP, "post_llm.output_truncated", my_truncated))
    assert str(found) == (
        "~ guard output_truncated is now my_truncated\nevery decision stays the same, whatever the guards return"
    )
    assert found.behaves_alike
    assert not found.same


def test_a_changed_effect_is_reported_by_its_code() -> None:
    again = replace(AUDITED, states=tuple(replace(s) for s in AUDITED.states))
    assert diff(AUDITED, again).same
    louder = replace(
        AUDITED, states=tuple(replace(s, effect=audit_aloud) if s.name == "audit" else s for s in AUDITED.states)
    )
    found = diff(AUDITED, louder)
    assert found.effects_changed == ("audit",)
    assert not found.behaves_alike
    assert "~ state audit: changed code of its effect" in str(found)


def test_a_state_with_a_new_name_is_one_change() -> None:
    found = diff(AUDITED, with_new_state_name(AUDITED, "audit", "review"))
    assert str(found) == "~ state audit is now review\nevery decision stays the same, whatever the guards return"
    assert found.behaves_alike


def test_two_states_and_a_guard_with_new_names_are_three_changes() -> None:
    old = AUDITED.with_state(
        StateSpec("file", effect=audit_aloud), [Transition("file", None, "audit")], entered_by="dispatch_tool.otherwise"
    )
    new = with_new_state_name(with_new_state_name(old, "audit", "review"), "file", "archive")
    new = with_guard(new, "post_llm.output_truncated", my_truncated)
    found = diff(old, new)
    assert {str(each) for each in found.renamed} == {
        "state audit is now review",
        "state file is now archive",
        "guard output_truncated is now my_truncated",
    }
    assert found.behaves_alike


def test_a_state_with_a_new_name_and_other_rows_or_another_effect_is_not_taken_for_the_old_one() -> None:
    other_effect = replace(
        AUDITED, states=tuple(replace(s, effect=audit_aloud) if s.name == "audit" else s for s in AUDITED.states)
    )
    other_row = AUDITED.with_transition(Transition("audit", RISKY, "recover"))
    for changed in (other_effect, other_row):
        found = diff(AUDITED, with_new_state_name(changed, "audit", "review"))
        assert (found.states_removed, found.states_added) == (("audit",), ("review",))
        assert not found.behaves_alike


def test_a_changed_wait_is_named_and_is_a_change_of_behavior() -> None:
    waiting = replace(AUDITED, states=tuple(replace(s, waits=True) if s.name == "audit" else s for s in AUDITED.states))
    found = diff(AUDITED, waiting)
    assert "~ state audit: waits yes, was no" in str(found)
    assert "every decision stays the same" not in str(found)
    assert not found.behaves_alike


def test_a_changed_ending_is_named_and_leads_elsewhere() -> None:
    changed = replace(
        LOOP, transitions=tuple(replace(t, ends="partial") if t.id == "recover.handoff" else t for t in LOOP)
    )
    found = diff(LOOP, changed)
    assert "~ recover.handoff: ends partial, was handed_off" in str(found)
    (changed_decision,) = found.decisions
    assert changed_decision.leads_elsewhere
    assert "was handoff -> terminal (handed_off), is handoff -> terminal (partial)" in str(changed_decision)
    assert not found.behaves_alike


def test_what_is_spent_and_its_limit_are_named() -> None:
    limited = diff(LOOP, LOOP.with_counter(Counter("tool_retries", 7)))
    assert "~ counter tool_retries: limit 7, was max_tool_retries" in str(limited)
    assert not limited.behaves_alike
    steps = diff(LOOP, LOOP.with_counter(Counter("steps", 7)))
    assert str(steps).splitlines()[0] == "~ counter steps: limit 7, was step_limit"
    assert steps.guards_changed == ()
    free = replace(
        LOOP, transitions=tuple(replace(t, refills=()) if t.id == "post_llm.tool_calls" else t for t in LOOP)
    )
    assert "~ post_llm.tool_calls: refills nothing, was pending_calls and tool_retries" in str(diff(LOOP, free))
    assert not diff(LOOP, free).behaves_alike


def test_another_initial_state_is_named() -> None:
    elsewhere = replace(LOOP, states=tuple(sorted(LOOP.states, key=lambda s: s.name != "call_llm")))
    found = diff(LOOP, elsewhere)
    assert found.initial == ("pre_step", "call_llm")
    assert str(found).splitlines()[0] == "~ runs start in call_llm, not in pre_step"
    assert not found.behaves_alike


def test_what_only_a_picture_shows_is_no_change() -> None:
    drawn = replace(
        AUDITED,
        states=tuple(replace(s, note="another", lane="left") if s.name == "audit" else s for s in AUDITED.states),
    )
    assert diff(AUDITED, drawn).same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("call_llm.transient_provider", "call_llm.provider_error"),
        ("recover.ask_user", "recover.stop"),
        ("post_tool.declared_done", "post_tool.declared_unable"),
        ("dispatch_tool.approval_required", "dispatch_tool.in_doubt"),
    ],
)
def test_exclusive_guards_that_are_swapped_change_no_decision(one: str, other: str) -> None:
    found = diff(LOOP, swapped(LOOP, one, other))
    assert found.moved
    assert found.decisions == ()
    assert found.behaves_alike


TRIES = Counter("tries", 3)


@exhausted(TRIES)
def no_try_left(run: Any) -> bool:
    """A guard made from a counter."""
    return True


def test_a_row_that_spends_a_counter_excludes_the_row_for_its_end() -> None:
    counted = LOOP.with_counter(TRIES)
    for spends, alike in (("tries", True), ((), False)):
        graph = counted.with_transition(Transition("recover", RISKY, "suspended", spends=spends), before="retry_tool")
        graph = graph.with_transition(Transition("recover", no_try_left, "suspended"), before="retry_tool")
        found = diff(graph, swapped(graph, "recover.risky", "recover.no_try_left"))
        assert found.moved
        assert found.behaves_alike is alike


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("post_llm.output_truncated", "post_llm.output_refused"),
        ("post_tool.policy_violation", "post_tool.calls_pending"),
        ("post_tool.unknown_tool", "post_tool.tool_error"),
    ],
)
def test_guards_that_can_hold_together_change_decisions_when_they_are_swapped(one: str, other: str) -> None:
    found = diff(LOOP, swapped(LOOP, one, other))
    assert found.decisions
    assert not found.behaves_alike


def test_only_combinations_that_can_occur_are_counted() -> None:
    """Of LOOP's recover, cancelled, aborted and retry_tool are free, and at most one of the three actions holds."""
    asks = (replace(t, target="suspended", ends="") if t.id == "recover.stop" else t for t in LOOP)
    (changed,) = diff(LOOP, replace(LOOP, transitions=tuple(asks))).decisions
    assert changed.where == ("stop",)
    assert changed.of == 2**3 * 4
    assert changed.cases == 2  # neither cancelled nor aborted, and retry_tool or not


def test_changes_that_lead_elsewhere_come_first_and_none_is_left_out() -> None:
    new = swapped(LOOP, "post_tool.unknown_tool", "post_tool.tool_error")
    new = swapped(new, "post_tool.calls_pending", "post_tool.repeated_error")
    found = diff(LOOP, new)
    order = [d.leads_elsewhere for d in found.decisions]
    assert order == sorted(order, reverse=True)
    assert {True, False} == set(order)
    lines = str(found).splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("by another row to the same state"))
    above, below = lines[:heading], lines[heading + 1 :]
    assert any("was calls_pending -> dispatch_tool, is repeated_error -> recover" in line for line in above)
    assert all(line.count("-> recover") == 2 for line in below)
    assert len(found.decisions) == sum(", where " in line for line in lines)


def test_a_table_with_digests_shows_changed_code_and_one_without_says_that_it_cannot() -> None:
    changed = with_guard(LOOP, "post_llm.output_truncated", output_truncated)
    reviewed = graph_from_table(json.loads(json.dumps(reviewed_table(LOOP))))
    assert diff(reviewed, LOOP).same
    assert diff(reviewed, LOOP).not_compared == ()
    assert diff(reviewed, changed).guards_changed == ("post_llm.output_truncated",)
    bare = diff(graph_from_table(LOOP.table), changed)
    assert bare.same
    assert "post_llm.output_truncated" in bare.not_compared
    assert "not compared: the code of " in str(bare)
    louder = replace(
        AUDITED, states=tuple(replace(s, effect=audit_aloud) if s.name == "audit" else s for s in AUDITED.states)
    )
    assert diff(graph_from_table(reviewed_table(AUDITED)), louder).effects_changed == ("audit",)
    assert "audit" in diff(graph_from_table(AUDITED.table), louder).not_compared


def test_a_table_with_counters_and_outcomes_of_your_own_can_be_kept_in_a_file() -> None:
    """What follows from the code of its guards was checked when it was built, and is not asked again."""
    reviews = Counter("reviews", 2)

    @exhausted(reviews, past=True)
    def reviewed_too_often(run: Any) -> bool:
        return True

    graph = LOOP.with_counter(reviews).with_state(
        StateSpec("review", effect=audit_log, spends="reviews", outcomes=("approved",)),
        [
            Transition("review", reviewed_too_often, "terminal", ends="partial"),
            Transition("review", came_back("approved"), "terminal", ends="completed"),
            Transition("review", None, "pre_step"),
        ],
        entered_by="post_llm.otherwise",
    )
    for kept in (graph.table, reviewed_table(graph)):
        assert diff(graph_from_table(json.loads(json.dumps(kept))), graph).same
    silent = replace(graph, states=tuple(replace(s, outcomes=()) if s.name == "review" else s for s in graph.states))
    assert "~ state review: outcomes nothing, was approved" in str(
        diff(graph_from_table(reviewed_table(graph)), silent)
    )
    fewer = graph.with_counter(Counter("reviews", 1))
    assert "~ counter reviews: limit 1, was 2" in str(diff(graph_from_table(reviewed_table(graph)), fewer))


def test_a_state_with_a_new_name_is_recognized_by_a_reviewed_table_too() -> None:
    reviewed = graph_from_table(reviewed_table(AUDITED))
    found = diff(reviewed, with_new_state_name(AUDITED, "audit", "review"))
    assert [str(each) for each in found.renamed] == ["state audit is now review"]


@pytest.mark.parametrize("seed", range(40))
def test_the_decisions_agree_with_the_whole_truth_table(seed: int) -> None:
    """Brute force: both tables decide for every combination of guard results, and the differences are counted."""
    old, _ = random_graph_with_assumptions(seed)
    new = mutated(old, seed)
    found = diff(old, new)
    for spec in old.states:
        mine = [d for d in found.decisions if d.state == spec.name]
        names = sorted({t.name for g in (old, new) for t in g.rows(spec.name) if t.guard is not None})
        differing = []
        for answers in product((False, True), repeat=len(names)):
            holds = dict(zip(names, answers, strict=True))
            before, after = decide(old, spec.name, holds), decide(new, spec.name, holds)
            if before != after:
                differing.append((holds, before, after))
        assert sum(d.cases for d in mine) == len(differing)
        for holds, before, after in differing:
            (reported,) = [d for d in mine if all(holds[n] for n in d.where) and not any(holds[n] for n in d.unless)]
            assert (reported.old, reported.new) == (before, after)


def decide(graph: Graph, state: str, holds: dict[str, bool]) -> str:
    for row in graph.rows(state):
        if row.guard is None or holds[row.name]:
            return f"{row.name} -> {row.target}"
    return ""


def mutated(graph: Graph, seed: int) -> Graph:
    """The same table with two rows of a state swapped, one removed, or one retargeted: the first valid result."""
    rows = list(graph.transitions)
    options = []
    for i, row in enumerate(rows):
        for j in range(i + 1, len(rows)):
            if rows[j].source == row.source and row.guard and rows[j].guard:
                options.append([*rows[:i], rows[j], *rows[i + 1 : j], row, *rows[j + 1 :]])
        if row.guard:
            options.append([*rows[:i], *rows[i + 1 :]])
        options += [[*rows[:i], replace(row, target=s.name), *rows[i + 1 :]] for s in graph.states]
    for shift in range(len(options)):
        table = options[(seed * 7 + shift) % len(options)]
        try:
            return replace(graph, transitions=tuple(table))
        except GraphError:
            continue
    return graph


def test_a_graph_is_the_same_after_a_round_trip_through_json() -> None:
    for preset in PRESETS.values():
        data = json.loads(json.dumps(preset.graph.table))
        assert diff(preset.graph, graph_from_table(data)).same
    assert graph_from_table(LOOP.table, "pinned").name == "pinned"


@pytest.mark.parametrize("data", [{}, {"states": []}, {"states": [["a"]], "transitions": []}, {"states": 1}])
def test_data_that_is_not_a_table_is_rejected(data: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="not the table of a graph"):
        graph_from_table(data)


def test_a_diff_converts_to_json() -> None:
    data = json.loads(json.dumps(diff(FIRST, SWAPPED).to_dict()))
    assert data["behaves_alike"] is False
    assert data["moved"] == [{"row": "go.normal", "old": 2, "new": 1}]
    assert data["decisions"][0]["where"] == ["risky", "normal"]


# -- shown in a notebook and in a pull request ------------------------------------------------------------


def test_a_diff_draws_itself_and_fits_a_comment() -> None:
    found = diff(LOOP, LOOP.without("post_llm.loop_detected"))
    assert found.diagram().startswith("<svg")
    assert "loop_detected" in found.diagram()  # struck through
    text = found.markdown()
    assert text.startswith("### Difference of loop: the behavior changes\n\n```diff\n- post_llm.loop_detected")
    assert "\n```mermaid\nflowchart TD\n" in text
    assert text.rstrip().endswith("```")
    assert str(found) in text
    assert len(text) <= 60_000
    same = diff(LOOP, LOOP)
    assert same.markdown() == "### Difference of loop: no difference\n\n```diff\nthe two tables are the same\n```\n"


def test_a_diff_that_is_longer_than_a_comment_says_that_there_is_more() -> None:
    states = tuple(StateSpec(f"state_{n}" + "x" * 200, final=True) for n in range(400))
    many = replace(diff(LOOP, STRICT.graph), states_added=tuple(str(s.name) for s in states))
    assert len(str(many)) > 60_000
    assert len(many.markdown()) <= 60_000
    assert "... and more: agentfsm diff shows all of it" in many.markdown()


def test_a_notebook_shows_the_changes_and_the_picture() -> None:
    found = diff(LOOP, replace(LOOP.without("post_llm.loop_detected"), name="<b>&"))
    shown: Any = found
    assert shown._repr_html_().startswith("<pre>")
    assert "<svg" in shown._repr_html_()
    assert "<b>" not in shown._repr_html_()
    assert shown._repr_markdown_() == found.markdown()


def test_a_diff_without_graphs_has_no_picture() -> None:
    bare = replace(diff(LOOP, STRICT.graph), before=None, after=None)
    assert bare == diff(LOOP, STRICT.graph)
    assert "mermaid" not in bare.markdown()
    with pytest.raises(ConfigurationError, match=r"has no graphs to draw: make it with diff\(old, new\)"):
        bare.diagram()
    assert {"before", "after"}.isdisjoint(bare.to_dict())
    assert json.loads(json.dumps(diff(LOOP, STRICT.graph).to_dict())) == json.loads(json.dumps(bare.to_dict()))
