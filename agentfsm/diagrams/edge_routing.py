"""Edge routing: the channel and track of every line, where it bends, and where it meets a box.

The columns of boxes are numbered 0 (left), 1 (middle) and 2 (right); channel ``n`` is left of column ``n``,
channel 3 at the far right. Lines run only in channels and in the gaps between two boxes of the middle column, so
no line crosses a box. All lines of one kind to one target share a track.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal

from agentfsm.diagrams.box import HEAD_HEIGHT
from agentfsm.diagrams.view import Box, Lane, RowKind, TableRow, View

Side = Literal["left", "right"]

COLUMN: dict[Lane, int] = {"left": 0, "main": 1, "end": 1, "right": 2}
"""The column of the boxes of each lane."""


@dataclass(frozen=True, slots=True)
class Route:
    """The route of the line of one group of rows.

    Attributes:
        source: The box that has the rows.
        target: The box to which they lead.
        group_index: The index of the group in its box, from 0.
        rows: The rows.
        channels: The channels of the line: none (straight down to the next box), one, or two with a gap of
            the middle column between them.
    """

    source: Box
    target: Box
    group_index: int
    rows: tuple[TableRow, ...]
    channels: tuple[int, ...]

    @property
    def exit(self) -> Side | None:
        """The side of the box at which the line leaves; None means its lower edge."""
        if not self.channels:
            return None
        return "right" if self.channels[0] > COLUMN[self.source.lane] else "left"

    @property
    def pair(self) -> tuple[str, str]:
        """The names of both boxes."""
        return self.source.name, self.target.name

    @property
    def kind(self) -> RowKind:
        """The kind of its rows."""
        return self.rows[0].kind

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of its transitions."""
        return tuple(r.transition.id for r in self.rows)

    @property
    def dim(self) -> bool:
        """Whether it is greyed out."""
        return all(r.dim for r in self.rows)


def choose_routes(view: View) -> tuple[Route, ...]:
    """The route of every group of rows that is drawn as a line."""
    boxes = {b.name: b for b in view.boxes}
    below = {a.name: b.name for a, b in zip(view.spine, view.spine[1:], strict=False)}
    routes: list[Route] = []
    within_middle: list[Route] = []  # these can use the channel on either side
    for box in view.boxes:
        groups = box.groups
        for index, rows in enumerate(groups):
            if not rows[0].has_line:
                continue
            target = boxes[str(rows[0].transition.target)]
            here, there = COLUMN[box.lane], COLUMN[target.lane]
            if here != there:
                nearest = here + (there > here)
                channels = (nearest,) if abs(here - there) == 1 else (nearest, 3 - nearest)
                routes.append(Route(box, target, index, rows, channels))
            elif here != 1:
                routes.append(Route(box, target, index, rows, (0 if here == 0 else 3,)))
            elif below.get(box.name) == target.name and (rows[0].kind == "happy" or index == len(groups) - 1):
                routes.append(Route(box, target, index, rows, ()))
            else:
                within_middle.append(Route(box, target, index, rows, (1,)))
    for route in within_middle:
        routes.append(replace(route, channels=(_choose_side_channel(routes, route),)))
    return tuple(routes)


def _choose_side_channel(chosen: Sequence[Route], route: Route) -> int:
    """The channel beside the middle column for a line within it.

    The one that already has a line of the same kind to the same box, or else the emptier one.
    """
    used = {1: set[tuple[str, str]](), 2: set[tuple[str, str]]()}
    for other in chosen:
        for channel in other.channels:
            if channel in used:
                used[channel].add((other.target.name, other.kind))
    for channel, lines in used.items():
        if (route.target.name, route.kind) in lines:
            return channel
    return 1 if len(used[1]) <= len(used[2]) else 2


TRACK_SPACING = 12  # pixels between two tracks
CHANNEL_MARGIN = 20  # pixels between a wall and the nearest track, for a bend and an arrow head
BEND_RADIUS = 6  # pixels

Point = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Port:
    """A point at which a line enters a channel.

    Attributes:
        side: The wall at which it enters.
        y: In pixels from the top.
        ids: The ids of the transitions that enter there.
        dim: Whether they are greyed out.
    """

    side: Side
    y: int
    ids: tuple[str, ...]
    dim: bool = False


@dataclass(slots=True)
class EdgeBundle:
    """All lines of one kind that run through a channel to one target.

    Attributes:
        target: The box to which they lead.
        kind: Their kind.
        exit_side: The wall at which they leave.
        arrow: Whether they end there in an arrow head, or continue to another channel.
        ports: Where they enter.
        exit_y: The y at which they leave, in pixels.
    """

    target: str
    kind: RowKind
    exit_side: Side
    arrow: bool = True
    ports: list[Port] = field(default_factory=list[Port])
    exit_y: int = 0

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of all its transitions, in order."""
        return tuple(i for port in self.ports for i in port.ids)

    @property
    def dim(self) -> bool:
        """Whether all of it is greyed out."""
        return all(port.dim for port in self.ports)

    def wall_heights(self, side: Side) -> list[int]:
        """The y of each point at which it touches a wall."""
        ys = [port.y for port in self.ports if port.side == side]
        return [*ys, self.exit_y] if self.exit_side == side else ys

    @property
    def span(self) -> tuple[int, int]:
        """The highest and the lowest point of the track."""
        ys = [*(port.y for port in self.ports), self.exit_y]
        return min(ys), max(ys)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a line that belongs to the same transitions.

    Attributes:
        points: Its corners, in pixels; it runs horizontally or vertically between them.
        kind: Its kind.
        ids: The ids of the transitions.
        arrow: Whether it ends in an arrow head.
        dim: Whether it is greyed out.
    """

    points: tuple[Point, ...]
    kind: RowKind
    ids: tuple[str, ...]
    arrow: bool = False
    dim: bool = False


def assign_tracks(bundles: Sequence[EdgeBundle]) -> list[int]:
    """The track of each bundle, from the left, chosen for few crossings and then for short lines.

    Bundles whose vertical extents do not overlap can share a track.
    """
    cost = [[_order_cost(a, b) if a is not b else 0 for b in bundles] for a in bundles]

    def added_cost(order: list[int], place: int, bundle: int) -> int:
        before = sum(cost[other][bundle] for other in order[:place])
        return before + sum(cost[bundle][other] for other in order[place:])

    def best_place(order: list[int], bundle: int) -> int:
        return min(range(len(order) + 1), key=lambda place: added_cost(order, place, bundle))

    order: list[int] = []
    for bundle in range(len(bundles)):
        order.insert(best_place(order, bundle), bundle)
    for _ in bundles:  # each round removes every bundle in turn and reinserts it at its best place
        previous = list(order)
        for bundle in previous:
            order.remove(bundle)
            order.insert(best_place(order, bundle), bundle)
        if order == previous:
            break
    track = [0] * len(bundles)
    for place, bundle in enumerate(order):
        for other in order[:place]:
            if _overlap(bundles[bundle], bundles[other]):
                track[bundle] = max(track[bundle], track[other] + 1)
    return track


def _overlap(a: EdgeBundle, b: EdgeBundle) -> bool:
    return a.span[0] <= b.span[1] + BEND_RADIUS and b.span[0] <= a.span[1] + BEND_RADIUS


def _order_cost(a: EdgeBundle, b: EdgeBundle) -> int:
    """The cost of ``a`` being left of ``b``: 100 for each crossing, and 1 for each line that has to pass the other."""
    if not _overlap(a, b):
        return 0
    right, left = a.wall_heights("right"), b.wall_heights("left")
    crossings = sum(b.span[0] < y < b.span[1] for y in right) + sum(a.span[0] < y < a.span[1] for y in left)
    return 100 * crossings + len(right) + len(left)


def bundle_segments(bundle: EdgeBundle, track: int, left: int, right: int) -> Iterator[Segment]:
    """The segments of a bundle.

    Args:
        bundle: The bundle.
        track: The x of its track, in pixels.
        left: The x of the channel's left wall.
        right: The x of its right wall.
    """
    wall = {"left": left, "right": right}
    out = wall[bundle.exit_side]
    for down in (True, False):  # lines from above run down to the exit, lines from below run up
        branch = sorted(
            (p for p in bundle.ports if (p.y < bundle.exit_y) is down), key=lambda p: abs(p.y - bundle.exit_y)
        )
        joined: list[Port] = []
        while branch:
            port = branch.pop()  # the farthest first; the others join it one by one
            joined.append(port)
            join = _bend_end(port, bundle.exit_y)
            corners = ((wall[port.side], port.y), (track, port.y), (track, join))
            yield Segment(corners, bundle.kind, port.ids, dim=port.dim)
            stop = (
                _bend_end(branch[-1], bundle.exit_y)
                if branch
                else bundle.exit_y - _sign(down) * _bend_radius(port, bundle.exit_y)
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
    """The bend radius of a line between its port and the exit: half the distance, if that is short."""
    return min(BEND_RADIUS, abs(exit_y - port.y) // 2)


def _bend_end(port: Port, exit_y: int) -> int:
    """The y at which the bend of a line that enters at a port ends, and it runs along the track."""
    return port.y + _sign(port.y < exit_y) * _bend_radius(port, exit_y)


def bends(points: Sequence[Point]) -> Iterator[tuple[Point, Point, Point]]:
    """The corners of a line: for each, the start of its bend, the corner itself, and the end of the bend."""
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        radius = min(BEND_RADIUS, math.dist(before, corner), math.dist(corner, after))
        yield point_toward(corner, before, int(radius)), corner, point_toward(corner, after, int(radius))


def point_toward(a: Point, b: Point, by: int) -> Point:
    """The point that is ``by`` pixels from ``a`` towards ``b``, which is straight above, below or beside it."""
    dx, dy = b[0] - a[0], b[1] - a[1]
    return a[0] + by * ((dx > 0) - (dx < 0)), a[1] + by * ((dy > 0) - (dy < 0))


GRID_SIZE = 8  # pixels; boxes of the middle column are on the grid, those at the sides half a step lower


@dataclass(frozen=True, slots=True)
class VerticalPositions:
    """Vertical positions, in pixels from the top.

    Attributes:
        box_tops: The upper edge of each box, by its name.
        exits: Where the line of each group of rows leaves, by box and index of the group.
        crossings: Where lines from one side to the other cross the middle column, by source and target.
    """

    box_tops: Mapping[str, int]
    exits: Mapping[tuple[str, int], int]
    crossings: Mapping[tuple[str, str], int]


_MIDDLE_COLUMN = COLUMN["main"]


def bundle_edges(routes: Sequence[Route], positions: VerticalPositions) -> list[list[EdgeBundle]]:
    """The bundles of each of the four channels."""
    channels: list[dict[tuple[str, ...], EdgeBundle]] = [{}, {}, {}, {}]
    for route in routes:
        if not route.channels:
            continue
        first, last = route.channels[0], route.channels[-1]
        target, kind = route.target.name, route.kind
        wall = _wall_side(last, COLUMN[route.target.lane])
        into = channels[last].setdefault((target, kind), EdgeBundle(target, kind, wall))
        port = Port(
            _wall_side(first, COLUMN[route.source.lane]),
            positions.exits[route.source.name, route.group_index],
            route.ids,
            route.dim,
        )
        if first == last:
            into.ports.append(port)
            continue
        wall = _wall_side(first, _MIDDLE_COLUMN)
        over = channels[first].setdefault(
            ("over", *route.pair),
            EdgeBundle(target, kind, wall, arrow=False, exit_y=positions.crossings[route.pair]),
        )
        over.ports.append(port)
        onward = Port(_wall_side(last, _MIDDLE_COLUMN), over.exit_y, over.ids, over.dim)
        into.ports = [*(p for p in into.ports if (p.side, p.y) != (onward.side, onward.y)), onward]
    bundles = [list(channel.values()) for channel in channels]
    _spread_arrivals(bundles, positions)
    return bundles


def _wall_side(channel: int, column: int) -> Side:
    """The wall of a channel that is formed by a column of boxes."""
    return "left" if channel == column + 1 else "right"


def _spread_arrivals(channels: Sequence[Sequence[EdgeBundle]], positions: VerticalPositions) -> None:
    """Spread the lines that arrive at one side of a box over the height of its head."""
    for channel in channels:
        arrivals: dict[tuple[str, Side], list[EdgeBundle]] = {}
        for bundle in (b for b in channel if b.arrow):
            arrivals.setdefault((bundle.target, bundle.exit_side), []).append(bundle)
        for (target, _), arriving in arrivals.items():
            top = positions.box_tops[target]
            places = {1: (2,), 2: (1, 3)}.get(len(arriving), (1, 2, 3))
            for bundle, place in zip(sorted(arriving, key=lambda b: _arrival_order(b, top)), places, strict=True):
                bundle.exit_y = top + GRID_SIZE * place


def _arrival_order(bundle: EdgeBundle, top: int) -> tuple[float, ...]:
    """The sort key of arriving lines, from the top, by which none has to cross another.

    Lines from above come first, then lines from below. Of those from above the nearest is on top, of those from
    below the farthest, and lines from the other wall are outside those from this one.
    """
    ys = [port.y for port in bundle.ports]
    other_wall = any(port.side != bundle.exit_side for port in bundle.ports)
    if fmean(ys) > top + HEAD_HEIGHT / 2:
        return 1, -other_wall, -max(ys)
    return 0, other_wall, -min(ys)
