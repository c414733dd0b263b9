"""A stage: an agent with its model, tools, policy, clock and store replaced by ones that follow a script.

The loop, the graph, the guards, the hooks and the gates are the agent's own. Every run is kept in a store
and taken up from there after each wait and each power cut.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import isawaitable
from typing import Any

from agentfsm.agent import Agent
from agentfsm.core.events import Event, ToolStarted
from agentfsm.core.examples import FINE
from agentfsm.core.failures import Action, Failure, FailureKind
from agentfsm.core.messages import Reply, Usage
from agentfsm.core.model import ModelRequest
from agentfsm.core.outcomes import Noted
from agentfsm.core.policy import RecoveryPolicy
from agentfsm.core.state import RunState
from agentfsm.errors import NoTransitionError, ReplyError
from agentfsm.journal.memory import MemoryStore
from agentfsm.machine.engine import Decision, Machine, Steppable
from agentfsm.machine.graph import Graph, State
from agentfsm.runtime.context import Context, Effect
from agentfsm.runtime.hooks import AbortRun, AskApproval, Hook, HookContext, Observer, Verdict
from agentfsm.runtime.host import Host
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.run import Run
from agentfsm.runtime.tools import Tool
from agentfsm.testing.clock import FakeClock
from agentfsm.testing.models import ScriptedModel
from agentfsm.testing.scripts import DISMISSED, EXPIRED, QUIET, Moment, Said, Script

__all__ = ["Played", "Stage"]

MOST_MOVES = 100_000
"""A run of more moves than this is not going to end, unless somebody says otherwise."""


class TooLongError(Exception):
    """The run has made more moves than it may; never leaves the stage."""


class PowerCutError(BaseException):
    """The process is gone: nothing of the run's own code catches this."""


@dataclass
class Played:
    """What became of a script.

    Attributes:
        decisions: Every move, across waits and power cuts.
        results: What the run came to at each wait, and at its end, unless it was left alone before.
        asked: For each guard that was to be watched, its answers by the number of moves made before.
        clock: The clock, as the run left it.
        store: The store with the run's journal.
    """

    decisions: list[Decision] = field(default_factory=list[Decision])
    results: list[RunResult] = field(default_factory=list[RunResult])
    asked: dict[tuple[int, str], object] = field(default_factory=dict[tuple[int, str], object])
    clock: FakeClock = field(default_factory=FakeClock)
    store: MemoryStore = field(default_factory=MemoryStore)

    @property
    def result(self) -> RunResult:
        """What the run came to in the end."""
        return self.results[-1]

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the rows taken."""
        return tuple(d.transition.id for d in self.decisions)


class _Show:
    """One script being played: how far each of its lists has come."""

    def __init__(self, script: Script, watch: frozenset[int], most: int) -> None:
        self.most = most
        self.script = script
        self.played = Played()
        self.watch = watch
        self.heard = self.ran = self.decided = self.waited = 0
        self.done: set[tuple[int, str]] = set()
        self.cancel: Callable[[str], None] | None = None

    @property
    def moves(self) -> int:
        return len(self.played.decisions)

    def moment(self, what: str) -> Moment:
        """What happens beside in this visit; each thing happens once."""
        key = (self.moves, what)
        if key in self.done:
            return QUIET
        self.done.add(key)
        return self.script.moments.get(self.moves, QUIET)


class Stage:
    """An agent made ready to be played to. It serves one run at a time.

    Args:
        agent: The agent; it is left as it is.
        answer: What its model says where a script says nothing more.
        guardrails: Its limits, where a script brings none.
    """

    def __init__(self, agent: Agent, *, answer: Any = "done") -> None:
        self._agent = agent
        self._answer = answer
        parts = agent.parts
        self._show = _Show(Script(), frozenset(), 0)
        graph = parts.machine.graph
        doors = [s.name for s in graph.states if not (s.final or s.waits)]
        hooks = {
            door: (Hook(door, self._at_door, fail_open=False, name="script"), *parts.hooks.get(door, ()))
            for door in doors
        }
        self._parts = replace(
            parts,
            machine=_Watched(graph, self._step),
            model=_Model(self),
            tools={name: self._scripted(tool) for name, tool in parts.tools.items()},
            policy=_Policy(self, parts.policy),
            hooks={**parts.hooks, **hooks},
            observers=(*parts.observers, Observer(self._see)),
            effects={name: self._noting(name, effect) for name, effect in parts.effects.items()},
        )

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self._parts.machine.graph

    def play(self, script: Script, *, watch: frozenset[int] = frozenset(), most: int = MOST_MOVES) -> Played:
        """Play a script to its end, in an event loop of its own; see ``perform``."""
        return asyncio.run(self.perform(script, watch=watch, most=most))

    async def perform(self, script: Script, *, watch: frozenset[int] = frozenset(), most: int = MOST_MOVES) -> Played:
        """Play a script to its end.

        Args:
            script: What the outside does.
            watch: Numbers of moves; before each of these, every guard of the state is asked, for the record.
            most: After so many moves the run is left alone, ended or not.
        """
        show = self._show = _Show(script, watch, most)
        played = show.played
        host = Host(clock=played.clock, secret=b"a stage's secret", seed=1, store=played.store)
        agent = self._agent.made_of(replace(self._parts, host=host), script.guardrails)
        run: Run | None = agent.run("play", run_id="played")
        while True:
            if run is None:
                await asyncio.sleep(0)  # what the old process had handed over comes to its end
                run = agent.resume("played")
            show.cancel = run.cancel
            try:
                result = await run
            except (TooLongError, NoTransitionError):  # the second: it waits for what this table knows nothing of
                return played
            except PowerCutError:
                run = show.cancel = None  # its lease goes with it
                continue
            played.results.append(result)
            if self.graph.spec(result.state).final:
                return played
            del run
            run = self._go_on(agent, result)

    def _go_on(self, agent: Agent, result: RunResult) -> Run:
        show = self._show
        answer: Any = show.script.people[show.waited] if show.waited < len(show.script.people) else DISMISSED
        show.waited += 1
        if answer is DISMISSED:
            return agent.dismiss("played")
        if answer is EXPIRED:
            show.played.clock.advance(result.run.guardrails.validity_s + 1)
            return agent.dismiss("played")
        try:
            return agent.resume("played", answer)
        except ReplyError:  # the run waits for something else: it has left its path
            return agent.dismiss("played")

    # -- what the run meets ---------------------------------------------------------------------------

    def _at_door(self, seen: HookContext) -> Verdict:
        show = self._show
        moment = show.moment("door")
        show.played.clock.advance(moment.took_s)
        if moment.cancel and show.cancel is not None:
            show.cancel("cancelled by the script")
        if moment.abort:
            return AbortRun("aborted by the script")
        beside = show.script.moments.get(show.moves, QUIET)
        return AskApproval() if beside.asks and seen.call is not None else None

    def _see(self, event: Event) -> None:
        if isinstance(event, ToolStarted) and self._show.moment("power").cut:
            raise PowerCutError

    def _step(self, machine: Machine, run: Steppable) -> Decision:
        show = self._show
        if show.moves >= show.most:
            raise TooLongError
        if show.moves in show.watch:
            for row in machine.graph.rows(run.state):
                if row.guard is not None:
                    show.played.asked[show.moves, row.id] = row.guard(run)
        decision = Machine.step(machine, run)
        show.played.decisions.append(decision)
        show.played.clock.advance(show.script.moments.get(show.moves, QUIET).silent_s)
        return decision

    def _noting(self, name: str, effect: Effect) -> Effect:
        if name in set(State):
            return effect

        async def noting(context: Context) -> Any:
            notes = self._show.moment("notes").notes
            if notes is not None:
                return Noted(notes)
            outcome = effect(context)
            return await outcome if isawaitable(outcome) else outcome

        return noting

    def _scripted(self, tool: Tool) -> Tool:
        if tool.control is not None:
            return tool

        async def run(**arguments: Any) -> Any:
            show = self._show
            result = show.script.results[show.ran] if show.ran < len(show.script.results) else FINE
            show.ran += 1
            if isinstance(result, BaseException):
                raise _fresh(result)
            return result

        return replace(tool, function=run, is_async=True, takes_context=False, delegate=None)

    async def say(self, request: ModelRequest) -> Reply:
        """The model's next reply."""
        show = self._show
        said = show.script.replies[show.heard] if show.heard < len(show.script.replies) else Said(self._answer)
        show.heard += 1
        if isinstance(said.entry, BaseException):
            raise _fresh(said.entry)  # named by no variable here, or this frame and the error would hold each other
        reply = await ScriptedModel([said.entry]).reply(request)
        return replace(reply, usage=reply.usage + Usage(output_tokens=said.tokens, cost_usd=said.cost_usd))

    def decide(self, failure: Failure, state: RunState, own: RecoveryPolicy) -> Action:
        """The policy's next decision."""
        show = self._show
        action = show.script.actions[show.decided] if show.decided < len(show.script.actions) else None
        show.decided += 1
        return action or own.decide(failure, state)


def _fresh(error: BaseException) -> BaseException:
    """A copy to raise: what is raised holds on to the run that it was raised in."""
    try:
        return copy.copy(error)
    except TypeError:  # its class cannot be made again from its arguments
        return error.with_traceback(None)


class _Watched(Machine):
    """The agent's machine, with somebody who watches each step."""

    def __init__(self, graph: Graph, step: Callable[[Machine, Steppable], Decision]) -> None:
        super().__init__(graph)
        self._watched = step

    def step(self, run: Steppable) -> Decision:
        """As a machine does, watched."""
        return self._watched(self, run)


class _Model:
    """The model of a stage."""

    name = "scripted"

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    async def reply(self, request: ModelRequest) -> Reply:
        """The script's next reply."""
        return await self._stage.say(request)


class _Policy:
    """The policy of a stage: the script's decisions, then the agent's own."""

    def __init__(self, stage: Stage, own: RecoveryPolicy) -> None:
        self._stage, self._own = stage, own

    def retry_budget(self, kind: FailureKind) -> int:
        """As the agent's own."""
        return self._own.retry_budget(kind)

    def backoff(self, kind: FailureKind, attempt: int) -> float:
        """As the agent's own."""
        return self._own.backoff(kind, attempt)

    def decide(self, failure: Failure, state: RunState) -> Action:
        """The script's next decision."""
        return self._stage.decide(failure, state, self._own)
