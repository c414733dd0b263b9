"""Tables to read: Markdown, and plain text for a terminal or a comment."""

from __future__ import annotations

from collections.abc import Iterator

from agentfsm.diagrams.style import Theme
from agentfsm.diagrams.view import Box, Row, View

__all__ = ["markdown", "plain_text"]


def markdown(view: View, theme: Theme = "auto") -> str:
    """A view as Markdown: what each state does, and one table of all rows. Themes mean nothing to it."""
    return "\n".join(_markdown(view)) + "\n"


def _markdown(view: View) -> Iterator[str]:
    yield f"# {_escaped(view.title)}"
    yield ""
    yield f"{view.caption[0].upper()}{view.caption[1:]}. In each state the rows are asked in order of their numbers;"
    yield "the first that holds is taken."
    yield ""
    yield "| state | what it does |"
    yield "| --- | --- |"
    for box in view.boxes:
        yield f"| {_struck(f'`{box.name}`', box.mark == 'removed')} | {_escaped('; '.join(_facts(view, box)))} |"
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
                _struck(guard, gone),
                _struck(f"`{edge.target}`", gone),
                _escaped(edge.spends),
            ]
            yield f"| {' | '.join([*cells, *([row.tag] if tagged else [])])} |".replace("|  |", "| |")


def _facts(view: View, box: Box) -> list[str]:
    facts = [box.note] if box.note else []
    if box.name == view.graph.initial:
        facts.append("a run starts here")
    if box.spec.spends:
        facts.append(f"spends {box.spec.spends}")
    if box.spec.waits:
        facts.append("waits for an event")
    if box.spec.final:
        facts.append("a run ends here")
    if box.current:
        facts.append("the run is here")
    return facts


def _escaped(text: str) -> str:
    """Text in a cell: nothing in it is read as markup."""
    return "".join(f"\\{char}" if char in "\\`*_|<>[]#" else char for char in " ".join(text.split()))


def _struck(text: str, struck: bool) -> str:
    return f"~~{text}~~" if struck else text


def plain_text(view: View, theme: Theme = "auto") -> str:
    """A view as a table in plain text, as wide as its longest row. Themes mean nothing to it."""
    return "\n".join(_plain(view)) + "\n"


def _plain(view: View) -> Iterator[str]:
    yield f"{view.title}: {view.caption}"
    rows = [r for b in view.boxes for r in b.rows]
    number = max((len(_label(r)) for r in rows), default=0)
    guard = max((len(r.transition.name) for r in rows), default=0)
    target = max((len(r.transition.target) for r in rows), default=0)
    for box in view.boxes:
        yield ""
        gone = "(gone)" if box.mark == "removed" else ""
        facts = "; ".join(_facts(view, box))
        yield " ".join(part for part in (box.name, gone, f"- {facts}" if facts else "") if part)
        for row in box.rows:
            edge = row.transition
            line = f"  {_label(row):>{number}}  {edge.name:<{guard}}  -> {edge.target:<{target}}"
            spends = f"  spends {edge.spends}" if edge.spends else ""
            tag = f"  {_ascii(row.tag)}" if row.tag else ""
            yield (line + tag + spends).rstrip()


def _label(row: Row) -> str:
    return _ascii(row.label)


def _ascii(text: str) -> str:
    return text.replace("→", "->").replace("\N{MULTIPLICATION SIGN}", "x")
