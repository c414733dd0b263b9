"""``agentfsm eval``: run a set of cases against a model, and report pass rates, failures, rows and costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import click

from agentfsm.cli.console import CliConsole, open_console, shorten
from agentfsm.cli.terminal_prompt import parse_reply
from agentfsm.cli.user_code import load_agent, load_object
from agentfsm.errors import ConfigurationError
from agentfsm.loop.messages import Usage
from agentfsm.models import resolve
from agentfsm.testing.evaluation import Case, CaseAttempt, Evaluation, evaluate, read_cases

MOST_ROWS = 10
"""How many of the rows that were taken most often are shown."""

_EXAMPLES = """\b
Examples:
  agentfsm eval cases.py --agent shop.py:AGENT --repeat 5
  agentfsm eval cases.jsonl --agent shop.py:AGENT --model ollama:llama3.2
  agentfsm eval cases.py --agent shop.py:AGENT --only refund --json
  agentfsm export 3f9c0a1b2c3d4e5f --case refund >> cases.jsonl    a stored run becomes a case
"""


@click.command("eval", epilog=_EXAMPLES)
@click.argument("cases", metavar="CASES")
@click.option("--agent", "agent_name", required=True, metavar="MODULE:AGENT", help="The agent, or FILE.py:AGENT.")
@click.option("-m", "--model", metavar="NAME", help="Another model than the agent's.")
@click.option("--only", multiple=True, metavar="NAME", help="Only the case with this name; repeatable.")
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Runs of each case.")
@click.option("--concurrency", type=click.IntRange(min=1), default=4, show_default=True, help="Runs at a time.")
@click.option(
    "--min-pass-rate",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="The share of good runs below which the exit code is 1.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def eval(  # noqa: A001  # the name of the command
    cases: str,
    agent_name: str,
    model: str | None,
    only: tuple[str, ...],
    repeat: int,
    concurrency: int,
    min_pass_rate: float,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run a set of cases with an agent, and report how often each succeeded, and why others failed.

    CASES is FILE.py (its list CASES of agentfsm.testing.Case), FILE.py:NAME, MODULE:NAME, or a file of JSON lines. The
    tools of the agent really run. The report has the share of good runs of each case, what is wrong with the others,
    failures by kind, the rows taken most often, and the cost.

    Exit codes: 0 enough runs are good, 1 they are not, 2 wrong usage.
    """
    agent = load_agent(agent_name)
    if model is not None:
        agent = agent.with_config(replace(agent.config, model=resolve(model)))
    chosen = _select(_load_cases(cases), only)
    console = open_console(quiet=quiet)
    total = len(chosen) * repeat
    done: list[CaseAttempt] = []

    def show(attempt: CaseAttempt) -> None:
        done.append(attempt)
        verdict = "good" if attempt.passed else f"bad: {shorten(attempt.problem, 300)}"
        console.err.print(f"{len(done)}/{total}  {shorten(attempt.case, 60)}  {verdict}", soft_wrap=True)

    result = asyncio.run(evaluate(agent, chosen, repeat=repeat, concurrency=concurrency, on_attempt=show))
    if as_json:
        click.echo(json.dumps(result.to_dict()))
    else:
        _print(console, result)
    if result.pass_rate < min_pass_rate:
        raise click.exceptions.Exit(1)


def _load_cases(source: str) -> list[Case]:
    if source.endswith((".jsonl", ".json")):
        return read_cases(Path(source), parse_reply)
    name = f"{source}:CASES" if source.endswith(".py") else source
    value = load_object(name)
    if not isinstance(value, list | tuple) or not all(isinstance(c, Case) for c in cast("Sequence[Any]", value)):
        raise ConfigurationError(f"{name} is not a list of agentfsm.testing.Case")
    return list(cast("Sequence[Case]", value))


def _select(cases: list[Case], only: tuple[str, ...]) -> list[Case]:
    if unknown := sorted(set(only) - {case.name for case in cases}):
        names = ", ".join(case.name for case in cases)
        raise click.UsageError(f"there is no case {unknown[0]!r}; there are: {names}")
    return [case for case in cases if not only or case.name in only]


def _print(console: CliConsole, result: Evaluation) -> None:
    lines = [("case", "good", "cost", "what is wrong")]
    for name, attempts in result.by_case.items():
        problems = dict.fromkeys(attempt.problem for attempt in attempts if attempt.problem)
        good = sum(attempt.passed for attempt in attempts)
        usage = sum((attempt.usage for attempt in attempts), Usage())
        wrong = "; ".join(shorten(problem, 200) for problem in problems)
        lines.append((shorten(name, 60), f"{good}/{len(attempts)}", _cost(usage), wrong))
    name_width, good_width, cost_width = (max(len(line[column]) for line in lines) for column in range(3))
    for name, share, cost, wrong in lines:
        line = f"{name:<{name_width}}  {share:>{good_width}}  {cost:>{cost_width}}  {wrong}"
        console.out.print(line.rstrip(), soft_wrap=True)
    good = sum(attempt.passed for attempt in result.attempts)
    console.out.print(
        f"\n{good} of {len(result.attempts)} runs with {result.model} are good ({result.pass_rate:.0%}); "
        f"{result.usage.total_tokens} tokens, {_cost(result.usage)}"
    )
    if result.failures:
        console.out.print("failures: " + _counts(result.failures.most_common()), soft_wrap=True)
    console.out.print("rows: " + _counts(result.rows.most_common(MOST_ROWS)), soft_wrap=True)


def _cost(usage: Usage) -> str:
    if usage.known_cost_usd is None:
        return "unpriced"
    return f"{usage.cost_usd:.4f} USD" + (" and more, unpriced" if usage.unpriced_tokens else "")


def _counts(counted: list[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counted)
