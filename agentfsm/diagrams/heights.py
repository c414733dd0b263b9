"""How high each box of a picture stands, and where lines cross the middle between two boxes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentfsm.diagrams.table import HEAD, Table
from agentfsm.diagrams.view import View
from agentfsm.diagrams.ways import Way

__all__ = ["GRID", "TOP", "Heights", "stand"]

GRID = 8  # pixels; boxes of the middle stand on the grid, those at the sides half a step lower
TOP = 120  # pixels to the first box of the middle: title, legend and start mark stand above
SPACE = 32  # pixels between two boxes of a column


@dataclass(frozen=True, slots=True)
class Heights:
    """Heights in pixels from the top.

    Attributes:
        tops: The upper edge of each box, by its name.
        exits: Where the line of each group of rows leaves, by box and place.
        across: Where lines from one side to the other cross the middle, by source and target.
    """

    tops: Mapping[str, int]
    exits: Mapping[tuple[str, int], int]
    across: Mapping[tuple[str, str], int]


def stand(view: View, tables: Mapping[str, Table], ways: Sequence[Way]) -> Heights:
    """Give every box and every line across the middle its height.

    Gaps grow with the lines that cross in them, and lines choose the gap with the shortest way: so
    boxes are placed, lines choose, and boxes are placed again.
    """
    tops = _tops(view, tables, ways, {})
    gaps = {w.pair: _gap(view, tables, tops, w) for w in ways if len(w.channels) > 1}
    tops = _tops(view, tables, ways, Counter(gaps.values()))
    across: dict[tuple[str, str], int] = {}
    used = Counter[int]()
    for pair, gap in gaps.items():
        above = view.spine[gap].name
        across[pair] = tops[above] + tables[above].height + SPACE // 2 + GRID * used[gap]
        used[gap] += 1
    exits = {(name, i): tops[name] + g.y for name, table in tables.items() for i, g in enumerate(table.groups)}
    return Heights(tops, exits, across)


def _tops(view: View, tables: Mapping[str, Table], ways: Sequence[Way], crossing: Mapping[int, int]) -> dict[str, int]:
    """The upper edges of all boxes, with room for the lines that cross below each box of the middle."""
    tops: dict[str, int] = {}
    y = TOP
    for place, box in enumerate(view.spine):
        tops[box.name] = y
        y += tables[box.name].height + SPACE + GRID * max(0, crossing.get(place, 0) - 1)
    floor = y - SPACE
    heads = {name: top + HEAD // 2 for name, top in tops.items()}
    exits = {(name, i): tops[name] + g.y for name in tops for i, g in enumerate(tables[name].groups)}
    for column in (view.lane("left"), view.lane("right")):
        pulls = {b.name: _pull(b.name, ways, exits, heads, {}) for b in column}
        pulls = {name: _pull(name, ways, exits, heads, pulls) for name in pulls}
        tops |= _beside({name: tables[name].height for name in pulls}, pulls, floor)
    return tops


def _pull(
    box: str,
    ways: Sequence[Way],
    exits: Mapping[tuple[str, int], int],
    heads: Mapping[str, int],
    beside: Mapping[str, int],
) -> int:
    """The mean height of what a box of a side is joined with: the middle, and neighbours of its side."""
    ys: list[int] = []
    for way in ways:
        source, target = way.pair
        y = None
        if target == box != source:
            y = exits.get((source, way.place), beside.get(source))
        elif source == box != target:
            y = heads.get(target, beside.get(target))
        if y is not None:
            ys.append(y)
    return sum(ys) // len(ys) if ys else TOP


def _beside(heights: Mapping[str, int], pulls: Mapping[str, int], floor: int) -> dict[str, int]:
    """The boxes of a side stand as near as they can to where they are pulled, without overlap."""
    tops = {name: pulls[name] - height // 2 for name, height in heights.items()}
    order = sorted(tops, key=tops.__getitem__)
    for name in reversed(order):  # up from the floor
        tops[name] = min(tops[name], floor - heights[name])
        floor = tops[name] - SPACE
    y = TOP
    for name in order:  # and down from the top
        tops[name] = max(y, tops[name]) // GRID * GRID + GRID // 2
        y = tops[name] + heights[name] + SPACE
    return tops


def _gap(view: View, tables: Mapping[str, Table], tops: Mapping[str, int], way: Way) -> int:
    """The gap below a box of the middle through which a line from side to side has the shortest way."""
    start = tops[way.source.name] + tables[way.source.name].groups[way.place].y
    end = tops[way.target.name] + HEAD // 2

    def length(gap: int) -> int:
        above = view.spine[gap].name
        y = tops[above] + tables[above].height + SPACE // 2
        return abs(start - y) + abs(y - end)

    return min(range(len(view.spine) - 1), key=length)
