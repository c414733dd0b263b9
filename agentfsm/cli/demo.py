"""``agentfsm demo``: a whole run on real files, with rules in the model's seat, so it needs no key."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import click
from rich.text import Text

import agentfsm
from agentfsm.agent import Agent
from agentfsm.cli.ask import Person
from agentfsm.cli.demo_tools import workshop
from agentfsm.cli.outcome import exit_code, show_json, show_outcome
from agentfsm.cli.picture import draw_run
from agentfsm.cli.screen import Screen, open_screen
from agentfsm.cli.session import see_through
from agentfsm.cli.standin import TASK, StandIn
from agentfsm.cli.table import transition_table
from agentfsm.cli.watch import Watcher
from agentfsm.core.events import UserInputRequested
from agentfsm.core.model import Model
from agentfsm.core.presets import FUNNEL
from agentfsm.models import resolve
from agentfsm.runtime.host import Host, SystemClock
from agentfsm.runtime.replies import Allow, Answer

__all__ = ["demo"]

_LONGEST_SLEEP_S = 0.3
_PACE_S = 0.15
_INTRODUCTION = (
    "An agent works on real files with real tools. In the model's seat sits a stand-in made of rules: no key, no "
    "network. It reads what the tools give back and decides. On purpose it also makes mistakes that models make, "
    "and its provider is busy once, so that you see the loop recover, ask you, and wait for your leave.\n"
)
_INSTRUCTIONS = "You look after a code base. Use the tools; never guess what a file holds. Ask the user what you must."


class _HastyClock(SystemClock):
    """The machine's clock, except that a long back-off is cut short."""

    async def sleep(self, seconds: float) -> None:
        """Wait, but not for long."""
        await asyncio.sleep(min(seconds, _LONGEST_SLEEP_S))


@dataclass(frozen=True)
class _Nobody:
    """Answers in the place of a person who is not there, and says so."""

    screen: Screen

    def answer(self, asked: UserInputRequested) -> Answer:
        reply, words = (Allow(), "allow") if asked.kind == "approval" else ("300", "300")
        Person(self.screen.err).show(asked)
        self.screen.err.print(Text(f"(the demo answers itself: {words})\n", "cyan"))
        return reply


_EXAMPLES = """\b
Examples:
  agentfsm demo
  agentfsm demo src --out /tmp/demo
  agentfsm demo --model ollama:llama3.2    the same task for a real model
"""


@click.command(epilog=_EXAMPLES, short_help="See a whole run, with no key and no network.")
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-out"),
    show_default=True,
    help="Where the report and the picture are written.",
)
@click.option("-y", "--yes", is_flag=True, help="Answer the questions with what the demo would.")
@click.option("-m", "--model", metavar="NAME", help="A real model in place of the stand-in.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome and every transition as JSON.")
@click.pass_context
def demo(ctx: click.Context, folder: Path | None, out: Path, yes: bool, model: str | None, as_json: bool) -> None:
    """See a whole run: which modules of FOLDER are too long? It needs no key and no network.

    FOLDER is that of agentfsm's own modules unless you name one. A question and an approval come up on the
    way; without a terminal they answer themselves. At the end stand the table of all transitions, the answer,
    and the path of a picture of the run.
    """
    screen = open_screen(together=not as_json)
    root = (folder or Path(agentfsm.__file__).parent).resolve()
    agent = _agent(root, out, resolve(model) if model else StandIn(_PACE_S if screen.live else 0.0), real=bool(model))
    screen.err.print(Text(_introduction(root, model)))
    ask = Person(screen.err).answer if screen.person and not yes else _Nobody(screen).answer
    story = see_through(agent, agent.run(TASK), Watcher(screen, agent.graph, agent.model.name), ask)
    story.files["picture"] = str(draw_run(story, out / "run.svg"))
    if as_json:
        show_json(screen, story)
        ctx.exit(exit_code(story))
    screen.err.print()
    screen.err.print(transition_table(story.decisions, agent.graph))
    show_outcome(screen, story)
    ctx.exit(exit_code(story))


def _agent(root: Path, out: Path, model: Model, *, real: bool) -> Agent:
    return Agent(
        model,
        tools=workshop(root, out),
        instructions=_INSTRUCTIONS,
        preset=FUNNEL,
        host=Host() if real else Host(clock=_HastyClock()),
    )


def _introduction(root: Path, model: str | None) -> str:
    folder = f"Folder: {root}\nTask:   {TASK}\n"
    if model:
        return f"An agent works on real files with real tools; the model is {model}.\n\n{folder}"
    cut = f"(A back-off is cut short here: it waits {_LONGEST_SLEEP_S} s where the loop says 2.)\n"
    return f"{_INTRODUCTION}\n{folder}{cut}"
