"""``agentfsm diagram``: a graph as a picture or a text, written, printed, or compared with a file."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from agentfsm.cli.loading import load_graph
from agentfsm.cli.picture import endings, form_of
from agentfsm.core.presets import PRESETS
from agentfsm.diagrams import COMMITTED, FORMATS, IMAGES, image
from agentfsm.diagrams import diagram as drawn
from agentfsm.diagrams.style import Theme
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
"""


@click.command(epilog=_EXAMPLES, short_help="Draw a graph, or check a drawn one.")
@click.argument("graph", required=False, metavar="[MODULE:GRAPH]")
@click.option("--preset", type=click.Choice(list(PRESETS)), help="The table of a preset.")
@click.option("-f", "--format", "form", type=click.Choice([*FORMATS, *IMAGES]), help="By default, what PATH ends in.")
@click.option("-o", "--output", metavar="PATH", help="A file, or a folder for all forms that are kept; else stdout.")
@click.option("--theme", type=click.Choice(["auto", "light", "dark"]), default="auto", show_default=True)
@click.option("--check", is_flag=True, help="Write nothing; exit 1 where PATH is not what would be written.")
@click.pass_context
def diagram(
    ctx: click.Context,
    graph: str | None,
    preset: str | None,
    form: str | None,
    output: str | None,
    theme: Theme,
    check: bool,
) -> None:
    """Draw a graph: that of the default loop, or MODULE:GRAPH (or FILE.py:GRAPH).

    Every transition and the order in which the rows of a state are asked stand in every form. The text forms,
    SVG among them, need nothing installed and are the same bytes on every machine; images need Graphviz.
    """
    if graph and preset:
        raise click.UsageError("give MODULE:GRAPH or --preset, not both")
    if check and not output:
        raise click.UsageError("--check compares files: say which with --output")
    table = load_graph(graph) if graph else PRESETS[preset or "standard"].graph
    if output is None:
        _print(table, form or "text", theme)
        return
    files = {path: _content(table, name, theme, check=check) for path, name in _targets(table, form, output).items()}
    if check:
        ctx.exit(_compare(files))
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        click.echo(path, err=True)


def _print(graph: Graph, form: str, theme: Theme) -> None:
    if form in FORMATS:
        click.echo(drawn(graph, form, theme=theme).rstrip("\n"))
        return
    if sys.stdout.isatty():
        raise click.UsageError(f"{form} is an image: say where it goes with --output")
    click.echo(image(graph, form, theme=theme), nl=False)


def _targets(graph: Graph, form: str | None, output: str) -> dict[Path, str]:
    """The files to write and the form of each."""
    path = Path(output)
    if path.is_dir() or output.endswith(("/", "\\")):
        names = [form] if form else COMMITTED
        return {path / f"{graph.name}{endings(name)[0]}": name for name in names}
    return {path: form or form_of(path)}


def _content(graph: Graph, form: str, theme: Theme, *, check: bool) -> bytes:
    if form in FORMATS:
        return drawn(graph, form, theme=theme).encode()
    if check:
        raise click.UsageError(f"--check compares text forms; a {form} differs from one Graphviz to the next")
    return image(graph, form, theme=theme)


def _compare(files: dict[Path, bytes]) -> int:
    stale = [path for path, content in files.items() if not path.is_file() or path.read_bytes() != content]
    for path in stale:
        click.echo(f"agentfsm: {path} {'is stale' if path.exists() else 'is missing'}: draw it anew", err=True)
    return int(bool(stale))
