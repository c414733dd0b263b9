"""``agentfsm verify``, ``replay``, ``fork``, ``redact`` and ``checkpoint``: what an auditor asks of a store."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import click

from agentfsm.cli.loading import load_graph
from agentfsm.cli.runs import open_store, store_option
from agentfsm.core.guardrails import AgentGuardrails
from agentfsm.core.presets import PRESETS
from agentfsm.errors import JournalError
from agentfsm.journal.canonical import decode
from agentfsm.journal.checkpoint import read_checkpoint, write_checkpoint
from agentfsm.journal.export import read_lines
from agentfsm.journal.forks import fork as fork_run
from agentfsm.journal.moment import as_it_stands
from agentfsm.journal.records import Row
from agentfsm.journal.redact import redact as redact_run
from agentfsm.journal.replay import replay as replay_run
from agentfsm.journal.verify import CANNOT, GOOD, OPEN, TAMPERED, Report
from agentfsm.journal.verify import verify as verify_run

__all__ = ["checkpoint", "fork", "redact", "replay", "verify"]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_WORDS = {GOOD: "good", TAMPERED: "TAMPERED", CANNOT: "cannot be verified", OPEN: "good, open"}


_VERIFY_EXAMPLES = """\b
Examples:
  agentfsm verify                          every run of the store
  agentfsm verify 3f9c0a1b2c3d4e5f --store runs.db
  agentfsm verify --file run.jsonl         what agentfsm export wrote
  agentfsm verify --checkpoint note --key public.pem
"""


@click.command(epilog=_VERIFY_EXAMPLES, short_help="Check that journals are whole and everything in them was allowed.")
@click.argument("run_ids", metavar="[RUN]...", nargs=-1)
@click.option("--file", "exported", type=_FILE, help="Check an exported journal in place of a store.")
@click.option("--checkpoint", "note", type=_FILE, help="A signed checkpoint to hold the runs against.")
@click.option("--key", type=_FILE, help="The public key of the checkpoint, as PEM.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a run.")
@store_option
@click.pass_context
def verify(
    ctx: click.Context,
    run_ids: tuple[str, ...],
    exported: Path | None,
    note: Path | None,
    key: Path | None,
    as_json: bool,
    path: Path | None,
) -> None:
    """Check RUNs, or all runs of a store.

    Exit codes: 0 good, 1 tampered with, 2 wrong usage, 3 cannot be verified, 4 good with open items (runs that
    are not at their end).
    """
    if (note is None) != (key is None):
        raise click.UsageError("--checkpoint and --key go together")
    reports: list[Report] = []
    known = read_checkpoint(note.read_text(encoding="utf-8"), key.read_bytes()) if note and key else {}
    if exported is not None:
        rows = read_lines(exported.read_text(encoding="utf-8").rstrip("\n").split("\n"))
        try:
            run_id = str(json.loads(rows[0].body)["run"])
        except (LookupError, ValueError):
            raise JournalError(f"{exported} holds no journal") from None
        reports.append(verify_run(run_id, rows, None, _sealed(known, run_id)))
    else:
        store = open_store(path)
        wanted = run_ids or tuple(dict.fromkeys([*(h.run_id for h in store.heads()), *known]))
        for run_id in wanted:
            if run_id in known and store.head(run_id) is None:
                reports.append(Report(run_id, TAMPERED, 0, None, "a checkpoint knows it, and the store does not"))
            else:
                rows, head = as_it_stands(store, run_id)
                reports.append(verify_run(run_id, rows, head, _sealed(known, run_id)))
    for report in reports:
        _tell(report, as_json)
    codes = {report.code for report in reports}
    ctx.exit(next((code for code in (TAMPERED, CANNOT, OPEN) if code in codes), GOOD))


def _sealed(known: dict[str, tuple[int, str]], run_id: str) -> dict[int, str]:
    return {known[run_id][0]: known[run_id][1]} if run_id in known and known[run_id][0] else {}


def _tell(report: Report, as_json: bool) -> None:
    if as_json:
        fields = ("run_id", "code", "records", "seq", "reason", "open")
        click.echo(json.dumps({name: getattr(report, name) for name in fields}))
        return
    why = f": record {report.seq}: {report.reason}" if report.seq is not None else f": {report.reason}"
    what = why if report.reason else "".join(f"; {line}" for line in report.open)
    click.echo(f"{report.run_id}  {_WORDS[report.code]} ({report.records} records){what}")


_REPLAY_EXAMPLES = """\b
Examples:
  agentfsm replay                          every run, as it was
  agentfsm replay 3f9c0a1b2c3d4e5f --policy strict
  agentfsm replay --guardrails '{"max_iterations": 5}'
  agentfsm replay --graph my_graphs.py:MINE
"""


@click.command(epilog=_REPLAY_EXAMPLES, short_help="Run the machine on recorded outcomes.")
@click.argument("run_ids", metavar="[RUN]...", nargs=-1)
@click.option("--graph", "graph_name", metavar="NAME", help="Another graph: a file or module with one, as for diagram.")
@click.option("--policy", "policy_name", metavar="PRESET", type=click.Choice(sorted(PRESETS)), help="Another's policy.")
@click.option("--guardrails", metavar="JSON", help="Other limits: '{\"max_iterations\": 5}'; the rest as recorded.")
@store_option
@click.pass_context
def replay(
    ctx: click.Context,
    run_ids: tuple[str, ...],
    graph_name: str | None,
    policy_name: str | None,
    guardrails: str | None,
    path: Path | None,
) -> None:
    """Run the real machine on what RUNs recorded (all runs unless named); no model and no tool is called.

    Names the first record of each run that would go elsewhere. Exit codes: 0 all the same; 1 some would go
    elsewhere, or cannot be replayed; 2 wrong usage.
    """
    store = open_store(path)
    policy = None if policy_name is None else PRESETS[policy_name].policy
    elsewhere = 0
    for run_id in run_ids or tuple(h.run_id for h in store.heads() if h.seq):
        rows = store.rows(run_id)
        pinned: dict[str, Any] = decode(rows[0].body) if rows else {}
        limits = None
        if guardrails is not None:
            limits = AgentGuardrails.model_validate({**pinned.get("guardrails", {}), **_object(guardrails)})
        try:
            graph = load_graph(graph_name) if graph_name else _known_graph(rows)
            told = replay_run(rows, graph, policy=policy, guardrails=limits)
        except JournalError as error:
            elsewhere += 1
            click.echo(f"{run_id}  cannot be replayed: {error}")
            continue
        elsewhere += not told.same
        went = "the same" if told.same else f"record {told.seq}: {told.instead} in place of {told.recorded}"
        since = f", from record {told.since} on (what is in front is vouched for)" if told.since > 1 else ""
        click.echo(f"{run_id}  {told.moves} moves{since}  {went}")
    ctx.exit(1 if elsewhere else 0)


def _known_graph(rows: Sequence[Row]) -> Any:
    """The graph that a run was on last, where a preset has it."""
    pins = [row for row in rows if row.seq == 1 or '"kind":"run.migrated"' in row.body]
    fingerprint = decode(pins[-1].body)["graph"]["fingerprint"] if pins else None
    for preset in PRESETS.values():
        if preset.graph.fingerprint == fingerprint:
            return preset.graph
    raise JournalError("it has a graph of its own: name it with --graph")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"it is no JSON: {error}", param_hint="--guardrails") from None
    if not isinstance(value, dict):
        raise click.BadParameter("it is no JSON object", param_hint="--guardrails")
    return cast("dict[str, Any]", value)


_FORK_EXAMPLES = """\b
Examples:
  agentfsm fork 3f9c0a1b2c3d4e5f --at 12
  agentfsm fork 3f9c0a1b2c3d4e5f --at 12 --as another-try
"""


@click.command(epilog=_FORK_EXAMPLES, short_help="Begin a new run with the past of another.")
@click.argument("run_id", metavar="RUN")
@click.option("--at", required=True, type=int, metavar="SEQ", help="The last record that both have.")
@click.option("--as", "new_id", metavar="ID", help="The new run's id; a random one unless given.")
@store_option
def fork(run_id: str, at: int, new_id: str | None, path: Path | None) -> None:
    """Begin a run where RUN stood behind record SEQ, and print its id; agentfsm resume goes on with it.

    What RUN did up to there is not done again.
    """
    store = open_store(path)
    made = new_id or secrets.token_hex(8)
    asyncio.run(fork_run(store, run_id, at, made))
    store.close()
    click.echo(made)


_REDACT_EXAMPLES = """\b
Examples:
  agentfsm redact 3f9c0a1b2c3d4e5f 4 --by "Ann, on request"
  agentfsm redact 3f9c0a1b2c3d4e5f 4.out.replied.reply.message.content
"""


@click.command(epilog=_REDACT_EXAMPLES, short_help="Delete what was said, for good.")
@click.argument("run_id", metavar="RUN")
@click.argument("field", metavar="FIELD")
@click.option("--by", default="", metavar="NAME", help="Who wants it so; it is recorded.")
@store_option
def redact(run_id: str, field: str, by: str, path: Path | None) -> None:
    """Delete FIELD of RUN: a record's number and where in it, as in 4.out.replied.reply.message.content.

    agentfsm show RUN --json shows every record's fields. The number alone stands for all that was said there.
    The journal stays whole, and says what is gone. Nobody can go on with the run, or replay it, behind that.
    """
    store = open_store(path)
    gone = asyncio.run(redact_run(store, run_id, field, by))
    store.close()
    click.echo(f"{gone} value{'s' * (gone != 1)} deleted")


_CHECKPOINT_EXAMPLES = """\b
Examples:
  agentfsm checkpoint --key key.pem > note
  agentfsm checkpoint --key key.pem --name payroll --store runs.db > note
"""


@click.command(epilog=_CHECKPOINT_EXAMPLES, short_help="Write a signed note of where all runs stand.")
@click.option("--key", required=True, type=_FILE, help="An Ed25519 private key, as PEM.")
@click.option("--name", default="agentfsm", metavar="NAME", help="Whose store and key this is.")
@store_option
def checkpoint(key: Path, name: str, path: Path | None) -> None:
    """Write a signed note of where all runs stand to standard output. Keep it away from the store.

    With it, agentfsm verify --checkpoint finds ends that were cut off and journals that were written anew. Make
    a key with: openssl genpkey -algorithm ed25519 -out key.pem; its public half with: openssl pkey -in key.pem
    -pubout -out public.pem
    """
    click.echo(write_checkpoint(open_store(path).heads(), key.read_bytes(), name), nl=False)
