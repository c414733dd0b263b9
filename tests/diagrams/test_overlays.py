"""Overlays: paths of runs, counterexamples, coverage, diffs and hooks, on rows, states and lines."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from agentfsm import Agent, HookContext, State, hook, permissions
from agentfsm.diagrams import (
    FORMATS,
    Counterexample,
    Coverage,
    DiffOverlay,
    HeatMap,
    HooksOverlay,
    Overlay,
    RunPath,
    diagram,
)
from agentfsm.diagrams.layout import compute_layout
from agentfsm.diagrams.view import TableRow, View, build_view
from agentfsm.errors import GraphError
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine import Graph, StateSpec, Transition
from agentfsm.testing import ScriptedModel
from tests.helpers.graphs import SMALL_GRAPH, never_guard

TIMES = "\N{MULTIPLICATION SIGN}"


def rows(view: View) -> dict[str, TableRow]:
    return {r.transition.id: r for b in view.boxes for r in b.rows}


def test_a_path_counts_what_was_taken_and_greys_out_the_rest() -> None:
    ids = ["plan.otherwise", "work.revise", "plan.otherwise"]
    view = RunPath.from_ids(ids, "work").apply_to(build_view(SMALL_GRAPH))
    found = rows(view)
    assert found["plan.otherwise"].tag == "moves 1, 3"
    assert found["work.revise"].tag == "move 2"
    assert {i for i, r in found.items() if r.dim} == {
        "plan.too_long", "plan.declared_done", "work.cancelled", "work.again", "work.otherwise",
    }  # fmt: skip
    assert {b.name: (b.current, b.dim) for b in view.boxes} == {
        "plan": (False, False),
        "work": (True, False),
        "end": (False, True),
    }
    assert view.caption == "a run of 3 transitions, now in work"


def test_the_moves_of_a_long_run_are_counted_and_so_are_those_without_an_order() -> None:
    again = ["plan.otherwise", *["work.again"] * 5, "work.otherwise"]
    assert rows(RunPath.from_ids(again, "end").apply_to(build_view(SMALL_GRAPH)))["work.again"].tag == (
        "moves 2, 3, 4, 5, 6"
    )
    six = ["plan.otherwise", *["work.again"] * 6, "work.otherwise"]
    assert rows(RunPath.from_ids(six, "end").apply_to(build_view(SMALL_GRAPH)))["work.again"].tag == f"{TIMES}6"
    lap = ["plan.otherwise", "work.revise"]
    twenty = rows(RunPath.from_ids([*lap * 4, "plan.otherwise", "work.again"] * 2).apply_to(build_view(SMALL_GRAPH)))
    assert twenty["work.again"].tag == f"{TIMES}2"  # another row was taken more than five times
    assert rows(RunPath({"work.again": 2}).apply_to(build_view(SMALL_GRAPH)))["work.again"].tag == f"{TIMES}2"


@pytest.mark.parametrize(
    ("last", "kind", "said"),
    [
        ("work.otherwise", "done", "completed"),
        ("work.cancelled", "stop", "cancelled"),
        ("plan.too_long", "stop", "partial"),
    ],
)
def test_a_final_state_has_the_color_of_the_ending_of_the_run(last: str, kind: str, said: str) -> None:
    ids = ["plan.otherwise", last] if last.startswith("work") else [last]
    for path in (RunPath.from_ids(ids, "end"), RunPath(dict.fromkeys(ids, 1), "end")):
        view = path.apply_to(build_view(SMALL_GRAPH))
        assert {b.name: b.kind for b in view.boxes}["end"] == kind
        assert ("current", f"the run ended: {said}") in view.legend
        root = ET.fromstring(diagram(SMALL_GRAPH, overlay=path))
        (head,) = [r for r in root.iterfind(".//{*}g[@data-state='end']/{*}rect") if "head" in r.attrib["class"]]
        assert head.attrib["class"] == f"head {kind}"
        labels = {t.text or "": t.attrib["class"].split() for t in root.iterfind(".//{*}g[@data-state='end']/{*}text")}
        bright = [text.partition(":")[0] for text, names in labels.items() if "ends" in names and "dim" not in names]
        assert set(bright) & {"completed", "cancelled", "partial"} == {said}
        assert f":::{kind}" in diagram(SMALL_GRAPH, "mermaid", overlay=path)
    waiting = RunPath.from_ids(["plan.otherwise"], "work").apply_to(build_view(SMALL_GRAPH))
    assert {b.name: b.kind for b in waiting.boxes}["end"] == "stop"  # as in a picture without a run


def test_everything_that_is_tinted_or_greyed_out_is_in_the_legend() -> None:
    expected: list[tuple[Overlay, list[str]]] = [
        (RunPath.from_ids(["plan.otherwise"], "work"), ["not reached", "the run is here"]),
        (Coverage({"plan.otherwise": 1}, ["work.again"]), ["never taken", "no run can take it"]),
        (Counterexample(("plan.otherwise",), (), "no plan"), ["not part of it", "the run ends here"]),
        (DiffOverlay(changed()), ["new", "gone", "moved", "leads elsewhere"]),
        (DiffOverlay(SMALL_GRAPH), []),
    ]
    for overlay, texts in expected:
        root = ET.fromstring(diagram(SMALL_GRAPH, overlay=overlay))
        legend = next(g for g in root.iterfind("{*}g") if g.attrib.get("class") == "legend")
        samples = [r.attrib["class"] for r in legend.iterfind("{*}rect")]
        captions = [t.text for t in root.iterfind("{*}text") if "caption" in t.attrib["class"].split()]
        assert [text for text in captions if text in texts] == texts
        used = {r.attrib["class"] for r in root.iterfind(".//{*}g[@data-edge]/{*}rect") if "mark" in r.attrib["class"]}
        assert used <= set(samples)
        dot = diagram(SMALL_GRAPH, "dot", overlay=overlay)
        assert all(f": {text}" in dot for text in texts)


def test_every_tint_of_a_mermaid_picture_is_in_its_legend() -> None:
    counts = {"pre_step.otherwise": 1}
    graphs = [(LOOP, None), (LOOP, RunPath(counts, "suspended")), (changed(), DiffOverlay(SMALL_GRAPH))]
    for graph, overlay in graphs:
        text = diagram(graph, "mermaid", overlay=overlay)
        boxes, _, legend = text.partition("subgraph legend-box")
        tints = re.findall(r":::(\w+)$", boxes, re.MULTILINE)
        assert set(re.findall(r":::(\w+)$", legend, re.MULTILINE)) == set(tints)
        assert ("the run is here" in legend) == isinstance(overlay, RunPath)


def test_every_tint_of_a_plantuml_picture_is_in_its_legend() -> None:
    for overlay in (None, RunPath({"pre_step.otherwise": 1}, "suspended")):
        text = diagram(LOOP, "plantuml", overlay=overlay)
        legend, _, boxes = text.partition("endlegend")
        tints = set(re.findall(r"^state \w+ (#\w{6});", boxes, re.MULTILINE))
        assert set(re.findall(r"^<back:(#\w{6})>", legend, re.MULTILINE)) == tints
        assert ("not reached" in legend) == (overlay is not None)


def test_an_overlay_says_what_its_marks_mean() -> None:
    class Slow:
        def apply_to(self, view: View) -> View:
            rows = tuple(replace(r, mark="never") for r in view.boxes[0].rows)
            boxes = (replace(view.boxes[0], rows=rows), *view.boxes[1:])
            return replace(view, boxes=boxes, overlaid=True, meanings={"never": "takes long"})

    assert ">takes long<" in diagram(SMALL_GRAPH, overlay=Slow())


def test_a_line_is_greyed_out_unless_one_of_its_rows_was_taken() -> None:
    layout = compute_layout(RunPath({"post_llm.output_refused": 1}, "recover").apply_to(build_view(LOOP)))
    bright = {i for line in layout.lines for piece in line if not piece.dim for i in piece.ids}
    dim = [piece for line in layout.lines for piece in line if piece.dim]
    assert "post_llm.output_refused" in bright
    assert not any("post_llm.output_refused" in piece.ids for piece in dim)
    assert any("pre_step.time_limit" in piece.ids for piece in dim)


def test_the_current_state_is_drawn_thick() -> None:
    root = ET.fromstring(diagram(LOOP, overlay=RunPath({}, "suspended")))
    rects = root.iterfind(".//{*}g[@data-state]/{*}rect")
    current = [r for r in rects if "current" in r.attrib.get("class", "").split()]
    assert len(current) == 1
    parent = next(g for g in root.iterfind("{*}g[@data-state]") if current[0] in list(g))
    assert parent.attrib["data-state"] == "suspended"


def test_coverage_does_not_require_impossible_rows() -> None:
    view = Coverage({"plan.otherwise": 2, "work.otherwise": 1}, ["work.again", "work.otherwise"]).apply_to(
        build_view(SMALL_GRAPH)
    )
    found = rows(view)
    assert (found["work.again"].tag, found["work.again"].mark, found["work.again"].dim) == ("cannot", "", True)
    assert (found["work.revise"].tag, found["work.revise"].mark) == ("never", "never")
    assert found["work.otherwise"].tag == f"{TIMES}1"  # it was, whatever was said
    assert view.caption == "coverage: 2 of 6 transitions taken, 1 cannot be"
    with pytest.raises(GraphError, match=r"work\.nonsense"):
        diagram(SMALL_GRAPH, overlay=Coverage({}, ["work.nonsense"]))


def test_a_heat_map_has_longer_bars_where_more_runs_went() -> None:
    counts = {"plan.otherwise": 99, "work.revise": 9, "work.otherwise": 0}
    view = HeatMap(counts, runs=20).apply_to(build_view(SMALL_GRAPH))
    found = rows(view)
    assert (found["plan.otherwise"].tag, found["plan.otherwise"].share) == (f"{TIMES}99", 1.0)
    assert found["work.revise"].share == pytest.approx(0.5)  # log 10 of log 100
    assert (found["work.otherwise"].dim, found["work.otherwise"].mark) == (True, "")
    assert view.caption.startswith("108 transitions of 20 runs, by 2 of ")
    assert [key for key, _ in view.legend] == ["often", "dim"]
    svg = diagram(SMALL_GRAPH, overlay=HeatMap(counts, runs=20))
    widths = [int(each) for each in re.findall(r'<rect class="mark often" x="\d+" y="\d+" width="(\d+)"', svg)]
    _, *bars = widths  # the first is the sample in the legend
    assert len(bars) == 2
    assert min(bars) == pytest.approx(max(bars) / 2, abs=1)
    assert HeatMap({}).apply_to(build_view(SMALL_GRAPH)).caption.startswith("0 transitions, by 0 of ")


def test_a_counterexample_numbers_its_steps_and_names_the_property() -> None:
    ids = ("plan.otherwise", "work.revise", "plan.otherwise")
    view = Counterexample(ids, ("work.again",), "no work after work").apply_to(build_view(SMALL_GRAPH))
    found = rows(view)
    assert {i: r.tag for i, r in found.items() if r.tag} == {
        "plan.otherwise": "step 1, 3",
        "work.revise": "step 2",
        "work.again": "forever",
    }
    assert all(r.dim is (not r.tag) for r in found.values())
    assert [b.name for b in view.boxes if b.current] == ["work"]
    assert view.caption == "broken: no work after work; by a run of 3 transitions, and then one that never ends"
    both = Counterexample(("work.again",), ("work.again",)).apply_to(build_view(SMALL_GRAPH))
    assert rows(both)["work.again"].tag == "step 1, forever"
    assert diagram(SMALL_GRAPH, "text", overlay=Counterexample(ids)).isascii()
    with pytest.raises(GraphError, match=r"work\.nonsense"):
        diagram(SMALL_GRAPH, overlay=Counterexample((), ("work.nonsense",)))


def test_a_diff_says_which_decision_changes() -> None:
    told = ["work, where again holds: was this -> that, is that -> this", "a second", "a third"]
    caption = DiffOverlay(SMALL_GRAPH, told).apply_to(build_view(SMALL_GRAPH)).caption
    assert caption == f"difference: none; {told[0]} (and 2 decisions more)"
    minor = DiffOverlay(SMALL_GRAPH, told[:1], 9).apply_to(build_view(SMALL_GRAPH)).caption
    assert minor == f"difference: none; {told[0]}; 9 decisions by another row to the same state"
    long = DiffOverlay(SMALL_GRAPH, ["word " * 100]).apply_to(build_view(SMALL_GRAPH)).caption
    assert len(long) < 170
    assert long.endswith("...")


def test_a_run_that_has_not_moved_is_at_the_start() -> None:
    view = RunPath({}).apply_to(build_view(SMALL_GRAPH))
    assert [b.name for b in view.boxes if not b.dim] == ["plan"]


def test_coverage_marks_rows_that_no_test_took() -> None:
    counts = {"plan.otherwise": 7, "work.again": 0}
    found = rows(Coverage(counts).apply_to(build_view(SMALL_GRAPH)))
    assert (found["plan.otherwise"].tag, found["plan.otherwise"].mark) == (f"{TIMES}7", "")
    assert (found["work.again"].tag, found["work.again"].mark) == ("never", "never")
    assert Coverage(counts).apply_to(build_view(SMALL_GRAPH)).caption == "coverage: 1 of 7 transitions taken"
    root = ET.fromstring(diagram(SMALL_GRAPH, overlay=Coverage(counts)))
    tinted = [r for r in root.iterfind(".//{*}g[@data-edge]/{*}rect") if r.attrib.get("class") == "mark never"]
    assert len(tinted) == 6


@pytest.mark.parametrize("overlay", [RunPath({"plan.nothing": 1}), Coverage({"plan.nothing": 1}), RunPath({}, "x")])
def test_unknown_names_are_rejected(overlay: RunPath | Coverage) -> None:
    with pytest.raises(GraphError):
        diagram(SMALL_GRAPH, overlay=overlay)


def changed() -> Graph:
    """SMALL with ``again`` gone, ``revise`` before ``cancelled``, a new row and a new state."""
    return Graph(
        name="small",
        states=(*SMALL_GRAPH.states[:2], StateSpec("check", "look again"), SMALL_GRAPH.states[2]),
        counters=SMALL_GRAPH.counters,
        transitions=(
            *SMALL_GRAPH.transitions[:2],
            Transition("plan", None, "check"),
            Transition("work", never_guard("revise"), "plan"),
            Transition("work", never_guard("cancelled"), "end", ends="cancelled"),
            Transition("work", never_guard("failed"), "end", ends="partial"),
            Transition("work", None, "end", ends="completed"),
            Transition("check", None, "work"),
        ),
    )


def test_a_diff_shows_rows_that_are_new_removed_moved_or_retargeted() -> None:
    view = DiffOverlay(SMALL_GRAPH).apply_to(build_view(changed()))
    shown = {b.name: [(r.label, r.transition.name, r.mark, r.tag) for r in b.rows] for b in view.boxes}
    assert shown["plan"] == [
        ("1", "too_long", "", ""),
        ("2", "declared_done", "", ""),
        ("3", "otherwise", "changed", "was work"),
    ]
    assert {row[1:3] for row in shown["work"]} >= {("again", "removed"), ("failed", "added"), ("otherwise", "")}
    moved = [row for row in shown["work"] if row[2] == "moved"]
    assert moved in ([("1→2", "cancelled", "moved", "moved")], [("3→1", "revise", "moved", "moved")])
    assert shown["check"] == [("1", "otherwise", "added", "new")]
    assert view.caption == "difference: 2 new, 1 gone, 1 moved, 1 lead elsewhere"


def test_a_removed_state_is_shown_struck_through_without_lines() -> None:
    view = DiffOverlay(changed()).apply_to(build_view(SMALL_GRAPH))
    gone = next(b for b in view.boxes if b.name == "check")
    assert gone.mark == "removed"
    assert [r.mark for r in gone.rows] == ["removed"]
    layout = compute_layout(view)
    assert not any("check.otherwise" in piece.ids for line in layout.lines for piece in line)
    text = diagram(SMALL_GRAPH, overlay=DiffOverlay(changed()))
    assert re.search(r'<text class="name happy struck"[^>]*>check<', text)


def test_a_diff_of_equal_graphs_is_empty() -> None:
    view = DiffOverlay(SMALL_GRAPH).apply_to(build_view(SMALL_GRAPH))
    assert view.caption == "difference: none"
    assert not [r for r in rows(view).values() if r.mark]


def test_an_overlay_is_any_object_with_apply_to() -> None:
    class Quiet:
        def apply_to(self, view: View) -> View:
            return View(view.graph, view.boxes, "hush", overlaid=True)

    assert "hush" in diagram(SMALL_GRAPH, "text", overlay=Quiet())


# -- hooks --------------------------------------------------------------------------------------------


@hook(at=State.CALL_LLM)
def gapminder(seen: HookContext) -> None:
    """Do nothing."""


TEXT_FORMATS = [name for name, form in FORMATS.items() if not form.image]
WITH_OVERLAYS = [name for name in TEXT_FORMATS if FORMATS[name].overlays]


@pytest.mark.parametrize("form", WITH_OVERLAYS)
def test_every_format_with_overlays_shows_hooks(form: str) -> None:
    agent = Agent(ScriptedModel([]), hooks=[permissions(), gapminder])
    picture = agent.diagram(form)
    assert picture.count("gapminder") >= 1
    assert "permissions" in picture
    assert "gapminder" not in LOOP.diagram(form)


def test_hooks_are_in_the_box_of_their_state_in_order() -> None:
    text = diagram(LOOP, "text", overlay=HooksOverlay({"dispatch_tool": ["first", "second"]}))
    (line,) = [line for line in text.splitlines() if "first" in line]
    assert "dispatch_tool" in line
    assert line.index("first") < line.index("second") < line.index("run the next call")
    assert "2 hooks" in text


@pytest.mark.parametrize("form", TEXT_FORMATS)
def test_the_diagram_of_an_agent_without_hooks_is_that_of_its_graph(form: str) -> None:
    assert Agent(ScriptedModel([])).diagram(form) == LOOP.diagram(form)


def test_hooks_of_an_unknown_state_are_rejected() -> None:
    with pytest.raises(GraphError, match="no such state"):
        diagram(LOOP, "text", overlay=HooksOverlay({"nowhere": ["x"]}))
