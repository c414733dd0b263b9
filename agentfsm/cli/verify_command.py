"""``agentfsm verify`` and ``checkpoint``: verify the journals of a store, and sign where they end."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.progress import Progress

from agentfsm.cli.console import open_console, plural, shorten, single_line, utc
from agentfsm.cli.local_store import (
    await_result,
    checkpoint_log,
    chosen_tenant,
    complete_run_id,
    open_existing_store,
    open_runs,
    store_keyring,
    store_option,
    tenant_option,
)
from agentfsm.cli.options import collect_options, option, shared
from agentfsm.cli.user_code import load_agent
from agentfsm.errors import JournalError, StoreError, UnknownRunError
from agentfsm.journal.checkpoint import (
    Checkpoint,
    CheckpointLog,
    SignedHeads,
    read_checkpoint,
    verify_store,
    write_checkpoint,
)
from agentfsm.journal.listing import verify_listed_run
from agentfsm.journal.maintenance import Tombstone, signed_hold
from agentfsm.journal.store_url import StoreLocation
from agentfsm.journal.verification import (
    GOOD,
    OPEN,
    TAMPERED,
    UNVERIFIABLE,
    VerificationReport,
    unchecked_lines,
    verify_export,
    with_doubt,
)
from agentfsm.loop.keys import SECRET_VARIABLE, Keyring

if TYPE_CHECKING:
    from agentfsm.agent import Agent

_EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_STATUS_TEXTS = {GOOD: "good", TAMPERED: "TAMPERED", UNVERIFIABLE: "cannot be verified", OPEN: "good, open"}


_log_option = click.option(
    "--log",
    "log_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The log of the store's checkpoints; default: beside the store, with .log after its name.",
)


@dataclass(frozen=True)
class CheckpointOptions:
    """The files that say what a store had: a checkpoint, its public key, and the log of the store's checkpoints."""

    checkpoint_file: Path | None = option(
        "--checkpoint", type=_EXISTING_FILE, help="A signed checkpoint that the runs must match."
    )
    key: Path | None = option("--key", type=_EXISTING_FILE, help="The public key of the checkpoint, as PEM.")
    log_file: Path | None = shared(_log_option)

    def __post_init__(self) -> None:
        if (self.checkpoint_file is None) != (self.key is None):
            raise click.UsageError("--checkpoint and --key go together")
        if self.key is not None and chosen_tenant() is not None:
            raise click.UsageError("a checkpoint names the runs of all tenants: leave out --tenant")

    def read(self) -> Checkpoint | None:
        """The checkpoint, or None if there is none.

        Raises:
            JournalError: It is not valid.
        """
        if self.checkpoint_file is None or self.key is None:
            return None
        return read_checkpoint(self.checkpoint_file.read_text("utf-8", "replace"), self.key.read_bytes())


checkpoint_options = collect_options(CheckpointOptions, "witness")


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
@checkpoint_options
@click.option("--proof", is_flag=True, help="Also check that each run stayed inside the model of its graph's proofs.")
@click.option("--agent", metavar="MODULE:AGENT", help="For --proof, the agent that made the runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per run.")
@store_option
@tenant_option
@click.pass_context
def verify(
    ctx: click.Context,
    run_ids: tuple[str, ...],
    export_file: Path | None,
    witness: CheckpointOptions,
    proof: bool,
    agent: str | None,
    as_json: bool,
    location: StoreLocation,
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
    if export_file is not None and run_ids:
        raise click.UsageError("--file holds a single run: do not name one")
    if export_file is not None and proof:
        raise click.UsageError("--proof reads a store, not an exported file")
    if export_file is not None and witness.checkpoint_file is not None and witness.log_file is None:
        raise click.UsageError("--file with --checkpoint needs --log, the log of the store's checkpoints")
    maker = None if agent is None else load_agent(agent)
    codes: set[int] = set()
    keyring: Keyring | None = None
    checkpoint: Checkpoint | None = None
    try:
        keyring = _read_keyring(None if export_file is not None else location)
        checkpoint = witness.read()
        signed, changed = signed_heads(checkpoint, witness.log_file or checkpoint_log(location))
        if changed:
            codes.add(TAMPERED)
            _print_report(VerificationReport("(log)", TAMPERED, 0, None, changed), as_json)
        for report in map(with_doubt, verify_runs(run_ids, export_file, location, signed, keyring)):
            codes.add(report.code)
            _print_report(report, as_json)
            if proof and report.code in (GOOD, OPEN) and not _print_proof(report.run_id, location, maker):
                codes.add(TAMPERED)
    except UnknownRunError:
        raise
    except (StoreError, JournalError) as error:
        source = f"{export_file}: " if export_file is not None and isinstance(error, JournalError) else ""
        click.echo(f"agentfsm: cannot be verified: {source}{shorten(error, 2000)}", err=True)
        codes.add(UNVERIFIABLE)
    unchecked = unchecked_lines(keyring is not None, checkpoint.date if checkpoint else None)
    click.echo("\n  ".join(("agentfsm: not checked:", *unchecked)), err=True)
    ctx.exit(next((code for code in (TAMPERED, UNVERIFIABLE, OPEN) if code in codes), GOOD))


def verify_runs(
    run_ids: tuple[str, ...],
    export_file: Path | None,
    location: StoreLocation,
    signed: SignedHeads | None,
    keyring: Keyring | None,
) -> Iterator[VerificationReport]:
    """The verification of runs, or of all runs of a store, and what is wrong with the store itself.

    Raises:
        UnknownRunError: The store does not have a run that is named.
        agentfsm.errors.StoreError: The store cannot be read.
        JournalError: The file is not an exported journal.
    """
    hashes = None if signed is None else signed.hashes
    if export_file is not None:
        yield verify_export(_read_text(export_file), hashes, keyring)
        return
    store, runs = open_runs(location, sealed=False)
    problems = await_result(verify_store(store, keyring, signed, run_ids))
    yield from (each for each in problems if each.run_id == "(schema)")  # first, it may be why no run can be read
    stored = {head.run_id: None for head in await_result(store.heads())}
    purged = {each.run_id: each for each in await_result(store.maintenance.tombstones()) if each.seq}
    yield from _purged_runs(purged, run_ids, {each.run_id for each in problems})
    for run_id in run_ids or stored:
        if run_id not in stored and (run_id in purged or run_id in (hashes or {})):
            continue
        try:
            if run_ids:
                yield await_result(runs.verify(run_id, checkpoint=hashes))
            else:
                yield with_doubt(await_result(verify_listed_run(store, run_id, hashes, keyring)))
        except UnknownRunError as error:
            if run_ids:
                raise
            yield VerificationReport(str(run_id), TAMPERED, 0, None, f"its journal is missing: {error}")
    yield from (each for each in problems if each.run_id != "(schema)")
    if run_ids:
        return
    if not stored and keyring is not None and hashes is None:
        reason = "there is no run, but a secret: only a checkpoint can tell whether there was one"
        yield VerificationReport("(store)", UNVERIFIABLE, 0, None, reason)
    if not stored:
        click.echo(f"agentfsm: there is no run in {location.name}", err=True)


def _purged_runs(
    purged: Mapping[str, Tombstone], run_ids: tuple[str, ...], wrong: Collection[str]
) -> Iterator[VerificationReport]:
    """How many runs were purged as they should be, or each of them that is named."""
    good = [tombstone for run_id, tombstone in purged.items() if run_id not in wrong]
    for tombstone in good:
        if tombstone.run_id in run_ids:
            yield VerificationReport(tombstone.run_id, GOOD, 0, None, _describe_tombstone(tombstone))
    if good and not run_ids:
        count = f"{len(good)} run{'s were' if len(good) > 1 else ' was'}"
        yield VerificationReport("(purged)", GOOD, 0, None, f"{count} purged")


def _describe_tombstone(tombstone: Tombstone) -> str:
    by = f" by {tombstone.by}" if tombstone.by else ""
    return f"it was purged at {utc(tombstone.purged_at / 1000)} UTC{by}" + (
        f" ({tombstone.reason})" if tombstone.reason else ""
    )


def _read_log(file: Path) -> CheckpointLog:
    """The log in a file; an empty one if the file does not exist."""
    try:
        return CheckpointLog(file.read_text("utf-8", "replace"))
    except FileNotFoundError:
        return CheckpointLog()
    except OSError as error:
        raise JournalError(f"{file}, the log of the checkpoints, cannot be read: {error.strerror}") from error


def signed_heads(signed: Checkpoint | None, file: Path) -> tuple[SignedHeads | None, str]:
    """What a checkpoint signed, by the log of its store; or None, and what is wrong with that log."""
    if signed is None:
        return None, ""
    log = _read_log(file)
    if signed.size and not file.exists():
        raise JournalError(
            f"there is no {file}, the log of the checkpoints, so the store cannot be compared with the checkpoint; "
            "if the log is elsewhere, give it with --log"
        )
    if log.begins_with(signed):
        return SignedHeads(signed.date, log.hashes(signed.size), log.holds(signed.size)), ""
    return None, (
        f"the checkpoint signed {signed.size} entries of the log, and {file} has {len(log)}, which do not begin with "
        "them: entries were cut off or changed"
    )


def _read_keyring(location: StoreLocation | None) -> Keyring | None:
    """The keys of a store, or without one those of ``AGENTFSM_SECRET``; None if there is no secret."""
    if location is not None:
        return store_keyring(location)
    given = os.environ.get(SECRET_VARIABLE, "").strip()
    return Keyring(given.encode()) if given else None


def _print_proof(run_id: str, location: StoreLocation, agent: Agent | None) -> bool:
    """Print whether a run stayed inside the model of its proofs; False if it did not."""
    from agentfsm.testing.invariants import check_stored_run  # loads the model checker

    check = check_stored_run(await_result(open_existing_store(location).records(run_id)), agent)
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
    click.echo(
        single_line(f"{report.run_id}  {_STATUS_TEXTS[report.code]} ({plural(report.records, 'record')}){details}")
    )


_CHECKPOINT_EXAMPLES = """\b
Examples:
  agentfsm checkpoint --key key.pem > note
  agentfsm checkpoint --key key.pem --name payroll --store runs.db > note
  agentfsm checkpoint --key key.pem --after note --proof proof > newer
"""


@click.command(epilog=_CHECKPOINT_EXAMPLES)
@click.option("--key", required=True, type=_EXISTING_FILE, help="An Ed25519 private key, as PEM.")
@click.option("--name", default="agentfsm", metavar="NAME", help="The name of the store and its key; no spaces.")
@_log_option
@click.option("--after", type=_EXISTING_FILE, metavar="NOTE", help="An earlier checkpoint, which this one must extend.")
@click.option(
    "--proof",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --after, write the proof that this checkpoint extends it, for a witness.",
)
@store_option
@click.pass_context
def checkpoint(
    ctx: click.Context,
    key: Path,
    name: str,
    log_file: Path | None,
    after: Path | None,
    proof: Path | None,
    location: StoreLocation,
) -> None:
    """Write a signed checkpoint of all runs to stdout. Keep it apart from the store.

    With it, agentfsm verify --checkpoint detects journals that were truncated, rewritten, deleted or forged since its
    date. A store that does not verify gets none, and the exit code is that of agentfsm verify.

    The heads of the runs that changed are appended to a log beside the store, and the checkpoint signs how long the
    log is, and its root hash. So it stays small, and each checkpoint extends the ones before it; --after checks that.

    Create a key with: openssl genpkey -algorithm ed25519 -out key.pem; and its public half with: openssl pkey -in
    key.pem -pubout -out public.pem
    """
    if proof is not None and after is None:
        raise click.UsageError("--proof goes with --after")
    store, secret_key = open_existing_store(location), key.read_bytes()
    log_path = log_file or checkpoint_log(location)
    if log_file is None:
        log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    before, heads, holds = _read_log(log_path), await_result(store.heads()), await_result(store.maintenance.holds())
    old = None if after is None else read_checkpoint(after.read_text("utf-8", "replace"), secret_key)
    if old is not None and not before.begins_with(old):
        click.echo(f"agentfsm: not signed, because {log_path} does not begin with what {after} signed", err=True)
        ctx.exit(TAMPERED)
    signed = {run_id: dict(hashes) for run_id, hashes in before.hashes(len(before)).items()}
    for head in heads:  # what is signed is what is verified
        signed.setdefault(head.run_id, {}).setdefault(head.seq, head.hash)
    known = SignedHeads(datetime.now(UTC), signed, before.holds(len(before)))
    reports = map(with_doubt, verify_runs((), None, location, known, store_keyring(location)))
    bad = next((each for each in _with_progress(reports, len(heads)) if each.code not in (GOOD, OPEN)), None)
    if bad is not None:
        problem = f"run {bad.run_id!r}: {bad.reason}; agentfsm verify shows everything that is wrong"
        click.echo(f"agentfsm: not signed, because the store does not verify: {problem}", err=True)
        ctx.exit(bad.code)
    log = before.extended(heads, {run_id: signed_hold(run_id, hold) for run_id, hold in holds.items()})
    note = write_checkpoint(log, secret_key, datetime.now(UTC), name)
    _append_to_log(log_path, before, log)
    if proof is not None and old is not None:
        proof.write_text(log.proof(old.size), "utf-8")
    click.echo(note, nl=False)


def _with_progress(reports: Iterator[VerificationReport], runs: int) -> Iterator[VerificationReport]:
    """The reports; a terminal shows of how many of the runs they are, as long as somebody asks for the next one."""
    console = open_console()
    with Progress(console=console.err, transient=True, disable=not console.live) as progress:
        yield from progress.track(reports, total=runs, description="verifying")


def _append_to_log(file: Path, before: CheckpointLog, log: CheckpointLog) -> None:
    """Append what a log has more than before to its file, durably, and before anything of it is signed."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "r+b") as opened:
            found = opened.read()
            whole = found[: found.rfind(b"\n") + 1]
            unchanged = whole == before.text.encode()
            if unchanged:
                if whole != found:
                    opened.truncate(len(whole))  # what a process that was killed wrote of a line: nobody signed it
                opened.write(log.text[len(before.text) :].encode())
                opened.flush()
                os.fsync(opened.fileno())
    except OSError as error:
        raise JournalError(f"{file}, the log of the checkpoints, cannot be written: {error.strerror}") from error
    if not unchanged or _read_log(file).text != log.text:
        raise JournalError(f"another process wrote to {file} at the same time: run agentfsm checkpoint again")
