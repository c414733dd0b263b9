"""How a run of ``run`` or ``resume`` is told: its table, its outcome, its picture, and what to do if it waits."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click
from rich.text import Text

from agentfsm.agent import Agent
from agentfsm.cli.ask import FORMS, Person
from agentfsm.cli.keeping import SECRET, secret
from agentfsm.cli.options import AgentOptions, RunOptions
from agentfsm.cli.outcome import Story, exit_code, show_json, show_outcome
from agentfsm.cli.picture import check_drawable, draw_run
from agentfsm.cli.screen import Screen, open_screen
from agentfsm.cli.session import see_through
from agentfsm.cli.table import transition_table
from agentfsm.cli.watch import Watcher
from agentfsm.core.events import UserInputRequested
from agentfsm.core.suspension import SuspensionRecord
from agentfsm.errors import ConfigurationError
from agentfsm.runtime.run import Run

__all__ = ["need_secret", "say_how_to_go_on", "tell", "watch_through"]

_REPLIES = {"approval": "allow"}


def need_secret(what: str) -> None:
    """Make sure that there is a secret.

    Raises:
        ConfigurationError: There is none.
    """
    if secret() is None:
        raise ConfigurationError(
            f"{what} needs the variable {SECRET}: a long random text that signs records, the same for run and resume"
        )


def tell(agent: Agent, run: Run, agent_is: AgentOptions, how: RunOptions) -> int:
    """See a run through, tell what happened, and give the exit code.

    Raises:
        ConfigurationError: A record or a picture is wanted that could not be written.
    """
    _check(how)
    screen = open_screen(quiet=how.quiet)
    story = watch_through(agent, run, screen)
    if how.diagram:
        story.files["picture"] = str(draw_run(story, Path(how.diagram)))
    asked = story.result.outcome
    if isinstance(asked, UserInputRequested) and how.record:
        _save(asked.suspension_record, Path(how.record))
        story.files["record"] = how.record
    if how.as_json:
        show_json(screen, story)
        return exit_code(story)
    screen.err.print()
    screen.err.print(transition_table(story.decisions, agent.graph))
    show_outcome(screen, story)
    if isinstance(asked, UserInputRequested):
        _say_what_is_left(screen, story, asked, agent_is)
    return exit_code(story)


def watch_through(agent: Agent, run: Run, screen: Screen) -> Story:
    """See a run through, showing what happens; a person at the terminal is asked what it asks."""
    ask = Person(screen.err).answer if screen.person else _leave
    store = agent.parts.host.store
    if store is not None:  # said before anything can happen to it, for whoever must go on with it
        screen.err.print(Text(f"run {run.state.run_id}", "dim"), soft_wrap=True)
    story = see_through(agent, run, Watcher(screen, agent.graph, agent.model.name), ask)
    story.kept = store is not None
    return story


def _check(how: RunOptions) -> None:
    """Find out before the run costs anything what cannot be done behind it."""
    if how.record:
        need_secret("--record")
        if not Path(how.record).resolve().parent.is_dir():
            raise ConfigurationError(f"--record: there is no folder {str(Path(how.record).parent)!r}")
    if how.diagram:
        check_drawable(Path(how.diagram))


def _leave(asked: UserInputRequested) -> None:
    """Nobody sits here: the run stays suspended."""


def _save(record: SuspensionRecord, path: Path) -> None:
    """Write a record whole or not at all, for its owner alone: it holds the conversation."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with open(fresh, "x", encoding="utf-8", opener=_private) as file:  # Path.open has no opener
        file.write(record.to_json() + "\n")
    fresh.replace(path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _say_what_is_left(screen: Screen, story: Story, asked: UserInputRequested, agent_is: AgentOptions) -> None:
    """Nobody could answer here: what goes on with the run."""
    record = story.files.get("record")
    if record is None and not story.kept and secret() is None:
        click.echo(
            f"agentfsm: nobody is here to answer, and this run cannot be resumed: no store has it, and {SECRET}, which "
            "would sign a record, is not set",
            err=True,
        )
        return
    if record is None and not story.kept:
        click.echo(asked.suspension_record.to_json())
        record = "RECORD.json"
    say_how_to_go_on(screen, record or asked.run_id, asked.kind, "" if record else asked.digest, agent_is)


def say_how_to_go_on(screen: Screen, which: str, kind: str, digest: str, agent_is: AgentOptions) -> None:
    """Show the command that goes on with a run, and the replies that fit.

    What nobody can know is not put into anybody's mouth: whether a call ran is left open.

    Args:
        screen: Where.
        which: The run's id, or the file of its record.
        kind: What it waits for.
        digest: What the person is shown, to which the reply is bound; empty where that is not known.
        agent_is: The agent's options.
    """
    bound = ["--to", digest[:12]] if digest else []
    reply = _REPLIES.get(kind, "YOUR ANSWER")
    line = shlex.join(["agentfsm", "resume", which, reply, *bound, *agent_is.words()])
    screen.err.print(Text(f"  go on with: {line}"), soft_wrap=True)
    if kind in FORMS:
        screen.err.print(Text(f"  the reply is {FORMS[kind]}"), soft_wrap=True)
