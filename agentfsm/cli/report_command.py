"""``agentfsm report``: what stored runs did, who allowed it, and whether their journals are intact, in one file."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import click

from agentfsm.cli.local_store import (
    await_result,
    checkpoint_log,
    complete_run_id,
    open_existing_store,
    store_keyring,
    store_option,
    tenant_option,
    write_private,
)
from agentfsm.cli.options import TIME, collect_options, option, to_timestamp
from agentfsm.cli.verify_command import (
    CheckpointOptions,
    checkpoint_options,
    signed_heads,
    verify_runs,
)
from agentfsm.errors import StoreError
from agentfsm.journal.checkpoint import Checkpoint
from agentfsm.journal.listing import iterate_runs
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.run_info import RunQuery
from agentfsm.journal.store import Store
from agentfsm.journal.store_url import StoreLocation
from agentfsm.journal.verification import GOOD, TAMPERED, UNVERIFIABLE, VerificationReport, unchecked_lines, with_doubt
from agentfsm.report.markdown_report import run_markdown
from agentfsm.report.page import DecisionFilter, find_decisions, period_page, render_pdf, run_page
from agentfsm.report.reported_run import Findings, ReportedRun

_EXAMPLES = """\b
Examples:
  agentfsm report 3f9c0a1b2c3d4e5f --output report.html
  agentfsm report 3f9c0a1b2c3d4e5f --pdf --output report.pdf
  agentfsm report 3f9c0a1b2c3d4e5f --markdown               for a comment on a pull request
  agentfsm report --all --checkpoint note --key public.pem --output all.html
  agentfsm report --tool pay --since 2026-10-01 --until 2026-11-01 --output october.html
"""


@dataclass(frozen=True)
class _FormatOptions:
    """Where a report goes, and in which format."""

    output: Path | None = option(
        "-o",
        "--output",
        metavar="PATH",
        type=click.Path(dir_okay=False, path_type=Path),
        help="The file to write; default: stdout.",
    )
    markdown: bool = option("--markdown", is_flag=True, help="Write Markdown that fits a comment on a pull request.")
    pdf: bool = option("--pdf", is_flag=True, help="Write a PDF; needs Chromium or Chrome.")

    def __post_init__(self) -> None:
        if self.markdown and self.pdf:
            raise click.UsageError("give --markdown or --pdf, not both")
        if self.pdf and self.output is None and sys.stdout.isatty():
            raise click.UsageError("a PDF is not for a terminal: name a file with --output")


@dataclass(frozen=True)
class _PeriodOptions:
    """Which decisions of which runs a report is about."""

    every: bool = option("--all", is_flag=True, help="Report on every run of the store, and on the store itself.")
    tool: str = option("--tool", default="", metavar="NAME", help="List who allowed and denied this tool, in any run.")
    since: datetime | None = option(
        "--since", type=TIME, metavar="TIME", help="List what people decided from then on, in UTC."
    )
    until: datetime | None = option(
        "--until", type=TIME, metavar="TIME", help="List what people decided before then, in UTC."
    )

    @property
    def decisions(self) -> DecisionFilter | None:
        """The decisions that are wanted, or None for whole runs."""
        if not (self.tool or self.since or self.until):
            return None
        return DecisionFilter(self.tool, to_timestamp(self.since), to_timestamp(self.until))


@click.command(epilog=_EXAMPLES)
@click.argument("run_ids", metavar="[RUN]...", nargs=-1, shell_complete=complete_run_id)
@collect_options(_FormatOptions, "form")
@collect_options(_PeriodOptions, "period")
@checkpoint_options
@store_option
@tenant_option
@click.pass_context
def report(
    ctx: click.Context,
    run_ids: tuple[str, ...],
    form: _FormatOptions,
    period: _PeriodOptions,
    witness: CheckpointOptions,
    location: StoreLocation,
) -> None:
    """Report on RUNs in one file that needs no network: for a reviewer or an auditor, now or years later.

    It says what was asked, how it ended and who allowed what and when; it has the picture with the run's path, every
    move with the guards that did not hold and the one that did, the transcript, failures, costs and the graph; and what
    agentfsm verify finds, with the keys and the checkpoint that were used. What was redacted in the store, or
    withheld from it, is not in the report either. The runs of its sub-agents follow it.

    With --tool, --since or --until it lists what people decided, over all runs: all approvals of a tool in a month.

    Exit codes: 0 the report was written; 1 it was, and it says "tampered"; 2 wrong usage; 3 it was, and it says that
    something cannot be verified.
    """
    wanted = period.decisions
    if bool(run_ids) + period.every + (wanted is not None) != 1:
        raise click.UsageError("name RUNs, or give --all, or --tool, --since and --until")
    if form.markdown and wanted is not None:
        raise click.UsageError("--markdown is for runs: a list of decisions is HTML or PDF")
    runs, findings = _collect(run_ids, wanted, witness, location)
    if form.markdown:
        content = run_markdown(runs, findings).encode()
    else:
        made_at = time.time()
        page = run_page(runs, findings, made_at) if wanted is None else period_page(runs, wanted, findings, made_at)
        content = render_pdf(page) if form.pdf else page.encode()
    if form.output is None:
        click.echo(content, nl=False)
    else:
        write_private(form.output, content)
        click.echo(form.output, err=True)
    codes = {each.code for each in (*findings.problems, *(run.verification for run in runs))}
    ctx.exit(next((code for code in (TAMPERED, UNVERIFIABLE) if code in codes), 0))


def _collect(
    run_ids: tuple[str, ...], wanted: DecisionFilter | None, witness: CheckpointOptions, location: StoreLocation
) -> tuple[list[ReportedRun], Findings]:
    """The runs with what their verification found, and what is wrong with the store.

    Of a run without a decision that is wanted, the records are not kept.
    """
    store = open_existing_store(location)
    keyring, checkpoint = store_keyring(location), witness.read()
    signed, changed = signed_heads(checkpoint, witness.log_file or checkpoint_log(location))
    problems = [VerificationReport("(log)", TAMPERED, 0, None, changed)] if changed else []
    runs: list[ReportedRun] = []
    run_ids = tuple(dict.fromkeys(each for run_id in run_ids for each in await_result(_with_sub_agents(store, run_id))))
    missing = {*run_ids, *(head.run_id for head in await_result(store.heads()))}
    for found in map(with_doubt, verify_runs(run_ids, None, location, signed, keyring)):
        if found.run_id in missing:  # what comes after it is about its hold or its row
            missing.remove(found.run_id)
            run_id = str(found.run_id)  # somebody may have changed the type of an id
            run = ReportedRun(run_id, _read_records(store, found.run_id), found)
            kept = wanted is None or find_decisions([run], wanted)
            runs.append(run if kept else replace(run, sealed=()))
        elif found.code != GOOD:
            problems.append(found)
    return runs, Findings(
        store=location.name if location.file is None else location.file.name,
        key_ids=() if keyring is None else tuple(keyring.key_ids),
        checkpoint="" if checkpoint is None else _describe_checkpoint(checkpoint),
        unchecked=tuple(unchecked_lines(keyring is not None, None if checkpoint is None else checkpoint.date)),
        problems=tuple(problems),
    )


async def _with_sub_agents(store: Store, run_id: str) -> list[str]:
    """A run, and after it the runs that it called as sub-agents, each with those that it called."""
    found = [run_id]
    async for info in iterate_runs(store, RunQuery(parent=run_id)):
        found += await _with_sub_agents(store, info.run_id)
    return found


def _read_records(store: Store, run_id: str) -> tuple[SealedRecord, ...]:
    try:
        return tuple(await_result(store.records(run_id)))
    except StoreError:  # the verification says why
        return ()


def _describe_checkpoint(signed: Checkpoint) -> str:
    root = signed.root.hex()[:16]
    return f"the checkpoint of {signed.date:%Y-%m-%d %H:%M:%S} UTC, of {signed.size} entries with root hash {root}"
