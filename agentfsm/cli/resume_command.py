"""``agentfsm resume``: continue one suspended or interrupted run, or all interrupted runs of a store."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from agentfsm.agent import Agent
from agentfsm.agent.resume import require_store
from agentfsm.cli.console import CliConsole, HumanRequest, TerminalPrompter, open_console, parse_reply, shorten
from agentfsm.cli.options import AgentOptions, ReportOptions, agent_options, report_options
from agentfsm.cli.run_command import drive_and_report, drive_with_progress, print_resume_hint, require_secret
from agentfsm.cli.run_report import (
    NOT_COMPLETED,
    SUSPENDED,
    RunReport,
    exit_code,
    print_outcome,
    report_json,
    transition_table,
)
from agentfsm.cli.runs_command import complete_run_id, default_store_path
from agentfsm.errors import AgentfsmError, ConfigurationError
from agentfsm.journal.load import StoredRequest, is_subagent_run, pending_request
from agentfsm.journal.migration import Migration
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.replay import rehydrate
from agentfsm.journal.store import Store
from agentfsm.loop.state import RunState
from agentfsm.loop.suspension import SuspensionRecord
from agentfsm.runtime.approval import Allow, Edit, HumanInput, ItDidNotRun
from agentfsm.runtime.run import Run

__all__ = ["require_tools", "resume", "resume_all"]


def require_tools(agent: Agent, run: RunState, answer: HumanInput | None) -> None:
    """Make sure that what was forgotten at the command line does not use up an answer, or end a call for good.

    A call of a tool that an agent does not have is answered so, and the model goes on without it. That is as it
    should be for a model that makes a name up, and not where a person has just allowed the call, or where it had
    begun: there the tool was, and ``--tools`` was left out.

    Args:
        agent: Who goes on with the run.
        run: What the run knows.
        answer: The answer to what it waits for, or None where it was cut off.

    Raises:
        ConfigurationError: It does not have them.
    """
    if run.pending_request is not None:
        names = {run.pending_request.tool} if isinstance(answer, Allow | Edit | ItDidNotRun) else set[str]()
    else:
        names = {each.call.name for each in run.batch if each.started and each.result is None}
    missing = sorted(name for name in names if name and name not in agent.config.tools)
    if missing:
        named = ", ".join(map(repr, missing))
        raise ConfigurationError(
            f"run {run.run_id!r} goes on with {named}, and there is no such tool here: name the file that has it with "
            "--tools; nothing was changed"
        )


@dataclass
class _ResumeSummary:
    """What came of the runs of a store.

    Attributes:
        reports: Those that went on.
        waiting: Those that wait for a person, now.
        skipped: Those that could not go on, and why.
    """

    reports: list[RunReport] = field(default_factory=list[RunReport])
    waiting: list[StoredRequest] = field(default_factory=list[StoredRequest])
    skipped: dict[str, str] = field(default_factory=dict[str, str])


def resume_all(agent: Agent, agent_opts: AgentOptions, report_opts: ReportOptions) -> int:
    """Go on with every run of the agent's store that was cut off, one after the other, and give the exit code.

    A sub-agent's run goes on with the run for which it works.

    Raises:
        ConfigurationError: The agent has no store.
    """
    if report_opts.record or report_opts.diagram:
        raise click.UsageError("--record and --diagram are for one run: name it")
    store = agent.config.host.store
    if store is None:
        raise ConfigurationError("without a store there are no runs to go on with")
    screen, all_of_them = open_console(quiet=report_opts.quiet), _ResumeSummary()
    for head in store.heads("running"):
        if not head.seq:
            continue  # cut off before anything of it was kept
        if head.owner is not None:
            all_of_them.skipped[head.run_id] = f"{head.owner} is at it"
            continue
        story = _resume_one(agent, head.run_id, screen, report_opts, all_of_them.skipped)
        if story is not None:
            all_of_them.reports.append(story)
            if story.signal is not None:
                break
    all_of_them.waiting = _pending_requests(store, all_of_them.skipped)
    if report_opts.as_json:
        click.echo(json.dumps(_summary_json(all_of_them), indent=2))
    else:
        _print_summary(all_of_them, screen, agent_opts)
    return _summary_exit_code(all_of_them)


def _resume_one(
    agent: Agent, run_id: str, console: CliConsole, report_opts: ReportOptions, skipped: dict[str, str]
) -> RunReport | None:
    try:
        run = agent.resume(run_id)
        if run.run_state.parent is not None:
            return None
        require_tools(agent, run.run_state, None)
        story = drive_with_progress(agent, run, console)
    except AgentfsmError as error:
        skipped[run_id] = str(error).partition("\n")[0]
        return None
    if not report_opts.as_json:
        console.err.print()
        console.err.print(transition_table(story.decisions, agent.graph))
        print_outcome(console, story)
        console.err.print()
    return story


def _pending_requests(store: Store, skipped: dict[str, str]) -> list[StoredRequest]:
    found: list[StoredRequest] = []
    for head in store.heads("suspended"):
        try:
            each = pending_request(store, head)
            if each is not None and not is_subagent_run(store, each.run_id):
                found.append(each)
        except AgentfsmError as error:
            skipped[head.run_id] = str(error).partition("\n")[0]
    return found


def _print_summary(summary: _ResumeSummary, console: CliConsole, agent_opts: AgentOptions) -> None:
    for run_id, why in summary.skipped.items():
        console.err.print(Text(f"run {run_id} is left as it is: {shorten(why, 2000)}"), soft_wrap=True)
    for each in summary.waiting:
        console.err.print(Text(f"run {each.run_id} waits for a person: {shorten(each)}"), soft_wrap=True)
        print_resume_hint(console, each.run_id, each.kind, each.digest, agent_opts)
    if not (summary.reports or summary.skipped):
        console.err.print("no run of this store was cut off")


def _summary_json(summary: _ResumeSummary) -> dict[str, Any]:
    return {
        "resumed": [report_json(story) for story in summary.reports],
        "waiting": [{**vars(each), "arguments": dict(each.arguments)} for each in summary.waiting],
        "left": [{"run_id": run_id, "reason": why} for run_id, why in summary.skipped.items()],
    }


def _summary_exit_code(summary: _ResumeSummary) -> int:
    """The first of: interrupted, something did not complete or was left, something waits for a person, all is well."""
    codes = [exit_code(story) for story in summary.reports]
    interrupted = [story.signal for story in summary.reports if story.signal is not None]
    if interrupted:
        return 128 + interrupted[0]
    if summary.skipped or NOT_COMPLETED in codes:
        return NOT_COMPLETED
    return SUSPENDED if summary.waiting else 0


_EXAMPLES = """\b
Examples:
  agentfsm resume -m gpt-5-mini -t my_tools.py            all that was cut off
  agentfsm resume 3f9c0a1b2c3d4e5f -m gpt-5-mini          this one, which was cut off
  agentfsm resume 3f9c0a1b2c3d4e5f allow --by Ann -m gpt-5-mini -t my_tools.py
  agentfsm resume wait.json "deny not on a Friday" -m gpt-5-mini -t my_tools.py
  agentfsm resume 3f9c0a1b2c3d4e5f --dismiss "no longer needed" -m gpt-5-mini
  agentfsm resume 3f9c0a1b2c3d4e5f -m gpt-5-mini --graph my_graph.py:NEW --migrate
"""


@click.command(epilog=_EXAMPLES, short_help="Go on with runs that wait or were cut off.")
@click.argument("run_or_record", metavar="[RUN]", required=False, shell_complete=complete_run_id)
@click.argument("reply", required=False)
@click.option("--dismiss", metavar="REASON", help="End the run without a reply.")
@click.option("--to", "digest", default="", metavar="DIGEST", help="What you were shown: refuse if it has changed.")
@click.option("--by", default="", metavar="NAME", help="Who replies; it is recorded.")
@click.option("--migrate", is_flag=True, help="Take a run of another graph, if its path is the same on this one.")
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="A state, or STATE.GUARD, that has a new name here.")
@click.option("--vouch", is_flag=True, help="Take RUN of another graph though its path would have been another.")
@agent_options
@report_options
@click.pass_context
def resume(
    ctx: click.Context,
    run_or_record: str | None,
    reply: str | None,
    dismiss: str | None,
    digest: str,
    by: str,
    migrate: bool,
    rename: tuple[str, ...],
    vouch: bool,
    agent_opts: AgentOptions,
    report_opts: ReportOptions,
) -> None:
    """Go on with RUN, with REPLY; where it waits for one and there is none, you are asked at the terminal.

    RUN is the id of a run in the store (agentfsm runs lists them), or the file of a record. A record must have
    been signed with the same AGENTFSM_SECRET, and is good for one reply. Without RUN, all runs of the store that
    were cut off go on, and those that wait for a person are listed.

    To a question, REPLY is the answer. To an approval it is: allow, deny, "deny REASON", or the new arguments
    as a JSON object. To a call that may or may not have run: ran, "ran RESULT", did-not-run, or give-up.

    Give the model, tools and other options of the run; neither store nor record holds them.

    Exit codes: 0 it worked, or nothing was cut off; 1 a run did not complete, or could not go on; 2 wrong usage;
    3 a run waits for a person; 130 interrupted.
    """
    if dismiss is not None and reply is not None:
        raise click.UsageError("give a REPLY or --dismiss, not both")
    if vouch and run_or_record is None:
        raise click.UsageError("--vouch is for one run: name it")
    changes = _MigrationOptions(migrate or vouch or bool(rename), rename, vouch)
    if run_or_record is None:
        agent = changes.apply_to(_build_agent_with_store(agent_opts, None), None)
        ctx.exit(resume_all(agent, agent_opts, report_opts))
    said = _ReplyOptions(reply, dismiss, digest, by)
    file = Path(run_or_record)
    if file.suffix == ".json" or file.is_file():
        require_secret("resume with a record")
        record = SuspensionRecord.from_json(file.read_bytes())
        agent = agent_opts.build_agent()
        ctx.exit(drive_and_report(agent, said.resume_record(agent, record), agent_opts, report_opts))
    agent = changes.apply_to(_build_agent_with_store(agent_opts, run_or_record), run_or_record)
    ctx.exit(drive_and_report(agent, said.resume_run(agent, run_or_record), agent_opts, report_opts))


def _build_agent_with_store(agent_opts: AgentOptions, run_id: str | None) -> Agent:
    """The agent, on a store that is there: a name that was mistyped would be a new, empty one, and all in order.

    Raises:
        click.UsageError: It is not.
        ConfigurationError: Something does not fit together.
    """
    run = "" if run_id is None else f": no run {run_id!r}"
    if agent_opts.no_store:
        raise click.UsageError(f"without a store there are no runs{run}")
    where = agent_opts.store or default_store_path()
    if not where.exists():
        raise click.UsageError(f"there is no store at {where}{run}")
    return agent_opts.build_agent(require_store=True)


@dataclass(frozen=True)
class _ReplyOptions:
    """What was said to one run: a reply, or that it is to end."""

    reply: str | None
    dismiss: str | None
    digest: str
    by: str

    def resume_record(self, agent: Agent, record: SuspensionRecord) -> Run:
        if self.dismiss is not None:
            return agent.dismiss(record, self.dismiss)
        answer = self._get_answer(record)
        return _with_required_tools(agent, agent.resume(record, answer, to=self.digest, by=self.by), answer)

    def resume_run(self, agent: Agent, run_id: str) -> Run:
        if self.dismiss is not None:
            return agent.dismiss(run_id, self.dismiss)
        past = rehydrate(_journal_rows(agent, run_id))
        waiting = past.run.pending_request if past.suspension is not None else None
        if waiting is None or past.request_ref is None:
            cut_off = agent.resume(run_id, self.reply)  # or over: it says so, should it not go on
            return _with_required_tools(agent, cut_off, None)
        asked_here = past.request_ref[1] if self.reply is None else ""
        answer = self._get_answer(waiting)
        return _with_required_tools(
            agent, agent.resume(run_id, answer, to=self.digest or asked_here, by=self.by), answer
        )

    def _get_answer(self, request: HumanRequest) -> HumanInput:
        """The reply that was given, or the one that is given at the terminal."""
        if self.reply is not None:
            return parse_reply(request.kind, self.reply)
        screen = open_console()
        if not screen.interactive:
            raise click.UsageError(f"there is no terminal to ask at: give a REPLY to {request.question!r}")
        return TerminalPrompter(screen.err).answer(request)


def _with_required_tools(agent: Agent, run: Run, answer: HumanInput | None) -> Run:
    """The run, which has not begun to go on, where the agent has what it needs.

    Raises:
        ConfigurationError: It does not.
    """
    require_tools(agent, run.run_state, answer)
    return run


@dataclass(frozen=True)
class _MigrationOptions:
    """What lets runs of another graph in."""

    enabled: bool
    renames: tuple[str, ...]
    vouched: bool

    def apply_to(self, agent: Agent, run_id: str | None) -> Agent:
        """An agent that takes runs of other graphs, or the one of a run, where that is wanted.

        Raises:
            ConfigurationError: What is renamed is not there.
        """
        if not self.enabled:
            return agent
        old = None if run_id is None else str(rehydrate(_journal_rows(agent, run_id)).graph["fingerprint"])
        migration = Migration(old, self._parse_renames(dotted=False), self._parse_renames(dotted=True), self.vouched)
        migration.check(agent.graph)
        return agent.with_config(replace(agent.config, migrations=(migration,)))

    def _parse_renames(self, *, dotted: bool) -> dict[str, str]:
        names: dict[str, str] = {}
        for each in self.renames:
            old, equals, new = each.partition("=")
            if not (equals and old and new) or ("." in old) != ("." in new):
                raise click.BadParameter(f"{each!r} is no OLD=NEW", param_hint="--rename")
            if ("." in old) == dotted:
                names[old] = new
        return names


def _journal_rows(agent: Agent, run_id: str) -> list[SealedRecord]:
    """A run's journal.

    Raises:
        agentfsm.errors.StoreError: The store does not have it.
    """
    return require_store(agent.config).records(run_id)
