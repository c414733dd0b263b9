"""Driving a run at the command line from the first transition to the last, across suspensions."""

from __future__ import annotations

import asyncio
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


def drive_script(get_answer: AnswerCallback, *script: object) -> RunReport:
    agent = Agent(ScriptedModel(script), tools=[send], preset="funnel")  # type: ignore[arg-type]
    console = Console(file=io.StringIO(), width=100)
    progress = ProgressDisplay(CliConsole(console, console, interactive=False, live=False), agent.graph, "scripted")
    with asyncio.Runner() as runner:
        return drive(agent, agent.run("go"), progress, get_answer, runner)


def answers(*replies: object) -> Callable[[UserInputRequested], object]:
    remaining = iter(replies)

    def get_answer(request: UserInputRequested) -> object:
        reply = next(remaining)
        if isinstance(reply, type) and issubclass(reply, BaseException):
            raise reply
        return reply

    return get_answer


ASK = call("ask_user", question="Who?")
SEND = call("send", to="Ann")
DONE = call("return_done", output="done")


def test_the_report_covers_the_run_across_suspensions() -> None:
    report = drive_script(answers("Ann", Allow()), ASK, SEND, DONE)  # type: ignore[arg-type]
    assert report.result.output == "done"
    states = [d.source for d in report.decisions] + [report.decisions[-1].target]
    assert all(a.target == b.source for a, b in zip(report.decisions, report.decisions[1:], strict=False))
    assert states.count("suspended") == 2
    assert report.signal is None


def test_without_an_answer_the_run_stays_suspended() -> None:
    report = drive_script(lambda request: None, ASK)
    assert isinstance(report.result.outcome, UserInputRequested)


def test_an_invalid_reply_is_asked_for_again(capsys: pytest.CaptureFixture[str]) -> None:
    report = drive_script(answers("yes", Deny("no")), SEND, DONE)  # type: ignore[arg-type]
    assert report.result.ok
    assert "reply with Allow()" in capsys.readouterr().err


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, click.Abort])
def test_an_interrupt_at_a_question_leaves_a_run_waiting_that_can_be_answered_later(
    interruption: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTFSM_SECRET", "s")
    report = drive_script(answers(interruption), ASK)  # type: ignore[arg-type]
    assert isinstance(report.result.outcome, UserInputRequested)
    assert report.signal == signal.SIGINT


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, click.Abort])
def test_an_interrupt_at_a_question_cancels_a_run_that_nobody_could_answer_later(
    interruption: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENTFSM_SECRET", raising=False)
    report = drive_script(answers(interruption), ASK)  # type: ignore[arg-type]
    assert isinstance(report.result.outcome, RunCancelled)
    assert report.signal == signal.SIGINT
    assert report.decisions[-1].target == "terminal"


def test_signal_handlers_are_restored() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    drive_script(answers("Ann"), ASK, DONE)  # type: ignore[arg-type]
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_run_can_be_driven_in_another_thread() -> None:
    reports: list[RunReport] = []
    thread = threading.Thread(target=lambda: reports.append(drive_script(answers("Ann"), ASK, DONE)))  # type: ignore[arg-type]
    thread.start()
    thread.join()
    assert reports[0].result.ok
