"""``agentfsm check``: prove properties of a graph, or show the shortest counterexample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from pydantic import TypeAdapter

from agentfsm.agent import Agent
from agentfsm.analysis import Analysis, Property, analyse, must_pass, never_after
from agentfsm.analysis.loop_assumptions import CALLS_PER_REPLY
from agentfsm.cli.user_code import load_graph_and_owner
from agentfsm.diagrams import Counterexample, write
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.presets import PRESETS, Preset
from agentfsm.machine.graph import Graph

__all__ = ["check"]

_EXAMPLES = """\b
Examples:
  agentfsm check                                        the default loop, with the default limits
  agentfsm check --preset feedback
  agentfsm check my_agent.py:AGENT --guardrails max_iterations=8 --guardrails max_tool_retries=0
  agentfsm check my_graphs.py:GRAPH --must-pass call_llm:pre_step
  agentfsm check my_graphs.py:GRAPH --must-pass dispatch_tool:approval_required:needs_approval
  agentfsm check --never-after call_llm:suspended --output broken.svg
"""


@click.command(epilog=_EXAMPLES, short_help="Prove what can be proved of a graph.")
@click.argument("graph", required=False, metavar="[MODULE:GRAPH]")
@click.option("--preset", type=click.Choice(list(PRESETS)), help="A preset's table, rules and limits.")
@click.option("-g", "--guardrails", "limits", metavar="NAME=VALUE", multiple=True, help="A limit; more than once.")
@click.option("--calls-per-reply", type=click.IntRange(1), default=CALLS_PER_REPLY, show_default=True)
@click.option("--must-pass", metavar="TARGET:THROUGH[:WHEN]", multiple=True, help="TARGET only after THROUGH.")
@click.option("--never-after", metavar="EVENT:AFTER[:UNTIL]", multiple=True, help="EVENT never after AFTER.")
@click.option("--json", "as_json", is_flag=True, help="All of it as one JSON object.")
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the first run that breaks something.",
)
@click.pass_context
def check(
    ctx: click.Context,
    graph: str | None,
    preset: str | None,
    limits: tuple[str, ...],
    calls_per_reply: int,
    must_pass: tuple[str, ...],
    never_after: tuple[str, ...],
    as_json: bool,
    output: Path | None,
) -> None:
    """Prove what can be proved of a graph: that of the default loop, or MODULE:GRAPH (or FILE.py:GRAPH).

    In every state exactly one row is taken; no row stands behind one that always holds first; every run ends
    or waits for a person; the end can be reached from everywhere; and what you declare. What is said of guards
    holds whatever the model, the tools, the policy and people do. A property that is broken comes with the
    shortest run that breaks it.

    Exit codes: 0 everything holds, 1 something is broken, 2 wrong usage, 4 something could not be decided.
    """
    if graph and preset:
        raise click.UsageError("give MODULE:GRAPH or --preset, not both")
    table, guardrails, rules = _load_inputs(graph, preset)
    found = analyse(
        table,
        *_build_properties(must_pass, never_after),
        guardrails=_override_guardrails(guardrails, limits),
        behavior=rules,
        calls_per_reply=calls_per_reply,
    )
    click.echo(json.dumps(found.to_dict(), indent=1) if as_json else str(found))
    if output is not None:
        _draw_counterexample(found, output)
    ctx.exit(0 if found.ok else 1 if any(v.holds is False for v in found.verdicts) else 4)


def _load_inputs(graph: str | None, preset: str | None) -> tuple[Graph, AgentGuardrails, Behavior | None]:
    """The graph, and the limits and rules that come with what was named."""
    if graph is None:
        chosen = PRESETS[preset or "standard"]
        return chosen.graph, chosen.guardrails, chosen.behavior if preset else None
    table, owner = load_graph_and_owner(graph)
    match owner:
        case Preset() | Agent():
            return table, owner.guardrails, owner.behavior
        case _:
            return table, AgentGuardrails(), None


def _override_guardrails(guardrails: AgentGuardrails, limits: tuple[str, ...]) -> AgentGuardrails:
    given: dict[str, Any] = {}
    for limit in limits:
        name, equals, value = limit.partition("=")
        if not equals:
            raise click.UsageError(f"--guardrails {limit}: write it as NAME=VALUE, as in max_iterations=8")
        given[name.strip()] = None if value.strip() in ("none", "None") else value.strip()
    return TypeAdapter(AgentGuardrails).validate_python({**guardrails.model_dump(), **given})


def _build_properties(must_pass_texts: tuple[str, ...], never_after_texts: tuple[str, ...]) -> list[Property]:
    found = [
        must_pass(a, through=b, when=c)
        for a, b, c in (_split_property("--must-pass", text) for text in must_pass_texts)
    ]
    return found + [
        never_after(a, b, until=c) for a, b, c in (_split_property("--never-after", text) for text in never_after_texts)
    ]


def _split_property(option: str, text: str) -> tuple[str, str, str]:
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise click.UsageError(f"{option} {text}: give two names or three, with colons between them")
    return parts[0], parts[1], parts[2] if len(parts) == 3 else ""


def _draw_counterexample(analysis: Analysis, output: Path) -> None:
    broken = next((v for v in analysis.verdicts if v.path or v.loop), None)
    if broken is None:
        click.echo("agentfsm: nothing is broken, so nothing is drawn", err=True)
        return
    write(analysis.graph, output, overlay=Counterexample(broken.path, broken.loop, broken.text))
    click.echo(output, err=True)
