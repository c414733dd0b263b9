"""Runs the agents of a viewer: what was answered in it or elsewhere continues in this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from agentfsm.agent import Agent
from agentfsm.agent.recover import began_with
from agentfsm.errors import AgentfsmError, StaleLease
from agentfsm.journal.store import Store
from agentfsm.runtime.run import Run, advance, hand_over
from agentfsm.runtime.timeout import end_task

logger = logging.getLogger("agentfsm.viewer")

GRACE_S = 30.0
"""Seconds that effects get to end when the viewer stops."""


class AgentRunner:
    """Goes on with runs that were answered or cancelled, if exactly one of its agents fits them."""

    def __init__(self, store: Store, agents: Sequence[Agent[Any, Any]]) -> None:
        self._store, self.agents = store, tuple(agents)
        self._listening: asyncio.Task[None] | None = None
        self._working: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, Run[Any, Any]] = {}
        self._stopping = asyncio.Event()

    @property
    def authenticates(self) -> bool:
        """Whether one of its agents has a host that authenticates people."""
        return any(agent.config.host.authenticate is not None for agent in self.agents)

    def start(self) -> None:
        """Listen from now on, if there are agents and nobody listens yet."""
        if self.agents and (self._listening is None or self._listening.done()):
            self._listening = asyncio.create_task(self._listen(), name="agentfsm viewer")

    async def stop(self) -> None:
        """Stop listening, let effects that have begun end, and hand their runs over to other processes.

        A run whose effect takes longer than ``GRACE_S`` is cut off there, as by a crash.
        """
        self._stopping.set()
        if self._listening is not None:
            await end_task(self._listening)
        if self._working:
            await asyncio.wait(self._working.values(), timeout=GRACE_S)
        for run in list(self._runs.values()):
            with suppress(AgentfsmError):
                await hand_over(run)

    async def _listen(self) -> None:
        try:
            async with aclosing(self._store.signals.listen()) as signalled:
                async for run_id in signalled:
                    if run_id not in self._working:
                        task = asyncio.create_task(self._run_pending(run_id), name=f"agentfsm run {run_id}")
                        self._working[run_id] = task
                        task.add_done_callback(partial(self._forget, run_id))
        except AgentfsmError as error:  # the next request starts it again
            logger.warning("answers are not listened for: %s", error)

    def _forget(self, run_id: str, _: asyncio.Task[None]) -> None:
        self._working.pop(run_id, None)
        self._runs.pop(run_id, None)

    async def _run_pending(self, run_id: str) -> None:
        """Run what a run has to do, until it has nothing more."""
        try:
            while not self._stopping.is_set() and (run := await self._next(run_id)) is not None:
                self._runs[run_id] = run
                await advance(run, until=self._stopping.is_set)
                if not run.finished:
                    await hand_over(run)
        except StaleLease:
            pass  # another process was faster
        except AgentfsmError as error:
            logger.warning("run %s: %s", run_id, error)

    async def _next(self, run_id: str) -> Any:
        begun = await self._store.records(run_id, limit=1)
        if not begun:  # it is queued for a worker
            return None
        fitting = [agent for agent in self.agents if began_with(agent.config, begun[0])]
        if len(fitting) != 1:
            logger.warning(
                "run %s is left to another process: %d of the viewer's agents have its graph and its tools, not one",
                run_id,
                len(fitting),
            )
            return None
        return await fitting[0].next_run(run_id)
