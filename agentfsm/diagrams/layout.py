"""Where everything in a picture stands: pure geometry, in whole pixels from the upper left corner.

The happy path runs down the middle, recovery stands to the left, waiting to the right, the ends below.
Between and beside these three columns of boxes lie four channels, and only there (and in the gaps
between two boxes of the middle) do lines run; so none can cross a box.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentfsm.diagrams.heights import TOP, Heights, stand
from agentfsm.diagrams.routing import MARGIN, SPACING, Piece, assign, pieces
from agentfsm.diagrams.table import Columns, Label, Table, measure, tabulate
from agentfsm.diagrams.view import Box, Kind, View
from agentfsm.diagrams.ways import COLUMN, Side, Way, ways
from agentfsm.diagrams.wiring import nets

__all__ = ["ARROW", "BAR", "SAMPLE", "Layout", "Placed", "Sample", "arrange"]

EDGE = 24  # pixels around the picture
BARE = 40  # pixels between two columns with no line between them
SAMPLE = 22  # pixels: the length of a line in the legend
ARROW = 8  # pixels: the length of an arrow head
BAR = 4  # pixels: how wide the bar is at which a line leaves a box
RULE = "rows are asked from the top, the first that holds is taken"
MEANINGS: dict[Kind, str] = {
    "happy": "happy path",
    "recover": "recovery",
    "wait": "waiting",
    "done": "good end",
    "stop": "stop (text, no line)",
}


@dataclass(frozen=True, slots=True)
class Placed:
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
    columns: Columns
    table: Table
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
class Sample:
    """A line in the legend: from (x, y) on, ``SAMPLE`` pixels to the right."""

    x: int
    y: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Layout:
    """A picture, ready to be written down.

    Attributes:
        width: Its width in pixels.
        height: Its height in pixels.
        boxes: The states.
        lines: The lines; each is made of the pieces that share a track.
        labels: Title, caption and legend.
        samples: The lines of the legend.
        start: The middle of the upper edge of the first state.
    """

    width: int
    height: int
    boxes: tuple[Placed, ...]
    lines: tuple[tuple[Piece, ...], ...]
    labels: tuple[Label, ...]
    samples: tuple[Sample, ...]
    start: tuple[int, int]


def arrange(view: View) -> Layout:
    """Give everything that a view says its place."""
    routes = ways(view)
    columns = (view.lane("left"), view.spine, view.lane("right"))
    shapes = [measure(column) for column in columns]
    tables = {b.name: tabulate(b, shapes[COLUMN[b.lane]], _ends(view, b)) for b in view.boxes}
    heights = stand(view, tables, routes)
    channels = nets(routes, heights)
    tracks = [assign(channel) for channel in channels]
    strips = _strips([shape.width if c else 0 for shape, c in zip(shapes, columns, strict=True)], tracks)

    lines = [
        tuple(pieces(net, strip.left + strip.margin + SPACING * track, strip.left, strip.right))
        for channel, strip, track_of in zip(channels, strips, tracks, strict=True)
        for net, track in zip(channel, track_of, strict=True)
    ]
    left, right = strips[1].right, strips[2].left  # of the middle
    middle = (left + right) // 2
    lines += [(piece,) for piece in _down(routes, tables, heights, middle)]
    lines += [(piece,) for piece in _over(routes, heights, left, right)]

    exits: dict[tuple[str, int], Side | None] = {(w.source.name, w.place): w.exit for w in routes}
    boxes: list[Placed] = []
    for box in view.boxes:
        column, table = COLUMN[box.lane], tables[box.name]
        sides: tuple[Side | None, ...] = tuple(exits.get((box.name, i)) for i in range(len(table.groups)))
        boxes.append(Placed(box, strips[column].right, heights.tops[box.name], shapes[column], table, sides))
    labels, samples = _legend(view)
    return Layout(
        width=max(strips[3].right, *(label.x + label.width for label in labels)) + EDGE,
        height=max(b.y + b.height for b in boxes) + EDGE,
        boxes=tuple(boxes),
        lines=tuple(lines),
        labels=labels,
        samples=samples,
        start=(middle, TOP),
    )


class _Strip(NamedTuple):
    """Where a channel runs: its walls, and how far its first track is from the left one (pixels)."""

    left: int
    right: int
    margin: int


def _strips(widths: Sequence[int], tracks: Sequence[Sequence[int]]) -> list[_Strip]:
    """The four channels between and beside columns of such widths (pixels), with room for their tracks."""
    strips: list[_Strip] = []
    x = EDGE
    for channel, used in enumerate(tracks):
        before = MARGIN if channel > 0 and widths[channel - 1] else 0
        behind = MARGIN if channel < 3 and widths[channel] else 0
        room = before + SPACING * max(used) + behind if used else BARE * bool(before and behind)
        strips.append(_Strip(x, x + room, before))
        x += room + (widths[channel] if channel < 3 else 0)
    return strips


def _down(routes: Sequence[Way], tables: Mapping[str, Table], heights: Heights, middle: int) -> Iterator[Piece]:
    """The lines straight down the middle: one for each pair of neighbours that rows join."""
    for (source, target), joined in _by_pair(w for w in routes if not w.channels).items():
        ends = ((middle, heights.tops[source] + tables[source].height), (middle, heights.tops[target]))
        yield Piece(ends, joined[-1].kind, _ids(joined), arrow=True, dim=all(w.dim for w in joined))


def _over(routes: Sequence[Way], heights: Heights, left: int, right: int) -> Iterator[Piece]:
    """The lines across the middle, between two boxes: one for each pair of boxes of the two sides."""
    for pair, joined in _by_pair(w for w in routes if len(w.channels) > 1).items():
        y = heights.across[pair]
        ends = ((left, y), (right, y)) if joined[0].exit == "right" else ((right, y), (left, y))
        yield Piece(ends, joined[0].kind, _ids(joined), dim=all(w.dim for w in joined))


def _by_pair(routes: Iterable[Way]) -> dict[tuple[str, str], list[Way]]:
    pairs: dict[tuple[str, str], list[Way]] = {}
    for way in routes:
        pairs.setdefault(way.pair, []).append(way)
    return pairs


def _ids(joined: Iterable[Way]) -> tuple[str, ...]:
    return tuple(i for way in joined for i in way.ids)


def _ends(view: View, box: Box) -> dict[Kind, list[str]]:
    """The ways to a state in which runs end, by meaning and each once: what other boxes say, from here."""
    if box.lane != "end":
        return {}
    ends: dict[Kind, dict[str, None]] = {"done": {}, "stop": {}}
    for row in (r for b in view.boxes for r in b.rows if r.transition.target == box.name and r.mark != "removed"):
        ends[row.kind][row.transition.id if row.transition.guard is None else row.transition.name] = None
    return {kind: list(names) for kind, names in ends.items()}


def _legend(view: View) -> tuple[tuple[Label, ...], tuple[Sample, ...]]:
    """Title, caption, and what the lines that appear in the picture mean."""
    caption = view.caption if view.overlaid else f"{view.caption}; {RULE}"
    labels = [Label(EDGE, 40, view.title, "title"), Label(EDGE, 60, caption, "caption")]
    samples: list[Sample] = []
    kinds = {r.kind for b in view.boxes for r in b.rows}
    x = EDGE
    for kind, words in MEANINGS.items():
        if kind in kinds:
            samples.append(Sample(x, 77, kind))
            label = Label(x + SAMPLE + 6, 81, words, "caption", kind)
            labels.append(label)
            x += SAMPLE + 6 + label.width + 16
    return tuple(labels), tuple(samples)
