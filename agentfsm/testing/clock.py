"""A clock that tests move by hand."""

from __future__ import annotations

import asyncio

__all__ = ["FakeClock"]


class FakeClock:
    """A clock that stands still until it is told to move; sleeping moves it at once.

    Args:
        start: Where both clocks begin, in seconds.

    Attributes:
        slept: Every sleep that was asked for, in seconds.
    """

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._monotonic = start
        self._time = start
        self.slept: list[float] = []

    def monotonic(self) -> float:
        """Seconds that only go up."""
        return self._monotonic

    def time(self) -> float:
        """Seconds since the epoch."""
        return self._time

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._monotonic += seconds
        self._time += seconds

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an administrator might; durations do not notice."""
        self._time += seconds

    async def sleep(self, seconds: float) -> None:
        """Let time pass without waiting; other tasks get their turn."""
        self.slept.append(seconds)
        self.advance(seconds)
        await asyncio.sleep(0)
