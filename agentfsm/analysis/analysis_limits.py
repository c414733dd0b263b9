"""Limits on an analysis: how many configurations it may visit, and how long it may take.

The state space of a graph can be exponential in its size. Every search of an analysis counts what it visits in one
``Meter``; a search that reaches a limit is given up, and its property is left open.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from agentfsm.errors import ConfigurationError

READ_CLOCK_EVERY = 512
"""The clock is read once for so many configurations and steps."""


class AnalysisLimitError(Exception):
    """A search reached a limit. Internal to the analysis: callers see a property that is open."""


@dataclass(frozen=True, slots=True)
class AnalysisLimits:
    """How much an analysis may do before it leaves a property open.

    Attributes:
        max_configurations: The most configurations (and moves between them) that one search may keep. A million of
            them take about 400 MB.
        max_seconds: The most seconds that the analysis may take in all.
        clock: What tells the time, in seconds; by default processor time, so that a busy machine decides as much as an
            idle one.

    Raises:
        ConfigurationError: A limit is not greater than zero.
    """

    max_configurations: int = 600_000
    max_seconds: float = 15.0
    clock: Callable[[], float] = time.thread_time

    def __post_init__(self) -> None:
        for name in ("max_configurations", "max_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be greater than 0, not {getattr(self, name)}")


class Meter:
    """Counts what the searches of one analysis visit.

    Attributes:
        visited: How many configurations and moves were visited so far.
    """

    def __init__(self, limits: AnalysisLimits | None = None) -> None:
        self.visited = 0
        self._limits = limits
        self._end = self._deadline = math.inf if limits is None else limits.clock() + limits.max_seconds
        self._cap = math.inf if limits is None else limits.max_configurations
        self._next_check: float = 0 if limits else math.inf

    def count(self, amount: int = 1) -> None:
        """Count what was visited.

        Raises:
            AnalysisLimitError: A limit is reached.
        """
        self.visited += amount
        if self.visited >= self._next_check:
            self._check()

    def work(self, amount: int = 1) -> None:
        """Count steps that visit nothing new, such as a pass over what was visited: only time limits them.

        Raises:
            AnalysisLimitError: The time is up.
        """
        self._next_check -= amount
        if self.visited >= self._next_check:
            self._check()

    def _check(self) -> None:
        limits = self._limits
        if limits is None:
            return
        self._next_check = min(self.visited + READ_CLOCK_EVERY, self._cap + 1)
        if self.visited > self._cap:
            raise AnalysisLimitError(
                f"explored {limits.max_configurations:,} configurations until max_configurations was reached"
            )
        if limits.clock() > self._deadline:
            raise AnalysisLimitError(f"explored {self.visited:,} configurations until max_seconds was reached")

    @contextmanager
    def search(self, share: float = 1.0) -> Generator[None]:
        """One search: it may visit ``max_configurations``, and take a share of the time that is left."""
        limits = self._limits
        if limits is not None:
            now = limits.clock()
            self._deadline = now + share * max(0.0, self._end - now)
            self._cap = self.visited + limits.max_configurations
            self._next_check = self.visited
        yield
        self._deadline = self._end
