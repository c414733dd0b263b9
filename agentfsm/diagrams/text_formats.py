"""Text formats for people: Mermaid, PlantUML, Markdown and plain text.

Mermaid and PlantUML drop or overlap parallel edges, so there all rows of a state with one target are one edge,
whose label lists each row with its number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

from agentfsm.diagrams.style import Palette, Theme, palette_for
from agentfsm.diagrams.view import Box, LegendKey, RowKind, TableRow, View
from agentfsm.machine.graph import StateSpec, Transition

RowsBetween = tuple[str, str, list[TableRow]]


def _rows_between(boxes: Iterable[Box], *, stops: bool = False) -> list[RowsBetween]:
    """The rows between each pair of states, in order, by kind and by whether they are removed.

    Args:
        boxes: The states.
        stops: Whether to return the rows that end a run badly, or the others.
    """
    edges: dict[tuple[str, str, RowKind, bool, str], list[TableRow]] = {}
    for box in boxes:
        for row in (r for r in box.rows if (r.kind == "stop") is stops):
            key = (box.name, str(row.transition.target), row.kind, row.mark == "removed", row.transition.ends)
            edges.setdefault(key, []).append(row)
    return [(source, target, rows) for (source, target, *_), rows in edges.items()]


def _stop_lines(box: Box) -> list[str]:
    """The rows of a state that end a run badly, one line for each target."""
    return [
        f"{', '.join(_row_text(r) for r in rows)} → {target}{_ending_text(rows[0].transition)}"
        for _, target, rows in _rows_between([box], stops=True)
    ]


def _ending_text(row: Transition) -> str:
    """How a row ends the run, after the name of its target; empty for a row that does not."""
    return f" ({row.ends.replace('_', ' ')})" if row.ends else ""


def _spends_text(spec: StateSpec | Transition) -> str:
    """What a state or a row spends and refills."""
    refills = spec.refills if isinstance(spec, Transition) else ()
    parts = [", ".join(spec.spends), f"refills {', '.join(refills)}" if refills else ""]
    return "; ".join(part for part in parts if part)


def _row_text(row: TableRow) -> str:
    return f"{row.label} {row.transition.name}" + (f" ({row.tag})" if row.tag else "")


_MERMAID_ARROWS: dict[RowKind, str] = {
    "happy": "==>",
    "recover": "-->",
    "wait": "-.->",
    "resume": "-.->",
    "done": "-.->",
    "stop": "-->",
}
_MERMAID_RESERVED = frozenset(
    {"end", "graph", "subgraph", "flowchart", "default", "style", "class", "click", "direction"}
)


def mermaid(view: View, theme: Theme = "auto") -> str:
    """A view as a Mermaid flowchart."""
    return "\n".join(_mermaid(view, palette_for(theme))) + "\n"


def _mermaid(view: View, p: Palette) -> Iterator[str]:
    yield "flowchart TD"
    yield f"  %% {view.title}: {view.caption}; rows are asked in the order of their numbers"
    yield f"  start-mark(( )) --> {_mermaid_id(view.spine[0].name)}"
    for box in view.boxes:
        lines = [f"<b>{box.name}</b>", *([_escape_mermaid(box.note)] if box.note else [])]
        text = "<br/>".join([*lines, *(f"<i>{line}</i>" for line in _stop_lines(box))])
        opening, closing = ('(["', '"])') if box.spec.final else ('["', '"]')
        yield f"  {_mermaid_id(box.name)}{opening}{text}{closing}:::{_mermaid_class(box)}"
    edges = _rows_between(view.boxes)
    for source, target, rows in edges:
        label = "<br/>".join(_row_text(r) for r in rows) + _ending_text(rows[0].transition)
        arrow = "-.->" if rows[0].mark == "removed" else _MERMAID_ARROWS[rows[0].kind]
        yield f'  {_mermaid_id(source)} {arrow}|"{label}"| {_mermaid_id(target)}'
    yield from _mermaid_legend(view)
    completed: tuple[RowKind, ...] = ("done",) if any(b.kind == "done" for b in view.boxes) else ()
    kinds: tuple[RowKind, ...] = ("happy", "recover", "wait", "stop", *completed)
    for box_kind in kinds:
        yield f"  classDef {box_kind} fill:{p.tint[box_kind]},stroke:{p.line[box_kind]},color:{p.ink}"
    if view.overlaid:
        yield f"  classDef dim fill:{p.box},stroke:{p.faint},color:{p.dim}"
        yield f"  classDef gone fill:{p.never},stroke:{p.faint},color:{p.grey},stroke-dasharray:4 3"
    for box in (b for b in view.boxes if b.current):
        yield f"  style {_mermaid_id(box.name)} stroke-width:4px"
    for kind, color in p.line.items():
        indices = [str(i) for i, (_, _, rows) in enumerate(edges, 1) if rows[0].kind == kind and not _all_dim(rows)]
        if indices:
            yield f"  linkStyle {','.join(indices)} stroke:{color}"
    dim = [str(i) for i, (_, _, rows) in enumerate(edges, 1) if _all_dim(rows)]
    if dim:
        yield f"  linkStyle {','.join(dim)} stroke:{p.faint}"


_TINT_MEANINGS: dict[RowKind, str] = {
    "happy": "happy path",
    "recover": "recovery",
    "wait": "waiting for a person",
    "done": "the run completed",
    "stop": "the end",
}
"""What the tint of a box means."""


def _mermaid_legend(view: View) -> Iterator[str]:
    """A box for each tint that there is, and for the thick frame, in a group of its own."""
    marks = dict(view.legend)
    yield '  subgraph legend-box["legend"]'
    for name, text in _tint_texts(view, {_mermaid_class(box) for box in view.boxes}).items():
        yield f'    legend-{name}["{_escape_mermaid(text)}"]:::{name}'
    if "current" in marks:
        yield f'    legend-current["{_escape_mermaid(marks["current"])}"]'
        yield "    style legend-current stroke-width:4px"
    yield "  end"


def _tint_texts(view: View, classes: Set[str]) -> dict[str, str]:
    """What each tint that there is means, by the class of the boxes that have it."""
    marks = dict(view.legend)
    texts: dict[str, str] = {kind: text for kind, text in _TINT_MEANINGS.items() if kind in classes}
    return texts | {name: marks.get(key, key) for name, key in _FADED.items() if name in classes}


_FADED: dict[str, LegendKey] = {"dim": "dim", "gone": "removed"}
"""The classes of boxes that an overlay fades, and what each is called in a legend."""


def _all_dim(rows: list[TableRow]) -> bool:
    return all(r.dim or r.mark == "removed" for r in rows)


def _mermaid_class(box: Box) -> str:
    return "gone" if box.mark == "removed" else "dim" if box.dim else box.kind


def _mermaid_id(name: str) -> str:
    """A name that Mermaid does not read as a keyword."""
    return f"{name}_" if name.lower() in _MERMAID_RESERVED else name


def _escape_mermaid(text: str) -> str:
    return "".join(f"#{ord(char)};" if char in '"<>&#`\\' else char for char in text)


_PLANTUML_LINES: dict[RowKind, str] = {
    "happy": "bold",
    "recover": "",
    "wait": "dotted",
    "resume": "dashed",
    "done": "dashed",
    "stop": "",
}


def plantuml(view: View, theme: Theme = "auto") -> str:
    """A view as a PlantUML state diagram."""
    return "\n".join(_plantuml(view, palette_for(theme))) + "\n"


def _plantuml(view: View, p: Palette) -> Iterator[str]:
    yield "@startuml"
    yield f"title {view.title}: {view.caption}"
    yield from (f"skinparam {name} {p.paper}" for name in ("backgroundColor", "legendBackgroundColor"))
    yield from (f"skinparam {name} {p.ink}" for name in ("defaultFontColor", "stateStartColor", "stateEndColor"))
    yield "hide empty description"
    tints = {str(kind): tint for kind, tint in p.tint.items()} | {"dim": p.box}
    yield "legend top left"
    for name, text in _tint_texts(view, {"dim" if box.dim else box.kind for box in view.boxes}).items():
        yield f"<back:{tints[name]}> {text} </back>"
    yield "endlegend"
    yield f"[*] --> {view.spine[0].name}"
    for box in view.boxes:
        tint = p.box if box.dim else p.tint[box.kind]
        line = p.faint if box.dim else p.line[box.kind]
        yield f"state {box.name} {tint};line:{line.removeprefix('#')}"  # the second color is written without a hash
        notes = [box.note, "(gone)" if box.mark == "removed" else "", "(the run is here)" if box.current else ""]
        for note in (n for n in (*notes, *_stop_lines(box)) if n):
            yield f"{box.name} : {note}"
    for source, target, rows in _rows_between(view.boxes):
        look = ",".join(
            s for s in (p.faint if _all_dim(rows) else p.line[rows[0].kind], _PLANTUML_LINES[rows[0].kind]) if s
        )
        label = "\\n".join(_row_text(r) for r in rows) + _ending_text(rows[0].transition)
        yield f"{source} -[{look}]-> {target} : {label}"
    for box in (b for b in view.boxes if b.spec.final and b.mark != "removed"):
        yield f"{box.name} --> [*]"
    yield "@enduml"


def markdown(view: View, theme: Theme = "auto") -> str:
    """A view as Markdown: what each state does, and one table of all rows. Themes have no effect."""
    return "\n".join(_markdown(view)) + "\n"


def _markdown(view: View) -> Iterator[str]:
    yield f"# {_escape_markdown(view.title)}"
    yield ""
    yield f"{view.caption[0].upper()}{view.caption[1:]}. In each state the rows are asked in order of their numbers;"
    yield "the first that holds is taken."
    yield ""
    yield "| state | what it does |"
    yield "| --- | --- |"
    for box in view.boxes:
        name = _strikethrough(f"`{box.name}`", box.mark == "removed")
        yield f"| {name} | {_escape_markdown('; '.join(_state_notes(view, box)))} |"
    yield ""
    tagged = view.overlaid
    yield "| from | n | guard | to | spends |" + (" |" if tagged else "")
    yield "| --- | ---: | --- | --- | --- |" + (" --- |" if tagged else "")
    for box in view.boxes:
        for row in box.rows:
            edge, gone = row.transition, row.mark == "removed"
            guard = "*otherwise*" if edge.guard is None else f"`{edge.name}`"
            cells = [
                f"`{box.name}`",
                row.label,
                _strikethrough(guard, gone),
                _strikethrough(f"`{edge.target}`", gone) + _ending_text(edge),
                _escape_markdown(_spends_text(edge)),
            ]
            yield f"| {' | '.join([*cells, *([row.tag] if tagged else [])])} |".replace("|  |", "| |")


def _state_notes(view: View, box: Box) -> list[str]:
    notes = [box.note] if box.note else []
    if box.name == view.graph.initial:
        notes.append("a run starts here")
    if box.spec.spends:
        notes.append(f"spends {_spends_text(box.spec)}")
    if box.spec.waits:
        notes.append("waits for an event")
    if box.spec.final:
        notes.append("a run ends here")
    if box.current:
        notes.append("the run is here")
    return notes


def _escape_markdown(text: str) -> str:
    """Text for a table cell, in which nothing is read as markup."""
    return "".join(f"\\{char}" if char in "\\`*_|<>[]#" else char for char in " ".join(text.split()))


def _strikethrough(text: str, on: bool) -> str:
    return f"~~{text}~~" if on else text


def plain_text(view: View, theme: Theme = "auto") -> str:
    """A view as a table in plain text, as wide as its longest row. Themes have no effect."""
    return "\n".join(_plain_text(view)) + "\n"


def _plain_text(view: View) -> Iterator[str]:
    yield f"{view.title}: {view.caption}"
    rows = [r for b in view.boxes for r in b.rows]
    number = max((len(_ascii_label(r)) for r in rows), default=0)
    guard = max((len(r.transition.name) for r in rows), default=0)
    target = max((len(r.transition.target + _ending_text(r.transition)) for r in rows), default=0)
    for box in view.boxes:
        yield ""
        gone = "(gone)" if box.mark == "removed" else ""
        notes = "; ".join(_state_notes(view, box))
        yield " ".join(part for part in (box.name, gone, f"- {notes}" if notes else "") if part)
        for row in box.rows:
            edge = row.transition
            leads_to = edge.target + _ending_text(edge)
            line = f"  {_ascii_label(row):>{number}}  {edge.name:<{guard}}  -> {leads_to:<{target}}"
            spends = f"  spends {_spends_text(edge)}" if edge.spends or edge.refills else ""
            tag = f"  {_ascii(row.tag)}" if row.tag else ""
            yield (line + tag + spends).rstrip()


def _ascii_label(row: TableRow) -> str:
    return _ascii(row.label)


def _ascii(text: str) -> str:
    return text.replace("→", "->").replace("\N{MULTIPLICATION SIGN}", "x")
