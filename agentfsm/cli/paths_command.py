"""``agentfsm paths``: list the paths of a graph, or keep them in a file that is reviewed and committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from agentfsm.agent import Agent
from agentfsm.cli.reviewed_file import advise_review
from agentfsm.cli.user_code import load_graph_and_owner
from agentfsm.loop.presets import PRESETS, Preset
from agentfsm.machine.graph import Graph
from agentfsm.testing.path_generation import CRITERIA
from agentfsm.testing.reviewed_paths import ReviewedPaths

_EXAMPLES = """\b
Examples:
  agentfsm paths my_agent.py:AGENT                           list them
  agentfsm paths my_agent.py:AGENT --output paths.json       write the file to review and commit
  agentfsm paths my_agent.py:AGENT --output paths.json --check      for CI: does it still hold?
  agentfsm paths --preset strict --cover prime
"""


def load_path_source(name: str) -> Graph | Preset | Agent[Any, Any]:
    """The agent, preset or graph that ``MODULE:NAME`` names."""
    graph, owner = load_graph_and_owner(name)
    return owner if isinstance(owner, (Agent, Preset)) else graph  # pyright: ignore[reportUnknownVariableType]


@click.command(epilog=_EXAMPLES)
@click.argument("graph", required=False, metavar="[MODULE:GRAPH_OR_AGENT]")
@click.option("--preset", type=click.Choice(list(PRESETS)), help="The paths of a preset.")
@click.option(
    "--cover", type=click.Choice(CRITERIA), help="What the paths cover; by default pairs, or as the file does."
)
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Write them to a file."
)
@click.option("--check", is_flag=True, help="Compare the file with the graph instead of writing it.")
@click.pass_context
def paths(
    ctx: click.Context, graph: str | None, preset: str | None, cover: str | None, output: Path | None, check: bool
) -> None:
    """List paths that cover a graph: the default loop's, or MODULE:GRAPH (or FILE.py:GRAPH), or an agent's.

    --output keeps them in a file: one path per line, the rows of the table in their order, and calls on both
    sides of each approval rule. Review it and commit it. Tests then take their paths from it
    (@pytest.mark.fsm(graph=AGENT, paths="paths.json"), or pytest --fsm-paths=paths.json), so that a row that is
    deleted, retargeted or moved fails a test. Paths that can still happen stay as they are when the file is
    written again.

    Exit codes: 0 success, 1 the file and the graph differ (with --check), 2 wrong usage.
    """
    if graph and preset:
        raise click.UsageError("give MODULE:GRAPH or --preset, not both")
    source = load_path_source(graph) if graph else PRESETS[preset or "standard"]
    if check:
        if output is None:
            raise click.UsageError("--check compares a file: name it with --output")
        changes = ReviewedPaths.read(output).differences(source)
        for change in changes:
            click.echo(change)
        if changes:
            advise_review(output, "without --check")
        ctx.exit(int(bool(changes)))
    keep = ReviewedPaths.read(output) if output is not None and output.exists() else None
    reviewed = ReviewedPaths.generate(source, cover or (keep.cover if keep is not None else "pairs"), keep)
    if output is None:
        for path in reviewed.paths:
            click.echo(" > ".join(path))
        return
    output.write_text(reviewed.to_json(), encoding="utf-8")
    before = set(keep.paths) if keep is not None else set[tuple[str, ...]]()
    new, gone = len(set(reviewed.paths) - before), len(before - set(reviewed.paths))
    click.echo(f"{output}: {len(reviewed.paths)} paths, {new} new, {gone} removed", err=True)
