"""``agentfsm redact``: delete recorded content permanently, a field or a text wherever it occurs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from agentfsm.cli.console import plural, shorten, single_line
from agentfsm.cli.local_store import (
    await_result,
    complete_run_id,
    open_runs,
    store_option,
    tenant_option,
    write_for_a_moment,
)
from agentfsm.cli.options import collect_options, option
from agentfsm.journal.redact import TextRedaction
from agentfsm.journal.sqlite.sqlite_maintenance import truncate_wal
from agentfsm.journal.store import Store
from agentfsm.journal.store_url import StoreLocation
from agentfsm.journal.text_search import Occurrence, RunFilter, files_with_text


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The options of ``agentfsm redact`` that are about a text."""

    text: str = option("--text", default="", metavar="TEXT", help="Delete every value that has TEXT, in all runs.")
    session: str = option("--session", default="", metavar="ID", help="With --text: only in runs of this conversation.")
    tag: str = option("--tag", default="", metavar="TAG", help="With --text: only in runs with this tag.")
    run: str = option(
        "--run", default="", metavar="RUN", shell_complete=complete_run_id, help="With --text: only in RUN."
    )
    dry_run: bool = option(
        "--dry-run", is_flag=True, help="With --text: show what would be deleted, and delete nothing."
    )
    yes: bool = option("-y", "--yes", is_flag=True, help="With --text: do not ask.")
    as_json: bool = option("--json", is_flag=True, help="With --text: print one JSON object.")

    @property
    def narrowing(self) -> dict[str, object]:
        """By option, what lets less be deleted than without it."""
        return {"--session": self.session, "--tag": self.tag, "--run": self.run, "--dry-run": self.dry_run}


_EXAMPLES = """\b
Examples:
  agentfsm redact --text ann@example.org --dry-run
  agentfsm redact --text ann@example.org --session 4711 --by "Ann, on request"
  agentfsm redact 3f9c0a1b2c3d4e5f 4
  agentfsm redact 3f9c0a1b2c3d4e5f 4.out.replied.reply.message.content
"""


@click.command(epilog=_EXAMPLES)
@click.argument("run_id", metavar="[RUN", required=False, shell_complete=complete_run_id)
@click.argument("field", metavar="FIELD]", required=False)
@collect_options(TextOptions, "wanted")
@click.option("--by", default="", metavar="NAME", help="Who requested the deletion; recorded in the journal.")
@store_option
@tenant_option
@click.pass_context
def redact(
    ctx: click.Context, run_id: str | None, field: str | None, wanted: TextOptions, by: str, location: StoreLocation
) -> None:
    """Delete a FIELD of RUN, or with --text every value that contains a text. This cannot be undone.

    FIELD is the number of a record and a path in it, as in 4.out.replied.reply.message.content; agentfsm show RUN
    --json lists the fields of every record. The number alone deletes all content of the record.

    With --text, every run of the store is searched, in any case and in the forms in which a text can stand in JSON,
    URLs and base64. What was found is shown before you are asked, and what remains afterwards, too: in runs that
    cannot be changed now, in ids and names, and in files beside the store. Whole values are deleted: the message, the
    arguments or the result that has the text.

    The journals still verify and record the deletion. Their runs can no longer be resumed or replayed past these
    records.

    Exit codes: 0 deleted, or nothing was found; 1 something remains; 2 wrong usage.
    """
    if wanted.text:
        if run_id is not None:
            raise click.UsageError("give RUN and FIELD, or --text (--run selects a run to search)")
        ctx.exit(_redact_text(wanted, by, location))
    if run_id is None or field is None:
        raise click.UsageError("give RUN and FIELD, or --text")
    for name, value in wanted.narrowing.items():
        if value:
            raise click.UsageError(f"{name} goes with --text: a FIELD of RUN is deleted at once")
    store, runs = open_runs(location)
    deleted = await_result(runs.redact(run_id, field, by=by))
    _finish(store, location)
    click.echo(f"{plural(deleted, 'value')} deleted")


def _redact_text(wanted: TextOptions, by: str, location: StoreLocation) -> int:
    """Find a text, ask, and delete it; returns the exit code."""
    store, runs = open_runs(location)
    searched = RunFilter(wanted.run, wanted.session, wanted.tag)
    would = await_result(runs.redact_text(wanted.text, runs=searched, dry_run=True))
    found = (*would.deleted, *would.remaining)
    if not wanted.as_json:
        _print_found(found)
    if wanted.dry_run or not would.deleted or not (wanted.yes or _confirmed(would.deleted)):
        remaining = TextRedaction((), found)
    else:
        remaining = await_result(runs.redact_text(wanted.text, runs=searched, by=by))
    _finish(store, location)
    files = files_with_text(files_beside(location.file), wanted.text)
    if wanted.as_json:
        click.echo(json.dumps({**asdict(remaining), "files": [str(file) for file in files]}, indent=1))
    elif not wanted.dry_run:
        _print_result(remaining, files)
    return 0 if wanted.dry_run or not (remaining.remaining or files) else 1


def _confirmed(found: Sequence[Occurrence]) -> bool:
    runs = len({each.run_id for each in found})
    said = f"Delete {plural(len(found), 'value')} in {plural(runs, 'run')} for good?"
    return click.confirm(f"{said} No run can be resumed or replayed past these records", err=True)


def _finish(store: Store, location: StoreLocation) -> None:
    """Close the store, and say if it may still have what was deleted."""
    truncated = write_for_a_moment(store, lambda writable: _truncate(writable is store, location.file))
    await_result(store.aclose())
    if location.file is None:
        click.echo(
            "agentfsm: the server keeps deleted values in dead rows until agentfsm store compact, and in its log and "
            "backups for as long as it keeps those",
            err=True,
        )
    elif not truncated:
        click.echo(
            "agentfsm: another program has the store open; until it closes the store, the file may contain the deleted "
            "values",
            err=True,
        )


async def _truncate(owned: bool, file: Path | None) -> bool:
    """Truncate the log of a file; the process that owns the file has done so already if it is another one."""
    return file is None or not owned or truncate_wal(file)


def files_beside(store: Path | None) -> list[Path]:
    """The own files of a store in a file, and copies beside it."""
    if store is None:
        return []
    store = store.absolute()
    try:
        return sorted(each for each in store.parent.iterdir() if each.name.startswith(store.stem) and each.is_file())
    except OSError:
        return []


def _print_found(found: Sequence[Occurrence]) -> None:
    for each in found:
        click.echo(single_line(shorten(str(each), 400)))
    if not found:
        click.echo("not found in any run")


def _print_result(result: TextRedaction, files: Sequence[Path]) -> None:
    click.echo(f"{plural(len(result.deleted), 'value')} deleted")
    for each in result.remaining:
        click.echo(single_line(shorten(f"remains: {each}", 400)))
    for file in files:
        click.echo(f"remains: in the file {file}")
