"""PNG and PDF: the picture of ``layout``, painted by Graphviz, which is told every place and lays out nothing.

Each rectangle and each text is a node that is pinned down, each line an edge whose way is given, in points
of 1/72 inch where the layout says pixels; so the images show what the SVG shows.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from agentfsm.diagrams.box import BASELINE_OFFSET, HEAD_HEIGHT, ROW_HEIGHT, Label
from agentfsm.diagrams.dot import FONT_NAMES, LINE_ATTRIBUTES
from agentfsm.diagrams.edge_routing import Point, bends, point_toward
from agentfsm.diagrams.escaping import escape_xml, quote_dot
from agentfsm.diagrams.layout import ARROW_LENGTH, BAR_WIDTH, LEGEND_LINE_LENGTH, Layout, PlacedBox, compute_layout
from agentfsm.diagrams.style import Palette, Theme, palette_for
from agentfsm.diagrams.view import RowKind, View
from agentfsm.errors import ConfigurationError

__all__ = ["IMAGE_FORMATS", "render_image"]

IMAGE_FORMATS = ("png", "pdf")
"""The forms of image that Graphviz paints."""

DOTS_PER_INCH = 144  # twice the size in pixels, for sharp screens


def render_image(view: View, format_name: str, theme: Theme = "light") -> bytes:
    """An image of a view.

    Args:
        view: What it says.
        format_name: One of ``IMAGE_FORMATS``.
        theme: ``light`` or ``dark``; ``auto`` is light.

    Raises:
        ConfigurationError: Graphviz, or the package that calls it, is not installed.
    """
    try:
        graphviz = importlib.import_module("graphviz")  # only here: importing agentfsm must not need it
    except ImportError as error:
        raise ConfigurationError(f"a {format_name} image needs the package 'graphviz': pip install graphviz") from error
    try:
        source = graphviz.Source(positioned_dot(view, theme), engine="neato")
        return bytes(source.pipe(format=format_name, neato_no_op=2))
    except graphviz.ExecutableNotFound as error:
        raise ConfigurationError(
            f"a {format_name} image needs Graphviz, and its programs are not on the PATH: "
            "install it (https://graphviz.org/download), or write an .svg file, which needs nothing"
        ) from error


def positioned_dot(view: View, theme: Theme = "light") -> str:
    """The picture of a view as DOT for ``neato -n2``."""
    layout, p = compute_layout(view), palette_for(theme)
    canvas = _Canvas(p)
    canvas.rectangle(0, 0, layout.width, layout.height, look="invis")  # as large as the page
    for label in layout.labels:
        canvas.text(label)
    for sample in layout.legend_lines:
        _sample(canvas, sample.x, sample.y, sample.kind)
    for placed in layout.boxes:
        _box(canvas, placed)
    _lines(canvas, layout)
    head = (
        "digraph {",
        f'  graph [outputorder=edgesfirst, pad=0, dpi={DOTS_PER_INCH}, bgcolor="{p.paper}"]',
        f'  node [label="", fixedsize=true, margin=0, fontname="{FONT_NAMES}"]',
        f"  edge [arrowhead=normal, arrowsize={ARROW_LENGTH / 10}]",
    )
    return "\n".join([*head, *canvas.statements, "}"]) + "\n"


class _Canvas:
    """What Graphviz is told: nodes and edges at their places. Its heights count from the bottom."""

    def __init__(self, p: Palette) -> None:
        self.p = p
        self.statements: list[str] = []

    def _add(self, attributes: Sequence[str]) -> str:
        name = f"n{len(self.statements)}"
        self.statements.append(f"  {name} [{', '.join(attributes)}]")
        return name

    def rectangle(
        self,
        x: int,
        y: int,
        width: int,
        height: int,
        *,
        fill: str = "",
        line: str = "",
        pen: float = 1.4,
        look: str = "",
        shape: str = "box",
    ) -> None:
        styles = ",".join(s for s in ("filled" if fill else "", look) if s)
        self._add(
            [
                f'shape={shape}, pos="{x + width / 2:g},{-(y + height / 2):g}"',
                f"width={width / 72:.4f}, height={height / 72:.4f}",
                f'style="{styles}", fillcolor="{fill}", color="{line or fill}", penwidth={pen if line else 0:g}',
            ]
        )

    def text(self, label: Label, x: int = 0, y: int = 0) -> None:
        p = self.p
        plain = p.grey if label.style in ("caption", "note", "number", "tag", "ends") else p.ink
        colour = p.dim if label.dim else p.line[label.kind] if label.kind else plain
        text = escape_xml(label.text)
        wanted = (
            ("S", label.strikethrough),
            ("I", label.style == "otherwise"),
            ("B", label.style in ("title", "name")),
        )
        for tag in (tag for tag, on in wanted if on):
            text = f"<{tag}>{text}</{tag}>"
        left = x + label.x - (label.width if label.align_right else 0)
        cell = f'<TD WIDTH="{label.width}" ALIGN="{"RIGHT" if label.align_right else "LEFT"}">'
        font = f'<FONT POINT-SIZE="{label.size:g}" COLOR="{colour}">{text}</FONT>'
        table = f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="0"><TR>{cell}{font}</TD></TR></TABLE>'
        middle = y + label.y - 0.36 * label.size  # of small letters, over the baseline
        if label.style in ("name", "otherwise"):
            middle += 1  # Graphviz sets bold and slanted letters a little high
        self._add([f'shape=plain, fixedsize=false, pos="{left + label.width / 2:g},{-middle:g}"', f"label=<{table}>"])

    def line(self, points: Sequence[Point], look: str, *, arrow: bool = False, tip: str = "") -> None:
        end = ""
        points = list(points)
        if arrow:
            end = f"e,{points[-1][0]},{-points[-1][1]} "
            points[-1] = point_toward(points[-1], points[-2], ARROW_LENGTH)
        way = [points[0]]
        curve: list[tuple[float, float]] = [points[0]]
        for start, corner, stop in bends(points):
            curve += [way[-1], start, start, _third(start, corner), _third(stop, corner), stop]
            way.append(stop)
        curve += [way[-1], points[-1], points[-1]]
        a, b = (
            self._add([f'shape=point, style=invis, width=0, height=0, pos="{x},{-y}"'])
            for x, y in (points[0], points[-1])
        )
        spline = end + " ".join(f"{x:g},{-y:g}" for x, y in curve)
        self.statements.append(f'  {a} -> {b} [pos="{spline}", {look}, tooltip={quote_dot(tip)}]')


def _third(a: Point, corner: Point) -> tuple[float, float]:
    """Where a curve with one control point has the first of its two, as Graphviz wants it."""
    return a[0] + 2 * (corner[0] - a[0]) / 3, a[1] + 2 * (corner[1] - a[1]) / 3


def _sample(canvas: _Canvas, x: int, y: int, kind: RowKind) -> None:
    colour = canvas.p.line[kind]
    if kind == "stop":
        canvas.rectangle(x + 2, y - 5, 18, 10, line=colour, look="rounded")
    else:
        canvas.line([(x, y), (x + LEGEND_LINE_LENGTH, y)], f'arrowhead=none, color="{colour}", {LINE_ATTRIBUTES[kind]}')


def _box(canvas: _Canvas, placed: PlacedBox) -> None:
    box, table, p = placed.box, placed.table, canvas.p
    x, y, w, h = placed.x, placed.y, placed.width, placed.height
    tint = p.box if box.dim else p.tint[box.kind]
    canvas.rectangle(x, y, w, h, fill=p.box if h > HEAD_HEIGHT else tint, look="rounded")
    if h > HEAD_HEIGHT:
        canvas.rectangle(x, y, w, HEAD_HEIGHT, fill=tint, look="rounded")
        canvas.rectangle(x, y + HEAD_HEIGHT // 2, w, HEAD_HEIGHT // 2, fill=tint)
    back = {"never": p.never, "removed": p.never, "added": p.added, "moved": p.changed, "changed": p.changed}
    for row, labels in table.rows:
        if row.mark:
            canvas.rectangle(x + 1, y + labels[0].y - BASELINE_OFFSET, w - 2, ROW_HEIGHT, fill=back[row.mark])
    for group, side in zip(table.groups, placed.exits, strict=True):
        colour = p.faint if group.dim else p.line[group.kind]
        top, height = y + group.top, ROW_HEIGHT * len(group.rows)
        if side is not None:
            canvas.rectangle(x if side == "left" else x + w - BAR_WIDTH, top + 2, BAR_WIDTH, height - 4, fill=colour)
        if len(group.rows) > 1:
            left = x + group.label.x - 8
            canvas.rectangle(left + 3, top + 3, 1, height - 6, fill=colour)
            for end in (top + 3, top + height - 4):
                canvas.rectangle(left, end, 4, 1, fill=colour)
    for label in (*table.head, *(label for _, labels in table.rows for label in labels), *table.foot):
        canvas.text(label, x, y)
    for group in table.groups:
        canvas.text(group.label, x, y)
    line = p.faint if box.dim else p.line[box.kind]
    look = "rounded,dashed" if box.mark == "removed" else "rounded"
    canvas.rectangle(x, y, w, h, line=line, pen=4 if box.current else 1.4, look=look)


def _lines(canvas: _Canvas, layout: Layout) -> None:
    p = canvas.p
    x, y = layout.start
    canvas.rectangle(x - 5, y - 27, 10, 10, fill=p.ink, shape="circle")
    canvas.line([(x, y - 22), (x, y)], f'color="{p.ink}"', arrow=True)
    stress = any(piece.dim for line in layout.lines for piece in line)
    for line in sorted(layout.lines, key=lambda line: not all(piece.dim for piece in line)):
        for piece in line:
            canvas.line(piece.points, f'arrowhead=none, color="{p.paper}", penwidth=7')
        for piece in sorted(line, key=lambda piece: not piece.dim):
            colour = p.faint if piece.dim else p.line[piece.kind]
            look = f'color="{colour}", {LINE_ATTRIBUTES[piece.kind]}' + (
                ", penwidth=3.4" if stress and not piece.dim else ""
            )
            canvas.line(piece.points, look, arrow=piece.arrow, tip=", ".join(piece.ids))
