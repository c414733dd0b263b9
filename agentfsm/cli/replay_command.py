"""``agentfsm replay``: replay recorded runs on the real machine, unchanged or with another graph, policy or guardrails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import click

from agentfsm.cli.console import single_line
from agentfsm.cli.runs_command import complete_run_id, open_existing_store, store_option
from agentfsm.cli.user_code import load_graph
from agentfsm.errors import JournalError, StoreError, UnknownRunError
from agentfsm.journal.records import SealedRecord, open_record
from agentfsm.journal.replay import Replay
from agentfsm.journal.replay import replay as replay_run
from agentfsm.journal.store import Store, consistent_read
from agentfsm.journal.verification import TAMPERED, UNVERIFIABLE
from agentfsm.journal.verification import verify as verify_run
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.policy import RecoveryPolicy
from agentfsm.loop.presets import PRESETS
from agentfsm.machine.graph import Graph

__all__ = ["replay"]

_EXAMPLES = """\b
Examples:
  agentfsm replay                          every run, as it was
  agentfsm replay 3f9c0a1b2c3d4e5f --policy strict
  agentfsm replay --guardrails '{"max_iterations": 5}'
  agentfsm replay --graph my_graphs.py:MINE
"""


@click.command(epilog=_EXAMPLES, short_help="Run the machine on recorded outcomes.")
@click.argument("run_ids", metavar="[RUN]...", nargs=-1, shell_complete=complete_run_id)
@click.option("--graph", "graph_name", metavar="NAME", help="Another graph: a file or module with one, as for diagram.")
@click.option("--policy", "policy_name", metavar="PRESET", type=click.Choice(sorted(PRESETS)), help="Another's policy.")
@click.option("--guardrails", metavar="JSON", help="Other limits: '{\"max_iterations\": 5}'; the rest as recorded.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a run.")
@store_option
@click.pass_context
def replay(
    ctx: click.Context,
    run_ids: tuple[str, ...],
    graph_name: str | None,
    policy_name: str | None,
    guardrails: str | None,
    as_json: bool,
    path: Path | None,
) -> None:
    """Run the real machine on what RUNs recorded (all runs unless named); no model and no tool is called.

    Names the first record of each run that would go elsewhere. Exit codes: 0 all the same; 1 some would go
    elsewhere, or cannot be replayed; 2 wrong usage.
    """
    store = open_existing_store(path)
    policy = None if policy_name is None else PRESETS[policy_name].policy
    graph = load_graph(graph_name) if graph_name else None
    limits = None if guardrails is None else _parse_json_object(guardrails)
    elsewhere = 0
    for run_id in run_ids or tuple(h.run_id for h in store.heads() if h.seq):
        told = _replay_run(store, run_id, graph, policy, limits, named=bool(run_ids))
        elsewhere += isinstance(told, str) or not told.same
        if as_json:
            how = {"error": told} if isinstance(told, str) else asdict(told)
            click.echo(json.dumps({"run_id": str(run_id), **how}))
        else:
            click.echo(single_line(f"{run_id}  {_describe_replay(told)}"))
    ctx.exit(1 if elsewhere else 0)


def _replay_run(
    store: Store,
    run_id: str,
    graph: Graph | None,
    policy: RecoveryPolicy | None,
    limits: dict[str, Any] | None,
    *,
    named: bool,
) -> Replay | str:
    """How the replay of a run went, or why it cannot be replayed."""
    try:
        rows, head = consistent_read(store, run_id)
        if not rows:
            return "the journal is empty"
        found = verify_run(run_id, rows, head)
        if found.code in (TAMPERED, UNVERIFIABLE):
            return f"record {found.seq}: {found.reason}"
        asked = None
        if limits is not None:
            pinned = open_record(rows[0]).get("guardrails", {})
            asked = AgentGuardrails.model_validate({**pinned, **limits})
        return replay_run(rows, graph or _preset_graph(rows), policy=policy, guardrails=asked)
    except (JournalError, StoreError) as error:
        if named and isinstance(error, UnknownRunError):
            raise
        return str(error)


def _describe_replay(result: Replay | str) -> str:
    if isinstance(result, str):
        return f"cannot be replayed: {result}"
    went = "the same" if result.same else f"record {result.seq}: {result.instead} in place of {result.recorded}"
    since = f", from record {result.since} on (what is in front is vouched for)" if result.since > 1 else ""
    return f"{result.moves} moves{since}  {went}"


def _preset_graph(rows: Sequence[SealedRecord]) -> Graph:
    """The graph that a run was on last, where a preset has it."""
    pins = [row for row in rows if row.seq == 1 or '"kind":"run.migrated"' in row.body]
    try:
        fingerprint = open_record(pins[-1])["graph"]["fingerprint"]
    except (LookupError, TypeError) as error:
        raise JournalError(f"record {pins[-1].seq if pins else 1} names no graph") from error
    for preset in PRESETS.values():
        if preset.graph.fingerprint == fingerprint:
            return preset.graph
    raise JournalError("it has a graph of its own: name it with --graph")


def _parse_json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"it is no JSON: {error}", param_hint="--guardrails") from None
    if not isinstance(value, dict):
        raise click.BadParameter("it is no JSON object", param_hint="--guardrails")
    return cast("dict[str, Any]", value)
