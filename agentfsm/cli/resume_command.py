"""``agentfsm resume``: resume one suspended or interrupted run, or all runs of a store that have something to do."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from agentfsm.agent import Agent
from agentfsm.agent.resume import require_store
from agentfsm.cli.console import CliConsole, open_console, shorten
from agentfsm.cli.local_store import await_result, complete_run_id, default_store, tenant_option
from agentfsm.cli.options import (
    AgentCliOptions,
    ReportOptions,
    agent_options,
    argument,
    collect_options,
    option,
    report_options,
    require_secret,
)
from agentfsm.cli.run_command import drive_and_report, drive_with_progress, print_expired_hint, print_resume_hint
from agentfsm.cli.run_report import (
    NOT_COMPLETED,
    SUSPENDED,
    RunReport,
    exit_code,
    print_failure,
    print_report,
    report_json,
)
from agentfsm.cli.terminal_prompt import (
    HumanRequest,
    TerminalPrompter,
    claimed_actor,
    parse_extension,
    parse_reply,
    require_name,
)
from agentfsm.errors import AgentfsmError, ConfigurationError, SuspensionToolError
from agentfsm.journal.listing import find_run_id
from agentfsm.journal.load import StoredRequest, is_subagent_run, pending_request
from agentfsm.journal.migration import Migration
from agentfsm.journal.rehydrate import RehydratedRun, rehydrate
from agentfsm.journal.signals import read_signals
from agentfsm.journal.store import Store
from agentfsm.loop.human_input import HumanInput
from agentfsm.loop.suspension import SuspensionRecord
from agentfsm.runtime.run import Run
from agentfsm.runtime.run_request import escalation_is_due


def require_tools(agent: Agent, run: Run) -> Run:
    """The interrupted run, if the agent has the tools of the calls that it had started.

    Normally, a call of an unknown tool gets an error result and the model continues. That is right for a tool
    name that the model made up. It is wrong for a call that had started: that tool exists, and the user forgot
    ``--tools``.
    """
    state = run.run_state
    names = {each.call.name for each in state.batch if each.started and each.result is None}
    missing = sorted(name for name in names if name not in agent.config.tools)
    if missing:
        raise ConfigurationError(
            f"run {state.run_id!r} continues with the tool {', '.join(map(repr, missing))}, which is not loaded: name "
            "its file with --tools; the run was not changed"
        )
    return run


@dataclass
class _ResumeSummary:
    """What happened to the runs of a store.

    Attributes:
        reports: The runs that were resumed.
        waiting: The requests of the runs that now wait for a person.
        skipped: The runs that could not be resumed, and why.
    """

    reports: list[RunReport] = field(default_factory=list[RunReport])
    waiting: list[StoredRequest] = field(default_factory=list[StoredRequest])
    skipped: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, report: RunReport | None) -> bool:
        """Add the report of a run, if there is one; returns whether the user interrupted it."""
        if report is None:
            return False
        self.reports.append(report)
        return report.signal is not None


def resume_all(agent: Agent, agent_opts: AgentCliOptions, report_opts: ReportOptions) -> int:
    """Resume every interrupted, answered or cancelled run of the agent's store, and return the exit code.

    They are resumed one after the other. A sub-agent's run is resumed by the run that called it.
    """
    if report_opts.record or report_opts.diagram:
        raise click.UsageError("--record and --diagram are for a single run: name it")
    store = agent.config.host.store
    if store is None:
        raise ConfigurationError("there are no runs to resume without a store")
    console, summary = open_console(quiet=report_opts.quiet), _ResumeSummary()
    for head in await_result(store.heads("running")):
        if not head.seq:
            continue  # interrupted before its first record
        if head.owner is not None:
            summary.skipped[head.run_id] = f"{head.owner} is running it"
            continue
        if summary.add(_resume_one(agent, head.run_id, console, report_opts, summary.skipped)):
            break
    else:
        _act_on_signals(agent, store, console, report_opts, summary)
    summary.waiting = _pending_requests(store, summary.skipped)
    if report_opts.as_json:
        click.echo(json.dumps(_summary_json(summary), indent=2))
    else:
        _print_summary(summary, console, agent_opts)
    return _summary_exit_code(summary)


def _resume_one(
    agent: Agent, run_id: str, console: CliConsole, report_opts: ReportOptions, skipped: dict[str, str]
) -> RunReport | None:
    try:
        run = await_result(agent.resume(run_id).load())
        if run.run_state.parent is not None:
            return None
        return _report(agent, require_tools(agent, run), console, report_opts)
    except AgentfsmError as error:
        skipped[run_id] = str(error).partition("\n")[0]
        return None


def _report(agent: Agent, run: Run, console: CliConsole, report_opts: ReportOptions) -> RunReport:
    """Drive a run, and print how it went."""
    report = drive_with_progress(agent, run, console)
    if not report_opts.as_json:
        print_report(console, report, agent.graph)
        if report_opts.quiet and not report.result.ok:
            print_failure(report)
        console.err.print()
    return report


def _act_on_signals(
    agent: Agent, store: Store, console: CliConsole, report_opts: ReportOptions, summary: _ResumeSummary
) -> None:
    """Resume the runs that were answered or cancelled with ``agentfsm answer`` or ``cancel``."""
    for run_id in dict.fromkeys(signal.run_id for signal in await_result(store.signals.pending())):
        while (run := await_result(agent.next_run(run_id))) is not None:  # several votes may wait for one run
            before = len(await_result(store.signals.pending(run_id)))
            report = _report(agent, run, console, report_opts)
            if summary.add(report):
                return
            if len(await_result(store.signals.pending(run_id))) >= before:
                break
        signals = await_result(read_signals(store.signals, agent.config.host.keyring, run_id))
        refusals = [str(each) for each in signals if each.kind == "refusal"]
        for each in refusals:
            console.err.print(Text(f"run {run_id}: {shorten(each, 2000)}"), soft_wrap=True)
        if len(await_result(store.signals.pending(run_id))) > len(refusals) and run_id not in summary.skipped:
            summary.skipped[run_id] = "what was sent to it waits for another agent, or nobody with the secret sent it"


def _pending_requests(store: Store, skipped: dict[str, str]) -> list[StoredRequest]:
    requests: list[StoredRequest] = []
    for head in await_result(store.heads("suspended")):
        try:
            request = await_result(pending_request(store, head))
            if request is not None and not await_result(is_subagent_run(store, request.run_id)):
                requests.append(request)
        except AgentfsmError as error:
            skipped[head.run_id] = str(error).partition("\n")[0]
    return requests


def _print_summary(summary: _ResumeSummary, console: CliConsole, agent_opts: AgentCliOptions) -> None:
    for run_id, why in summary.skipped.items():
        console.err.print(Text(f"run {run_id} was not resumed: {shorten(why, 2000)}"), soft_wrap=True)
    for request in summary.waiting:
        console.err.print(Text(f"run {request.run_id} waits for a person: {shorten(request)}"), soft_wrap=True)
        if request.has_expired(time.time()):
            print_expired_hint(console, request.run_id, agent_opts)
        else:
            print_resume_hint(console, request.run_id, request.kind, request.quorum, request.digest, agent_opts)
    if not (summary.reports or summary.skipped):
        console.err.print("no run of this store was interrupted")


def _summary_json(summary: _ResumeSummary) -> dict[str, Any]:
    return {
        "resumed": [report_json(report) for report in summary.reports],
        "waiting": [asdict(replace(each, arguments=dict(each.arguments))) for each in summary.waiting],
        "left": [{"run_id": run_id, "reason": why} for run_id, why in summary.skipped.items()],
    }


def _summary_exit_code(summary: _ResumeSummary) -> int:
    """The first that applies: interrupted, a run did not complete or was skipped, a run waits, success."""
    codes = [exit_code(report) for report in summary.reports]
    signals = [report.signal for report in summary.reports if report.signal is not None]
    if signals:
        return 128 + signals[0]
    if summary.skipped or NOT_COMPLETED in codes:
        return NOT_COMPLETED
    return SUSPENDED if summary.waiting else 0


@dataclass(frozen=True, kw_only=True)
class _ReplyOptions:
    """The options that reply to one run, or end it."""

    reply: str | None = argument(required=False)
    extend: str | None = option(
        "--extend",
        metavar="UNIT=AMOUNT",
        help="Extend the limit that the run waits at by another amount than the default: tokens=, usd=, "
        "seconds= or model_calls=. REPLY, if given, is a message to the model.",
    )
    dismiss: str | None = option("--dismiss", metavar="REASON", help="End the run without a reply.")
    digest: str | None = option(
        "--to",
        default=None,
        metavar="DIGEST",
        help="The digest of the request that you saw; fail if the run asks something else now.",
    )
    by: str = option("--by", default="", metavar="NAME", help="Who replies; recorded as claimed, not verified.")
    roles: tuple[str, ...] = option("--role", multiple=True, metavar="ROLE", help="A role of that person; repeatable.")

    def resume_record(self, agent: Agent, record: SuspensionRecord) -> Run:
        """The run of a suspension record, resumed or dismissed."""
        if self.dismiss is not None:
            return agent.dismiss(record, self.dismiss, by=claimed_actor(self.by, self.roles))
        return self._resume(agent, record, self._get_answer(record), self.digest)

    def resume_run(self, agent: Agent, run_id: str) -> Run:
        """A run of the store, resumed or dismissed."""
        if self.dismiss is not None:
            return agent.dismiss(run_id, self.dismiss, by=claimed_actor(self.by, self.roles))
        answered_here = self.reply is not None or self.extend is not None
        if not answered_here and await_result(require_store(agent.config).signals.pending(run_id)):
            run = await_result(agent.next_run(run_id))
            if run is not None:
                return require_tools(agent, run)
        stored = _stored_run(agent, run_id)
        request = stored.run.pending_request if stored.suspension is not None else None
        if request is None or stored.request_ref is None:
            if self.extend is not None:
                raise click.UsageError("--extend is a reply to a limit, and the run asks nothing now")
            run = await_result(agent.resume(run_id, self.reply).load())  # interrupted; if it has ended, this raises
            return require_tools(agent, run)
        if not answered_here and escalation_is_due(agent.config, stored.run):
            return agent.resume(run_id)  # more people may answer from now on
        digest = self.digest if answered_here or self.digest is not None else stored.request_ref[1]  # shown now
        return self._resume(agent, run_id, self._get_answer(request), digest)

    def _resume(self, agent: Agent, waiting: SuspensionRecord | str, answer: HumanInput, digest: str | None) -> Run:
        try:
            actor = claimed_actor(self.by, self.roles)
            return await_result(agent.resume(waiting, answer, to=digest, by=actor).load())
        except SuspensionToolError as error:
            raise SuspensionToolError(f"{error} (--tools names the file of a tool)") from None

    def _get_answer(self, request: HumanRequest) -> HumanInput:
        """The reply from the command line, or else from the user at the terminal."""
        if self.extend is not None:
            return parse_extension(self.extend, self.reply or "")
        console = open_console()
        if self.reply is None and not console.interactive:
            raise click.UsageError(f"there is no terminal to ask at: give a REPLY to {request.question!r}")
        require_name(request.quorum, self.by)
        return (
            TerminalPrompter(console.err).answer(request)
            if self.reply is None
            else parse_reply(request.kind, self.reply)
        )


@dataclass(frozen=True, kw_only=True)
class _MigrationOptions:
    """The options that accept runs of another graph."""

    migrate: bool = option(
        "--migrate", is_flag=True, help="Accept a run of another graph if its path is the same here."
    )
    rename: tuple[str, ...] = option(
        "--rename", multiple=True, metavar="OLD=NEW", help="A renamed state, or STATE.GUARD; repeatable."
    )
    skip_path_check: bool = option(
        "--skip-path-check", is_flag=True, help="Accept RUN of another graph even if its path would be different here."
    )

    def apply_to(self, agent: Agent, run_id: str | None) -> Agent:
        """The agent, which accepts runs of other graphs if an option asks for it."""
        if not (self.migrate or self.rename or self.skip_path_check):
            return agent
        old = None if run_id is None else str(_stored_run(agent, run_id).graph["fingerprint"])
        states, transitions = self._parse_renames(dotted=False), self._parse_renames(dotted=True)
        migration = Migration(old, states, transitions, self.skip_path_check)
        migration.check(agent.graph)
        return agent.with_config(replace(agent.config, migrations=(migration,)))

    def _parse_renames(self, *, dotted: bool) -> dict[str, str]:
        names: dict[str, str] = {}
        for each in self.rename:
            old, equals, new = each.partition("=")
            if not (equals and old and new) or ("." in old) != ("." in new):
                raise click.BadParameter(f"{each!r} is not of the form OLD=NEW", param_hint="--rename")
            if ("." in old) == dotted:
                names[old] = new
        return names


def _stored_run(agent: Agent, run_id: str) -> RehydratedRun:
    return rehydrate(await_result(require_store(agent.config).records(run_id)))


_EXAMPLES = """\b
Examples:
  agentfsm resume -m gpt-5-mini -t my_tools.py            all interrupted runs
  agentfsm resume 3f9c0a1b2c3d4e5f -m gpt-5-mini          one interrupted run
  agentfsm resume 3f9c0a1b2c3d4e5f allow --by Ann -m gpt-5-mini -t my_tools.py
  agentfsm resume 3f9c0a1b2c3d4e5f allow --by Ann --role manager -m gpt-5-mini -t my_tools.py
  agentfsm resume wait.json "deny not on a Friday" -m gpt-5-mini -t my_tools.py
  agentfsm resume 3f9c0a1b2c3d4e5f --extend tokens=5000 -m gpt-5-mini
  agentfsm resume 3f9c0a1b2c3d4e5f --dismiss "no longer needed" -m gpt-5-mini
  agentfsm resume 3f9c0a1b2c3d4e5f -m gpt-5-mini --graph my_graph.py:NEW --migrate
"""


@click.command(epilog=_EXAMPLES)
@click.argument("run_or_record", metavar="[RUN]", required=False, shell_complete=complete_run_id)
@collect_options(_ReplyOptions, "reply_opts")
@collect_options(_MigrationOptions, "migration_opts")
@agent_options
@report_options
@tenant_option
@click.pass_context
def resume(
    ctx: click.Context,
    run_or_record: str | None,
    reply_opts: _ReplyOptions,
    migration_opts: _MigrationOptions,
    agent_opts: AgentCliOptions,
    report_opts: ReportOptions,
) -> None:
    """Resume RUN, with REPLY if it waits for one; without a REPLY, you are asked at the terminal.

    RUN is a run's id or the beginning of it (agentfsm runs lists them), or the file of a suspension record. A record
    must have been signed with the same AGENTFSM_SECRET, and can be used once. Without RUN, all interrupted runs
    of the store are resumed, and those that were answered or cancelled; those that wait for a person are listed.

    For a question, REPLY is the answer. For an approval it is: allow, deny, "deny REASON", or the new arguments
    as a JSON object. For a form it is its fields as a JSON object, "decline REASON" or cancel. For a limit it is a
    message to the model. For a call that may or may not have run: ran, "ran RESULT", did-not-run, or give-up.

    Give the same model, tools and other options as for the run; they are not saved with the run.

    Exit codes: 0 success, or no run was interrupted; 1 a run did not complete or could not be resumed; 2 wrong
    usage; 3 a run waits for a person; 130 interrupted.
    """
    if reply_opts.dismiss is not None and (reply_opts.reply is not None or reply_opts.extend is not None):
        raise click.UsageError("give a REPLY or --dismiss, not both")
    if run_or_record is None:
        _refuse_for_all_runs(reply_opts, migration_opts)
        agent = migration_opts.apply_to(_build_agent_with_store(agent_opts, None), None)
        ctx.exit(resume_all(agent, agent_opts, report_opts))
    file = Path(run_or_record)
    if file.suffix == ".json" or file.is_file():
        require_secret("resume with a record")
        record = SuspensionRecord.from_json(file.read_bytes())
        agent = agent_opts.build_agent()
        ctx.exit(drive_and_report(agent, reply_opts.resume_record(agent, record), agent_opts, report_opts))
    agent = _build_agent_with_store(agent_opts, run_or_record)
    run_id = await_result(find_run_id(require_store(agent.config), run_or_record))
    agent = migration_opts.apply_to(agent, run_id)
    ctx.exit(drive_and_report(agent, reply_opts.resume_run(agent, run_id), agent_opts, report_opts))


def _refuse_for_all_runs(reply_opts: _ReplyOptions, migration_opts: _MigrationOptions) -> None:
    """Refuse the options that are about one run."""
    given = {
        "--extend": reply_opts.extend is not None,
        "--dismiss": reply_opts.dismiss is not None,
        "--to": reply_opts.digest is not None,
        "--skip-path-check": migration_opts.skip_path_check,
    }
    for name, is_given in given.items():
        if is_given:
            raise click.UsageError(f"{name} is for a single run: name it")


def _build_agent_with_store(agent_opts: AgentCliOptions, run_id: str | None) -> Agent:
    """The agent, on a store that exists; a mistyped path must not create an empty one."""
    run = "" if run_id is None else f": no run {run_id!r}"
    if agent_opts.no_store:
        raise click.UsageError(f"there are no runs without a store{run}")
    location = agent_opts.store or default_store()
    if location.file is not None and not location.file.exists():
        raise click.UsageError(f"there is no store at {location.name}{run}")
    return agent_opts.build_agent(require_store=True)
