"""``Run``: a run as its caller sees it, to await, to iterate for events, or to cancel."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from agentfsm.errors import RunError
from agentfsm.loop.events import Event
from agentfsm.loop.model import secrets_of
from agentfsm.loop.state import RunState
from agentfsm.machine.engine import Decision
from agentfsm.runtime.context import AgentConfig
from agentfsm.runtime.driver import Driver, RunRequest
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.tool_execution import being_cancelled

if TYPE_CHECKING:
    from agentfsm.journal.records import Record

__all__ = ["Run"]


class Run:
    """One run of an agent: await it for its result, or iterate it for its events (and await it then).

    A run does nothing until it is awaited or iterated, and goes on only while it is. Whoever stops
    iterating stops the run behind the effect at hand, and may take it up again, await it, or ``aclose`` it
    (``async with`` does). It belongs to one task of one event loop at a time; ``asyncio.gather`` and
    ``asyncio.ensure_future`` give it one of its own.
    """

    def __init__(self, config: AgentConfig, run_state: RunState, request: RunRequest) -> None:
        self._config = config
        self._driver = Driver(config, run_state, request)
        self._events: deque[Event] = deque()
        self._step: asyncio.Task[None] | None = None
        self._event_ready: asyncio.Future[None] | None = None
        self._consumer_since: float | None = None
        self._busy = False

    def __repr__(self) -> str:
        ended = self._driver.outcome
        stands = (
            f"in {str(self.run_state.state)!r}, not at its end: await it" if ended is None else type(ended).__name__
        )
        return f"<Run {self.run_id!r} {stands}>"

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._driver.context.run.run_id

    @property
    def run_state(self) -> RunState:
        """Everything that the run knows at this moment; read it, do not change it."""
        return self._driver.context.run

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Every move so far."""
        return tuple(self._driver.decisions)

    @property
    def finished(self) -> bool:
        """Whether the run has ended or waits for a person: the last event is there."""
        return self._driver.outcome is not None

    @property
    def result(self) -> RunResult:
        """What the run came to.

        Raises:
            RunError: It has not come to its end yet.
        """
        driver = self._driver
        if driver.outcome is None:
            raise RunError(f"run {self.run_id!r} is not finished: await it, or iterate it to its end")
        graph = self._config.machine.graph
        return RunResult(driver.output, driver.outcome, self.decisions, self.run_state, graph, self.journal)

    def journal(self) -> list[Record]:
        """What happened so far, as sealed records; written and hashed now, or read from the host's store.

        Raises:
            agentfsm.errors.JournalError: A record cannot be read.
        """
        from agentfsm.journal.journal_writer import read_journal  # the journal loads when somebody asks for it

        parts = self._config
        secret = {t.name: t.secret for t in parts.tools.values() if t.secret}
        return read_journal(
            self._driver.context.recorder, self.run_id, parts.host.store, secret, secrets_of(parts.model)
        )

    def cancel(self, reason: str = "cancelled") -> None:
        """Ask the run to stop: what it awaits is cut off, and it ends as ``RunCancelled``.

        Every call of the transcript still gets its result. Any thread may call it; a run that has ended
        already stays as it is.
        """
        self._driver.cancel(reason)

    # -- to await -------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, RunResult]:
        return self._run_to_end().__await__()

    async def _run_to_end(self) -> RunResult:
        driver = self._driver
        self._acquire()
        self._exclude_consumer_time()
        try:
            if self._step is not None:
                await self._await_step(self._step)
            await driver.run_to_end()
        finally:
            self._busy = False
        return self.result

    def _acquire(self) -> None:
        if self._busy:
            raise RunError(f"run {self.run_id!r} is being awaited or iterated somewhere else")
        self._busy = True

    # -- to iterate -----------------------------------------------------------------------------------

    def __aiter__(self) -> Run:
        return self

    async def __anext__(self) -> Event:
        self._driver.context.set_listener(self._enqueue)
        self._exclude_consumer_time()
        while not self._events:
            if self.finished:
                raise StopAsyncIteration
            self._acquire()
            try:
                await self._wait_for_event()
            finally:
                self._busy = False
        self._consumer_since = self._config.host.clock.monotonic()
        return self._events.popleft()

    def _exclude_consumer_time(self) -> None:
        """The consumer is back: the time for which it held the last event, or left the run alone, is no silence."""
        if self._consumer_since is not None and (self._step is None or self._step.done()):
            self._driver.exclude_idle(self._consumer_since)
        self._consumer_since = None

    def _enqueue(self, event: Event) -> None:
        self._events.append(event)
        if self._event_ready is not None and not self._event_ready.done():
            self._event_ready.set_result(None)

    async def _wait_for_event(self) -> None:
        """Go on until there is an event: a step runs as a task, so events come while it still awaits."""
        if self._step is None:
            self._step = asyncio.create_task(self._driver.advance())
        self._event_ready = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({self._step, self._event_ready}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._step.cancel()
            await asyncio.wait({self._step})
            self._step = None  # what it ended with is this cancellation
            raise
        if self._step.done():
            await self._await_step(self._step)

    async def _await_step(self, step: asyncio.Task[None]) -> None:
        self._step = None
        try:
            await step
        except asyncio.CancelledError:
            if being_cancelled():
                raise  # else it was another task that was cancelled, while it waited for this step

    # -- to give up -----------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """End a run that nobody goes on with: cancel it if it has not ended, and wait until it has."""
        self.cancel("closed")
        await self._run_to_end()

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
