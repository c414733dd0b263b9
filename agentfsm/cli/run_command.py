"""``agentfsm run``, and what ``resume`` and ``demo`` share with it: driving a run, handling Ctrl-C, asking the user and reporting the outcome."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.text import Text

from agentfsm.agent import Agent
from agentfsm.cli.console import REPLY_FORMATS, CliConsole, TerminalPrompter, open_console
from agentfsm.cli.diagram_command import require_run_diagram_format, write_run_diagram
from agentfsm.cli.local_store import SECRET_VARIABLE, signing_secret
from agentfsm.cli.options import AgentOptions, ReportOptions, agent_options, report_options
from agentfsm.cli.run_report import ProgressDisplay, RunReport, exit_code, print_json, print_outcome, transition_table
from agentfsm.errors import ConfigurationError, HumanReplyError
from agentfsm.loop.events import UserInputRequested
from agentfsm.loop.suspension import SuspensionRecord
from agentfsm.machine.engine import Decision
from agentfsm.runtime.approval import HumanInput
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.run import Run

__all__ = [
    "AnswerCallback",
    "drive",
    "drive_and_report",
    "drive_with_progress",
    "print_resume_hint",
    "require_secret",
    "run",
]


AnswerCallback = Callable[[UserInputRequested], HumanInput | None]
"""Gives a reply to what a suspended run asks, or None to leave it suspended."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def drive(agent: Agent, run: Run, progress: ProgressDisplay, get_answer: AnswerCallback) -> RunReport:
    """Drive a run until it has ended, or waits for somebody who is not here.

    Ctrl-C cancels the run, which ends with its transcript in order; a second one ends the process at once.

    Args:
        agent: Whose run it is.
        run: The run, not begun.
        progress: Shows what happens.
        get_answer: Answers what the run asks.
    """
    began = time.monotonic()
    decisions: list[Decision] = []
    caught: list[int] = []
    with asyncio.Runner() as runner:
        while True:
            with progress:
                result = runner.run(_drive_once(run, progress, caught))
            decisions += result.decisions
            following = None if caught else _next_run(agent, result, get_answer, caught)
            if following is None:
                break
            run = following
    return RunReport(result, tuple(decisions), time.monotonic() - began, caught[0] if caught else None)


def _next_run(agent: Agent, result: RunResult, get_answer: AnswerCallback, signals: list[int]) -> Run | None:
    """The run that goes on with a person's reply, or None where there is nothing to go on with."""
    asked = result.outcome
    if not isinstance(asked, UserInputRequested):
        return None
    while True:
        try:
            reply = get_answer(asked)
            return None if reply is None else agent.resume(asked.suspension_record, reply)
        except HumanReplyError as error:
            click.echo(f"  {error}", err=True)
        except (KeyboardInterrupt, click.Abort):
            signals.append(signal.SIGINT)
            return agent.dismiss(asked.suspension_record, "interrupted while it waited for an answer")


async def _drive_once(run: Run, progress: ProgressDisplay, signals: list[int]) -> RunResult:
    with _cancel_on_signal(run, signals):
        async for event in run:
            progress.on_event(event)
        return await run


@contextmanager
def _cancel_on_signal(run: Run, received: list[int]) -> Generator[None]:
    """While inside, the first signal cancels the run; the next one does what it always does."""
    loop = asyncio.get_running_loop()

    def restore() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def interrupted(number: signal.Signals) -> None:
        restore()
        received.append(number)
        run.cancel(f"interrupted ({number.name})")

    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield  # where a loop hears no signals, Ctrl-C raises KeyboardInterrupt as ever
        return
    for number in _SIGNALS:
        loop.add_signal_handler(number, interrupted, number)
    try:
        yield
    finally:
        restore()


_SUGGESTED_REPLIES = {"approval": "allow"}


def require_secret(feature: str) -> None:
    """Make sure that there is a secret.

    Raises:
        ConfigurationError: There is none.
    """
    if signing_secret() is None:
        raise ConfigurationError(
            f"{feature} needs the variable {SECRET_VARIABLE}: a long random text that signs records, the same for run and resume"
        )


def drive_and_report(agent: Agent, run: Run, agent_opts: AgentOptions, report_opts: ReportOptions) -> int:
    """See a run through, tell what happened, and give the exit code.

    Raises:
        ConfigurationError: A record or a picture is wanted that could not be written.
    """
    _check_report_options(report_opts)
    screen = open_console(quiet=report_opts.quiet)
    story = drive_with_progress(agent, run, screen)
    if report_opts.diagram:
        story.files["picture"] = str(write_run_diagram(story, Path(report_opts.diagram)))
    asked = story.result.outcome
    if isinstance(asked, UserInputRequested) and report_opts.record:
        _write_suspension_record(asked.suspension_record, Path(report_opts.record))
        story.files["record"] = report_opts.record
    if report_opts.as_json:
        print_json(screen, story)
        return exit_code(story)
    screen.err.print()
    screen.err.print(transition_table(story.decisions, agent.graph))
    print_outcome(screen, story)
    if isinstance(asked, UserInputRequested):
        _print_suspended_hint(screen, story, asked, agent_opts)
    return exit_code(story)


def drive_with_progress(agent: Agent, run: Run, console: CliConsole) -> RunReport:
    """See a run through, showing what happens; a person at the terminal is asked what it asks."""
    ask = TerminalPrompter(console.err).answer if console.interactive else _leave_suspended
    store = agent.config.host.store
    if store is not None:  # said before anything can happen to it, for whoever must go on with it
        console.err.print(Text(f"run {run.run_state.run_id}", "dim"), soft_wrap=True)
    story = drive(agent, run, ProgressDisplay(console, agent.graph, agent.model.name), ask)
    story.stored = store is not None
    return story


def _check_report_options(report_opts: ReportOptions) -> None:
    """Find out before the run costs anything what cannot be done behind it."""
    if report_opts.record:
        require_secret("--record")
        if not Path(report_opts.record).resolve().parent.is_dir():
            raise ConfigurationError(f"--record: there is no folder {str(Path(report_opts.record).parent)!r}")
    if report_opts.diagram:
        require_run_diagram_format(Path(report_opts.diagram))


def _leave_suspended(request: UserInputRequested) -> None:
    """Nobody sits here: the run stays suspended."""


def _write_suspension_record(record: SuspensionRecord, path: Path) -> None:
    """Write a record whole or not at all, for its owner alone: it holds the conversation."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with open(fresh, "x", encoding="utf-8", opener=_open_private) as file:  # Path.open has no opener
        file.write(record.to_json() + "\n")
    fresh.replace(path)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _print_suspended_hint(
    console: CliConsole, report: RunReport, request: UserInputRequested, agent_opts: AgentOptions
) -> None:
    """Nobody could answer here: what goes on with the run."""
    record = report.files.get("record")
    if record is None and not report.stored and signing_secret() is None:
        click.echo(
            f"agentfsm: nobody is here to answer, and this run cannot be resumed: no store has it, and {SECRET_VARIABLE}, which "
            "would sign a record, is not set",
            err=True,
        )
        return
    if record is None and not report.stored:
        click.echo(request.suspension_record.to_json())
        record = "RECORD.json"
    print_resume_hint(console, record or request.run_id, request.kind, "" if record else request.digest, agent_opts)


def print_resume_hint(
    console: CliConsole, run_or_record: str, kind: str, digest: str, agent_opts: AgentOptions
) -> None:
    """Show the command that goes on with a run, and the replies that fit.

    What nobody can know is not put into anybody's mouth: whether a call ran is left open.

    Args:
        console: Where.
        run_or_record: The run's id, or the file of its record.
        kind: What it waits for.
        digest: What the person is shown, to which the reply is bound; empty where that is not known.
        agent_opts: The agent's options.
    """
    bound = ["--to", digest[:12]] if digest else []
    reply = _SUGGESTED_REPLIES.get(kind, "YOUR ANSWER")
    line = shlex.join(["agentfsm", "resume", run_or_record, reply, *bound, *agent_opts.to_args()])
    console.err.print(Text(f"  go on with: {line}"), soft_wrap=True)
    if kind in REPLY_FORMATS:
        console.err.print(Text(f"  the reply is {REPLY_FORMATS[kind]}"), soft_wrap=True)


_EXAMPLES = """\b
Examples:
  agentfsm run "What is 6 x 7?" --model ollama:llama3.2
  agentfsm run "Who wrote this?" --model claude-sonnet-4-6 --tools my_tools.py
  git diff | agentfsm run - --model openai:gpt-5-mini --instructions "Review this diff."
  agentfsm run "Tidy up" -m gpt-5-mini -t my_tools.py --record wait.json --json
"""


@click.command(epilog=_EXAMPLES, short_help="Run an agent on a prompt.")
@click.argument("prompt")
@agent_options
@report_options
@click.pass_context
def run(ctx: click.Context, prompt: str, agent_opts: AgentOptions, report_opts: ReportOptions) -> None:
    """Run an agent on PROMPT ("-" reads it from stdin).

    The answer goes to stdout, and everything that is said about it to stderr. At a terminal you are asked
    what the run asks; elsewhere it is left suspended, and agentfsm resume goes on with it.

    The run is kept in a store on your disk, with all that is said in it: see agentfsm runs and agentfsm show.

    Keys come from OPENAI_API_KEY, ANTHROPIC_API_KEY and the like.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise click.UsageError("the prompt is empty")
    agent = agent_opts.build_agent()
    ctx.exit(drive_and_report(agent, agent.run(text), agent_opts, report_opts))
