"""The watchdog: code that blocks an event loop is named, and nothing else is."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfsm import Agent, HookContext, Host, RunResult, RunWarning, hook, observer
from agentfsm.loop.events import Ending, Event
from agentfsm.runtime import watchdog
from agentfsm.runtime.watchdog import WATCHDOG, Watchdog, blocking_code
from agentfsm.testing import ScriptedModel

HERE = str(Path(__file__).resolve())

LIMIT_S = 0.3
"""More than a busy machine keeps a thread waiting that does not block."""


class UntilNamed(logging.Handler):
    """Lets blocked code go on when the watchdog has logged a warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.named = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "blocked" in record.getMessage():
            self.lines.append(record.getMessage())
            self.named.set()


@pytest.fixture
def log() -> Iterator[UntilNamed]:
    handler = UntilNamed()
    logging.getLogger("agentfsm").addHandler(handler)
    yield handler
    logging.getLogger("agentfsm").removeHandler(handler)


def run_blocked(block: Callable[[], Any], **host: Any) -> tuple[RunResult, list[Event]]:
    events: list[Event] = []

    @hook("call_llm")
    def blocking_hook(context: HookContext) -> None:
        block()

    hooks = [blocking_hook, observer(events.append)]
    agent = Agent(ScriptedModel(["done"]), hooks=hooks, host=Host(**{"watchdog_s": LIMIT_S, **host}))

    async def scene() -> RunResult:
        return await agent.run("go", run_id="r1")

    return asyncio.run(scene()), events


def test_a_hook_that_blocks_the_thread_is_named_in_the_log_and_in_a_warning(log: UntilNamed):
    result, events = run_blocked(lambda: log.named.wait(30))
    assert log.named.is_set()
    (line,) = log.lines
    assert re.match(r"run r1: the event loop has been blocked for \d+\.\d s", line)
    assert f"by {HERE}:" in line
    assert "test_a_hook_that_blocks_the_thread_is_named_in_the_log_and_in_a_warning.<locals>.<lambda>" in line
    (warning,) = [e for e in events if isinstance(e, RunWarning)]
    assert re.search(r"the event loop was blocked for \d+\.\d s", warning.text)
    assert f"by {HERE}:" in warning.text
    assert isinstance(events[-1], Ending)
    assert result.ok


def test_the_innermost_code_of_the_users_is_the_one_that_is_named(log: UntilNamed):
    def inner() -> None:
        log.named.wait(30)

    def outer() -> None:
        inner()

    run_blocked(outer)
    assert "<locals>.inner" in log.lines[0]


def test_a_block_is_reported_once_however_long_it_lasts(log: UntilNamed):
    def block() -> None:
        log.named.wait(30)
        rounds = threading.Event()
        original = WATCHDOG.check
        seen: list[int] = []

        def counted() -> None:
            original()
            seen.append(1)
            if len(seen) == 5:
                rounds.set()

        WATCHDOG.check = counted  # type: ignore[method-assign]
        try:
            rounds.wait(30)
        finally:
            WATCHDOG.check = original  # type: ignore[method-assign]

    run_blocked(block)
    assert len(log.lines) == 1


def test_without_a_limit_nothing_is_watched():
    watched: list[bool] = []

    def look() -> None:
        watched.append(asyncio.get_running_loop() in WATCHDOG._loops)

    run_blocked(look, watchdog_s=None)
    run_blocked(look)
    assert watched == [False, True]


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_a_limit_is_greater_than_zero(limit: float):
    with pytest.raises(ValueError, match="watchdog_s must be greater than 0"):
        Host(watchdog_s=limit)


def test_after_a_run_no_event_loop_is_watched():
    loops: list[asyncio.AbstractEventLoop] = []
    run_blocked(lambda: loops.append(asyncio.get_running_loop()))
    assert loops[0] not in WATCHDOG._loops


def test_a_run_that_is_iterated_is_watched_while_it_advances(log: UntilNamed):
    @hook("call_llm")
    def blocking_hook(context: HookContext) -> None:
        log.named.wait(30)

    agent = Agent(ScriptedModel(["done"]), hooks=[blocking_hook], host=Host(watchdog_s=LIMIT_S))

    async def scene() -> list[Event]:
        return [event async for event in agent.run("go", run_id="r1")]

    events = asyncio.run(scene())
    assert len(log.lines) == 1
    assert [type(e) for e in events].count(RunWarning) == 1


# -- by an injected clock ------------------------------------------------------------------------------


class Loop:
    """An event loop that calls back when it is told to."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, callback: Callable[[], None], *args: Any) -> None:
        self.callbacks.append(callback)

    def be_free(self) -> None:
        while self.callbacks:
            self.callbacks.pop()()


class Watched:
    run_id = "r1"

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.emitted: list[str] = []

    def note_blocked(self, text: str) -> None:
        self.noted.append(text)

    def emit_blocked(self) -> None:
        self.emitted, self.noted = self.noted, []


class Scene:
    """A watchdog with clocks of its own, which watches one loop with a limit of 1 s: a round every 0.5 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: str | None = "shop.py:1 in f") -> None:
        self.time = self.cpu = 100.0
        self.loop, self.run = Loop(), Watched()
        self.watchdog = Watchdog(lambda: self.time, lambda: self.cpu)
        monkeypatch.setattr(Watchdog, "_start", lambda self: None)
        monkeypatch.setattr(watchdog, "blocking_code", lambda frame: code)
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: self.loop)
        monkeypatch.setattr(asyncio, "current_task", lambda loop=None: None)
        self.end = self.watchdog.watch(self.run, 1.0)

    def round(self, seconds: float = 0.5, cpu: float = 0.0, *, free: bool = False) -> list[str]:
        """One round after some seconds; returns what has been reported so far."""
        self.time += seconds
        self.cpu += cpu
        if free:
            self.loop.be_free()
        self.watchdog.check()
        return self.run.noted + self.run.emitted


def test_a_loop_that_answers_is_never_reported(monkeypatch: pytest.MonkeyPatch):
    scene = Scene(monkeypatch)
    for _ in range(20):
        assert scene.round(free=True) == []


def test_a_loop_that_does_not_answer_within_the_limit_is_reported_once(monkeypatch: pytest.MonkeyPatch):
    scene = Scene(monkeypatch)
    assert [len(scene.round()) for _ in range(6)] == [0, 0, 1, 1, 1, 1]
    assert scene.run.noted == ["the event loop was blocked for 1.0 s or longer, by shop.py:1 in f"]
    scene.loop.be_free()
    assert (len(scene.run.noted), len(scene.run.emitted)) == (0, 1)
    assert [len(scene.round()) for _ in range(3)] == [1, 1, 2]  # a new block


def test_a_suspended_process_is_no_blocked_loop(monkeypatch: pytest.MonkeyPatch):
    scene = Scene(monkeypatch)
    scene.round()
    assert scene.round(3600) == []
    assert scene.round(free=True) == []


def test_after_a_suspension_a_block_still_counts(monkeypatch: pytest.MonkeyPatch):
    scene = Scene(monkeypatch)
    scene.round()
    scene.round(3600)
    assert [len(scene.round()) for _ in range(2)][-1] == 1


def test_code_that_lets_no_other_thread_run_is_reported_afterwards(monkeypatch: pytest.MonkeyPatch):
    scene = Scene(monkeypatch)
    scene.round(free=True)
    scene.loop.be_free()
    (text,) = scene.round(5, cpu=5)
    assert "blocked for 5.0 s" in text


def test_a_loop_that_executes_no_code_of_the_users_is_not_reported(monkeypatch: pytest.MonkeyPatch):
    scene = Scene(monkeypatch, code=None)
    assert [scene.round() for _ in range(6)][-1] == []


def test_a_closed_loop_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    scene = Scene(monkeypatch)

    def closed(callback: Any) -> None:
        raise RuntimeError("Event loop is closed")

    scene.loop.call_soon_threadsafe = closed  # type: ignore[method-assign,assignment]
    assert scene.round() == []
    assert scene.watchdog._loops == {}


def test_a_loop_without_runs_is_not_asked(monkeypatch: pytest.MonkeyPatch):
    scene = Scene(monkeypatch)
    scene.end()
    assert scene.round() == []
    assert scene.loop.callbacks == []


def test_a_shorter_limit_is_asked_for_more_often(monkeypatch: pytest.MonkeyPatch):
    scene = Scene(monkeypatch)
    assert scene.watchdog.interval_s == 0.5
    scene.watchdog.watch(Watched(), 0.1)
    assert scene.watchdog.interval_s == pytest.approx(0.05)


# -- whose code it is ----------------------------------------------------------------------------------


def test_code_outside_of_an_event_loop_is_nobodys():
    assert blocking_code(sys._getframe()) is None
    assert blocking_code(None) is None


def test_a_callback_of_the_users_is_named():
    async def scene() -> str | None:
        found: list[str | None] = []
        asyncio.get_running_loop().call_soon(lambda: found.append(blocking_code(sys._getframe())))
        await asyncio.sleep(0)
        return found[0]

    assert str(asyncio.run(scene())).startswith(f"{HERE}:")


def test_the_thread_ends_after_the_last_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watchdog, "LINGER_S", -1.0)
    ours = Watchdog()

    async def scene() -> threading.Thread:
        end = ours.watch(Watched(), 0.02)
        thread = ours._thread
        assert thread is not None
        assert thread.daemon
        end()
        return thread

    thread = asyncio.run(scene())
    thread.join(30)
    assert not thread.is_alive()
    assert ours._thread is None


def test_a_forked_process_begins_anew():
    ours = Watchdog()
    ours._thread = threading.current_thread()
    ours.forget()
    assert ours._thread is None
