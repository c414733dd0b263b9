"""The layout of a picture: the position of every box, line and label, in whole pixels from the upper left.

The happy path runs down the middle, recovery is on the left, waiting on the right, final states are at the bottom.
Between and beside these three columns are four channels for the lines (see ``edge_routing``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agentfsm.diagrams.box import (
    BOLD_RATIO,
    FONT_SIZES,
    HEAD_HEIGHT,
    BoxContent,
    ColumnPositions,
    EndingText,
    Label,
    lay_out_box,
    measure_columns,
    truncate,
    wrap_words,
)
from agentfsm.diagrams.edge_routing import (
    CHANNEL_MARGIN,
    COLUMN,
    GRID_SIZE,
    TRACK_SPACING,
    Route,
    Segment,
    Side,
    VerticalPositions,
    assign_tracks,
    bundle_edges,
    bundle_segments,
    choose_routes,
)
from agentfsm.diagrams.view import Box, LegendKey, RowKind, View, order_boxes
from agentfsm.machine.declaration import ENDINGS

HEADING_HEIGHT = 72  # pixels to the first line of the legend, if the caption has one line
HEADING_LINE = 16  # pixels for each line of the caption and of the legend
START_HEIGHT = 32  # pixels between the legend and the first box, for the start mark
BOX_SPACING = 32  # pixels between two boxes of a column
PAGE_MARGIN = 24  # pixels around the picture
EMPTY_CHANNEL_WIDTH = 40  # pixels between two columns with no line between them
LEGEND_LINE_LENGTH = 22  # pixels: the length of a line in the legend
ARROW_LENGTH = 8  # pixels: the length of an arrow head
BAR_WIDTH = 4  # pixels: the width of the bar at which a line leaves a box
ROW_ORDER_TEXT = "rows are asked from the top, the first that holds is taken"
KIND_TEXTS: dict[RowKind, str] = {
    "happy": "happy path",
    "recover": "recovery",
    "wait": "waiting",
    "resume": "resuming",
    "done": "good end",
    "stop": "stop (text, no line)",
}


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A box with its position.

    Attributes:
        box: The state.
        x: The left edge, in pixels.
        y: The upper edge, in pixels.
        columns: The positions of its columns.
        table: Its content, relative to its upper left corner.
        exits: For each group of rows, the side at which its line leaves, or None.
    """

    box: Box
    x: int
    y: int
    columns: ColumnPositions
    table: BoxContent
    exits: tuple[Side | None, ...]

    @property
    def width(self) -> int:
        """The width in pixels."""
        return self.columns.width

    @property
    def height(self) -> int:
        """The height in pixels."""
        return self.table.height


@dataclass(frozen=True, slots=True)
class LegendSample:
    """A sample in the legend, from (x, y) to ``LEGEND_LINE_LENGTH`` pixels to its right.

    Attributes:
        x: The left edge, in pixels.
        y: The middle, in pixels.
        kind: The kind whose line or box it shows; that of the current state for its thick frame; None for a mark.
        key: What an overlay shows by it; None for the line of a kind.
    """

    x: int
    y: int
    kind: RowKind | None
    key: LegendKey | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a picture.

    Attributes:
        width: The width in pixels.
        height: The height in pixels.
        boxes: The states.
        lines: The lines; each consists of the segments that share a track.
        labels: Title, caption and legend.
        legend: The samples of the legend; each stands before its label.
        start: The middle of the upper edge of the first state.
    """

    width: int
    height: int
    boxes: tuple[PlacedBox, ...]
    lines: tuple[tuple[Segment, ...], ...]
    labels: tuple[Label, ...]
    legend: tuple[LegendSample, ...]
    start: tuple[int, int]


def compute_layout(view: View) -> Layout:
    """Compute the position of everything in a view."""
    final = {b.name: endings(view, b) for b in view.boxes}
    if view.layout == "vertical":
        view = _in_one_column(view)
    routes = choose_routes(view)
    columns = (view.lane("left"), view.spine, view.lane("right"))
    shapes = [measure_columns(column) for column in columns]
    tables = {b.name: lay_out_box(b, shapes[COLUMN[b.lane]], final[b.name]) for b in view.boxes}
    heading = _heading(view, shapes[1].width + 2 * CHANNEL_MARGIN if view.layout == "vertical" else None)
    heights = place_vertically(view, tables, routes, heading.bottom)
    channels = bundle_edges(routes, heights)
    tracks = [assign_tracks(channel) for channel in channels]
    strips = _place_channels([shape.width if c else 0 for shape, c in zip(shapes, columns, strict=True)], tracks)

    lines = [
        tuple(bundle_segments(bundle, strip.left + strip.margin + TRACK_SPACING * track, strip.left, strip.right))
        for channel, strip, track_of in zip(channels, strips, tracks, strict=True)
        for bundle, track in zip(channel, track_of, strict=True)
    ]
    left, right = strips[1].right, strips[2].left  # of the middle
    middle = (left + right) // 2
    lines += [(piece,) for piece in _vertical_segments(routes, tables, heights, middle)]
    lines += [(piece,) for piece in _crossing_segments(routes, heights, left, right)]

    exits: dict[tuple[str, int], Side | None] = {(w.source.name, w.group_index): w.exit for w in routes}
    boxes: list[PlacedBox] = []
    for box in view.boxes:
        column, table = COLUMN[box.lane], tables[box.name]
        sides: tuple[Side | None, ...] = tuple(exits.get((box.name, i)) for i in range(len(table.groups)))
        boxes.append(PlacedBox(box, strips[column].right, heights.box_tops[box.name], shapes[column], table, sides))
    return Layout(
        width=max(strips[3].right, *(label.x + label.width for label in heading.labels)) + PAGE_MARGIN,
        height=max(b.y + b.height for b in boxes) + PAGE_MARGIN,
        boxes=tuple(boxes),
        lines=tuple(lines),
        labels=heading.labels,
        legend=heading.samples,
        start=(middle, heading.bottom),
    )


def _in_one_column(view: View) -> View:
    """The view with the boxes of all lanes in the middle, in the order of flow; kinds and so colors stay."""
    boxes = [box if box.lane == "end" else replace(box, lane="main") for box in view.boxes]
    return replace(view, boxes=order_boxes(boxes))


def place_vertically(
    view: View, tables: Mapping[str, BoxContent], routes: Sequence[Route], first_y: int
) -> VerticalPositions:
    """Compute the y of every box and of every line across the middle column; the first box is at ``first_y``.

    A gap grows with the lines that cross in it, and a line crosses in the gap that makes it shortest. So boxes
    are placed, lines choose their gaps, and boxes are placed again.
    """
    tops = _box_tops(view, tables, routes, {}, first_y)
    gaps = {w.pair: _crossing_gap(view, tables, tops, w) for w in routes if len(w.channels) > 1}
    tops = _box_tops(view, tables, routes, Counter(gaps.values()), first_y)
    crossings: dict[tuple[str, str], int] = {}
    used = Counter[int]()
    for pair, gap in gaps.items():
        above = view.spine[gap].name
        crossings[pair] = tops[above] + tables[above].height + BOX_SPACING // 2 + GRID_SIZE * used[gap]
        used[gap] += 1
    exits = {(name, i): tops[name] + g.y for name, table in tables.items() for i, g in enumerate(table.groups)}
    return VerticalPositions(tops, exits, crossings)


def _box_tops(
    view: View,
    tables: Mapping[str, BoxContent],
    routes: Sequence[Route],
    crossing_counts: Mapping[int, int],
    first_y: int,
) -> dict[str, int]:
    """The upper edges of all boxes, with room for the lines that cross below each box of the middle column."""
    tops: dict[str, int] = {}
    y = first_y
    for place, box in enumerate(view.spine):
        tops[box.name] = y
        y += tables[box.name].height + BOX_SPACING + GRID_SIZE * max(0, crossing_counts.get(place, 0) - 1)
    floor = y - BOX_SPACING
    heads = {name: top + HEAD_HEIGHT // 2 for name, top in tops.items()}
    exits = {(name, i): tops[name] + g.y for name in tops for i, g in enumerate(tables[name].groups)}
    for column in (view.lane("left"), view.lane("right")):
        preferred = {b.name: _preferred_y(b.name, routes, exits, heads, {}) or first_y for b in column}
        preferred = {name: _preferred_y(name, routes, exits, heads, preferred) or first_y for name in preferred}
        tops |= _stack_side_boxes({name: tables[name].height for name in preferred}, preferred, first_y, floor)
    return tops


def _preferred_y(
    box: str,
    routes: Sequence[Route],
    exits: Mapping[tuple[str, int], int],
    head_ys: Mapping[str, int],
    side_ys: Mapping[str, int],
) -> int:
    """The mean y of what a box at a side is connected with, in the middle column and at its own side; 0 if nothing."""
    ys: list[int] = []
    for route in routes:
        source, target = route.pair
        y = None
        if target == box != source:
            y = exits.get((source, route.group_index), side_ys.get(source))
        elif source == box != target:
            y = head_ys.get(target, side_ys.get(target))
        if y is not None:
            ys.append(y)
    return sum(ys) // len(ys) if ys else 0


def _stack_side_boxes(
    heights: Mapping[str, int], preferred: Mapping[str, int], first_y: int, floor: int
) -> dict[str, int]:
    """The upper edges of the boxes at a side, as near to their preferred y as possible without overlap."""
    tops = {name: preferred[name] - height // 2 for name, height in heights.items()}
    order = sorted(tops, key=tops.__getitem__)
    for name in reversed(order):  # from the bottom up
        tops[name] = min(tops[name], floor - heights[name])
        floor = tops[name] - BOX_SPACING
    y = first_y
    for name in order:  # and from the top down
        tops[name] = max(y, tops[name]) // GRID_SIZE * GRID_SIZE + GRID_SIZE // 2
        y = tops[name] + heights[name] + BOX_SPACING
    return tops


def _crossing_gap(view: View, tables: Mapping[str, BoxContent], tops: Mapping[str, int], route: Route) -> int:
    """The gap, below a box of the middle column, in which a line from side to side is shortest."""
    start = tops[route.source.name] + tables[route.source.name].groups[route.group_index].y
    end = tops[route.target.name] + HEAD_HEIGHT // 2

    def length(gap: int) -> int:
        above = view.spine[gap].name
        y = tops[above] + tables[above].height + BOX_SPACING // 2
        return abs(start - y) + abs(y - end)

    return min(range(len(view.spine) - 1), key=length)


class _Channel(NamedTuple):
    """A channel: the x of both walls, and the distance of the first track from the left one, in pixels."""

    left: int
    right: int
    margin: int


def _place_channels(widths: Sequence[int], tracks: Sequence[Sequence[int]]) -> list[_Channel]:
    """The four channels between and beside columns of these widths (pixels), with room for their tracks."""
    channels: list[_Channel] = []
    x = PAGE_MARGIN
    for channel, used in enumerate(tracks):
        before = CHANNEL_MARGIN if channel > 0 and widths[channel - 1] else 0
        after = CHANNEL_MARGIN if channel < 3 and widths[channel] else 0
        room = before + TRACK_SPACING * max(used) + after if used else EMPTY_CHANNEL_WIDTH * bool(before and after)
        channels.append(_Channel(x, x + room, before))
        x += room + (widths[channel] if channel < 3 else 0)
    return channels


def _vertical_segments(
    routes: Sequence[Route], tables: Mapping[str, BoxContent], heights: VerticalPositions, middle: int
) -> Iterator[Segment]:
    """The lines straight down the middle: one for each pair of adjacent boxes connected by rows."""
    for (source, target), joined in _by_pair(w for w in routes if not w.channels).items():
        ends = ((middle, heights.box_tops[source] + tables[source].height), (middle, heights.box_tops[target]))
        yield Segment(ends, joined[-1].kind, _transition_ids(joined), arrow=True, dim=all(w.dim for w in joined))


def _crossing_segments(routes: Sequence[Route], heights: VerticalPositions, left: int, right: int) -> Iterator[Segment]:
    """The lines across the middle column, between two boxes: one for each pair of boxes at the sides."""
    for pair, joined in _by_pair(w for w in routes if len(w.channels) > 1).items():
        y = heights.crossings[pair]
        ends = ((left, y), (right, y)) if joined[0].exit == "right" else ((right, y), (left, y))
        yield Segment(ends, joined[0].kind, _transition_ids(joined), dim=all(w.dim for w in joined))


def _by_pair(routes: Iterable[Route]) -> dict[tuple[str, str], list[Route]]:
    pairs: dict[tuple[str, str], list[Route]] = {}
    for route in routes:
        pairs.setdefault(route.pair, []).append(route)
    return pairs


def _transition_ids(joined: Iterable[Route]) -> tuple[str, ...]:
    return tuple(i for route in joined for i in route.ids)


def endings(view: View, box: Box) -> list[EndingText]:
    """How runs end in a final state: each ending with the guards that lead to it, without repetition."""
    if box.lane != "end":
        return []
    ends: dict[tuple[int, str, RowKind], dict[str, bool]] = {}
    for row in (r for b in view.boxes for r in b.rows if r.transition.target == box.name and r.mark != "removed"):
        ending = row.transition.ends
        name = row.transition.id if row.transition.guard is None else row.transition.name
        guards = ends.setdefault((ENDINGS.index(ending), ending, row.kind), {})
        guards[name] = guards.get(name, True) and row.dim
    return [
        EndingText(kind, (f"{ending.replace('_', ' ')}:", *guards), all(guards.values()))
        for (_, ending, kind), guards in sorted(ends.items())
    ]


_Entry = tuple[RowKind | None, LegendKey | None, str]


class _Heading(NamedTuple):
    """Title, caption and legend, and the y of the first box below them."""

    labels: tuple[Label, ...]
    samples: tuple[LegendSample, ...]
    bottom: int


def _heading(view: View, max_width: int | None) -> _Heading:
    """The title, the caption, and the meaning of every line, tint and frame in the picture."""
    caption = view.caption if view.overlaid else f"{view.caption}; {ROW_ORDER_TEXT}"
    lines = [caption] if max_width is None else wrap_words(caption.split(), FONT_SIZES["caption"], max_width)
    title = view.title if max_width is None else truncate(view.title, FONT_SIZES["title"] * BOLD_RATIO, max_width)
    labels = [Label(PAGE_MARGIN, 40, title, "title")]
    labels += [Label(PAGE_MARGIN, 60 + HEADING_LINE * n, line, "caption") for n, line in enumerate(lines)]
    kinds = {r.kind for b in view.boxes for r in b.rows}
    here: RowKind | None = next((b.kind for b in view.boxes if b.current), None)
    lines_shown: list[_Entry] = [(kind, None, text) for kind, text in KIND_TEXTS.items() if kind in kinds]
    marks_shown: list[_Entry] = []
    for mark, text in view.legend:
        marks_shown.append((here if mark == "current" else None, mark, text))
    samples: list[LegendSample] = []
    y = HEADING_HEIGHT + HEADING_LINE * (len(lines) - 1)
    for entries in filter(None, (lines_shown, marks_shown)):
        x, y = PAGE_MARGIN, y + HEADING_LINE
        for kind, key, text in entries:
            label = Label(0, 0, text, "caption", kind if key is None else None, dim=key == "dim")
            width = LEGEND_LINE_LENGTH + 6 + label.width
            if max_width is not None and x > PAGE_MARGIN and x + width > PAGE_MARGIN + max_width:
                x, y = PAGE_MARGIN, y + HEADING_LINE
            samples.append(LegendSample(x, y - 11, kind, key))
            labels.append(replace(label, x=x + LEGEND_LINE_LENGTH + 6, y=y - 7))
            x += width + 16
    return _Heading(tuple(labels), tuple(samples), y + START_HEIGHT)
