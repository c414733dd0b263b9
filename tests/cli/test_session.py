"""A run at the command line from its first step to its end, through every suspension."""

from __future__ import annotations

import io
import signal
import threading
from collections.abc import Callable

import click
import pytest
from rich.console import Console

from agentfsm import Agent, Allow, Deny, RunCancelled, UserInputRequested, tool
from agentfsm.cli.console import CliConsole
from agentfsm.cli.progress import ProgressDisplay
from agentfsm.cli.run_command import AnswerCallback, drive
from agentfsm.cli.run_report import RunReport
from agentfsm.testing import ScriptedModel, call


@tool(requires_approval=True)
def send(to: str) -> str:
    """Send something."""
    return f"sent to {to}"


def seen(ask: AnswerCallback, *script: object) -> RunReport:
    agent = Agent(ScriptedModel(script), tools=[send], preset="funnel")  # type: ignore[arg-type]
    console = Console(file=io.StringIO(), width=100)
    watcher = ProgressDisplay(CliConsole(console, console, interactive=False, live=False), agent.graph, "scripted")
    return drive(agent, agent.run("go"), watcher, ask)


def answers(*replies: object) -> Callable[[UserInputRequested], object]:
    given = iter(replies)

    def ask(asked: UserInputRequested) -> object:
        reply = next(given)
        if isinstance(reply, type) and issubclass(reply, BaseException):
            raise reply
        return reply

    return ask


ASK = call("ask_user", question="Who?")
SEND = call("send", to="Ann")
DONE = call("return_done", output="done")


def test_the_moves_of_all_parts_are_one_story() -> None:
    story = seen(answers("Ann", Allow()), ASK, SEND, DONE)  # type: ignore[arg-type]
    assert story.result.output == "done"
    states = [d.source for d in story.decisions] + [story.decisions[-1].target]
    assert all(a.target == b.source for a, b in zip(story.decisions, story.decisions[1:], strict=False))
    assert states.count("suspended") == 2
    assert story.signal is None


def test_nobody_leaves_it_suspended() -> None:
    story = seen(lambda asked: None, ASK)
    assert isinstance(story.result.outcome, UserInputRequested)


def test_a_reply_that_does_not_fit_is_asked_for_again(capsys: pytest.CaptureFixture[str]) -> None:
    story = seen(answers("yes", Deny("no")), SEND, DONE)  # type: ignore[arg-type]
    assert story.result.ok
    assert "reply with Allow()" in capsys.readouterr().err


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, click.Abort])
def test_who_interrupts_a_question_ends_the_run_in_order(interruption: type[BaseException]) -> None:
    story = seen(answers(interruption), ASK)  # type: ignore[arg-type]
    assert isinstance(story.result.outcome, RunCancelled)
    assert story.signal == signal.SIGINT
    assert story.decisions[-1].target == "terminal"


def test_signal_handlers_are_as_they_were_before() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    seen(answers("Ann"), ASK, DONE)  # type: ignore[arg-type]
    assert {number: signal.getsignal(number) for number in before} == before


def test_it_runs_in_another_thread_too() -> None:
    stories: list[RunReport] = []
    thread = threading.Thread(target=lambda: stories.append(seen(answers("Ann"), ASK, DONE)))  # type: ignore[arg-type]
    thread.start()
    thread.join()
    assert stories[0].result.ok
