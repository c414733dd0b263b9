"""The content of a diagram, before layout: boxes with numbered rows.

Every format is rendered from a ``View``; an overlay turns one view into another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from agentfsm.machine.graph import Graph, StateSpec, Transition

RowKind = Literal["happy", "recover", "wait", "resume", "done", "stop"]
"""The kind of an edge or a state, which decides its color, width and dashes. No state is of the kind ``resume``."""

Lane = Literal["main", "left", "right", "end"]
"""The position of a box: middle column, left (recovery), right (waiting), or bottom (final states)."""

LayoutName = Literal["wide", "vertical"]
"""``wide`` has recovery and waiting beside the middle column; ``vertical`` is one column, for narrow screens."""

RowMark = Literal["", "never", "added", "removed", "moved", "changed", "often"]
"""How an overlay marks a row or a state."""

LegendKey = Literal["never", "added", "removed", "moved", "changed", "often", "dim", "current"]
"""What an overlay can show that needs an explanation: a mark, what is greyed out, and the thick frame."""

LEGEND_TEXTS: dict[LegendKey, str] = {
    "never": "never taken",
    "added": "new",
    "removed": "gone",
    "moved": "moved",
    "changed": "leads elsewhere",
    "often": "the longer, the more often",
    "dim": "not reached",
    "current": "the run is here",
}
"""What each of them means, unless the overlay says something else."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One transition as a diagram shows it.

    Attributes:
        transition: The row of the graph.
        order: Its place among the rows of its state, from 1.
        label: The number to show; both numbers (``3→5``) if it has moved.
        kind: Its kind.
        mark: How an overlay marks it.
        tag: Text that an overlay adds: a count, "never", "new".
        dim: Whether it is greyed out.
        share: How much of the row its mark fills, from 0 to 1.
    """

    transition: Transition
    order: int
    label: str
    kind: RowKind
    mark: RowMark = ""
    tag: str = ""
    dim: bool = False
    share: float = 1.0

    @property
    def has_line(self) -> bool:
        """Whether it is drawn as a line. Bad endings and removed rows are text only."""
        return self.kind != "stop" and self.mark != "removed"


@dataclass(frozen=True, slots=True)
class Box:
    """One state as a diagram shows it: a small decision table.

    Attributes:
        spec: The declared state.
        kind: Its kind.
        lane: Its position.
        rows: Its transitions, in the order in which they are evaluated.
        mark: How an overlay marks it.
        current: Whether it is the current state of a run.
        dim: Whether it is greyed out.
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
        """Adjacent rows with the same target and kind, grouped."""
        groups = groupby(self.rows, lambda r: (r.transition.target, r.kind, r.mark == "removed"))
        return tuple(tuple(rows) for _, rows in groups)


@dataclass(frozen=True, slots=True)
class View:
    """The content of a diagram.

    Attributes:
        graph: The graph.
        boxes: Its states: the middle column from the top down, then left, right, and final states.
        caption: One line about the graph or the overlay.
        overlaid: Whether an overlay was applied.
        layout: How a picture places the boxes.
        meanings: What the marks of the overlay mean, where it is not what ``LEGEND_TEXTS`` says.
    """

    graph: Graph
    boxes: tuple[Box, ...]
    caption: str
    overlaid: bool = False
    layout: LayoutName = "wide"
    meanings: Mapping[LegendKey, str] = field(default_factory=dict[LegendKey, str])

    @property
    def title(self) -> str:
        """The graph's name, on one line."""
        return " ".join(self.graph.name.split())

    @property
    def legend(self) -> tuple[tuple[LegendKey, str], ...]:
        """What the marks in the picture mean: those that are there, in the order of ``LEGEND_TEXTS``."""
        shown: list[TableRow | Box] = [*self.boxes, *(r for b in self.boxes for r in b.rows)]
        used: set[str] = {each.mark for each in shown}
        used |= {"dim"} if any(each.dim for each in shown) else set()
        used |= {"current"} if any(b.current for b in self.boxes) else set()
        return tuple((key, self.meanings.get(key, text)) for key, text in LEGEND_TEXTS.items() if key in used)

    def lane(self, *lanes: Lane) -> tuple[Box, ...]:
        """The boxes of the given lanes, in order."""
        return tuple(b for b in self.boxes if b.lane in lanes)

    @property
    def spine(self) -> tuple[Box, ...]:
        """The boxes of the middle column, final states below the others."""
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
    """The lane of a state. The initial state is in the middle and final states at the bottom, whatever they declare."""
    if spec.final and not initial:
        return "end"
    if initial or spec.lane not in ("left", "right"):
        return "main"
    return "left" if spec.lane == "left" else "right"


def box_of(spec: StateSpec, lane: Lane, rows: tuple[TableRow, ...]) -> Box:
    """A state and its rows as a box."""
    kind: RowKind = "recover" if lane == "left" else "happy"
    return Box(spec, "stop" if spec.final else "wait" if spec.waits else kind, lane, rows)


def view_rows(graph: Graph, state: str, lanes: dict[str, Lane]) -> tuple[TableRow, ...]:
    """The rows of a state of a graph, numbered."""
    return tuple(
        TableRow(transition, order, str(order), _row_kind(graph, transition, lanes))
        for order, transition in enumerate(graph.rows(state), 1)
    )


def _row_kind(graph: Graph, transition: Transition, lanes: dict[str, Lane]) -> RowKind:
    source, target = graph.spec(transition.source), graph.spec(transition.target)
    if target.final:
        return "done" if transition.ends == "completed" else "stop"
    if target.waits:
        return "wait"
    if source.waits:
        return "resume"
    return "recover" if "left" in {lanes[source.name], lanes[target.name]} else "happy"


def order_boxes(boxes: list[Box]) -> tuple[Box, ...]:
    """Boxes in drawing order: the middle column in the order of flow, then left, right and final states.

    States that a user adds are declared after the others. The order of flow puts each state after those that lead
    to it, apart from cycles: the reverse postorder of a depth-first search.
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
    """The targets of a box, the last row first, so that the target of the first row ends up nearest below it."""
    return iter([str(r.transition.target) for r in reversed(box.rows)])
