"""``Run``: a run as its caller sees it, to await, to iterate for events, or to cancel; and ``start_run``."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

from agentfsm.errors import RunError
from agentfsm.loop.events import Event
from agentfsm.loop.messages import Message
from agentfsm.loop.outcomes import CALL_MODEL
from agentfsm.loop.prompts import prompt_text
from agentfsm.loop.state import NO_DETAILS, RunDetails, RunState
from agentfsm.machine.engine import Decision
from agentfsm.runtime.context import AgentConfig
from agentfsm.runtime.driver import Driver, after_one, current_task
from agentfsm.runtime.preparation import Prompt, check_ids, check_prompt, new_run, normalize_history
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.run_context import Deps, Output, check_deps
from agentfsm.runtime.run_request import RunRequest
from agentfsm.runtime.timeout import CancelRequests, being_cancelled
from agentfsm.runtime.tools import Tool

if TYPE_CHECKING:
    from agentfsm.journal.records import Record

_T = TypeVar("_T")

LoadRun = Callable[[], Awaitable[tuple[AgentConfig, RunState, RunRequest]]]
"""Reads a run that should continue, and checks that it can; it changes nothing. The configuration is the run's."""


class Run(Generic[Deps, Output]):
    """One run of an agent: await it for its result, or iterate it for its events and await it afterwards.

    A run does nothing until it is awaited or iterated, and advances only while it is. If the caller stops iterating,
    the run pauses after the current effect; the caller can iterate it again, await it, or end it with ``aclose``
    (``async with`` does that). Only one task of one event loop can use it at a time; ``asyncio.gather`` and
    ``asyncio.ensure_future`` run it in its own task.

    A run that is resumed, and that of a session, is read and checked when it starts, or by ``load`` before that.
    """

    def __init__(
        self, config: AgentConfig, run_state: RunState, request: RunRequest, load: LoadRun | None = None
    ) -> None:
        self._config = config
        self._driver = Driver(config, run_state, request)
        self._load = load
        self._load_failed = False
        self._events: _EventQueue | None = None  # of a run that is iterated
        self._step: asyncio.Task[None] | None = None
        self._consumer = _Consumer()
        self._exclusive = _ExclusiveUse(run_state.run_id)

    def __repr__(self) -> str:
        if self._load is not None:
            return f"<Run {self._driver.context.run.run_id!r} not loaded: await it>"
        ending = self._driver.outcome
        status = f"in state {str(self.state)!r}, not finished: await it" if ending is None else type(ending).__name__
        return f"<Run {self.run_id!r} {status}>"

    @property
    def run_id(self) -> str:
        """The run's id.

        Raises:
            RunError: It is the run of a session, and not loaded yet.
        """
        run_id = self._driver.context.run.run_id
        if not run_id:
            raise RunError("the run of a session gets its id when it is loaded: await the run, or await its load()")
        return run_id

    @property
    def deps(self) -> Deps:
        """Its dependencies; None if it has none.

        Raises:
            RunError: The agent's ``deps_factory`` makes them, and the run has not started.
        """
        deps = self._driver.context.deps
        if deps is None and self._config.deps_factory is not None and not self.finished:
            raise RunError(f"run {self.run_id!r} has not started: its dependencies are made when it does")
        return cast("Deps", deps)

    @property
    def state(self) -> str:
        """The name of the state that the run is in, such as ``call_llm``, ``suspended`` or ``terminal``.

        Raises:
            RunError: The run is resumed, and not loaded yet.
        """
        return live_state(self).state

    @property
    def run_state(self) -> RunState:
        """Everything the run knows at this moment: transcript, usage, counters.

        Until the run is finished this is a ``RunView``: a snapshot that cannot be changed.

        Raises:
            RunError: The run is resumed, and not loaded yet.
        """
        run = live_state(self)
        return run if self.finished else run.view()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Every transition taken so far, with the guards that were evaluated."""
        return tuple(self._driver.decisions)

    @property
    def finished(self) -> bool:
        """Whether the run has ended or is suspended: its last event has been emitted."""
        return self._driver.outcome is not None

    @property
    def result(self) -> RunResult[Output]:
        """The result of a finished run.

        Raises:
            RunError: The run is not finished.
        """
        driver = self._driver
        if driver.outcome is None:
            raise RunError(f"run {self.run_id!r} is not finished: await it, or iterate it to its end")
        graph = self._config.machine.graph
        return RunResult(driver.output, driver.outcome, self.decisions, self.run_state, graph, lambda: self.journal)

    @property
    def journal(self) -> list[Record]:
        """What has happened so far, as sealed records, up to the last that is durable; see ``RunResult.journal``.

        Raises:
            agentfsm.errors.JournalError: A record cannot be read; or the run is resumed and being awaited, and earlier
                records are read when it ends or waits. After ``await run.load()``, and for whoever iterates it, they
                are there.
        """
        context = self._driver.context
        return context.config.read_journal(context.config, context.recorder, context.run)

    def cancel(self, reason: str = "cancelled") -> None:
        """Cancel the run: the current effect is cancelled, and the run ends as ``RunCancelled``.

        Every call of the transcript still gets a result. May be called from any thread; a run that has already
        ended is unchanged.

        Args:
            reason: Why; becomes ``RunCancelled.reason``.
        """
        driver = self._driver
        driver.cancel(reason)
        if self._driver is not driver:  # it was loaded at this very moment, in another thread
            self._driver.cancel(reason)

    async def load(self, *, lazily: bool = False) -> Self:
        """Read a stored run that should continue, and check that it can, without starting it; awaiting it does both.

        Args:
            lazily: Whether older messages of a long run may stay unread until they are needed, as when it is awaited.

        Returns:
            The run itself; its ``state`` and ``run_state`` are those that it continues from.

        Raises:
            SuspensionRecordError: The record or the reply is invalid; each case has its own class.
            agentfsm.errors.RunEndedError: The run has ended.
            agentfsm.errors.JournalGraphError: The stored run belongs to another graph, and no migration accepts it.
            agentfsm.errors.SessionBusyError: The run's session is being run.
            agentfsm.errors.SessionOpenError: The last run of the run's session has not ended.
            agentfsm.errors.StoreError: The run is not in the store, or the store cannot be read.
        """
        if self._load is not None:
            self._load_failed = True
            config, run_state, request = await self._load()
            if self._load is None:  # by another task, in the meantime
                return self
            self._config = config
            unloaded, self._driver = self._driver, Driver(config, run_state, request)
            self._load, self._load_failed = None, False
            self._exclusive.run_id = run_state.run_id
            if unloaded.cancel_reason is not None:
                self._driver.cancel(unloaded.cancel_reason)
            self._driver.given_up = unloaded.given_up
        if not lazily:
            await self._driver.read_earlier_messages()
        return self

    def cancel_call(self, call_id: str, reason: str = "by the user") -> bool:
        """Cancel one tool call that is running, and continue the run. The call's result says so to the model.

        An async function is cancelled, and abandoned if it does not stop within the guardrails' ``cancel_grace_s``. A
        plain one continues in its thread, and what it returns is discarded. A sub-agent's run is cancelled, and what it
        has used is charged. Other calls of the reply are not touched. May be called from any thread.

        Args:
            call_id: The call's id, as ``ToolStarted.call.id`` says it.
            reason: Why, for the model.

        Returns:
            True if the call was running. It may still end by itself at the same moment: its ``ToolFinished`` says how
            it ended (``cut_off``). False if there is no such call, or it has not started, waits for a person, or has
            ended.
        """
        return self._driver.cancel_call(call_id, reason)

    # -- await ----------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, RunResult[Output]]:
        yield from _advance(self, Driver.advance).__await__()
        return self.result

    # -- step -----------------------------------------------------------------------------------------

    async def step(self) -> tuple[Decision, ...]:
        """Make one step: one call of the model and everything that follows from it, up to the next call.

        For a loop of your own, which may look at the run between its steps, cancel it, or stop for a while::

            while not run.finished:
                decisions = await run.step()

        The time between two steps is not charged to the run. A run can also be awaited after some steps.

        Returns:
            The transitions taken, with the guards that were evaluated; none if the run is finished.

        Raises:
            RunError: The run is being awaited or iterated elsewhere.
            SuspensionRecordError: As ``load``.
            agentfsm.errors.StoreError: The journal cannot be written; the run must not continue.
        """
        taken = await _advance(self, _run_step)
        await self._driver.read_earlier_messages()
        self._consumer.since = self._config.host.clock.monotonic()
        return taken

    # -- iterate --------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._load is not None:
            with self._exclusive:
                await self.load()
        if self._events is None:
            self._events = _EventQueue()
        events = self._events
        self._driver.context.set_listener(events.put)
        self._consumer.exclude_time(self._driver, self._step)
        while not events:
            if self.finished:
                raise StopAsyncIteration
            with self._exclusive:  # a step runs as a task, so that its events arrive while it still awaits
                if self._step is None:
                    self._driver.cancel_requests = CancelRequests(current_task())
                    self._step = asyncio.create_task(self._driver.advance(until=after_one))
                else:
                    self._driver.cancel_requests.come_from(current_task())
                try:
                    await events.wait(self._step)
                finally:
                    step = self._step
                    if step.done():
                        self._step = None
                if step.done():
                    await _await_step(step)
        self._consumer.since = self._config.host.clock.monotonic()
        return events.popleft()

    # -- close ----------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Cancel the run if it has not ended, and wait until it has. One that could not be loaded stays as it is."""
        self.cancel("closed")
        if self._load_failed:
            return
        await self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def count_model_requests(run: Run[Any, Any]) -> int:
    """How many model calls this object has started for its run, those of sub-agents and of cut-off calls included."""
    return run._driver.context.model_requests  # pyright: ignore[reportPrivateUsage]  # a method too many for Run


def live_state(run: Run[Any, Any]) -> RunState:
    """The state of a run itself, which changes as the run advances. Only the loop may change it.

    Raises:
        RunError: The run is not loaded yet.
    """
    if run._load is not None:  # pyright: ignore[reportPrivateUsage]
        raise RunError(f"run {run.run_id!r} is not loaded yet: await it, or await its load()")
    return run._driver.context.run  # pyright: ignore[reportPrivateUsage]


def live_tools(run: Run[Any, Any]) -> Mapping[str, Tool]:
    """The tools of a run by name, those that its toolsets have chosen included."""
    return run._driver.context.config.tools  # pyright: ignore[reportPrivateUsage]  # a method too many for Run


def send_events(run: Run[Any, Any], listener: Callable[[Event], None]) -> None:
    """Send a run's events to a function, for a run that is awaited and not iterated."""
    run._driver.context.set_listener(listener)  # pyright: ignore[reportPrivateUsage]  # a method too many for Run


async def advance(
    run: Run[Any, Any], *, until: Callable[[], bool] | None = after_one, longest_wait_s: float | None = None
) -> None:
    """Start a run if it has not started, and advance it until it has ended or is suspended, or is to pause.

    Args:
        run: The run.
        until: Asked after each transition whether it is to pause; by default, it does after one. None for never.
        longest_wait_s: How long it is held while it waits before a retry; None for any time.

    Raises:
        LongWait: It is to wait for longer. It is at a durable point: hand it over, and resume it then.
        SuspensionRecordError: The run is resumed, and the record or the reply is invalid.
        agentfsm.errors.StoreError: The run is not in the store, or its journal cannot be written.
        agentfsm.errors.JournalError: The stored run cannot be resumed.
    """

    async def move(driver: Driver) -> None:
        driver.context.longest_wait_s = longest_wait_s
        await driver.advance(until)

    await _advance(run, move)


async def hand_over(run: Run[Any, Any]) -> None:
    """Give up a stored run that has not ended, so that another process can continue it at once.

    From then on the run does nothing more in this process: whoever awaits or iterates it gets a ``StaleLease``. A call
    that had begun counts as interrupted, as by a crash. Cancel the task that awaits or iterates the run only
    afterwards: before, that ends the run as cancelled. A run that has ended, or has no store, stays as it is.

    Args:
        run: The run.

    Raises:
        agentfsm.errors.StoreError: Its journal cannot be written.
    """
    drivers = list(_with_subruns(run))
    for each in drivers:  # at once: one that notices cancels the calls beside it, whose runs would end as cancelled
        each.stop()
    for each in drivers:
        if (sink := each.context.recorder.sink) is not None:
            await sink.release()


def _with_subruns(run: Run[Any, Any]) -> Iterator[Driver]:
    """What drives a run, and the runs of sub-agents below it."""
    driver = run._driver  # pyright: ignore[reportPrivateUsage]
    yield driver
    for subrun in list(driver.context.subruns or ()):
        yield from _with_subruns(subrun)


class _EventQueue(deque[Event]):
    """The events that a consumer has not taken yet."""

    def __init__(self) -> None:
        super().__init__()
        self._ready: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        self.append(event)
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    async def wait(self, step: asyncio.Task[None]) -> None:
        """Wait until there is another event, or the step is done. A cancellation cancels the step, and waits for it."""
        self._ready = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({step, self._ready}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_soon(step.cancel)  # once it has begun, so that the run ends
            await asyncio.wait({step})
            raise


class _Consumer:
    """Who iterates a run.

    Attributes:
        since: When it got its last event, as a reading of ``Clock.monotonic``; None if it is not away with one.
    """

    since: float | None = None

    def exclude_time(self, driver: Driver, step: asyncio.Task[None] | None) -> None:
        """Exclude from the silence how long the consumer took to handle its last event or to come back."""
        if self.since is not None and (step is None or step.done()):
            driver.exclude_silence(self.since)
        self.since = None


class _ExclusiveUse:
    """Lets one task at a time await or iterate a run."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._busy = False

    def __enter__(self) -> None:
        if self._busy:
            raise RunError(f"run {self.run_id!r} is already being awaited or iterated elsewhere")
        self._busy = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._busy = False


async def _advance(run: Run[Any, Any], advance: Callable[[Driver], Coroutine[Any, Any, _T]]) -> _T:
    """Advance a run in a task of its own: what user code does to the count of its cancellations stays there.

    A cancellation of this task is passed on, and the run ends before it takes effect here.
    """
    with run._exclusive:  # pyright: ignore[reportPrivateUsage]  # a method too many for Run
        task = asyncio.create_task(_load_and_advance(run, advance, CancelRequests(current_task())))
        try:
            try:
                await asyncio.sleep(0)  # it begins: one that is cancelled before that does not end the run
            except asyncio.CancelledError:
                task.cancel()
                await asyncio.wait({task})
                raise
            return await task  # a cancellation of this task goes to that one
        except GeneratorExit:  # this task was abandoned
            task.cancel()
            raise


async def _load_and_advance(
    run: Run[Any, Any], advance: Callable[[Driver], Coroutine[Any, Any, _T]], requests: CancelRequests
) -> _T:
    """Advance a run in this task, after loading it and waiting for what iterating it has begun."""
    await run.load(lazily=True)
    driver, step = run._driver, run._step  # pyright: ignore[reportPrivateUsage]  # a method too many for Run
    run._consumer.exclude_time(driver, step)  # pyright: ignore[reportPrivateUsage]
    if step is not None:
        run._step = None  # pyright: ignore[reportPrivateUsage]
        await _await_step(step)
    driver.cancel_requests = requests
    return await advance(driver)


async def _run_step(driver: Driver) -> tuple[Decision, ...]:
    """Advance until the model was called and is about to be called again, or the run is finished."""
    run, states = driver.context.run, driver.context.config.machine.graph.specs
    before, turns = len(driver.decisions), run.turns
    while driver.outcome is None and (run.turns == turns or states[run.state].effect is not CALL_MODEL):
        await driver.advance(until=after_one)
    return tuple(driver.decisions[before:])


async def _await_step(step: asyncio.Task[None]) -> None:
    try:
        await step
    except asyncio.CancelledError:
        if being_cancelled():
            raise  # otherwise the cancellation was for another task, which was waiting for this step


def run_in_new_loop(create: Callable[[], Run[Any, Output]], method: str, instead: str) -> RunResult[Output]:
    """The result of a run, which begins and ends in an event loop of its own.

    Raises:
        RunError: An event loop is running in this thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise RunError(f"{method} cannot be used inside a running event loop: use 'await {instead}(...)' there")

    async def result() -> RunResult[Output]:
        return await create()

    return asyncio.run(result())


def stored_run(config: AgentConfig, run_id: str, load: LoadRun, deps: Any = None) -> Run[Any, Any]:
    """A run that is resumed, or begins where another one ended, and is read when it starts."""
    return Run(config, RunState(run_id), RunRequest(deps=deps), load)


def start_run(
    config: AgentConfig,
    prompt: Prompt,
    *,
    message_history: Iterable[Message] = (),
    session_id: str = "",
    run_id: str | None = None,
    parent: tuple[str, str] | None = None,
    actor: Any = None,
    deps: Any = None,
    details: RunDetails = NO_DETAILS,
) -> Run[Any, Any]:
    """A new run, in the graph's initial state.

    Args:
        config: The agent's configuration.
        prompt: The user's message: a text, or its parts.
        message_history: Earlier messages of the conversation.
        session_id: The conversation's id.
        run_id: The run's id; by default a random one.
        parent: For a sub-agent's run, the calling run's id and the id of the call; else None.
        actor: Who requests it, as ``Host.identify`` takes it; for a sub-agent's run the ``Actor`` itself.
        deps: Its dependencies, or None.
        details: What else it is given.

    Raises:
        RunError: The prompt is not valid, an id is not a string, the history contains something that is not a message,
            or the dependencies are missing or not what the agent declares.
    """
    message = check_prompt(prompt)
    check_ids(run_id, session_id)
    if deps is not None or config.deps_factory is None:
        check_deps(config.deps_type, deps, "agent.run(prompt, deps=...), or Agent(deps_factory=...)")
    state = new_run(
        config,
        [*normalize_history(message_history), message],
        session_id,
        run_id or secrets.token_hex(8),
        details if deps is None else replace(details, has_deps=True),
    )
    state.parent = parent
    if parent is not None:
        state.requester = actor
    return Run(config, state, RunRequest(prompt_text(message), by=actor, deps=deps))
