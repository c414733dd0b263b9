"""Simulated runs: a scenario says what the outside world does, and the simulator runs an agent against it.

The simulator replaces the agent's model, the functions of its tools, its policy, clock and store; the graph, guards,
hooks, approval rules and the validation of arguments are the agent's own. Every run is journaled, and resumed from its
journal after each wait and each simulated crash.
"""

from __future__ import annotations

import asyncio
import copy
import gc
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import isasyncgen, isawaitable
from typing import Any, TypeVar, cast

from agentfsm.agent import Agent
from agentfsm.errors import HumanReplyError, NoTransitionError, RunError
from agentfsm.journal.memory_store import MemoryStore
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.store import Head, consistent_read
from agentfsm.loop.approval_rows import counts_votes
from agentfsm.loop.detectors import DEFAULT_RESULT
from agentfsm.loop.events import Event, ToolStarted, Transitioned
from agentfsm.loop.failures import Action, Failure, FailureKind
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.messages import Reply, Usage
from agentfsm.loop.model import ModelRequest
from agentfsm.loop.outcomes import RUN_CALLS, StateResult
from agentfsm.loop.quorum import Actor, Approval, Quorum
from agentfsm.loop.recovery_policy import Recovery, RecoveryPolicy
from agentfsm.loop.state import RunState, RunView
from agentfsm.loop.suspension import DEFAULT_VALIDITY_S
from agentfsm.loop.transition_table import BUILT_IN_GUARDS
from agentfsm.machine.declaration import EffectSpec
from agentfsm.machine.engine import Decision, Machine, Steppable
from agentfsm.machine.graph import Graph, Guard, State
from agentfsm.runtime.context import Context, Effect
from agentfsm.runtime.hooks import AbortRun, AskApproval, Hook, HookContext, HookDecision, Observer
from agentfsm.runtime.host import Host
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.run import Run, live_state
from agentfsm.runtime.run_context import ToolContext
from agentfsm.runtime.tool_execution import run_in_thread
from agentfsm.runtime.tools import Tool
from agentfsm.testing.fakes import FakeClock, ScriptedModel

T = TypeVar("T")


class _Instead:
    """What happens instead of a human reply or a scripted tool result."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


DISMISSED = _Instead("DISMISSED")
"""In place of a human reply: the waiting run is dismissed."""

RUN_TOOL = _Instead("RUN_TOOL")
"""In place of a tool result: the tool's own function runs (but for a sub-agent, whose model would be called)."""

ESCALATED = _Instead("ESCALATED")
"""In place of a human reply: no reply arrives before the request is escalated."""

EXPIRED = _Instead("EXPIRED")
"""In place of a human reply: no reply arrives before the suspension expires."""


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """One call of the model.

    Attributes:
        entry: What the model returns, as an entry of a ``ScriptedModel``: a string, tool calls, a ``Reply``, an
            exception to raise...
        tokens: Tokens used, in addition to those that the entry reports.
        cost_usd: What the call costs, in USD, in addition to what the entry reports.
    """

    entry: Any
    tokens: int = 0
    cost_usd: float = 0.0


@dataclass(frozen=True, slots=True)
class SideEvent:
    """What else happens during one visit to a state.

    Attributes:
        duration_s: How long the state's effect takes, in seconds.
        idle_s: Idle time just before the state, in seconds.
        cancel: Whether the run is cancelled.
        interrupt: Whether the task that awaits the run is cancelled, as ``asyncio.wait_for`` does; not in a simulation
            that is advanced by single transitions.
        abort: Whether a hook aborts the run or, in a state that waits, a guard raises.
        needs_approval: Whether a hook requires approval of the tool calls that are due.
        approval: What the tools' rules require of these calls in place of what they say; None for what they say. Only
            on a graph that counts votes.
        crash: Whether the process dies when a tool starts; the run is then resumed from its store.
        state_result: For a user-defined state: the result in place of its effect's, a value or a ``StateResult``.
    """

    duration_s: float = 0.0
    idle_s: float = 0.0
    cancel: bool = False
    abort: bool = False
    needs_approval: bool = False
    crash: bool = False
    state_result: Any = None
    approval: Approval | None = None
    interrupt: bool = False


NO_SIDE_EVENT = SideEvent()
"""A visit during which nothing else happens."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What the outside world does in one run. Each list is used in order; defaults apply once it is used up.

    Attributes:
        model_turns: One per model call. By default the model gives a final answer.
        tool_results: What tools return, one per execution; exceptions are raised, and for ``RUN_TOOL`` the tool's own
            function runs. By default tools succeed.
        recovery_actions: Decisions of the recovery policy, one per visit to ``recover``. By default, and for None,
            the agent's own policy decides.
        human_replies: One per suspension: a human reply, ``DISMISSED``, ``EXPIRED``, ``ESCALATED``, or a mapping to one
            of these from what the run waits for (``question``, ``limit``, ``approval``, ``in_doubt``). By default,
            and if the reply does not fit, the run is dismissed. Each is another person's, who may give it.
        side_events: What else happens, by the number of transitions taken before.
        guardrails: The limits of the run; None for those of the agent.
        metadata: The metadata with which the run is started.
        tags: Its tags.
        actor: Who requests it. By default nobody in particular, and on a graph that counts votes somebody who does not
            vote.
    """

    model_turns: Sequence[ModelTurn] = ()
    tool_results: Sequence[Any] = ()
    recovery_actions: Sequence[Action | None] = ()
    human_replies: Sequence[Any] = ()
    side_events: Mapping[int, SideEvent] = field(default_factory=dict[int, SideEvent])
    guardrails: AgentGuardrails | None = None
    metadata: Mapping[str, Any] | None = None
    tags: Sequence[str] = ()
    actor: Actor | str | None = None

    def with_crashes(self, moves: int = 100) -> Scenario:
        """The same scenario, but the process dies at the first start of a tool in each visit, and the run is resumed.

        Args:
            moves: Crashes happen before so many transitions.
        """
        crashes = {i: replace(self.side_events.get(i, NO_SIDE_EVENT), crash=True) for i in range(moves)}
        return replace(self, side_events=crashes)


MAX_MOVES = 100_000
"""Default limit on the transitions of a simulated run; a run that exceeds it is assumed not to end."""


SIMULATION_RUN_ID = "played"
"""The run id of every simulated run."""


class MoveLimitError(Exception):
    """The run has taken more transitions than allowed. Internal: it never reaches the caller."""


class SimulatedCrashError(BaseException):
    """A simulated crash of the process. It derives from ``BaseException`` so that the run cannot catch it."""


@dataclass(frozen=True, slots=True)
class StartedTool:
    """A tool execution that was started.

    Attributes:
        tool: The name of the tool.
        arguments: Its arguments.
        approved: Whether a human had approved the call.
    """

    tool: str
    arguments: Mapping[str, Any]
    approved: bool


@dataclass(frozen=True, slots=True)
class GuardError:
    """In place of a guard's answer: the guard raised. It is false, as a guard that raises does not hold.

    Attributes:
        error: The exception.
    """

    error: Exception

    def __bool__(self) -> bool:
        return False


@dataclass
class SimulationResult:
    """The result of running a scenario.

    Attributes:
        decisions: Every transition taken, across suspensions and crashes.
        run_results: The result at each suspension and at the end. The last one is missing if the run was abandoned.
        started_tools: Every tool execution that was started, in order.
        model_calls: How many times the model was called.
        requests: What the model was asked, in order.
        guard_results: Results of the probed guards, by the number of transitions taken before and the row id; a
            ``GuardError`` if the guard raised.
        clock: The clock, at the time the run stopped.
        store: The store that holds the run's journal.
    """

    decisions: list[Decision] = field(default_factory=list[Decision])
    run_results: list[RunResult[Any]] = field(default_factory=list[RunResult[Any]])
    started_tools: list[StartedTool] = field(default_factory=list[StartedTool])
    model_calls: int = 0
    requests: list[ModelRequest] = field(default_factory=list[ModelRequest])
    guard_results: dict[tuple[int, str], object] = field(default_factory=dict[tuple[int, str], object])
    clock: FakeClock = field(default_factory=FakeClock)
    store: MemoryStore = field(default_factory=MemoryStore)

    @property
    def run_result(self) -> RunResult[Any]:
        """The last result of the run."""
        return self.run_results[-1]

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the rows taken, in order."""
        return tuple(d.transition.id for d in self.decisions)

    def read_journal(self) -> tuple[list[SealedRecord], Head | None]:
        """The run's journal: its records, and its head."""
        read = consistent_read(self.store, SIMULATION_RUN_ID)
        try:
            read.send(None)  # a ``MemoryStore`` never waits
        except StopIteration as done:
            return cast("tuple[list[SealedRecord], Head | None]", done.value)
        raise RunError("the store waits: read it with await")


class Cursor:
    """The position in each list of a scenario that is being run."""

    def __init__(self, scenario: Scenario, probe_moves: frozenset[int], max_moves: int) -> None:
        self.max_moves = max_moves
        self.scenario = scenario
        self.result = SimulationResult()
        self.probe_moves = probe_moves
        self.model_calls = self.tool_runs = self.recoveries = self.suspensions = 0
        self.delivered: set[tuple[int, str]] = set()
        self.cancel: Callable[[str], None] | None = None
        self.interrupt: Callable[[], object] | None = None

    @property
    def move_count(self) -> int:
        """How many transitions the run has taken."""
        return len(self.result.decisions)

    def take_side_event(self, kind: str) -> SideEvent:
        """The side event of this visit, once for each kind; ``NO_SIDE_EVENT`` after that."""
        key = (self.move_count, kind)
        if key in self.delivered:
            return NO_SIDE_EVENT
        self.delivered.add(key)
        return self.side_event

    @property
    def side_event(self) -> SideEvent:
        """The side event of this visit."""
        return self.scenario.side_events.get(self.move_count, NO_SIDE_EVENT)


class Simulation:
    """A scenario that is being run, one suspension or one transition at a time; see ``Simulator.start``."""

    def __init__(self, agent: Agent[Any, Any], cursor: Cursor, *, from_records: bool, deps: Any = None) -> None:
        self._agent = agent
        self._deps = deps
        self._cursor = cursor
        self._from_records = from_records
        self._stop_states = {s.name for s in agent.graph.states if s.final or s.waits}
        self.result = cursor.result
        scenario = cursor.scenario
        self._suspension: Any = None
        self._run: Run[Any, Any] | None = agent.run(
            "play",
            run_id=SIMULATION_RUN_ID,
            actor=scenario.actor or (Actor("requester") if counts_votes(agent.graph) else None),
            tags=scenario.tags,
            metadata=scenario.metadata or {},
            deps=deps,
        )
        self._state = live_state(self._run)

    @property
    def state(self) -> RunState:
        """The current state of the run."""
        return self._state

    async def advance(self) -> bool:
        """Run up to the next suspension, crash or end. False if the run has ended or was abandoned."""
        return await self._catch_interruptions(self._advance_once())

    async def step(self) -> bool:
        """Take one transition. False if the run has ended or was abandoned."""
        return await self._catch_interruptions(self._step_once())

    async def _catch_interruptions(self, work: Coroutine[Any, Any, bool]) -> bool:
        try:
            return await work
        except HumanReplyError:  # the approval's rule refuses whoever replies, or the reply
            self._run = await self._agent.dismiss(self._suspension).load()
            return True
        except (MoveLimitError, NoTransitionError):  # the latter: the table has no row for what the run waits for
            return False
        except SimulatedCrashError as crash:
            crash.__traceback__ = None  # a reference to the error must not keep the crashed run alive
            self._run = self._cursor.cancel = None  # the lease is released once the run is collected
            return True

    async def _advance_once(self) -> bool:
        run = await self._ensure_run()
        if not any(each.interrupt for each in self._cursor.scenario.side_events.values()):
            return await self._record_result(await run)
        waiting = asyncio.create_task(_wait_for(run))
        self._cursor.interrupt = waiting.cancel
        await asyncio.wait([waiting])
        return await self._record_result(run.result if waiting.cancelled() else waiting.result())

    async def _step_once(self) -> bool:
        run = await self._ensure_run()
        async for event in run:
            if isinstance(event, Transitioned) and event.target not in self._stop_states:
                return True
        return await self._record_result(run.result)

    async def _ensure_run(self) -> Run[Any, Any]:
        if self._run is None:
            await asyncio.sleep(0)  # let appends that were queued before the crash finish
            await self._release_lease()
            self._run = await self._agent.resume(SIMULATION_RUN_ID, deps=self._deps).load()
        self._cursor.cancel, self._state = self._run.cancel, live_state(self._run)
        return self._run

    async def _release_lease(self) -> None:
        """Collect the crashed run, whose lease blocks the resumption; the youngest generation first: the cheapest."""
        for generation in range(3):
            head = await self.result.store.head(SIMULATION_RUN_ID)
            if head is None or head.owner is None:
                return
            await asyncio.sleep(0)  # what the crashed run had begun, such as reading its signals, ends first
            gc.collect(generation)

    async def _record_result(self, result: RunResult[Any]) -> bool:
        """Record a result; if the run waits, resume or dismiss it as the scenario says."""
        self.result.run_results.append(result)
        if self._agent.graph.spec(result.state).final:
            return False
        self._run = await self._resume_or_dismiss(result)
        self._state = live_state(self._run)
        return True

    async def _resume_or_dismiss(self, result: RunResult[Any]) -> Run[Any, Any]:
        cursor, outcome = self._cursor, result.outcome
        record: Any = getattr(outcome, "suspension_record", None) if self._from_records else SIMULATION_RUN_ID
        self._suspension = record
        answer: Any = _next_or(cursor.scenario.human_replies, cursor.suspensions, DISMISSED)
        cursor.suspensions += 1
        if isinstance(answer, Mapping):
            answer = cast("Mapping[str, Any]", answer).get(getattr(outcome, "kind", ""), DISMISSED)
        if answer is EXPIRED:
            cursor.result.clock.advance((result.run_state.guardrails.validity_s or DEFAULT_VALIDITY_S) + 1)
        if answer is DISMISSED or answer is EXPIRED:
            return await self._agent.dismiss(record).load()
        quorum: Quorum | None = getattr(outcome, "quorum", None)
        try:
            if answer is ESCALATED:
                due = None if quorum is None else quorum.escalates_at
                cursor.result.clock.advance(max(0.0, (due or 0.0) - cursor.result.clock.time()))
                return await self._agent.resume(record, deps=self._deps).load()
            by = Actor(f"person {cursor.suspensions}", () if quorum is None else quorum.roles)
            return await self._agent.resume(record, answer, by=by, deps=self._deps).load()
        except HumanReplyError:  # the run waits for something else
            return await self._agent.dismiss(record).load()


class Simulator:
    """Runs an agent against scenarios, one run at a time.

    ::

        scenario = Scenario(model_turns=[ModelTurn(""), ModelTurn("done")])
        result = Simulator(my_agent).run_sync(scenario)
        assert "post_llm.no_progress" in result.ids  # the empty reply

    Args:
        agent: The agent; it is not changed.
        final_answer: What the model replies once the scenario's turns are used up.
        from_records: Whether runs are resumed from their suspension records instead of from the store.
        side_events: Whether side events happen; they need a hook, and without one a run has only the agent's own hooks.
        deps: The dependencies of its runs, for the agent's own hooks, approval rules and tools. Its ``deps_factory`` is
            not called.
    """

    def __init__(
        self,
        agent: Agent[Any, Any],
        *,
        final_answer: Any = "done",
        from_records: bool = False,
        side_events: bool = True,
        deps: Any = None,
    ) -> None:
        self._agent = agent
        self._deps = deps
        self._from_records = from_records
        self._final_answer = final_answer
        config = agent.config
        self._cursor = Cursor(Scenario(), frozenset(), 0)
        graph = config.machine.graph
        states = [s.name for s in graph.states if not (s.final or s.waits or s.effect is RUN_CALLS)]
        hooks = {
            state: (Hook(state, _ScriptHook(self), fail_open=False, name="script"), *config.hooks.get(state, ()))
            for state in (*states, State.DISPATCH_TOOL)  # where hooks of calls are kept, whatever their states' names
        }
        self._config = replace(
            config,
            machine=_ObservedMachine(graph, self._probed_step),
            model=_ScenarioModel(self),
            tools={name: self._scripted_tool(tool) for name, tool in config.tools.items()},
            policy=_ScenarioPolicy(self, config.policy),
            hooks={**config.hooks, **hooks} if side_events else config.hooks,
            observers=(*config.observers, Observer(self._on_event)),
            deps_type=None,
            deps_factory=None,
            make_instructions=None,
            toolsets=(),
            with_tools=None,
            output_validators=(),
            effects={name: self._with_scripted_result(name, effect) for name, effect in config.effects.items()},
        )

    def run_sync(
        self, scenario: Scenario, *, probe_moves: frozenset[int] = frozenset(), max_moves: int = MAX_MOVES
    ) -> SimulationResult:
        """The result of a scenario, run to its end in an event loop of its own; see ``run``.

        Raises:
            RunError: An event loop is running in this thread; await ``run`` there.
        """
        work = self.run(scenario, probe_moves=probe_moves, max_moves=max_moves)
        return run_in_own_loop(work, "await simulator.run(...)")

    async def run(
        self, scenario: Scenario, *, probe_moves: frozenset[int] = frozenset(), max_moves: int = MAX_MOVES
    ) -> SimulationResult:
        """The result of a scenario, run to its end.

        Args:
            scenario: What the outside world does.
            probe_moves: Before each of these transitions (numbered from 0), every guard of the state is evaluated and
                recorded in ``guard_results``.
            max_moves: The run is abandoned after this many transitions.
        """
        simulation = self.start(scenario, probe_moves=probe_moves, max_moves=max_moves)
        while await simulation.advance():
            pass
        return simulation.result

    def start(
        self, scenario: Scenario, *, probe_moves: frozenset[int] = frozenset(), max_moves: int = MAX_MOVES
    ) -> Simulation:
        """A simulation to advance by one suspension or one transition at a time; arguments as for ``run``."""
        cursor = self._cursor = Cursor(scenario, probe_moves, max_moves)
        store = None if self._from_records else cursor.result.store
        host = Host(clock=cursor.result.clock, secret=b"the simulator's secret", seed=1, store=store)
        guardrails = scenario.guardrails or self._config.guardrails
        if guardrails.validity_s is None:  # a stored run would wait without limit, and EXPIRED would never come
            guardrails = guardrails.model_copy(update={"validity_s": DEFAULT_VALIDITY_S})
        agent = self._agent.with_config(replace(self._config, host=host), guardrails)
        self._simulation = Simulation(agent, cursor, from_records=self._from_records, deps=self._deps)
        return self._simulation

    # -- called by the run ----------------------------------------------------------------------------

    def side_event_decision(self, context: HookContext[Any]) -> HookDecision:
        """What the scenario's next side event makes a hook decide."""
        cursor = self._cursor
        side_event = cursor.take_side_event("hook")
        cursor.result.clock.advance(side_event.duration_s)
        if side_event.cancel and cursor.cancel is not None:
            cursor.cancel("cancelled by the script")
        if side_event.interrupt and cursor.interrupt is not None:
            cursor.interrupt()
        if side_event.abort:
            return AbortRun("aborted by the script")
        needs_approval = cursor.side_event.needs_approval  # of every call of the batch, not of the first alone
        return AskApproval() if needs_approval and context.call is not None else None

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, ToolStarted):
            return
        cursor, state = self._cursor, self._simulation.state
        approved = any(c.approved for c in state.batch if c.call.id == event.call.id)
        cursor.result.started_tools.append(StartedTool(event.call.name, dict(event.call.arguments), approved))
        if cursor.take_side_event("crash").crash and not self._from_records:
            raise SimulatedCrashError

    def _probed_step(self, machine: Machine, run: Steppable) -> Decision:
        cursor = self._cursor
        if cursor.move_count >= cursor.max_moves:
            raise MoveLimitError
        if cursor.side_event.abort and machine.graph.spec(run.state).waits:  # no hook runs here, but guards are asked
            run.abort("the script", RuntimeError("aborted by the script"))
        if cursor.move_count in cursor.probe_moves:
            for row in machine.graph.rows(run.state):
                if row.guard is not None:
                    cursor.result.guard_results[cursor.move_count, row.id] = _probe(row.guard, run)
        decision = Machine.step(machine, run)
        cursor.result.decisions.append(decision)
        cursor.result.clock.advance(cursor.side_event.idle_s)
        return decision

    def _with_scripted_result(self, name: str, effect: Effect) -> Effect:
        if isinstance(self._agent.graph.spec(name).effect, EffectSpec):
            return effect

        async def scripted(context: Context) -> Any:
            state_result = self._cursor.take_side_event("state_result").state_result
            if state_result is not None:
                return state_result if isinstance(state_result, StateResult) else StateResult(state_result)
            outcome = effect(context)
            return await outcome if isawaitable(outcome) else outcome

        return scripted

    def _scripted_tool(self, tool: Tool) -> Tool:
        if tool.control is not None:
            return tool

        async def run(*context: ToolContext[Any], **arguments: Any) -> Any:
            cursor = self._cursor
            result = _next_or(cursor.scenario.tool_results, cursor.tool_runs, DEFAULT_RESULT)
            cursor.tool_runs += 1
            if isinstance(result, BaseException):
                raise _copy_error(result)
            if result is RUN_TOOL:
                return DEFAULT_RESULT if tool.delegate is not None else await _run_function(tool, context, arguments)
            return result

        scripted = replace(tool, function=run, is_async=True, delegate=None)
        if not counts_votes(self._agent.graph):
            return scripted

        def rule(arguments: Any, context: HookContext[Any]) -> bool | Approval:
            asked = self._cursor.side_event.approval
            own: Any = tool.requires_approval
            if asked is not None or isinstance(own, (bool, Approval)):
                return asked or own
            required: bool | Approval = own(arguments, context) if tool.approval_takes_context else own(arguments)
            return required

        return replace(scripted, requires_approval=rule)

    async def next_reply(self, request: ModelRequest) -> Reply:
        """The scenario's next model reply."""
        cursor = self._cursor
        turn: ModelTurn = _next_or(cursor.scenario.model_turns, cursor.model_calls, ModelTurn(self._final_answer))
        cursor.model_calls += 1
        cursor.result.model_calls += 1
        cursor.result.requests.append(request)
        if isinstance(turn.entry, BaseException):
            # the copy is not stored in a variable: the frame and the error's traceback would form a reference cycle
            raise _copy_error(turn.entry)
        reply = await ScriptedModel([turn.entry]).reply(request)
        return replace(reply, usage=reply.usage + Usage(output_tokens=turn.tokens, cost_usd=turn.cost_usd))

    def choose_action(self, failure: Failure, state: RunView, own: RecoveryPolicy) -> Action | Recovery:
        """The scenario's next recovery action, or what the agent's own policy decides."""
        cursor = self._cursor
        action: Action | None = _next_or(cursor.scenario.recovery_actions, cursor.recoveries, None)
        cursor.recoveries += 1
        return action or own.decide(failure, state)


def run_in_own_loop(work: Coroutine[Any, Any, T], instead: str) -> T:
    """The result of a coroutine, run in an event loop of its own.

    Raises:
        RunError: An event loop is running in this thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    work.close()
    raise RunError(f"an event loop is running here, as in an async test: write '{instead}'")


async def _wait_for(run: Run[Any, Any]) -> RunResult[Any]:
    return await run


async def _run_function(tool: Tool, context: Sequence[ToolContext[Any]], arguments: dict[str, Any]) -> Any:
    """What a tool's own function returns; a plain one runs in a thread, as in any run."""
    if tool.is_async:
        return await tool.function(*context, **arguments)
    value = await run_in_thread(tool.function, context[0] if context else None, arguments)
    if isasyncgen(value):
        return [each async for each in value]
    return await value if isawaitable(value) else value


def _probe(guard: Guard, run: Steppable) -> object:
    """What a guard answers, before its state's rows are evaluated in order."""
    try:
        built_in = any(guard is each for each in BUILT_IN_GUARDS)
        return guard(run if built_in else run.view())
    except Exception as error:  # of a row that may not be reached: a row before it holds
        return GuardError(error)


def _next_or(entries: Sequence[Any], used: int, default: Any) -> Any:
    """The next entry of a list of which so many are used, or the default if none is left."""
    return entries[used] if used < len(entries) else default


def _copy_error(error: BaseException) -> BaseException:
    """A copy to raise: the traceback of a raised error keeps the run alive, and the scenario keeps the error."""
    try:
        return copy.copy(error)
    except TypeError:  # the class cannot be constructed from its ``args``
        return error.with_traceback(None)


class _ObservedMachine(Machine):
    """The agent's machine, with each step passed to a callback."""

    def __init__(self, graph: Graph, step: Callable[[Machine, Steppable], Decision]) -> None:
        super().__init__(graph, BUILT_IN_GUARDS)
        self._on_step = step

    def step(self, run: Steppable) -> Decision:
        """Make one step through the callback."""
        return self._on_step(self, run)


class _ScriptHook:
    """The hook through which a simulation's side events happen.

    It is an object and no method of the simulator: the code of a hook is described with what it is bound to.
    """

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator

    def __call__(self, context: HookContext[Any]) -> HookDecision:
        """What the scenario has for this move."""
        return self._simulator.side_event_decision(context)


class _ScenarioModel:
    """The model of a simulated agent."""

    name = "scripted"

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator

    async def reply(self, request: ModelRequest) -> Reply:
        """The scenario's next reply."""
        return await self._simulator.next_reply(request)


class _ScenarioPolicy:
    """The recovery policy of a simulated agent: the scenario's actions, then the agent's own policy."""

    def __init__(self, simulator: Simulator, own: RecoveryPolicy) -> None:
        self._simulator, self._own = simulator, own

    def retry_budget(self, kind: FailureKind) -> int:
        """The value of the agent's own policy."""
        return self._own.retry_budget(kind)

    def backoff(self, kind: FailureKind, attempt: int) -> float:
        """The value of the agent's own policy."""
        return self._own.backoff(kind, attempt)

    def decide(self, failure: Failure, state: RunView) -> Action | Recovery:
        """The scenario's next action."""
        return self._simulator.choose_action(failure, state, self._own)
