"""Diagrams as text that other tools draw: Mermaid and PlantUML.

Both lose edges that run between the same two states, or draw them over each other; so all rows of a state
with one destination are one edge here, whose label lists each row with its number. As in the pictures, rows
that end a run, but for the good ends, are text in their state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from agentfsm.diagrams.style import Palette, Theme, palette
from agentfsm.diagrams.view import Box, Kind, Row, View

__all__ = ["mermaid", "plantuml"]

Edge = tuple[str, str, list[Row]]


def _edges(boxes: Iterable[Box], *, stops: bool = False) -> list[Edge]:
    """For each pair of states, meaning and fate: the rows between them, in order; bad ends apart."""
    edges: dict[tuple[str, str, Kind, bool], list[Row]] = {}
    for box in boxes:
        for row in (r for r in box.rows if (r.kind == "stop") is stops):
            key = (box.name, str(row.transition.target), row.kind, row.mark == "removed")
            edges.setdefault(key, []).append(row)
    return [(source, target, rows) for (source, target, _, _), rows in edges.items()]


def _stops(box: Box) -> list[str]:
    """The bad ends of a state, a line for each destination."""
    return [f"{', '.join(_words(r) for r in rows)} → {target}" for _, target, rows in _edges([box], stops=True)]


def _words(row: Row) -> str:
    return f"{row.label} {row.transition.name}" + (f" ({row.tag})" if row.tag else "")


_ARROW: dict[Kind, str] = {"happy": "==>", "recover": "-->", "wait": "-.->", "done": "-.->", "stop": "-->"}
_RESERVED = frozenset({"end", "graph", "subgraph", "flowchart", "default", "style", "class", "click", "direction"})


def mermaid(view: View, theme: Theme = "auto") -> str:
    """A view as a Mermaid flowchart.

    Args:
        view: What it says.
        theme: ``dark`` colours the boxes for a dark page; else they are light on any page.
    """
    return "\n".join(_mermaid(view, palette(theme))) + "\n"


def _mermaid(view: View, p: Palette) -> Iterator[str]:
    yield "flowchart TD"
    yield f"  %% {view.title}: {view.caption}; rows are asked in the order of their numbers"
    yield f"  start-mark(( )) --> {_id(view.spine[0].name)}"
    for box in view.boxes:
        lines = [f"<b>{box.name}</b>", *([_mermaid_text(box.note)] if box.note else [])]
        words = "<br/>".join([*lines, *(f"<i>{line}</i>" for line in _stops(box))])
        opening, closing = ('(["', '"])') if box.spec.final else ('["', '"]')
        yield f"  {_id(box.name)}{opening}{words}{closing}:::{_look(box)}"
    edges = _edges(view.boxes)
    for source, target, rows in edges:
        label = "<br/>".join(_words(r) for r in rows)
        arrow = "-.->" if rows[0].mark == "removed" else _ARROW[rows[0].kind]
        yield f'  {_id(source)} {arrow}|"{label}"| {_id(target)}'
    for box_kind in ("happy", "recover", "wait", "stop"):
        yield f"  classDef {box_kind} fill:{p.tint[box_kind]},stroke:{p.line[box_kind]},color:{p.ink}"
    if view.overlaid:
        yield f"  classDef dim fill:{p.box},stroke:{p.faint},color:{p.dim}"
        yield f"  classDef gone fill:{p.never},stroke:{p.faint},color:{p.grey},stroke-dasharray:4 3"
    for box in (b for b in view.boxes if b.current):
        yield f"  style {_id(box.name)} stroke-width:4px"
    for kind, colour in p.line.items():
        places = [str(i) for i, (_, _, rows) in enumerate(edges, 1) if rows[0].kind == kind and not _dim(rows)]
        if places:
            yield f"  linkStyle {','.join(places)} stroke:{colour}"
    dim = [str(i) for i, (_, _, rows) in enumerate(edges, 1) if _dim(rows)]
    if dim:
        yield f"  linkStyle {','.join(dim)} stroke:{p.faint}"


def _dim(rows: list[Row]) -> bool:
    return all(r.dim or r.mark == "removed" for r in rows)


def _look(box: Box) -> str:
    return "gone" if box.mark == "removed" else "dim" if box.dim else box.kind


def _id(name: str) -> str:
    """A name that Mermaid does not read as a word of its own."""
    return f"{name}_" if name.lower() in _RESERVED else name


def _mermaid_text(text: str) -> str:
    return "".join(f"#{ord(char)};" if char in '"<>&#`\\' else char for char in text)


_PLANT: dict[Kind, str] = {"happy": "bold", "recover": "", "wait": "dotted", "done": "dashed", "stop": ""}


def plantuml(view: View, theme: Theme = "auto") -> str:
    """A view as a PlantUML state diagram.

    Args:
        view: What it says.
        theme: ``dark`` colours it for a dark page.
    """
    return "\n".join(_plantuml(view, palette(theme))) + "\n"


def _plantuml(view: View, p: Palette) -> Iterator[str]:
    yield "@startuml"
    yield f"title {view.title}: {view.caption}"
    yield "hide empty description"
    yield f"[*] --> {view.spine[0].name}"
    for box in view.boxes:
        tint = p.box if box.dim else p.tint[box.kind]
        line = p.faint if box.dim else p.line[box.kind]
        yield f"state {box.name} {tint};line:{line.removeprefix('#')}"  # here it knows no second hash
        facts = [box.note, "(gone)" if box.mark == "removed" else "", "(the run is here)" if box.current else ""]
        for fact in (f for f in (*facts, *_stops(box)) if f):
            yield f"{box.name} : {fact}"
    for source, target, rows in _edges(view.boxes):
        look = ",".join(s for s in (p.faint if _dim(rows) else p.line[rows[0].kind], _PLANT[rows[0].kind]) if s)
        label = "\\n".join(_words(r) for r in rows)
        yield f"{source} -[{look}]-> {target} : {label}"
    for box in (b for b in view.boxes if b.spec.final and b.mark != "removed"):
        yield f"{box.name} --> [*]"
    yield "@enduml"
