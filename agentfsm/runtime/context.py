"""What an effect works with: the agent's configuration, the run at hand, its events, and a reusable timeout.

``Timeout`` keeps one timer armed for the whole run: ``asyncio.timeout`` arms and cancels one per await, which
costs 3 microseconds, twice a step. Otherwise it behaves like ``asyncio.timeout``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from agentfsm.loop.events import Ending, Event, RunWarning
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.messages import ToolResult
from agentfsm.loop.model import Model, ToolSpec
from agentfsm.loop.policy import RecoveryPolicy
from agentfsm.loop.state import RunState, SuspendedSubRun
from agentfsm.machine.engine import Machine
from agentfsm.runtime.hooks import INFO_EVENTS, Hook, Observer, log_event, logger
from agentfsm.runtime.host import Host, Memory
from agentfsm.runtime.recorder import JournalSink, Recorder, ResumePoint
from agentfsm.runtime.tools import Tool

if TYPE_CHECKING:
    from agentfsm.journal.migration import Migration

__all__ = ["AgentConfig", "Context", "Effect", "Timeout", "being_cancelled", "reraise_cancellation"]


def being_cancelled() -> bool:
    """Whether the current task is being cancelled; if not, a ``CancelledError`` is an ordinary error of user code."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def reraise_cancellation(error: BaseException) -> None:
    """Raise ``error`` again if it cancels the current task; otherwise it is an ordinary error of user code.

    Raises:
        asyncio.CancelledError: The current task is being cancelled.
    """
    if isinstance(error, asyncio.CancelledError) and being_cancelled():
        raise error


class Timeout:
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

    def start(self, seconds: float) -> Timeout:
        """The limit for the ``with`` block that follows."""
        self.seconds = seconds
        return self

    @property
    def expired(self) -> bool:
        """Whether the last block ended because its time was over."""
        return self._expired

    def __enter__(self) -> Timeout:
        task = self.owner or asyncio.current_task()
        if task is None or self._task is not None:
            raise RuntimeError("a watchdog limits one await at a time, inside a task")
        loop = task.get_loop()
        self._task, self._cancelling, self._expired = task, task.cancelling(), False
        self._deadline = deadline = loop.time() + self.seconds
        if self._timer is None or self._loop is not loop or self._timer.when() > deadline:
            self._schedule(loop, deadline)
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
        else:
            self._expired = True
            task.cancel()


Effect = Callable[["Context"], Any]
"""The one thing that a state does to the world: gives an outcome, or a coroutine that brings it."""


@dataclass(frozen=True)
class AgentConfig:
    """What an agent is made of, put together once and shared by its runs.

    Attributes:
        machine: The compiled graph.
        model: The model.
        tools: Every tool by name, control tools included.
        tool_specs: What the model is told of them; empty in envelope mode.
        policy: The recovery policy.
        hooks: Hooks by the state at whose door they stand.
        observers: Who sees every event.
        memory: The memory, or None.
        host: Clock, secret, seed.
        open_journal_sink: Opens a run in the host's store, new or taken up; None where the host has no store.
        output_adapter: Checks a structured answer, or None for text.
        output_schema: Its JSON schema, or None.
        effects: The effect of each state, by name.
        stop_states: The states in which a run ends or waits.
        migrations: What lets stored runs of other graphs in.
    """

    machine: Machine
    model: Model
    instructions: str
    guardrails: AgentGuardrails
    behavior: Behavior
    tools: Mapping[str, Tool]
    tool_specs: tuple[ToolSpec, ...]
    policy: RecoveryPolicy
    host: Host
    effects: Mapping[str, Effect]
    stop_states: frozenset[str]
    hooks: Mapping[str, tuple[Hook, ...]] = field(default_factory=dict[str, tuple[Hook, ...]])
    observers: tuple[Observer, ...] = ()
    memory: Memory | None = None
    open_journal_sink: Callable[[str, ResumePoint | None], Awaitable[JournalSink]] | None = None
    output_adapter: TypeAdapter[Any] | None = None
    output_schema: Mapping[str, Any] | None = None
    migrations: tuple[Migration, ...] = ()


class Context:
    """One run and its parts, as effects see them.

    Attributes:
        config: What the agent is made of.
        run: What the run knows.
        prompt: The user's message, for the memory.
        timeout: Limits what the run awaits, one thing at a time.
        has_listeners: Whether anybody sees events.
        builds_events: Whether they are built: somebody sees them, or all are logged; else only the last one is.
        call_ids: The ids of all calls of the transcript.
        model_cache: What the model keeps from one request to the next.
        completed_results: Results of calls that have ended while others of their batch still run.
        suspended_subruns: Sub-agents' runs that have come to wait for a person meanwhile, by the id of their call.
        recorder: What happened in the run, for its journal.
        visited_before_resume: The states that the run had left before it was taken up from a store.
    """

    def __init__(self, config: AgentConfig, run: RunState, prompt: str = "") -> None:
        self.config = config
        self.run = run
        self.prompt = prompt
        self.completed_results: list[ToolResult] = []
        self.suspended_subruns: dict[str, SuspendedSubRun] = {}
        self.recorder = Recorder(config.host.clock)
        self.has_listeners = bool(config.observers)
        self._logs_info = logger.isEnabledFor(logging.INFO)
        self.builds_events = self.has_listeners or logger.isEnabledFor(logging.DEBUG)
        self.observer_failures = 0
        self.once_hooks_run: set[int] = set()
        self.visited_before_resume: frozenset[str] = frozenset()
        self.call_ids = {c.id for m in run.messages for c in m.tool_calls}
        self.model_cache: dict[object, object] = {}
        self.timeout = Timeout()
        self._seq = 0
        self._listener: Callable[[Event], None] | None = None

    def set_listener(self, listener: Callable[[Event], None]) -> None:
        """Let a consumer have every event from now on."""
        self._listener, self.has_listeners, self.builds_events = listener, True, True

    def emit(self, event_class: Callable[..., Event], /, **fields: Any) -> None:
        """Tell everybody who watches. The event is only built where somebody does, or where it is logged."""
        if self.builds_events or (self._logs_info and event_class in INFO_EVENTS):
            self._seq += 1
            self._deliver(self._build(event_class, fields))

    def _build(self, event_class: Callable[..., Event], fields: dict[str, Any]) -> Event:
        return event_class(run_id=self.run.run_id, seq=self._seq, time=self.config.host.clock.time(), **fields)

    def emit_final(self, event_class: Callable[..., Event], /, **fields: Any) -> Event:
        """Tell everybody, and give back the event: the last one is always built."""
        self._seq += 1
        event = self._build(event_class, fields)
        self._deliver(event)
        return event

    def warn(self, text: str, detail: str | None = None) -> None:
        """Say that something beside the run failed.

        Args:
            text: What failed, in words of ours: it is logged, so it holds nothing that anybody else said.
            detail: The same with all that there is to tell, for those who watch.
        """
        logger.warning("run %s: %s", self.run.run_id, text)
        self.emit(RunWarning, text=detail or text)

    def _deliver(self, event: Event) -> None:
        if self._logs_info:
            log_event(event)
        failures: list[str] = []
        for each in self.config.observers:
            try:
                each.function(event)
            except (Exception, asyncio.CancelledError) as error:  # an observer never harms a run, nor cancels it
                self.observer_failures += 1
                failures.append(f"observer {each.name} raised {type(error).__name__}")
                logger.warning("run %s: %s", self.run.run_id, failures[-1])
        if self._listener is not None:
            self._listener(event)
        if not isinstance(event, (RunWarning, Ending)):  # behind the event, and never behind the last one
            for text in failures:
                self.emit(RunWarning, text=text)
