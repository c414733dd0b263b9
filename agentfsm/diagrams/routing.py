"""Lines in a channel: the free strip between two columns of boxes, with a pin wherever a line enters it.

All lines of one meaning to one destination share a track, as branches share a trunk. A line enters at a
pin, runs along its track, and leaves at the port of its destination. Because boxes stand in columns and
pins of the two walls stand on different heights, no line crosses a box and no two lines lie upon each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from agentfsm.diagrams.view import Kind
from agentfsm.diagrams.ways import Side

__all__ = ["MARGIN", "RADIUS", "SPACING", "Net", "Piece", "Pin", "Point", "assign", "bends", "pieces", "toward"]

SPACING = 12  # pixels between two tracks
MARGIN = 20  # pixels between a wall and the nearest track: room for a bend and an arrow head
RADIUS = 6  # pixels: how wide lines bend

Point = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Pin:
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
class Net:
    """All lines of one meaning that lead through a channel to one destination.

    Attributes:
        target: The box to which they lead.
        kind: What they mean.
        exit_side: The wall at which they leave.
        arrow: Whether they end there, in an arrow head; else they go on to another channel.
        pins: Where they enter.
        exit_y: The height at which they leave, in pixels.
    """

    target: str
    kind: Kind
    exit_side: Side
    arrow: bool = True
    pins: list[Pin] = field(default_factory=list[Pin])
    exit_y: int = 0

    @property
    def ids(self) -> tuple[str, ...]:
        """Every transition of the net, in order."""
        return tuple(i for pin in self.pins for i in pin.ids)

    @property
    def dim(self) -> bool:
        """Whether the whole net stands back."""
        return all(pin.dim for pin in self.pins)

    def walls(self, side: Side) -> list[int]:
        """The heights at which the net touches a wall."""
        ys = [pin.y for pin in self.pins if pin.side == side]
        return [*ys, self.exit_y] if self.exit_side == side else ys

    @property
    def span(self) -> tuple[int, int]:
        """The highest and the lowest point of the track."""
        ys = [*(pin.y for pin in self.pins), self.exit_y]
        return min(ys), max(ys)


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of line that the same transitions run along.

    Attributes:
        points: Its corners, in pixels; every stretch is horizontal or vertical.
        kind: What it means.
        ids: The transitions.
        arrow: Whether it ends in an arrow head.
        dim: Whether it stands back.
    """

    points: tuple[Point, ...]
    kind: Kind
    ids: tuple[str, ...]
    arrow: bool = False
    dim: bool = False


def assign(nets: Sequence[Net]) -> list[int]:
    """The track of each net, from the left: few crossings, then short lines.

    Nets that pass no common height share a track.
    """
    cost = [[_crossings(a, b) if a is not b else 0 for b in nets] for a in nets]

    def added(order: list[int], place: int, net: int) -> int:
        return sum(cost[other][net] for other in order[:place]) + sum(cost[net][other] for other in order[place:])

    def best(order: list[int], net: int) -> int:
        return min(range(len(order) + 1), key=lambda place: added(order, place, net))

    order: list[int] = []
    for net in range(len(nets)):
        order.insert(best(order, net), net)
    for _ in nets:  # each round takes every net out and puts it back where it is best
        was = list(order)
        for net in was:
            order.remove(net)
            order.insert(best(order, net), net)
        if order == was:
            break
    track = [0] * len(nets)
    for place, net in enumerate(order):
        for other in order[:place]:
            if _meet(nets[net], nets[other]):
                track[net] = max(track[net], track[other] + 1)
    return track


def _meet(a: Net, b: Net) -> bool:
    return a.span[0] <= b.span[1] + RADIUS and b.span[0] <= a.span[1] + RADIUS


def _crossings(a: Net, b: Net) -> int:
    """What it costs to have ``a`` left of ``b``: 100 for each crossing, and the way past each other."""
    if not _meet(a, b):
        return 0
    right, left = a.walls("right"), b.walls("left")
    crossed = sum(b.span[0] < y < b.span[1] for y in right) + sum(a.span[0] < y < a.span[1] for y in left)
    return 100 * crossed + len(right) + len(left)


def pieces(net: Net, track: int, left: int, right: int) -> Iterator[Piece]:
    """The lines of a net.

    Args:
        net: The net.
        track: Where its track runs, in pixels from the left.
        left: Where the channel's left wall stands.
        right: Where its right wall stands.
    """
    wall = {"left": left, "right": right}
    out = wall[net.exit_side]
    for down in (True, False):  # what comes from above runs down to the exit, what comes from below runs up
        branch = sorted((p for p in net.pins if (p.y < net.exit_y) is down), key=lambda p: abs(p.y - net.exit_y))
        joined: list[Pin] = []
        while branch:
            pin = branch.pop()  # the farthest first; the others join it one by one
            joined.append(pin)
            join = _joint(pin, net.exit_y)
            yield Piece(((wall[pin.side], pin.y), (track, pin.y), (track, join)), net.kind, pin.ids, dim=pin.dim)
            stop = _joint(branch[-1], net.exit_y) if branch else net.exit_y - _sign(down) * _bend(pin, net.exit_y)
            ids = tuple(i for p in joined for i in p.ids)
            dim = all(p.dim for p in joined)
            if stop != join:
                yield Piece(((track, join), (track, stop)), net.kind, ids, dim=dim)
        if joined:
            last = joined[-1]
            turn = net.exit_y - _sign(down) * _bend(last, net.exit_y)
            toward = track + (RADIUS if out > track else -RADIUS)
            ids = tuple(i for p in joined for i in p.ids)
            dim = all(p.dim for p in joined)
            yield Piece(((track, turn), (track, net.exit_y), (toward, net.exit_y)), net.kind, ids, dim=dim)
    toward = track + (RADIUS if out > track else -RADIUS)
    yield Piece(((toward, net.exit_y), (out, net.exit_y)), net.kind, net.ids, net.arrow, net.dim)


def _sign(down: bool) -> int:
    return 1 if down else -1


def _bend(pin: Pin, exit_y: int) -> int:
    """How wide a line may bend between its pin and the exit: half the way, if that is short."""
    return min(RADIUS, abs(exit_y - pin.y) // 2)


def _joint(pin: Pin, exit_y: int) -> int:
    """Where the bend of a line that enters at a pin is over, and it runs along the track."""
    return pin.y + _sign(pin.y < exit_y) * _bend(pin, exit_y)


def bends(points: Sequence[Point]) -> Iterator[tuple[Point, Point, Point]]:
    """The corners of a line: for each, where its bend starts, the corner itself, and where the bend ends."""
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        radius = min(RADIUS, math.dist(before, corner), math.dist(corner, after))
        yield toward(corner, before, int(radius)), corner, toward(corner, after, int(radius))


def toward(a: Point, b: Point, by: int) -> Point:
    """The point that lies so many pixels from ``a`` towards ``b``, which is straight above or beside it."""
    dx, dy = b[0] - a[0], b[1] - a[1]
    return a[0] + by * ((dx > 0) - (dx < 0)), a[1] + by * ((dy > 0) - (dy < 0))
