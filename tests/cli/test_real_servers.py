"""A run with a tool, and provider failures, on real wires against a third-party server.

Each case runs twice, from the command line and from the library; the server requires a key, as providers do.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentfsm import Agent, Handoff, Host, RunCompleted
from agentfsm.loop.events import Event, RecoveryStarted
from agentfsm.models import resolve
from agentfsm.testing import FakeClock
from tests.cli.conftest import Cli
from tests.helpers.npm_servers import AiMock, aimock_server  # noqa: F401  # the import makes the fixture known

TOOLS = '''
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return f"{city}: sunny, 21 degrees"
'''
PROMPT = "What is the weather in Paris?"
ANSWER = "It is sunny in Paris, at 21 degrees."
CALL = {"toolCalls": [{"id": "call_1", "name": "weather", "arguments": {"city": "Paris"}}]}
FIRST_TURN: dict[str, Any] = {"match": {"turnIndex": 0}, "response": CALL}
SECOND_TURN: dict[str, Any] = {"match": {"turnIndex": 1}, "response": {"content": ANSWER}}

Outcome = dict[str, Any]
Runner = Callable[..., Outcome]
"""Runs the prompt with the tool and gives ``ok``, ``output``, ``guards``, ``waits`` and ``told``."""


def failing(status: int, retry_after: int | None = None, *, first: int = 1, **match: Any) -> list[dict[str, Any]]:
    """Fixtures that fail the first matching requests, each once."""
    wait = {} if retry_after is None else {"retryAfter": retry_after}
    response = {"error": {"message": "not now", "type": "some_error"}, "status": status, **wait}
    return [{"match": {**match, "sequenceIndex": i}, "response": response} for i in range(first)]


@pytest.fixture(params=["openai", "anthropic"])
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["the command line", "the library"])
def run(request: pytest.FixtureRequest, wire: str, aimock: AiMock, cli: Cli, tmp_path: Path) -> Runner:
    """The command line and the library, on one wire."""
    name = {"openai": "openai:gpt-5-mini", "anthropic": "anthropic:claude-sonnet-4-6"}[wire]
    url = aimock.openai_url if wire == "openai" else aimock.url

    def on_the_command_line(key: str = aimock.key) -> Outcome:
        (tmp_path / "tools.py").write_text(TOOLS)
        words = ["run", PROMPT, "-m", name, "--base-url", url, "--api-key-env", "MY_KEY", "-t", "tools.py", "--json"]
        result = cli(*words, MY_KEY=key)
        assert key not in result.output
        data = json.loads(result.stdout)
        assert result.exit_code == (0 if data["ok"] else 1)
        waiting = [line for line in result.stderr.splitlines() if re.match("recover +backing off", line)]
        waits = [float(line.split()[-3]) for line in waiting]
        return {
            "ok": data["ok"],
            "output": data["output"],
            "guards": [move["guard"] for move in data["transitions"]],
            "waits": waits,
            "told": json.dumps(data["details"]),
        }

    def in_the_library(key: str = aimock.key) -> Outcome:
        space: dict[str, Any] = {}
        exec(TOOLS, space)
        clock = FakeClock()
        agent = Agent(resolve(name, base_url=url, api_key=key), tools=[space["weather"]], host=Host(clock=clock))
        events: list[Event] = []

        async def watch() -> None:
            async for event in agent.run(PROMPT):
                events.append(event)

        asyncio.run(watch())
        end = events[-1]
        assert isinstance(end, RunCompleted | Handoff)
        failures = [e for e in events if isinstance(e, RecoveryStarted)]
        assert [e.backoff_s for e in failures] == clock.slept
        return {
            "ok": isinstance(end, RunCompleted),
            "output": end.output if isinstance(end, RunCompleted) else None,
            "guards": [e.decision.guard for e in events if hasattr(e, "decision")],
            "waits": clock.slept,
            "told": repr(end),
        }

    return on_the_command_line if request.param == "the command line" else in_the_library


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line uses the system clock; here a backoff takes no time."""

    async def sleep(self: object, seconds: float) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr("agentfsm.runtime.host.SystemClock.sleep", sleep)


def test_a_tool_call_and_its_result_reach_the_answer(run: Runner, wire: str, aimock: AiMock) -> None:
    aimock.script(FIRST_TURN, SECOND_TURN)
    told = run()
    assert (told["ok"], told["output"], told["waits"]) == (True, ANSWER, [])
    assert told["guards"].count("tool_calls") == 1
    first, second = aimock.requests()
    assert [m["role"] for m in first["messages"]] == ["user"]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["weather"]
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][-1]["content"] == "Paris: sunny, 21 degrees"


def test_a_429_is_retried_after_its_retry_after(run: Runner, wire: str, aimock: AiMock) -> None:
    aimock.script(*failing(429, 7, turnIndex=0), FIRST_TURN, SECOND_TURN)
    told = run()
    assert (told["ok"], told["output"], told["waits"]) == (True, ANSWER, [7.0])
    assert told["guards"].count("transient_provider") == 1


def test_a_retry_after_beyond_the_runs_time_ends_it_at_once_with_that_cause(
    run: Runner, wire: str, aimock: AiMock
) -> None:
    aimock.script(*failing(429, 86_400, turnIndex=0), FIRST_TURN, SECOND_TURN)
    told = run()
    assert (told["ok"], told["output"], told["waits"]) == (False, None, [])
    assert "not now" in told["told"]
    assert len(aimock.requests()) == 1


def test_a_500_is_retried_with_growing_backoff(run: Runner, wire: str, aimock: AiMock) -> None:
    aimock.script(*failing(500, first=2, turnIndex=1), FIRST_TURN, SECOND_TURN)
    told = run()
    assert (told["ok"], told["output"], told["waits"]) == (True, ANSWER, [2.0, 4.0])


def test_a_persistent_500_is_handed_off_after_three_retries(run: Runner, wire: str, aimock: AiMock) -> None:
    aimock.script({"match": {}, "response": {"error": {"message": "broken", "type": "e"}, "status": 500}})
    told = run()
    assert (told["ok"], told["output"], told["waits"]) == (False, None, [2.0, 4.0, 8.0])
    assert len(aimock.requests()) == 4
    assert told["guards"][-1] == "handoff"


def test_a_401_is_handed_off_at_once(run: Runner, wire: str, aimock: AiMock) -> None:
    aimock.script(FIRST_TURN, SECOND_TURN)
    told = run(key="sk-wrong-0123456789")
    assert (told["ok"], told["waits"]) == (False, [])
    assert told["guards"][-2:] == ["provider_error", "handoff"]
    assert "key" in told["told"]
    assert "sk-wrong" not in told["told"]


WIRES = ["openai:gpt-5-mini", "openai-responses:gpt-5-mini", "anthropic:claude-sonnet-4-6", "ollama:llama3.2"]


@pytest.mark.parametrize("output", ["--json", "--quiet"])
@pytest.mark.parametrize("mode", [(), ("--no-stream",)], ids=["streamed", "whole"])
@pytest.mark.parametrize("name", WIRES)
def test_the_command_line_runs_a_tool_in_two_turns_on_every_wire(
    name: str, output: str, mode: tuple[str, ...], aimock: AiMock, cli: Cli, tmp_path: Path
) -> None:
    aimock.script(FIRST_TURN, SECOND_TURN)
    (tmp_path / "tools.py").write_text(TOOLS)
    url = aimock.openai_url if name.startswith("openai") else aimock.url
    words = ["run", PROMPT, "-m", name, "--base-url", url, "--api-key-env", "MY_KEY", "-t", "tools.py", output]
    result = cli(*words, *mode, MY_KEY=aimock.key)
    assert result.exit_code == 0, result.output
    assert (json.loads(result.stdout)["output"] if output == "--json" else result.stdout.strip()) == ANSWER
    first, second = aimock.requests()
    assert [tool["function"]["name"] for tool in first["tools"]] == ["weather"]
    assert "Paris: sunny, 21 degrees" in json.dumps(second["messages"])
    assert [bool(each.get("stream")) for each in (first, second)] == [not mode] * 2
