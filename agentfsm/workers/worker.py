"""``Worker``: a process that starts submitted runs and goes on with those that were cut off or are due.

The store says what is to be done with a run, the waker says when to look. Whatever is decided here is decided again
by whoever acquires the run in the store, so two workers that do the same thing at the same time do no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentfsm.agent.agent import Agent
from agentfsm.errors import AgentfsmError, ConfigurationError, RunExistsError, StaleLease, StoreError
from agentfsm.journal.load import pending_request
from agentfsm.journal.store import Head, Store
from agentfsm.loop.keys import Keyring
from agentfsm.runtime.run import Run, advance, hand_over
from agentfsm.workers.served_agents import ServedAgent, ServedAgents
from agentfsm.workers.submission import SUBMITTER, open_submission
from agentfsm.workers.sweep import attempts_without_progress, is_cut_off, stale_action
from agentfsm.workers.waker import Activation, Waker

__all__ = ["Worker", "WorkerSettings"]

logger = logging.getLogger("agentfsm.workers")

SUBMIT_WAIT_S = 0.1
"""Seconds between two attempts to begin a run that is still being listed by the process that submitted it."""

SUBMIT_ATTEMPTS = 50

UNHEALTHY_AFTER_SWEEPS, UNHEALTHY_AFTER_S = 10, 30.0
"""After how many sweeps, and how many seconds more, without one that succeeded a worker is not healthy."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """How a worker works.

    Attributes:
        sweep_s: Seconds between two searches of the store for runs that were cut off.
        settle_s: Seconds after which an activation that was delivered, and whose run nobody has acquired, counts as
            lost with its worker.
        max_attempts: How often a run is tried without progress before it is set aside.
        grace_s: Seconds for which effects that have begun may go on when the worker is to stop.

    Raises:
        ConfigurationError: A number is too small.
    """

    sweep_s: float = 0.5
    settle_s: float = 5.0
    max_attempts: int = 5
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        if not (self.sweep_s > 0 and self.settle_s > 0 and self.max_attempts >= 1 and self.grace_s >= 0):
            raise ConfigurationError(
                "sweep_s and settle_s are greater than 0, max_attempts is at least 1, and grace_s is not negative"
            )


@dataclass
class WorkerCounts:
    """What a worker has done since it started.

    Attributes:
        active: How many activations it is handling.
        handled: How many it has handled, by how that went.
        cut_off: How many runs of other processes it has found cut off.
    """

    active: int = 0
    handled: dict[str, int] = field(default_factory=dict[str, int])
    cut_off: int = 0


class Worker:
    """Serves agents from a store: starts what is submitted, and takes over what was cut off.

    Args:
        agents: The agents by name. They are put on the store.
        store: The store.
        waker: The engine that wakes runs.
        secret: The secret of all processes that write to the store.
        old_secrets: Secrets that they had before.
        settings: How it works.

    Raises:
        ConfigurationError: There is no agent, a name cannot be used, or a secret is too short.
    """

    def __init__(
        self,
        agents: Mapping[str, Agent[Any, Any]],
        store: Store,
        waker: Waker,
        *,
        secret: bytes,
        old_secrets: tuple[bytes, ...] = (),
        settings: WorkerSettings | None = None,
    ) -> None:
        from agentfsm.agent.config import with_host

        self._store = store
        self._waker = waker
        self._keyring = Keyring(secret, old_secrets)
        self._settings = WorkerSettings() if settings is None else settings
        self._agents = ServedAgents(
            {
                name: agent.with_config(
                    with_host(
                        agent.config,
                        replace(agent.config.host, store=store, secret=secret, old_secrets=old_secrets),
                    )
                )
                for name, agent in agents.items()
            }
        )
        self._stopping = asyncio.Event()
        self._serving = False
        self._swept_at = 0.0
        self._seen: dict[str, int] = {}
        self.counts = WorkerCounts()

    @property
    def queues(self) -> tuple[str, ...]:
        """The queues that it serves."""
        return self._agents.queues

    @property
    def ready(self) -> bool:
        """Whether it accepts activations, and is healthy."""
        return self._serving and not self._stopping.is_set() and self.healthy

    @property
    def healthy(self) -> bool:
        """Whether it starts, or has searched the store lately."""
        since_s = asyncio.get_running_loop().time() - self._swept_at
        return not self._serving or since_s < UNHEALTHY_AFTER_SWEEPS * self._settings.sweep_s + UNHEALTHY_AFTER_S

    # -- life -----------------------------------------------------------------------------------------

    async def run(self) -> bool:
        """Work until ``stop``, then let effects that have begun end, and hand over what is left of their runs.

        Returns:
            Whether all of them ended within the grace period. If not, end the process: what still runs is then cut
            off, as by a crash, and another worker takes it over.

        Raises:
            agentfsm.errors.StoreError: The store or the engine cannot be reached when the worker starts.
        """
        await self._store.heads("running")  # fail now, if it cannot be read
        await self._waker.serve(self.queues, self._deliver)
        self._serving, self._swept_at = True, asyncio.get_running_loop().time()
        logger.info("serving %s", ", ".join(self.queues))
        sweeps = asyncio.create_task(self._sweep_until_stopped())
        try:
            await self._stopping.wait()
        finally:
            sweeps.cancel()
            await asyncio.wait({sweeps})
        await self._waker.stop(self._settings.grace_s)
        return self.counts.active == 0

    def stop(self) -> None:
        """Have ``run`` return. Call it in the event loop of the worker."""
        logger.info("stopping: %d runs are being worked on", self.counts.active)
        self._stopping.set()

    # -- activations ----------------------------------------------------------------------------------

    async def _deliver(self, activation: Activation) -> str:
        """Handle one activation; a ``Deliver``."""
        self.counts.active += 1
        word = "failed"
        try:
            word = await self._handle(activation)
        except (RunExistsError, StaleLease):  # another worker was faster
            word = "outdated"
        except StoreError as error:  # the run stays as it is, and is found by a sweep
            logger.warning("run %s: %s", activation.run_id, error)
            word = "store failed"
        except AgentfsmError as error:
            word = await self._set_aside(activation, f"{type(error).__name__}: {error}")
        except Exception as error:  # of the embedding program's code
            logger.exception("run %s failed", activation.run_id)
            word = await self._set_aside(activation, f"{type(error).__name__}")
        finally:
            self.counts.active -= 1
            self.counts.handled[word] = self.counts.handled.get(word, 0) + 1
        return word

    async def _handle(self, activation: Activation) -> str:
        served = self._agents.by_queue(activation.queue)
        head = await self._store.head(activation.run_id)
        if activation.epoch == 0:
            return await self._begin(served, activation, head)
        if head is None or head.epoch != activation.epoch or head.owner is not None or head.status == "finished":
            return "outdated"
        if head.status == "suspended":
            return await self._go_on_when_due(served, head)
        records = await self._store.records(head.run_id)
        attempts = attempts_without_progress(records, head)
        forgiven = max(0, activation.retried_from - (head.epoch - attempts))
        if attempts - forgiven >= self._settings.max_attempts:
            return await self._set_aside(
                activation, f"it was cut off {attempts} times in a row at the same point: see agentfsm show"
            )
        return await self._drive(served, served.agent.resume(head.run_id))

    async def _begin(self, served: ServedAgent, activation: Activation, head: Head | None) -> str:
        if head is not None and head.seq:
            return "outdated"
        run_id = activation.run_id
        given = open_submission(activation.request, run_id, self._keyring)
        for _ in range(SUBMIT_ATTEMPTS):
            if head is None or head.owner != SUBMITTER:
                break
            await asyncio.sleep(SUBMIT_WAIT_S)
            head = await self._store.head(run_id)
        run = served.agent.run(
            given.prompt,
            session_id=given.session_id,
            run_id=run_id,
            actor=given.actor,
            tags=given.all_tags,
            metadata=given.metadata,
        )
        return await self._drive(served, run)

    async def _go_on_when_due(self, served: ServedAgent, head: Head) -> str:
        """Expire or escalate what a suspended run asks, if that is due; else wake it when it will be."""
        request = await pending_request(self._store, head)
        if request is None:
            return "outdated"
        now = served.agent.config.host.clock.time()
        if request.has_expired(now):
            return await self._drive(served, served.agent.dismiss(head.run_id, "nobody answered in time"))
        if request.quorum is not None and request.quorum.is_due(now):
            return await self._drive(served, served.agent.resume(head.run_id))
        return "not due"

    async def _drive(self, served: ServedAgent, run: Run[Any, Any]) -> str:
        """Advance a run until it has ended, waits for somebody, or the worker is to stop."""
        while not run.finished:
            if self._stopping.is_set():
                await hand_over(run)
                return "handed over"
            await advance(run)
        head = await self._store.head(run.run_id)
        if head is not None and head.status == "suspended":
            await self._wake_when_due(served, head)
            return "suspended"
        return "finished"

    async def _wake_when_due(self, served: ServedAgent, head: Head) -> None:
        request = await pending_request(self._store, head)
        if request is None:
            return
        escalates = None if request.quorum is None else request.quorum.escalates_at
        due = min((at for at in (request.expires_at, escalates) if at is not None), default=None)
        if due is not None:
            delay_s = max(0.0, due - served.agent.config.host.clock.time())
            await self._waker.wake(Activation(head.run_id, head.epoch, served.queue), delay_s=delay_s)

    async def _set_aside(self, activation: Activation, reason: str) -> str:
        logger.error("run %s is set aside: %s", activation.run_id, reason)
        with contextlib.suppress(StoreError):  # it stays unfinished, and is delivered again
            await self._waker.set_aside(activation, reason)
        return "set aside"

    # -- sweeps ---------------------------------------------------------------------------------------

    async def _sweep_until_stopped(self) -> None:
        loop = asyncio.get_running_loop()
        settled = loop.time()
        while True:
            try:
                await self._wake_cut_off_runs()
                self._swept_at = loop.time()
                if loop.time() - settled >= self._settings.settle_s:
                    await self._settle_activations()
                    settled = loop.time()
            except StoreError as error:  # the next sweep tries again
                logger.warning("the store or the queues cannot be searched: %s", error)
            await asyncio.sleep(self._settings.sweep_s)

    async def _wake_cut_off_runs(self) -> None:
        """Wake the runs that were left by their owner, if this worker can go on with them."""
        cut_off = [head for head in await self._store.heads("running") if is_cut_off(head)]
        seen = {head.run_id: head.epoch for head in cut_off}
        for head in cut_off:
            if self._seen.get(head.run_id) == head.epoch:
                continue
            served = None
            with contextlib.suppress(AgentfsmError):  # a run that cannot be read is nothing for a worker
                served = self._agents.for_run(head.run_id, await self._store.records(head.run_id))
            if served is not None and await self._waker.wake(Activation(head.run_id, head.epoch, served.queue)):
                self.counts.cut_off += 1
                logger.info("run %s was cut off in epoch %d and is taken over", head.run_id, head.epoch)
        self._seen = seen

    async def _settle_activations(self) -> None:
        """Settle the activations of workers that died before they acquired the run, or after they were done with it."""
        for each in await self._waker.unfinished(self._settings.settle_s):
            activation = each.activation
            match stale_action(activation, await self._store.head(activation.run_id)):
                case "redeliver" if each.deliveries >= self._settings.max_attempts:
                    await self._set_aside(activation, f"{each.deliveries} workers died before they began with it")
                    await self._waker.drop(activation)
                case "redeliver":
                    await self._waker.redeliver(activation)
                case "drop":
                    await self._waker.drop(activation)
                case _:
                    pass
