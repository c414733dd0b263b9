"""DOT for Graphviz: each state an HTML table of numbered rows, and one line for all rows with one destination.

Nothing needs to be installed to write it. Where things stand is for Graphviz to say, and differs between
its versions; for the picture that never differs see ``svg``, and for images of that one see ``images``.
"""

from __future__ import annotations

from collections.abc import Iterator

from agentfsm.diagrams.quoting import dot_string, xml
from agentfsm.diagrams.style import Palette, Theme, palette
from agentfsm.diagrams.view import Box, Kind, Row, View
from agentfsm.diagrams.ways import COLUMN, Side, Way, ways

__all__ = ["FONT", "LINE", "dot"]

FONT = "Inter,Helvetica,Arial,sans-serif"

LINE: dict[Kind, str] = {
    "happy": "penwidth=2.4",
    "recover": "penwidth=1.4",
    "wait": "penwidth=1.7, style=dotted",
    "done": "penwidth=1.8, style=dashed",
    "stop": "penwidth=1.4",
}
"""How Graphviz draws each meaning, beside its colour."""


def dot(view: View, theme: Theme = "light") -> str:
    """A view as DOT.

    Args:
        view: What it says.
        theme: ``light`` or ``dark``; ``auto`` is light.
    """
    return "\n".join(_document(view, palette(theme))) + "\n"


def _document(view: View, p: Palette) -> Iterator[str]:
    routes = ways(view)
    exits: dict[tuple[str, int], Side | None] = {(w.source.name, w.place): w.exit for w in routes}
    title = f'<FONT POINT-SIZE="16" COLOR="{p.ink}"><B>{xml(view.title)}</B></FONT>'
    yield f"digraph {dot_string(view.graph.name)} {{"
    yield "  graph [rankdir=TB, splines=spline, newrank=true, outputorder=edgesfirst, nodesep=0.8, ranksep=0.4,"
    yield f'    bgcolor="{p.paper}", pad=0.3, labelloc=t, labeljust=l,'
    yield f'    fontname="{FONT}", fontsize=11, fontcolor="{p.grey}",'
    yield f'    label=<{title}<BR ALIGN="LEFT"/>{xml(view.caption)}<BR ALIGN="LEFT"/>>]'
    yield f'  node [shape=plain, fontname="{FONT}", fontsize=12, fontcolor="{p.ink}"]'
    yield "  edge [arrowsize=0.65]"
    yield f'  "" [shape=point, width=0.13, group=spine, color="{p.ink}"]'
    for box in view.boxes:
        yield f"  {dot_string(box.name)} [{'group=spine, ' if box in view.spine else ''}label=<"
        yield from _table(box, [exits.get((box.name, i)) for i in range(len(box.groups))], p)
        yield "  >]"
    yield f'  "" -> {dot_string(view.spine[0].name)}:head:n [weight=300, color="{p.ink}"]'
    for above, below in zip(view.spine, view.spine[1:], strict=False):
        yield f"  {dot_string(above.name)} -> {dot_string(below.name)} [style=invis, weight=300]"
    rank = _ranks(view, routes)
    for box in view.lane("left", "right"):
        yield f"  {{ rank=same; {dot_string(view.spine[rank[box.name]].name)}; {dot_string(box.name)} }}"
    joined: dict[tuple[str, str, Kind], list[Way]] = {}
    for way in routes:
        joined.setdefault((*way.pair, way.kind), []).append(way)
    for together in joined.values():
        yield "  " + _edge(together, rank, p)
    yield "}"


def _ranks(view: View, routes: tuple[Way, ...]) -> dict[str, int]:
    """How far down each box stands: those of the middle in order, the others among what they are joined with."""
    rank = {b.name: i for i, b in enumerate(view.spine)}
    for box in view.lane("left", "right"):
        joined = [rank[a] for w in routes for a, b in (w.pair, w.pair[::-1]) if b == box.name and a in rank]
        rank[box.name] = min(sum(joined) // len(joined), len(view.spine) - 1) if joined else 0
    return rank


def _edge(together: list[Way], rank: dict[str, int], p: Palette) -> str:
    """One line for all rows of a state with one destination; it leaves at the largest group of them.

    Graphviz keeps a line short only if it runs down, so a line upwards is declared, and drawn, backwards.
    """
    way = max(together, key=lambda w: len(w.rows))
    source, target = (dot_string(name) for name in way.pair)
    colour = p.faint if all(w.dim for w in together) else p.line[way.kind]
    tip = dot_string(", ".join(i for w in together for i in w.ids))
    attributes = [f'color="{colour}"', LINE[way.kind], f"tooltip={tip}"]
    if way.exit is None:
        return f"{source}:s -> {target}:head:n [{', '.join([*attributes, 'weight=300'])}]"
    compass = way.exit[0].replace("l", "w").replace("r", "e")
    tail = f"{source}:{compass}{way.place}:{compass}"
    head = f"{target}:head:{'e' if way.channels[-1] == COLUMN[way.target.lane] + 1 else 'w'}"
    above, below = rank[way.source.name], rank[way.target.name]
    if above == below:
        attributes.append("constraint=false")
    if above > below:
        return f"{head} -> {tail} [{', '.join([*attributes, 'dir=back'])}]"
    return f"{tail} -> {head} [{', '.join(attributes)}]"


def _table(box: Box, exits: list[Side | None], p: Palette) -> Iterator[str]:
    colour = p.faint if box.dim else p.line[box.kind]
    look = f'BORDER="{4 if box.current else 1}" STYLE="ROUNDED" COLOR="{colour}" BGCOLOR="{p.box}"'
    name = _font(_struck(xml(box.name), box.mark == "removed"), colour, 14)
    note = _font(xml(box.note) or " ", p.grey, 11)
    head = f'<TD ALIGN="LEFT"><B>{name}</B></TD><TD ALIGN="RIGHT">{note}</TD>'
    head = f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0"><TR>{head}</TR></TABLE>'
    yield f'    <TABLE {look} CELLBORDER="0" CELLSPACING="0" CELLPADDING="2">'
    yield f'      <TR><TD PORT="head" COLSPAN="6" BGCOLOR="{p.box if box.dim else p.tint[box.kind]}">{head}</TD></TR>'
    for place, (rows, side) in enumerate(zip(box.groups, exits, strict=True)):
        west, target, east = _shared(rows, place, side, p)
        for i, row in enumerate(rows):
            number, guard, tag = _cells(row, p)
            cells = (west, number, guard, target, tag, east) if i == 0 else (number, guard, tag)
            yield f"      <TR>{''.join(cells)}</TR>"
    yield "    </TABLE>"


def _font(text: str, colour: str, size: float) -> str:
    return f'<FONT POINT-SIZE="{size:g}" COLOR="{colour}">{text}</FONT>'


def _struck(text: str, struck: bool) -> str:
    return f"<S>{text}</S>" if struck else text


def _shared(rows: tuple[Row, ...], place: int, side: Side | None, p: Palette) -> tuple[str, str, str]:
    """What neighbouring rows share: the ports at both sides, a bar where their line leaves, the destination."""
    row = rows[0]
    colour = p.faint if all(r.dim for r in rows) else p.line[row.kind]
    span = f' ROWSPAN="{len(rows)}"' if len(rows) > 1 else ""
    fill = f' BGCOLOR="{colour}"'
    west, east = (
        f'<TD PORT="{compass}{place}"{span}{fill if side == wall else ""} WIDTH="5" CELLPADDING="0"></TD>'
        for compass, wall in (("w", "left"), ("e", "right"))
    )
    bracket = f' BORDER="1" SIDES="L" COLOR="{colour}"' if len(rows) > 1 else ""
    text = f"→ {xml(row.transition.target)}"
    text = _font(_struck(text, row.mark == "removed"), p.dim if all(r.dim for r in rows) else colour, 12)
    return west, f'<TD{span}{bracket} ALIGN="LEFT">{text}</TD>', east


def _cells(row: Row, p: Palette) -> tuple[str, str, str]:
    """What a row has for itself: number, guard, and what an overlay adds."""
    ink, grey = (p.dim, p.dim) if row.dim else (p.ink, p.grey)
    back = {"never": p.never, "removed": p.never, "added": p.added, "moved": p.changed, "changed": p.changed}
    tint = f' BGCOLOR="{back[row.mark]}"' if row.mark else ""
    guard = _struck(xml(row.transition.name), row.mark == "removed")
    if row.transition.guard is None:
        guard = f"<I>{guard}</I>"
    return (
        f'<TD{tint} ALIGN="RIGHT">{_font(xml(row.label), grey, 10)}</TD>',
        f'<TD{tint} ALIGN="LEFT" ID="{xml(row.transition.id)}">{_font(guard, ink, 12)}</TD>',
        f'<TD{tint} ALIGN="RIGHT">{_font(xml(row.tag), grey, 10)}</TD>' if row.tag else f"<TD{tint}></TD>",
    )
