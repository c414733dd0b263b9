"""Edge routing: the channel and track of every line, where it bends, and where it meets a box.

The columns of boxes are numbered 0 (left), 1 (middle) and 2 (right); channel ``n`` lies left of column
``n``, channel 3 at the far right. Lines run only in channels and in the gaps between two boxes of the
middle column, so no line crosses a box. All lines of one kind to one target share a track.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal

from agentfsm.diagrams.box import HEAD_HEIGHT, BoxContent
from agentfsm.diagrams.view import Box, Lane, RowKind, TableRow, View

__all__ = [
    "BEND_RADIUS",
    "CHANNEL_MARGIN",
    "COLUMN",
    "FIRST_BOX_Y",
    "GRID_SIZE",
    "TRACK_SPACING",
    "EdgeBundle",
    "Point",
    "Port",
    "Route",
    "Segment",
    "Side",
    "VerticalPositions",
    "assign_tracks",
    "bends",
    "bundle_edges",
    "bundle_segments",
    "choose_routes",
    "place_vertically",
    "point_toward",
]


Side = Literal["left", "right"]

COLUMN: dict[Lane, int] = {"left": 0, "main": 1, "end": 1, "right": 2}
"""The column in which the boxes of a lane stand."""


@dataclass(frozen=True, slots=True)
class Route:
    """The way of the line of one group of rows.

    Attributes:
        source: The box in which the rows stand.
        target: The box to which they lead.
        group_index: The group's place among those of its box, from 0.
        rows: The rows.
        channels: The channels that the line passes: none (straight down to the next box), one, or
            two with a gap of the middle column between them.
    """

    source: Box
    target: Box
    group_index: int
    rows: tuple[TableRow, ...]
    channels: tuple[int, ...]

    @property
    def exit(self) -> Side | None:
        """The side of the box at which the line leaves; None is its lower edge."""
        if not self.channels:
            return None
        return "right" if self.channels[0] > COLUMN[self.source.lane] else "left"

    @property
    def pair(self) -> tuple[str, str]:
        """The names of both boxes."""
        return self.source.name, self.target.name

    @property
    def kind(self) -> RowKind:
        """What the line means."""
        return self.rows[0].kind

    @property
    def ids(self) -> tuple[str, ...]:
        """The transitions that it stands for."""
        return tuple(r.transition.id for r in self.rows)

    @property
    def dim(self) -> bool:
        """Whether it stands back."""
        return all(r.dim for r in self.rows)


def choose_routes(view: View) -> tuple[Route, ...]:
    """The way of every group of rows that is drawn as a line."""
    boxes = {b.name: b for b in view.boxes}
    below = {a.name: b.name for a, b in zip(view.spine, view.spine[1:], strict=False)}
    found: list[Route] = []
    within: list[Route] = []  # lines within the middle: they have a choice
    for box in view.boxes:
        groups = box.groups
        for place, rows in enumerate(groups):
            if not rows[0].has_line:
                continue
            target = boxes[str(rows[0].transition.target)]
            here, there = COLUMN[box.lane], COLUMN[target.lane]
            if here != there:
                nearest = here + (there > here)
                channels = (nearest,) if abs(here - there) == 1 else (nearest, 3 - nearest)
                found.append(Route(box, target, place, rows, channels))
            elif here != 1:
                found.append(Route(box, target, place, rows, (0 if here == 0 else 3,)))
            elif below.get(box.name) == target.name and (rows[0].kind == "happy" or place == len(groups) - 1):
                found.append(Route(box, target, place, rows, ()))
            else:
                within.append(Route(box, target, place, rows, (1,)))
    for way in within:
        found.append(replace(way, channels=(_choose_side_channel(found, way),)))
    return tuple(found)


def _choose_side_channel(chosen: Sequence[Route], route: Route) -> int:
    """The channel beside the middle for a line within it: where one leads there already, or the emptier one."""
    used = {1: set[tuple[str, str]](), 2: set[tuple[str, str]]()}
    for way in chosen:
        for channel in way.channels:
            if channel in used:
                used[channel].add((way.target.name, way.kind))
    for channel, lines in used.items():
        if (route.target.name, route.kind) in lines:
            return channel
    return 1 if len(used[1]) <= len(used[2]) else 2


TRACK_SPACING = 12  # pixels between two tracks
CHANNEL_MARGIN = 20  # pixels between a wall and the nearest track: room for a bend and an arrow head
BEND_RADIUS = 6  # pixels: how wide lines bend

Point = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Port:
    """Where a line enters a channel.

    Attributes:
        side: The wall at which it enters.
        y: The height, in pixels from the top.
        ids: The transitions that enter there.
        dim: Whether they stand back.
    """

    side: Side
    y: int
    ids: tuple[str, ...]
    dim: bool = False


@dataclass(slots=True)
class EdgeBundle:
    """All lines of one meaning that lead through a channel to one destination.

    Attributes:
        target: The box to which they lead.
        kind: What they mean.
        exit_side: The wall at which they leave.
        arrow: Whether they end there, in an arrow head; else they go on to another channel.
        ports: Where they enter.
        exit_y: The height at which they leave, in pixels.
    """

    target: str
    kind: RowKind
    exit_side: Side
    arrow: bool = True
    ports: list[Port] = field(default_factory=list[Port])
    exit_y: int = 0

    @property
    def ids(self) -> tuple[str, ...]:
        """Every transition of the net, in order."""
        return tuple(i for pin in self.ports for i in pin.ids)

    @property
    def dim(self) -> bool:
        """Whether the whole net stands back."""
        return all(pin.dim for pin in self.ports)

    def wall_heights(self, side: Side) -> list[int]:
        """The heights at which the net touches a wall."""
        ys = [pin.y for pin in self.ports if pin.side == side]
        return [*ys, self.exit_y] if self.exit_side == side else ys

    @property
    def span(self) -> tuple[int, int]:
        """The highest and the lowest point of the track."""
        ys = [*(pin.y for pin in self.ports), self.exit_y]
        return min(ys), max(ys)


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of line that the same transitions run along.

    Attributes:
        points: Its corners, in pixels; every stretch is horizontal or vertical.
        kind: What it means.
        ids: The transitions.
        arrow: Whether it ends in an arrow head.
        dim: Whether it stands back.
    """

    points: tuple[Point, ...]
    kind: RowKind
    ids: tuple[str, ...]
    arrow: bool = False
    dim: bool = False


def assign_tracks(bundles: Sequence[EdgeBundle]) -> list[int]:
    """The track of each net, from the left: few crossings, then short lines.

    Nets that pass no common height share a track.
    """
    cost = [[_order_cost(a, b) if a is not b else 0 for b in bundles] for a in bundles]

    def added(order: list[int], place: int, net: int) -> int:
        return sum(cost[other][net] for other in order[:place]) + sum(cost[net][other] for other in order[place:])

    def best(order: list[int], net: int) -> int:
        return min(range(len(order) + 1), key=lambda place: added(order, place, net))

    order: list[int] = []
    for net in range(len(bundles)):
        order.insert(best(order, net), net)
    for _ in bundles:  # each round takes every net out and puts it back where it is best
        was = list(order)
        for net in was:
            order.remove(net)
            order.insert(best(order, net), net)
        if order == was:
            break
    track = [0] * len(bundles)
    for place, net in enumerate(order):
        for other in order[:place]:
            if _overlap(bundles[net], bundles[other]):
                track[net] = max(track[net], track[other] + 1)
    return track


def _overlap(a: EdgeBundle, b: EdgeBundle) -> bool:
    return a.span[0] <= b.span[1] + BEND_RADIUS and b.span[0] <= a.span[1] + BEND_RADIUS


def _order_cost(a: EdgeBundle, b: EdgeBundle) -> int:
    """What it costs to have ``a`` left of ``b``: 100 for each crossing, and the way past each other."""
    if not _overlap(a, b):
        return 0
    right, left = a.wall_heights("right"), b.wall_heights("left")
    crossed = sum(b.span[0] < y < b.span[1] for y in right) + sum(a.span[0] < y < a.span[1] for y in left)
    return 100 * crossed + len(right) + len(left)


def bundle_segments(bundle: EdgeBundle, track: int, left: int, right: int) -> Iterator[Segment]:
    """The lines of a net.

    Args:
        bundle: The net.
        track: Where its track runs, in pixels from the left.
        left: Where the channel's left wall stands.
        right: Where its right wall stands.
    """
    wall = {"left": left, "right": right}
    out = wall[bundle.exit_side]
    for down in (True, False):  # what comes from above runs down to the exit, what comes from below runs up
        branch = sorted(
            (p for p in bundle.ports if (p.y < bundle.exit_y) is down), key=lambda p: abs(p.y - bundle.exit_y)
        )
        joined: list[Port] = []
        while branch:
            pin = branch.pop()  # the farthest first; the others join it one by one
            joined.append(pin)
            join = _bend_end(pin, bundle.exit_y)
            yield Segment(((wall[pin.side], pin.y), (track, pin.y), (track, join)), bundle.kind, pin.ids, dim=pin.dim)
            stop = (
                _bend_end(branch[-1], bundle.exit_y)
                if branch
                else bundle.exit_y - _sign(down) * _bend_radius(pin, bundle.exit_y)
            )
            ids = tuple(i for p in joined for i in p.ids)
            dim = all(p.dim for p in joined)
            if stop != join:
                yield Segment(((track, join), (track, stop)), bundle.kind, ids, dim=dim)
        if joined:
            last = joined[-1]
            turn = bundle.exit_y - _sign(down) * _bend_radius(last, bundle.exit_y)
            toward = track + (BEND_RADIUS if out > track else -BEND_RADIUS)
            ids = tuple(i for p in joined for i in p.ids)
            dim = all(p.dim for p in joined)
            yield Segment(((track, turn), (track, bundle.exit_y), (toward, bundle.exit_y)), bundle.kind, ids, dim=dim)
    toward = track + (BEND_RADIUS if out > track else -BEND_RADIUS)
    yield Segment(((toward, bundle.exit_y), (out, bundle.exit_y)), bundle.kind, bundle.ids, bundle.arrow, bundle.dim)


def _sign(down: bool) -> int:
    return 1 if down else -1


def _bend_radius(port: Port, exit_y: int) -> int:
    """How wide a line may bend between its pin and the exit: half the way, if that is short."""
    return min(BEND_RADIUS, abs(exit_y - port.y) // 2)


def _bend_end(port: Port, exit_y: int) -> int:
    """Where the bend of a line that enters at a pin is over, and it runs along the track."""
    return port.y + _sign(port.y < exit_y) * _bend_radius(port, exit_y)


def bends(points: Sequence[Point]) -> Iterator[tuple[Point, Point, Point]]:
    """The corners of a line: for each, where its bend starts, the corner itself, and where the bend ends."""
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        radius = min(BEND_RADIUS, math.dist(before, corner), math.dist(corner, after))
        yield point_toward(corner, before, int(radius)), corner, point_toward(corner, after, int(radius))


def point_toward(a: Point, b: Point, by: int) -> Point:
    """The point that lies so many pixels from ``a`` towards ``b``, which is straight above or beside it."""
    dx, dy = b[0] - a[0], b[1] - a[1]
    return a[0] + by * ((dx > 0) - (dx < 0)), a[1] + by * ((dy > 0) - (dy < 0))


GRID_SIZE = 8  # pixels; boxes of the middle stand on the grid, those at the sides half a step lower
FIRST_BOX_Y = 120  # pixels to the first box of the middle: title, legend and start mark stand above
BOX_SPACING = 32  # pixels between two boxes of a column


@dataclass(frozen=True, slots=True)
class VerticalPositions:
    """Heights in pixels from the top.

    Attributes:
        box_tops: The upper edge of each box, by its name.
        exits: Where the line of each group of rows leaves, by box and place.
        crossings: Where lines from one side to the other cross the middle, by source and target.
    """

    box_tops: Mapping[str, int]
    exits: Mapping[tuple[str, int], int]
    crossings: Mapping[tuple[str, str], int]


def place_vertically(view: View, tables: Mapping[str, BoxContent], routes: Sequence[Route]) -> VerticalPositions:
    """Give every box and every line across the middle its height.

    Gaps grow with the lines that cross in them, and lines choose the gap with the shortest way: so
    boxes are placed, lines choose, and boxes are placed again.
    """
    tops = _box_tops(view, tables, routes, {})
    gaps = {w.pair: _crossing_gap(view, tables, tops, w) for w in routes if len(w.channels) > 1}
    tops = _box_tops(view, tables, routes, Counter(gaps.values()))
    across: dict[tuple[str, str], int] = {}
    used = Counter[int]()
    for pair, gap in gaps.items():
        above = view.spine[gap].name
        across[pair] = tops[above] + tables[above].height + BOX_SPACING // 2 + GRID_SIZE * used[gap]
        used[gap] += 1
    exits = {(name, i): tops[name] + g.y for name, table in tables.items() for i, g in enumerate(table.groups)}
    return VerticalPositions(tops, exits, across)


def _box_tops(
    view: View, tables: Mapping[str, BoxContent], routes: Sequence[Route], crossing_counts: Mapping[int, int]
) -> dict[str, int]:
    """The upper edges of all boxes, with room for the lines that cross below each box of the middle."""
    tops: dict[str, int] = {}
    y = FIRST_BOX_Y
    for place, box in enumerate(view.spine):
        tops[box.name] = y
        y += tables[box.name].height + BOX_SPACING + GRID_SIZE * max(0, crossing_counts.get(place, 0) - 1)
    floor = y - BOX_SPACING
    heads = {name: top + HEAD_HEIGHT // 2 for name, top in tops.items()}
    exits = {(name, i): tops[name] + g.y for name in tops for i, g in enumerate(tables[name].groups)}
    for column in (view.lane("left"), view.lane("right")):
        pulls = {b.name: _preferred_y(b.name, routes, exits, heads, {}) for b in column}
        pulls = {name: _preferred_y(name, routes, exits, heads, pulls) for name in pulls}
        tops |= _stack_side_boxes({name: tables[name].height for name in pulls}, pulls, floor)
    return tops


def _preferred_y(
    box: str,
    routes: Sequence[Route],
    exits: Mapping[tuple[str, int], int],
    head_ys: Mapping[str, int],
    side_ys: Mapping[str, int],
) -> int:
    """The mean height of what a box of a side is joined with: the middle, and neighbours of its side."""
    ys: list[int] = []
    for way in routes:
        source, target = way.pair
        y = None
        if target == box != source:
            y = exits.get((source, way.group_index), side_ys.get(source))
        elif source == box != target:
            y = head_ys.get(target, side_ys.get(target))
        if y is not None:
            ys.append(y)
    return sum(ys) // len(ys) if ys else FIRST_BOX_Y


def _stack_side_boxes(heights: Mapping[str, int], preferred: Mapping[str, int], floor: int) -> dict[str, int]:
    """The boxes of a side stand as near as they can to where they are pulled, without overlap."""
    tops = {name: preferred[name] - height // 2 for name, height in heights.items()}
    order = sorted(tops, key=tops.__getitem__)
    for name in reversed(order):  # up from the floor
        tops[name] = min(tops[name], floor - heights[name])
        floor = tops[name] - BOX_SPACING
    y = FIRST_BOX_Y
    for name in order:  # and down from the top
        tops[name] = max(y, tops[name]) // GRID_SIZE * GRID_SIZE + GRID_SIZE // 2
        y = tops[name] + heights[name] + BOX_SPACING
    return tops


def _crossing_gap(view: View, tables: Mapping[str, BoxContent], tops: Mapping[str, int], route: Route) -> int:
    """The gap below a box of the middle through which a line from side to side has the shortest way."""
    start = tops[route.source.name] + tables[route.source.name].groups[route.group_index].y
    end = tops[route.target.name] + HEAD_HEIGHT // 2

    def length(gap: int) -> int:
        above = view.spine[gap].name
        y = tops[above] + tables[above].height + BOX_SPACING // 2
        return abs(start - y) + abs(y - end)

    return min(range(len(view.spine) - 1), key=length)


_MIDDLE_COLUMN = COLUMN["main"]


def bundle_edges(routes: Sequence[Route], positions: VerticalPositions) -> list[list[EdgeBundle]]:
    """The lines of each of the four channels.

    Args:
        routes: The way of each group of rows.
        positions: Where boxes, and lines across the middle, stand.
    """
    channels: list[dict[tuple[str, ...], EdgeBundle]] = [{}, {}, {}, {}]
    for way in routes:
        if not way.channels:
            continue
        first, last = way.channels[0], way.channels[-1]
        wall = _wall_side(last, COLUMN[way.target.lane])
        into = channels[last].setdefault((way.target.name, way.kind), EdgeBundle(way.target.name, way.kind, wall))
        pin = Port(
            _wall_side(first, COLUMN[way.source.lane]),
            positions.exits[way.source.name, way.group_index],
            way.ids,
            way.dim,
        )
        if first == last:
            into.ports.append(pin)
            continue
        wall = _wall_side(first, _MIDDLE_COLUMN)
        over = channels[first].setdefault(
            ("over", *way.pair),
            EdgeBundle(way.target.name, way.kind, wall, arrow=False, exit_y=positions.crossings[way.pair]),
        )
        over.ports.append(pin)
        onward = Port(_wall_side(last, _MIDDLE_COLUMN), over.exit_y, over.ids, over.dim)
        into.ports = [*(p for p in into.ports if (p.side, p.y) != (onward.side, onward.y)), onward]
    found = [list(channel.values()) for channel in channels]
    _spread_arrivals(found, positions)
    return found


def _wall_side(channel: int, column: int) -> Side:
    """The wall of a channel that a column of boxes makes."""
    return "left" if channel == column + 1 else "right"


def _spread_arrivals(channels: Sequence[Sequence[EdgeBundle]], positions: VerticalPositions) -> None:
    """Spread the lines that arrive at one side of a box over the height of its head."""
    for channel in channels:
        ports: dict[tuple[str, Side], list[EdgeBundle]] = {}
        for net in (n for n in channel if n.arrow):
            ports.setdefault((net.target, net.exit_side), []).append(net)
        for (target, _), arriving in ports.items():
            top = positions.box_tops[target]
            places = {1: (2,), 2: (1, 3)}.get(len(arriving), (1, 2, 3))
            for net, place in zip(sorted(arriving, key=lambda n: _arrival_order(n, top)), places, strict=True):
                net.exit_y = top + GRID_SIZE * place


def _arrival_order(bundle: EdgeBundle, top: int) -> tuple[float, ...]:
    """The order of arriving lines, from the top, in which none has to cross another.

    Lines from above come first, then lines from below. Of those from above, the nearest is on top; of
    those from below, the farthest; and lines from the other wall stay outside those from this one.
    """
    ys = [pin.y for pin in bundle.ports]
    other_wall = any(pin.side != bundle.exit_side for pin in bundle.ports)
    if fmean(ys) > top + HEAD_HEIGHT / 2:
        return 1, -other_wall, -max(ys)
    return 0, other_wall, -min(ys)
