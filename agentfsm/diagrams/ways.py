"""Which way each line takes through a picture: straight down, along a channel, or across the middle.

The columns of boxes are numbered 0 (left), 1 (middle) and 2 (right); channel ``n`` lies left of column
``n``, channel 3 at the far right. The choice depends on the graph alone, not on any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agentfsm.diagrams.view import Box, Kind, Lane, Row, View

__all__ = ["COLUMN", "Side", "Way", "ways"]

Side = Literal["left", "right"]

COLUMN: dict[Lane, int] = {"left": 0, "main": 1, "end": 1, "right": 2}
"""The column in which the boxes of a lane stand."""


@dataclass(frozen=True, slots=True)
class Way:
    """The way of the line of one group of rows.

    Attributes:
        source: The box in which the rows stand.
        target: The box to which they lead.
        place: The group's place among those of its box, from 0.
        rows: The rows.
        channels: The channels that the line passes: none (straight down to the next box), one, or
            two with a gap of the middle column between them.
    """

    source: Box
    target: Box
    place: int
    rows: tuple[Row, ...]
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
    def kind(self) -> Kind:
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


def ways(view: View) -> tuple[Way, ...]:
    """The way of every group of rows that is drawn as a line."""
    boxes = {b.name: b for b in view.boxes}
    below = {a.name: b.name for a, b in zip(view.spine, view.spine[1:], strict=False)}
    found: list[Way] = []
    within: list[Way] = []  # lines within the middle: they have a choice
    for box in view.boxes:
        groups = box.groups
        for place, rows in enumerate(groups):
            if not rows[0].drawn:
                continue
            target = boxes[str(rows[0].transition.target)]
            here, there = COLUMN[box.lane], COLUMN[target.lane]
            if here != there:
                nearest = here + (there > here)
                channels = (nearest,) if abs(here - there) == 1 else (nearest, 3 - nearest)
                found.append(Way(box, target, place, rows, channels))
            elif here != 1:
                found.append(Way(box, target, place, rows, (0 if here == 0 else 3,)))
            elif below.get(box.name) == target.name and (rows[0].kind == "happy" or place == len(groups) - 1):
                found.append(Way(box, target, place, rows, ()))
            else:
                within.append(Way(box, target, place, rows, (1,)))
    for way in within:
        found.append(replace(way, channels=(_side(found, way),)))
    return tuple(found)


def _side(found: Sequence[Way], new: Way) -> int:
    """The channel beside the middle for a line within it: where one leads there already, or the emptier one."""
    used = {1: set[tuple[str, str]](), 2: set[tuple[str, str]]()}
    for way in found:
        for channel in way.channels:
            if channel in used:
                used[channel].add((way.target.name, way.kind))
    for channel, lines in used.items():
        if (new.target.name, new.kind) in lines:
            return channel
    return 1 if len(used[1]) <= len(used[2]) else 2
