"""A run at the command line from its first step to its end: watched, asked about, interrupted in an orderly way."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import click

from agentfsm.agent import Agent
from agentfsm.cli.outcome import Story
from agentfsm.cli.watch import Watcher
from agentfsm.core.events import UserInputRequested
from agentfsm.errors import ReplyError
from agentfsm.machine.engine import Decision
from agentfsm.runtime.replies import Answer
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.run import Run

__all__ = ["Asker", "see_through"]

Asker = Callable[[UserInputRequested], Answer | None]
"""Gives a reply to what a suspended run asks, or None to leave it suspended."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def see_through(agent: Agent, run: Run, watcher: Watcher, ask: Asker) -> Story:
    """Drive a run until it has ended, or waits for somebody who is not here.

    Ctrl-C cancels the run, which ends with its transcript in order; a second one ends the process at once.

    Args:
        agent: Whose run it is.
        run: The run, not begun.
        watcher: Shows what happens.
        ask: Answers what the run asks.
    """
    began = time.monotonic()
    decisions: list[Decision] = []
    caught: list[int] = []
    with asyncio.Runner() as runner:
        while True:
            with watcher:
                result = runner.run(_watched(run, watcher, caught))
            decisions += result.decisions
            following = None if caught else _following(agent, result, ask, caught)
            if following is None:
                break
            run = following
    return Story(result, tuple(decisions), time.monotonic() - began, caught[0] if caught else None)


def _following(agent: Agent, result: RunResult, ask: Asker, caught: list[int]) -> Run | None:
    """The run that goes on with a person's reply, or None where there is nothing to go on with."""
    asked = result.outcome
    if not isinstance(asked, UserInputRequested):
        return None
    while True:
        try:
            reply = ask(asked)
            return None if reply is None else agent.resume(asked.suspension_record, reply)
        except ReplyError as error:
            click.echo(f"  {error}", err=True)
        except (KeyboardInterrupt, click.Abort):
            caught.append(signal.SIGINT)
            return agent.dismiss(asked.suspension_record, "interrupted while it waited for an answer")


async def _watched(run: Run, watcher: Watcher, caught: list[int]) -> RunResult:
    with _cancelling(run, caught):
        async for event in run:
            watcher.see(event)
        return await run


@contextmanager
def _cancelling(run: Run, caught: list[int]) -> Generator[None]:
    """While inside, the first signal cancels the run; the next one does what it always does."""
    loop = asyncio.get_running_loop()

    def restore() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def interrupted(number: signal.Signals) -> None:
        restore()
        caught.append(number)
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
