"""``agentfsm diagram``: draw a graph or the path of a stored run, or check a committed diagram."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from agentfsm.cli.local_store import await_result, open_existing_store, store_option, tenant_option
from agentfsm.cli.options import collect_options, option, shared
from agentfsm.cli.reviewed_file import show_change
from agentfsm.cli.run_report import RunReport
from agentfsm.cli.user_code import load_graph
from agentfsm.diagrams import COMMITTED_FORMATS, FORMATS, Coverage, Overlay, RunPath, format_for_path, image, write
from agentfsm.diagrams import diagram as render
from agentfsm.diagrams.style import Theme
from agentfsm.diagrams.view import LayoutName
from agentfsm.errors import ConfigurationError
from agentfsm.journal.records import Record, read_records
from agentfsm.journal.store_url import StoreLocation
from agentfsm.loop.presets import PRESETS
from agentfsm.machine.graph import Graph
from agentfsm.report.reported_run import graph_of_run, path_of_run


def require_run_diagram_format(path: Path) -> None:
    """Check, before a run costs anything, that its path can be drawn to a file."""
    format_name = format_for_path(path)
    if not FORMATS[format_name].overlays:
        raise ConfigurationError(f"the format {format_name!r} cannot show a run; use .svg")


def write_run_diagram(report: RunReport, path: Path) -> Path:
    """Draw the path of a run: how often it took each row; states it never reached are greyed out.

    Returns:
        The path.
    """
    overlay = RunPath.from_ids((d.transition.id for d in report.decisions), str(report.result.state))
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(report.result.graph, path, overlay=overlay)


def load_records(run_id: str, store: StoreLocation, description: str) -> list[Record]:
    """The records of a run."""
    if store.file is not None and not store.file.exists():
        raise ConfigurationError(f"{run_id!r} is {description}: there is no store at {store.name}")
    rows = await_result(open_existing_store(store).records(run_id))
    if not rows:
        raise ConfigurationError(f"{run_id!r} is {description}")
    return read_records(rows, run_id)


_EXAMPLES = """\b
Examples:
  agentfsm diagram                                 the default loop, as text
  agentfsm diagram --output loop.svg
  agentfsm diagram my_graphs.py:GRAPH --format mermaid
  agentfsm diagram --preset strict --output strict.png --theme dark
  agentfsm diagram --output diagrams/              the formats to commit with the code
  agentfsm diagram --output diagrams/ --check      for CI: are they up to date?
  agentfsm diagram --run 3f9c0a1b2c3d4e5f -o run.svg            the path of a stored run
  agentfsm diagram --coverage fsm-coverage.json -o covered.svg  the rows that tests took
"""


_COVERAGE_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True, kw_only=True)
class _OverlayOptions:
    """The options that select what is drawn over the graph."""

    run_id: str | None = option("--run", metavar="RUN", help="Show the path of a run of the store.")
    coverage: Path | None = option(
        "--coverage", metavar="FILE", type=_COVERAGE_FILE, help="Show the rows that tests took."
    )
    location: StoreLocation = shared(store_option)


@click.command(epilog=_EXAMPLES)
@click.argument("graph", required=False, metavar="[MODULE:GRAPH]")
@click.option("--preset", type=click.Choice(list(PRESETS)), help="The graph of a preset.")
@click.option(
    "-f",
    "--format",
    "format_name",
    type=click.Choice(list(FORMATS)),
    help="The format; default: from the extension of PATH.",
)
@click.option("-o", "--output", metavar="PATH", help="A file, or a folder for all committed formats; default: stdout.")
@click.option(
    "--theme", type=click.Choice(["auto", "light", "dark"]), default="auto", show_default=True, help="The colors."
)
@click.option(
    "--layout",
    type=click.Choice(["wide", "vertical"]),
    default="wide",
    show_default=True,
    help="For SVG: vertical is one column, for phones.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if PATH is not up to date.")
@collect_options(_OverlayOptions, "overlay_opts")
@tenant_option
@click.pass_context
def diagram(
    ctx: click.Context,
    graph: str | None,
    preset: str | None,
    format_name: str | None,
    output: str | None,
    theme: Theme,
    layout: LayoutName,
    check: bool,
    overlay_opts: _OverlayOptions,
) -> None:
    """Draw a graph: the default loop's, or MODULE:GRAPH (or FILE.py:GRAPH).

    Every format shows every transition, and the order in which the rows of a state are evaluated. The text
    formats, SVG among them, need no other program and are byte for byte the same on every machine; images need
    Graphviz.

    --run draws a run on the graph that its journal pins, unless you name another: how often it took each row,
    and its current state; states it never reached are greyed out.
    """
    if graph and preset:
        raise click.UsageError("give MODULE:GRAPH or --preset, not both")
    if overlay_opts.run_id and overlay_opts.coverage:
        raise click.UsageError("give --run or --coverage, not both")
    if check and not output:
        raise click.UsageError("--check compares files: name them with --output")
    named_graph = load_graph(graph) if graph else PRESETS[preset].graph if preset else None
    picture = _load_picture(named_graph, overlay_opts, theme, layout)
    if output is None:
        _print_diagram(picture, format_name or "text")
        return
    targets = _output_paths(picture.graph, format_name, output)
    files = {path: _render(picture, name, check=check) for path, name in targets.items()}
    if check:
        ctx.exit(_check_up_to_date(files))
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        click.echo(path, err=True)


class _Picture(NamedTuple):
    graph: Graph
    overlay: Overlay | None
    theme: Theme
    layout: LayoutName


def _load_picture(
    named_graph: Graph | None, overlay_opts: _OverlayOptions, theme: Theme, layout: LayoutName
) -> _Picture:
    """The graph that is named, else the run's, else the default loop; and what is drawn over it."""
    if overlay_opts.run_id is not None:
        records = load_records(overlay_opts.run_id, overlay_opts.location, "not a run of the store")
        graph = named_graph or graph_of_run(records)
        return _Picture(graph, path_of_run(records, graph), theme, layout)
    graph = named_graph or PRESETS["standard"].graph
    overlay = None if overlay_opts.coverage is None else _read_coverage(overlay_opts.coverage)
    return _Picture(graph, overlay, theme, layout)


def _read_coverage(path: Path) -> Coverage:
    """The coverage of single rows in a file that ``--fsm-report=json`` wrote."""
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        counts = {row: int(count) for row, count in report["windows"].items() if " > " not in row}
        return Coverage(counts, next(s["impossible"] for s in report["shares"] if s["what"] == "transitions"))
    except (AttributeError, LookupError, StopIteration, TypeError, ValueError):
        raise ConfigurationError(
            f"{path} is not a coverage report: write one with pytest --fsm-report=json:{path}"
        ) from None


def _print_diagram(picture: _Picture, format_name: str) -> None:
    if FORMATS[format_name].image and sys.stdout.isatty():
        raise click.UsageError(f"{format_name} is an image: name a file with --output")
    rendered = _render(picture, format_name)
    if FORMATS[format_name].image:
        click.echo(rendered, nl=False)
    else:
        click.echo(rendered.decode().rstrip("\n"))


def _output_paths(graph: Graph, format_name: str | None, output: str) -> dict[Path, str]:
    """The files to write, and the format of each."""
    path = Path(output)
    if path.is_dir() or output.endswith(("/", "\\")):
        names = [format_name] if format_name else COMMITTED_FORMATS
        return {path / f"{graph.name}{FORMATS[name].suffixes[0]}": name for name in names}
    return {path: format_name or format_for_path(path)}


def _render(picture: _Picture, format_name: str, *, check: bool = False) -> bytes:
    graph, overlay, theme, layout = picture
    if layout != "wide" and not FORMATS[format_name].layouts:
        raise click.UsageError(f"--layout {layout} is for SVG: {format_name} has no such layout")
    if not FORMATS[format_name].image:
        return render(graph, format_name, theme=theme, layout=layout, overlay=overlay).encode()
    if check:
        raise click.UsageError(f"--check compares text formats; a {format_name} differs between versions of Graphviz")
    return image(graph, format_name, theme=theme, overlay=overlay)


def _check_up_to_date(files: dict[Path, bytes]) -> int:
    stale = [path for path, content in files.items() if not path.is_file() or path.read_bytes() != content]
    readable = [path for path in stale if path.suffix in _READABLE_SUFFIXES and path.is_file()]
    for path in sorted(readable, key=lambda path: _READABLE_SUFFIXES.index(path.suffix))[:1]:
        show_change(path, path.read_text(encoding="utf-8"), files[path].decode())
    for path in stale:
        click.echo(f"agentfsm: {path} {'is out of date' if path.exists() else 'is missing'}: draw it again", err=True)
    return int(bool(stale))


_READABLE_SUFFIXES = (".md", ".txt", ".mmd", ".dot")
"""The formats in which a change of lines is easy to read, the easiest first."""
