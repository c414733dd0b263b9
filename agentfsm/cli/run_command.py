"""``agentfsm run``, and what ``resume`` and ``demo`` share with it: drive a run, handle Ctrl-C, ask and report."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
from rich.text import Text

from agentfsm.agent import Agent
from agentfsm.cli.console import CliConsole, open_console
from agentfsm.cli.diagram_command import require_run_diagram_format, write_run_diagram
from agentfsm.cli.local_store import command_runner, open_private
from agentfsm.cli.options import (
    AgentCliOptions,
    ReportOptions,
    agent_options,
    collect_options,
    option,
    report_options,
    require_secret,
    signing_secret,
)
from agentfsm.cli.progress import ProgressDisplay
from agentfsm.cli.run_report import RunReport, exit_code, print_failure, print_json, print_report
from agentfsm.cli.terminal_prompt import TerminalPrompter, must_say_who, valid_replies
from agentfsm.errors import ConfigurationError, HumanReplyError, SessionOpenError
from agentfsm.loop.events import UserInputRequested
from agentfsm.loop.human_input import HumanInput
from agentfsm.loop.keys import SECRET_VARIABLE
from agentfsm.loop.messages import File, Image, image_media_type
from agentfsm.loop.quorum import Quorum
from agentfsm.loop.suspension import SuspensionRecord
from agentfsm.machine.engine import Decision
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.run import Run

AnswerCallback = Callable[[UserInputRequested], HumanInput | None]
"""Returns the reply to what a suspended run asks, or None to leave it suspended."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def drive(
    agent: Agent, run: Run, progress: ProgressDisplay, get_answer: AnswerCallback, runner: asyncio.Runner
) -> RunReport:
    """Drive a run until it ends, or suspends without an answer.

    The first Ctrl-C cancels the run, which still ends with a complete transcript; a second one kills the process. At a
    question, Ctrl-C leaves the run waiting if somebody can answer it later.
    """
    started = time.monotonic()
    decisions: list[Decision] = []
    signals: list[int] = []
    while True:
        with progress:
            result = runner.run(_drive_once(run, progress, signals))
        decisions += result.decisions
        next_run = None if signals else _next_run(agent, result, get_answer, runner, signals)
        if next_run is None:
            break
        run = next_run
    return RunReport(result, tuple(decisions), time.monotonic() - started, signals[0] if signals else None)


def _next_run(
    agent: Agent, result: RunResult, get_answer: AnswerCallback, runner: asyncio.Runner, signals: list[int]
) -> Run | None:
    """The run resumed with the user's reply; None if it has ended or there is no reply."""
    request = result.outcome
    if not isinstance(request, UserInputRequested):
        return None
    while True:
        try:
            reply = get_answer(request)
            return None if reply is None else runner.run(agent.resume(request.suspension_record, reply).load())
        except HumanReplyError as error:
            click.echo(f"  {error}", err=True)
        except (KeyboardInterrupt, click.Abort):
            signals.append(signal.SIGINT)
            if agent.config.host.store is not None or signing_secret() is not None:
                return None
            return agent.dismiss(request.suspension_record, "interrupted while it waited for an answer")


async def _drive_once(run: Run, progress: ProgressDisplay, signals: list[int]) -> RunResult:
    with _cancel_on_signal(run, signals):
        async for event in run:
            progress.on_event(event)
        return await run


@contextmanager
def _cancel_on_signal(run: Run, received: list[int]) -> Generator[None]:
    """Inside, the first signal cancels the run; the next one has its usual effect."""
    loop = asyncio.get_running_loop()

    def restore() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def on_signal(number: signal.Signals) -> None:
        restore()
        received.append(number)
        run.cancel(f"interrupted ({number.name})")

    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield  # event loops cannot handle signals here, so Ctrl-C raises KeyboardInterrupt
        return
    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        restore()


def drive_and_report(agent: Agent, run: Run, agent_opts: AgentCliOptions, report_opts: ReportOptions) -> int:
    """Drive a run to its end or suspension, report it, and return the exit code."""
    _check_report_options(report_opts)
    console = open_console(quiet=report_opts.quiet)
    report = drive_with_progress(agent, run, console)
    if report_opts.diagram:
        report.files["picture"] = str(write_run_diagram(report, Path(report_opts.diagram)))
    request = report.result.outcome
    if isinstance(request, UserInputRequested) and report_opts.record:
        _write_suspension_record(request.suspension_record, Path(report_opts.record))
        report.files["record"] = report_opts.record
    if report_opts.as_json:
        print_json(console, report)
        return exit_code(report)
    print_report(console, report, agent.graph)
    if console.err.quiet and not report.result.ok:
        print_failure(report)
    if isinstance(request, UserInputRequested):
        _print_suspended_hint(open_console(), report, request, agent_opts)
    return exit_code(report)


def drive_with_progress(agent: Agent, run: Run, console: CliConsole) -> RunReport:
    """Drive a run and show its progress; at a terminal, the user is asked what the run asks."""
    get_answer = partial(_ask_at_terminal, TerminalPrompter(console.err)) if console.interactive else _leave_suspended
    store = agent.config.host.store
    if store is not None:  # printed first, so that the run can be resumed if this process dies
        console.err.print(Text(f"run {run.run_id}", "dim"), soft_wrap=True)
    progress = ProgressDisplay(console, agent.graph, agent.model.name)
    report = drive(agent, run, progress, get_answer, command_runner())
    report.stored = store is not None
    return report


def _check_report_options(report_opts: ReportOptions) -> None:
    """Reject options that could not be honored after the run, before it costs anything."""
    if report_opts.record:
        require_secret("--record")
        if not Path(report_opts.record).resolve().parent.is_dir():
            raise ConfigurationError(f"--record: there is no folder {str(Path(report_opts.record).parent)!r}")
    if report_opts.diagram:
        require_run_diagram_format(Path(report_opts.diagram))


def _leave_suspended(request: UserInputRequested) -> None:
    """Without a terminal there is no answer, so the run stays suspended."""


def _ask_at_terminal(prompter: TerminalPrompter, request: UserInputRequested) -> HumanInput | None:
    """The user's answer; None if it would not count, because nobody has said who the user is."""
    return None if must_say_who(request.quorum) else prompter.answer(request)


def _write_suspension_record(record: SuspensionRecord, path: Path) -> None:
    """Write a record atomically, readable by its owner only: it holds the conversation."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "x", encoding="utf-8", opener=open_private) as file:  # Path.open has no opener
        file.write(record.to_json() + "\n")
    temporary.replace(path)


def _print_suspended_hint(
    console: CliConsole, report: RunReport, request: UserInputRequested, agent_opts: AgentCliOptions
) -> None:
    """Print how to resume the run; a run without store and record prints its record on stdout."""
    record = report.files.get("record")
    if record is None and not report.stored and signing_secret() is None:
        click.echo(
            "agentfsm: there is no terminal to answer at, and this run cannot be resumed: it is in no store, and "
            f"{SECRET_VARIABLE}, which would sign a suspension record, is not set",
            err=True,
        )
        return
    if record is None and not report.stored:
        click.echo(request.suspension_record.to_json())
        record = "RECORD.json"
    digest = "" if record else request.digest
    print_resume_hint(console, record or request.run_id, request.kind, request.quorum, digest, agent_opts)


def print_resume_hint(
    console: CliConsole,
    run_or_record: str,
    kind: str,
    quorum: Quorum | None,
    digest: str,
    agent_opts: AgentCliOptions,
) -> None:
    """Print the command that resumes a run, and the valid replies.

    Only an approval has a suggested reply. Whether a call in doubt ran is for the user to find out.
    """
    digest_option = ["--to", digest[:12]] if digest else []
    reply = "allow" if kind == "approval" else "YOUR ANSWER"
    words = [reply, *digest_option, *_who_options(quorum), *agent_opts.to_args()]
    line = shlex.join(["agentfsm", "resume", run_or_record, *words])
    console.err.print(Text(f"  resume with: {line}"), soft_wrap=True)
    if replies := valid_replies(kind, quorum):
        console.err.print(Text(f"  valid replies: {replies}"), soft_wrap=True)


def _who_options(quorum: Quorum | None) -> list[str]:
    """The options that say who replies, if there is a rule about that."""
    if quorum is None or not must_say_who(quorum):
        return []
    return ["--by", "NAME", *(["--role", quorum.roles[0]] if quorum.roles else [])]


def print_expired_hint(console: CliConsole, run_id: str, agent_opts: AgentCliOptions) -> None:
    """Print the command that ends a run whose request has expired: it accepts no reply any more."""
    line = shlex.join(["agentfsm", "resume", run_id, "--dismiss", "expired", *agent_opts.to_args()])
    console.err.print(Text(f"  its request has expired (validity_s); end it with: {line}"), soft_wrap=True)


_EXAMPLES = """\b
Examples:
  agentfsm run "What is 6 x 7?" --model ollama:llama3.2
  agentfsm run "Who wrote this?" --model claude-sonnet-4-6 --tools my_tools.py
  git diff | agentfsm run - --model openai:gpt-5-mini --instructions "Review this diff."
  agentfsm run "Tidy up" -m gpt-5-mini -t my_tools.py --record wait.json --json
  agentfsm run "What does this bill say?" -m claude-sonnet-4-6 --file bill.pdf --image lamp.png
  agentfsm run "And yesterday?" -m gpt-5-mini --session ann-42
  agentfsm run "Pay the bill" -m gpt-5-mini -t my_tools.py --actor ann
"""


_FILE_ARGUMENT = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True, kw_only=True)
class _PromptOptions:
    """What else a prompt has, and the conversation that it continues."""

    image: tuple[Path, ...] = option(
        "--image", multiple=True, type=_FILE_ARGUMENT, help="An image that follows the prompt; repeatable."
    )
    file: tuple[Path, ...] = option(
        "--file",
        multiple=True,
        type=_FILE_ARGUMENT,
        help="A PDF, text or image that follows the prompt and its images; repeatable.",
    )
    session: str | None = option(
        "--session", metavar="ID", help="Continue or begin this conversation; PROMPT may be left out."
    )
    actor: str | None = option(
        "--actor", metavar="NAME", help="Who requests the run; recorded as claimed, not verified."
    )

    def read_parts(self) -> list[Image | File]:
        """The images and files."""
        return [
            *(_read_part("--image", path, Image.from_bytes) for path in self.image),
            *(_read_part("--file", path, partial(_as_part, path.name)) for path in self.file),
        ]


def _as_part(name: str, content: bytes) -> Image | File:
    return Image.from_bytes(content) if image_media_type(content) else File.from_bytes(content, name)


def _read_part(option: str, path: Path, read: Callable[[bytes], Image | File]) -> Image | File:
    try:
        return read(path.read_bytes())
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path}: {error}", param_hint=option) from None


def _session_run(agent: Agent, session_id: str, prompt: Sequence[str | Image | File] | None, actor: str | None) -> Run:
    """The next run of a session, read from the store."""
    if agent.config.host.store is None:
        raise ConfigurationError("--session continues a conversation that is stored: leave --no-store out")
    try:
        return command_runner().run(agent.session(session_id).run(prompt, actor=actor).load())
    except SessionOpenError as error:
        asks = "was interrupted" if error.request is None else f"asks: {error.request}"
        reply = "" if error.request is None else " ANSWER"
        raise ConfigurationError(
            f"the last run of session {session_id!r} has not ended: run {error.run_id} {asks}. Continue it with: "
            f"agentfsm resume {error.run_id}{reply}; or end it with: agentfsm resume {error.run_id} --dismiss REASON"
        ) from None


@click.command(epilog=_EXAMPLES)
@click.argument("prompt", required=False)
@collect_options(_PromptOptions, "prompt_opts")
@agent_options
@report_options
@click.pass_context
def run(
    ctx: click.Context,
    prompt: str | None,
    prompt_opts: _PromptOptions,
    agent_opts: AgentCliOptions,
    report_opts: ReportOptions,
) -> None:
    """Run an agent on PROMPT ("-" reads it from stdin).

    The answer goes to stdout, everything else to stderr. At a terminal, you are asked for approvals and
    answers; otherwise the run is left suspended, and agentfsm resume continues it.

    The run and its conversation are stored on your disk: see agentfsm runs and agentfsm show.

    API keys come from OPENAI_API_KEY, ANTHROPIC_API_KEY and the other variables of the providers.
    """
    text, attached = sys.stdin.read() if prompt == "-" else prompt, prompt_opts.read_parts()
    if text is None and (prompt_opts.session is None or attached):
        raise click.UsageError("Missing argument 'PROMPT'.")
    if text is not None and not text.strip():
        raise click.UsageError("the prompt is empty")
    parts = None if text is None else [text, *attached]
    agent = agent_opts.build_agent(require_store=prompt_opts.session is not None)
    session, actor = prompt_opts.session, prompt_opts.actor
    made = agent.run(parts or "", actor=actor) if session is None else _session_run(agent, session, parts, actor)
    ctx.exit(drive_and_report(agent, made, agent_opts, report_opts))
