"""How a state looks as a small table: columns, labels and groups of rows, placed within its box.

All boxes of one column of the page share their widths, so that rows stand under each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agentfsm.diagrams.metrics import fit, width, wrap
from agentfsm.diagrams.view import Box, Kind, Row

__all__ = ["BASELINE", "HEAD", "ROW", "SIZES", "Columns", "Group", "Label", "Style", "Table", "measure", "tabulate"]

HEAD = 32  # pixels: the height of a box's head
ROW = 16  # pixels: the height of a row
PAD = 8  # pixels above the first and below the last row; with it, middles of rows stand on the grid
BASELINE = 12  # pixels from a row's top to its baseline
INDENT = 12  # pixels from a box's side to its text; a bar that marks a group's exit stands within
GAP = 10  # pixels between two columns of a box
BRACKET = 6  # pixels for the bracket around rows of one destination
NOTE_ROOM = 240  # pixels: a longer note is cut (its tooltip has it all)

Style = Literal["title", "caption", "name", "note", "number", "guard", "otherwise", "target", "tag", "ends"]
SIZES: dict[Style, float] = {
    "title": 16, "caption": 11, "name": 14, "note": 11, "number": 10,
    "guard": 12, "otherwise": 12, "target": 12, "tag": 10, "ends": 11,
}  # fmt: skip
_BOLD: frozenset[Style] = frozenset({"title", "name"})


@dataclass(frozen=True, slots=True)
class Label:
    """A text and its place.

    Attributes:
        x: Its left edge, or its right one where it ends there, in pixels.
        y: Its baseline, in pixels.
        text: The text.
        style: Its part in the picture.
        kind: What it means, where its colour says so.
        end: Whether ``x`` is its right edge.
        struck: Whether it is struck through.
        dim: Whether it stands back.
    """

    x: int
    y: int
    text: str
    style: Style
    kind: Kind | None = None
    end: bool = False
    struck: bool = False
    dim: bool = False

    @property
    def size(self) -> float:
        """The font's size in pixels."""
        return SIZES[self.style]

    @property
    def width(self) -> int:
        """The room that it may need, in pixels."""
        return width(self.text, self.size, bold=self.style in _BOLD)

    def moved(self, x: int, y: int) -> Label:
        """The label, so many pixels to the right and down."""
        return replace(self, x=self.x + x, y=self.y + y)


@dataclass(frozen=True, slots=True)
class Columns:
    """The widths, in pixels, that the boxes of one column of the page share.

    Attributes:
        number: The right edge of the numbers.
        guard: The left edge of the guards.
        target: The left edge of the destinations.
        tag: The right edge of what overlays add.
        width: The width of a box.
    """

    number: int
    guard: int
    target: int
    tag: int
    width: int


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring rows with one destination, which is written once.

    Attributes:
        rows: The rows.
        top: The upper edge of the first, in pixels from the box's top.
        y: The middle, where its line leaves, in pixels from the box's top.
        label: The destination.
    """

    rows: tuple[Row, ...]
    top: int
    y: int
    label: Label

    @property
    def kind(self) -> Kind:
        """What it means."""
        return self.rows[0].kind

    @property
    def dim(self) -> bool:
        """Whether all of it stands back."""
        return all(r.dim for r in self.rows)


@dataclass(frozen=True, slots=True)
class Table:
    """A box's content, placed from its upper left corner.

    Attributes:
        head: Name and note.
        rows: Each row with its labels.
        groups: The rows by destination.
        foot: Text below the rows.
        height: The height of the box, in pixels.
    """

    head: tuple[Label, ...]
    rows: tuple[tuple[Row, tuple[Label, ...]], ...]
    groups: tuple[Group, ...]
    foot: tuple[Label, ...]
    height: int


def measure(boxes: Sequence[Box]) -> Columns:
    """The widths that some boxes need to share."""
    rows = [r for b in boxes for r in b.rows]
    number = INDENT + max((width(r.label, SIZES["number"]) for r in rows), default=0)
    guard = number + 8
    target = guard + max((width(r.transition.name, SIZES["guard"]) for r in rows), default=0) + GAP + BRACKET
    end = target + max((width(_target(r), SIZES["target"]) for r in rows), default=0)
    tags = max((width(r.tag, SIZES["tag"]) for r in rows), default=0)
    tag = end + (GAP + tags if tags else 0)
    heads = [_name_width(b) + (GAP + _note_width(b) if b.note else 0) + 2 * INDENT for b in boxes]
    total = max([tag + INDENT, *heads, 120])
    total += total % 2  # so that the middle is a whole pixel
    return Columns(number, guard, target, total - INDENT, total)


def _target(row: Row) -> str:
    return f"→ {row.transition.target}"


def _name_width(box: Box) -> int:
    return width(box.name, SIZES["name"], bold=True)


def _note_width(box: Box) -> int:
    return width(fit(box.note, SIZES["note"], NOTE_ROOM), SIZES["note"])


def tabulate(box: Box, columns: Columns, ends: Mapping[Kind, Sequence[str]]) -> Table:
    """Place a box's content.

    Args:
        box: The box.
        columns: The widths to keep.
        ends: For a state in which runs end: the ways to it by meaning, listed below its name.
    """
    gone = box.mark == "removed"
    head = [Label(INDENT, 21, box.name, "name", box.kind, struck=gone, dim=box.dim)]
    if box.note:
        note = fit(box.note, SIZES["note"], NOTE_ROOM)
        head.append(Label(columns.width - INDENT, 21, note, "note", end=True, dim=box.dim))
    rows: list[tuple[Row, tuple[Label, ...]]] = []
    groups: list[Group] = []
    for members in box.groups:
        top = HEAD + PAD + ROW * len(rows)
        middle = top + ROW * len(members) // 2
        label = Label(
            columns.target, middle + 4, _target(members[0]), "target", members[0].kind,
            struck=members[0].mark == "removed", dim=all(r.dim for r in members),
        )  # fmt: skip
        groups.append(Group(members, top, middle, label))
        for row in members:
            rows.append((row, _labels(row, columns, HEAD + PAD + ROW * len(rows) + BASELINE)))
    foot: list[Label] = []
    for kind, names in ends.items():
        for line in wrap(
            [*(f"{name}," for name in names[:-1]), *names[-1:]], SIZES["ends"], columns.width - 2 * INDENT
        ):
            y = HEAD + PAD + ROW * (len(rows) + len(foot)) + BASELINE
            foot.append(Label(INDENT, y, line, "ends", kind, dim=box.dim))
    lines = len(rows) + len(foot)
    height = HEAD + PAD + ROW * lines + PAD if lines else HEAD
    return Table(tuple(head), tuple(rows), tuple(groups), tuple(foot), height)


def _labels(row: Row, columns: Columns, y: int) -> tuple[Label, ...]:
    struck = row.mark == "removed"
    style: Style = "otherwise" if row.transition.guard is None else "guard"
    labels = [
        Label(columns.number, y, row.label, "number", end=True, dim=row.dim),
        Label(columns.guard, y, row.transition.name, style, struck=struck, dim=row.dim),
    ]
    if row.tag:
        labels.append(Label(columns.tag, y, row.tag, "tag", end=True, dim=row.dim))
    return tuple(labels)
