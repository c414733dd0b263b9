"""A script being played, a wait or a move at a time; and what became of it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from agentfsm.agent import Agent
from agentfsm.core.events import Transitioned
from agentfsm.core.state import RunState
from agentfsm.errors import NoTransitionError, ReplyError
from agentfsm.journal.memory import MemoryStore
from agentfsm.machine.engine import Decision
from agentfsm.runtime.result import RunResult
from agentfsm.runtime.run import Run
from agentfsm.testing.clock import FakeClock
from agentfsm.testing.scripts import DISMISSED, EXPIRED, QUIET, Moment, Script

__all__ = ["MOST_MOVES", "RUN_ID", "Played", "Playing", "PowerCutError", "Show", "Started", "TooLongError"]

MOST_MOVES = 100_000
"""A run of more moves than this is not going to end, unless somebody says otherwise."""


RUN_ID = "played"
"""The id of every run that is played."""


class TooLongError(Exception):
    """The run has made more moves than it may; never leaves the stage."""


class PowerCutError(BaseException):
    """The process is gone: nothing of the run's own code catches this."""


@dataclass(frozen=True, slots=True)
class Started:
    """A tool that began to run: which, with what, and whether a person had allowed it."""

    tool: str
    arguments: Mapping[str, Any]
    approved: bool


@dataclass
class Played:
    """What became of a script.

    Attributes:
        decisions: Every move, across waits and power cuts.
        results: What the run came to at each wait, and at its end, unless it was left alone before.
        started: Every tool that began to run, in order.
        asked: For each guard that was to be watched, its answers by the number of moves made before.
        clock: The clock, as the run left it.
        store: The store with the run's journal.
    """

    decisions: list[Decision] = field(default_factory=list[Decision])
    results: list[RunResult] = field(default_factory=list[RunResult])
    started: list[Started] = field(default_factory=list[Started])
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


class Show:
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
        """How many moves were made."""
        return len(self.played.decisions)

    def moment(self, what: str) -> Moment:
        """What happens beside in this visit; each thing happens once."""
        key = (self.moves, what)
        if key in self.done:
            return QUIET
        self.done.add(key)
        return self.script.moments.get(self.moves, QUIET)


class Playing:
    """A script that is being played.

    Attributes:
        played: What became of it so far.
    """

    def __init__(self, agent: Agent, show: Show, *, from_records: bool) -> None:
        self._agent = agent
        self._show = show
        self._from_records = from_records
        self._ends = {s.name for s in agent.graph.states if s.final or s.waits}
        self.played = show.played
        self._run: Run | None = agent.run("play", run_id=RUN_ID)
        self._state = self._run.state

    @property
    def state(self) -> RunState:
        """What the run knows at this moment."""
        return self._state

    async def go_on(self) -> bool:
        """Play up to the next wait, power cut or end. False where the run has ended or is left alone."""
        return await self._guarded(self._to_the_end())

    async def move(self) -> bool:
        """Play one move. False where the run has ended or is left alone."""
        return await self._guarded(self._one_move())

    async def _guarded(self, going: Coroutine[Any, Any, bool]) -> bool:
        try:
            return await going
        except (TooLongError, NoTransitionError):  # the second: it waits for what this table knows nothing of
            return False
        except PowerCutError as fall:
            fall.__traceback__ = None  # whoever holds on to the error: not to what it fell through
            self._run = self._show.cancel = None  # its lease goes with it
            return True

    async def _to_the_end(self) -> bool:
        run = await self._begun()
        return self._came_to(await run)

    async def _one_move(self) -> bool:
        run = await self._begun()
        async for event in run:
            if isinstance(event, Transitioned) and event.target not in self._ends:
                return True
        return self._came_to(run.result)

    async def _begun(self) -> Run:
        if self._run is None:
            await asyncio.sleep(0)  # what the old process had handed over comes to its end
            self._let_go()
            self._run = self._agent.resume(RUN_ID)
        self._show.cancel, self._state = self._run.cancel, self._run.state
        return self._run

    def _let_go(self) -> None:
        """What the old process held is let go, its lease above all; the youngest first, since heaps can be large."""
        for generation in range(3):
            head = self.played.store.head(RUN_ID)
            if head is None or head.owner is None:
                return
            gc.collect(generation)

    def _came_to(self, result: RunResult) -> bool:
        """Keep what a run came to, and answer where it waits."""
        self.played.results.append(result)
        if self._agent.graph.spec(result.state).final:
            return False
        self._run = self._answered(result)
        self._state = self._run.state
        return True

    def _answered(self, result: RunResult) -> Run:
        show, outcome = self._show, result.outcome
        record: Any = getattr(outcome, "suspension_record", None) if self._from_records else RUN_ID
        answer: Any = show.script.people[show.waited] if show.waited < len(show.script.people) else DISMISSED
        show.waited += 1
        if isinstance(answer, Mapping):
            answer = cast("Mapping[str, Any]", answer).get(getattr(outcome, "kind", ""), DISMISSED)
        if answer is EXPIRED:
            show.played.clock.advance(result.run.guardrails.validity_s + 1)
        if answer is DISMISSED or answer is EXPIRED:
            return self._agent.dismiss(record)
        try:
            return self._agent.resume(record, answer)
        except ReplyError:  # the run waits for something else
            return self._agent.dismiss(record)
