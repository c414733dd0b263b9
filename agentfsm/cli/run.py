"""``agentfsm run``: a prompt, a model, tools of a file."""

from __future__ import annotations

import sys

import click

from agentfsm.cli.options import AgentOptions, RunOptions, agent_options, run_options
from agentfsm.cli.telling import tell

__all__ = ["run"]


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
@run_options
@click.pass_context
def run(ctx: click.Context, prompt: str, agent_is: AgentOptions, how: RunOptions) -> None:
    """Run an agent on PROMPT ("-" reads it from stdin).

    The answer goes to stdout, and everything that is said about it to stderr. At a terminal you are asked
    what the run asks; elsewhere it is left suspended, and agentfsm resume goes on with it.

    The run is kept in a store on your disk, with all that is said in it: see agentfsm runs and agentfsm show.

    Keys come from OPENAI_API_KEY, ANTHROPIC_API_KEY and the like.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise click.UsageError("the prompt is empty")
    agent = agent_is.agent()
    ctx.exit(tell(agent, agent.run(text), agent_is, how))
