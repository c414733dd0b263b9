"""Layout: no line crosses a box or a text, no text overlaps another, and every row has its line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import pytest

from agentfsm.diagrams import Counterexample, Coverage, DiffOverlay, Overlay, RunPath
from agentfsm.diagrams.box import Label, text_width, truncate, wrap_words
from agentfsm.diagrams.layout import Layout, PlacedBox, compute_layout
from agentfsm.diagrams.view import View, build_view
from agentfsm.loop.transition_table import LOOP
from agentfsm.machine import Graph, StateSpec, Transition
from tests.helpers.graphs import SMALL_GRAPH, all_graphs, extended_loop, never_guard, random_graph

Rect = tuple[float, float, float, float]  # left, top, right, bottom


def views() -> Iterator[tuple[str, View]]:
    graphs = all_graphs()
    for name, graph in graphs.items():
        yield name, build_view(graph)
    for name in ("loop", "more", "random-1", "random-2"):
        graph = graphs[name]
        some = {t.id: 10**place for place, t in enumerate(list(graph)[::9])}
        overlays: dict[str, Overlay] = {
            "path": RunPath(some, graph.initial),
            "coverage": Coverage(some, [t.id for t in graph][1::9]),
            "counterexample": Counterexample((*some, *some), tuple(some)[:2], "one thing never after another"),
            "since-small": DiffOverlay(
                SMALL_GRAPH, ["a state, where " + "this and " * 20 + "that hold: was a -> b", "more"]
            ),
            "since-random": DiffOverlay(random_graph(3)),
        }
        for kind, overlay in overlays.items():
            yield f"{name}-{kind}", overlay.apply_to(build_view(graph))


VIEWS = dict(views())
VIEWS |= {
    f"{name}-vertical": replace(view, layout="vertical")
    for name, view in VIEWS.items()
    if not re.search(r"-\d\d$", name)
}
each = pytest.mark.parametrize("layout", VIEWS, indirect=True)


@cache
def layout_of(name: str) -> Layout:
    return compute_layout(VIEWS[name])


@pytest.fixture(name="layout")
def placed(request: pytest.FixtureRequest) -> Layout:
    return layout_of(request.param)


def rect_of(box: PlacedBox) -> Rect:
    return box.x, box.y, box.x + box.width, box.y + box.height


def rect_of_text(label: Label, x: int = 0, y: int = 0) -> Rect:
    """The area of a text, including letters that go below the baseline."""
    left = x + label.x - (label.width if label.align_right else 0)
    return left, y + label.y - 0.75 * label.size, left + label.width, y + label.y + 0.2 * label.size


def box_texts(box: PlacedBox) -> list[Rect]:
    table = box.table
    labels = [*table.head, *table.foot, *(g.label for g in table.groups)]
    labels += [label for _, row in table.rows for label in row]
    return [rect_of_text(label, box.x, box.y) for label in labels]


def overlap(a: Rect, b: Rect) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def inside(a: Rect, b: Rect) -> bool:
    return b[0] <= a[0] and b[1] <= a[1] and a[2] <= b[2] and a[3] <= b[3]


def segments(layout: Layout) -> Iterator[tuple[int, Rect]]:
    """Every straight part of a line, with the number of its bundle."""
    for number, line in enumerate(layout.lines):
        for piece in line:
            for (ax, ay), (bx, by) in pairwise(piece.points):
                assert ax == bx or ay == by, "lines run along or down"
                yield number, (min(ax, bx), min(ay, by), max(ax, bx), max(ay, by))


@each
def test_no_line_runs_through_a_box(layout: Layout) -> None:
    boxes = [rect_of(b) for b in layout.boxes]
    assert not [(s, b) for _, s in segments(layout) for b in boxes if overlap(s, b)]


@each
def test_boxes_are_apart_and_on_the_page(layout: Layout) -> None:
    boxes = [rect_of(b) for b in layout.boxes]
    spread = [(a[0] - 12, a[1] - 12, a[2] + 12, a[3] + 12) for a in boxes]
    assert not [1 for (i, a), (j, b) in combinations(enumerate(boxes), 2) if overlap(spread[i], b)]
    assert all(inside(b, (0, 0, layout.width, layout.height)) for b in boxes)


@each
def test_no_text_overlaps_another_or_leaves_its_box(layout: Layout) -> None:
    outside = [rect_of_text(label) for label in layout.labels]
    texts = outside + [t for b in layout.boxes for t in box_texts(b)]
    assert not [(a, b) for a, b in combinations(texts, 2) if overlap(a, b)]
    assert all(inside(t, rect_of(b)) for b in layout.boxes for t in box_texts(b))
    assert all(inside(t, (0, 0, layout.width, layout.height)) for t in outside)
    assert not [1 for t in outside for b in layout.boxes if overlap(t, rect_of(b))]


@each
def test_no_line_touches_a_text_or_the_start_mark(layout: Layout) -> None:
    x, y = layout.start
    marks = [rect_of_text(label) for label in layout.labels] + [(x - 5, y - 28, x + 5, y - 1)]
    assert not [(s, t) for _, s in segments(layout) for t in marks if overlap(s, t)]
    assert all(inside(s, (0, 0, layout.width, layout.height)) for _, s in segments(layout))


@each
def test_no_two_lines_overlap(layout: Layout) -> None:
    found = list(segments(layout))
    across = [(n, s) for n, s in found if s[1] == s[3] and s[0] != s[2]]
    down = [(n, s) for n, s in found if s[0] == s[2] and s[1] != s[3]]
    for (n, a), (m, b) in combinations(across, 2):
        assert n == m or abs(a[1] - b[1]) >= 3 or a[2] <= b[0] or b[2] <= a[0], (a, b)
    for (n, a), (m, b) in combinations(down, 2):
        assert n == m or abs(a[0] - b[0]) >= 3 or a[3] <= b[1] or b[3] <= a[1], (a, b)


@each
def test_every_drawn_row_has_an_unbroken_line_to_its_target(layout: Layout) -> None:
    boxes = {b.box.name: b for b in layout.boxes}
    drawn = {r.transition.id: r for b in layout.boxes for r in b.box.rows if r.has_line}
    by_id: dict[str, list[tuple[tuple[int, int], ...]]] = {i: [] for i in drawn}
    arrows: dict[str, int] = dict.fromkeys(drawn, 0)
    for line in layout.lines:
        for piece in line:
            for i in piece.ids:
                by_id[i].append(piece.points)  # a row that is not drawn raises KeyError
                arrows[i] += piece.arrow
    for i, row in drawn.items():
        assert arrows[i] == 1
        source, target = boxes[str(row.transition.source)], boxes[str(row.transition.target)]
        todo = list(by_id[i])
        at = next(p[0] for p in todo if on_border(p[0], source))
        while todo:
            piece = next((p for p in todo if p[0] == at), None)
            assert piece is not None, f"the line of {i} ends at {at}"
            todo.remove(piece)
            at = piece[-1]
        assert on_border(at, target)


def on_border(point: tuple[int, int], box: PlacedBox) -> bool:
    x, y = point
    left, top, right, bottom = rect_of(box)
    return (x in (left, right) and top <= y <= bottom) or (y in (top, bottom) and left <= x <= right)


@each
def test_a_line_leaves_beside_its_rows(layout: Layout) -> None:
    starts = {(i, piece.points[0]) for line in layout.lines for piece in line for i in piece.ids}
    for box in layout.boxes:
        for group, side in zip(box.table.groups, box.exits, strict=True):
            if side is not None:
                x = box.x if side == "left" else box.x + box.width
                pin = (x, box.y + group.y)
                assert all((r.transition.id, pin) in starts for r in group.rows)


def test_the_default_loop_is_laid_out_in_three_columns() -> None:
    boxes = {b.box.name: b for b in layout_of("loop").boxes}
    spine = ["pre_step", "call_llm", "post_llm", "dispatch_tool", "post_tool", "terminal"]
    assert [b.box.name for b in sorted((boxes[n] for n in spine), key=lambda b: b.y)] == spine
    assert len({boxes[n].x for n in spine}) == 1
    assert boxes["recover"].x < boxes["pre_step"].x < boxes["suspended"].x


def test_the_vertical_layout_is_one_column_that_a_phone_can_show() -> None:
    layout = layout_of("loop-vertical")
    boxes = sorted(layout.boxes, key=lambda b: b.y)
    assert len({b.x for b in boxes}) == 1
    assert (boxes[0].box.name, boxes[-1].box.name) == ("pre_step", "terminal")
    assert layout.width <= 480
    assert {b.box.name: b.box.kind for b in boxes} == {b.box.name: b.box.kind for b in layout_of("loop").boxes}
    wide = layout_of("loop-since-small-vertical")
    assert max(label.x + label.width for label in wide.labels) <= max(b.x + b.width for b in wide.boxes) + 40


def test_bad_ends_are_text_and_good_ends_are_lines() -> None:
    drawn = {i for line in layout_of("loop").lines for piece in line for i in piece.ids}
    to_terminal = {t.id for t in LOOP if t.target == "terminal"}
    assert drawn & to_terminal == {"post_llm.otherwise", "post_tool.declared_done"}
    assert drawn >= {t.id for t in LOOP} - to_terminal


def test_a_final_state_lists_the_guards_that_lead_to_it() -> None:
    terminal = next(b for b in layout_of("small").boxes if b.box.name == "end")
    assert " ".join(label.text for label in terminal.table.foot) == (
        "completed: declared_done, work.otherwise partial: too_long cancelled: cancelled"
    )


def test_added_states_are_placed_in_the_order_of_flow() -> None:
    spine = [b.name for b in build_view(extended_loop()).spine]
    assert spine.index("pre_step") + 1 == spine.index("compact") == spine.index("call_llm") - 1
    assert spine.index("post_llm") < spine.index("review") < spine.index("terminal") == len(spine) - 1


def test_the_initial_state_is_at_the_top_and_final_states_at_the_bottom_whatever_their_lanes() -> None:
    graph = Graph(
        (StateSpec("a", lane="left"), StateSpec("z", lane="right", final=True), StateSpec("b", lane="odd")),
        (
            Transition("a", never_guard("more"), "b"),
            Transition("a", None, "z", ends="completed"),
            Transition("b", None, "z", ends="completed"),
        ),
    )
    assert [b.name for b in build_view(graph).spine] == ["a", "b", "z"]


def test_what_waits_is_drawn_as_waiting_in_whatever_lane() -> None:
    graph = Graph(
        (StateSpec("a"), StateSpec("w", waits=True), StateSpec("b", lane="right"), StateSpec("z", final=True)),
        (
            Transition("a", never_guard("asks"), "w"),
            Transition("a", None, "b"),
            Transition("w", never_guard("answered"), "b"),
            Transition("b", None, "z", ends="completed"),
        ),
    )
    boxes = build_view(graph).boxes
    assert {box.name: box.kind for box in boxes} == {"a": "happy", "w": "wait", "b": "happy", "z": "stop"}
    kinds = {row.transition.id: row.kind for box in boxes for row in box.rows}
    assert kinds == {"a.asks": "wait", "a.otherwise": "happy", "w.answered": "resume", "b.otherwise": "done"}


def test_text_widths_are_large_enough() -> None:
    # Widths in Helvetica (Adobe's AFM file): an advance of 556/1000 for most letters, 222 for i and l.
    assert text_width("aeo", 10) >= 3 * 5.56
    assert text_width("ill", 10) >= 3 * 2.22
    assert text_width("W", 10) >= 9.44
    assert text_width("name", 10, bold=True) > text_width("name", 10)
    assert text_width("漢字", 10) >= 20
    assert truncate("a long note", 10, 1000) == "a long note"
    assert truncate("a long note", 10, 40).endswith("…")
    assert text_width(truncate("a long note", 10, 40), 10) <= 40
    assert wrap_words(["aa", "bb", "a_word_wider_than_the_room"], 10, 40) == ["aa bb", "a_word_wider_than_the_room"]


def crossings(layout: Layout) -> int:
    """How often a part of one line crosses a part of another."""
    found = list(segments(layout))
    across = [(n, s) for n, s in found if s[1] == s[3]]
    down = [(n, s) for n, s in found if s[0] == s[2]]
    return sum(n != m and a[0] < b[0] < a[2] and b[1] < a[1] < b[3] for n, a in across for m, b in down)


def alike_crossings(layout: Layout, kinds: set[str]) -> int:
    """How often two lines of one of these kinds cross, which look the same."""
    found = [
        (number, piece.kind, a, b)
        for number, line in enumerate(layout.lines)
        for piece in line
        if piece.kind in kinds
        for a, b in pairwise(piece.points)
    ]
    across = [(n, k, sorted((a[0], b[0])), a[1]) for n, k, a, b in found if a[1] == b[1]]
    down = [(n, k, a[0], sorted((a[1], b[1]))) for n, k, a, b in found if a[0] == b[0]]
    return sum(
        n != m and k == j and xs[0] < x < xs[1] and ys[0] < y < ys[1] for n, k, xs, y in across for m, j, x, ys in down
    )


def test_lines_to_and_from_the_waiting_states_of_a_large_graph_can_be_followed() -> None:
    layout = layout_of("claims")
    assert len(layout.boxes) == 22
    drawn = {piece.kind for line in layout.lines for piece in line}
    assert drawn >= {"wait", "resume"}
    lines = {i: piece.kind for line in layout.lines for piece in line for i in piece.ids}
    assert lines["collect.needs_documents"] == lines["await_bank.forwarded"] == "wait"
    assert lines["await_documents.answered"] == lines["await_bank.asks_back"] == "resume"
    # Of the crossings of lines to and from waiting states, few are of two lines that look the same.
    assert alike_crossings(layout, {"wait", "resume"}) <= 16


def test_few_lines_cross() -> None:
    # No other choice of sides for the lines within the middle column gives fewer (tried exhaustively once).
    assert crossings(layout_of("loop")) <= 16
    assert crossings(layout_of("more")) <= 34
    assert crossings(layout_of("small")) == 1
