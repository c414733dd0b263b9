"""``Timeout``: a time limit for whatever a run awaits, which holds even against code that refuses to be cancelled.

It differs from ``asyncio.timeout`` in two ways. One timer is scheduled for the whole run: ``asyncio.timeout`` schedules
and cancels one per await, which costs 3 microseconds, twice a step. And what is awaited is driven by hand, so that a
coroutine that swallows its ``CancelledError`` can be abandoned in the end, without a task for each call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Generator
from contextlib import suppress
from functools import partial
from types import CoroutineType, coroutine
from typing import Any, TypeVar, cast

DEFAULT_GRACE_S = 2.0

CLOSE_ATTEMPTS = 100
"""How many awaits of an abandoned coroutine's cleanup are broken off before it is left as it is."""

CANCEL_AGAIN_S = 1.0
"""Seconds after which a task that still runs is cancelled again."""

T = TypeVar("T")

logger = logging.getLogger("agentfsm")


class CancelRequests:
    """The requests to cancel a task of a run that count: those of whoever waits for the task, and the run's own.

    The task's own count says less, since user code changes it. A ``TaskGroup`` whose tasks fail cancels the task that
    it is in, and before Python 3.13 it does not always take that back; nor does one that was abandoned.
    """

    __slots__ = ("_before", "_waiting", "own")

    def __init__(self, waiting: asyncio.Task[Any] | None = None) -> None:
        self._waiting = waiting
        self._before = 0 if waiting is None else waiting.cancelling()
        self.own = 0

    def come_from(self, waiting: asyncio.Task[Any]) -> None:
        """From now on this task waits, and what has cancelled it so far does not count.

        A consumer of events may have handled a cancellation of its own in the meantime: before Python 3.13, a
        ``TaskGroup`` that fails leaves its task's count increased.
        """
        self._waiting, self._before = waiting, waiting.cancelling()

    @property
    def from_outside(self) -> bool:
        """Whether the task that waits is being cancelled."""
        return self._waiting is not None and self._waiting.cancelling() > self._before

    def apply_to(self, task: asyncio.Task[Any] | None) -> None:
        """Let a task be cancelled by these requests alone, until it is forgotten."""
        _requests[task] = self

    @staticmethod
    def forget(task: asyncio.Task[Any] | None) -> None:
        """End ``apply_to`` for a task."""
        del _requests[task]


_requests: dict[asyncio.Task[Any] | None, CancelRequests] = {}
"""What cancels the tasks in which runs advance now, even if user code suppresses it. Any other is cancelled by whatever
increases its count."""


def being_cancelled() -> bool:
    """Whether the current task is being cancelled; if not, a ``CancelledError`` is an ordinary error of user code."""
    task = asyncio.current_task()
    requests = _requests.get(task)
    if requests is not None and (requests.own > 0 or requests.from_outside):
        return True
    return task is not None and task.cancelling() > 0


def reraise_cancellation(error: BaseException) -> None:
    """Raise ``error`` again if it cancels the current task; otherwise it is an ordinary error of user code.

    Raises:
        asyncio.CancelledError: The current task is being cancelled.
    """
    if isinstance(error, asyncio.CancelledError) and being_cancelled():
        raise error


class TimeLimitError(TimeoutError):
    """What was awaited did not end within its time limit."""

    def __init__(self, seconds: float, how: str) -> None:
        super().__init__(f"timed out after {seconds:g} s{how}")
        self.seconds = seconds


class CutOffError(Exception):
    """What was awaited was cut off before its time was up: ``Timeout.cut_off``."""


class Timeout:
    """A time limit for one await at a time: ``value = await timeout.run(coroutine, seconds)``. It cannot be nested.

    When the time is up, or the task is cancelled, the coroutine is cancelled and has ``grace_s`` to clean up. If it is
    still not over then, it is abandoned: closed where it is, and never run again.

    Args:
        grace_s: Seconds that a cancelled coroutine has to end; None to wait for it however long it takes.

    Attributes:
        owner: The task that awaits, if it is known in advance; else the current task.
        grace_s: Seconds that a cancelled coroutine has to end.
    """

    __slots__ = (
        "_abandoned",
        "_cancelling",
        "_cut_off_because",
        "_deadline",
        "_expired",
        "_in_grace",
        "_limit",
        "_loop",
        "_requested",
        "_task",
        "_timer",
        "grace_s",
        "owner",
    )

    def __init__(self, grace_s: float | None = DEFAULT_GRACE_S) -> None:
        self.owner: asyncio.Task[Any] | None = None
        self.grace_s = grace_s
        self._expired = self._abandoned = False
        self._cut_off_because: str | None = None
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._cancelling = 0  # how many cancellations of the task are not of this await
        self._requested = 0  # how many are this object's own
        self._limit = self._deadline = 0.0
        self._in_grace = False

    @coroutine
    def run(self, awaitable: Awaitable[T], seconds: float) -> Generator[Any, Any, T]:
        """Await something for a limited time.

        Args:
            awaitable: What to await.
            seconds: The limit in seconds.

        Returns:
            Its value.

        Raises:
            TimeLimitError: Its time is up, and it has ended, or was abandoned.
            CutOffError: It was cut off, and has ended, or was abandoned.
            asyncio.CancelledError: The task was cancelled, and it has ended, or was abandoned.
        """
        inner: Any = awaitable
        if type(awaitable) is not CoroutineType:
            inner = _as_coroutine(awaitable)
        task = self.owner or asyncio.current_task()
        if task is None or self._task is not None:
            inner.close()
            raise RuntimeError("a Timeout limits one await at a time, inside a task")
        loop = task.get_loop()
        limit = loop.time() + seconds  # by the loop's clock, which need not be the system's
        self._task, self._cancelling, interrupted = task, task.cancelling(), False
        try:
            waiting = inner.send(None)
            self._start(loop, limit)  # a coroutine that never waits needs no timer
            while True:
                error: BaseException | None = None
                try:
                    if waiting is None or type(waiting) is asyncio.Future:
                        yield waiting
                    else:
                        yield from self._wait_for(waiting)
                except GeneratorExit:
                    _close(inner)
                    raise
                except asyncio.CancelledError as cancellation:
                    error, interrupted = cancellation, True
                    self._start_grace()
                except BaseException as refused:  # by the task: something that cannot be awaited
                    error = refused
                if self._abandoned:
                    _close(inner)
                    raise cast("BaseException", error)
                waiting = inner.send(None) if error is None else inner.throw(error)
                if self._in_grace and not self._requested and not self._is_cancelled_by_others(task):
                    self._end_grace()  # a timeout or a task group inside the coroutine, which has handled it
        except StopIteration as ended:
            value: T = ended.value
            return value
        except asyncio.CancelledError as error:
            if self._requested and not self._is_cancelled_by_others(task):
                if self._cut_off_because is not None:
                    raise CutOffError(self._cut_off_because) from error
                raise TimeLimitError(seconds, self._describe_abandonment()) from error
            interrupted = False  # it lets a cancellation through, whoever requested it
            raise
        finally:
            self._task = None
            if self._requested or interrupted:
                self._withdraw(task, interrupted)

    def cut_off(self, reason: str) -> None:
        """End the current await now, as if its time were up; one that is ending already is left alone."""
        if self._task is not None and not self._expired:
            self._expired, self._cut_off_because = True, reason
            self._request(self._task)

    def close(self) -> None:
        """Cancel the timer, when the run has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _describe_abandonment(self) -> str:
        if not self._abandoned or self.grace_s is None:
            return ""
        return f": it did not stop within {self.grace_s:g} s of being cancelled, and was abandoned"

    # -- waiting --------------------------------------------------------------------------------------

    def _wait_for(self, what: Any) -> Generator[Any, Any, None]:
        """Wait for a task, a gather or the like, whose own cancellation may take time or be refused.

        A task that is cancelled cancels what it waits for, and hears nothing until that has ended: so it must not wait
        for it directly.
        """
        inner, loop = cast("asyncio.Future[Any]", what), self._loop
        if not isinstance(what, asyncio.Future) or what is self._task or inner.get_loop() is not loop or loop is None:
            yield inner  # the task accepts or refuses it
            return
        inner._asyncio_future_blocking = False  # as a task does with what it is given
        while True:
            over: asyncio.Future[None] = loop.create_future()
            wake = partial(_wake, over)
            inner.add_done_callback(wake)
            try:
                yield from over
            except asyncio.CancelledError:
                if self._abandoned or not inner.cancel():
                    raise
                self._start_grace()
            else:
                return
            finally:
                inner.remove_done_callback(wake)

    # -- the timer ------------------------------------------------------------------------------------

    def _start(self, loop: asyncio.AbstractEventLoop, limit: float) -> None:
        self._limit = limit
        self._in_grace = False
        self._set_deadline(loop, limit)

    def _start_grace(self) -> None:
        loop = self._loop
        if not self._in_grace and self.grace_s is not None and loop is not None:
            self._in_grace = True
            self._set_deadline(loop, loop.time() + self.grace_s)

    def _end_grace(self) -> None:
        if self._loop is not None:
            self._start(self._loop, self._limit)

    def _set_deadline(self, loop: asyncio.AbstractEventLoop, deadline: float) -> None:
        """Move the deadline. A timer that fires before it is scheduled again, which is rare."""
        self._deadline = deadline
        if self._timer is None or self._loop is not loop or self._timer.when() > deadline:
            self._schedule(loop, deadline)

    def _schedule(self, loop: asyncio.AbstractEventLoop, deadline: float) -> None:
        self.close()
        self._loop = loop
        self._timer = loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        loop, task = self._loop, self._task
        if task is None or loop is None:
            return
        if loop.time() < self._deadline:
            self._schedule(loop, self._deadline)
        elif self._in_grace:
            self._abandoned = True
            self._request(task)
        elif not self._expired:
            self._expired = True
            self._request(task)

    def _is_cancelled_by_others(self, task: asyncio.Task[Any]) -> bool:
        requests = _requests.get(task)
        if requests is None:
            return task.cancelling() - self._requested > self._cancelling
        return requests.own > self._requested or requests.from_outside

    def _request(self, task: asyncio.Task[Any]) -> None:
        self._requested += 1
        if (requests := _requests.get(task)) is not None:
            requests.own += 1
        task.cancel()

    def _withdraw(self, task: asyncio.Task[Any], handled: bool) -> None:
        """Take back what was requested, and what is left in the count by a coroutine that has handled its end."""
        self._expired = self._abandoned = False
        self._cut_off_because = None
        requests = _requests.get(task)
        if requests is not None:
            requests.own -= self._requested
        while self._requested:
            self._requested -= 1
            task.uncancel()
        if handled and requests is not None and not self._is_cancelled_by_others(task):
            while task.cancelling() > self._cancelling:
                task.uncancel()


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel a task until it has ended.

    Before Python 3.12, ``asyncio.wait_for`` in psycopg swallows a cancellation that comes together with an answer.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_AGAIN_S)


def _wake(future: asyncio.Future[None], _: object) -> None:
    if not future.done():
        future.set_result(None)


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable


class _AbandonedError(BaseException):
    """Thrown into a coroutine that is abandoned."""


def _close(inner: Coroutine[Any, Any, Any]) -> None:
    """End a coroutine where it is; one whose cleanup waits is ended there, too, and so on.

    An exception comes first, because before Python 3.13 ``close`` does not reach into an asynchronous generator, which
    then counts as running forever: it cannot be closed, and complains when it is collected.
    """
    for _ in range(CLOSE_ATTEMPTS):
        with suppress(Exception, asyncio.CancelledError, SystemExit):
            try:
                inner.throw(_AbandonedError())
            except _AbandonedError:
                return
            continue  # it waits again
        return  # it has ended, or its cleanup failed
    for _ in range(CLOSE_ATTEMPTS):
        with suppress(Exception, asyncio.CancelledError, SystemExit):  # it waits again, or its cleanup failed
            inner.close()
            return
    import ctypes  # hardly ever needed

    # It never runs again, but dropping it would try to close it again, forever; so would the interpreter's end.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))
    logger.warning("%s cannot be closed: it is left where it is", getattr(inner, "__qualname__", "a coroutine"))
