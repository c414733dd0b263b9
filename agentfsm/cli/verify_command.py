"""``agentfsm verify``, ``checkpoint``, ``fork`` and ``redact``: verify the journals of a store, and the operations that must keep them verifiable."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import click

from agentfsm.cli.console import shorten, single_line
from agentfsm.cli.runs_command import complete_run_id, open_existing_store, store_option
from agentfsm.errors import JournalError, StoreError, UnknownRunError
from agentfsm.journal.checkpoint import read_checkpoint, write_checkpoint
from agentfsm.journal.fork import fork as fork_run
from agentfsm.journal.redact import redact as redact_run
from agentfsm.journal.sqlite.sqlite_orphans import find_orphans, truncate_wal
from agentfsm.journal.verification import (
    GOOD,
    OPEN,
    TAMPERED,
    UNVERIFIABLE,
    CheckpointHeads,
    VerificationReport,
    verify_export,
    verify_stored_run,
)

__all__ = ["checkpoint", "fork", "redact", "verify"]

_EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_STATUS_TEXTS = {GOOD: "good", TAMPERED: "TAMPERED", UNVERIFIABLE: "cannot be verified", OPEN: "good, open"}


_VERIFY_EXAMPLES = """\b
Examples:
  agentfsm verify                          every run of the store
  agentfsm verify 3f9c0a1b2c3d4e5f --store runs.db
  agentfsm verify --file run.jsonl         what agentfsm export wrote
  agentfsm verify --checkpoint note --key public.pem
"""


@click.command(epilog=_VERIFY_EXAMPLES, short_help="Check that journals are whole and everything in them was allowed.")
@click.argument("run_ids", metavar="[RUN]...", nargs=-1, shell_complete=complete_run_id)
@click.option("--file", "export_file", type=_EXISTING_FILE, help="Check an exported journal in place of a store.")
@click.option(
    "--checkpoint", "checkpoint_file", type=_EXISTING_FILE, help="A signed checkpoint to hold the runs against."
)
@click.option("--key", type=_EXISTING_FILE, help="The public key of the checkpoint, as PEM.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a run.")
@store_option
@click.pass_context
def verify(
    ctx: click.Context,
    run_ids: tuple[str, ...],
    export_file: Path | None,
    checkpoint_file: Path | None,
    key: Path | None,
    as_json: bool,
    path: Path | None,
) -> None:
    """Check RUNs, or all runs of a store.

    Exit codes: 0 good; 1 tampered with; 2 wrong usage; 3 cannot be verified, because a file cannot be read or a
    checkpoint is not good; 4 good with open items (runs that are not at their end).
    """
    if (checkpoint_file is None) != (key is None):
        raise click.UsageError("--checkpoint and --key go together")
    if export_file is not None and run_ids:
        raise click.UsageError("--file holds one run, which need not be named")
    codes: set[int] = set()
    try:
        known = (
            read_checkpoint(checkpoint_file.read_text("utf-8", "replace"), key.read_bytes())
            if checkpoint_file and key
            else None
        )
        for report in _verify_runs(run_ids, export_file, path, known):
            codes.add(report.code)
            _print_report(report, as_json)
    except UnknownRunError:
        raise
    except (StoreError, JournalError) as error:
        about = f"{export_file}: " if export_file is not None and isinstance(error, JournalError) else ""
        click.echo(f"agentfsm: cannot be verified: {about}{shorten(error, 2000)}", err=True)
        codes.add(UNVERIFIABLE)
    ctx.exit(next((code for code in (TAMPERED, UNVERIFIABLE, OPEN) if code in codes), GOOD))


def _verify_runs(
    run_ids: tuple[str, ...], export_file: Path | None, path: Path | None, checkpoint_heads: CheckpointHeads | None
) -> Iterator[VerificationReport]:
    if export_file is not None:
        yield verify_export(_read_text(export_file), checkpoint_heads)
        return
    store = open_existing_store(path)
    there = [head.run_id for head in store.heads()]
    wanted = list(run_ids) or [*there, *(checkpoint_heads or {})]
    for run_id in dict.fromkeys(wanted):
        try:
            yield verify_stored_run(store, run_id, checkpoint_heads or {})
        except UnknownRunError as error:
            if run_ids:
                raise
            yield VerificationReport(str(run_id), TAMPERED, 0, None, f"the store lists it, and has it not: {error}")
    if run_ids:
        return
    yield from find_orphans(store.path)
    if not there:
        click.echo(f"agentfsm: there is no run in {store.path}", err=True)


def _read_text(path: Path) -> str:
    """A file's text; what is none in it stays to be found where it stands."""
    return path.read_text(encoding="utf-8", errors="surrogateescape")


def _print_report(report: VerificationReport, as_json: bool) -> None:
    if as_json:
        fields = ("run_id", "code", "records", "seq", "reason", "open")
        click.echo(json.dumps({name: getattr(report, name) for name in fields}))
        return
    why = f": record {report.seq}: {report.reason}" if report.seq is not None else f": {report.reason}"
    what = why if report.reason else "".join(f"; {line}" for line in report.open)
    count = f"{report.records} record{'s' * (report.records != 1)}"
    click.echo(single_line(f"{report.run_id}  {_STATUS_TEXTS[report.code]} ({count}){what}"))


_FORK_EXAMPLES = """\b
Examples:
  agentfsm fork 3f9c0a1b2c3d4e5f --at 12
  agentfsm fork 3f9c0a1b2c3d4e5f --at 12 --as another-try
"""


@click.command(epilog=_FORK_EXAMPLES, short_help="Begin a new run with the past of another.")
@click.argument("run_id", metavar="RUN", shell_complete=complete_run_id)
@click.option("--at", required=True, type=int, metavar="SEQ", help="The last record that both have.")
@click.option("--as", "new_id", metavar="ID", help="The new run's id; a random one unless given.")
@store_option
def fork(run_id: str, at: int, new_id: str | None, path: Path | None) -> None:
    """Begin a run where RUN stood behind record SEQ, and print its id; agentfsm resume goes on with it.

    What RUN did up to there is not done again.
    """
    made = secrets.token_hex(8) if new_id is None else new_id
    if not made.strip() or not made.isprintable():
        raise click.BadParameter(f"{made!r} is no id", param_hint="--as")
    store = open_existing_store(path)
    asyncio.run(fork_run(store, run_id, at, made))
    store.close()
    click.echo(made)


_REDACT_EXAMPLES = """\b
Examples:
  agentfsm redact 3f9c0a1b2c3d4e5f 4 --by "Ann, on request"
  agentfsm redact 3f9c0a1b2c3d4e5f 4.out.replied.reply.message.content
"""


@click.command(epilog=_REDACT_EXAMPLES, short_help="Delete what was said, for good.")
@click.argument("run_id", metavar="RUN", shell_complete=complete_run_id)
@click.argument("field", metavar="FIELD")
@click.option("--by", default="", metavar="NAME", help="Who wants it so; it is recorded.")
@store_option
def redact(run_id: str, field: str, by: str, path: Path | None) -> None:
    """Delete FIELD of RUN: a record's number and where in it, as in 4.out.replied.reply.message.content.

    agentfsm show RUN --json shows every record's fields. The number alone stands for all that was said there.
    The journal stays whole, and says what is gone. Nobody can go on with the run, or replay it, behind that.
    """
    store = open_existing_store(path)
    gone = asyncio.run(redact_run(store, run_id, field, by))
    wiped = truncate_wal(store.path)
    store.close()
    click.echo(f"{gone} value{'s' * (gone != 1)} deleted")
    if not wiped:
        kept = "another program reads the store, and the file holds what was deleted until that program lets go of it"
        click.echo(f"agentfsm: {kept}", err=True)


_CHECKPOINT_EXAMPLES = """\b
Examples:
  agentfsm checkpoint --key key.pem > note
  agentfsm checkpoint --key key.pem --name payroll --store runs.db > note
"""


@click.command(epilog=_CHECKPOINT_EXAMPLES, short_help="Write a signed note of where all runs stand.")
@click.option("--key", required=True, type=_EXISTING_FILE, help="An Ed25519 private key, as PEM.")
@click.option("--name", default="agentfsm", metavar="NAME", help="Whose store and key this is.")
@store_option
def checkpoint(key: Path, name: str, path: Path | None) -> None:
    """Write a signed note of where all runs stand to standard output. Keep it away from the store.

    With it, agentfsm verify --checkpoint finds ends that were cut off and journals that were written anew. Make
    a key with: openssl genpkey -algorithm ed25519 -out key.pem; its public half with: openssl pkey -in key.pem
    -pubout -out public.pem
    """
    click.echo(write_checkpoint(open_existing_store(path).heads(), key.read_bytes(), name), nl=False)
