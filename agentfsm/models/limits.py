"""Shared rate limits: concurrent calls, calls per minute, tokens per minute, and ``Limited``, a model behind them.

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
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from inspect import isawaitable
from time import monotonic
from typing import Protocol

from agentfsm.errors import ConfigurationError
from agentfsm.loop.messages import Reply, Usage
from agentfsm.loop.model import Model, ModelRequest, StreamChunk
from agentfsm.models.wrappers import ModelWrapper, acquire_turn, stream_or_reply

__all__ = ["ConcurrencyLimit", "Limit", "Limited", "RateLimit"]

ReportUsage = Callable[[Usage], None]
"""Tells a limit what a call has used up."""


class Limit(Protocol):
    """What a call may have to wait for."""

    def acquire(self) -> AbstractAsyncContextManager[ReportUsage]:
        """Wait for a turn and hold it; gives a function to tell what the call used up."""
        ...


@dataclass(slots=True, eq=False)
class _Waiter:
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    granted: bool = False


class _Semaphore:
    """So many places, taken in the order in which they were asked for, from any loop of any thread."""

    def __init__(self, count: int) -> None:
        self._available = count
        self._waiters: deque[_Waiter] = deque()
        self._lock = threading.Lock()

    async def acquire(self) -> None:
        """Wait for a place."""
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
            if granted:  # and given up in the same moment
                self.release()
            raise

    def release(self) -> None:
        """Leave a place to whoever has waited longest."""
        with self._lock:
            while self._waiters:
                waiter = self._waiters.popleft()
                waiter.granted = True
                try:
                    waiter.loop.call_soon_threadsafe(_wake_waiter, waiter.future)
                except RuntimeError:  # its loop is closed, and nobody waits there any more
                    continue
                return
            self._available += 1


def _wake_waiter(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class ConcurrencyLimit:
    """So many calls at once, and no more.

    Args:
        calls: How many.

    Raises:
        ConfigurationError: It is below 1.
    """

    def __init__(self, calls: int) -> None:
        if calls < 1:
            raise ConfigurationError("a ConcurrencyLimit lets at least 1 call in")
        self._semaphore = _Semaphore(calls)

    @asynccontextmanager
    async def acquire(self) -> AsyncGenerator[ReportUsage, None]:
        """Wait for a place and hold it."""
        await self._semaphore.acquire()
        try:
            yield _ignore_usage
        finally:
            self._semaphore.release()


class RateLimit:
    """So many calls and tokens in a time, as a bucket that fills up again at an even pace.

    A full bucket lets a burst of the whole number through. What a call will use is known only behind it: its
    tokens are taken then, a bucket may be overdrawn by them, and the next call waits until it is not.

    Args:
        calls: Calls in ``per_s`` seconds, or None for any number; below 1, one call in a longer time.
        tokens: Input and output tokens in ``per_s`` seconds, or None for any number.
        per_s: Seconds in which an empty bucket is full again.
        now: A clock that only goes up, in seconds.
        sleep: How to wait.

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
        """Wait until there is something in each bucket; one waits at the buckets, the others behind it."""
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
        """Seconds until so much is in it."""
        with self._lock:
            self._refill()
            lacking = amount - self._level
            # A bucket that is filled by small sums never comes out at exactly the amount.
            return lacking / self._per_s if lacking > 1e-9 * self._size else 0.0

    def consume(self, amount: float) -> None:
        """Take so much out, and more than there is if need be."""
        with self._lock:
            self._refill()
            self._level -= amount

    def _refill(self) -> None:
        now = self._now()
        self._level = min(self._size, self._level + (now - self._refilled_at) * self._per_s)
        self._refilled_at = now


class Limited(ModelWrapper):
    """A model whose calls wait for their turn at limits that it shares with others.

    Args:
        model: The model or its name.
        limits: The limits, in the order in which a call waits at them; a rate limit before a concurrency
            limit keeps calls from holding a place while they wait.
    """

    def __init__(self, model: str | Model, *limits: Limit) -> None:
        super().__init__(model)
        self._limits = limits

    @asynccontextmanager
    async def admission(self, request: ModelRequest) -> AsyncGenerator[Model, None]:
        """Wait at each limit; gives the model to ask."""
        async with AsyncExitStack() as stack:
            spends = [await stack.enter_async_context(limit.acquire()) for limit in self._limits]
            yield _UsageReportingModel(await stack.enter_async_context(acquire_turn(self.model, request)), spends)

    async def reply(self, request: ModelRequest) -> Reply:
        """Wait for a turn, and answer.

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        async with self.admission(request) as model:
            return await model.reply(request)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply, None]:
        """The same, piece by piece.

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        async with self.admission(request) as model, aclosing(stream_or_reply(model, request)) as told:
            async for piece in told:
                yield piece


class _UsageReportingModel:
    """A model whose limits are told what its calls used up."""

    def __init__(self, model: Model, reporters: list[ReportUsage]) -> None:
        self._model = model
        self._reporters = reporters

    @property
    def name(self) -> str:
        return self._model.name

    async def reply(self, request: ModelRequest) -> Reply:
        return self._report(await self._model.reply(request))

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply, None]:
        async with aclosing(stream_or_reply(self._model, request)) as told:
            async for piece in told:
                yield self._report(piece) if isinstance(piece, Reply) else piece

    def _report(self, reply: Reply) -> Reply:
        for spend in self._reporters:
            spend(reply.usage)
        return reply


def _ignore_usage(usage: Usage) -> None:
    """What a call costs that only takes a place."""
