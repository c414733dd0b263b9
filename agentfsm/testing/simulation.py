"""Simulated runs: a scenario says what the outside world does, and the simulator runs an agent against it.

The simulator replaces the agent's model, tools, policy, clock and store; the graph, guards, hooks and approvals
are the agent's own. Every run is journaled, and resumed from its journal after each wait and each simulated crash.
"""

from __future__ import annotations

import asyncio
import copy
import gc
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import isawaitable
from typing import Any, cast

from agentfsm.agent import Agent
from agentfsm.errors import HumanReplyError, NoTransitionError
from agentfsm.journal.memory_store import MemoryStore
from agentfsm.loop.detectors import DEFAULT_RESULT
from agentfsm.loop.events import Event, ToolStarted, Transitioned
from agentfsm.loop.failures import Action, Failure, FailureKind
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.messages import Reply, Usage
from agentfsm.loop.model import ModelRequest
from agentfsm.loop.outcomes import StateResult
from agentfsm.loop.policy import RecoveryPolicy
from agentfsm.loop.state import RunState
from agentfsm.machine.engine import Decision, Machine, Steppable
from agentfsm.machine.graph import Graph, State
from agentfsm.runtime.context import Context, Effect
from agentfsm.runtime.hooks import AbortRun, AskApproval, Hook, HookContext, HookDecision, Observer
from agentfsm.runtime.host import Host
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.run import Run
from agentfsm.runtime.tools import Tool
from agentfsm.testing.fakes import FakeClock, ScriptedModel

__all__ = [
    "DISMISSED",
    "EXPIRED",
    "MAX_MOVES",
    "NO_SIDE_EVENT",
    "SIMULATION_RUN_ID",
    "Cursor",
    "ModelTurn",
    "MoveLimitError",
    "Scenario",
    "SideEvent",
    "SimulatedCrashError",
    "Simulation",
    "SimulationResult",
    "Simulator",
    "StartedTool",
]


class _NoReply:
    """What happens in place of an answer."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


DISMISSED = _NoReply("DISMISSED")
"""In place of a person's answer: the run is dismissed."""

EXPIRED = _NoReply("EXPIRED")
"""In place of a person's answer: nobody answers in time."""


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """What the model says in one call.

    Attributes:
        entry: As an entry of a ``ScriptedModel``: a text, calls, a ``Reply``, an exception to raise...
        tokens: Tokens that it uses up, beside what the entry says.
        cost_usd: USD that it costs.
    """

    entry: Any
    tokens: int = 0
    cost_usd: float = 0.0


@dataclass(frozen=True, slots=True)
class SideEvent:
    """What happens beside in one visit to a state.

    Attributes:
        duration_s: Seconds that the state's work takes.
        idle_s: Seconds in which nothing happens, just before it.
        cancel: Whether somebody cancels the run.
        abort: Whether a hook aborts it.
        needs_approval: Whether a hook asks for approval of the calls that are due.
        crash: Whether the power fails as a tool starts, and the run is taken up from its store.
        state_result: What the effect of a state of your own returns, where it is not asked.
    """

    duration_s: float = 0.0
    idle_s: float = 0.0
    cancel: bool = False
    abort: bool = False
    needs_approval: bool = False
    crash: bool = False
    state_result: Any = None


NO_SIDE_EVENT = SideEvent()
"""A visit in which nothing happens beside."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What the outside does, each in the order in which it is asked. Where a list is out, nothing special happens.

    Attributes:
        model_turns: The model's, one a call; then it gives a last answer.
        tool_results: The tools', one a call that runs; exceptions are raised; then all is fine.
        recovery_actions: The policy's, one a visit to ``recover``; then (and for None) the agent's own decides.
        human_replies: Their answers, one a suspension, or ``DISMISSED`` or ``EXPIRED``, or a mapping from what the
            run may wait for (``question``, ``limit``, ``approval``, ``in_doubt``) to one of these; then the
            run is dismissed, as it is where an answer does not fit.
        side_events: What happens beside, by the number of moves made before.
        guardrails: The run's limits, or None for the agent's own.
    """

    model_turns: Sequence[ModelTurn] = ()
    tool_results: Sequence[Any] = ()
    recovery_actions: Sequence[Action | None] = ()
    human_replies: Sequence[Any] = ()
    side_events: Mapping[int, SideEvent] = field(default_factory=dict[int, SideEvent])
    guardrails: AgentGuardrails | None = None


MAX_MOVES = 100_000
"""A run of more moves than this is not going to end, unless somebody says otherwise."""


SIMULATION_RUN_ID = "played"
"""The id of every run that is played."""


class MoveLimitError(Exception):
    """The run has made more moves than it may; never leaves the stage."""


class SimulatedCrashError(BaseException):
    """The process is gone: nothing of the run's own code catches this."""


@dataclass(frozen=True, slots=True)
class StartedTool:
    """A tool that began to run: which, with what, and whether a person had allowed it."""

    tool: str
    arguments: Mapping[str, Any]
    approved: bool


@dataclass
class SimulationResult:
    """What became of a script.

    Attributes:
        decisions: Every move, across waits and power cuts.
        run_results: What the run came to at each wait, and at its end, unless it was left alone before.
        started_tools: Every tool that began to run, in order.
        guard_results: For each guard that was to be watched, its answers by the number of moves made before.
        clock: The clock, as the run left it.
        store: The store with the run's journal.
    """

    decisions: list[Decision] = field(default_factory=list[Decision])
    run_results: list[RunResult] = field(default_factory=list[RunResult])
    started_tools: list[StartedTool] = field(default_factory=list[StartedTool])
    guard_results: dict[tuple[int, str], object] = field(default_factory=dict[tuple[int, str], object])
    clock: FakeClock = field(default_factory=FakeClock)
    store: MemoryStore = field(default_factory=MemoryStore)

    @property
    def run_result(self) -> RunResult:
        """What the run came to in the end."""
        return self.run_results[-1]

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the rows taken."""
        return tuple(d.transition.id for d in self.decisions)


class Cursor:
    """One script being played: how far each of its lists has come."""

    def __init__(self, scenario: Scenario, probe_moves: frozenset[int], max_moves: int) -> None:
        self.max_moves = max_moves
        self.scenario = scenario
        self.result = SimulationResult()
        self.probe_moves = probe_moves
        self.model_calls = self.tool_runs = self.recoveries = self.suspensions = 0
        self.delivered: set[tuple[int, str]] = set()
        self.cancel: Callable[[str], None] | None = None

    @property
    def move_count(self) -> int:
        """How many moves were made."""
        return len(self.result.decisions)

    def take_side_event(self, kind: str) -> SideEvent:
        """What happens beside in this visit; each thing happens once."""
        key = (self.move_count, kind)
        if key in self.delivered:
            return NO_SIDE_EVENT
        self.delivered.add(key)
        return self.scenario.side_events.get(self.move_count, NO_SIDE_EVENT)


class Simulation:
    """A script that is being played.

    Attributes:
        result: What became of it so far.
    """

    def __init__(self, agent: Agent, cursor: Cursor, *, from_records: bool) -> None:
        self._agent = agent
        self._cursor = cursor
        self._from_records = from_records
        self._stop_states = {s.name for s in agent.graph.states if s.final or s.waits}
        self.result = cursor.result
        self._run: Run | None = agent.run("play", run_id=SIMULATION_RUN_ID)
        self._state = self._run.run_state

    @property
    def state(self) -> RunState:
        """What the run knows at this moment."""
        return self._state

    async def advance(self) -> bool:
        """Play up to the next wait, power cut or end. False where the run has ended or is left alone."""
        return await self._catch_interruptions(self._advance_once())

    async def step(self) -> bool:
        """Play one move. False where the run has ended or is left alone."""
        return await self._catch_interruptions(self._step_once())

    async def _catch_interruptions(self, work: Coroutine[Any, Any, bool]) -> bool:
        try:
            return await work
        except (MoveLimitError, NoTransitionError):  # the second: it waits for what this table knows nothing of
            return False
        except SimulatedCrashError as fall:
            fall.__traceback__ = None  # whoever holds on to the error: not to what it fell through
            self._run = self._cursor.cancel = None  # its lease goes with it
            return True

    async def _advance_once(self) -> bool:
        run = await self._ensure_run()
        return self._record_result(await run)

    async def _step_once(self) -> bool:
        run = await self._ensure_run()
        async for event in run:
            if isinstance(event, Transitioned) and event.target not in self._stop_states:
                return True
        return self._record_result(run.result)

    async def _ensure_run(self) -> Run:
        if self._run is None:
            await asyncio.sleep(0)  # what the old process had handed over comes to its end
            self._release_lease()
            self._run = self._agent.resume(SIMULATION_RUN_ID)
        self._cursor.cancel, self._state = self._run.cancel, self._run.run_state
        return self._run

    def _release_lease(self) -> None:
        """What the old process held is let go, its lease above all; the youngest first, since heaps can be large."""
        for generation in range(3):
            head = self.result.store.head(SIMULATION_RUN_ID)
            if head is None or head.owner is None:
                return
            gc.collect(generation)

    def _record_result(self, result: RunResult) -> bool:
        """Keep what a run came to, and answer where it waits."""
        self.result.run_results.append(result)
        if self._agent.graph.spec(result.state).final:
            return False
        self._run = self._resume_or_dismiss(result)
        self._state = self._run.run_state
        return True

    def _resume_or_dismiss(self, result: RunResult) -> Run:
        show, outcome = self._cursor, result.outcome
        record: Any = getattr(outcome, "suspension_record", None) if self._from_records else SIMULATION_RUN_ID
        answer: Any = (
            show.scenario.human_replies[show.suspensions]
            if show.suspensions < len(show.scenario.human_replies)
            else DISMISSED
        )
        show.suspensions += 1
        if isinstance(answer, Mapping):
            answer = cast("Mapping[str, Any]", answer).get(getattr(outcome, "kind", ""), DISMISSED)
        if answer is EXPIRED:
            show.result.clock.advance(result.run_state.guardrails.validity_s + 1)
        if answer is DISMISSED or answer is EXPIRED:
            return self._agent.dismiss(record)
        try:
            return self._agent.resume(record, answer)
        except HumanReplyError:  # the run waits for something else
            return self._agent.dismiss(record)


class Simulator:
    """An agent made ready to be played to. It serves one run at a time.

    Args:
        agent: The agent; it is left as it is.
        final_answer: What its model says where a script says nothing more.
        from_records: Whether runs are taken up from their suspension records alone, in place of the store.
    """

    def __init__(self, agent: Agent, *, final_answer: Any = "done", from_records: bool = False) -> None:
        self._agent = agent
        self._from_records = from_records
        self._final_answer = final_answer
        parts = agent.config
        self._cursor = Cursor(Scenario(), frozenset(), 0)
        graph = parts.machine.graph
        doors = [s.name for s in graph.states if not (s.final or s.waits)]
        hooks = {
            door: (Hook(door, self._script_hook, fail_open=False, name="script"), *parts.hooks.get(door, ()))
            for door in doors
        }
        self._config = replace(
            parts,
            machine=_ObservedMachine(graph, self._probed_step),
            model=_ScenarioModel(self),
            tools={name: self._scripted_tool(tool) for name, tool in parts.tools.items()},
            policy=_ScenarioPolicy(self, parts.policy),
            hooks={**parts.hooks, **hooks},
            observers=(*parts.observers, Observer(self._on_event)),
            effects={name: self._with_scripted_result(name, effect) for name, effect in parts.effects.items()},
        )

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self._config.machine.graph

    def run_sync(
        self, scenario: Scenario, *, probe_moves: frozenset[int] = frozenset(), max_moves: int = MAX_MOVES
    ) -> SimulationResult:
        """Play a script to its end, in an event loop of its own; see ``perform``."""
        return asyncio.run(self.run(scenario, probe_moves=probe_moves, max_moves=max_moves))

    async def run(
        self, scenario: Scenario, *, probe_moves: frozenset[int] = frozenset(), max_moves: int = MAX_MOVES
    ) -> SimulationResult:
        """Play a script to its end.

        Args:
            scenario: What the outside does.
            probe_moves: Numbers of moves; before each of these, every guard of the state is asked, for the record.
            max_moves: After so many moves the run is left alone, ended or not.
        """
        playing = self.start(scenario, probe_moves=probe_moves, max_moves=max_moves)
        while await playing.advance():
            pass
        return playing.result

    def start(
        self, scenario: Scenario, *, probe_moves: frozenset[int] = frozenset(), max_moves: int = MAX_MOVES
    ) -> Simulation:
        """Begin to play a script, a wait or a move at a time; see ``perform``."""
        show = self._cursor = Cursor(scenario, probe_moves, max_moves)
        store = None if self._from_records else show.result.store
        host = Host(clock=show.result.clock, secret=b"a stage's secret", seed=1, store=store)
        agent = self._agent.with_config(replace(self._config, host=host), scenario.guardrails)
        self._simulation = Simulation(agent, show, from_records=self._from_records)
        return self._simulation

    # -- what the run meets ---------------------------------------------------------------------------

    def _script_hook(self, context: HookContext) -> HookDecision:
        show = self._cursor
        moment = show.take_side_event("door")
        show.result.clock.advance(moment.duration_s)
        if moment.cancel and show.cancel is not None:
            show.cancel("cancelled by the script")
        if moment.abort:
            return AbortRun("aborted by the script")
        beside = show.scenario.side_events.get(show.move_count, NO_SIDE_EVENT)
        return AskApproval() if beside.needs_approval and context.call is not None else None

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, ToolStarted):
            return
        show, state = self._cursor, self._simulation.state
        approved = any(c.approved for c in state.batch if c.call.id == event.call.id)
        show.result.started_tools.append(StartedTool(event.call.name, dict(event.call.arguments), approved))
        if show.take_side_event("power").crash and not self._from_records:
            raise SimulatedCrashError

    def _probed_step(self, machine: Machine, run: Steppable) -> Decision:
        show = self._cursor
        if show.move_count >= show.max_moves:
            raise MoveLimitError
        if show.move_count in show.probe_moves:
            for row in machine.graph.rows(run.state):
                if row.guard is not None:
                    show.result.guard_results[show.move_count, row.id] = row.guard(run)
        decision = Machine.step(machine, run)
        show.result.decisions.append(decision)
        show.result.clock.advance(show.scenario.side_events.get(show.move_count, NO_SIDE_EVENT).idle_s)
        return decision

    def _with_scripted_result(self, name: str, effect: Effect) -> Effect:
        if name in set(State):
            return effect

        async def noting(context: Context) -> Any:
            notes = self._cursor.take_side_event("notes").state_result
            if notes is not None:
                return StateResult(notes)
            outcome = effect(context)
            return await outcome if isawaitable(outcome) else outcome

        return noting

    def _scripted_tool(self, tool: Tool) -> Tool:
        if tool.control is not None:
            return tool

        async def run(**arguments: Any) -> Any:
            show = self._cursor
            result = (
                show.scenario.tool_results[show.tool_runs]
                if show.tool_runs < len(show.scenario.tool_results)
                else DEFAULT_RESULT
            )
            show.tool_runs += 1
            if isinstance(result, BaseException):
                raise _copy_error(result)
            return result

        return replace(tool, function=run, is_async=True, takes_context=False, delegate=None)

    async def next_reply(self, request: ModelRequest) -> Reply:
        """The model's next reply."""
        show = self._cursor
        said = (
            show.scenario.model_turns[show.model_calls]
            if show.model_calls < len(show.scenario.model_turns)
            else ModelTurn(self._final_answer)
        )
        show.model_calls += 1
        if isinstance(said.entry, BaseException):
            raise _copy_error(
                said.entry
            )  # named by no variable here, or this frame and the error would hold each other
        reply = await ScriptedModel([said.entry]).reply(request)
        return replace(reply, usage=reply.usage + Usage(output_tokens=said.tokens, cost_usd=said.cost_usd))

    def choose_action(self, failure: Failure, state: RunState, own: RecoveryPolicy) -> Action:
        """The policy's next decision."""
        show = self._cursor
        action = (
            show.scenario.recovery_actions[show.recoveries]
            if show.recoveries < len(show.scenario.recovery_actions)
            else None
        )
        show.recoveries += 1
        return action or own.decide(failure, state)


def _copy_error(error: BaseException) -> BaseException:
    """A copy to raise: what is raised holds on to the run that it was raised in."""
    try:
        return copy.copy(error)
    except TypeError:  # its class cannot be made again from its arguments
        return error.with_traceback(None)


class _ObservedMachine(Machine):
    """The agent's machine, with somebody who watches each step."""

    def __init__(self, graph: Graph, step: Callable[[Machine, Steppable], Decision]) -> None:
        super().__init__(graph)
        self._on_step = step

    def step(self, run: Steppable) -> Decision:
        """As a machine does, watched."""
        return self._on_step(self, run)


class _ScenarioModel:
    """The model of a stage."""

    name = "scripted"

    def __init__(self, stage: Simulator) -> None:
        self._simulator = stage

    async def reply(self, request: ModelRequest) -> Reply:
        """The script's next reply."""
        return await self._simulator.next_reply(request)


class _ScenarioPolicy:
    """The policy of a stage: the script's decisions, then the agent's own."""

    def __init__(self, stage: Simulator, own: RecoveryPolicy) -> None:
        self._simulator, self._own = stage, own

    def retry_budget(self, kind: FailureKind) -> int:
        """As the agent's own."""
        return self._own.retry_budget(kind)

    def backoff(self, kind: FailureKind, attempt: int) -> float:
        """As the agent's own."""
        return self._own.backoff(kind, attempt)

    def decide(self, failure: Failure, state: RunState) -> Action:
        """The script's next decision."""
        return self._simulator.choose_action(failure, state, self._own)
