"""``agentfsm diff``: compare two graphs, their rows and their decisions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from agentfsm.analysis import diff as diff_graphs
from agentfsm.analysis import format_reviewed, graph_from_table
from agentfsm.cli.diagram_command import load_records
from agentfsm.cli.local_store import store_option, tenant_option
from agentfsm.cli.reviewed_file import advise_review, write_reviewed
from agentfsm.cli.user_code import load_graph
from agentfsm.diagrams import DiffOverlay, write
from agentfsm.errors import ConfigurationError
from agentfsm.journal.store_url import StoreLocation
from agentfsm.loop.presets import PRESETS
from agentfsm.machine.graph import Graph
from agentfsm.report.reported_run import graph_of_run

_EXAMPLES = """\b
Examples:
  agentfsm diff agentfsm.loop.transition_table:LOOP my_graphs.py:GRAPH
  agentfsm diff standard strict                         two presets
  agentfsm diff old/graphs.py:GRAPH new/graphs.py:GRAPH --output difference.svg
  agentfsm diff 3f9c0a1b2c3d4e5f my_graphs.py:GRAPH     the graph of a run, and today's
  agentfsm diff reviewed.json my_graphs.py:GRAPH        for CI: does it behave as reviewed?
  agentfsm diff reviewed.json my_graphs.py:GRAPH --update
  agentfsm diff reviewed.json my_graphs.py:GRAPH --markdown     for a comment on a pull request
"""


@click.command(epilog=_EXAMPLES)
@click.argument("old")
@click.argument("new")
@click.option("--exact", is_flag=True, help="Exit 1 for any difference, even if no behavior changes.")
@click.option("--update", is_flag=True, help="Show the difference, then write NEW to the file OLD, and exit 0.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--markdown", is_flag=True, help="Print Markdown with a picture, for a comment on a pull request.")
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the difference.",
)
@store_option
@tenant_option
@click.pass_context
def diff(
    ctx: click.Context,
    old: str,
    new: str,
    exact: bool,
    update: bool,
    as_json: bool,
    markdown: bool,
    output: Path | None,
    location: StoreLocation,
) -> None:
    """Compare the graph NEW with the graph OLD.

    Each is MODULE:GRAPH, FILE.py:GRAPH, the name of a preset, a JSON file (written with --update, or with
    json.dumps(graph.table)), or the id of a run, whose journal pins its graph. It compares what states, rows and
    counters declare, the code of guards and effects where both are known, and the decisions over the whole truth
    table: swapping two rows keeps every edge, but can let a call through that needed approval. A state or guard
    with a new name is one change.

    Exit codes: 0 the behavior is the same, 1 it differs, 2 wrong usage.
    """
    if as_json and markdown:
        raise click.UsageError("give --json or --markdown, not both")
    if update and not old.endswith(".json"):
        raise click.UsageError(f"--update writes a JSON file, and {old!r} is not one: name it NAME.json")
    after = _load_any_graph(new, location)
    if update and not Path(old).exists():
        write_reviewed(Path(old), format_reviewed(after))
        return
    before = _load_any_graph(old, location)
    difference = diff_graphs(before, after)
    shown = difference.markdown().rstrip("\n") if markdown else str(difference)
    click.echo(json.dumps(difference.to_dict(), indent=1) if as_json else shown)
    if output is not None:
        elsewhere = [str(each) for each in difference.decisions if each.leads_elsewhere]
        write(after, output, overlay=DiffOverlay(before, elsewhere, len(difference.decisions) - len(elsewhere)))
        click.echo(output, err=True)
    if update:
        write_reviewed(Path(old), format_reviewed(after))
        return
    if difference.same or (difference.behaves_alike and not exact):
        ctx.exit(0)
    if old.endswith(".json"):
        advise_review(Path(old), "with --update")
    ctx.exit(1)


def _load_any_graph(name: str, store: StoreLocation) -> Graph:
    """The graph that an argument of the command line names."""
    if name in PRESETS:
        return PRESETS[name].graph
    if name.endswith(".json"):
        return _graph_from_json(Path(name))
    if ":" in name or name.endswith(".py"):
        return load_graph(name)
    return _graph_from_run(name, store)


def _graph_from_json(path: Path) -> Graph:
    if not path.exists():
        raise ConfigurationError(f"there is no file {str(path)!r}: write it with agentfsm diff {path} NEW --update")
    try:
        return graph_from_table(json.loads(path.read_text(encoding="utf-8")), path.stem)
    except ValueError as error:
        raise ConfigurationError(f"{path} does not hold the table of a graph: {error}") from error


def _graph_from_run(run_id: str, store: StoreLocation) -> Graph:
    expected = "not a graph (MODULE:GRAPH), a JSON file, a preset or a run of the store"
    return replace(graph_of_run(load_records(run_id, store, expected)), name=f"run {run_id}")
