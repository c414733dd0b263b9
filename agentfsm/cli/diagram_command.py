"""``agentfsm diagram``: draw a graph or the path of a stored run, or check a committed diagram."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from agentfsm.analysis import graph_from_table
from agentfsm.cli.run_report import RunReport
from agentfsm.cli.runs_command import default_store_path, open_existing_store, store_option
from agentfsm.cli.user_code import load_graph
from agentfsm.diagrams import COMMITTED_FORMATS, FORMATS, Coverage, Overlay, RunPath, image, write
from agentfsm.diagrams import diagram as drawn
from agentfsm.diagrams.style import Theme
from agentfsm.errors import ConfigurationError
from agentfsm.journal.records import Record, read_records
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.table import LOOP
from agentfsm.machine.graph import Graph

__all__ = [
    "diagram",
    "file_extensions",
    "format_for_path",
    "graph_of_run",
    "load_records",
    "path_of_run",
    "require_run_diagram_format",
    "write_run_diagram",
]


def file_extensions(format_name: str) -> tuple[str, ...]:
    """The endings of files of a form, the usual one first."""
    return FORMATS[format_name].suffixes


def format_for_path(path: Path) -> str:
    """The form that a file's ending means.

    Raises:
        ConfigurationError: It means none; the error lists those that do.
    """
    forms = {ending: form for form in FORMATS for ending in file_extensions(form)}
    form = forms.get(path.suffix.lower())
    if form is None:
        raise ConfigurationError(
            f"the ending of {str(path)!r} names no form of a picture; these do: {', '.join(forms)}"
        )
    return form


def require_run_diagram_format(path: Path) -> None:
    """Make sure, before a run costs anything, that its path can be drawn to a file.

    Raises:
        ConfigurationError: Its ending names no form, or one that cannot show a run.
    """
    form = format_for_path(path)
    if not FORMATS[form].overlays:
        raise ConfigurationError(
            f"the form {form!r} cannot show a run; draw it as {file_extensions('svg')[0]}, for instance"
        )


def write_run_diagram(report: RunReport, path: Path) -> Path:
    """Draw the way that a run took: counts at the rows, the rest stands back.

    Args:
        report: The run.
        path: Where to; its ending names the form, and its folder is made.

    Raises:
        ConfigurationError: The ending names no form, or what the form needs is not installed.
    """
    overlay = RunPath.from_ids((d.transition.id for d in report.decisions), str(report.result.state))
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(report.result.graph, path, overlay=overlay)


def load_records(run_id: str, store: Path | None, description: str) -> list[Record]:
    """The records of a run.

    Args:
        run_id: The run.
        store: The file of the store; the default one unless given.
        description: What the word could have been, for the error.

    Raises:
        ConfigurationError: There is no such run.
    """
    if not (store or default_store_path()).exists():
        raise ConfigurationError(f"{run_id!r} is {description}: there is no store at {store or default_store_path()}")
    rows = open_existing_store(store).records(run_id)
    if not rows:
        raise ConfigurationError(f"{run_id!r} is {description}")
    return read_records(rows, run_id)


def graph_of_run(run_records: Sequence[Record]) -> Graph:
    """The graph that a run's journal pins, the last one where it changed; with guards by name only.

    A table of this library's comes back as itself. Of any other, states that the default loop has too keep
    their notes and lanes, which no journal holds.
    """
    table = next(record.data["graph"] for record in reversed(run_records) if "graph" in record.data)
    graph = graph_from_table(table, str(table.get("name", "graph")))
    for known in (LOOP, *(preset.graph for preset in PRESETS.values())):
        if known.fingerprint == graph.fingerprint:
            return known
    ours = {spec.name: spec for spec in LOOP.states}
    dressed = (
        replace(spec, note=ours[spec.name].note, lane=ours[spec.name].lane) if spec.name in ours else spec
        for spec in graph.states
    )
    return replace(graph, states=tuple(dressed))


def path_of_run(run_records: Sequence[Record], graph: Graph) -> RunPath:
    """The way that a run took through a graph; moves of a table that it ran on before are left out.

    Raises:
        ConfigurationError: The run is on another graph.
    """
    first = max(place for place, record in enumerate(run_records) if "graph" in record.data)
    ids = {row.id for row in graph}
    moves = [record.data for record in run_records if record.kind == "transition"]
    late = [record.data for record in run_records[first:] if record.kind == "transition"]
    strange = [move["transition"] for move in late if move["transition"] not in ids]
    if strange:
        raise ConfigurationError(f"the run took {strange[0]}, and graph {graph.name!r} has no such row")
    state = run_records[0].data.get("state", {}).get("state", graph.initial)
    current = moves[-1]["to"] if moves else state
    return RunPath.from_ids((move["transition"] for move in moves if move["transition"] in ids), str(current))


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
@click.option(
    "-f",
    "--format",
    "format_name",
    type=click.Choice(list(FORMATS)),
    help="By default, what PATH ends in.",
)
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
    format_name: str | None,
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
    picture = _load_input(
        load_graph(graph) if graph else PRESETS[preset].graph if preset else None, run_id, coverage, path
    )
    if output is None:
        _print_diagram(picture, format_name or "text", theme)
        return
    targets = _output_paths(picture.graph, format_name, output)
    files = {path: _render(picture, name, theme, check=check) for path, name in targets.items()}
    if check:
        ctx.exit(_check_up_to_date(files))
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        click.echo(path, err=True)


class _DiagramInput(NamedTuple):
    graph: Graph
    overlay: Overlay | None


def _load_input(
    named_graph: Graph | None, run_id: str | None, coverage: Path | None, store: Path | None
) -> _DiagramInput:
    """The graph that is named, or that goes with what is laid over it, or the default loop."""
    if run_id is not None:
        found = load_records(run_id, store, "no run of the store")
        graph = named_graph or graph_of_run(found)
        return _DiagramInput(graph, path_of_run(found, graph))
    graph = named_graph or PRESETS["standard"].graph
    return _DiagramInput(graph, None if coverage is None else _read_coverage(coverage))


def _read_coverage(path: Path) -> Coverage:
    """What ``--fsm-report=json`` wrote: of its windows of rows, those of one row."""
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        counts = {row: int(count) for row, count in told["windows"].items() if " > " not in row}
        return Coverage(counts, next(s["impossible"] for s in told["shares"] if s["what"] == "transitions"))
    except (AttributeError, LookupError, StopIteration, TypeError, ValueError):
        raise ConfigurationError(f"{path} holds no coverage: write it with pytest --fsm-report=json:{path}") from None


def _print_diagram(diagram_input: _DiagramInput, format_name: str, theme: Theme) -> None:
    if not FORMATS[format_name].image:
        click.echo(drawn(diagram_input.graph, format_name, theme=theme, overlay=diagram_input.overlay).rstrip("\n"))
        return
    if sys.stdout.isatty():
        raise click.UsageError(f"{format_name} is an image: say where it goes with --output")
    click.echo(image(diagram_input.graph, format_name, theme=theme, overlay=diagram_input.overlay), nl=False)


def _output_paths(graph: Graph, format_name: str | None, output: str) -> dict[Path, str]:
    """The files to write and the form of each."""
    path = Path(output)
    if path.is_dir() or output.endswith(("/", "\\")):
        names = [format_name] if format_name else COMMITTED_FORMATS
        return {path / f"{graph.name}{file_extensions(name)[0]}": name for name in names}
    return {path: format_name or format_for_path(path)}


def _render(diagram_input: _DiagramInput, format_name: str, theme: Theme, *, check: bool) -> bytes:
    if not FORMATS[format_name].image:
        return drawn(diagram_input.graph, format_name, theme=theme, overlay=diagram_input.overlay).encode()
    if check:
        raise click.UsageError(f"--check compares text forms; a {format_name} differs from one Graphviz to the next")
    return image(diagram_input.graph, format_name, theme=theme, overlay=diagram_input.overlay)


def _check_up_to_date(files: dict[Path, bytes]) -> int:
    stale = [path for path, content in files.items() if not path.is_file() or path.read_bytes() != content]
    for path in stale:
        click.echo(f"agentfsm: {path} {'is stale' if path.exists() else 'is missing'}: draw it anew", err=True)
    return int(bool(stale))
