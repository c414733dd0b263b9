"""DOT for Graphviz, and the images that Graphviz renders from it.

Each state is an HTML table of numbered rows, with one edge for all rows with the same target. Writing DOT needs
nothing installed. Graphviz computes the layout, which differs between its versions; ``svg`` writes a picture
that is the same everywhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from agentfsm.diagrams.box import FONT_SIZES, EndingText, wrap_words
from agentfsm.diagrams.edge_routing import COLUMN, Route, Side, choose_routes
from agentfsm.diagrams.layout import KIND_TEXTS, endings
from agentfsm.diagrams.style import Palette, Theme, escape_xml, palette_for
from agentfsm.diagrams.view import Box, LegendKey, RowKind, TableRow, View
from agentfsm.errors import ConfigurationError

FONT_NAMES = "Inter,Helvetica,Arial,sans-serif"

LINE_ATTRIBUTES: dict[RowKind, str] = {
    "happy": "penwidth=2.4",
    "recover": "penwidth=1.4",
    "wait": "penwidth=1.7, style=dotted",
    "resume": "penwidth=1.4, style=dashed",
    "done": "penwidth=1.8, style=dashed",
    "stop": "penwidth=1.4",
}
"""The line style of each kind of row, apart from its color."""

ENDINGS_WIDTH = 230  # pixels: the widest line of the endings in a final state

PNG_DPI = 144  # twice the 72 dpi of the layout, for sharp screens


def dot(view: View, theme: Theme = "light", dpi: int | None = None) -> str:
    """A view as DOT."""
    return "\n".join(_document(view, palette_for(theme), dpi)) + "\n"


def render_image(image_format: str, view: View, theme: Theme = "light") -> bytes:
    """An image of a view, rendered by Graphviz from its DOT.

    Args:
        image_format: An output format of Graphviz: ``png``, ``pdf``, ``svg``.
        view: The view.
        theme: ``light`` or ``dark``; ``auto`` is light.

    Raises:
        ConfigurationError: Graphviz, or the package that calls it, is not installed.
    """
    try:
        graphviz = importlib.import_module("graphviz")  # imported here because importing agentfsm must stay fast
    except ImportError as error:
        raise ConfigurationError(
            f"a {image_format} image needs the package 'graphviz': pip install graphviz"
        ) from error
    source = graphviz.Source(dot(view, theme, PNG_DPI if image_format == "png" else None))
    try:
        return bytes(source.pipe(format=image_format))
    except graphviz.ExecutableNotFound as error:
        raise ConfigurationError(
            f"a {image_format} image needs Graphviz, and its program 'dot' is not on the PATH: "
            "install it (https://graphviz.org/download), or write an .svg file, which needs nothing"
        ) from error


def _document(view: View, p: Palette, dpi: int | None) -> Iterator[str]:
    routes = choose_routes(view)
    exits: dict[tuple[str, int], Side | None] = {(w.source.name, w.group_index): w.exit for w in routes}
    title = f'<FONT POINT-SIZE="16" COLOR="{p.ink}"><B>{escape_xml(view.title)}</B></FONT>'
    yield f"digraph {quote_dot(view.graph.name)} {{"
    if dpi is not None:
        yield f"  graph [dpi={dpi}]"
    yield "  graph [rankdir=TB, splines=spline, newrank=true, outputorder=edgesfirst, nodesep=0.8, ranksep=0.4,"
    yield f'    bgcolor="{p.paper}", pad=0.3, labelloc=t, labeljust=l,'
    yield f'    fontname="{FONT_NAMES}", fontsize=11, fontcolor="{p.grey}",'
    marks = "; ".join(f"{_LOOKS[key]}: {text}" for key, text in view.legend)
    lines = [escape_xml(view.caption), _kinds_text(view, p), escape_xml(marks)]
    label = "".join(f'<BR ALIGN="LEFT"/>{line}' for line in lines if line)
    yield f'    label=<{title}{label}<BR ALIGN="LEFT"/>>]'
    yield f'  node [shape=plain, fontname="{FONT_NAMES}", fontsize=12, fontcolor="{p.ink}"]'
    yield "  edge [arrowsize=0.65]"
    yield f'  "" [shape=point, width=0.13, group=spine, color="{p.ink}"]'
    for box in view.boxes:
        yield f"  {quote_dot(box.name)} [{'group=spine, ' if box in view.spine else ''}label=<"
        yield from _box_table(box, [exits.get((box.name, i)) for i in range(len(box.groups))], endings(view, box), p)
        yield "  >]"
    yield f'  "" -> {quote_dot(view.spine[0].name)}:head:n [weight=300, color="{p.ink}"]'
    for above, below in zip(view.spine, view.spine[1:], strict=False):
        yield f"  {quote_dot(above.name)} -> {quote_dot(below.name)} [style=invis, weight=300]"
    rank = _ranks(view, routes)
    for box in view.lane("left", "right"):
        yield f"  {{ rank=same; {quote_dot(view.spine[rank[box.name]].name)}; {quote_dot(box.name)} }}"
    joined: dict[tuple[str, str, RowKind], list[Route]] = {}
    for route in routes:
        joined.setdefault((*route.pair, route.kind), []).append(route)
    for together in joined.values():
        yield "  " + _edge(together, rank, p)
    yield "}"


_LOOKS: dict[LegendKey, str] = {
    "never": "red", "added": "green", "removed": "red", "moved": "yellow", "changed": "yellow", "often": "yellow",
    "dim": "grey", "current": "thick frame",
}  # fmt: skip
"""How the marks of overlays look, in words."""


def _kinds_text(view: View, p: Palette) -> str:
    """What each color means: the meanings in their colors."""
    kinds = {row.kind for box in view.boxes for row in box.rows}
    return ", ".join(
        _font(text, p.line[kind], FONT_SIZES["caption"]) for kind, text in KIND_TEXTS.items() if kind in kinds
    )


def quote_dot(text: str) -> str:
    """A quoted string of DOT."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _ranks(view: View, routes: tuple[Route, ...]) -> dict[str, int]:
    """The rank of each box: those of the middle column in order, the others beside what they are connected with."""
    rank = {b.name: i for i, b in enumerate(view.spine)}
    for box in view.lane("left", "right"):
        joined = [rank[a] for w in routes for a, b in (w.pair, w.pair[::-1]) if b == box.name and a in rank]
        rank[box.name] = min(sum(joined) // len(joined), len(view.spine) - 1) if joined else 0
    return rank


def _edge(joined: list[Route], rank: dict[str, int], p: Palette) -> str:
    """One line for all rows of a state with one target; it leaves at the largest group of them.

    Graphviz keeps a line short only if it runs down, so an edge that goes up is declared in reverse.
    """
    route = max(joined, key=lambda w: len(w.rows))
    source, target = (quote_dot(name) for name in route.pair)
    color = p.faint if all(w.dim for w in joined) else p.line[route.kind]
    tip = quote_dot(", ".join(i for w in joined for i in w.ids))
    attributes = [f'color="{color}"', LINE_ATTRIBUTES[route.kind], f"tooltip={tip}"]
    if route.exit is None:
        return f"{source}:s -> {target}:head:n [{', '.join([*attributes, 'weight=300'])}]"
    compass = route.exit[0].replace("l", "w").replace("r", "e")
    tail = f"{source}:{compass}{route.group_index}:{compass}"
    head = f"{target}:head:{'e' if route.channels[-1] == COLUMN[route.target.lane] + 1 else 'w'}"
    above, below = rank[route.source.name], rank[route.target.name]
    if above == below:
        attributes.append("constraint=false")
    if above > below:
        return f"{head} -> {tail} [{', '.join([*attributes, 'dir=back'])}]"
    return f"{tail} -> {head} [{', '.join(attributes)}]"


def _box_table(box: Box, exits: list[Side | None], foot: list[EndingText], p: Palette) -> Iterator[str]:
    color = p.faint if box.dim else p.line[box.kind]
    look = f'BORDER="{4 if box.current else 1}" STYLE="ROUNDED" COLOR="{color}" BGCOLOR="{p.box}"'
    ink, grey = (p.dim, p.dim) if box.dim else (color, p.grey)
    name = _font(_strikethrough(escape_xml(box.name), box.mark == "removed"), ink, 14)
    note = _font(escape_xml(box.note) or " ", grey, 11)
    head = f'<TD ALIGN="LEFT"><B>{name}</B></TD><TD ALIGN="RIGHT">{note}</TD>'
    head = f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0"><TR>{head}</TR></TABLE>'
    yield f'    <TABLE {look} CELLBORDER="0" CELLSPACING="0" CELLPADDING="2">'
    yield f'      <TR><TD PORT="head" COLSPAN="6" BGCOLOR="{p.box if box.dim else p.tint[box.kind]}">{head}</TD></TR>'
    for place, (rows, side) in enumerate(zip(box.groups, exits, strict=True)):
        west, target, east = _group_cells(rows, place, side, p)
        for i, row in enumerate(rows):
            number, guard, tag = _row_cells(row, p)
            cells = (west, number, guard, target, tag, east) if i == 0 else (number, guard, tag)
            yield f"      <TR>{''.join(cells)}</TR>"
    for kind, (ending, *guards), dim in foot:
        words = [ending, *(f"{guard}," for guard in guards[:-1]), *guards[-1:]]
        lines = wrap_words(words, FONT_SIZES["ends"], ENDINGS_WIDTH)
        color = p.dim if dim or box.dim else p.line[kind]
        text = '<BR ALIGN="LEFT"/>'.join(_font(escape_xml(line), color, FONT_SIZES["ends"]) for line in lines)
        yield f'      <TR><TD COLSPAN="6" ALIGN="LEFT" BALIGN="LEFT">{text}</TD></TR>'
    yield "    </TABLE>"


def _font(text: str, color: str, size: float) -> str:
    return f'<FONT POINT-SIZE="{size:g}" COLOR="{color}">{text}</FONT>'


def _strikethrough(text: str, on: bool) -> str:
    return f"<S>{text}</S>" if on else text


def _group_cells(rows: tuple[TableRow, ...], place: int, side: Side | None, p: Palette) -> tuple[str, str, str]:
    """What adjacent rows share: the ports at both sides, a bar where their line leaves, the target."""
    row = rows[0]
    color = p.faint if all(r.dim for r in rows) else p.line[row.kind]
    span = f' ROWSPAN="{len(rows)}"' if len(rows) > 1 else ""
    fill = f' BGCOLOR="{color}"'
    west, east = (
        f'<TD PORT="{compass}{place}"{span}{fill if side == wall else ""} WIDTH="5" CELLPADDING="0"></TD>'
        for compass, wall in (("w", "left"), ("e", "right"))
    )
    bracket = f' BORDER="1" SIDES="L" COLOR="{color}"' if len(rows) > 1 else ""
    text = f"→ {escape_xml(row.transition.target)}"
    text = _font(_strikethrough(text, row.mark == "removed"), p.dim if all(r.dim for r in rows) else color, 12)
    return west, f'<TD{span}{bracket} ALIGN="LEFT">{text}</TD>', east


def _row_cells(row: TableRow, p: Palette) -> tuple[str, str, str]:
    """The cells of one row: its number, its guard, and what an overlay adds."""
    ink, grey = (p.dim, p.dim) if row.dim else (p.ink, p.grey)
    tint = f' BGCOLOR="{p.mark_color(row.mark)}"' if row.mark else ""
    guard = _strikethrough(escape_xml(row.transition.name), row.mark == "removed")
    if row.transition.guard is None:
        guard = f"<I>{guard}</I>"
    return (
        f'<TD{tint} ALIGN="RIGHT">{_font(escape_xml(row.label), grey, 10)}</TD>',
        f'<TD{tint} ALIGN="LEFT" ID="{escape_xml(row.transition.id)}">{_font(guard, ink, 12)}</TD>',
        f'<TD{tint} ALIGN="RIGHT">{_font(escape_xml(row.tag), grey, 10)}</TD>' if row.tag else f"<TD{tint}></TD>",
    )
