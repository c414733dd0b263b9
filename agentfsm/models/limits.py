"""Limits on model calls, for ``Limited``: concurrent calls, and calls and tokens per minute.

::

    limits = ConcurrencyLimit(8), RateLimit(calls=500, tokens=200_000)
    agent = Agent(Limited("openai:gpt-5-mini", *limits))

One limit may be shared by several models, agents, event loops and threads. Calls are admitted first come, first
served, and waiting does not count towards a call's timeout.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from inspect import isawaitable
from time import monotonic
from typing import Protocol

from agentfsm.errors import ConfigurationError
from agentfsm.loop.messages import Usage

ReportUsage = Callable[[Usage], None]
"""Reports the usage of a call to a limit."""


class Limit(Protocol):
    """A limit that a call may have to wait for."""

    def acquire(self) -> AbstractAsyncContextManager[ReportUsage]:
        """Wait until a call is allowed, for the duration of the block; yields a function to report its usage."""
        ...


@dataclass(slots=True, eq=False)
class _Waiter:
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    granted: bool = False


class _Semaphore:
    """A semaphore that is fair, and works across event loops and threads."""

    def __init__(self, count: int) -> None:
        self._available = count
        self._waiters: deque[_Waiter] = deque()
        self._lock = threading.Lock()

    async def acquire(self) -> None:
        """Wait for a permit."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._available:
                self._available -= 1
                return
            waiter = _Waiter(loop, loop.create_future())
            self._waiters.append(waiter)
        try:
            await waiter.future
        except BaseException:
            with self._lock:
                granted = waiter.granted
                if not granted:
                    self._waiters.remove(waiter)
            if granted:  # granted and cancelled at the same time
                self.release()
            raise

    def release(self) -> None:
        """Pass the permit to the call that has waited longest."""
        with self._lock:
            while self._waiters:
                waiter = self._waiters.popleft()
                waiter.granted = True
                try:
                    waiter.loop.call_soon_threadsafe(_wake_waiter, waiter.future)
                except RuntimeError:  # its loop is closed, so the call no longer waits
                    continue
                return
            self._available += 1


def _wake_waiter(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class ConcurrencyLimit:
    """A limit on concurrent calls.

    Args:
        calls: The maximum number of calls at the same time.

    Raises:
        ConfigurationError: It is below 1.
    """

    def __init__(self, calls: int) -> None:
        if calls < 1:
            raise ConfigurationError("a ConcurrencyLimit must allow at least 1 call")
        self._semaphore = _Semaphore(calls)

    @asynccontextmanager
    async def acquire(self) -> AsyncGenerator[ReportUsage, None]:
        """Wait for a permit, and hold it for the duration of the block."""
        await self._semaphore.acquire()
        try:
            yield _ignore_usage
        finally:
            self._semaphore.release()


class RateLimit:
    """A limit on calls and tokens per period, as token buckets that refill at a constant rate.

    A full bucket allows a burst of the whole number. The tokens of a call are known only after it: they are
    subtracted then, the bucket may become negative, and the next call waits until it is not.

    Args:
        calls: Calls per ``per_s`` seconds, or None for no limit; below 1, one call in a longer period.
        tokens: Input and output tokens per ``per_s`` seconds, or None for no limit.
        per_s: The period in seconds, in which an empty bucket refills.
        now: A monotonic clock, in seconds.
        sleep: Waits for a number of seconds.

    Raises:
        ConfigurationError: A number is not above zero.
    """

    def __init__(
        self,
        *,
        calls: float | None = None,
        tokens: float | None = None,
        per_s: float = 60.0,
        now: Callable[[], float] = monotonic,
        sleep: Callable[[float], object] = asyncio.sleep,
    ) -> None:
        for name, value in (("calls", calls), ("tokens", tokens), ("per_s", per_s)):
            if value is not None and not value > 0:
                raise ConfigurationError(f"{name} must be above zero")
        self._calls = None if calls is None else _TokenBucket(max(calls, 1.0), calls / per_s, now)
        self._tokens = None if tokens is None else _TokenBucket(tokens, tokens / per_s, now)
        self._queue = _Semaphore(1)
        self._sleep = sleep

    @asynccontextmanager
    async def acquire(self) -> AsyncGenerator[ReportUsage, None]:
        """Wait until both buckets allow a call; one call waits for the buckets, the others in a queue."""
        await self._queue.acquire()
        try:
            while (wait := self._wait_s()) > 0:
                waited = self._sleep(wait)
                if isawaitable(waited):
                    await waited
            if self._calls is not None:
                self._calls.consume(1)
        finally:
            self._queue.release()
        yield self._consume_tokens

    def _wait_s(self) -> float:
        calls = 0.0 if self._calls is None else self._calls.seconds_until(1)
        return max(calls, 0.0 if self._tokens is None else self._tokens.seconds_until(0))

    def _consume_tokens(self, usage: Usage) -> None:
        if self._tokens is not None:
            self._tokens.consume(usage.total_tokens)


class _TokenBucket:
    def __init__(self, size: float, per_s: float, now: Callable[[], float]) -> None:
        self._size = self._level = size
        self._per_s = per_s
        self._now = now
        self._refilled_at = now()
        self._lock = threading.Lock()

    def seconds_until(self, amount: float) -> float:
        """Seconds until the bucket contains an amount."""
        with self._lock:
            self._refill()
            missing = amount - self._level
            # The sum of many small refills is never exactly the amount.
            return missing / self._per_s if missing > 1e-9 * self._size else 0.0

    def consume(self, amount: float) -> None:
        """Subtract an amount; the level may become negative."""
        with self._lock:
            self._refill()
            self._level -= amount

    def _refill(self) -> None:
        now = self._now()
        self._level = min(self._size, self._level + (now - self._refilled_at) * self._per_s)
        self._refilled_at = now


def _ignore_usage(usage: Usage) -> None:
    """Report nothing: a concurrency limit does not count usage."""
