"""A clock that tests advance, for a run and for the timers of its event loop alike."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentfsm.testing import FakeClock

T = TypeVar("T")


class SteppedClock:
    """The time of day, plus what the test has advanced; a timer that is passed in this way fires at once.

    Real time goes on, so limits in tests should be large, and what makes them pass is ``advance``.
    """

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass at once."""
        self._ahead_s += seconds

    def monotonic(self) -> float:
        """The monotonic time, in seconds."""
        return time.monotonic() + self._ahead_s

    def time(self) -> float:
        """The wall-clock time, in seconds since the epoch."""
        return time.time() + self._ahead_s

    async def sleep(self, seconds: float) -> None:
        """Advance the clock, and let other tasks run."""
        self.advance(seconds)
        await asyncio.sleep(0)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns, on an event loop that goes by this clock."""
        with asyncio.Runner(loop_factory=lambda: _SteppedLoop(self)) as runner:
            return runner.run(main)


class _SteppedLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: SteppedClock) -> None:
        super().__init__()
        self._stepped = clock

    def time(self) -> float:
        return self._stepped.monotonic()


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop on which no time passes but while nothing else is left to do: then that of its next timer is due.

    Attributes:
        clock: A clock that is advanced with it, or None.
    """

    def __init__(self) -> None:
        self.clock: FakeClock | None = None
        self.in_threads = 0
        self._now = 0.0
        super().__init__(_SkippingSelector(self))

    def time(self) -> float:
        return self._now

    def skip(self, seconds: float) -> None:
        """Let so many seconds pass at once."""
        self._now += seconds
        if self.clock is not None:
            self.clock.advance(seconds)

    def run_in_executor(self, *given: Any) -> Any:  # type: ignore[override]
        work, self.in_threads = super().run_in_executor(*given), self.in_threads + 1
        work.add_done_callback(self._end_work)
        return work

    def _end_work(self, _: Any) -> None:
        self.in_threads -= 1


class _SkippingSelector(selectors.DefaultSelector):
    def __init__(self, loop: SkippingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if not timeout or self._loop.in_threads:
            return super().select(timeout)
        if not (events := super().select(0)):
            self._loop.skip(timeout)
        return events
