"""``RunWatcher``: finds the runs of a store that have something to do, and wakes them; what workers left is settled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace

from agentfsm.errors import AgentfsmError, StoreError
from agentfsm.journal.run_info import RunQuery
from agentfsm.journal.store import Store
from agentfsm.workers.served_agents import ServedAgent, ServedAgents
from agentfsm.workers.sweep import is_cut_off, stale_action
from agentfsm.workers.waker import Activation, Waker
from agentfsm.workers.worker_metrics import WorkerCounts
from agentfsm.workers.worker_settings import WorkerSettings

__all__ = ["RunWatcher"]

logger = logging.getLogger("agentfsm.workers")

WAKE_AGAIN_S = 10.0
"""Seconds after which a run that is still cut off is woken again."""

LOOK_EVERY_S = 30.0
"""Seconds between two looks at what nobody has acted on, what is set aside for a while, and what can be forgotten."""

OVERLOOKED_EVERY_S = 300.0
"""Seconds between two searches for requests that expired and have no timer."""

LISTEN_AGAIN_S = 1.0
"""Seconds to wait before answers are listened for again after an error."""


class RunWatcher:
    """Watches the runs of a store for a worker.

    Args:
        store: The store.
        waker: The engine that wakes runs.
        agents: The agents of the worker: other runs are left to other workers.
        settings: How the worker works.
        counts: What the worker is doing.

    Attributes:
        swept_at: When the store was last searched, as a time of the event loop.
    """

    def __init__(
        self, store: Store, waker: Waker, agents: ServedAgents, settings: WorkerSettings, counts: WorkerCounts
    ) -> None:
        self._store = store
        self._waker = waker
        self._agents = agents
        self._settings = settings
        self._counts = counts
        self._seen: dict[tuple[str, int], float] = {}
        self._done: set[str] = set()
        self.swept_at = 0.0

    # -- signals --------------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Wake the runs that are answered or cancelled from anywhere, until cancelled."""
        while True:
            try:
                async for run_id in self._store.signals.listen():
                    await self._wake_signalled_run(run_id)
            except StoreError as error:  # the engine or the store is away
                logger.warning("answers cannot be listened for: %s", error)
            await asyncio.sleep(LISTEN_AGAIN_S)

    async def _wake_signalled_run(self, run_id: str) -> None:
        head = await self._store.head(run_id)
        if head is None or head.owner is not None:  # its owner hears of it, too
            return
        if not head.seq:
            await self._waker.bring_forward(Activation(run_id, 0, "").key)
        elif (served := await self._agent_of(run_id)) is not None:
            await self._waker.wake(Activation(run_id, head.epoch, served.queue))

    async def _agent_of(self, run_id: str) -> ServedAgent | None:
        """The agent that can go on with a run; None if this worker has none."""
        with contextlib.suppress(AgentfsmError):  # a run that cannot be read is nothing for a worker
            return self._agents.for_run(run_id, await self._store.records(run_id))
        return None

    # -- sweeps ---------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Look for what workers and programs that died have left, until cancelled."""
        loop = asyncio.get_running_loop()
        settled = looked = loop.time()
        searched = float("-inf")
        while True:
            try:
                await self._wake_cut_off_runs()
                self.swept_at = loop.time()
                if loop.time() - settled >= self._settings.settle_s / 2:
                    await self._settle_activations()
                    settled = loop.time()
                if loop.time() - looked >= LOOK_EVERY_S:
                    await self._waker.forget(self._settings.forget_s)
                    await self._put_back_what_is_due()
                    for signal in await self._store.signals.pending():
                        await self._wake_signalled_run(signal.run_id)
                    looked = loop.time()
                if loop.time() - searched >= OVERLOOKED_EVERY_S:
                    await self._wake_expired_runs()
                    searched = loop.time()
            except StoreError as error:  # the next sweep tries again
                logger.warning("the store or the queues cannot be searched: %s", error)
            await asyncio.sleep(self._settings.sweep_s)

    async def _wake_expired_runs(self) -> None:
        """Wake the runs whose request has expired and has no timer: they began to wait in a program of yours."""
        query = RunQuery(status="suspended", parent="", limit=500)
        while True:
            page = await self._store.find_runs(query)
            for info in page.runs:
                if info.expires is None or info.expires > time.time():
                    continue
                head, served = await self._store.head(info.run_id), await self._agent_of(info.run_id)
                if head is not None and served is not None:
                    await self._waker.wake(Activation(info.run_id, head.epoch, served.queue, is_timer=True))
            if not page.next:
                return
            query = replace(query, after=page.next)

    async def _wake_cut_off_runs(self) -> None:
        """Wake the runs that were left by their owner, if this worker can go on with them."""
        now = asyncio.get_running_loop().time()
        running = await self._store.heads("running")
        cut_off = {(head.run_id, head.epoch) for head in running if is_cut_off(head)}
        cut_off = {each for each in cut_off if each[0] not in self._counts.runs}
        self._seen = {key: at for key, at in self._seen.items() if key in cut_off and now - at < WAKE_AGAIN_S}
        for run_id, epoch in sorted(cut_off - self._seen.keys()):
            self._seen[run_id, epoch] = now
            served = await self._agent_of(run_id)
            if served is not None and await self._waker.wake(Activation(run_id, epoch, served.queue)):
                self._counts.find_cut_off(served.queue)
                logger.info("run %s was cut off in epoch %d and is taken over", run_id, epoch)

    async def _settle_activations(self) -> None:
        """Settle the activations of workers that died before they acquired the run, or after they were done with it.

        What is to be finished is finished only if it still is at the next look: its worker may be about to do so.
        """
        seen, self._done = self._done, set()
        for each in await self._waker.unfinished(self._settings.settle_s):
            activation = each.activation
            if activation.run_id in self._counts.runs:
                continue
            action = stale_action(activation, await self._store.head(activation.run_id))
            if action == "redeliver" and each.deliveries >= 2 * self._settings.max_attempts:
                reason = f"{each.deliveries} workers died before they began with it"
                logger.error("run %s is set aside: %s", activation.run_id, reason)
                await self._waker.set_aside(activation, reason)
            elif action == "redeliver":
                await self._waker.redeliver(activation, self._settings.settle_s)
            elif action != "leave" and activation.key not in seen:
                self._done.add(activation.key)
            elif action != "leave":
                await self._waker.drop(activation)
                if action == "wake":
                    await self._wake_signalled_run(activation.run_id)

    async def _put_back_what_is_due(self) -> None:
        for each in await self._waker.list_set_aside():
            if each.until is not None and each.until <= time.time():
                await self._waker.put_back(each.activation.run_id)
