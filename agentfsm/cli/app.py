"""The ``agentfsm`` command group: the table of its commands, how an error becomes one line and an exit code, and ``agentfsm completion``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NoReturn

import click
from click.shell_completion import get_completion_class
from pydantic import ValidationError

from agentfsm import __version__
from agentfsm.cli.check_command import check
from agentfsm.cli.demo_command import demo
from agentfsm.cli.diagram_command import diagram
from agentfsm.cli.diff_command import diff
from agentfsm.cli.replay_command import replay
from agentfsm.cli.resume_command import resume
from agentfsm.cli.run_command import run
from agentfsm.cli.runs_command import export, runs, show
from agentfsm.cli.verify_command import checkpoint, fork, redact, verify
from agentfsm.errors import AgentfsmError
from agentfsm.runtime.tools import problems

__all__ = ["app", "completion", "run_app"]


_COMPLETION_EXAMPLES = """\b
Examples:
  agentfsm completion bash >> ~/.bashrc
  agentfsm completion zsh >> ~/.zshrc
  agentfsm completion fish > ~/.config/fish/completions/agentfsm.fish
"""


@click.command(epilog=_COMPLETION_EXAMPLES, short_help="Make a shell complete commands.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for a shell."""
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101  # the choices above are the ones that click knows
    click.echo(kind(ctx.find_root().command, {}, "agentfsm", "_AGENTFSM_COMPLETE").source())


_EXAMPLES = """\b
Examples:
  agentfsm demo                            see a whole run, with no key
  agentfsm run "What is 6 x 7?" --model ollama:llama3.2
  agentfsm run "Tidy this up" --model openai:gpt-5-mini --tools my_tools.py
  agentfsm diagram --output loop.svg       the table as a picture
"""


class _CliError(click.ClickException):
    """One line on stderr."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))

    def show(self, file: Any = None) -> None:
        """Say it."""
        click.echo(f"agentfsm: {self.message}", err=True)


class _UsageError(_CliError):
    """Wrong usage or set-up."""

    exit_code = 2


class _InternalError(_CliError):
    """Something that should not be."""

    exit_code = 70


class _CommandGroup(click.Group):
    """A group in whose commands no exception ends as a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, BrokenPipeError):
            raise
        except (KeyboardInterrupt, click.Abort):
            raise click.exceptions.Exit(130) from None
        except Exception as error:
            if os.environ.get("AGENTFSM_TRACEBACK"):
                raise
            _raise_cli_error(error)


def _raise_cli_error(error: Exception) -> NoReturn:
    match error:
        case AgentfsmError():
            raise _UsageError(str(error)) from error
        case ValidationError():
            raise _UsageError("; ".join(problems(error))) from error
        case OSError():
            named = f"{error.filename}: " if error.filename else ""
            raise _UsageError(f"{named}{error.strerror or error}") from error
        case _:
            hint = "AGENTFSM_TRACEBACK=1 shows where"
            raise _InternalError(f"internal error: {type(error).__name__}: {error} ({hint})") from error


@click.group(
    "agentfsm",
    cls=_CommandGroup,
    invoke_without_command=True,
    epilog=_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="agentfsm", message="%(prog)s %(version)s")
@click.pass_context
def app(ctx: click.Context) -> None:
    """Run an AI agent whose every move is a row of one declared table.

    Exit codes: 0 it worked, 1 the run did not complete, 2 wrong usage or setup, 3 the run is suspended and
    waits for a person, 130 it was interrupted.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for _command in (
    demo,
    run,
    resume,
    diagram,
    check,
    diff,
    completion,
    runs,
    show,
    verify,
    replay,
    fork,
    export,
    redact,
    checkpoint,
):
    app.add_command(_command)


def run_app(args: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code."""
    try:
        app.main(args=None if args is None else list(args), prog_name="agentfsm")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0
