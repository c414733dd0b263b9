"""The forced driver: guards answer as a path says, so that hooks, tools, stores and screens meet every path."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentfsm.agent import Agent
from agentfsm.core.events import UserInputRequested
from agentfsm.core.failures import Action, Failure, FailureKind
from agentfsm.core.state import RunState
from agentfsm.errors import RunError
from agentfsm.machine.engine import Decision, Machine, Steppable
from agentfsm.machine.graph import Graph, State, Transition
from agentfsm.runtime.replies import Allow, Answer, ItDidNotRun
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.run import Run
from agentfsm.testing.pathfinder import Path
from agentfsm.testing.stage import Played
from agentfsm.testing.witness import Walk

__all__ = ["force", "forcing"]

_ENDINGS = {"declared_done": "done", "declared_unable": "unable"}
_ANSWERS: Mapping[str, Answer] = {"approval": Allow(), "in_doubt": ItDidNotRun()}


def force(agent: Agent, path: Path, prompt: str = "go") -> Walk:
    """Make an agent take a path, in an event loop of its own; see ``forcing``.

    ::

        for path in paths(my_agent.graph, "transitions"):
            assert force(my_agent, path).result.state == "terminal"
    """
    return asyncio.run(forcing(agent, path, prompt))


async def forcing(agent: Agent, path: Path, prompt: str = "go") -> Walk:
    """Make an agent take a path, whatever its guards would say.

    Everything but the guards and the clock is the agent's own: model, tools, policy, hooks and store. A
    move to ``recover`` brings a ``Failure`` of its kind, as its detector would. Waits are answered with
    whatever lets the run go on, and no time passes.

    Args:
        agent: The agent; it is left as it is.
        path: The path, of the agent's graph.
        prompt: The user's message.

    Raises:
        RunError: The path is not one of the agent's graph.
    """
    machine = _Forced(agent.graph, path)
    played = Played(decisions=machine.decisions)
    host = replace(agent.parts.host, clock=played.clock)
    forced = agent.made_of(replace(agent.parts, machine=machine, host=host))
    run = forced.run(prompt)
    while True:
        result = await run
        played.results.append(result)
        if not isinstance(result.outcome, UserInputRequested):
            return Walk(path, None, played, None)
        run = _go_on(forced, result, machine.next_row)


def _go_on(agent: Agent, result: RunResult, row: Transition) -> Run:
    outcome: Any = result.outcome
    if row.name in ("cancelled", "expired"):
        return agent.dismiss(outcome.suspension_record)
    return agent.resume(outcome.suspension_record, _ANSWERS.get(outcome.kind, "go on"))


class _Forced(Machine):
    """A machine that asks no guard: it takes the rows of a path, one after the other."""

    def __init__(self, graph: Graph, path: Path) -> None:
        super().__init__(graph)
        self._path = path
        self.decisions: list[Decision] = []

    @property
    def next_row(self) -> Transition:
        """The row that is taken next."""
        place = len(self.decisions)
        if place >= len(self._path.rows):
            raise RunError(f"{self._path.id} does not lead to an end: {len(self._path.rows)} moves, and none is left")
        return self._path.rows[place]

    def would_move(self, trial: Steppable) -> bool:
        """Whatever comes, the path goes on."""
        return True

    def step(self, run: Steppable) -> Decision:
        """Take the path's next row."""
        wanted = self.next_row
        row = self.graph.transition(wanted.id)
        if (row.target, run.state) != (wanted.target, wanted.source):
            raise RunError(f"{self._path.id} is no path of this graph: {wanted} cannot be taken in {run.state!r}")
        rows = self.graph.rows(run.state)
        tried = tuple((r.name, False) for r in rows[: rows.index(row)])
        if isinstance(run, RunState):
            _arrange(row, run)
        decision = Decision(row, (*tried, (row.name, True)), _found(row, run))
        run.state = row.target
        self.decisions.append(decision)
        return decision


def _arrange(row: Transition, run: RunState) -> None:
    """Let the run know what the row's guard would have seen, so that it ends as such a run does."""
    if row.name == "cancelled":
        run.cancelled = run.cancelled or "forced"
    elif row.name == "aborted":
        run.abort(row.id, RuntimeError("forced"))
    elif row.source == State.CALL_LLM and row.guard is None:
        run.failure = None  # should the model have failed, it did not
    elif row.name in _ENDINGS:
        run.ending = _ENDINGS[row.name]
    elif row.source == State.RECOVER and row.name in Action.__members__:
        run.action = Action(row.name)


def _found(row: Transition, run: Steppable) -> Failure | bool:
    """What the row's detector would have found."""
    kind = {"runaway": "iteration_limit"}.get(row.name, row.name)
    if kind not in FailureKind.__members__ or kind == "aborted":
        return True
    if isinstance(run, RunState) and run.failure is not None and run.failure.kind == kind:
        return run.failure
    return Failure(kind=FailureKind(kind), explanation=f"forced: {row.id}")
