"""The log: silent by default, in order when enabled, and free of text of users, models and tools."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest

from agentfsm import (
    Agent,
    HookContext,
    Host,
    RunResult,
    State,
    TransientProviderError,
    hook,
    observer,
    permissions,
    tool,
)
from agentfsm.runtime.permissions import deny
from agentfsm.testing import FakeClock, ScriptedModel, call

CANARY = "canary-7f3a"


@tool
def look(at: str) -> str:
    """Look."""
    return f"{CANARY} result of {at}"


@tool
def stumble(at: str) -> str:
    """Fail."""
    raise ValueError(f"{CANARY} {at}")


@tool
def forbidden(at: str) -> str:
    """Never."""
    return at


@tool
def lose() -> str:
    """Fail as the system does."""
    raise OSError(5, f"{CANARY} file")


class Memory:
    async def recall(self, prompt: str) -> str:
        raise RuntimeError(f"{CANARY} {prompt}")

    async def remember(self, messages: Any) -> None:
        raise RuntimeError(f"{CANARY} {messages}")


@hook(at=State.PRE_STEP)
def clumsy(seen: HookContext) -> None:
    raise RuntimeError(f"{CANARY} {seen.run.messages}")


@observer
def nosy(event: Any) -> None:
    raise RuntimeError(f"{CANARY} {event}")


def eventful() -> RunResult:
    """A run in which as much as possible goes wrong, each thing with the canary in it."""
    script = [
        TransientProviderError(f"{CANARY} key"),
        [call("look", at=CANARY), call("stumble", at=CANARY)],
        [call("forbidden", at=CANARY), call(f"unknown_{CANARY}", at=CANARY)],
        call("look", bad=CANARY),
        call("lose"),
        f"{CANARY} answer",
    ]
    agent = Agent(
        ScriptedModel(script),
        tools=[look, stumble, forbidden, lose],
        instructions=f"{CANARY} instructions",
        hooks=[clumsy, nosy, permissions(deny("forbidden", reason=CANARY), otherwise="allow")],
        memory=Memory(),
        host=Host(clock=FakeClock(), secret=CANARY.encode()),
    )
    return agent.run_sync(f"{CANARY} prompt", session_id="talk")


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.WARNING])
def test_no_log_line_contains_message_text(caplog: pytest.LogCaptureFixture, level: int) -> None:
    with caplog.at_level(level):
        result = eventful()
    assert result.ok
    assert caplog.records
    for record in caplog.records:
        line = record.getMessage() + str(record.args) + str(record.exc_info)
        assert CANARY not in line


def test_no_message_text_is_in_the_repr_of_an_agent_or_a_host(caplog: pytest.LogCaptureFixture) -> None:
    host = Host(secret=CANARY.encode())
    agent = Agent(ScriptedModel([]), instructions=CANARY, host=host)
    assert CANARY not in repr(agent) + repr(host)


def test_lines_describe_a_run_from_start_to_end(caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent(ScriptedModel([call("look", at="x"), "ok"]), tools=[look])
    with caplog.at_level(logging.DEBUG, "agentfsm"):
        result = agent.run_sync("go")
    run = f"run {result.run_state.run_id}: "
    lines = [(r.levelname, r.getMessage().removeprefix(run)) for r in caplog.records if r.name == "agentfsm"]
    assert lines[0] == ("INFO", "started with scripted")
    assert lines[-1] == ("INFO", "RunCompleted")
    moves = [line.partition(" (")[0] for level, line in lines if "->" in line]
    assert moves == [f"{d.source} -> {d.target}" for d in result.decisions]
    assert ("DEBUG", "tool look started") in lines
    assert ("DEBUG", "tool look: done") in lines


def test_at_info_a_run_has_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "agentfsm"):
        Agent(ScriptedModel([call("look", at="x"), "ok"]), tools=[look]).run_sync("go")
    assert [r.levelname for r in caplog.records if r.name == "agentfsm"] == ["INFO", "INFO"]


def test_logging_does_not_change_a_run(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> RunResult:
        return Agent(ScriptedModel([call("look", at="x"), "ok"]), tools=[look]).run_sync("go")

    alone = run()
    with caplog.at_level(logging.DEBUG):
        logged = run()
    assert [d.transition.id for d in alone.decisions] == [d.transition.id for d in logged.decisions]
    assert alone.messages == logged.messages


def test_by_default_nothing_is_printed_not_even_a_warning() -> None:
    program = """
from agentfsm import Agent, hook, State
from agentfsm.testing import ScriptedModel

@hook(at=State.PRE_STEP)
def clumsy(seen):
    raise RuntimeError("x")

assert Agent(ScriptedModel(["ok"]), hooks=[clumsy]).run_sync("go").ok
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
