"""``agentfsm replay``: replay recorded runs, unchanged or with another graph, policy or guardrails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from agentfsm.cli.console import single_line
from agentfsm.cli.local_store import complete_run_id, open_existing_store, store_option
from agentfsm.cli.options import change_guardrails, guardrails_option
from agentfsm.cli.user_code import load_graph, preset_graph
from agentfsm.errors import JournalError, StoreError, UnknownRunError
from agentfsm.journal.records import SealedRecord, is_kind, open_record
from agentfsm.journal.replay import Replay
from agentfsm.journal.replay import replay as replay_run
from agentfsm.journal.store import Store, consistent_read
from agentfsm.journal.verification import TAMPERED, UNVERIFIABLE
from agentfsm.journal.verification import verify as verify_run
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.recovery_policy import RecoveryPolicy
from agentfsm.machine.graph import Graph

__all__ = ["replay"]

_EXAMPLES = """\b
Examples:
  agentfsm replay                          every run, unchanged
  agentfsm replay 3f9c0a1b2c3d4e5f --policy strict
  agentfsm replay --guardrails max_iterations=5
  agentfsm replay --graph my_graphs.py:MINE
"""


@click.command(epilog=_EXAMPLES)
@click.argument("run_ids", metavar="[RUN]...", nargs=-1, shell_complete=complete_run_id)
@click.option("--graph", "graph_name", metavar="MODULE:GRAPH", help="Another graph, as MODULE:GRAPH or FILE.py:GRAPH.")
@click.option(
    "--policy", "policy_name", metavar="PRESET", type=click.Choice(sorted(PRESETS)), help="Another policy: a preset's."
)
@guardrails_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per run.")
@store_option
@click.pass_context
def replay(
    ctx: click.Context,
    run_ids: tuple[str, ...],
    graph_name: str | None,
    policy_name: str | None,
    limits: dict[str, Any],
    as_json: bool,
    path: Path | None,
) -> None:
    """Replay the recorded outcomes of RUNs, or of all runs; no model and no tool is called.

    Reports the first record of each run whose transition would be a different one.

    Exit codes: 0 every transition is the same; 1 a run diverges or cannot be replayed; 2 wrong usage.
    """
    store = open_existing_store(path)
    policy = None if policy_name is None else PRESETS[policy_name].policy
    graph = load_graph(graph_name) if graph_name else None
    failed = False
    for run_id in run_ids or tuple(h.run_id for h in store.heads() if h.seq):
        result = _replay_run(store, run_id, graph, policy, limits, named=bool(run_ids))
        failed |= isinstance(result, str) or not result.same
        if as_json:
            data = {"error": result} if isinstance(result, str) else asdict(result)
            click.echo(json.dumps({"run_id": str(run_id), **data}))
        else:
            click.echo(single_line(f"{run_id}  {_describe_replay(result)}"))
    ctx.exit(1 if failed else 0)


def _replay_run(
    store: Store,
    run_id: str,
    graph: Graph | None,
    policy: RecoveryPolicy | None,
    limits: dict[str, Any],
    *,
    named: bool,
) -> Replay | str:
    """The replay of a run, or why it cannot be replayed."""
    try:
        rows, head = consistent_read(store, run_id)
        if not rows:
            return "the journal is empty"
        report = verify_run(run_id, rows, head)
        if report.code in (TAMPERED, UNVERIFIABLE):
            return f"record {report.seq}: {report.reason}"
        guardrails = change_guardrails(open_record(rows[0]).get("guardrails", {}), limits) if limits else None
        return replay_run(rows, graph or _recorded_graph(rows), policy=policy, guardrails=guardrails)
    except (JournalError, StoreError) as error:
        if named and isinstance(error, UnknownRunError):
            raise
        return str(error)


def _describe_replay(result: Replay | str) -> str:
    if isinstance(result, str):
        return f"cannot be replayed: {result}"
    verdict = "the same" if result.same else f"record {result.seq}: {result.instead} instead of {result.recorded}"
    start = f", from record {result.since} on (path check skipped before it)" if result.since > 1 else ""
    return f"{result.moves} transitions{start}  {verdict}"


def _recorded_graph(rows: Sequence[SealedRecord]) -> Graph:
    """The graph that a run's journal pins, if a preset has it."""
    pins = [row for row in rows if row.seq == 1 or is_kind(row, "run.migrated")]
    try:
        fingerprint = open_record(pins[-1])["graph"]["fingerprint"]
    except (LookupError, TypeError) as error:
        raise JournalError(f"record {pins[-1].seq if pins else 1} names no graph") from error
    graph = preset_graph(fingerprint)
    if graph is None:
        raise JournalError("no preset has its graph: name the graph with --graph")
    return graph
