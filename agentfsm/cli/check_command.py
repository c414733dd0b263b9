"""``agentfsm check``: prove properties of a graph, or show the shortest counterexample."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from agentfsm.agent import Agent
from agentfsm.agent.agent_options import check_agent_graph
from agentfsm.agent.config import proof_traits
from agentfsm.analysis import (
    AgentTraits,
    Analysis,
    AnalysisLimits,
    Assumptions,
    SafetyProperty,
    analyse,
    exported_model,
    must_pass,
    needs_approvals,
    never_after,
)
from agentfsm.cli.options import collect_options, guardrails_option, option
from agentfsm.cli.reviewed_file import ReviewOptions, matches_review, review_options
from agentfsm.cli.user_code import load_graph_and_owner, load_object
from agentfsm.diagrams import Counterexample, write
from agentfsm.diagrams.promela import promela_model
from agentfsm.errors import ConfigurationError
from agentfsm.loop.guardrails import AgentGuardrails, change_guardrails
from agentfsm.loop.presets import PRESETS, Preset
from agentfsm.loop.quorum import Approval
from agentfsm.machine.graph import Graph
from agentfsm.runtime.permissions import UnattendedCalls, unattended_calls
from agentfsm.runtime.tools import Tool, with_subagents
from agentfsm.testing.counterexample import counterexample_test

_USUAL_LIMITS = AnalysisLimits()
_FILE = click.Path(dir_okay=False, path_type=Path)


@dataclass(frozen=True, kw_only=True)
class _ReportOptions:
    """The options that select how the analysis is reported."""

    as_json: bool = option("--json", is_flag=True, help="Print one JSON object.")
    output: Path | None = option("-o", "--output", metavar="PATH", type=_FILE, help="Draw the first counterexample.")
    counterexample: Path | None = option(
        "--counterexample",
        metavar="FILE",
        type=_FILE,
        help="Write the first counterexample as a pytest file that replays it on the real loop.",
    )
    promela: Path | None = option(
        "--promela", metavar="FILE", type=_FILE, help="Write the model and the properties for SPIN."
    )


@dataclass(frozen=True, kw_only=True)
class _PropertyOptions:
    """The options that name properties to prove."""

    must_pass: tuple[str, ...] = option(
        "--must-pass", metavar="TARGET:THROUGH[:WHEN]", multiple=True, help="TARGET is reached only through THROUGH."
    )
    never_after: tuple[str, ...] = option(
        "--never-after", metavar="EVENT:AFTER[:UNTIL]", multiple=True, help="EVENT never happens after AFTER."
    )
    needs_approvals: tuple[str, ...] = option(
        "--needs-approvals", metavar="TOOL=N", multiple=True, help="No call of TOOL has an effect before N approvals."
    )


@dataclass(frozen=True, kw_only=True)
class _LimitOptions:
    """The options that say how much the analysis may do."""

    max_seconds: float = option(
        "--max-seconds",
        type=click.FloatRange(min=0, min_open=True),
        default=_USUAL_LIMITS.max_seconds,
        show_default=True,
        metavar="SECONDS",
        help="Processor time of the analysis.",
    )
    max_configurations: int = option(
        "--max-configurations",
        type=click.IntRange(min=1),
        default=_USUAL_LIMITS.max_configurations,
        show_default=True,
        metavar="N",
        help="What one search of it may keep: a million take about 400 MB.",
    )


_EXAMPLES = """\b
Examples:
  agentfsm check                                        the default loop with the default limits
  agentfsm check --preset feedback
  agentfsm check my_agent.py:AGENT --guardrails max_iterations=8 --guardrails max_tool_retries=0
  agentfsm check my_graphs.py:GRAPH --must-pass call_llm:pre_step
  agentfsm check my_graphs.py:GRAPH --must-pass dispatch_tool:approval_decided:approval_required
  agentfsm check my_agent.py:AGENT --needs-approvals pay=2
  agentfsm check --never-after call_llm:suspended --output broken.svg
  agentfsm check my_agent.py:AGENT --reviewed bounds.json     for CI: still what was reviewed?
"""


@click.command(epilog=_EXAMPLES)
@click.argument("graph", required=False, metavar="[MODULE:GRAPH]")
@click.option("--preset", type=click.Choice(list(PRESETS)), help="A preset's graph, behavior and limits.")
@guardrails_option
@collect_options(_PropertyOptions, "wanted")
@click.option(
    "--assumptions", metavar="MODULE:ATTR", help="What is known about your own guards: an Assumptions object."
)
@collect_options(_LimitOptions, "most")
@collect_options(_ReportOptions, "report_opts")
@review_options
@click.pass_context
def check(
    ctx: click.Context,
    graph: str | None,
    preset: str | None,
    limits: dict[str, Any],
    wanted: _PropertyOptions,
    assumptions: str | None,
    most: _LimitOptions,
    report_opts: _ReportOptions,
    review_opts: ReviewOptions,
) -> None:
    """Prove properties of a graph: the default loop's, or MODULE:GRAPH (or FILE.py:GRAPH).

    The built-in properties: in every state, exactly one row is taken; no row is unreachable because an earlier
    one always holds; every run ends or waits for a person; the end can be reached from every state. Add your
    own with --must-pass, --never-after and --needs-approvals. The proofs hold for every behavior of the model, the
    tools, the policy and people. A property that does not hold comes with the shortest counterexample. A graph that
    an agent would refuse is refused.

    Of an agent, it also lists which calls of which tools can run without a person, by its permission rules, approvals
    and hooks, and those of its sub-agents. If a toolset's tools are known only when a run starts, it
    says so, and the proofs assume tools of every kind.

    --reviewed compares the verdicts, bounds, unreachable rows and calls that can run without a person with those in a
    file, and shows what has changed.

    Exit codes: 0 every property holds, 1 one does not or the reviewed file differs, 2 wrong usage, 4 one could not
    be decided.
    """
    if graph and preset:
        raise click.UsageError("give MODULE:GRAPH or --preset, not both")
    loaded, guardrails, traits, agent = _load_inputs(graph, preset)
    calls = () if agent is None else unattended_calls(agent.config.tools, agent.config.hooks, agent.config.toolsets)
    guardrails = change_guardrails(guardrails, limits)
    own = Assumptions() if assumptions is None else _load_assumptions(assumptions)
    properties = _build_properties(wanted, None if agent is None else agent.config.tools)
    analysis = analyse(
        loaded,
        *properties,
        guardrails=guardrails,
        traits=traits,
        assumptions=own,
        limits=AnalysisLimits(most.max_configurations, most.max_seconds),
    )
    click.echo(_report(analysis, calls, as_json=report_opts.as_json))
    _say_what_to_raise(analysis, most)
    source = graph or f"agentfsm.loop.presets:{(preset or 'standard').upper()}"
    _write_counterexample(analysis, report_opts, source, guardrails.model_dump(exclude_defaults=True) if limits else {})
    if report_opts.promela is not None:
        model = exported_model(loaded, guardrails, traits, own)
        report_opts.promela.write_text(promela_model(loaded, model, properties), encoding="utf-8")
        click.echo(report_opts.promela, err=True)
    reviewed = matches_review(_format_review(analysis, _calls_to_review(calls, review_opts)), review_opts)
    broken = any(verdict.holds is False for verdict in analysis.verdicts)
    ctx.exit(0 if analysis.ok and reviewed else 1 if not reviewed or broken else 4)


def _report(analysis: Analysis, calls: Sequence[UnattendedCalls], *, as_json: bool) -> str:
    """The analysis, followed by which calls of an agent's tools can run without a person."""
    if as_json:
        more = {"unattended_calls": [each.to_dict() for each in calls]} if calls else {}
        return json.dumps({**analysis.to_dict(), **more}, indent=1)
    return f"{analysis}\n\n{UnattendedCalls.table(calls)}" if calls else str(analysis)


def _say_what_to_raise(analysis: Analysis, most: _LimitOptions) -> None:
    """If a limit was reached, say with which option to allow more."""
    reached = " ".join((analysis.bounds.limit, *(each.detail for each in analysis.verdicts if each.holds is None)))
    options = [
        f"--{name.replace('_', '-')} {4 * value:.15g}"
        for name, value in (("max_seconds", most.max_seconds), ("max_configurations", most.max_configurations))
        if name in reached
    ]
    if options:
        click.echo(f"agentfsm: to decide what is open, allow more: {' '.join(options)}", err=True)


def _calls_to_review(calls: Sequence[UnattendedCalls], options: ReviewOptions) -> Sequence[UnattendedCalls]:
    """The calls to compare with a reviewed file: none if it was written before such files listed them."""
    path = options.reviewed
    if not calls or options.update or path is None or not path.is_file():
        return calls
    if '"unattended_calls"' in path.read_text(encoding="utf-8"):
        return calls
    click.echo(f"agentfsm: {path} does not say which calls run without a person: add them with --update", err=True)
    return ()


def _format_review(analysis: Analysis, calls: Sequence[UnattendedCalls]) -> str:
    """What a person reviews: the analysis without what says how it was found, or which table it is, and the calls."""
    data = {key: value for key, value in analysis.to_dict().items() if key not in ("explored", "fingerprint")}
    for each in data["verdicts"]:  # how far an analysis gets until its time is up is not the same in each run
        if each["holds"] is None:
            each["detail"] = "open"
    if data["bounds"]["limit"]:
        data["bounds"]["limit"] = "open"
    if calls:
        data["unattended_calls"] = [each.to_dict() for each in calls]
    return json.dumps(data, indent=1) + "\n"


def _load_inputs(
    graph: str | None, preset: str | None
) -> tuple[Graph, AgentGuardrails, AgentTraits, Agent[Any, Any] | None]:
    """The graph that is named, with the limits and what is known of its preset or agent, and the agent."""
    if graph is None:
        source = PRESETS[preset or "standard"]
        return source.graph, source.guardrails, AgentTraits(source.behavior if preset else None), None
    loaded, owner = load_graph_and_owner(graph)
    match owner:
        case Agent():
            return loaded, owner.guardrails, proof_traits(owner.config), owner  # pyright: ignore[reportUnknownVariableType]
        case Preset():
            return check_agent_graph(loaded, {}), owner.guardrails, AgentTraits(owner.behavior), None
        case _:
            return check_agent_graph(loaded, {}), AgentGuardrails(), AgentTraits(), None


def _load_assumptions(name: str) -> Assumptions:
    """The assumptions that ``MODULE:ATTR`` or ``FILE.py:ATTR`` names."""
    value = load_object(name)
    if not isinstance(value, Assumptions):
        raise ConfigurationError(f"{name} is a {type(value).__name__}, not agentfsm.analysis.Assumptions")
    return value


def _build_properties(wanted: _PropertyOptions, tools: Mapping[str, Tool] | None) -> list[SafetyProperty]:
    passes = [_split_property("--must-pass", text) for text in wanted.must_pass]
    nevers = [_split_property("--never-after", text) for text in wanted.never_after]
    return [
        *(must_pass(target, through=through, when=when) for target, through, when in passes),
        *(never_after(event, after, until=until) for event, after, until in nevers),
        *(_approval_property(text, tools) for text in wanted.needs_approvals),
    ]


def _split_property(option: str, text: str) -> tuple[str, str, str]:
    names = text.split(":")
    if len(names) not in (2, 3) or not all(names):
        raise click.UsageError(f"{option} {text}: give two or three names, separated by colons")
    return names[0], names[1], names[2] if len(names) == 3 else ""


def _approval_property(text: str, tools: Mapping[str, Tool] | None) -> SafetyProperty:
    """The property that ``TOOL=N`` stands for."""
    name, _, number = text.rpartition("=")
    if not (name and number.isdecimal()):
        raise click.UsageError(f"--needs-approvals {text}: give a tool and a number, as in pay=2")
    found = needs_approvals(name, int(number))
    if tools is None:
        return found
    for each in tools.values():
        if each.delegate is not None and any(inner.name == name for inner in with_subagents(each.delegate.tools)):
            raise ConfigurationError(f"the sub-agent of {each.name!r} has a tool {name!r}: check that agent itself")
    if name not in tools:
        raise ConfigurationError(
            f"the agent has no tool {name!r}: it has {', '.join(sorted(tools)) or 'none'} (what its toolsets return is "
            "not known before a run starts, and nothing is proved about it)"
        )
    rule = tools[name].requires_approval
    if callable(rule):
        return found  # it decides for each call: that it asks for so many is an assumption
    enough = rule.n if isinstance(rule, Approval) else int(rule)
    if enough < found.approvals:
        raise ConfigurationError(
            f"{enough} approval(s) are enough for a call of {name!r}: give it requires_approval=Approval(n={number})"
        )
    return replace(found, certain=True)


def _write_counterexample(analysis: Analysis, options: _ReportOptions, source: str, limits: Mapping[str, Any]) -> None:
    """Draw the first counterexample and write its test, as far as that is asked for."""
    broken = next((v for v in analysis.verdicts if v.path or v.loop), None)
    if broken is None:
        for path, verb in ((options.output, "draw"), (options.counterexample, "write")):
            if path is not None:
                click.echo(f"agentfsm: there is no counterexample to {verb}", err=True)
        return
    if options.output is not None:
        write(analysis.graph, options.output, overlay=Counterexample(broken.path, broken.loop, broken.text))
        click.echo(options.output, err=True)
    if options.counterexample is not None:
        options.counterexample.write_text(counterexample_test(source, broken, limits), encoding="utf-8")
        click.echo(options.counterexample, err=True)
