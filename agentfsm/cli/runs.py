"""``agentfsm runs``, ``show`` and ``export``: what a store holds."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from agentfsm.cli.screen import safe, short
from agentfsm.journal.asking import asked
from agentfsm.journal.export import export_lines
from agentfsm.journal.records import Record
from agentfsm.journal.restore import records, restore
from agentfsm.journal.sqlite import SqliteStore

__all__ = ["default_store", "export", "open_store", "runs", "show", "store_option"]


def default_store() -> Path:
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


def open_store(path: Path | None) -> SqliteStore:
    """The store at a path that must be there, or the default one; closed when the command ends, however it ends.

    Raises:
        click.UsageError: There is no such file.
    """
    where = path or default_store()
    if not where.exists():
        raise click.UsageError(f"there is no store at {where}")
    store = SqliteStore(where)
    click.get_current_context().call_on_close(store.close)
    return store


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
    store = open_store(path)
    for head in store.heads(status):
        waits = asked(store, head)
        if as_json:
            fields = ("run_id", "status", "seq", "hash", "epoch", "owner")
            told: dict[str, Any] = {name: getattr(head, name) for name in fields}
            if waits is not None:
                told |= {"kind": waits.kind, "question": waits.question, "digest": waits.digest}
            click.echo(json.dumps(told))
        else:
            cut_off = "  cut off" if head.status == "running" else ""
            held = f"  held by {head.owner}" if head.owner else cut_off
            about = f"  {short(waits, 200)}" if waits is not None else ""
            click.echo(f"{head.run_id}  {head.status:<9}  {head.seq} record{'s' * (head.seq != 1)}{held}{about}")


_SHOW_EXAMPLES = """\b
Examples:
  agentfsm show 3f9c0a1b2c3d4e5f
  agentfsm show 3f9c0a1b2c3d4e5f --json --store runs.db
"""


@click.command(epilog=_SHOW_EXAMPLES, short_help="Show what happened in a run.")
@click.argument("run_id", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a record.")
@store_option
def show(run_id: str, as_json: bool, path: Path | None) -> None:
    """Show RUN record by record: moves with the guards that said no before them, failures, effects, times."""
    rows = open_store(path).rows(run_id)
    found = records(rows, run_id)
    graph: Any = {}
    for record in found:
        graph = record.data.get("graph", graph)
        if as_json:
            click.echo(json.dumps({**record.data, "run": run_id, "hash": record.hash}, default=lambda _: None))
        else:
            click.echo(safe(_line(record, graph)))
    if not as_json and found and not any(record.redacted for record in found):
        usage = restore(rows).run.usage
        click.echo(f"{usage.input_tokens} tokens in, {usage.output_tokens} out, {usage.cost_usd:.4f} USD")


def _line(record: Record, graph: Any) -> str:
    when = datetime.fromtimestamp(record.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{record.seq:>5}  {when}  {_words(record, graph)}" + ("  (redacted)" if record.redacted else "")


def _words(record: Record, graph: Any) -> str:
    data = record.data
    match record.kind:
        case "transition":
            source = data["transition"].rpartition(".")[0]
            asked = [guard for state, guard, _, _ in graph["transitions"] if state == source][: len(data["tried"]) - 1]
            said_no = f"  not: {', '.join(asked)}" if asked else ""
            failure = f"  {data['failure']['kind']}: {data['failure'].get('explanation')}" if "failure" in data else ""
            ((what, outcome),) = data["out"].items()
            said = f"  {_said(outcome['reply'])}" if what == "answered" else ""
            action = f"  action: {outcome['action']}" if "action" in outcome else ""
            took = f"  {data['us'][0] / 1000:.1f} ms" if "us" in data else ""
            return f"{data['transition']} -> {data['to']}{took}{said}{failure}{action}{said_no}"
        case "effect.intent":
            again = f", attempt {data['attempt']}" if "attempt" in data else ""
            return f"effect {data['eid']} of {data['name']} begins{again}"
        case "effect.result":
            out = data["out"]
            return f"effect {data['eid']} of {out['name']}: {out.get('status', 'done')}: {_short(out.get('content'))}"
        case "run.suspended":
            waiting = data["waiting"]
            about = f"  {waiting['tool']} {_short(waiting.get('arguments'))}" if waiting.get("tool") else ""
            question = _short(waiting.get("question"))
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


def _said(reply: Any) -> str:
    """What a person answered, and who they are."""
    about = "".join(f" {_short(reply[name])}" for name in ("text", "arguments") if name in reply)
    return f"{reply['kind']}{about}" + (f" by {_short(reply['by'])}" if "by" in reply else "")


def _short(value: Any, most: int = 80) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr) if isinstance(value, dict) else str(value)
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


_EXPORT_EXAMPLES = """\b
Examples:
  agentfsm export 3f9c0a1b2c3d4e5f > run.jsonl
  agentfsm export 3f9c0a1b2c3d4e5f --store runs.db | gzip > run.jsonl.gz
"""


@click.command(epilog=_EXPORT_EXAMPLES, short_help="Write a run's journal as JSON lines.")
@click.argument("run_id", metavar="RUN")
@click.option("--jsonl", is_flag=True, default=True, help="As JSON lines (the only form there is).")
@store_option
def export(run_id: str, jsonl: bool, path: Path | None) -> None:
    """Write the journal of RUN to standard output, each record exactly as it was hashed.

    examples/verify_journal.py checks such a file with nothing but Python's standard library.
    """
    for line in export_lines(open_store(path).rows(run_id)):
        click.echo(line, nl=False)
