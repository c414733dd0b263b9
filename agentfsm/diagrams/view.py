"""What a picture of a graph says, before anything has its place on the page: boxes with numbered rows.

Every form that is looked at is written from a ``View``; overlays turn one view into another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from agentfsm.machine.graph import Graph, StateSpec, Transition

__all__ = ["Box", "Lane", "RowKind", "RowMark", "TableRow", "View", "build_view"]

RowKind = Literal["happy", "recover", "wait", "done", "stop"]
"""What an edge, or a state, means; colour, weight and dash follow from it."""

Lane = Literal["main", "left", "right", "end"]
"""Where a box stands: in the middle, on the side of recovery, on the side of waiting, or at the bottom."""

RowMark = Literal["", "never", "added", "removed", "moved", "changed"]
"""What an overlay says of a row."""

DECLARED_DONE = "declared_done"
"""The guard of a run that says itself that it is done: beside ``otherwise``, the good way to end."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One transition as a picture shows it.

    Attributes:
        transition: The row of the graph.
        order: Its place among the rows of its state, from 1.
        label: The number to show; both numbers (``3→5``) where it has moved.
        kind: What it means.
        mark: What an overlay says of it.
        tag: What an overlay adds in words: a count, "never", "new".
        dim: Whether it stands back.
    """

    transition: Transition
    order: int
    label: str
    kind: RowKind
    mark: RowMark = ""
    tag: str = ""
    dim: bool = False

    @property
    def has_line(self) -> bool:
        """Whether it is drawn as a line. Bad ends, and rows that are gone, are text alone."""
        return self.kind != "stop" and self.mark != "removed"


@dataclass(frozen=True, slots=True)
class Box:
    """One state as a picture shows it: a small decision table.

    Attributes:
        spec: The declared state.
        kind: What it means.
        lane: Where it stands.
        rows: Its transitions, in the order in which they are asked.
        mark: What an overlay says of it.
        current: Whether a run stands there.
        dim: Whether it stands back.
    """

    spec: StateSpec
    kind: RowKind
    lane: Lane
    rows: tuple[TableRow, ...]
    mark: RowMark = ""
    current: bool = False
    dim: bool = False

    @property
    def name(self) -> str:
        """The state's name, as a plain string."""
        return str(self.spec.name)

    @property
    def note(self) -> str:
        """What the state does, on one line."""
        return " ".join(self.spec.note.split())

    @property
    def groups(self) -> tuple[tuple[TableRow, ...], ...]:
        """Neighbouring rows with one destination and one meaning, together."""
        same = groupby(self.rows, lambda r: (r.transition.target, r.kind, r.mark == "removed"))
        return tuple(tuple(rows) for _, rows in same)


@dataclass(frozen=True, slots=True)
class View:
    """All that a picture says.

    Attributes:
        graph: The graph.
        boxes: Its states: the middle from the top down, left, right, the ends.
        caption: A line about the whole.
        overlaid: Whether an overlay had its say.
    """

    graph: Graph
    boxes: tuple[Box, ...]
    caption: str
    overlaid: bool = False

    @property
    def title(self) -> str:
        """The graph's name, on one line."""
        return " ".join(self.graph.name.split())

    def lane(self, *lanes: Lane) -> tuple[Box, ...]:
        """The boxes of some lanes, in order."""
        return tuple(b for b in self.boxes if b.lane in lanes)

    @property
    def spine(self) -> tuple[Box, ...]:
        """The boxes down the middle, the ends below the others."""
        return self.lane("main", "end")


def build_view(graph: Graph) -> View:
    """A graph as a view, without any overlay."""
    lanes: dict[str, Lane] = {s.name: lane_of(s, initial=s.name == graph.initial) for s in graph.states}
    boxes = [box_of(spec, lanes[spec.name], view_rows(graph, spec.name, lanes)) for spec in graph.states]
    return View(
        graph=graph,
        boxes=order_boxes(boxes),
        caption=f"{_counted(len(graph.states), 'state')}, {_counted(len(graph.transitions), 'transition')}",
    )


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def lane_of(spec: StateSpec, *, initial: bool = False) -> Lane:
    """Where a state stands. A run starts at the top and ends at the bottom, whatever was asked for."""
    if spec.final and not initial:
        return "end"
    if initial or spec.lane not in ("left", "right"):
        return "main"
    return "left" if spec.lane == "left" else "right"


def box_of(spec: StateSpec, lane: Lane, rows: tuple[TableRow, ...]) -> Box:
    """A state and its rows as a box."""
    kinds: dict[Lane, RowKind] = {"main": "happy", "left": "recover", "right": "wait", "end": "stop"}
    return Box(spec, "stop" if spec.final else kinds[lane], lane, rows)


def view_rows(graph: Graph, state: str, lanes: dict[str, Lane]) -> tuple[TableRow, ...]:
    """The rows of a state of a graph, numbered."""
    return tuple(
        TableRow(transition, order, str(order), _row_kind(graph, transition, lanes))
        for order, transition in enumerate(graph.rows(state), 1)
    )


def _row_kind(graph: Graph, transition: Transition, lanes: dict[str, Lane]) -> RowKind:
    ends = {lanes[transition.source], lanes[transition.target]}
    if graph.spec(transition.target).final:
        good = transition.guard is None and lanes[transition.source] == "main"
        return "done" if good or transition.name == DECLARED_DONE else "stop"
    if "right" in ends:
        return "wait"
    return "recover" if "left" in ends else "happy"


def order_boxes(boxes: list[Box]) -> tuple[Box, ...]:
    """Boxes as a picture wants them: the middle in the order of flow, then left, right and the ends.

    A state that a user adds is declared behind the others; the order of flow puts it where a run comes
    by: every state of the middle stands behind those that lead to it, cycles aside (a depth-first
    search, its last finished state first).
    """
    main = {b.name: b for b in boxes if b.lane == "main"}
    seen: set[str] = set()
    flow: list[Box] = []
    for box in main.values():
        finished: list[Box] = []
        path = [(box, _successor_names(box))] if box.name not in seen else []
        seen.add(box.name)
        while path:
            here, onward = path[-1]
            for name in onward:
                if name in main and name not in seen:
                    seen.add(name)
                    path.append((main[name], _successor_names(main[name])))
                    break
            else:
                finished.append(here)
                path.pop()
        flow += reversed(finished)
    lanes: tuple[Lane, ...] = ("left", "right", "end")
    return (*flow, *(b for lane in lanes for b in boxes if b.lane == lane))


def _successor_names(box: Box) -> Iterator[str]:
    """Where a box leads, the last row first: the first then stands nearest below it."""
    return iter([str(r.transition.target) for r in reversed(box.rows)])
