"""What an effect works with: the agent's configuration, the current run, its events, and its time limits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from pydantic import TypeAdapter

from agentfsm.loop.events import Ending, Event, RunWarning, SubagentEvent
from agentfsm.loop.failures import describe_exception
from agentfsm.loop.guardrails import AgentGuardrails, Behavior
from agentfsm.loop.human_input import SuspendedSubRun
from agentfsm.loop.messages import Message, ToolCall, ToolResult
from agentfsm.loop.model import Model, ToolSpec
from agentfsm.loop.outcomes import Charge
from agentfsm.loop.recovery_policy import RecoveryPolicy
from agentfsm.loop.reply_secrets import ReplySecrets
from agentfsm.loop.state import RunState, RunView
from agentfsm.loop.withholding import Withholder
from agentfsm.machine.declaration import Transition
from agentfsm.machine.engine import Machine
from agentfsm.runtime.event_filter import EventFilter
from agentfsm.runtime.hooks import INFO_EVENTS, Hook, Observer, log_event, logger
from agentfsm.runtime.host import Clock, Host, Memory
from agentfsm.runtime.recorder import JournalSink, Recorder, ResumePoint
from agentfsm.runtime.timeout import TimeLimitError, Timeout
from agentfsm.runtime.tools import Tool
from agentfsm.runtime.toolsets import Toolset

if TYPE_CHECKING:
    from agentfsm.journal.migration import Migration
    from agentfsm.journal.records import Record

YIELD_AFTER_S = 0.005
"""A run whose effects never wait yields to its event loop this often, so that it can be cancelled, and others run."""

NO_STATES: frozenset[str] = frozenset()
"""One for all runs: an empty set of its own takes 216 bytes of each."""


Effect = Callable[["Context"], Any]
"""What a state does to the outside world: returns an outcome, or a coroutine that returns one."""


class LongWait(Exception):  # noqa: N818  # it is not an error: the run continues later
    """A run waits for longer than its caller is willing to hold it: it is at a durable point, and continues later.

    Args:
        until: When it continues, in seconds since the epoch.
    """

    def __init__(self, until: float) -> None:
        super().__init__(until)
        self.until = until


def rest_of_wait_s(clock: Clock, wait_s: float, since: float | None) -> float:
    """Seconds that a run is still to wait before it repeats something; never longer, whatever the clock says."""
    return wait_s if since is None else min(wait_s, max(0.0, since + wait_s - clock.time()))


def require_short_wait(context: Context, seconds: float) -> None:
    """Refuse a wait for which whoever advances a run does not hold it.

    Raises:
        LongWait: It is too long.
    """
    if context.longest_wait_s is not None and seconds > context.longest_wait_s:
        raise LongWait(context.config.host.clock.time() + seconds)


class Monitor(Protocol):
    """Follows a run in the model of its proofs."""

    def record_move(self, row: Transition, run: RunState, tool_calls: int = 0) -> object | None:
        """Follow one move, before which so many tool calls have run; what is wrong with it, or None."""
        ...

    @property
    def lacks_bounds(self) -> bool:
        """Whether moves have to be compared with bounds that are not computed yet."""
        ...

    def compare_bounds(self) -> object | None:
        """Compare them, in any thread; what exceeds a bound, or None. This may take seconds."""
        ...


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The validated configuration of an agent, created once and shared by its runs.

    Attributes:
        machine: The compiled graph.
        model: The model.
        instructions: The system prompt, complete but for what ``make_instructions`` returns.
        guardrails: The limits of its runs.
        behavior: The switches of its preset.
        tools: Every tool by name, including control tools; with toolsets, those that are known before a run starts.
        tool_specs: The tool descriptions sent to the model; empty in envelope mode.
        policy: The recovery policy.
        host: Clock, secret, seed and store.
        effects: The effect of each state, by name.
        stop_states: The states in which a run ends or waits.
        read_journal: Reads a run's journal, given this configuration and the run's recorder.
        open_withholder: Makes what withholds the secrets of one run.
        hooks: The hooks of each state, by name.
        observers: Functions that receive every event.
        memory: Long-term memory, or None.
        open_journal_sink: Opens the journal of a new or resumed run in the host's store; None without a store.
        output_adapter: Validates a structured answer; None for text.
        output_schema: The JSON schema of the answer, or None.
        migrations: Which stored runs of other graphs may be resumed.
        former_graphs: The fingerprints of the graphs on which earlier releases ran the agent's preset.
        open_monitor: Makes the monitor of a run; None if runs are not monitored.
        deps_type: The type of its runs' dependencies, or None if it declares none.
        deps_factory: Makes the dependencies of a run that is given none, or None.
        output_validators: Functions that check each answer, in order.
        reply_secrets: Finds what is secret in the text of a reply; None if nothing in it can be.
        history: What is kept of a long history, as runs have it in their journals; empty for everything.
        pin_approvals: Returns which calls people have to approve, as runs have it in their journals.
        make_instructions: Returns the beginning of the system prompt for a run; None if ``instructions`` is all of it.
        own_instructions: The beginning of ``instructions``, as the agent was given it.
        toolsets: What chooses the tools of a run; empty if every run has the same.
        with_tools: Makes the configuration of a run with these tools of toolsets; None without toolsets.
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
    read_journal: Callable[[AgentConfig, Recorder, RunState], list[Record]]
    open_withholder: Callable[[], Withholder]
    hooks: Mapping[str, tuple[Hook, ...]] = field(default_factory=dict[str, tuple[Hook, ...]])
    observers: tuple[Observer, ...] = ()
    memory: Memory | None = None
    open_journal_sink: Callable[[RunState, ResumePoint | None], Awaitable[JournalSink]] | None = None
    output_adapter: TypeAdapter[Any] | None = None
    output_schema: Mapping[str, Any] | None = None
    migrations: tuple[Migration, ...] = ()
    former_graphs: frozenset[str] = frozenset()
    open_monitor: Callable[[RunState], Monitor] | None = None
    deps_type: object = None
    deps_factory: Callable[[Any], Any] | None = None
    make_instructions: Callable[[Any], Any] | None = None
    output_validators: tuple[Callable[[Any, Any], Any], ...] = ()
    reply_secrets: ReplySecrets | None = None
    history: Mapping[str, Any] = field(default_factory=dict[str, Any])
    own_instructions: str = ""
    toolsets: tuple[Toolset[Any], ...] = ()
    with_tools: Callable[[AgentConfig, Iterable[Tool]], AgentConfig] | None = None
    pin_approvals: Callable[[AgentConfig], dict[str, Any]] = lambda _: {}

    @property
    def hides_text(self) -> bool:
        """Whether the text of a reply may have secrets that are known only when it is complete."""
        return self.reply_secrets is not None and self.reply_secrets.in_answers


class Context:
    """One run and its environment, as effects see them.

    Attributes:
        config: The agent's configuration.
        run: The run state.
        prompt: The user's message, for the memory.
        deps: The run's dependencies, for user code; None for none.
        timeout: The time limit of whatever the run awaits.
        has_listeners: Whether an observer or a consumer receives events.
        builds_events: Whether every event is built, because it is received or logged; else only the last one is.
        call_ids: The ids of all tool calls in the transcript.
        model_cache: What the model caches between its requests in this run.
        completed_results: Results of calls that have ended while others of their batch still run.
        running_calls: What limits the time of each tool call that runs now, by the call's id.
        subruns: The runs of sub-agents that began for it, as long as somebody uses them; None before the first.
        suspended_subruns: Sub-agents' runs that were suspended in the meantime, by the id of their call.
        model_requests: How many model calls were started for the run since this object was made, by sub-agents too.
        recorder: Collects the run's journal entries.
        secrets: What its events withhold.
        take_charge: While the effect of a user-defined state runs: returns what it has used, for a run that is cut off.
        may_lack_values: Whether the run was loaded, so that its calls may have placeholders of secrets.
        visited_before_resume: The states that the run had left before it was loaded from a store.
        yield_at: When to yield to the event loop, as a reading of ``time.perf_counter``.
        seen: What user code sees of the run in its current state, once there was any to see it.
        sequential_search: Where tool dispatch has searched the batch: the batch, and two indexes in it.
        charged_at: When the run was last charged for its time, as a reading of ``Clock.monotonic`` in seconds.
        longest_wait_s: How long whoever advances the run holds it while it waits before a retry; None for any time.
        waits_since: For a run that was resumed in the state of that wait, until its effect looks: when it began to
            wait, in seconds since the epoch; else None.
    """

    __slots__ = (  # with 30 attributes, instances no longer share their keys: 1.6 KB each, and slower to read
        "_blocked",
        "_listener",
        "_logs_info",
        "_seq",
        "builds_events",
        "call_ids",
        "charged_at",
        "completed_results",
        "config",
        "deps",
        "has_listeners",
        "longest_wait_s",
        "may_lack_values",
        "model_cache",
        "model_requests",
        "once_hooks_run",
        "prompt",
        "recorder",
        "run",
        "running_calls",
        "secrets",
        "seen",
        "sequential_search",
        "subruns",
        "suspended_subruns",
        "take_charge",
        "timeout",
        "visited_before_resume",
        "waits_since",
        "yield_at",
    )

    def __init__(self, config: AgentConfig, run: RunState, prompt: str = "", deps: Any = None) -> None:
        self.config = config
        self.run = run
        self.prompt = prompt
        self.deps = deps
        self.completed_results: list[ToolResult] = []
        self.running_calls: dict[str, Timeout] = {}
        self.subruns: WeakSet[Any] | None = None
        self.suspended_subruns: dict[str, SuspendedSubRun] = {}
        self.model_requests = 0
        self.recorder = Recorder(config.host.clock)
        self.has_listeners = bool(config.observers)
        self._logs_info = logger.isEnabledFor(logging.INFO)
        self.builds_events = self.has_listeners or logger.isEnabledFor(logging.DEBUG)
        self.once_hooks_run: set[int] = set()
        self.take_charge: Callable[[], Charge] | None = None
        self.may_lack_values = False
        self.visited_before_resume = NO_STATES
        self.call_ids = {c.id for m in run.messages[run.unread :] for c in m.tool_calls}
        self.model_cache: dict[object, object] = {}
        self.seen: RunView | None = None
        self.timeout = Timeout(run.guardrails.cancel_grace_s)
        self.sequential_search: tuple[object, int, int] = (None, 0, 0)
        self.yield_at = perf_counter() + YIELD_AFTER_S
        self.charged_at = 0.0
        self.longest_wait_s: float | None = None
        self.waits_since: float | None = None
        self._blocked: list[str] = []
        self._seq = run.event_seq
        self.secrets = EventFilter(config.open_withholder, run)
        self._listener: Callable[[Event], None] | None = None

    def use_config(self, config: AgentConfig) -> None:
        """Give the run a configuration of its own, before it starts."""
        self.config, self.secrets = config, EventFilter(config.open_withholder, self.run)

    def view(self) -> RunView:
        """What user code may see of the run; made once for each state that the run enters."""
        if self.seen is None:
            self.seen = self.run.view()
        return self.seen

    @property
    def time_left_s(self) -> float | None:
        """Seconds until the run's time is up, its last turn included; zero or less if it is; None without a limit."""
        run = self.run
        limit = run.guardrails.max_execution_time_s if run.granted_s is None else run.time_limit
        if limit is None:
            return None
        if run.final_turn:
            limit += run.guardrails.finalize_grace_s
        return limit - run.elapsed_s - (self.config.host.clock.monotonic() - self.charged_at)

    @property
    def uncharged_s(self) -> float:
        """Seconds that have passed since the run was last charged for its time."""
        return self.config.host.clock.monotonic() - self.charged_at

    async def yield_if_due(self) -> None:
        """Let the event loop run whatever else is waiting, every few milliseconds."""
        if perf_counter() > self.yield_at:
            await asyncio.sleep(0)
            self.yield_at = perf_counter() + YIELD_AFTER_S

    def set_listener(self, listener: Callable[[Event], None]) -> None:
        """Send every event from now on to a consumer."""
        self._listener, self.has_listeners, self.builds_events = listener, True, True

    def emit(self, event_class: Callable[..., Event], /, **fields: Any) -> None:
        """Send an event to observers, the consumer and the log; it is built only if one of them receives it."""
        if self.builds_events or (self._logs_info and event_class in INFO_EVENTS):
            self._seq += 1
            self._deliver(self._build(event_class, fields))

    def _build(self, event_class: Callable[..., Event], fields: dict[str, Any]) -> Event:
        return event_class(
            run_id=self.run.run_id,
            seq=self._seq,
            time=self.config.host.clock.time(),
            secrets=self.secrets,
            **fields,
        )

    @property
    def next_seq(self) -> int:
        """The number of the next event."""
        return self._seq + 1

    def continue_numbers(self, after: int) -> None:
        """Number events from here on greater than an earlier number."""
        self._seq = max(self._seq, after)

    def emit_subagent(self, call: ToolCall, event: Event) -> None:
        """Send the event of a sub-agent's run."""
        path: tuple[str, ...] = (call.id,)
        tools: tuple[str, ...] = (call.name,)
        if isinstance(event, SubagentEvent):
            path, tools, event = (*path, *event.path), (*tools, *event.tools), event.event
        self.emit(SubagentEvent, path=path, tools=tools, event=event)

    def emit_final(self, event_class: Callable[..., Event], /, **fields: Any) -> Event:
        """Send the last event, which is always built, and return it."""
        self._seq += 1
        event = self._build(event_class, fields)
        self._deliver(event)
        return event

    def warn(self, text: str, detail: str | None = None) -> None:
        """Log and emit a warning about something that failed without failing the run.

        Args:
            text: What failed. It is logged, so it must not contain text of users, models or tools.
            detail: The same in full detail, for the ``RunWarning`` event.
        """
        logger.warning("run %s: %s", self.run.run_id, text)
        self.emit(RunWarning, text=detail or text)

    def cut_off_call(self, call_id: str, timer: Timeout, reason: str) -> None:
        """Cut off a tool call if it still runs."""
        if self.running_calls.get(call_id) is timer:
            timer.cut_off(reason)

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.run.run_id

    def note_blocked(self, text: str) -> None:
        """Keep a warning of the watchdog until the event loop is free; may be called in any thread."""
        self._blocked.append(text)

    def emit_blocked(self) -> None:
        """Emit the warnings of the watchdog, which has logged them already."""
        while self._blocked:
            self.emit(RunWarning, text=self._blocked.pop(0))

    def warn_memory_failed(self, text: str, error: BaseException, then: str = "") -> None:
        """Log and emit a warning about a memory that raised or took too long."""
        late = isinstance(error, TimeLimitError)
        kind = "TimeoutError" if late else type(error).__name__
        detail = f"{kind}: {error}" if late else describe_exception(error)
        self.warn(f"{text} ({kind}){then}", f"{text} ({detail}){then}")

    def _deliver(self, event: Event) -> None:
        if self._logs_info:
            log_event(event)
        failures: list[str] = []
        for each in self.config.observers:
            try:
                each.function(event)
            except (Exception, asyncio.CancelledError) as error:  # an observer can neither fail nor cancel a run
                failures.append(f"observer {each.name} raised {type(error).__name__}")
                logger.warning("run %s: %s", self.run.run_id, failures[-1])
        if self._listener is not None:
            self._listener(event)
        if not isinstance(event, (RunWarning, Ending)):  # after the event, but never after the last one
            for text in failures:
                self.emit(RunWarning, text=text)


async def read_earlier_messages(context: Context) -> None:
    """Read what was not read of a run when it was loaded.

    Raises:
        JournalError: It was tampered with, or cannot be read.
        StoreError: The store cannot be read.
    """
    sink = context.recorder.sink
    if sink is not None and sink.has_unread:
        fill_in(context, await sink.read_earlier())


def fill_in(context: Context, messages: Sequence[Message]) -> None:
    """Put the messages of a run that were not read yet in their places.

    Args:
        context: The run.
        messages: The transcript as it was when the run was loaded, or the beginning of it.
    """
    run = context.run
    if run.unread:
        run.fill_in(messages)
        context.call_ids.update(call.id for message in run.messages for call in message.tool_calls)
