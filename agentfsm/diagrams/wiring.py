"""From ways to nets: which lines share a track in which channel, and at what heights they come and go."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from agentfsm.diagrams.heights import GRID, Heights
from agentfsm.diagrams.routing import Net, Pin
from agentfsm.diagrams.table import HEAD
from agentfsm.diagrams.ways import COLUMN, Side, Way

__all__ = ["nets"]

_MIDDLE = COLUMN["main"]


def nets(ways: Sequence[Way], heights: Heights) -> list[list[Net]]:
    """The lines of each of the four channels.

    Args:
        ways: The way of each group of rows.
        heights: Where boxes, and lines across the middle, stand.
    """
    channels: list[dict[tuple[str, ...], Net]] = [{}, {}, {}, {}]
    for way in ways:
        if not way.channels:
            continue
        first, last = way.channels[0], way.channels[-1]
        wall = _wall(last, COLUMN[way.target.lane])
        into = channels[last].setdefault((way.target.name, way.kind), Net(way.target.name, way.kind, wall))
        pin = Pin(_wall(first, COLUMN[way.source.lane]), heights.exits[way.source.name, way.place], way.ids, way.dim)
        if first == last:
            into.pins.append(pin)
            continue
        wall = _wall(first, _MIDDLE)
        over = channels[first].setdefault(
            ("over", *way.pair),
            Net(way.target.name, way.kind, wall, arrow=False, exit_y=heights.across[way.pair]),
        )
        over.pins.append(pin)
        onward = Pin(_wall(last, _MIDDLE), over.exit_y, over.ids, over.dim)
        into.pins = [*(p for p in into.pins if (p.side, p.y) != (onward.side, onward.y)), onward]
    found = [list(channel.values()) for channel in channels]
    _set_exits(found, heights)
    return found


def _wall(channel: int, column: int) -> Side:
    """The wall of a channel that a column of boxes makes."""
    return "left" if channel == column + 1 else "right"


def _set_exits(channels: Sequence[Sequence[Net]], heights: Heights) -> None:
    """Spread the lines that arrive at one side of a box over the height of its head."""
    for channel in channels:
        ports: dict[tuple[str, Side], list[Net]] = {}
        for net in (n for n in channel if n.arrow):
            ports.setdefault((net.target, net.exit_side), []).append(net)
        for (target, _), arriving in ports.items():
            top = heights.tops[target]
            places = {1: (2,), 2: (1, 3)}.get(len(arriving), (1, 2, 3))
            for net, place in zip(sorted(arriving, key=lambda n: _turn(n, top)), places, strict=True):
                net.exit_y = top + GRID * place


def _turn(net: Net, top: int) -> tuple[float, ...]:
    """The order of arriving lines, from the top, in which none has to cross another.

    Lines from above come first, then lines from below. Of those from above, the nearest is on top; of
    those from below, the farthest; and lines from the other wall stay outside those from this one.
    """
    ys = [pin.y for pin in net.pins]
    other_wall = any(pin.side != net.exit_side for pin in net.pins)
    if fmean(ys) > top + HEAD / 2:
        return 1, -other_wall, -max(ys)
    return 0, other_wall, -min(ys)
