"""``agentfsm completion``: the script that makes a shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["completion"]


_EXAMPLES = """\b
Examples:
  agentfsm completion bash >> ~/.bashrc
  agentfsm completion zsh >> ~/.zshrc
  agentfsm completion fish > ~/.config/fish/completions/agentfsm.fish
"""


@click.command(epilog=_EXAMPLES, short_help="Make a shell complete commands.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for a shell."""
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101  # the choices above are the ones that click knows
    click.echo(kind(ctx.find_root().command, {}, "agentfsm", "_AGENTFSM_COMPLETE").source())
