"""Pictures of a graph, for people and for other tools: one function, many forms.

::

    from agentfsm.loop.table import LOOP
    from agentfsm.diagrams import Coverage, diagram, write

    print(diagram(LOOP, "text"))
    write(LOOP, "loop.svg")
    write(LOOP, "covered.png", overlay=Coverage(counts))

All forms are written from one ``View``: each state a small decision table, its rows numbered in the order
in which they are asked. The text forms, SVG among them, are the same bytes on every machine and need
nothing installed; images need Graphviz.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, get_args

from agentfsm.diagrams.dot import dot
from agentfsm.diagrams.image_rendering import IMAGE_FORMATS, render_image
from agentfsm.diagrams.interchange import promela, scxml, xstate
from agentfsm.diagrams.overlays import Counterexample, Coverage, DiffOverlay, HooksOverlay, Overlay, RunPath
from agentfsm.diagrams.style import Theme
from agentfsm.diagrams.svg import svg
from agentfsm.diagrams.text_formats import markdown, mermaid, plain_text, plantuml
from agentfsm.diagrams.view import View, build_view
from agentfsm.errors import ConfigurationError
from agentfsm.machine.graph import Graph

__all__ = [
    "COMMITTED_FORMATS",
    "FORMATS",
    "IMAGE_FORMATS",
    "Counterexample",
    "Coverage",
    "DiffOverlay",
    "Format",
    "HooksOverlay",
    "Overlay",
    "RunPath",
    "Theme",
    "diagram",
    "image",
    "write",
    "write_all",
]


class Format(NamedTuple):
    """One form of text.

    Attributes:
        render: Writes a view in a theme.
        suffixes: The endings of its files, the usual one first.
        overlays: Whether it shows overlays; forms for other machines do not.
    """

    render: Callable[[View, Theme], str]
    suffixes: tuple[str, ...]
    overlays: bool = True


FORMATS: dict[str, Format] = {
    "svg": Format(svg, (".svg",)),
    "dot": Format(dot, (".dot", ".gv")),
    "mermaid": Format(mermaid, (".mmd", ".mermaid")),
    "markdown": Format(markdown, (".md",)),
    "text": Format(plain_text, (".txt",)),
    "plantuml": Format(plantuml, (".puml", ".plantuml")),
    "scxml": Format(scxml, (".scxml",), overlays=False),
    "xstate": Format(xstate, (".json",), overlays=False),
    "promela": Format(promela, (".pml",), overlays=False),
}
"""Every form of text by its name. A new one is one entry."""

COMMITTED_FORMATS = ("dot", "mermaid", "markdown", "svg")
"""The forms that ``write_all`` writes: those that are kept beside the code and compared."""


def diagram(graph: Graph, format: str = "svg", *, theme: Theme = "auto", overlay: Overlay | None = None) -> str:  # noqa: A002
    """A graph in one of the forms of ``FORMATS``.

    Args:
        graph: The graph.
        format: The name of the form.
        theme: ``light``, ``dark``, or ``auto``, which follows the reader's setting where the form can
            (SVG) and is light where it cannot.
        overlay: What to lay over it: a ``RunPath``, ``Counterexample``, ``Coverage``, ``Difference`` or one of
            your own.

    Raises:
        ConfigurationError: There is no such form or theme, or the form shows no overlay.
        GraphError: The overlay speaks of a transition that the graph does not have.
    """
    form = FORMATS.get(format)
    if form is None:
        hint = f"; {format} is an image: use image() or write()" if format in IMAGE_FORMATS else ""
        raise ConfigurationError(f"there is no form {format!r} of a diagram{hint}; there are: {', '.join(FORMATS)}")
    if overlay is not None and not form.overlays:
        able = ", ".join(name for name, other in FORMATS.items() if other.overlays)
        raise ConfigurationError(f"the form {format!r} shows no overlay; these do: {able}")
    return form.render(_overlaid_view(graph, overlay), _checked_theme(theme))


def image(graph: Graph, format: str = "png", *, theme: Theme = "light", overlay: Overlay | None = None) -> bytes:  # noqa: A002
    """A graph as an image: the same picture as the SVG, painted by Graphviz.

    Args:
        graph: The graph.
        format: One of ``IMAGE_FORMATS``, or ``svg``: Graphviz's own, for programs that read no style sheets; ``diagram``
            writes one that needs nothing installed.
        theme: ``light`` or ``dark``; ``auto`` is light.
        overlay: What to lay over it.

    Raises:
        ConfigurationError: There is no such image or theme, or Graphviz is not installed.
        GraphError: The overlay speaks of a transition that the graph does not have.
    """
    if format not in (*IMAGE_FORMATS, "svg"):
        raise ConfigurationError(f"there is no image {format!r}; there are: {', '.join(IMAGE_FORMATS)}")
    return render_image(_overlaid_view(graph, overlay), format, _checked_theme(theme))


def write(graph: Graph, path: str | Path, *, theme: Theme = "auto", overlay: Overlay | None = None) -> Path:
    """Write a graph to a file, in the form that its ending names.

    Args:
        graph: The graph.
        path: Where to; an existing file is written over.
        theme: As for ``diagram``.
        overlay: What to lay over it.

    Returns:
        The path.

    Raises:
        ConfigurationError: The ending names no form, or what the form needs is not installed.
        GraphError: The overlay speaks of a transition that the graph does not have.
    """
    path = Path(path)
    ending = path.suffix.lower()
    forms = {e: name for name, form in FORMATS.items() for e in form.suffixes}
    if ending.removeprefix(".") in IMAGE_FORMATS:
        path.write_bytes(image(graph, ending.removeprefix("."), theme=theme, overlay=overlay))
    elif ending in forms:
        text = diagram(graph, forms[ending], theme=theme, overlay=overlay)
        path.write_text(text, encoding="utf-8", newline="\n")
    else:
        known = ", ".join([*forms, *(f".{name}" for name in IMAGE_FORMATS)])
        raise ConfigurationError(f"no form of a diagram has the ending {ending!r}; there are: {known}")
    return path


def write_all(graph: Graph, folder: str | Path, formats: Iterable[str] = COMMITTED_FORMATS) -> list[Path]:
    """Write a graph in several forms into a folder, each file named after the graph.

    How the files in ``diagrams/`` are made, and made anew::

        from agentfsm.loop.table import LOOP
        from agentfsm.diagrams import write_all

        write_all(LOOP, "diagrams")

    Args:
        graph: The graph.
        folder: An existing folder.
        formats: Names of ``FORMATS``.

    Returns:
        The paths, in the order of the formats.

    Raises:
        ConfigurationError: There is no such form.
    """
    paths: list[Path] = []
    for name in formats:
        text = diagram(graph, name)
        path = Path(folder) / f"{graph.name}{FORMATS[name].suffixes[0]}"
        path.write_text(text, encoding="utf-8", newline="\n")
        paths.append(path)
    return paths


def _checked_theme(theme: Theme) -> Theme:
    """The theme, where there is one of its name."""
    themes = get_args(Theme)
    if theme not in themes:
        raise ConfigurationError(f"there is no theme {theme!r}; there are: {', '.join(themes)}")
    return theme


def _overlaid_view(graph: Graph, overlay: Overlay | None) -> View:
    view = build_view(graph)
    return view if overlay is None else overlay.apply_to(view)
