"""The layout of a picture: the position of every box, line and label, in whole pixels from the upper left.

The happy path runs down the middle, recovery is on the left, waiting on the right, final states are at the bottom.
Between and beside these three columns are four channels for the lines (see ``edge_routing``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentfsm.diagrams.box import HEAD_HEIGHT, BoxContent, ColumnPositions, Label, lay_out_box, measure_columns
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
from agentfsm.diagrams.view import Box, RowKind, View
from agentfsm.machine.declaration import ENDINGS

__all__ = [
    "ARROW_LENGTH",
    "BAR_WIDTH",
    "LEGEND_LINE_LENGTH",
    "Layout",
    "LegendLine",
    "PlacedBox",
    "compute_layout",
    "endings",
]

FIRST_BOX_Y = 120  # pixels to the first box of the middle column, below title, legend and start mark
BOX_SPACING = 32  # pixels between two boxes of a column
PAGE_MARGIN = 24  # pixels around the picture
EMPTY_CHANNEL_WIDTH = 40  # pixels between two columns with no line between them
LEGEND_LINE_LENGTH = 22  # pixels: the length of a line in the legend
ARROW_LENGTH = 8  # pixels: the length of an arrow head
BAR_WIDTH = 4  # pixels: the width of the bar at which a line leaves a box
ROW_ORDER_TEXT = "rows are asked from the top, the first that holds is taken"
LEGEND_TEXTS: dict[RowKind, str] = {
    "happy": "happy path",
    "recover": "recovery",
    "wait": "waiting",
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
class LegendLine:
    """A line in the legend, from (x, y) to ``LEGEND_LINE_LENGTH`` pixels to its right."""

    x: int
    y: int
    kind: RowKind


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a picture.

    Attributes:
        width: The width in pixels.
        height: The height in pixels.
        boxes: The states.
        lines: The lines; each consists of the segments that share a track.
        labels: Title, caption and legend.
        legend_lines: The lines of the legend.
        start: The middle of the upper edge of the first state.
    """

    width: int
    height: int
    boxes: tuple[PlacedBox, ...]
    lines: tuple[tuple[Segment, ...], ...]
    labels: tuple[Label, ...]
    legend_lines: tuple[LegendLine, ...]
    start: tuple[int, int]


def compute_layout(view: View) -> Layout:
    """Compute the position of everything in a view."""
    routes = choose_routes(view)
    columns = (view.lane("left"), view.spine, view.lane("right"))
    shapes = [measure_columns(column) for column in columns]
    tables = {b.name: lay_out_box(b, shapes[COLUMN[b.lane]], endings(view, b)) for b in view.boxes}
    heights = place_vertically(view, tables, routes)
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
    labels, samples = _legend(view)
    return Layout(
        width=max(strips[3].right, *(label.x + label.width for label in labels)) + PAGE_MARGIN,
        height=max(b.y + b.height for b in boxes) + PAGE_MARGIN,
        boxes=tuple(boxes),
        lines=tuple(lines),
        labels=labels,
        legend_lines=samples,
        start=(middle, FIRST_BOX_Y),
    )


def place_vertically(view: View, tables: Mapping[str, BoxContent], routes: Sequence[Route]) -> VerticalPositions:
    """Compute the y of every box and of every line across the middle column.

    A gap grows with the lines that cross in it, and a line crosses in the gap that makes it shortest. So boxes
    are placed, lines choose their gaps, and boxes are placed again.
    """
    tops = _box_tops(view, tables, routes, {})
    gaps = {w.pair: _crossing_gap(view, tables, tops, w) for w in routes if len(w.channels) > 1}
    tops = _box_tops(view, tables, routes, Counter(gaps.values()))
    crossings: dict[tuple[str, str], int] = {}
    used = Counter[int]()
    for pair, gap in gaps.items():
        above = view.spine[gap].name
        crossings[pair] = tops[above] + tables[above].height + BOX_SPACING // 2 + GRID_SIZE * used[gap]
        used[gap] += 1
    exits = {(name, i): tops[name] + g.y for name, table in tables.items() for i, g in enumerate(table.groups)}
    return VerticalPositions(tops, exits, crossings)


def _box_tops(
    view: View, tables: Mapping[str, BoxContent], routes: Sequence[Route], crossing_counts: Mapping[int, int]
) -> dict[str, int]:
    """The upper edges of all boxes, with room for the lines that cross below each box of the middle column."""
    tops: dict[str, int] = {}
    y = FIRST_BOX_Y
    for place, box in enumerate(view.spine):
        tops[box.name] = y
        y += tables[box.name].height + BOX_SPACING + GRID_SIZE * max(0, crossing_counts.get(place, 0) - 1)
    floor = y - BOX_SPACING
    heads = {name: top + HEAD_HEIGHT // 2 for name, top in tops.items()}
    exits = {(name, i): tops[name] + g.y for name in tops for i, g in enumerate(tables[name].groups)}
    for column in (view.lane("left"), view.lane("right")):
        preferred = {b.name: _preferred_y(b.name, routes, exits, heads, {}) for b in column}
        preferred = {name: _preferred_y(name, routes, exits, heads, preferred) for name in preferred}
        tops |= _stack_side_boxes({name: tables[name].height for name in preferred}, preferred, floor)
    return tops


def _preferred_y(
    box: str,
    routes: Sequence[Route],
    exits: Mapping[tuple[str, int], int],
    head_ys: Mapping[str, int],
    side_ys: Mapping[str, int],
) -> int:
    """The mean y of what a box at a side is connected with, in the middle column and at its own side."""
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
    return sum(ys) // len(ys) if ys else FIRST_BOX_Y


def _stack_side_boxes(heights: Mapping[str, int], preferred: Mapping[str, int], floor: int) -> dict[str, int]:
    """The upper edges of the boxes at a side, as near to their preferred y as possible without overlap."""
    tops = {name: preferred[name] - height // 2 for name, height in heights.items()}
    order = sorted(tops, key=tops.__getitem__)
    for name in reversed(order):  # from the bottom up
        tops[name] = min(tops[name], floor - heights[name])
        floor = tops[name] - BOX_SPACING
    y = FIRST_BOX_Y
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


def endings(view: View, box: Box) -> list[tuple[RowKind, list[str]]]:
    """How runs end in a final state: each ending with the guards that lead to it, without repetition."""
    if box.lane != "end":
        return []
    ends: dict[tuple[int, str, RowKind], dict[str, None]] = {}
    for row in (r for b in view.boxes for r in b.rows if r.transition.target == box.name and r.mark != "removed"):
        ending = row.transition.ends
        name = row.transition.id if row.transition.guard is None else row.transition.name
        ends.setdefault((ENDINGS.index(ending), ending, row.kind), {})[name] = None
    return [(kind, [f"{ending.replace('_', ' ')}:", *names]) for (_, ending, kind), names in sorted(ends.items())]


def _legend(view: View) -> tuple[tuple[Label, ...], tuple[LegendLine, ...]]:
    """The title, the caption, and the meaning of the kinds of lines in the picture."""
    caption = view.caption if view.overlaid else f"{view.caption}; {ROW_ORDER_TEXT}"
    labels = [Label(PAGE_MARGIN, 40, view.title, "title"), Label(PAGE_MARGIN, 60, caption, "caption")]
    samples: list[LegendLine] = []
    kinds = {r.kind for b in view.boxes for r in b.rows}
    x = PAGE_MARGIN
    for kind, text in LEGEND_TEXTS.items():
        if kind in kinds:
            samples.append(LegendLine(x, 77, kind))
            label = Label(x + LEGEND_LINE_LENGTH + 6, 81, text, "caption", kind)
            labels.append(label)
            x += LEGEND_LINE_LENGTH + 6 + label.width + 16
    return tuple(labels), tuple(samples)
