"""``agentfsm resume`` without a run: all that was cut off goes on, and what waits for a person is listed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import click
from rich.text import Text

from agentfsm.agent import Agent
from agentfsm.cli.fitting import need_tools
from agentfsm.cli.options import AgentOptions, RunOptions
from agentfsm.cli.outcome import NOT_COMPLETED, SUSPENDED, Story, exit_code, show_outcome, story_json
from agentfsm.cli.screen import Screen, open_screen, short
from agentfsm.cli.table import transition_table
from agentfsm.cli.telling import say_how_to_go_on, watch_through
from agentfsm.errors import AgentfsmError, ConfigurationError
from agentfsm.journal.asking import Asked, asked, works_for_another
from agentfsm.journal.store import Store

__all__ = ["go_on_with_all"]


@dataclass
class _All:
    """What came of the runs of a store.

    Attributes:
        stories: Those that went on.
        waiting: Those that wait for a person, now.
        left: Those that could not go on, and why.
    """

    stories: list[Story] = field(default_factory=list[Story])
    waiting: list[Asked] = field(default_factory=list[Asked])
    left: dict[str, str] = field(default_factory=dict[str, str])


def go_on_with_all(agent: Agent, agent_is: AgentOptions, how: RunOptions) -> int:
    """Go on with every run of the agent's store that was cut off, one after the other, and give the exit code.

    A sub-agent's run goes on with the run for which it works.

    Raises:
        ConfigurationError: The agent has no store.
    """
    if how.record or how.diagram:
        raise click.UsageError("--record and --diagram are for one run: name it")
    store = agent.parts.host.store
    if store is None:
        raise ConfigurationError("without a store there are no runs to go on with")
    screen, all_of_them = open_screen(quiet=how.quiet), _All()
    for head in store.heads("running"):
        if not head.seq:
            continue  # cut off before anything of it was kept
        if head.owner is not None:
            all_of_them.left[head.run_id] = f"{head.owner} is at it"
            continue
        story = _go_on(agent, head.run_id, screen, how, all_of_them.left)
        if story is not None:
            all_of_them.stories.append(story)
            if story.signal is not None:
                break
    all_of_them.waiting = _waiting(store, all_of_them.left)
    if how.as_json:
        click.echo(json.dumps(_as_json(all_of_them), indent=2))
    else:
        _say(all_of_them, screen, agent_is)
    return _code(all_of_them)


def _go_on(agent: Agent, run_id: str, screen: Screen, how: RunOptions, left: dict[str, str]) -> Story | None:
    try:
        run = agent.resume(run_id)
        if run.state.parent is not None:
            return None
        need_tools(agent, run.state, None)
        story = watch_through(agent, run, screen)
    except AgentfsmError as error:
        left[run_id] = str(error).partition("\n")[0]
        return None
    if not how.as_json:
        screen.err.print()
        screen.err.print(transition_table(story.decisions, agent.graph))
        show_outcome(screen, story)
        screen.err.print()
    return story


def _waiting(store: Store, left: dict[str, str]) -> list[Asked]:
    found: list[Asked] = []
    for head in store.heads("suspended"):
        try:
            each = asked(store, head)
            if each is not None and not works_for_another(store, each.run_id):
                found.append(each)
        except AgentfsmError as error:
            left[head.run_id] = str(error).partition("\n")[0]
    return found


def _say(all_of_them: _All, screen: Screen, agent_is: AgentOptions) -> None:
    for run_id, why in all_of_them.left.items():
        screen.err.print(Text(f"run {run_id} is left as it is: {short(why, 2000)}"), soft_wrap=True)
    for each in all_of_them.waiting:
        screen.err.print(Text(f"run {each.run_id} waits for a person: {short(each)}"), soft_wrap=True)
        say_how_to_go_on(screen, each.run_id, each.kind, each.digest, agent_is)
    if not (all_of_them.stories or all_of_them.left):
        screen.err.print("no run of this store was cut off")


def _as_json(all_of_them: _All) -> dict[str, Any]:
    return {
        "resumed": [story_json(story) for story in all_of_them.stories],
        "waiting": [{**vars(each), "arguments": dict(each.arguments)} for each in all_of_them.waiting],
        "left": [{"run_id": run_id, "reason": why} for run_id, why in all_of_them.left.items()],
    }


def _code(all_of_them: _All) -> int:
    """The first of: interrupted, something did not complete or was left, something waits for a person, all is well."""
    codes = [exit_code(story) for story in all_of_them.stories]
    interrupted = [story.signal for story in all_of_them.stories if story.signal is not None]
    if interrupted:
        return 128 + interrupted[0]
    if all_of_them.left or NOT_COMPLETED in codes:
        return NOT_COMPLETED
    return SUSPENDED if all_of_them.waiting else 0
