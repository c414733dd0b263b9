"""``agentfsm diff``: how two graphs differ, in their rows and in their decisions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from agentfsm.analysis import diff as compared
from agentfsm.analysis import graph_from_table
from agentfsm.cli.diagram_command import graph_of_run, load_records
from agentfsm.cli.runs_command import store_option
from agentfsm.cli.user_code import load_graph
from agentfsm.diagrams import DiffOverlay, write
from agentfsm.errors import ConfigurationError
from agentfsm.loop.presets import PRESETS
from agentfsm.machine.graph import Graph

__all__ = ["diff"]

_EXAMPLES = """\b
Examples:
  agentfsm diff agentfsm.loop.table:LOOP my_graphs.py:GRAPH
  agentfsm diff standard strict                         two presets
  agentfsm diff old/graphs.py:GRAPH new/graphs.py:GRAPH --output difference.svg
  agentfsm diff 3f9c0a1b2c3d4e5f my_graphs.py:GRAPH     the table of a run, and today's
  agentfsm diff reviewed.json my_graphs.py:GRAPH        for CI: does it decide as it did?
"""


@click.command(epilog=_EXAMPLES, short_help="Say how two graphs differ, in rows and in behaviour.")
@click.argument("old")
@click.argument("new")
@click.option("--any", "any_difference", is_flag=True, help="Exit 1 also where rows differ and no decision does.")
@click.option("--json", "as_json", is_flag=True, help="All of it as one JSON object.")
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw NEW with what became of OLD.",
)
@store_option
@click.pass_context
def diff(
    ctx: click.Context, old: str, new: str, any_difference: bool, as_json: bool, output: Path | None, path: Path | None
) -> None:
    """Say how the graph NEW differs from the graph OLD.

    Each is MODULE:GRAPH, FILE.py:GRAPH, the name of a preset, a JSON file (what ``json.dumps(graph.table)``
    wrote), or the id of a run, whose journal pins its table. Rows are compared, and so is behaviour, over the
    whole truth table: two rows that change places keep every edge, and can let a call pass that had to be
    approved.

    Exit codes: 0 both decide alike, 1 they decide differently, 2 wrong usage.
    """
    before, after = _load_any_graph(old, path), _load_any_graph(new, path)
    found = compared(before, after)
    click.echo(json.dumps(found.to_dict(), indent=1) if as_json else str(found))
    if output is not None:
        write(after, output, overlay=DiffOverlay(before, [str(each) for each in found.decisions]))
        click.echo(output, err=True)
    ctx.exit(0 if found.same or (found.behaves_alike and not any_difference) else 1)


def _load_any_graph(name: str, store: Path | None) -> Graph:
    """The graph that a word of the command line means."""
    if name in PRESETS:
        return PRESETS[name].graph
    if name.endswith(".json"):
        return _graph_from_json(Path(name))
    if ":" in name or name.endswith(".py"):
        return load_graph(name)
    return _graph_from_run(name, store)


def _graph_from_json(path: Path) -> Graph:
    try:
        return graph_from_table(json.loads(path.read_text(encoding="utf-8")), path.stem)
    except ValueError as error:
        raise ConfigurationError(f"{path} holds no table of a graph: {error}") from error


def _graph_from_run(run_id: str, store: Path | None) -> Graph:
    what = "no graph (MODULE:GRAPH), no JSON file, no preset and no run of the store"
    return replace(graph_of_run(load_records(run_id, store, what)), name=f"run {run_id}")
