"""The ``agentfsm`` command group: the table of commands, exceptions as exit codes, and ``agentfsm completion``.

A command's module is imported when that command runs, so that one command does not pay for the imports of the
others. ``agentfsm --help`` and shell completion read the table only.

An error of agentfsm, or of click, that no command catches ends it with one line and an exit code, whatever function of
this package raises it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import click
from click.shell_completion import CompletionItem, get_completion_class

from agentfsm import __version__
from agentfsm.errors import AgentfsmError, MissingExtraError


class CommandEntry(NamedTuple):
    """One row of the table of commands.

    Attributes:
        module: The module of ``agentfsm.cli`` that defines the command, as a function of the command's name.
        summary: The line that ``agentfsm --help`` shows.
    """

    module: str
    summary: str


COMMANDS = {
    "demo": CommandEntry("demo_command", "Watch a complete run; needs no API key and no network."),
    "run": CommandEntry("run_command", "Run an agent on a prompt."),
    "resume": CommandEntry("resume_command", "Resume suspended or interrupted runs."),
    "diagram": CommandEntry("diagram_command", "Draw a graph, or check a committed diagram."),
    "check": CommandEntry("check_command", "Prove properties of a graph."),
    "diff": CommandEntry("diff_command", "Compare two graphs: their rows and their decisions."),
    "paths": CommandEntry("paths_command", "List the paths of a graph, or check a committed list."),
    "mutate": CommandEntry("mutate_command", "Run your tests against faulty tables."),
    "eval": CommandEntry("eval_command", "Run a set of cases with an agent."),
    "doctor": CommandEntry("doctor_command", "Check the installation, the store and the providers."),
    "completion": CommandEntry("app", "Print a shell completion script."),
    "runs": CommandEntry("runs_command", "List the runs of a store."),
    "show": CommandEntry("show_command", "Show what happened in a run."),
    "submit": CommandEntry("submit_command", "Have a worker run an agent."),
    "worker": CommandEntry("worker_command", "Run what is submitted, and take over what was cut off."),
    "view": CommandEntry("view_command", "Show the runs of a store in a browser, live."),
    "answer": CommandEntry("answer_command", "Answer a run that waits, in whatever process."),
    "cancel": CommandEntry("answer_command", "Cancel a run, in whatever process."),
    "link": CommandEntry("view_command", "Print a link with which a person may answer a run."),
    "report": CommandEntry("report_command", "Report on runs in one file that opens offline."),
    "verify": CommandEntry("verify_command", "Verify that journals are intact and legal."),
    "replay": CommandEntry("replay_command", "Replay recorded runs without model or tools."),
    "fork": CommandEntry("show_command", "Start a new run from a point in another one."),
    "export": CommandEntry("show_command", "Write a run's journal as JSON lines."),
    "adopt": CommandEntry("show_command", "Take over runs that the store's secret did not seal."),
    "redact": CommandEntry("redact_command", "Delete recorded content permanently."),
    "store": CommandEntry("store_command", "Create, check and migrate a store; hold and purge its runs."),
    "checkpoint": CommandEntry("verify_command", "Write a signed checkpoint of all runs."),
}
"""Every command, in the order in which a new user needs them."""

_COMPLETION_EXAMPLES = """\b
Examples:
  agentfsm completion bash >> ~/.bashrc
  agentfsm completion zsh >> ~/.zshrc
  agentfsm completion fish > ~/.config/fish/completions/agentfsm.fish
"""


@click.command(epilog=_COMPLETION_EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL."""
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101  # the choices above are the shells that click supports
    click.echo(kind(ctx.find_root().command, {}, "agentfsm", "_AGENTFSM_COMPLETE").source())


_EXAMPLES = """\b
Examples:
  agentfsm demo                            watch a complete run, without an API key
  agentfsm run "What is 6 x 7?" --model ollama:llama3.2
  agentfsm run "Tidy this up" --model openai:gpt-5-mini --tools my_tools.py
  agentfsm diagram --output loop.svg       draw the loop
"""


def _printable(message: str) -> str:
    """A message with nothing in it that a terminal acts on, and no secret of the environment."""
    try:
        from agentfsm.cli.console import sanitize
        from agentfsm.loop.withholding import environment_secrets, mask_secrets
    except ImportError:  # the extra is missing: the message says so
        return message
    return sanitize(mask_secrets(message, environment_secrets(os.environ)))


class _CliError(click.ClickException):
    """One line on stderr."""

    def __init__(self, message: str) -> None:
        super().__init__(_printable(" ".join(message.split())))

    def show(self, file: Any = None) -> None:
        """Print the line."""
        click.echo(f"agentfsm: {self.message}", err=True)


class _UsageError(_CliError):
    """Wrong usage or configuration."""

    exit_code = 2


class _InternalError(_CliError):
    """A bug."""

    exit_code = 70


class _LazyCommands(MutableMapping[str, click.Command]):
    """The commands by name, as click wants them; a lookup imports the command's module."""

    def __init__(self) -> None:
        self._added: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._added:
            entry = COMMANDS[name]
            self._added[name] = getattr(import_module(f"agentfsm.cli.{entry.module}"), name)
            self._added[name].short_help = entry.summary
        return self._added[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._added[name] = command

    def __delitem__(self, name: str) -> None:
        del self._added[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS


class _CommandGroup(click.Group):
    """A group that imports a command when it runs, and never ends with a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [CompletionItem(name, help=e.summary) for name, e in COMMANDS.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            vars(error).update(message=_printable(error.message))  # which is final, and may quote a run
            raise
        except (click.exceptions.Exit, BrokenPipeError):
            raise
        except (KeyboardInterrupt, click.Abort):
            raise click.exceptions.Exit(130) from None
        except Exception as error:
            if os.environ.get("AGENTFSM_TRACEBACK"):
                raise
            _raise_cli_error(error)


def _raise_cli_error(error: Exception) -> NoReturn:
    from pydantic import ValidationError  # slow to import, and needed only here

    from agentfsm.runtime.tools import problems

    match error:
        case AgentfsmError():
            raise _UsageError(str(error)) from error
        case ValidationError():
            raise _UsageError("; ".join(problems(error))) from error
        case OSError():
            filename = f"{error.filename}: " if error.filename else ""
            raise _UsageError(f"{filename}{error.strerror or error}") from error
        case ModuleNotFoundError(name="rich"):  # click came with another extra
            raise _UsageError(str(MissingExtraError("the command line", "cli"))) from error
        case _:
            hint = "AGENTFSM_TRACEBACK=1 shows where"
            raise _InternalError(f"internal error: {type(error).__name__}: {error} ({hint})") from error


@click.group(
    "agentfsm",
    cls=_CommandGroup,
    commands=_LazyCommands(),
    invoke_without_command=True,
    epilog=_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="agentfsm", message="%(prog)s %(version)s")
@click.pass_context
def app(ctx: click.Context) -> None:
    """Run an AI agent whose control flow is one declared table of states and transitions.

    Exit codes: 0 success, 1 the run did not complete, 2 wrong usage or configuration, 3 the run is suspended
    and waits for a person, 130 interrupted.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run_app(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        app.main(args=None if args is None else list(args), prog_name="agentfsm")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0
