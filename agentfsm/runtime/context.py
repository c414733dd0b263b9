"""What an effect works with: the parts that an agent is made of, and the run at hand."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from agentfsm.core.events import Ending, Event, RunWarning
from agentfsm.core.messages import ToolResult
from agentfsm.core.model import Model, ToolSpec
from agentfsm.core.policy import RecoveryPolicy
from agentfsm.core.state import Held, RunState
from agentfsm.machine.engine import Machine
from agentfsm.runtime.hooks import Hook, Observer
from agentfsm.runtime.host import Host
from agentfsm.runtime.logs import AT_INFO, log, tell
from agentfsm.runtime.memory import Memory
from agentfsm.runtime.recorder import Keeper, Recorder, TakenUp
from agentfsm.runtime.tools import Tool
from agentfsm.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from agentfsm.journal.migration import Migration

__all__ = ["Context", "Effect", "Parts"]

Effect = Callable[["Context"], Any]
"""The one thing that a state does to the world: gives an outcome, or a coroutine that brings it."""


@dataclass(frozen=True)
class Parts:
    """What an agent is made of, put together once and shared by its runs.

    Attributes:
        machine: The compiled graph.
        model: The model.
        tools: Every tool by name, control tools included.
        specs: What the model is told of them; empty in envelope mode.
        policy: The recovery policy.
        hooks: Hooks by the state at whose door they stand.
        observers: Who sees every event.
        memory: The memory, or None.
        host: Clock, secret, seed.
        keep: Opens a run in the host's store, new or taken up; None where the host has no store.
        output: Checks a structured answer, or None for text.
        output_schema: Its JSON schema, or None.
        effects: The effect of each state, by name.
        ends: The states in which a run ends or waits.
        migrations: What lets stored runs of other graphs in.
    """

    machine: Machine
    model: Model
    tools: Mapping[str, Tool]
    specs: tuple[ToolSpec, ...]
    policy: RecoveryPolicy
    host: Host
    effects: Mapping[str, Effect]
    ends: frozenset[str]
    hooks: Mapping[str, tuple[Hook, ...]] = field(default_factory=dict[str, tuple[Hook, ...]])
    observers: tuple[Observer, ...] = ()
    memory: Memory | None = None
    keep: Callable[[str, TakenUp | None], Awaitable[Keeper]] | None = None
    output: TypeAdapter[Any] | None = None
    output_schema: Mapping[str, Any] | None = None
    migrations: tuple[Migration, ...] = ()


class Context:
    """One run and its parts, as effects see them.

    Attributes:
        parts: What the agent is made of.
        run: What the run knows.
        prompt: The user's message, for the memory.
        watchdog: Limits what the run awaits, one thing at a time.
        watched: Whether anybody sees events.
        heard: Whether they are built: somebody sees them, or all are logged; else only the last one is.
        call_ids: The ids of all calls of the transcript.
        memo: What the model keeps from one request to the next.
        finished: Results of calls that have ended while others of their batch still run.
        held: Sub-agents' runs that have come to wait for a person meanwhile, by the id of their call.
        recorder: What happened in the run, for its journal.
        left: The states that the run had left before it was taken up from a store.
    """

    def __init__(self, parts: Parts, run: RunState, prompt: str = "") -> None:
        self.parts = parts
        self.run = run
        self.prompt = prompt
        self.finished: list[ToolResult] = []
        self.held: dict[str, Held] = {}
        self.recorder = Recorder(parts.host.clock)
        self.watched = bool(parts.observers)
        self._logged = log.isEnabledFor(logging.INFO)
        self.heard = self.watched or log.isEnabledFor(logging.DEBUG)
        self.observer_failures = 0
        self.hooks_done: set[int] = set()
        self.left: frozenset[str] = frozenset()
        self.call_ids = {c.id for m in run.messages for c in m.tool_calls}
        self.memo: dict[object, object] = {}
        self.watchdog = Watchdog()
        self._seq = 0
        self._sink: Callable[[Event], None] | None = None

    def watch(self, sink: Callable[[Event], None]) -> None:
        """Let a consumer have every event from now on."""
        self._sink, self.watched, self.heard = sink, True, True

    def emit(self, event_class: Callable[..., Event], /, **fields: Any) -> None:
        """Tell everybody who watches. The event is only built where somebody does, or where it is logged."""
        if self.heard or (self._logged and event_class in AT_INFO):
            self._seq += 1
            self._deliver(self._build(event_class, fields))

    def _build(self, event_class: Callable[..., Event], fields: dict[str, Any]) -> Event:
        return event_class(run_id=self.run.run_id, seq=self._seq, time=self.parts.host.clock.time(), **fields)

    def end(self, event_class: Callable[..., Event], /, **fields: Any) -> Event:
        """Tell everybody, and give back the event: the last one is always built."""
        self._seq += 1
        event = self._build(event_class, fields)
        self._deliver(event)
        return event

    def warn(self, text: str, told: str | None = None) -> None:
        """Say that something beside the run failed.

        Args:
            text: What failed, in words of ours: it is logged, so it holds nothing that anybody else said.
            told: The same with all that there is to tell, for those who watch.
        """
        log.warning("run %s: %s", self.run.run_id, text)
        self.emit(RunWarning, text=told or text)

    def _deliver(self, event: Event) -> None:
        if self._logged:
            tell(event)
        failures: list[str] = []
        for each in self.parts.observers:
            try:
                each.function(event)
            except (Exception, asyncio.CancelledError) as error:  # an observer never harms a run, nor cancels it
                self.observer_failures += 1
                failures.append(f"observer {each.name} raised {type(error).__name__}")
                log.warning("run %s: %s", self.run.run_id, failures[-1])
        if self._sink is not None:
            self._sink(event)
        if not isinstance(event, (RunWarning, Ending)):  # behind the event, and never behind the last one
            for text in failures:
                self.emit(RunWarning, text=text)
