"""``diff``: rows and decisions, compared with counts over the whole truth table, by hand and by brute force."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest

from agentfsm.analysis import diff, graph_from_table
from agentfsm.errors import ConfigurationError, GraphError
from agentfsm.loop.presets import PRESETS, STRICT
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.graph import Graph, StateSpec, Transition
from tests.helpers.graphs import random_graph_with_assumptions, unasked_guard

RISKY, NORMAL, LATE = unasked_guard("risky"), unasked_guard("normal"), unasked_guard("late")


def small(*rows: Transition, **states: bool) -> Graph:
    wait = StateSpec("ask", waits=True)
    return Graph((StateSpec("go", **states), wait, StateSpec("end", final=True)), (*rows, *ASK), "small")


ASK = (Transition("ask", unasked_guard("allowed"), "end"),)
FIRST = small(Transition("go", RISKY, "ask"), Transition("go", NORMAL, "end"), Transition("go", None, "end"))
SWAPPED = small(Transition("go", NORMAL, "end"), Transition("go", RISKY, "ask"), Transition("go", None, "end"))


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
    new = small(Transition("go", RISKY, "ask"), Transition("go", LATE, "end"), Transition("go", None, "end"))
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
    new = small(Transition("go", RISKY, "end"), Transition("go", NORMAL, "ask"), Transition("go", None, "end"))
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
    assert diff(FIRST, waiting).states_changed == ("go",)


def test_the_diff_of_the_loop_and_strict_is_reported() -> None:
    text = str(diff(LOOP, STRICT.graph))
    assert "- post_tool.tool_error -> recover" in text
    assert "post_tool, where tool_error holds: was tool_error -> recover, is otherwise -> pre_step" in text


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
