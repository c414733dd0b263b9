"""``Worker``: a process that starts submitted runs and continues those that were cut off or are due.

The store says what is to be done with a run, the waker says when to look. Whatever is decided here is decided again
by whoever acquires the run in the store, so two workers that do the same thing at the same time do no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from traceback import format_exc
from typing import Any

from agentfsm.agent.agent import Agent
from agentfsm.agent.recover import next_run
from agentfsm.errors import AgentfsmError, JournalError, RunExistsError, StaleLease, StoreError, UnknownRunError
from agentfsm.journal.hash_chain import foreign_key_id
from agentfsm.journal.load import pending_request
from agentfsm.journal.maintenance import require_clock
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.signals import Signal, read_signals
from agentfsm.journal.store import Head, Store
from agentfsm.loop.keys import Keyring
from agentfsm.runtime.context import LongWait
from agentfsm.runtime.run import Run, advance, hand_over
from agentfsm.runtime.timeout import end_task
from agentfsm.workers.notices import NOTICES, Notices
from agentfsm.workers.run_watcher import (
    RunWatcher,
    attempts_without_progress,
    due_at,
    progress_below,
    require_secret,
)
from agentfsm.workers.served_agents import ServedAgent, ServedAgents
from agentfsm.workers.spend_limits import SpendLimits
from agentfsm.workers.submission import SUBMITTER, open_submission
from agentfsm.workers.waker import Activation, Waker
from agentfsm.workers.worker_metrics import WorkerCounts, WorkerMetrics
from agentfsm.workers.worker_settings import WorkerSettings

logger = logging.getLogger("agentfsm.workers")

SUBMIT_WAIT_S = 0.1
"""Seconds between two attempts to begin a run that is still being listed by the process that submitted it."""

SUBMIT_ATTEMPTS = 50

LONGEST_WAIT_S = 60.0
"""Seconds for which a run is held that waits before it repeats something; a longer wait frees the worker."""

HAND_OVER_S = 5.0
"""Seconds after the grace period for which a worker waits until its runs are handed over and all that uses the store
and the queues has ended: the server may be away, or not answer."""

LONGEST_SKEW_S = 60.0
"""Seconds for which a timer that came too early is waited for in the worker."""

A_MOMENT_S = 0.001
"""Seconds to wait longer than until a request expires: at that very time it can still be answered."""

SPENT_AGAIN_S = 60.0
"""Seconds for which a run is set aside because of a spend limit, before that is checked again."""

UNHEALTHY_AFTER_SWEEPS, UNHEALTHY_AFTER_S = 10, 30.0
"""After how many sweeps, and how many seconds more, without one that succeeded a worker is not healthy."""


class Worker:
    """Serves agents from a store: starts what is submitted, and takes over what was cut off.

    Args:
        agents: The agents by name. They are put on the store.
        store: The store.
        waker: The engine that wakes runs.
        secret: The secret of all processes that write to the store.
        old_secrets: Secrets that they had before.
        settings: How it works.
        metrics: What it tells OpenTelemetry; by default nothing.

    Raises:
        ConfigurationError: There is no agent, a name cannot be used, or a secret is empty.
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
        metrics: WorkerMetrics | None = None,
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
        self._spend_limits = SpendLimits(self._settings.spend_limits, store)
        self._stopping = asyncio.Event()
        self._serving = False
        self._runs: set[Run[Any, Any]] = set()  # which this worker advances; two may be of one run, until one gets it
        self.counts = WorkerCounts(metrics)
        own = self._settings
        self._notices = (
            None
            if own.notify is None
            else Notices(store, waker, own.notify, remind_after_s=own.remind_after_s, viewer_url=own.viewer_url)
        )
        self._watcher = RunWatcher(store, waker, self._agents, self._settings, self.counts, self._notices)

    @property
    def queues(self) -> tuple[str, ...]:
        """The queues that it serves."""
        return self._agents.queues if self._notices is None else (*self._agents.queues, NOTICES)

    @property
    def ready(self) -> bool:
        """Whether it accepts activations, and is healthy."""
        return self._serving and not self._stopping.is_set() and self.healthy

    @property
    def healthy(self) -> bool:
        """Whether it starts, or has searched the store lately."""
        since_s = asyncio.get_running_loop().time() - self._watcher.swept_at
        return not self._serving or since_s < UNHEALTHY_AFTER_SWEEPS * self._settings.sweep_s + UNHEALTHY_AFTER_S

    # -- life -----------------------------------------------------------------------------------------

    async def run(self) -> bool:
        """Work until ``stop``, then let effects that have begun end, and hand over what is left of their runs.

        A cancellation, as of ``asyncio.run`` at Ctrl-C, stops it in the same way before it takes effect.

        Returns:
            Whether all of them ended within the grace period, and nothing waits for a server that does not answer. If
            not, end the process: what still runs is then cut off, as by a crash, and another worker takes it over.

        Raises:
            ConfigurationError: The runs of the store were written under another secret than the worker has, or the
                clock of this machine is far from the server's.
            agentfsm.errors.StoreFormatError: A later release has migrated the store. The worker has stopped.
            agentfsm.errors.StoreError: The store or the engine cannot be reached when the worker starts.
        """
        await require_clock(self._store.maintenance)
        await require_secret(self._store, self._keyring)
        await self._waker.serve(self.queues, self._deliver)
        self._serving = True
        self._watcher.swept_at = asyncio.get_running_loop().time()
        logger.info("serving %s", ", ".join(self.queues))
        sweeping = asyncio.create_task(self._watcher.sweep())
        sweeping.add_done_callback(lambda _: self._stopping.set())
        watches = {sweeping, asyncio.create_task(self._watcher.listen())}
        try:
            await self._stopping.wait()
        finally:
            self._stopping.set()
            grace_s = self._settings.grace_s if self.counts.active else 0.0
            ending = asyncio.gather(*map(end_task, watches), self._waker.stop(grace_s))
            await asyncio.wait({ending}, timeout=grace_s)
            handed_over, _ = await asyncio.gather(
                _hand_over_all(self._runs), asyncio.wait({ending}, timeout=HAND_OVER_S)
            )
            if lost := sorted(self.counts.runs.keys() - handed_over):
                logger.warning(
                    "runs such as %s (%d in all) were not handed over in time, and are left as by a crash: another "
                    "worker takes them over when this process has ended",
                    lost[0],
                    len(lost),
                )
            if ending.done():
                ending.result()
        if sweeping.done() and not sweeping.cancelled():
            sweeping.result()
        return self.counts.active == 0 and ending.done()

    def stop(self) -> None:
        """Have ``run`` return. Call it in the event loop of the worker."""
        logger.info("stopping; runs that are still being worked on: %d", self.counts.active)
        self._stopping.set()

    # -- activations ----------------------------------------------------------------------------------

    async def _deliver(self, activation: Activation) -> str:
        """Handle one activation; a ``Deliver``."""
        self.counts.begin(activation)
        word, began = "failed", time.monotonic()
        try:
            word = await self._attempt(activation)
            is_left = word in ("handed over", "store failed") or (self._stopping.is_set() and word != "set aside")
            if is_left and activation.epoch == 0 and not await self._has_begun(activation.run_id):
                word = await self._set_aside(activation, "its worker did not begin with it", time.time())
        finally:
            self.counts.end(activation, word, time.monotonic() - began)
        return word

    async def _has_begun(self, run_id: str) -> bool:
        """Whether a submitted run is not in the queue any more: a sweep finds it if it was cut off since."""
        try:
            head = await self._store.head(run_id)
        except StoreError:
            return False
        return head is None or head.seq > 0 or head.owner is not None

    async def _attempt(self, activation: Activation) -> str:
        try:
            return await self._handle(activation)
        except (RunExistsError, StaleLease):  # another worker was faster, or this one has stopped
            return "outdated"
        except StoreError as error:  # the run stays as it is, and is found by a sweep
            logger.warning("run %s: %s", activation.run_id, error)
            return "store failed"
        except AgentfsmError as error:
            if await self._lacks_secret(activation.run_id):
                return "outdated"  # it waits for a worker that has it
            return await self._set_aside(activation, self._agents.mask(f"{type(error).__name__}: {error}"))
        except Exception as error:  # of the embedding program's code
            logger.error("run %s failed\n%s", activation.run_id, self._agents.mask(format_exc()))
            return await self._set_aside(activation, f"{type(error).__name__}")

    async def _handle(self, activation: Activation) -> str:
        if activation.notice and self._notices is not None:
            return await self._notices.deliver(activation)
        served = self._agents.by_queue(activation.queue)
        if activation.epoch == 0:
            return await self._begin(served, activation, await self._store.head(activation.run_id))
        try:
            head, begun, cancellation = await self._read(activation.run_id)
        except UnknownRunError:  # it was purged
            return "outdated"
        if head is None or head.epoch != activation.epoch or head.owner is not None:
            return "outdated"
        if not begun or self._agents.for_run(head, begun[0]) is not served:
            return "outdated"  # queues are not sealed: what is in one does not say which agent a run belongs to
        if head.status == "finished":
            await next_run(served.agent.config, head.run_id, lazily=True)  # removes what was sent to it too late
            return "outdated"
        if activation.is_timer and head.status == "suspended":
            return await self._act_when_due(served, head)
        if head.status == "running" and cancellation is None:
            if reason := await self._reason_to_set_aside(activation, head):
                return await self._set_aside(activation, reason)
            return await self._drive(served, head.run_id, served.agent.resume(head.run_id))
        word = await self._drive(served, head.run_id, await next_run(served.agent.config, head.run_id, lazily=True))
        if word == "nothing to do":
            await self._watcher.leave(head)
        return word

    async def _read(self, run_id: str) -> tuple[Head | None, Sequence[SealedRecord], Signal | None]:
        """The head, the first record and the cancellation of a run, read at once; if one cannot be read, none is."""
        try:
            async with asyncio.TaskGroup() as group:
                head = group.create_task(self._store.head(run_id))
                begun = group.create_task(self._store.records(run_id, limit=1))
                cancellation = group.create_task(self._cancellation(run_id))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return head.result(), begun.result(), cancellation.result()

    async def _lacks_secret(self, run_id: str) -> bool:
        """Whether a part of a run was written under a secret that the worker does not have."""
        with contextlib.suppress(StoreError):
            return bool(foreign_key_id(await self._store.records(run_id), self._keyring))
        return False

    async def _cancellation(self, run_id: str) -> Signal | None:
        """The cancellation that waits for a run, if one does."""
        signals = await read_signals(self._store.signals, self._keyring, run_id)
        return next((each for each in signals if each.kind == "cancel"), None)

    async def _reason_to_set_aside(self, activation: Activation, head: Head) -> str:
        most = self._settings.max_attempts
        if head.epoch < most:  # each attempt is an epoch: a long run is not read for nothing
            return ""
        records = await self._store.records(head.run_id)
        if attempts_without_progress(records, head) < most or await self._waker.was_put_back(activation):
            return ""
        attempts = attempts_without_progress(records, head, await progress_below(self._store, head.run_id))
        if attempts < most:  # a sub-agent came further
            return ""
        return f"it was cut off {attempts} times in a row at the same point"

    async def _begin(self, served: ServedAgent, activation: Activation, head: Head | None) -> str:
        if head is not None and (head.seq or head.status == "finished"):
            return "outdated"
        run_id = activation.run_id
        if head is None and await self._store.maintenance.tombstones(run_id):
            return "outdated"  # it was purged while it was queued
        given = open_submission(activation.request, run_id, self._keyring)
        if given.agent != served.name:
            raise JournalError(f"run {run_id!r} was submitted to {given.agent!r}, and queued for {served.name!r}")
        signal = await self._cancellation(run_id)  # while it was queued
        if signal is None and (reason := await self._spend_limits.reached(given.all_tags)):
            return await self._set_aside(activation, reason, time.time() + SPENT_AGAIN_S)
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
        if signal is not None:
            run.cancel(signal.cancel_reason)
        return await self._drive(served, run_id, run)

    async def _act_when_due(self, served: ServedAgent, head: Head) -> str:
        """Expire or escalate what a suspended run asks, if that is due."""
        request = None if head.status != "suspended" else await pending_request(self._store, head)
        if request is None:
            return "outdated"
        clock = served.agent.config.host.clock
        while (
            wait_s := due_at(request, served.agent.graph) - clock.time()
        ) >= 0.0:  # the engine's clock may be a little ahead
            if wait_s > LONGEST_SKEW_S:
                return "not due"
            await clock.sleep(wait_s + A_MOMENT_S)
        if await self._has_moved(head):
            return "outdated"
        if (
            run := await next_run(served.agent.config, head.run_id, lazily=True)
        ) is not None:  # it was answered in time
            return await self._drive(served, head.run_id, run)
        if request.has_expired(clock.time()):
            run = served.agent.dismiss(head.run_id, "nobody answered in time")
        else:
            run = served.agent.resume(head.run_id)  # escalates it
        await run.load(lazily=True)
        if await self._has_moved(head):  # what was loaded may be another request
            return "outdated"
        return await self._drive(served, head.run_id, run)

    async def _has_moved(self, head: Head) -> bool:
        """Whether somebody has continued a run since its head was read."""
        now = await self._store.head(head.run_id)
        return now is None or (now.epoch, now.seq, now.owner) != (head.epoch, head.seq, head.owner)

    async def _drive(self, served: ServedAgent, run_id: str, run: Run[Any, Any] | None) -> str:
        """Advance a run until it has ended, waits for somebody, or the worker is to stop."""
        word = "nothing to do"
        while run is not None:
            if not self._stopping.is_set():
                self._runs.add(run)
                try:
                    await advance(run, until=self._stopping.is_set, longest_wait_s=LONGEST_WAIT_S)
                except LongWait as wait:
                    return await self._go_on_later(served, run, wait.until)
                finally:
                    self._runs.remove(run)
            if not run.finished:
                await hand_over(run)
                return "handed over"
            head = await self._store.head(run_id)
            if head is None or head.status != "suspended":
                return "finished"
            word = "suspended"
            await self._watcher.watch_request(served, head)
            run = await next_run(served.agent.config, run_id, lazily=True)  # it may have been answered in the meantime
        return word

    async def _go_on_later(self, served: ServedAgent, run: Run[Any, Any], until: float) -> str:
        """Hand a run over that waits before it repeats something. As long as it has a timer, it is not cut off."""
        head = await self._store.head(run.run_id)
        if head is not None:
            timer = Activation(run.run_id, head.epoch, served.queue, is_timer=True)
            await self._waker.wake(timer, delay_s=max(0.0, until - served.agent.config.host.clock.time()))
        await hand_over(run)
        return "waits"

    async def _set_aside(self, activation: Activation, reason: str, until: float | None = None) -> str:
        level = logging.ERROR if until is None else logging.INFO
        logger.log(level, "run %s is set aside: %s", activation.run_id, reason)
        with contextlib.suppress(StoreError):  # it stays unfinished, and is delivered again
            await self._waker.set_aside(activation, reason, until)
        return "set aside"


async def _hand_over_all(runs: Iterable[Run[Any, Any]]) -> set[str]:
    """Hand over runs, or the end of the event loop would end them as cancelled; the ids of those that were handed over.

    All are stopped at once, since each may have to wait for the store.
    """
    tasks = {asyncio.create_task(hand_over(run)): run.run_id for run in runs}
    if not tasks:
        return set()
    done, _ = await asyncio.wait(tasks, timeout=HAND_OVER_S)
    return {tasks[task] for task in done if not task.cancelled() and task.exception() is None}
