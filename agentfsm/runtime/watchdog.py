"""Watches event loops while runs are active, and names user code that blocks one.

One daemon thread watches every event loop of the process that advances a run. Twice in a limit it asks each to call it
back. If a loop has not called back within the limit, the thread finds the code that its thread is executing, and logs
it; when the loop is free again, the run emits a ``RunWarning``. Nothing happens per move, and a few seconds after the
last run there is no thread.

Time in which the process itself did not run (it was suspended, or starved) does not count: the thread measures how late
it was woken itself, and whether the process used the processor meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from agentfsm.runtime.hooks import logger

if TYPE_CHECKING:
    from agentfsm.runtime.context import Context

LINGER_S = 5.0
"""Seconds for which the thread outlives the last run, so that a program of many short runs does not start many."""

MAX_INTERVAL_S = 0.5
"""Seconds between two rounds, at most: a limit that is new takes effect within this time."""

_STANDARD_LIBRARY = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(f"{root}{name}{os.sep}" for root in _STANDARD_LIBRARY for name in ("site-packages", "dist-packages"))
_RUNTIME = Path(__file__).parent
_PACKAGE = f"{_RUNTIME.parent}{os.sep}"
_CALLERS = frozenset({asyncio.events.__file__, str(_RUNTIME / "driver.py")})
"""Where the code that user code is called from ends: an event loop's callback, or our driver."""


def blocking_code(frame: FrameType | None) -> str | None:
    """The user code that a thread is executing, as ``file:line in function``.

    It is the innermost frame that is neither agentfsm's nor the standard library's. What a module executes while it is
    imported counts as the code that imports it.

    Returns:
        None if the event loop waits, or executes only code of agentfsm and the standard library.
    """
    found: str | None = None
    while frame is not None:
        code = frame.f_code
        if code.co_filename in _CALLERS:  # what is further out only waits for it
            return found
        if code.co_filename.startswith("<frozen importlib"):
            found = None
        elif found is None and _is_user_code(code.co_filename):
            found = f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
        frame = frame.f_back
    return None


def _is_user_code(file: str) -> bool:
    if file.startswith((_PACKAGE, "<frozen")):
        return False
    return not file.startswith(_STANDARD_LIBRARY) or file.startswith(_INSTALLED)


class _WatchedLoop:
    """One event loop with active runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.thread_id = threading.get_ident()
        self.runs: dict[int, tuple[Context, object]] = {}
        self.limits: Counter[float] = Counter()  # how many runs have each: thousands of runs have few limits
        self.asked_at: float | None = None
        self.reported = False

    @property
    def limit_s(self) -> float:
        """Seconds for which it may be blocked."""
        return min(list(self.limits), default=MAX_INTERVAL_S)

    def add(self, run: Context, limit_s: float) -> None:
        """Watch it for a run that advances in the current task."""
        self.runs[id(run)] = (run, asyncio.current_task())
        self.limits[limit_s] += 1

    def remove(self, run: Context, limit_s: float) -> None:
        """Watch it no longer for a run."""
        self.runs.pop(id(run), None)
        self.limits[limit_s] -= 1
        if not self.limits[limit_s]:
            del self.limits[limit_s]

    def answer(self) -> None:
        """Called by the event loop itself: it is free."""
        self.asked_at = None
        if self.reported:
            self.reported = False
            for run, _ in list(self.runs.values()):
                run.emit_blocked()

    def current_runs(self) -> list[Context]:
        """The run whose code the loop executes, if that is known; else all."""
        runs = list(self.runs.values())
        task = asyncio.current_task(self.loop)
        return [run for run, owner in runs if owner is task][-1:] or [run for run, _ in runs]


class Watchdog:
    """Watches the event loops in which runs advance.

    Args:
        now: Seconds that never go back.
        cpu_now: Processor seconds that the process has used.
    """

    def __init__(
        self, now: Callable[[], float] = time.monotonic, cpu_now: Callable[[], float] = time.process_time
    ) -> None:
        self._now, self._cpu_now = now, cpu_now
        self._loops: dict[asyncio.AbstractEventLoop, _WatchedLoop] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._woken: tuple[float, float] | None = None

    def watch(self, run: Context, limit_s: float | None) -> Callable[[], None]:
        """Watch the running event loop for a run that advances in the current task.

        Args:
            run: The run.
            limit_s: Seconds for which the loop may be blocked; None to watch nothing.

        Returns:
            Ends it.
        """
        if limit_s is None:
            return _do_nothing
        loop = asyncio.get_running_loop()
        watched = self._loops.get(loop)
        if watched is None:
            watched = self._loops[loop] = _WatchedLoop(loop)
        watched.add(run, limit_s)
        if self._thread is None:
            self._start()

        def end() -> None:
            watched.remove(run, limit_s)
            if not watched.runs:
                self._loops.pop(loop, None)

        return end

    def forget(self) -> None:
        """Start over, in a forked process."""
        self._loops, self._lock, self._thread, self._woken = {}, threading.Lock(), None, None

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_thread, name="agentfsm-watchdog", daemon=True)
                self._thread.start()

    def _run_thread(self) -> None:
        wait = threading.Event().wait
        idle_since = self._now()
        self._woken = None
        while True:
            wait(self.interval_s)
            self.check()
            if self._loops:
                idle_since = self._now()
            elif self._now() - idle_since > LINGER_S:
                with self._lock:
                    self._thread = None
                    if not self._loops:  # otherwise a run has come meanwhile, and has seen that there is a thread
                        return
                    self._thread = threading.current_thread()

    @property
    def interval_s(self) -> float:
        """Seconds until the next round."""
        limits = [watched.limit_s for watched in list(self._loops.values())]
        return min([MAX_INTERVAL_S, *(limit / 2 for limit in limits)])

    def check(self) -> None:
        """One round: report loops that are blocked, and ask the others to call back."""
        now, cpu = self._now(), self._cpu_now()
        woken_at, woken_cpu = self._woken or (now, cpu)
        late_s = now - woken_at - self.interval_s
        if late_s < self.interval_s:  # as late as any thread may be
            late_s = 0.0
        was_busy = cpu - woken_cpu > late_s / 2  # else the process was suspended
        for watched in list(self._loops.values()):
            if watched.asked_at is None and was_busy and late_s >= watched.limit_s:  # even this thread could not run
                watched.asked_at = woken_at
            if watched.asked_at is None:
                self._ask(watched, now)
                continue
            if not was_busy:
                watched.asked_at += late_s
            blocked_s = now - watched.asked_at
            if not watched.reported and blocked_s >= watched.limit_s:
                self._report(watched, blocked_s)
        self._woken = (now, cpu)

    def _ask(self, watched: _WatchedLoop, now: float) -> None:
        watched.asked_at = now
        try:
            watched.loop.call_soon_threadsafe(watched.answer)
        except RuntimeError:  # the loop is closed
            self._loops.pop(watched.loop, None)

    def _report(self, watched: _WatchedLoop, blocked_s: float) -> None:
        code = blocking_code(_frame_of(watched.thread_id))
        if code is None:
            return
        watched.reported = True
        runs = watched.current_runs()
        for run in runs:
            run.note_blocked(f"the event loop was blocked for {blocked_s:.1f} s or longer, by {code}")
        names = ", ".join(run.run_id for run in runs)
        logger.warning("run %s: the event loop has been blocked for %.1f s, by %s", names, blocked_s, code)


def _do_nothing() -> None:
    """Nothing is watched."""


def _frame_of(thread_id: int) -> FrameType | None:
    return sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage]  # documented all the same


WATCHDOG = Watchdog()
"""The process's watchdog: event loops belong to a process, not to an agent."""

if hasattr(os, "register_at_fork"):  # a forked process has neither the thread nor the event loops
    os.register_at_fork(after_in_child=WATCHDOG.forget)
