"""``agentfsm diagram``: a graph as a picture or a text, written, printed, or compared with a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click

from agentfsm.cli.loading import load_graph
from agentfsm.cli.picture import endings, form_of
from agentfsm.cli.pinned import graph_of_run, path_of_run, records_of
from agentfsm.cli.runs import store_option
from agentfsm.core.presets import PRESETS
from agentfsm.diagrams import COMMITTED, FORMATS, IMAGES, Coverage, Overlay, image
from agentfsm.diagrams import diagram as drawn
from agentfsm.diagrams.style import Theme
from agentfsm.errors import ConfigurationError
from agentfsm.machine.graph import Graph

__all__ = ["diagram"]

_EXAMPLES = """\b
Examples:
  agentfsm diagram                                 the default loop, as text
  agentfsm diagram --output loop.svg
  agentfsm diagram my_graphs.py:GRAPH --format mermaid
  agentfsm diagram --preset strict --output strict.png --theme dark
  agentfsm diagram --output diagrams/              the forms to keep beside the code
  agentfsm diagram --output diagrams/ --check      for CI: are they still true?
  agentfsm diagram --run 3f9c0a1b2c3d4e5f -o run.svg        the way that a run of the store took
  agentfsm diagram --coverage fsm-coverage.json -o covered.svg  what tests took
"""


@click.command(epilog=_EXAMPLES, short_help="Draw a graph, or check a drawn one.")
@click.argument("graph", required=False, metavar="[MODULE:GRAPH]")
@click.option("--preset", type=click.Choice(list(PRESETS)), help="The table of a preset.")
@click.option("-f", "--format", "form", type=click.Choice([*FORMATS, *IMAGES]), help="By default, what PATH ends in.")
@click.option("-o", "--output", metavar="PATH", help="A file, or a folder for all forms that are kept; else stdout.")
@click.option("--theme", type=click.Choice(["auto", "light", "dark"]), default="auto", show_default=True)
@click.option("--run", "run_id", metavar="RUN", help="Lay the way of a run of the store over it.")
@click.option(
    "--coverage",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Lay what tests took over it.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit 1 where PATH is not what would be written.")
@store_option
@click.pass_context
def diagram(
    ctx: click.Context,
    graph: str | None,
    preset: str | None,
    form: str | None,
    output: str | None,
    theme: Theme,
    run_id: str | None,
    coverage: Path | None,
    check: bool,
    path: Path | None,
) -> None:
    """Draw a graph: that of the default loop, or MODULE:GRAPH (or FILE.py:GRAPH).

    Every transition and the order in which the rows of a state are asked stand in every form. The text forms,
    SVG among them, need nothing installed and are the same bytes on every machine; images need Graphviz.

    A run is drawn on the graph that its journal pins, unless another is named: how often it took each row, and
    where it is; what it never came to stands back.
    """
    if graph and preset:
        raise click.UsageError("give MODULE:GRAPH or --preset, not both")
    if run_id and coverage:
        raise click.UsageError("give --run or --coverage, not both")
    if check and not output:
        raise click.UsageError("--check compares files: say which with --output")
    picture = _picture(
        load_graph(graph) if graph else PRESETS[preset].graph if preset else None, run_id, coverage, path
    )
    if output is None:
        _print(picture, form or "text", theme)
        return
    targets = _targets(picture.graph, form, output)
    files = {path: _content(picture, name, theme, check=check) for path, name in targets.items()}
    if check:
        ctx.exit(_compare(files))
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        click.echo(path, err=True)


class _Picture(NamedTuple):
    graph: Graph
    overlay: Overlay | None


def _picture(named: Graph | None, run_id: str | None, coverage: Path | None, store: Path | None) -> _Picture:
    """The graph that is named, or that goes with what is laid over it, or the default loop."""
    if run_id is not None:
        found = records_of(run_id, store, "no run of the store")
        graph = named or graph_of_run(found)
        return _Picture(graph, path_of_run(found, graph))
    graph = named or PRESETS["standard"].graph
    return _Picture(graph, None if coverage is None else _coverage(coverage))


def _coverage(path: Path) -> Coverage:
    """What ``--fsm-report=json`` wrote: of its windows of rows, those of one row."""
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        counts = {row: int(count) for row, count in told["windows"].items() if " > " not in row}
        return Coverage(counts, next(s["impossible"] for s in told["shares"] if s["what"] == "transitions"))
    except (AttributeError, LookupError, StopIteration, TypeError, ValueError):
        raise ConfigurationError(f"{path} holds no coverage: write it with pytest --fsm-report=json:{path}") from None


def _print(picture: _Picture, form: str, theme: Theme) -> None:
    if form in FORMATS:
        click.echo(drawn(picture.graph, form, theme=theme, overlay=picture.overlay).rstrip("\n"))
        return
    if sys.stdout.isatty():
        raise click.UsageError(f"{form} is an image: say where it goes with --output")
    click.echo(image(picture.graph, form, theme=theme, overlay=picture.overlay), nl=False)


def _targets(graph: Graph, form: str | None, output: str) -> dict[Path, str]:
    """The files to write and the form of each."""
    path = Path(output)
    if path.is_dir() or output.endswith(("/", "\\")):
        names = [form] if form else COMMITTED
        return {path / f"{graph.name}{endings(name)[0]}": name for name in names}
    return {path: form or form_of(path)}


def _content(picture: _Picture, form: str, theme: Theme, *, check: bool) -> bytes:
    if form in FORMATS:
        return drawn(picture.graph, form, theme=theme, overlay=picture.overlay).encode()
    if check:
        raise click.UsageError(f"--check compares text forms; a {form} differs from one Graphviz to the next")
    return image(picture.graph, form, theme=theme, overlay=picture.overlay)


def _compare(files: dict[Path, bytes]) -> int:
    stale = [path for path, content in files.items() if not path.is_file() or path.read_bytes() != content]
    for path in stale:
        click.echo(f"agentfsm: {path} {'is stale' if path.exists() else 'is missing'}: draw it anew", err=True)
    return int(bool(stale))
