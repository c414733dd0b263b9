"""Events: every one in order, observers that cannot harm a run, and nothing built if nobody listens."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from agentfsm import ConfigurationError, Event, observer, tool
from agentfsm.loop.events import Ending, RunCompleted, RunStarted, RunWarning
from agentfsm.runtime.hooks import Observer
from agentfsm.testing import FakeClock, call
from tests.benchmarks.loop_benchmark import memory_per_waiting_run
from tests.helpers.scenarios import check_result, collect_events, run_async, run_script, scripted_agent


@tool
def look(where: str = "") -> str:
    """Look somewhere."""
    return f"seen {where}"


SCRIPT = (call("look", where="here"), "done")


def test_an_observer_sees_what_a_consumer_sees():
    seen: list[Event] = []
    agent, _ = scripted_agent(*SCRIPT, tools=[look], hooks=[observer(seen.append)])

    async def scene() -> list[Event]:
        return await collect_events(agent.run("go"))

    assert run_async(scene) == seen


def test_events_are_numbered_from_one_and_timed_by_the_hosts_clock():
    clock, seen = FakeClock(500.0), []
    run_script(*SCRIPT, tools=[look], clock=clock, hooks=[observer(seen.append)])
    assert [e.seq for e in seen] == list(range(1, len(seen) + 1))
    assert {e.time for e in seen} == {500.0}
    assert isinstance(seen[0], RunStarted)
    assert seen[0].prompt == "go"


def test_the_last_event_is_the_only_one_that_ends_the_run():
    seen: list[Event] = []
    run_script(*SCRIPT, tools=[look], hooks=[observer(seen.append)])
    assert [e for e in seen if isinstance(e, Ending)] == [seen[-1]]


def raising(event: Event) -> None:
    raise ValueError("blind")


def test_an_observer_that_raises_is_a_warning_and_the_run_continues(caplog):
    seen: list[Event] = []
    agent, _ = scripted_agent(*SCRIPT, tools=[look], hooks=[observer(raising), observer(seen.append)])

    with caplog.at_level(logging.WARNING, "agentfsm"):
        result = agent.run_sync("go")
    assert check_result(result).ok
    warnings = [e for e in seen if isinstance(e, RunWarning)]
    others = [e for e in seen if not isinstance(e, RunWarning)]
    failures = [r for r in caplog.records if r.getMessage().endswith("observer raising raised ValueError")]
    assert len(failures) == len(seen)
    assert {w.text for w in warnings} == {"observer raising raised ValueError"}
    assert len(warnings) == len(others) - 1  # none behind the last event
    assert isinstance(seen[-1], RunCompleted)


def test_an_observer_that_raises_a_cancellation_does_not_cancel_the_run():
    def looking_at_a_task_of_its_own(event: Event) -> None:
        raise asyncio.CancelledError

    result = run_script(*SCRIPT, tools=[look], hooks=[observer(looking_at_a_task_of_its_own)])
    assert result.output == "done"


def test_two_observers_that_raise_are_both_named():
    def also_raising(event: Event) -> None:
        raise KeyError

    seen: list[str] = []
    watch = observer(lambda e: seen.append(e.text) if isinstance(e, RunWarning) else None)
    run_script("done", hooks=[observer(raising), observer(also_raising), watch])
    assert {"observer raising raised ValueError", "observer also_raising raised KeyError"} == set(seen)


def test_an_observer_is_a_plain_function():
    async def later(event: Event) -> None: ...

    class Later:
        async def __call__(self, event: Event) -> None: ...

    for function in (later, Later()):
        with pytest.raises(ConfigurationError, match="plain"):
            observer(function)


def test_an_observer_says_what_it_is():
    assert observer(raising) == Observer(raising)
    assert observer(raising).name == "raising"


def test_without_listeners_the_last_event_is_still_built():
    result = run_script(*SCRIPT, tools=[look])
    assert isinstance(result.outcome, RunCompleted)
    assert result.outcome.seq == 1


def test_a_late_consumer_sees_the_rest():
    agent, _ = scripted_agent(*SCRIPT, tools=[look])

    async def scene() -> list[Any]:
        run = agent.run("go")
        await run
        return [e async for e in run]

    assert run_async(scene) == []


def test_a_warning_is_logged_without_listeners(caplog):
    class Forgetful:
        async def recall(self, prompt: str) -> str:
            raise OSError("no disk")

        async def remember(self, messages: Any) -> None: ...

    with caplog.at_level(logging.WARNING, "agentfsm"):
        result = run_script("done", memory=Forgetful())
    assert result.ok
    assert f"run {result.run_state.run_id}: memory is unavailable (OSError)" in caplog.text
    assert "no disk" not in caplog.text  # a log holds no words that came from elsewhere


@pytest.mark.slow
def test_a_run_that_waits_takes_less_than_12_kb(monkeypatch: pytest.MonkeyPatch) -> None:
    """``make bench`` measures it with 10,000 runs."""
    monkeypatch.setenv("AGENTFSM_MONITOR", "off")
    assert asyncio.run(memory_per_waiting_run(300)) < 12_000
