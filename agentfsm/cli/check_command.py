"""``agentfsm check``: prove properties of a graph, or show the shortest counterexample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from agentfsm.agent import Agent
from agentfsm.analysis import Analysis, Property, analyse, must_pass, never_after
from agentfsm.analysis.loop_assumptions import CALLS_PER_REPLY
from agentfsm.cli.options import change_guardrails, guardrails_option
from agentfsm.cli.user_code import load_graph_and_owner
from agentfsm.diagrams import Counterexample, write
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.presets import PRESETS, Preset
from agentfsm.machine.graph import Graph

__all__ = ["check"]

_EXAMPLES = """\b
Examples:
  agentfsm check                                        the default loop with the default limits
  agentfsm check --preset feedback
  agentfsm check my_agent.py:AGENT --guardrails max_iterations=8 --guardrails max_tool_retries=0
  agentfsm check my_graphs.py:GRAPH --must-pass call_llm:pre_step
  agentfsm check my_graphs.py:GRAPH --must-pass dispatch_tool:approval_required:needs_approval
  agentfsm check --never-after call_llm:suspended --output broken.svg
"""


@click.command(epilog=_EXAMPLES)
@click.argument("graph", required=False, metavar="[MODULE:GRAPH]")
@click.option("--preset", type=click.Choice(list(PRESETS)), help="A preset's graph, behavior and limits.")
@guardrails_option
@click.option(
    "--calls-per-reply",
    type=click.IntRange(1),
    default=CALLS_PER_REPLY,
    show_default=True,
    help="Maximum tool calls in one model reply.",
)
@click.option(
    "--must-pass", metavar="TARGET:THROUGH[:WHEN]", multiple=True, help="TARGET is reached only through THROUGH."
)
@click.option("--never-after", metavar="EVENT:AFTER[:UNTIL]", multiple=True, help="EVENT never happens after AFTER.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the first counterexample.",
)
@click.pass_context
def check(
    ctx: click.Context,
    graph: str | None,
    preset: str | None,
    limits: dict[str, Any],
    calls_per_reply: int,
    must_pass: tuple[str, ...],
    never_after: tuple[str, ...],
    as_json: bool,
    output: Path | None,
) -> None:
    """Prove properties of a graph: the default loop's, or MODULE:GRAPH (or FILE.py:GRAPH).

    The built-in properties: in every state, exactly one row is taken; no row is unreachable because an earlier
    one always holds; every run ends or waits for a person; the end can be reached from every state. Add your
    own with --must-pass and --never-after. The proofs hold for every behavior of the model, the tools, the
    policy and people. A property that does not hold comes with the shortest counterexample.

    Exit codes: 0 every property holds, 1 one does not, 2 wrong usage, 4 one could not be decided.
    """
    if graph and preset:
        raise click.UsageError("give MODULE:GRAPH or --preset, not both")
    loaded, guardrails, behavior = _load_inputs(graph, preset)
    analysis = analyse(
        loaded,
        *_build_properties(must_pass, never_after),
        guardrails=change_guardrails(guardrails, limits),
        behavior=behavior,
        calls_per_reply=calls_per_reply,
    )
    click.echo(json.dumps(analysis.to_dict(), indent=1) if as_json else str(analysis))
    if output is not None:
        _draw_counterexample(analysis, output)
    ctx.exit(0 if analysis.ok else 1 if any(v.holds is False for v in analysis.verdicts) else 4)


def _load_inputs(graph: str | None, preset: str | None) -> tuple[Graph, AgentGuardrails, Behavior | None]:
    """The graph that is named, with the guardrails and the behavior of its preset or agent."""
    if graph is None:
        source = PRESETS[preset or "standard"]
        return source.graph, source.guardrails, source.behavior if preset else None
    loaded, owner = load_graph_and_owner(graph)
    match owner:
        case Preset() | Agent():
            return loaded, owner.guardrails, owner.behavior
        case _:
            return loaded, AgentGuardrails(), None


def _build_properties(must_pass_texts: tuple[str, ...], never_after_texts: tuple[str, ...]) -> list[Property]:
    passes = [_split_property("--must-pass", text) for text in must_pass_texts]
    nevers = [_split_property("--never-after", text) for text in never_after_texts]
    return [
        *(must_pass(target, through=through, when=when) for target, through, when in passes),
        *(never_after(event, after, until=until) for event, after, until in nevers),
    ]


def _split_property(option: str, text: str) -> tuple[str, str, str]:
    names = text.split(":")
    if len(names) not in (2, 3) or not all(names):
        raise click.UsageError(f"{option} {text}: give two or three names, separated by colons")
    return names[0], names[1], names[2] if len(names) == 3 else ""


def _draw_counterexample(analysis: Analysis, output: Path) -> None:
    broken = next((v for v in analysis.verdicts if v.path or v.loop), None)
    if broken is None:
        click.echo("agentfsm: there is no counterexample to draw", err=True)
        return
    write(analysis.graph, output, overlay=Counterexample(broken.path, broken.loop, broken.text))
    click.echo(output, err=True)
