"""A clock that tests advance, for a run and for the timers of its event loop alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

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
