"""The layout of a picture: the position of every box, line and label, in whole pixels from the upper left.

The happy path runs down the middle, recovery is on the left, waiting on the right, final states are below.
Between and beside these three columns are four channels in which the lines run (see ``edge_routing``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentfsm.diagrams.box import BoxContent, ColumnPositions, Label, lay_out_box, measure_columns
from agentfsm.diagrams.edge_routing import (
    CHANNEL_MARGIN,
    COLUMN,
    FIRST_BOX_Y,
    TRACK_SPACING,
    Route,
    Segment,
    Side,
    VerticalPositions,
    assign_tracks,
    bundle_edges,
    bundle_segments,
    choose_routes,
    place_vertically,
)
from agentfsm.diagrams.view import Box, RowKind, View

__all__ = ["ARROW_LENGTH", "BAR_WIDTH", "LEGEND_LINE_LENGTH", "Layout", "LegendLine", "PlacedBox", "compute_layout"]

PAGE_MARGIN = 24  # pixels around the picture
EMPTY_CHANNEL_WIDTH = 40  # pixels between two columns with no line between them
LEGEND_LINE_LENGTH = 22  # pixels: the length of a line in the legend
ARROW_LENGTH = 8  # pixels: the length of an arrow head
BAR_WIDTH = 4  # pixels: how wide the bar is at which a line leaves a box
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
    """A box and its place.

    Attributes:
        box: What it says.
        x: Its left edge, in pixels.
        y: Its upper edge.
        columns: The columns that its rows keep.
        table: Its content, from its upper left corner.
        exits: For each of the table's groups, the side at which its line leaves, or None.
    """

    box: Box
    x: int
    y: int
    columns: ColumnPositions
    table: BoxContent
    exits: tuple[Side | None, ...]

    @property
    def width(self) -> int:
        """Its width in pixels."""
        return self.columns.width

    @property
    def height(self) -> int:
        """Its height in pixels."""
        return self.table.height


@dataclass(frozen=True, slots=True)
class LegendLine:
    """A line in the legend: from (x, y) on, ``LEGEND_LINE_LENGTH`` pixels to the right."""

    x: int
    y: int
    kind: RowKind


@dataclass(frozen=True, slots=True)
class Layout:
    """A picture, ready to be written down.

    Attributes:
        width: Its width in pixels.
        height: Its height in pixels.
        boxes: The states.
        lines: The lines; each is made of the pieces that share a track.
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
    """Give everything that a view says its place."""
    routes = choose_routes(view)
    columns = (view.lane("left"), view.spine, view.lane("right"))
    shapes = [measure_columns(column) for column in columns]
    tables = {b.name: lay_out_box(b, shapes[COLUMN[b.lane]], _endings_of(view, b)) for b in view.boxes}
    heights = place_vertically(view, tables, routes)
    channels = bundle_edges(routes, heights)
    tracks = [assign_tracks(channel) for channel in channels]
    strips = _place_channels([shape.width if c else 0 for shape, c in zip(shapes, columns, strict=True)], tracks)

    lines = [
        tuple(bundle_segments(net, strip.left + strip.margin + TRACK_SPACING * track, strip.left, strip.right))
        for channel, strip, track_of in zip(channels, strips, tracks, strict=True)
        for net, track in zip(channel, track_of, strict=True)
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


class _Channel(NamedTuple):
    """Where a channel runs: its walls, and how far its first track is from the left one (pixels)."""

    left: int
    right: int
    margin: int


def _place_channels(widths: Sequence[int], tracks: Sequence[Sequence[int]]) -> list[_Channel]:
    """The four channels between and beside columns of such widths (pixels), with room for their tracks."""
    strips: list[_Channel] = []
    x = PAGE_MARGIN
    for channel, used in enumerate(tracks):
        before = CHANNEL_MARGIN if channel > 0 and widths[channel - 1] else 0
        behind = CHANNEL_MARGIN if channel < 3 and widths[channel] else 0
        room = before + TRACK_SPACING * max(used) + behind if used else EMPTY_CHANNEL_WIDTH * bool(before and behind)
        strips.append(_Channel(x, x + room, before))
        x += room + (widths[channel] if channel < 3 else 0)
    return strips


def _vertical_segments(
    routes: Sequence[Route], tables: Mapping[str, BoxContent], heights: VerticalPositions, middle: int
) -> Iterator[Segment]:
    """The lines straight down the middle: one for each pair of neighbours that rows join."""
    for (source, target), joined in _by_pair(w for w in routes if not w.channels).items():
        ends = ((middle, heights.box_tops[source] + tables[source].height), (middle, heights.box_tops[target]))
        yield Segment(ends, joined[-1].kind, _transition_ids(joined), arrow=True, dim=all(w.dim for w in joined))


def _crossing_segments(routes: Sequence[Route], heights: VerticalPositions, left: int, right: int) -> Iterator[Segment]:
    """The lines across the middle, between two boxes: one for each pair of boxes of the two sides."""
    for pair, joined in _by_pair(w for w in routes if len(w.channels) > 1).items():
        y = heights.crossings[pair]
        ends = ((left, y), (right, y)) if joined[0].exit == "right" else ((right, y), (left, y))
        yield Segment(ends, joined[0].kind, _transition_ids(joined), dim=all(w.dim for w in joined))


def _by_pair(routes: Iterable[Route]) -> dict[tuple[str, str], list[Route]]:
    pairs: dict[tuple[str, str], list[Route]] = {}
    for way in routes:
        pairs.setdefault(way.pair, []).append(way)
    return pairs


def _transition_ids(joined: Iterable[Route]) -> tuple[str, ...]:
    return tuple(i for way in joined for i in way.ids)


def _endings_of(view: View, box: Box) -> dict[RowKind, list[str]]:
    """The ways to a state in which runs end, by meaning and each once: what other boxes say, from here."""
    if box.lane != "end":
        return {}
    ends: dict[RowKind, dict[str, None]] = {"done": {}, "stop": {}}
    for row in (r for b in view.boxes for r in b.rows if r.transition.target == box.name and r.mark != "removed"):
        ends[row.kind][row.transition.id if row.transition.guard is None else row.transition.name] = None
    return {kind: list(names) for kind, names in ends.items()}


def _legend(view: View) -> tuple[tuple[Label, ...], tuple[LegendLine, ...]]:
    """Title, caption, and what the lines that appear in the picture mean."""
    caption = view.caption if view.overlaid else f"{view.caption}; {ROW_ORDER_TEXT}"
    labels = [Label(PAGE_MARGIN, 40, view.title, "title"), Label(PAGE_MARGIN, 60, caption, "caption")]
    samples: list[LegendLine] = []
    kinds = {r.kind for b in view.boxes for r in b.rows}
    x = PAGE_MARGIN
    for kind, words in LEGEND_TEXTS.items():
        if kind in kinds:
            samples.append(LegendLine(x, 77, kind))
            label = Label(x + LEGEND_LINE_LENGTH + 6, 81, words, "caption", kind)
            labels.append(label)
            x += LEGEND_LINE_LENGTH + 6 + label.width + 16
    return tuple(labels), tuple(samples)
