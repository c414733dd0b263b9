"""A stage: an agent with its model, tools, policy, clock and store replaced by ones that follow a script.

The loop, the graph, the guards, the hooks and the gates are the agent's own. Every run is kept in a store
and taken up from there after each wait and each power cut.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import replace
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
from agentfsm.machine.engine import Decision, Machine, Steppable
from agentfsm.machine.graph import Graph, State
from agentfsm.runtime.context import Context, Effect
from agentfsm.runtime.hooks import AbortRun, AskApproval, Hook, HookContext, Observer, Verdict
from agentfsm.runtime.host import Host
from agentfsm.runtime.tools import Tool
from agentfsm.testing.models import ScriptedModel
from agentfsm.testing.playing import MOST_MOVES, Played, Playing, PowerCutError, Show, Started, TooLongError
from agentfsm.testing.scripts import QUIET, Said, Script

__all__ = ["Played", "Stage"]


class Stage:
    """An agent made ready to be played to. It serves one run at a time.

    Args:
        agent: The agent; it is left as it is.
        answer: What its model says where a script says nothing more.
        from_records: Whether runs are taken up from their suspension records alone, in place of the store.
    """

    def __init__(self, agent: Agent, *, answer: Any = "done", from_records: bool = False) -> None:
        self._agent = agent
        self._from_records = from_records
        self._answer = answer
        parts = agent.parts
        self._show = Show(Script(), frozenset(), 0)
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
        playing = self.open(script, watch=watch, most=most)
        while await playing.go_on():
            pass
        return playing.played

    def open(self, script: Script, *, watch: frozenset[int] = frozenset(), most: int = MOST_MOVES) -> Playing:
        """Begin to play a script, a wait or a move at a time; see ``perform``."""
        show = self._show = Show(script, watch, most)
        store = None if self._from_records else show.played.store
        host = Host(clock=show.played.clock, secret=b"a stage's secret", seed=1, store=store)
        agent = self._agent.made_of(replace(self._parts, host=host), script.guardrails)
        self._playing = Playing(agent, show, from_records=self._from_records)
        return self._playing

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
        if not isinstance(event, ToolStarted):
            return
        show, state = self._show, self._playing.state
        approved = any(c.approved for c in state.batch if c.call.id == event.call.id)
        show.played.started.append(Started(event.call.name, dict(event.call.arguments), approved))
        if show.moment("power").cut and not self._from_records:
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
