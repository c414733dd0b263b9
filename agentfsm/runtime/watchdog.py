"""Time limits for a run's awaits, with one timer for the whole run instead of one for each await.

``asyncio.timeout`` arms a timer and takes it back for every await: 3 microseconds, twice a step, which is
a sixth of what a step costs. Here the timer that is armed stays; when it goes off too early, since the
await for which it was armed has long ended, it is armed again for the deadline at hand. In every other
way a limit works as ``asyncio.timeout`` does: the task is cancelled, the cancellation is taken back, and
``TimeoutError`` is raised, while a cancellation that comes from outside stays what it is.

Whoever knows the task says so: Python 3.11 asks the operating system each time which loop and task run.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

__all__ = ["Watchdog"]


class Watchdog:
    """Limits one await at a time: ``with watchdog.limit(seconds): await ...``, never nested.

    Attributes:
        owner: The task that enters, where it is known; else the one that runs then.
        seconds: The limit of the block at hand.

    Raises:
        TimeoutError: From the ``with`` block, when its time is over.
    """

    def __init__(self) -> None:
        self.owner: asyncio.Task[Any] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._deadline = 0.0
        self._expired = False
        self.seconds = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def limit(self, seconds: float) -> Watchdog:
        """The limit for the ``with`` block that follows."""
        self.seconds = seconds
        return self

    @property
    def expired(self) -> bool:
        """Whether the last block ended because its time was over."""
        return self._expired

    def __enter__(self) -> Watchdog:
        task = self.owner or asyncio.current_task()
        if task is None or self._task is not None:
            raise RuntimeError("a watchdog limits one await at a time, inside a task")
        loop = task.get_loop()
        self._task, self._cancelling, self._expired = task, task.cancelling(), False
        self._deadline = deadline = loop.time() + self.seconds
        if self._timer is None or self._loop is not loop or self._timer.when() > deadline:
            self._arm(loop, deadline)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if not self._expired or task is None:
            return
        if task.uncancel() <= self._cancelling and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise TimeoutError from error

    def close(self) -> None:
        """Disarm: the run has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop, deadline: float) -> None:
        self.close()
        self._loop = loop
        self._timer = loop.call_at(deadline, self._ring)

    def _ring(self) -> None:
        self._timer = None
        loop, task = self._loop, self._task
        if task is None or loop is None:
            return
        if loop.time() < self._deadline:
            self._arm(loop, self._deadline)
        else:
            self._expired = True
            task.cancel()
