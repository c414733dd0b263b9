"""The content of one state's box: text widths, columns, labels and groups of rows.

Text is measured without a font, from a table of widths that is never too narrow for the fonts of ``FONT_STACK``.
All boxes in one column of the page share their column widths, so that rows line up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from agentfsm.diagrams.view import Box, RowKind, TableRow

FONT_STACK = "Inter, Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
"""The fonts of the pictures, best first."""

# Advance widths of the ASCII characters from the space on, in hundredths of the font size: for each the
# widest of Inter, Liberation Sans (the widths of Helvetica and Arial) and DejaVu Sans.
_ASCII_WIDTHS = (
    32, 41, 46, 84, 64, 95, 78, 28, 39, 39, 50, 84, 32, 46, 32, 36, 64, 64, 64, 64, 65, 64, 64, 64, 64, 64, 34, 34,
    84, 84, 84, 56, 102, 69, 69, 73, 77, 67, 62, 78, 76, 30, 55, 67, 57, 89, 76, 79, 67, 79, 73, 67, 65, 75, 69, 100,
    69, 67, 69, 39, 36, 39, 84, 56, 50, 62, 64, 56, 64, 62, 37, 64, 64, 28, 28, 58, 28, 98, 64, 62, 64, 64, 42, 53,
    40, 64, 60, 82, 60, 60, 55, 64, 34, 64, 84,
)  # fmt: skip
_DEFAULT_WIDTH = 100  # arrows and letters with diacritics are no wider than the font size
_FULL_WIDTH = 110  # East Asian characters and pictographs
BOLD_RATIO = 1.14  # the widest ratio of bold to regular among the three


@lru_cache(maxsize=4096)
def text_width(text: str, size: float, *, bold: bool = False) -> int:
    """The width that a text needs.

    Returns:
        A width in whole pixels that the text does not exceed in any font of ``FONT_STACK``.
    """
    total = sum(_advance_width(ord(char)) for char in text)
    return math.ceil(total * size * (BOLD_RATIO if bold else 1) / 100)


def _advance_width(code: int) -> int:
    if 32 <= code < 127:
        return _ASCII_WIDTHS[code - 32]
    return _DEFAULT_WIDTH if code < 0x1100 or 0x2000 <= code < 0x2600 else _FULL_WIDTH


def truncate(text: str, size: float, max_width: int) -> str:
    """The text, truncated with an ellipsis if it would be wider than ``max_width`` pixels."""
    if text_width(text, size) <= max_width:
        return text
    while text and text_width(text + "…", size) > max_width:
        text = text[:-1]
    return text.rstrip() + "…"


def wrap_words(words: list[str], size: float, max_width: int) -> list[str]:
    """Words wrapped into lines no wider than ``max_width`` pixels, unless a single word is wider."""
    lines: list[str] = []
    for word in words:
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size) <= max_width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


HEAD_HEIGHT = 32  # pixels: the height of a box's head
ROW_HEIGHT = 16  # pixels: the height of a row
ROW_PADDING = 8  # pixels above the first and below the last row; puts the middle of each row on the grid
BASELINE_OFFSET = 12  # pixels from a row's top to its baseline
TEXT_INDENT = 12  # pixels from a box's side to its text, with room for the bar where a line leaves
COLUMN_GAP = 10  # pixels between two columns of a box
BRACKET_WIDTH = 6  # pixels for the bracket around rows with one target
MAX_NOTE_WIDTH = 240  # pixels: a longer note is truncated (its tooltip is complete)

TextStyle = Literal["title", "caption", "name", "note", "number", "guard", "otherwise", "target", "tag", "ends"]
FONT_SIZES: dict[TextStyle, float] = {
    "title": 16, "caption": 11, "name": 14, "note": 11, "number": 10,
    "guard": 12, "otherwise": 12, "target": 12, "tag": 10, "ends": 11,
}  # fmt: skip
_BOLD_STYLES: frozenset[TextStyle] = frozenset({"title", "name"})


@dataclass(frozen=True, slots=True)
class Label:
    """A text with its position.

    Attributes:
        x: The left edge, or the right one if ``align_right``, in pixels.
        y: The baseline, in pixels.
        text: The text.
        style: Its role in the picture.
        kind: The kind that decides its color, if any.
        align_right: Whether ``x`` is the right edge.
        strikethrough: Whether it is struck through.
        dim: Whether it is greyed out.
    """

    x: int
    y: int
    text: str
    style: TextStyle
    kind: RowKind | None = None
    align_right: bool = False
    strikethrough: bool = False
    dim: bool = False

    @property
    def size(self) -> float:
        """The font size in pixels."""
        return FONT_SIZES[self.style]

    @property
    def width(self) -> int:
        """The width that it can need, in pixels."""
        return text_width(self.text, self.size, bold=self.style in _BOLD_STYLES)


@dataclass(frozen=True, slots=True)
class ColumnPositions:
    """The column positions, in pixels, that the boxes in one column of the page share.

    Attributes:
        number: The right edge of the row numbers.
        guard: The left edge of the guards.
        target: The left edge of the targets.
        tag: The right edge of the tags that overlays add.
        width: The width of a box.
    """

    number: int
    guard: int
    target: int
    tag: int
    width: int


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Adjacent rows with one target, which is shown once.

    Attributes:
        rows: The rows.
        top: The upper edge of the first, in pixels from the box's top.
        y: The middle, where their line leaves, in pixels from the box's top.
        label: The target.
    """

    rows: tuple[TableRow, ...]
    top: int
    y: int
    label: Label

    @property
    def kind(self) -> RowKind:
        """The kind of the rows."""
        return self.rows[0].kind

    @property
    def dim(self) -> bool:
        """Whether all of the rows are greyed out."""
        return all(r.dim for r in self.rows)


@dataclass(frozen=True, slots=True)
class BoxContent:
    """A box's content, positioned relative to its upper left corner.

    Attributes:
        head: The name and the note.
        rows: Each row with its labels.
        groups: The rows by target.
        foot: Text below the rows.
        height: The height of the box, in pixels.
    """

    head: tuple[Label, ...]
    rows: tuple[tuple[TableRow, tuple[Label, ...]], ...]
    groups: tuple[RowGroup, ...]
    foot: tuple[Label, ...]
    height: int


class EndingText(NamedTuple):
    """One way in which runs end in a final state.

    Attributes:
        kind: Its kind.
        words: The ending and a colon, and the guards that lead to it.
        dim: Whether it is greyed out.
    """

    kind: RowKind
    words: tuple[str, ...]
    dim: bool = False


def measure_columns(boxes: Sequence[Box]) -> ColumnPositions:
    """The column positions that boxes need to share."""
    rows = [r for b in boxes for r in b.rows]
    number = TEXT_INDENT + max((text_width(r.label, FONT_SIZES["number"]) for r in rows), default=0)
    guard = number + 8
    target = (
        guard
        + max((text_width(r.transition.name, FONT_SIZES["guard"]) for r in rows), default=0)
        + COLUMN_GAP
        + BRACKET_WIDTH
    )
    end = target + max((text_width(_target_text(r), FONT_SIZES["target"]) for r in rows), default=0)
    tags = max((text_width(r.tag, FONT_SIZES["tag"]) for r in rows), default=0)
    tag = end + (COLUMN_GAP + tags if tags else 0)
    heads = [_name_width(b) + (COLUMN_GAP + _note_width(b) if b.note else 0) + 2 * TEXT_INDENT for b in boxes]
    total = max([tag + TEXT_INDENT, *heads, 120])
    total += total % 2  # even, so that the middle is a whole pixel
    return ColumnPositions(number, guard, target, total - TEXT_INDENT, total)


def _target_text(row: TableRow) -> str:
    return f"→ {row.transition.target}"


def _name_width(box: Box) -> int:
    return text_width(box.name, FONT_SIZES["name"], bold=True)


def _note_width(box: Box) -> int:
    return text_width(truncate(box.note, FONT_SIZES["note"], MAX_NOTE_WIDTH), FONT_SIZES["note"])


def lay_out_box(box: Box, columns: ColumnPositions, ends: Sequence[EndingText]) -> BoxContent:
    """Compute the positions of a box's content.

    Args:
        box: The box.
        columns: The column positions.
        ends: For a final state, each ending with the guards that lead to it, listed below its name.
    """
    removed = box.mark == "removed"
    head = [Label(TEXT_INDENT, 21, box.name, "name", box.kind, strikethrough=removed, dim=box.dim)]
    if box.note:
        note = truncate(box.note, FONT_SIZES["note"], MAX_NOTE_WIDTH)
        head.append(Label(columns.width - TEXT_INDENT, 21, note, "note", align_right=True, dim=box.dim))
    rows: list[tuple[TableRow, tuple[Label, ...]]] = []
    groups: list[RowGroup] = []
    for members in box.groups:
        top = HEAD_HEIGHT + ROW_PADDING + ROW_HEIGHT * len(rows)
        middle = top + ROW_HEIGHT * len(members) // 2
        label = Label(
            columns.target, middle + 4, _target_text(members[0]), "target", members[0].kind,
            strikethrough=members[0].mark == "removed", dim=all(r.dim for r in members),
        )  # fmt: skip
        groups.append(RowGroup(members, top, middle, label))
        for row in members:
            rows.append(
                (row, _row_labels(row, columns, HEAD_HEIGHT + ROW_PADDING + ROW_HEIGHT * len(rows) + BASELINE_OFFSET))
            )
    foot: list[Label] = []
    for kind, (ending, *names), dim in ends:
        words = [ending, *(f"{name}," for name in names[:-1]), *names[-1:]]
        for line in wrap_words(words, FONT_SIZES["ends"], columns.width - 2 * TEXT_INDENT):
            y = HEAD_HEIGHT + ROW_PADDING + ROW_HEIGHT * (len(rows) + len(foot)) + BASELINE_OFFSET
            foot.append(Label(TEXT_INDENT, y, line, "ends", kind, dim=dim or box.dim))
    lines = len(rows) + len(foot)
    height = HEAD_HEIGHT + ROW_PADDING + ROW_HEIGHT * lines + ROW_PADDING if lines else HEAD_HEIGHT
    return BoxContent(tuple(head), tuple(rows), tuple(groups), tuple(foot), height)


def _row_labels(row: TableRow, columns: ColumnPositions, y: int) -> tuple[Label, ...]:
    struck = row.mark == "removed"
    style: TextStyle = "otherwise" if row.transition.guard is None else "guard"
    labels = [
        Label(columns.number, y, row.label, "number", align_right=True, dim=row.dim),
        Label(columns.guard, y, row.transition.name, style, strikethrough=struck, dim=row.dim),
    ]
    if row.tag:
        labels.append(Label(columns.tag, y, row.tag, "tag", align_right=True, dim=row.dim))
    return tuple(labels)
