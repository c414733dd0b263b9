"""Diagrams of a graph, for people and for other tools: one function, many formats.

::

    from agentfsm.loop.transition_table import LOOP
    from agentfsm.diagrams import Coverage, diagram, write

    print(diagram(LOOP, "text"))
    write(LOOP, "loop.svg")
    write(LOOP, "covered.png", overlay=Coverage(counts))

Every format is rendered from one ``View``, in which each state is a small decision table, its rows numbered in
evaluation order. Text formats, SVG included, are the same bytes on every machine and need nothing installed;
images need Graphviz.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar, cast, get_args

from agentfsm.diagrams.dot import dot, render_image
from agentfsm.diagrams.interchange import scxml, xstate
from agentfsm.diagrams.overlays import (
    Counterexample,
    Coverage,
    DiffOverlay,
    HeatMap,
    HooksOverlay,
    Overlay,
    RunPath,
)
from agentfsm.diagrams.promela import promela, promela_model
from agentfsm.diagrams.style import Theme
from agentfsm.diagrams.svg import svg
from agentfsm.diagrams.text_formats import markdown, mermaid, plain_text, plantuml
from agentfsm.diagrams.view import LayoutName, View, build_view
from agentfsm.errors import ConfigurationError
from agentfsm.machine.graph import Graph

__all__ = [
    "COMMITTED_FORMATS",
    "FORMATS",
    "Counterexample",
    "Coverage",
    "DiffOverlay",
    "Format",
    "HeatMap",
    "HooksOverlay",
    "LayoutName",
    "Overlay",
    "RunPath",
    "Theme",
    "diagram",
    "format_for_path",
    "image",
    "promela_model",
    "write",
]


class Format(NamedTuple):
    """One format.

    Attributes:
        render: Renders a view in a theme, as text or as the bytes of an image.
        suffixes: The file name extensions, the usual one first.
        overlays: Whether it shows overlays; formats for other programs do not.
        layouts: Whether it has the vertical layout; other programs do their own layout.
        image: Whether ``render`` returns bytes.
    """

    render: Callable[[View, Theme], str | bytes]
    suffixes: tuple[str, ...]
    overlays: bool = True
    layouts: bool = False
    image: bool = False


FORMATS: dict[str, Format] = {
    "svg": Format(svg, (".svg",), layouts=True),
    "dot": Format(dot, (".dot", ".gv")),
    "mermaid": Format(mermaid, (".mmd", ".mermaid")),
    "markdown": Format(markdown, (".md",)),
    "text": Format(plain_text, (".txt",)),
    "plantuml": Format(plantuml, (".puml", ".plantuml")),
    "scxml": Format(scxml, (".scxml",), overlays=False),
    "xstate": Format(xstate, (".json",), overlays=False),
    "promela": Format(promela, (".pml",), overlays=False),
    "png": Format(partial(render_image, "png"), (".png",), image=True),
    "pdf": Format(partial(render_image, "pdf"), (".pdf",), image=True),
}
"""Every format by its name. A new format is one entry."""

COMMITTED_FORMATS = ("dot", "mermaid", "markdown", "svg")
"""The formats that are committed beside the code and compared."""


def diagram(
    graph: Graph,
    format: str = "svg",  # noqa: A002
    *,
    theme: Theme = "auto",
    layout: LayoutName = "wide",
    overlay: Overlay | None = None,
) -> str:
    """A graph as text, in one of the text formats of ``FORMATS``.

    Args:
        graph: The graph.
        format: The name of the format.
        theme: ``light``, ``dark``, or ``auto``, which follows the reader's setting where the format can
            (SVG) and is light where it cannot.
        layout: ``wide``, or for SVG also ``vertical``: one column, for narrow screens.
        overlay: What to show on top: a ``RunPath``, ``Counterexample``, ``Coverage``, ``DiffOverlay`` or one of
            your own.

    Raises:
        ConfigurationError: There is no such text format, theme or layout, or the format shows no overlays or has no
            other layout.
        GraphError: The overlay names a transition or state that the graph does not have.
    """
    chosen = FORMATS.get(format)
    if chosen is None or chosen.image:
        hint = "" if chosen is None else f"; {format} is an image: use image() or write()"
        texts = ", ".join(name for name, each in FORMATS.items() if not each.image)
        raise ConfigurationError(f"there is no text format {format!r} of a diagram{hint}; the formats are: {texts}")
    return cast("str", _render(graph, format, theme, layout, overlay))


def image(graph: Graph, format: str = "png", *, theme: Theme = "light", overlay: Overlay | None = None) -> bytes:  # noqa: A002
    """A graph as an image, laid out and rendered by Graphviz.

    Args:
        graph: The graph.
        format: One of the image formats of ``FORMATS``, or ``svg``: Graphviz's own, for programs that read no
            style sheets; ``diagram`` writes one that needs nothing installed.
        theme: ``light`` or ``dark``; ``auto`` is light.
        overlay: What to show on top.

    Raises:
        ConfigurationError: There is no such image format or theme, or Graphviz is not installed.
        GraphError: The overlay names a transition or state that the graph does not have.
    """
    if format == "svg":
        return render_image("svg", _overlaid_view(graph, overlay), _checked_name(theme, Theme, "theme"))
    images = [name for name, each in FORMATS.items() if each.image]
    if format not in images:
        raise ConfigurationError(f"there is no image format {format!r}; the formats are: {', '.join(images)}")
    return cast("bytes", _render(graph, format, theme, "wide", overlay))


def write(
    graph: Graph,
    path: str | Path,
    *,
    theme: Theme = "auto",
    layout: LayoutName = "wide",
    overlay: Overlay | None = None,
) -> Path:
    """Write a graph to a file, in the format of its extension.

    Args:
        graph: The graph.
        path: The file; an existing one is overwritten.
        theme: As for ``diagram``.
        layout: As for ``diagram``.
        overlay: What to show on top.

    Returns:
        The path.

    Raises:
        ConfigurationError: No format has the extension, what the format needs is not installed, or it has no such
            layout.
        GraphError: The overlay names a transition or state that the graph does not have.
    """
    path = Path(path)
    rendered = _render(graph, format_for_path(path), theme, layout, overlay)
    if isinstance(rendered, bytes):
        path.write_bytes(rendered)
    else:
        path.write_text(rendered, encoding="utf-8", newline="\n")
    return path


def format_for_path(path: Path) -> str:
    """The name of the format that has a file's extension.

    Raises:
        ConfigurationError: No format has it; the error lists the extensions.
    """
    formats = {suffix: name for name, each in FORMATS.items() for suffix in each.suffixes}
    name = formats.get(path.suffix.lower())
    if name is None:
        raise ConfigurationError(
            f"no diagram format has the file extension {path.suffix.lower()!r} of {str(path)!r}; the extensions are: "
            f"{', '.join(formats)}"
        )
    return name


def _render(graph: Graph, format_name: str, theme: Theme, layout: LayoutName, overlay: Overlay | None) -> str | bytes:
    chosen = FORMATS[format_name]
    if _checked_name(layout, LayoutName, "layout") != "wide" and not chosen.layouts:
        able = ", ".join(name for name, each in FORMATS.items() if each.layouts)
        raise ConfigurationError(f"the format {format_name!r} has no {layout} layout; these do: {able}")
    if overlay is not None and not chosen.overlays:
        able = ", ".join(name for name, each in FORMATS.items() if each.overlays)
        raise ConfigurationError(f"the format {format_name!r} shows no overlays; these do: {able}")
    view = replace(_overlaid_view(graph, overlay), layout=layout)
    return chosen.render(view, _checked_name(theme, Theme, "theme"))


_Name = TypeVar("_Name", bound=str)


def _checked_name(name: _Name, names: object, what: str) -> _Name:
    known = get_args(names)
    if name not in known:
        raise ConfigurationError(f"there is no {what} {name!r}; the {what}s are: {', '.join(known)}")
    return name


def _overlaid_view(graph: Graph, overlay: Overlay | None) -> View:
    view = build_view(graph)
    return view if overlay is None else overlay.apply_to(view)
