"""``agentfsm verify``, ``fork``, ``redact`` and ``checkpoint``: what an auditor asks of a store."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import click

from agentfsm.cli.runs import complete_run, open_store, store_option
from agentfsm.cli.screen import on_a_line, short
from agentfsm.errors import JournalError, StoreError, UnknownRunError
from agentfsm.journal.audit import Known, check_export, check_run
from agentfsm.journal.checkpoint import read_checkpoint, write_checkpoint
from agentfsm.journal.forks import fork as fork_run
from agentfsm.journal.loose import loose, wipe
from agentfsm.journal.redact import redact as redact_run
from agentfsm.journal.verify import CANNOT, GOOD, OPEN, TAMPERED, Report

__all__ = ["checkpoint", "fork", "redact", "verify"]

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
@click.argument("run_ids", metavar="[RUN]...", nargs=-1, shell_complete=complete_run)
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

    Exit codes: 0 good; 1 tampered with; 2 wrong usage; 3 cannot be verified, because a file cannot be read or a
    checkpoint is not good; 4 good with open items (runs that are not at their end).
    """
    if (note is None) != (key is None):
        raise click.UsageError("--checkpoint and --key go together")
    if exported is not None and run_ids:
        raise click.UsageError("--file holds one run, which need not be named")
    codes: set[int] = set()
    try:
        known = read_checkpoint(note.read_text("utf-8", "replace"), key.read_bytes()) if note and key else None
        for report in _reports(run_ids, exported, path, known):
            codes.add(report.code)
            _tell(report, as_json)
    except UnknownRunError:
        raise
    except (StoreError, JournalError) as error:
        about = f"{exported}: " if exported is not None and isinstance(error, JournalError) else ""
        click.echo(f"agentfsm: cannot be verified: {about}{short(error, 2000)}", err=True)
        codes.add(CANNOT)
    ctx.exit(next((code for code in (TAMPERED, CANNOT, OPEN) if code in codes), GOOD))


def _reports(
    run_ids: tuple[str, ...], exported: Path | None, path: Path | None, known: Known | None
) -> Iterator[Report]:
    if exported is not None:
        yield check_export(_text(exported), known)
        return
    store = open_store(path)
    there = [head.run_id for head in store.heads()]
    wanted = list(run_ids) or [*there, *(known or {})]
    for run_id in dict.fromkeys(wanted):
        try:
            yield check_run(store, run_id, known or {})
        except UnknownRunError as error:
            if run_ids:
                raise
            yield Report(str(run_id), TAMPERED, 0, None, f"the store lists it, and has it not: {error}")
    if run_ids:
        return
    yield from loose(store.path)
    if not there:
        click.echo(f"agentfsm: there is no run in {store.path}", err=True)


def _text(path: Path) -> str:
    """A file's text; what is none in it stays to be found where it stands."""
    return path.read_text(encoding="utf-8", errors="surrogateescape")


def _tell(report: Report, as_json: bool) -> None:
    if as_json:
        fields = ("run_id", "code", "records", "seq", "reason", "open")
        click.echo(json.dumps({name: getattr(report, name) for name in fields}))
        return
    why = f": record {report.seq}: {report.reason}" if report.seq is not None else f": {report.reason}"
    what = why if report.reason else "".join(f"; {line}" for line in report.open)
    count = f"{report.records} record{'s' * (report.records != 1)}"
    click.echo(on_a_line(f"{report.run_id}  {_WORDS[report.code]} ({count}){what}"))


_FORK_EXAMPLES = """\b
Examples:
  agentfsm fork 3f9c0a1b2c3d4e5f --at 12
  agentfsm fork 3f9c0a1b2c3d4e5f --at 12 --as another-try
"""


@click.command(epilog=_FORK_EXAMPLES, short_help="Begin a new run with the past of another.")
@click.argument("run_id", metavar="RUN", shell_complete=complete_run)
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
    store = open_store(path)
    asyncio.run(fork_run(store, run_id, at, made))
    store.close()
    click.echo(made)


_REDACT_EXAMPLES = """\b
Examples:
  agentfsm redact 3f9c0a1b2c3d4e5f 4 --by "Ann, on request"
  agentfsm redact 3f9c0a1b2c3d4e5f 4.out.replied.reply.message.content
"""


@click.command(epilog=_REDACT_EXAMPLES, short_help="Delete what was said, for good.")
@click.argument("run_id", metavar="RUN", shell_complete=complete_run)
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
    wiped = wipe(store.path)
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
