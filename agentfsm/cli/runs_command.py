"""``agentfsm runs``, ``show`` and ``export``: list, inspect and export the runs of a store."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from agentfsm.cli.console import shorten, single_line
from agentfsm.errors import AgentfsmError, JournalError, StoreError
from agentfsm.journal.load import StoredRequest, pending_request
from agentfsm.journal.records import Record, SealedRecord, export_lines, read_record
from agentfsm.journal.replay import rehydrate
from agentfsm.journal.sqlite.sqlite_store import SqliteStore
from agentfsm.journal.store import Head
from agentfsm.loop.messages import Usage

__all__ = ["complete_run_id", "default_store_path", "export", "open_existing_store", "runs", "show", "store_option"]


def default_store_path() -> Path:
    """``agentfsm.db`` in the user's data folder; ``AGENTFSM_STORE`` names another."""
    if named := os.environ.get("AGENTFSM_STORE"):
        return Path(named)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "agentfsm" / "agentfsm.db"


def store_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--store PATH``."""
    return click.option(
        "--store",
        "path",
        metavar="PATH",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="AGENTFSM_STORE",
        show_envvar=True,
        help="The file with the runs; agentfsm.db in your data folder unless given.",
    )(command)


def open_existing_store(path: Path | None) -> SqliteStore:
    """The store at a path that must be there, or the default one; closed when the command ends, however it ends.

    Raises:
        click.UsageError: There is no such file.
    """
    where = path or default_store_path()
    if not where.exists():
        raise click.UsageError(f"there is no store at {where}")
    store = SqliteStore(where)
    click.get_current_context().call_on_close(store.close)
    return store


def complete_run_id(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The runs of the store whose ids begin so, with how they stand, for a shell that completes what is typed."""
    where: Path = ctx.params.get("path") or ctx.params.get("store") or default_store_path()
    try:
        with contextlib.closing(SqliteStore(where)) as store:
            heads = store.heads()
    except (AgentfsmError, OSError):  # a shell has no place for it; the command itself will say it
        return []
    return [CompletionItem(head.run_id, help=head.status) for head in heads if head.run_id.startswith(incomplete)]


_RUNS_EXAMPLES = """\b
Examples:
  agentfsm runs
  agentfsm runs --status suspended
  agentfsm runs --store runs.db --json
"""


@click.command(epilog=_RUNS_EXAMPLES, short_help="List the runs of a store.")
@click.option("--status", type=click.Choice(["running", "suspended", "finished"]), help="Only runs that stand so.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@store_option
def runs(status: Any, as_json: bool, path: Path | None) -> None:
    """List the runs of a store: id, how each stands, how many records it has, who holds it, what it waits for.

    A run that is "running" and held by nobody was cut off: agentfsm resume goes on with it.
    """
    store = open_existing_store(path)
    heads = store.heads(status)
    for head in heads:
        waits = _pending_request(store, head)
        if as_json:
            fields = ("run_id", "status", "seq", "hash", "epoch", "owner")
            told: dict[str, Any] = {name: getattr(head, name) for name in fields}
            if isinstance(waits, StoredRequest):
                told |= {"kind": waits.kind, "question": waits.question, "digest": waits.digest}
            elif waits:
                told["error"] = waits
            click.echo(json.dumps(told, default=str))
        else:
            cut_off = "  cut off" if head.status == "running" else ""
            held = f"  held by {head.owner}" if head.owner else cut_off
            about = f"  {shorten(waits, 200)}" if waits else ""
            line = f"{head.run_id}  {head.status:<9}  {head.seq} record{'s' * (head.seq != 1)}{held}"
            click.echo(single_line(line) + about)
    if not heads:
        click.echo(f"agentfsm: there is no {f'{status} ' if status else ''}run in {store.path}", err=True)


def _pending_request(store: SqliteStore, head: Head) -> StoredRequest | str:
    """What a run waits for; or what is wrong with the record that should say so; or nothing."""
    try:
        return pending_request(store, head) or ""
    except (JournalError, StoreError) as error:
        return f"cannot be read: {error}"


_SHOW_EXAMPLES = """\b
Examples:
  agentfsm show 3f9c0a1b2c3d4e5f
  agentfsm show 3f9c0a1b2c3d4e5f --json --store runs.db
"""


@click.command(epilog=_SHOW_EXAMPLES, short_help="Show what happened in a run.")
@click.argument("run_id", metavar="RUN", shell_complete=complete_run_id)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a record.")
@store_option
@click.pass_context
def show(ctx: click.Context, run_id: str, as_json: bool, path: Path | None) -> None:
    """Show RUN record by record: moves with the guards that said no before them, failures, effects, times.

    A record that cannot be read is named as such, and the exit code is 1 then; agentfsm verify says what was changed.
    """
    rows = open_existing_store(path).records(run_id)
    graph: Any = {}
    whole, redacted = True, False
    for row in rows:
        try:
            found = read_record(row, run_id)
            graph = found.data.get("graph", graph)
            said = _record_json(found) if as_json else _record_line(found, graph)
            redacted |= found.redacted
        except (JournalError, LookupError, TypeError, ValueError, AttributeError) as error:
            whole, why = False, str(error) if isinstance(error, JournalError) else f"record {row.seq} is none"
            broken = {"run": run_id, "seq": row.seq, "hash": row.hash, "error": why}
            said = json.dumps(broken) if as_json else f"{row.seq:>5}  {why}"
        click.echo(said if as_json else single_line(said))
    usage = None if as_json or redacted or not whole else _total_usage(rows)
    if usage is not None:
        click.echo(f"{usage.input_tokens} tokens in, {usage.output_tokens} out, {usage.cost_usd:.4f} USD")
    if not whole:
        click.echo(f"agentfsm: some of it cannot be read; agentfsm verify {run_id} says what was changed", err=True)
        ctx.exit(1)


def _total_usage(rows: Sequence[SealedRecord]) -> Usage | None:
    """What a run used up, where all of it can be read."""
    try:
        return rehydrate(rows).run.usage
    except JournalError:
        return None


def _record_json(record: Record) -> str:
    return json.dumps({**record.data, "run": record.run_id, "hash": record.hash}, default=lambda _: None)


def _record_line(record: Record, graph: Any) -> str:
    when = datetime.fromtimestamp(record.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{record.seq:>5}  {when}  {_describe_record(record, graph)}" + ("  (redacted)" if record.redacted else "")


def _describe_record(record: Record, graph: Any) -> str:
    data = record.data
    match record.kind:
        case "transition":
            source = data["transition"].rpartition(".")[0]
            asked = [guard for state, guard, _, _ in graph["transitions"] if state == source][: len(data["tried"]) - 1]
            said_no = f"  not: {', '.join(asked)}" if asked else ""
            failure = f"  {data['failure']['kind']}: {data['failure'].get('explanation')}" if "failure" in data else ""
            ((what, outcome),) = data["out"].items()
            tell = _REPLY_FORMATTERS.get(what)
            said = f"  {tell(outcome['reply'])}" if tell else ""
            action = f"  action: {outcome['action']}" if "action" in outcome else ""
            took = f"  {data['us'][0] / 1000:.1f} ms" if "us" in data else ""
            return f"{data['transition']} -> {data['to']}{took}{said}{failure}{action}{said_no}"
        case "effect.intent":
            again = f", attempt {data['attempt']}" if "attempt" in data else ""
            return f"effect {data['eid']} of {data['name']} begins{again}"
        case "effect.result":
            out = data["out"]
            return f"effect {data['eid']} of {out['name']}: {out.get('status', 'done')}: {_shorten(out.get('content'))}"
        case "run.suspended":
            waiting = data["waiting"]
            about = f"  {waiting['tool']} {_shorten(waiting.get('arguments'))}" if waiting.get("tool") else ""
            question = _shorten(waiting.get("question"))
            return f"waits for a person ({waiting['kind']}): {question}{about}  (--to {record.hash[:12]})"
        case "run.resumed":
            to = f", answering record {data['to']['seq']} ({data['to']['hash'][:12]})" if "to" in data else ""
            return f"taken up ({data['from']}){to}"
        case "run.migrated":
            judged = f"its path was replayed, {data['moves']} moves" if "moves" in data else "its path is vouched for"
            names = ", ".join(
                f"{old} is {new}" for part in ("states", "transitions") for old, new in data.get(part, ())
            )
            return (
                f"run.migrated to graph {graph['name']} ({graph['fingerprint'][:12]}) from {data['from'][:12]}, "
                f"in {data['to']}: {judged}{'; ' * bool(names)}{names}"
            )
        case "run.created" | "run.forked":
            parent = data.get("parent")
            past = f" from {parent['run']}" + (f" at {parent['seq']}" if "seq" in parent else "") if parent else ""
            return f"{record.kind}{past} on graph {graph['name']} ({graph['fingerprint'][:12]})"
        case _:
            rest = {k: v for k, v in data.items() if k not in ("kind", "seq", "ts", "epoch", "salt")}
            return f"{record.kind} {json.dumps(rest, default=str) if rest else ''}".rstrip()


def _describe_human_reply(reply: Any) -> str:
    """What a person answered, and who they are."""
    about = "".join(f" {_shorten(reply[name])}" for name in ("text", "arguments") if name in reply)
    return f"{reply['kind']}{about}" + (f" by {_shorten(reply['by'])}" if "by" in reply else "")


def _describe_model_reply(reply: Any) -> str:
    """What a model replied, and what it cost."""
    message, usage = reply["message"], reply.get("usage", {})
    calls = (f"{call['name']} {_shorten(call.get('arguments'))}" for call in message.get("tool_calls", ()))
    text = _shorten(message.get("content") or "")
    cost = f"{float(usage.get('cost_usd', 0)):.4f} USD"
    tokens = f"({usage.get('input_tokens', 0)} tokens in, {usage.get('output_tokens', 0)} out, {cost})"
    return "; ".join(part for part in (text, *calls) if part) + (f" {tokens}" if usage else "")


_REPLY_FORMATTERS = {"answered": _describe_human_reply, "replied": _describe_model_reply}
"""What is told of outcomes that somebody said."""


def _shorten(value: Any, limit: int = 80) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr) if isinstance(value, dict) else str(value)
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


_EXPORT_EXAMPLES = """\b
Examples:
  agentfsm export 3f9c0a1b2c3d4e5f > run.jsonl
  agentfsm export 3f9c0a1b2c3d4e5f --store runs.db | gzip > run.jsonl.gz
"""


@click.command(epilog=_EXPORT_EXAMPLES, short_help="Write a run's journal as JSON lines.")
@click.argument("run_id", metavar="RUN", shell_complete=complete_run_id)
@click.option("--jsonl", is_flag=True, default=True, help="As JSON lines (the only form there is).")
@store_option
def export(run_id: str, jsonl: bool, path: Path | None) -> None:
    """Write the journal of RUN to standard output, each record exactly as it was hashed.

    examples/verify_journal.py checks such a file with nothing but Python's standard library.
    """
    for line in export_lines(open_existing_store(path).records(run_id)):
        click.echo(line, nl=False)
