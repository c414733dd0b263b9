"""``agentfsm verify`` and ``checkpoint``: verify the journals of a store, and sign where they end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentfsm.cli.console import shorten, single_line
from agentfsm.cli.local_store import (
    complete_run_id,
    default_store_path,
    open_existing_store,
    store_keyring,
    store_option,
)
from agentfsm.cli.user_code import load_object
from agentfsm.errors import ConfigurationError, JournalError, StoreError, UnknownRunError
from agentfsm.journal.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from agentfsm.journal.sqlite.sqlite_orphans import find_orphans, find_schema_changes
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
from agentfsm.loop.keys import SECRET_VARIABLE, Keyring

if TYPE_CHECKING:
    from agentfsm.agent import Agent

__all__ = ["checkpoint", "verify"]

_EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_STATUS_TEXTS = {GOOD: "good", TAMPERED: "TAMPERED", UNVERIFIABLE: "cannot be verified", OPEN: "good, open"}


_VERIFY_EXAMPLES = """\b
Examples:
  agentfsm verify                          every run of the store
  agentfsm verify 3f9c0a1b2c3d4e5f --store runs.db
  agentfsm verify --file run.jsonl         a file that agentfsm export wrote
  agentfsm verify --checkpoint note --key public.pem
"""


@click.command(epilog=_VERIFY_EXAMPLES)
@click.argument("run_ids", metavar="[RUN]...", nargs=-1, shell_complete=complete_run_id)
@click.option("--file", "export_file", type=_EXISTING_FILE, help="Verify an exported journal instead of a store.")
@click.option(
    "--checkpoint", "checkpoint_file", type=_EXISTING_FILE, help="A signed checkpoint that the runs must match."
)
@click.option("--key", type=_EXISTING_FILE, help="The public key of the checkpoint, as PEM.")
@click.option("--proof", is_flag=True, help="Also check that each run stayed inside the model of its graph's proofs.")
@click.option("--agent", metavar="MODULE:AGENT", help="For --proof, the agent that made the runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per run.")
@store_option
@click.pass_context
def verify(
    ctx: click.Context,
    run_ids: tuple[str, ...],
    export_file: Path | None,
    checkpoint_file: Path | None,
    key: Path | None,
    proof: bool,
    agent: str | None,
    as_json: bool,
    path: Path | None,
) -> None:
    """Verify RUNs, or all runs of a store: the hash chain is intact, and every transition was legal.

    With the secret of the process that wrote them (AGENTFSM_SECRET, or the key file beside the store), each record's
    MAC shows that nobody else did.

    With --proof, each move and counter of a stored run is also checked against the model from which agentfsm check
    proves properties; a run outside that model is reported, with exit code 1.

    Exit codes: 0 good; 1 tampered with; 2 wrong usage; 3 cannot be verified, because a file cannot be read, a
    checkpoint is not valid, or a run was not sealed under the secret; 4 good with open items (runs that have not
    ended).
    """
    if (checkpoint_file is None) != (key is None):
        raise click.UsageError("--checkpoint and --key go together")
    if export_file is not None and run_ids:
        raise click.UsageError("--file holds a single run: do not name one")
    if export_file is not None and proof:
        raise click.UsageError("--proof reads a store, not an exported file")
    maker = None if agent is None else _load_agent(agent)
    codes: set[int] = set()
    keyring: Keyring | None = None
    signed: Checkpoint | None = None
    try:
        keyring = _read_keyring(None if export_file is not None else path or default_store_path())
        signed = _read_checkpoint(checkpoint_file, key)
        checkpoint_heads = None if signed is None else signed.heads
        for report in map(_with_doubt, _verify_runs(run_ids, export_file, path, checkpoint_heads, keyring)):
            codes.add(report.code)
            _print_report(report, as_json)
            if proof and report.code in (GOOD, OPEN) and not _print_proof(report.run_id, path, maker):
                codes.add(TAMPERED)
    except UnknownRunError:
        raise
    except (StoreError, JournalError) as error:
        source = f"{export_file}: " if export_file is not None and isinstance(error, JournalError) else ""
        click.echo(f"agentfsm: cannot be verified: {source}{shorten(error, 2000)}", err=True)
        codes.add(UNVERIFIABLE)
    if signed is not None and signed.date is not None:
        click.echo(f"agentfsm: the checkpoint is of {signed.date:%Y-%m-%d %H:%M:%S} UTC", err=True)
    _print_unchecked(keyring, checkpoint_file)
    ctx.exit(next((code for code in (TAMPERED, UNVERIFIABLE, OPEN) if code in codes), GOOD))


def _verify_runs(
    run_ids: tuple[str, ...],
    export_file: Path | None,
    path: Path | None,
    checkpoint_heads: CheckpointHeads | None,
    keyring: Keyring | None,
) -> Iterator[VerificationReport]:
    if export_file is not None:
        yield verify_export(_read_text(export_file), checkpoint_heads, keyring)
        return
    store = open_existing_store(path)
    yield from find_schema_changes(store.path)
    stored = [head.run_id for head in store.heads()]
    wanted = list(run_ids) or [*stored, *(checkpoint_heads or {})]
    for run_id in dict.fromkeys(wanted):
        try:
            yield verify_stored_run(store, run_id, checkpoint_heads, keyring)
        except UnknownRunError as error:
            if run_ids:
                raise
            yield VerificationReport(str(run_id), TAMPERED, 0, None, f"its journal is missing: {error}")
    if run_ids:
        return
    yield from find_orphans(store.path)
    if not stored:
        click.echo(f"agentfsm: there is no run in {store.path}", err=True)


def _read_checkpoint(file: Path | None, key: Path | None) -> Checkpoint | None:
    """The checkpoint in a file, or None if there is none."""
    return read_checkpoint(file.read_text("utf-8", "replace"), key.read_bytes()) if file and key else None


def _with_doubt(report: VerificationReport) -> VerificationReport:
    """The report; a run of which it is not known who wrote it cannot be verified."""
    if report.doubt and report.code in (GOOD, OPEN):
        return replace(report, code=UNVERIFIABLE, reason=report.doubt)
    return report


def _print_unchecked(keyring: Keyring | None, checkpoint_file: Path | None) -> None:
    """Print what could not be checked with what was given."""
    if keyring is None:
        click.echo(f"agentfsm: not checked without the secret ({SECRET_VARIABLE}): who wrote the records", err=True)
    if checkpoint_file is None:
        click.echo("agentfsm: not checked without a checkpoint: whether the end of a journal was cut off", err=True)


def _read_keyring(path: Path | None) -> Keyring | None:
    """The keys of the store at a path, or without one those of ``AGENTFSM_SECRET``; None if there is no secret."""
    if path is not None:
        return store_keyring(path)
    given = os.environ.get(SECRET_VARIABLE, "").strip()
    return Keyring(given.encode()) if given else None


def _load_agent(name: str) -> Agent:
    """The agent that ``MODULE:AGENT`` names.

    Raises:
        ConfigurationError: It is something else.
    """
    from agentfsm.agent import Agent  # only here: without --agent, nothing but the journal is read

    value = load_object(name)
    if not isinstance(value, Agent):
        raise ConfigurationError(f"{name} is a {type(value).__name__}, not an agent")
    return value


def _print_proof(run_id: str, path: Path | None, agent: Agent | None) -> bool:
    """Print whether a run stayed inside the model of its proofs; False if it did not."""
    from agentfsm.testing.stored_proof import check_stored_run  # loads the model checker

    check = check_stored_run(open_existing_store(path).records(run_id), agent)
    if check.inside is None:
        click.echo(single_line(f"  not checked against its proofs: {check.reason}"))
    elif check.inside:
        click.echo(f"  {check.moves} moves inside the model of its proofs")
    else:
        click.echo(single_line(f"  OUTSIDE the model of its proofs: {check.reason}"))
    return check.inside is not False


def _read_text(path: Path) -> str:
    """A file's text; bytes that are not UTF-8 are kept, for the verification to report with their record."""
    return path.read_text(encoding="utf-8", errors="surrogateescape")


def _print_report(report: VerificationReport, as_json: bool) -> None:
    if as_json:
        fields = ("run_id", "code", "records", "seq", "reason", "open", "claimed")
        click.echo(json.dumps({name: getattr(report, name) for name in fields}))
        return
    reason = f": record {report.seq}: {report.reason}" if report.seq is not None else f": {report.reason}"
    details = reason if report.reason else "".join(f"; {line}" for line in report.open)
    details += f"; claimed, not verified: {', '.join(report.claimed)}" if report.claimed else ""
    count = f"{report.records} record{'s' * (report.records != 1)}"
    click.echo(single_line(f"{report.run_id}  {_STATUS_TEXTS[report.code]} ({count}){details}"))


_CHECKPOINT_EXAMPLES = """\b
Examples:
  agentfsm checkpoint --key key.pem > note
  agentfsm checkpoint --key key.pem --name payroll --store runs.db > note
"""


@click.command(epilog=_CHECKPOINT_EXAMPLES)
@click.option("--key", required=True, type=_EXISTING_FILE, help="An Ed25519 private key, as PEM.")
@click.option("--name", default="agentfsm", metavar="NAME", help="The name of the store and its key; no spaces.")
@store_option
@click.pass_context
def checkpoint(ctx: click.Context, key: Path, name: str, path: Path | None) -> None:
    """Write a signed checkpoint of all runs, with the last hash of each, to stdout. Keep it apart from the store.

    With it, agentfsm verify --checkpoint detects journals that were truncated, rewritten, deleted or forged since its
    date. A store that does not verify gets none, and the exit code is that of agentfsm
    verify. Create a key with:
    openssl genpkey -algorithm ed25519 -out key.pem; and its public half with: openssl pkey -in key.pem -pubout
    -out public.pem
    """
    store = open_existing_store(path)
    heads = store.heads()
    signed = {head.run_id: (head.seq, head.hash) for head in heads}  # what is signed is what is verified
    for report in map(_with_doubt, _verify_runs((), None, path, signed, store_keyring(store.path))):
        if report.code not in (GOOD, OPEN):
            problem = f"run {report.run_id!r}: {report.reason}; agentfsm verify shows everything that is wrong"
            click.echo(f"agentfsm: not signed, because the store does not verify: {problem}", err=True)
            ctx.exit(report.code)
    click.echo(write_checkpoint(heads, key.read_bytes(), datetime.now(UTC), name), nl=False)
