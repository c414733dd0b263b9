"""``agentfsm replay``: replay recorded runs, unchanged or under another preset, graph, policy or limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from agentfsm.cli.console import open_console, single_line
from agentfsm.cli.local_store import await_result, complete_run_id, open_runs, store_option, tenant_option
from agentfsm.cli.options import guardrails_option
from agentfsm.cli.user_code import load_graph
from agentfsm.errors import JournalError, StoreError
from agentfsm.journal.listing import find_run_id
from agentfsm.journal.records import read_lines
from agentfsm.journal.replay import Divergence, Replay, ReplayTotals
from agentfsm.journal.replay_settings import ReplaySettings
from agentfsm.journal.store_url import StoreLocation
from agentfsm.journal.verification import TAMPERED, UNVERIFIABLE, verify_export
from agentfsm.loop.presets import PRESETS
from agentfsm.runs import Runs

_EXAMPLES = """\b
Examples:
  agentfsm replay                          every run, unchanged
  agentfsm replay --preset strict          what would strict have done?
  agentfsm replay 3f9c0a1b2c3d4e5f --policy strict
  agentfsm replay --guardrails max_iterations=5
  agentfsm replay --graph my_graphs.py:MINE --json
  agentfsm replay --file run.jsonl --preset strict
"""

_EXPORT = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(epilog=_EXAMPLES)
@click.argument("run_ids", metavar="[RUN]...", nargs=-1, shell_complete=complete_run_id)
@click.option("--preset", type=click.Choice(list(PRESETS)), help="A preset's graph, policy, limits and behavior.")
@click.option("--graph", metavar="MODULE:GRAPH", help="Another graph, as MODULE:GRAPH or FILE.py:GRAPH.")
@click.option("--policy", metavar="PRESET", type=click.Choice(sorted(PRESETS)), help="Another policy: a preset's.")
@guardrails_option
@click.option(
    "--file", "files", type=_EXPORT, multiple=True, help="An exported journal instead of a store; repeatable."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per run, and one with the totals.")
@store_option
@tenant_option
@click.pass_context
def replay(
    ctx: click.Context,
    run_ids: tuple[str, ...],
    preset: str | None,
    graph: str | None,
    policy: str | None,
    limits: dict[str, Any],
    files: tuple[Path, ...],
    as_json: bool,
    location: StoreLocation,
) -> None:
    """Replay the recorded outcomes of RUNs, or of all runs; no model and no tool is called.

    Reports every transition that would have been a different one, and how each run would have ended. The model,
    the tools and people are assumed to have answered as recorded until the run takes another transition. From
    there on only what follows from the run itself is computed, and recorded outcomes are used again only where the
    run asks for exactly the same; otherwise the ending is not known, and the output says why.

    --preset takes everything from a preset; --graph, --policy and --guardrails change a part. Without --preset,
    the other settings stay as recorded.

    Exit codes: 0 every transition and every ending is the same; 1 a run diverges, would end differently or cannot be
    replayed; 2 wrong usage.
    """
    if files and run_ids:
        raise click.UsageError("--file names the runs: give files or RUNs, not both")
    named = load_graph(graph) if graph else None
    settings = ReplaySettings.of_preset(preset, graph=named, policy=policy, limits=limits)
    if files:
        replays = {str(file): partial(_replay_export, file, settings) for file in files}
    else:
        store, runs = open_runs(location, sealed=False)
        names = [await_result(find_run_id(store, each)) for each in run_ids] or [
            head.run_id for head in await_result(store.heads()) if head.seq
        ]
        replays = {name: partial(_replay_stored, runs, name, settings) for name in names}
    found: list[Replay | None] = []
    for name, result in _replay_all(replays):
        found.append(None if isinstance(result, str) else result)
        click.echo(_json_line(name, result) if as_json else single_line(f"{name}  {_describe_replay(result)}"))
    totals = ReplayTotals.of(found)
    if as_json:
        click.echo(json.dumps({"totals": {**asdict(totals), "end_differently": totals.end_differently}}))
    elif len(found) > 1:
        click.echo(totals)
    ctx.exit(0 if totals.same == totals.runs else 1)


def _replay_all(replays: Mapping[str, Callable[[], Replay]]) -> Iterable[tuple[str, Replay | str]]:
    """Each run with its replay, or with why it cannot be replayed.

    A terminal shows how far this is, and then the results; elsewhere each result is printed at once.
    """
    results = ((name, _replay_one(replay_run)) for name, replay_run in replays.items())
    console = open_console()
    if not console.live:
        return results
    with Progress(console=console.err, transient=True, redirect_stdout=False, redirect_stderr=False) as progress:
        return list(progress.track(results, total=len(replays), description="replaying"))


def _replay_one(replay_run: Callable[[], Replay]) -> Replay | str:
    try:
        return replay_run()
    except (JournalError, StoreError) as error:  # even of a run that was deleted in the meantime
        return str(error)


def _replay_stored(runs: Runs, run_id: str, settings: ReplaySettings) -> Replay:
    return await_result(runs.replay(run_id, settings))


def _replay_export(file: Path, settings: ReplaySettings) -> Replay:
    text = file.read_text(encoding="utf-8", errors="replace")
    report = verify_export(text, None)
    if report.code in (TAMPERED, UNVERIFIABLE):
        raise JournalError(f"record {report.seq}: {report.reason}")
    return settings.replay(read_lines(text.rstrip("\n").split("\n")))


def _json_line(name: str, result: Replay | str) -> str:
    if isinstance(result, str):
        return json.dumps({"run_id": str(name), "error": result})
    flags = {"same": result.same, "ends_differently": result.ends_differently}
    return json.dumps({"run_id": str(name), **flags, **asdict(result)})


def _describe_replay(result: Replay | str) -> str:
    if isinstance(result, str):
        return f"cannot be replayed: {result}"
    start = f", from record {result.since} on (path check skipped before it)" if result.since > 1 else ""
    verdict = "; ".join(_describe_divergence(each) for each in result.divergences) or "the same"
    return f"{result.moves} transitions{start}  {verdict}{_describe_ending(result)}"


def _describe_divergence(divergence: Divergence) -> str:
    again = f" (follows the record again from {divergence.resumed})" if divergence.resumed else ""
    return f"record {divergence.seq}: {divergence.instead} instead of {divergence.recorded}{again}"


def _describe_ending(result: Replay) -> str:
    if result.ends_differently:
        return f"; would end as {result.ending} instead of {result.recorded_ending}"
    if result.same:
        return ""
    if result.ending:
        return f"; would end as {result.ending}" + (" all the same" if result.recorded_ending else "")
    return f"; how it would end is not known: {result.unknown}" if result.unknown else ""
