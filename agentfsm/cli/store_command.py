"""``agentfsm store``: create, check and migrate a store, hold, purge and erase its runs, and return the space."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import click

from agentfsm.cli.console import plural, shorten, single_line, utc
from agentfsm.cli.local_store import (
    await_result,
    complete_run_id,
    full_run_ids,
    open_existing_store,
    open_store_for_writing,
    require_keyring,
    store_keyring,
    store_option,
    tenant_option,
    write_for_a_moment,
)
from agentfsm.cli.options import collect_options, option
from agentfsm.cli.redact_command import files_beside
from agentfsm.errors import AgentfsmError, ConfigurationError, MissingExtraError, StoreError
from agentfsm.journal.erasure import ErasureQuery, ErasureReport
from agentfsm.journal.erasure import erase as erase_person
from agentfsm.journal.listing import needs_rebuild, rebuild_run_info
from agentfsm.journal.maintenance import Hold
from agentfsm.journal.purge import (
    PurgeReport,
    RetentionRule,
    apply_retention,
    end_hold,
    hold_run,
    purge_runs,
    require_secret_of,
)
from agentfsm.journal.sqlite.sqlite_maintenance import copy_file
from agentfsm.journal.store import Store
from agentfsm.journal.store_url import StoreLocation
from agentfsm.journal.text_search import Occurrence, files_with_text
from agentfsm.loop.keys import Keyring

_EXAMPLES = """\b
Examples:
  agentfsm store init --store postgresql://HOST/DATABASE
  agentfsm store check
  agentfsm store purge --tag demo --days 90 --dry-run
  agentfsm store erase --actor ann --text ann@example.org --by "the officer"
"""


@click.group(epilog=_EXAMPLES)
def store() -> None:
    """Create, check and migrate a store, hold and purge its runs, and return the space.

    These commands also work while a service writes the store: on SQLite, through that process.
    """


# -- creating, checking, migrating ---------------------------------------------------------------------


@store.command(
    short_help="Create the tables of a store.",
    epilog="\b\nExamples:\n  agentfsm store init --store runs.db\n  agentfsm store init --sql > schema.sql\n",
)
@click.option("--sql", "as_sql", is_flag=True, help="Print the SQL for PostgreSQL instead, for whoever may run it.")
@click.option(
    "--wait", type=click.FloatRange(min=0), default=0.0, metavar="SECONDS", help="Wait for a server to start."
)
@store_option
def init(as_sql: bool, wait: float, location: StoreLocation) -> None:
    """Create the tables of a store, or bring those that it has up to date.

    The first stored run also creates them, and brings those of a file up to date. On PostgreSQL, this command needs
    CREATE on the database, and afterwards a role without it can run agents: it needs what --sql prints at its end.
    """
    if as_sql:
        try:
            from agentfsm.journal.postgres.postgres_schema import schema_sql
        except ImportError as error:
            raise MissingExtraError("a store on PostgreSQL", "postgres") from error
        click.echo(schema_sql(), nl=False)
        return
    _prepare(location, wait)
    click.echo(f"{location.name} is ready")


@store.command(
    short_help="Bring the tables of a store up to date.",
    epilog="\b\nExamples:\n  agentfsm store migrate --store runs.db\n",
)
@click.option(
    "--wait", type=click.FloatRange(min=0), default=0.0, metavar="SECONDS", help="Wait for a server to start."
)
@store_option
def migrate(wait: float, location: StoreLocation) -> None:
    """Bring the tables of an existing store up to date, and list the runs of earlier releases in full.

    Make a backup first: an earlier release cannot use the store afterwards. Nothing in a journal changes.
    """
    open_existing_store(location)  # a mistyped name must not create a store
    opened = _prepare(location, wait)
    _rebuild(opened, location)
    click.echo(f"{location.name} is up to date")


def _prepare(location: StoreLocation, wait: float) -> Store:
    """The store, ready to be written; a server that is not there yet is tried again until the time is up."""
    give_up = time.monotonic() + wait
    while True:
        try:
            return open_store_for_writing(location, migrate=True)
        except ConfigurationError:
            raise
        except AgentfsmError:
            if not time.monotonic() < give_up:  # also if that is no number
                raise
            time.sleep(min(1.0, max(0.0, give_up - time.monotonic())))


@store.command(
    short_help="Describe a store, and say what is wrong with it.",
    epilog="\b\nExamples:\n  agentfsm store check\n  agentfsm store check --json --store runs.db\n",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@store_option
@click.pass_context
def check(ctx: click.Context, as_json: bool, location: StoreLocation) -> None:
    """Describe a store: schema and size, runs by status, holds, who writes it, and what is wrong with it.

    Whether journals are intact is what agentfsm verify says.

    Exit codes: 0 no problem; 1 a problem; 2 wrong usage, or the store cannot be reached.
    """
    opened = open_existing_store(location)
    described = await_result(opened.maintenance.describe())
    facts: dict[str, str | int] = {each.name: each.value for each in described}
    problems = [f"{each.name}: {each.value}" for each in described if each.is_problem]
    problems += [each.reason for each in await_result(opened.maintenance.schema_damage())]
    heads = await_result(opened.heads())
    facts["runs"] = len(heads)
    for status in ("running", "suspended", "finished"):
        facts[status] = sum(head.status == status for head in heads)
    facts["interrupted"] = sum(head.status == "running" and head.owner is None for head in heads)
    facts["purged"] = len(await_result(opened.maintenance.tombstones()))
    facts["on hold"] = sum(not hold.ended for hold in await_result(opened.maintenance.holds()).values())
    if as_json:
        click.echo(json.dumps({"store": location.name, **facts, "problems": problems}))
    else:
        for name, value in {"store": location.name, **facts}.items():
            click.echo(single_line(f"{name:<12} {value}"))
        for problem in problems:
            click.echo(single_line(f"problem      {problem}"))
    ctx.exit(1 if problems else 0)


@store.command(
    short_help="Copy a SQLite store to a file, even while it is written.",
    epilog="\b\nExamples:\n  agentfsm store backup /backups/runs-2026-11-23.db\n",
)
@click.argument("target", type=click.Path(path_type=Path))
@store_option
def backup(target: Path, location: StoreLocation) -> None:
    """Copy a SQLite store to the file TARGET as it is now, even while a service writes it.

    Keep the secret and the log of the checkpoints elsewhere: they are not in it. PostgreSQL has pg_dump for this.
    """
    if location.file is None:
        raise click.UsageError(
            "a store on a server is backed up with the server's own tools, together with the queues of its workers: "
            "pg_dump --format=custom --schema='agentfsm*'"
        )
    open_existing_store(location)  # says if there is none
    copy_file(location.file, target)
    click.echo(target, err=True)


# -- holds ---------------------------------------------------------------------------------------------


@store.command(
    "hold",
    short_help="Keep runs from being purged or redacted.",
    epilog="\b\nExamples:\n  agentfsm store hold 3f9c0a1b2c3d4e5f --reason 'case 4711' --by Ann\n",
)
@click.argument("run_ids", metavar="RUN...", nargs=-1, required=True, shell_complete=complete_run_id)
@click.option("--reason", default="", metavar="TEXT", help="Why, such as the number of a case.")
@click.option("--by", default="", metavar="NAME", help="Who holds them.")
@store_option
@tenant_option
def hold_runs(run_ids: tuple[str, ...], reason: str, by: str, location: StoreLocation) -> None:
    """Hold RUNs: from now on they are neither purged nor redacted, whether they are in progress or have ended.

    RUN may be the beginning of an id.
    """
    opened, keyring = open_existing_store(location), require_keyring(location)
    for run_id in _own_runs(opened, run_ids, keyring):
        await_result(hold_run(opened, run_id, Hold(reason, by, time.time()), keyring))
        click.echo(single_line(f"{run_id}  on hold"))


@store.command("unhold", short_help="End holds.", epilog="\b\nExamples:\n  agentfsm store unhold 3f9c0a1b2c3d4e5f\n")
@click.argument("run_ids", metavar="RUN...", nargs=-1, required=True, shell_complete=complete_run_id)
@click.option("--by", default="", metavar="NAME", help="Who ends the holds.")
@store_option
@tenant_option
def unhold_runs(run_ids: tuple[str, ...], by: str, location: StoreLocation) -> None:
    """End the hold of RUNs; RUN may be the beginning of an id."""
    opened, keyring = open_existing_store(location), require_keyring(location)
    for run_id in _own_runs(opened, run_ids, keyring):
        await_result(end_hold(opened, run_id, keyring, by=by))
        click.echo(single_line(f"{run_id}  not on hold"))


def _own_runs(opened: Store, run_ids: Sequence[str], keyring: Keyring) -> list[str]:
    """The full ids of runs, none of which was written under another secret: before the first one is changed."""
    found = list(full_run_ids(opened, run_ids))
    for run_id in found:
        await_result(require_secret_of(opened, run_id, keyring))
    return found


@store.command("holds", epilog="\b\nExamples:\n  agentfsm store holds\n")
@store_option
@tenant_option
def list_holds(location: StoreLocation) -> None:
    """List the runs that are on hold."""
    for run_id, hold in await_result(open_existing_store(location).maintenance.holds()).items():
        if not hold.ended:
            parts = (run_id, utc(hold.since), hold.by, hold.reason)
            click.echo(single_line("  ".join(part for part in parts if part)))


# -- purging -------------------------------------------------------------------------------------------

_PURGE_EXAMPLES = """\b
Examples:
  agentfsm store purge 3f9c0a1b2c3d4e5f --by Ann --reason "a test"
  agentfsm store purge --days 90 --dry-run
  agentfsm store purge --days 30 --tag demo --yes --compact      once a day, from cron
"""


@dataclass(frozen=True, kw_only=True)
class _PurgeOptions:
    """The options that say which runs are purged, and what is kept of it."""

    days: float | None = option(
        "--days", type=click.FloatRange(min=0), metavar="N", help="Runs that ended over N days ago."
    )
    tag: str | None = option("--tag", metavar="TAG", help="With --days: only runs with this tag.")
    session: str | None = option("--session", metavar="ID", help="With --days: only runs of this conversation.")
    abandoned: bool = option("--abandoned", is_flag=True, help="Runs without a record, whose process died at once.")
    by: str = option("--by", default="", metavar="NAME", help="Who requested it; kept in the tombstones.")
    reason: str = option("--reason", default="", metavar="TEXT", help="Why; kept in the tombstones.")


@store.command(short_help="Delete whole runs that ended.", epilog=_PURGE_EXAMPLES)
@click.argument("run_ids", metavar="[RUN]...", nargs=-1, shell_complete=complete_run_id)
@collect_options(_PurgeOptions, "wanted")
@click.option("--compact", "compacts", is_flag=True, help="Then return the space, as agentfsm store compact does.")
@click.option("--dry-run", is_flag=True, help="Show what would be purged, and purge nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@store_option
@tenant_option
@click.pass_context
def purge(
    ctx: click.Context,
    run_ids: tuple[str, ...],
    wanted: _PurgeOptions,
    compacts: bool,
    dry_run: bool,
    yes: bool,
    location: StoreLocation,
) -> None:
    """Delete whole RUNs that ended, or with --days all that ended long ago. This cannot be undone.

    RUN may be the beginning of an id. A run goes with the runs that it called. Its id, its last hash, who purged it
    and why remain as a tombstone under the secret of the store, by which agentfsm verify, also with an older
    checkpoint, tells a purge from a theft. Runs on hold, runs that go on or wait, and runs that do not verify remain,
    each with the reason.

    Exit codes: 0 purged, or there was nothing to purge; 1 something remains; 2 wrong usage.
    """
    if bool(run_ids) + (wanted.days is not None) + wanted.abandoned != 1:
        raise click.UsageError("give RUNs, --days or --abandoned")
    if wanted.days is None and (wanted.tag is not None or wanted.session is not None):
        raise click.UsageError("--tag and --session say which of the runs of --days are purged, and nothing else")
    opened, keyring = open_existing_store(location), require_keyring(location)
    ids = full_run_ids(opened, run_ids)

    def carry_out(dry: bool) -> PurgeReport:
        if wanted.days is not None:
            rule = RetentionRule(days=wanted.days, tag=wanted.tag, session_id=wanted.session)
            return await_result(apply_retention(opened, rule, keyring, by=wanted.by, reason=wanted.reason, dry_run=dry))
        every = ids or _abandoned(opened)
        return await_result(purge_runs(opened, every, keyring, by=wanted.by, reason=wanted.reason, dry_run=dry))

    report = carry_out(dry_run or not yes)
    if not (dry_run or yes) and report.purged:
        click.confirm(f"Purge {plural(len(report.purged), 'run')} for good?", err=True, abort=True)
        report = carry_out(False)
    if not dry_run and report.purged:
        _withdraw(opened, location, report.purged)
    for run_id in report.purged:
        click.echo(single_line(f"{run_id}  {'would be purged' if dry_run else 'purged'}"))
    for kept in report.kept:
        click.echo(single_line(f"{kept.run_id}  remains: {kept.reason}"))
    click.echo(
        f"agentfsm: {plural(len(report.purged), 'run')} {'would be ' * dry_run}purged, {len(report.kept)} kept",
        err=True,
    )
    if compacts and not dry_run:
        _compact(opened)
    ctx.exit(1 if report.kept else 0)


def _abandoned(opened: Store) -> tuple[str, ...]:
    heads = await_result(opened.heads("running"))
    return tuple(head.run_id for head in heads if not head.seq and head.owner is None)


@store.command(
    "compact", short_help="Return the space of what was deleted.", epilog="\b\nExamples:\n  agentfsm store compact\n"
)
@store_option
def compact_store(location: StoreLocation) -> None:
    """Return the space of what was purged or redacted, so that nothing of it is left in the store.

    SQLite needs as much free space as the store has, PostgreSQL as its largest table; runs wait while it is done.
    """
    _compact(open_existing_store(location))


def _compact(opened: Store) -> None:
    elsewhere = await_result(opened.maintenance.compact())
    if elsewhere:
        click.echo(f"agentfsm: {elsewhere}", err=True)


# -- erasing a person's data ---------------------------------------------------------------------------

_ERASE_EXAMPLES = """\b
Examples:
  agentfsm store erase --actor ann --dry-run
  agentfsm store erase --actor ann --text ann@example.org --by "the officer" --json
"""


@dataclass(frozen=True, kw_only=True)
class _Person:
    """The options by which a person's data is found."""

    actor: str = option("--actor", default="", metavar="ID", help="Purge the runs that this person requested.")
    session: str = option("--session", default="", metavar="ID", help="Purge the runs of this conversation.")
    tag: str = option("--tag", default="", metavar="TAG", help="Purge the runs with this tag.")
    text: str = option("--text", default="", metavar="TEXT", help="Delete each value with this text in all other runs.")


@store.command(short_help="Erase a person's data from all runs.", epilog=_ERASE_EXAMPLES)
@collect_options(_Person, "person")
@click.option("--by", default="", metavar="NAME", help="Who requested it; recorded.")
@click.option("--dry-run", is_flag=True, help="Show what would be erased, and erase nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@store_option
@tenant_option
@click.pass_context
def erase(
    ctx: click.Context, person: _Person, by: str, dry_run: bool, yes: bool, as_json: bool, location: StoreLocation
) -> None:
    """Erase a person's data from all runs, and report what was erased and what remains, and why.

    Runs that the person requested, of a conversation or with a tag are purged as a whole; a text is deleted wherever
    else it stands, as agentfsm redact --text does. Then the space is returned, so that no byte of it is left. What
    others' runs say of the person as somebody who answered cannot be deleted, because votes are checked by it: each
    such place is listed, and agentfsm store purge RUN deletes the run.

    Exit codes: 0 erased, or nothing was found; 1 something remains; 2 wrong usage.
    """
    opened, keyring = open_existing_store(location), require_keyring(location)
    query = ErasureQuery(actor=person.actor, session_id=person.session, tag=person.tag, text=person.text)
    report = await_result(erase_person(opened, query, keyring, by=by, dry_run=True))
    if not dry_run and (report.purged or report.deleted):
        if not yes:
            found = f"{plural(len(report.purged), 'run')}, and {len(report.deleted)} values in others"
            click.confirm(f"Erase {found} for good?", err=True, abort=True)
        report = await_result(erase_person(opened, query, keyring, by=by))
        quoting = _withdraw(opened, location, report.purged, person.text)
        report = replace(report, remaining=(*report.remaining, *quoting))
    await_result(opened.aclose())
    files = [] if dry_run or not person.text else files_with_text(files_beside(location.file), person.text)
    if as_json:
        click.echo(json.dumps({**asdict(report), "files": [str(file) for file in files]}, indent=1))
    else:
        _print_erasure(report, dry_run)
        for file in files:
            click.echo(f"remains: in the file {file}")
    ctx.exit(1 if not dry_run and (report.kept or report.remaining or files) else 0)


def _withdraw(opened: Store, location: StoreLocation, purged: Sequence[str], text: str = "") -> list[Occurrence]:
    """Take purged runs out of the queues of workers, and say where in these a text is left."""
    from agentfsm.workers import find_waker  # only if something was purged
    from agentfsm.workers.submission import withdraw

    async def do() -> list[Occurrence]:
        waker = await find_waker(location.url)
        if waker is None:
            return []
        try:
            await withdraw(opened, waker, purged)
            aside = await waker.list_set_aside() if text else []
            quoting = [each for each in aside if text in each.reason]
            return [Occurrence(each.activation.run_id, 0, "", each.reason, _PUT_BACK) for each in quoting]
        finally:
            await waker.aclose()

    try:
        return await_result(do())
    except MissingExtraError:  # there may be no queues either
        return []
    except StoreError as error:
        click.echo(f"agentfsm: the queues of workers may still have it: {error}", err=True)
        return []


_PUT_BACK = "the reason for which it is set aside, which agentfsm worker --put-back deletes"


def _print_erasure(report: ErasureReport, dry_run: bool) -> None:
    would = "would be " * dry_run
    for run_id in report.purged:
        click.echo(single_line(f"{run_id}  {would}purged"))
    for each in report.deleted:
        place = f"{each.seq}.{each.field}" if each.seq else each.excerpt
        click.echo(single_line(f"{each.run_id}  {place}  {would}deleted"))
    for kept in report.kept:
        click.echo(single_line(f"remains: {kept.run_id}  {kept.reason}"))
    for each in report.remaining:
        click.echo(single_line(f"remains: {shorten(each, 400)}"))
    if report.elsewhere:
        click.echo(f"agentfsm: {report.elsewhere}", err=True)


# -- listings ------------------------------------------------------------------------------------------


@store.command(
    short_help="List runs again by what their records say.", epilog="\b\nExamples:\n  agentfsm store rebuild\n"
)
@store_option
@click.pass_context
def rebuild(ctx: click.Context, location: StoreLocation) -> None:
    """List each run again by what its records say, where its entry in the list differs or is incomplete.

    Exit codes: 0 done; 1 a run could not be listed again; 2 wrong usage.
    """
    opened = open_existing_store(location)
    done, failed = _rebuild(opened, location)
    click.echo(f"agentfsm: {plural(len(done), 'run')} listed again", err=True)
    ctx.exit(1 if failed else 0)


def _rebuild(opened: Store, location: StoreLocation) -> tuple[list[str], list[str]]:
    """The ids of the runs that were listed again, and of those that could not be."""
    done, failed = list[str](), list[str]()
    wrong = [head.run_id for head in await_result(opened.heads()) if await_result(needs_rebuild(opened, head))]
    keyring = store_keyring(location)
    for run_id in wrong:
        try:
            write_for_a_moment(opened, partial(rebuild_run_info, run_id=run_id, keyring=keyring))
        except AgentfsmError as error:
            failed.append(run_id)
            click.echo(single_line(f"{run_id}  cannot be listed again: {error}"), err=True)
        else:
            done.append(run_id)
            click.echo(single_line(f"{run_id}  listed again"))
    for run_id in await_result(opened.maintenance.reindex()):
        done.append(run_id)
        click.echo(single_line(f"{run_id}  found again by its prompt, tags and metadata"))
    return done, failed
