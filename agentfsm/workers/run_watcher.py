"""``RunWatcher``: finds the runs of a store that have something to do, and wakes them; what workers left is settled.

The store knows which owners live: a run that is running and has no owner was cut off. An engine does not know it: an
activation that was delivered to a process that died stays unfinished until somebody settles it. What is to be done
about either follows from what the store says; the functions that decide it await nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Sequence
from typing import Literal

from agentfsm.errors import (
    AgentfsmError,
    ConfigurationError,
    JournalError,
    MissingExtraError,
    StoreError,
    StoreFormatError,
)
from agentfsm.journal.listing import find_listing, iterate_runs
from agentfsm.journal.load import StoredRequest, pending_digest, pending_request
from agentfsm.journal.records import SealedRecord, is_kind
from agentfsm.journal.run_info import RunQuery
from agentfsm.journal.signals import Signal, read_signals
from agentfsm.journal.store import Head, Store
from agentfsm.loop.approval_rows import counts_votes
from agentfsm.loop.canonical_json import decode
from agentfsm.loop.keys import OLD_SECRETS_VARIABLE, SECRET_VARIABLE, Keyring
from agentfsm.machine.graph import Graph
from agentfsm.workers.notices import Notices
from agentfsm.workers.served_agents import ServedAgent, ServedAgents
from agentfsm.workers.submission import end_if_lost
from agentfsm.workers.waker import Activation, Waker, timer_key
from agentfsm.workers.worker_metrics import WorkerCounts
from agentfsm.workers.worker_settings import WorkerSettings

logger = logging.getLogger("agentfsm.workers")

WAKE_AGAIN_S = 10.0
"""Seconds after which a run that is still cut off is woken again."""

AT_WORK_S = 10.0
"""Seconds for which nobody looks again at an activation whose run has an owner and records: if its worker dies, that
run was cut off, and is found as such."""

WAKEN_AT_ONCE = 4
"""How many such runs are woken at the same time: of the next ones, other workers have woken some by then."""

LOOK_EVERY_S = 30.0
"""Seconds between two looks at what nobody has acted on, what is set aside for a while, and what can be forgotten."""

LEAVE_S = 600.0
"""Seconds for which a worker leaves an answer that it could not act on to others: they look every 30 seconds."""

WAITING_EVERY_S, WAITING_SHARE = 30.0, 20
"""Seconds between two searches for requests without a timer or a notice, at least; and how many times as long as a
search takes."""

NOTICE_SETTLE_S = 60.0
"""Seconds after which a notice that a worker was to send, and has not sent, is sent by another one."""

LISTEN_AGAIN_S = 1.0
"""Seconds to wait before answers are listened for again after an error."""


WHICH_SECRET = (
    f"give the worker the secret of the processes that submit runs ({SECRET_VARIABLE}, or secret=), and if they have "
    f"replaced theirs, the former one, too ({OLD_SECRETS_VARIABLE}, or old_secrets=)"
)
"""What to do about a worker that lacks the secret of some runs."""


StaleAction = Literal["leave", "redeliver", "drop", "wake"]
"""Leave it, deliver it again, finish it, or finish it and wake its run in the epoch in which that is now."""

_REPEATED_KINDS = ("run.resumed", "run.migrated", "effect.intent")
"""The kinds of records that each attempt at the same effect writes again."""


def _place(head: Head) -> tuple[str, int]:
    """The run and the epoch in which it was cut off."""
    return head.run_id, head.epoch


def stale_action(activation: Activation, head: Head | None) -> StaleAction:
    """What to do about an activation that was delivered a while ago and is not finished."""
    if head is None or not head.seq:  # the run has not begun
        owned = head is not None and head.owner is not None
        return "leave" if owned else "redeliver"
    if activation.epoch == 0:  # it did begin
        return "leave" if head.owner is not None else _after_death(head)
    if head.epoch == activation.epoch:  # nobody has acquired the run since
        return "drop" if head.status == "finished" else "redeliver"
    at_work = head.owner is not None and head.epoch == activation.epoch + 1
    return "leave" if at_work else _after_death(head)


def _after_death(head: Head) -> StaleAction:
    """What to do once a worker that had acquired a run has died: a run that is cut off is found by other means."""
    return "wake" if head.status == "suspended" and head.owner is None else "drop"


def due_at(request: StoredRequest, graph: Graph) -> float:
    """When a request is escalated or expires, whichever comes first, in seconds since the epoch.

    Args:
        request: The request.
        graph: The graph of the agent whose run makes it: without rows for votes, as a caller of sub-agents may be, it
            escalates nothing by itself.
    """
    escalates = request.quorum.escalates_at if request.quorum is not None and counts_votes(graph) else None
    return min(float("inf") if at is None else at for at in (request.expires_at, escalates))


def attempts_without_progress(records: Sequence[SealedRecord], head: Head, below_at: int = 0) -> int:
    """How often a run was tried at the point where it was cut off.

    ``below_at`` is when a run that it called last made progress, in milliseconds since the epoch; 0 if none did.
    """
    for record in reversed(records):
        body = decode(record.body)
        if _is_progress(record) or body["ts"] <= below_at:
            return head.epoch - int(body["epoch"]) + 1
    return head.epoch


async def progress_below(store: Store, run_id: str) -> int:
    """When a run that another one called last made progress, in milliseconds since the epoch; 0 if none did."""
    newest = 0
    async for info in iterate_runs(store, RunQuery(parent=run_id)):
        made = (decode(each.body)["ts"] for each in reversed(await store.records(info.run_id)) if _is_progress(each))
        newest = max(newest, next(made, 0), await progress_below(store, info.run_id))
    return newest


def _is_progress(record: SealedRecord) -> bool:
    return not any(is_kind(record, kind) for kind in _REPEATED_KINDS)


async def require_secret(store: Store, keyring: Keyring) -> None:
    """Check that a worker has the secret of some unfinished run of a store; if there is none, that of the newest run.

    Raises:
        ConfigurationError: All of them were written under secrets that the worker does not have.
        StoreError: The store cannot be read.
    """
    heads = [*await store.heads("running"), *await store.heads("suspended")]
    if not heads:
        newest = [await store.head(info.run_id) for info in (await store.find_runs(RunQuery(limit=1))).runs]
        heads = [head for head in newest if head is not None]
    foreign = {keyring.foreign_key_id(head.mac) for head in heads}
    if foreign and "" not in foreign:
        raise ConfigurationError(
            f"the runs of the store were written under another secret, with key id {' and '.join(sorted(foreign))}; "
            f"that of this worker has key id {keyring.current.key_id}, and it could continue none of them: "
            f"{WHICH_SECRET}"
        )


class RunWatcher:
    """Watches the runs of a store for a worker.

    Args:
        store: The store.
        waker: The engine that wakes runs.
        agents: The agents of the worker: other runs are left to other workers.
        settings: How the worker works.
        counts: What the worker is doing.
        notices: Sends notices of what runs wait for; None for no notices.

    Attributes:
        swept_at: When the store was last searched, as a time of the event loop.
    """

    def __init__(
        self,
        store: Store,
        waker: Waker,
        agents: ServedAgents,
        settings: WorkerSettings,
        counts: WorkerCounts,
        notices: Notices | None = None,
    ) -> None:
        self._store = store
        self._waker = waker
        self._agents = agents
        self._settings = settings
        self._counts = counts
        self._notices = notices
        self._foreign: set[str] = set()
        self._reasons: set[str] = set()
        self._waiting: set[tuple[str, int]] = set()
        self._seen: dict[tuple[str, int], float] = {}
        self._done: set[str] = set()
        self._left: dict[str, tuple[int, set[str], float]] = {}
        self._at_work: dict[str, float] = {}
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
            except Exception:  # such as an entry in the queues that a newer release wrote
                logger.exception("answers cannot be listened for")
            await asyncio.sleep(LISTEN_AGAIN_S)

    async def _wake_signalled_run(self, run_id: str) -> None:
        head = await self._store.head(run_id)
        if head is None or head.owner is not None:  # its owner hears of it, too
            return
        signals = await self._signals_of(run_id)
        if any(each.kind == "cancel" for each in signals):
            await self._waker.put_back(run_id)  # if it is set aside: to end it, nothing is tried again
        if not head.seq:
            await self._waker.bring_forward(Activation(run_id, 0, "").key)
            if await end_if_lost(self._store, self._waker, self._agents.keyring, run_id):
                logger.info("run %s was in no queue, and is cancelled", run_id)
        elif self._is_left(head, signals) or await self._was_refused(head, signals):
            return
        elif (served := await self._agent_of(head)) is not None:
            await self._waker.wake(Activation(run_id, head.epoch, served.queue))

    async def leave(self, head: Head) -> None:
        """Do not wake a run for the signals that it has now, for a while: this worker's agent could do nothing.

        It may lack the tool as it was shown, or have other guardrails. Another worker would not get to act on them as
        long as this one is faster.
        """
        now = asyncio.get_running_loop().time()
        self._left = {run_id: left for run_id, left in self._left.items() if now < left[2]}
        self._left[head.run_id] = head.epoch, {each.id for each in await self._signals_of(head.run_id)}, now + LEAVE_S

    def _is_left(self, head: Head, signals: Sequence[Signal]) -> bool:
        epoch, left, until = self._left.get(head.run_id, (0, set[str](), 0.0))
        is_same = epoch == head.epoch and {each.id for each in signals} <= left
        return is_same and asyncio.get_running_loop().time() < until

    async def _signals_of(self, run_id: str) -> list[Signal]:
        with contextlib.suppress(MissingExtraError):
            return await read_signals(self._store.signals, self._agents.keyring, run_id)
        return []

    async def _was_refused(self, head: Head, signals: Sequence[Signal]) -> bool:
        """Whether the answer to what a run waits for was refused, so that there is nothing to do until the next one."""
        if not signals or any(each.kind != "refusal" for each in signals):
            return False
        digest = await pending_digest(self._store, head)
        return all(each.to[1] == digest for each in signals)

    async def _agent_of(self, head: Head) -> ServedAgent | None:
        """The agent that can continue a run that has begun; None if this worker has none."""
        with contextlib.suppress(AgentfsmError):  # a run that cannot be read is nothing for a worker
            (begun,) = await self._store.records(head.run_id, limit=1)
            if (served := self._agents.for_run(head, begun)) is not None:
                return served
            self._report_left_run(head.run_id, self._agents.reason_to_leave(head, begun))
        return None

    def _report_left_run(self, run_id: str, reason: str) -> None:
        """Log, once for each reason, that a run waits for another worker: nothing else would say so."""
        if reason and reason not in self._reasons:
            self._reasons.add(reason)
            logger.warning(
                "run %s, and others like it, waits for a worker that has what it began with: %s; start a worker of the "
                "version that began it, or give this one what it lacks",
                run_id,
                reason,
            )

    # -- sweeps ---------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Look for what workers and programs that died have left, until cancelled.

        Raises:
            StoreFormatError: A later release has migrated the store.
        """
        loop = asyncio.get_running_loop()
        settled = looked = loop.time()
        search_at = float("-inf")
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
                if (began := loop.time()) >= search_at:
                    await self._watch_requests()
                    search_at = began + max(WAITING_EVERY_S, WAITING_SHARE * (loop.time() - began))
            except StoreFormatError:
                raise
            except StoreError as error:  # the next sweep tries again
                logger.warning("the store or the queues cannot be searched: %s", error)
            except Exception:  # such as an entry in the queues that a newer release wrote
                logger.exception("the store or the queues cannot be searched")
            await asyncio.sleep(self._settings.sweep_s)

    async def _watch_requests(self) -> None:
        """Watch the requests that this worker has not seen: their runs began to wait in another process."""
        suspended = await self._store.heads("suspended")
        self._report_foreign_runs([*suspended, *await self._store.heads("cut off")])
        waiting = [head for head in suspended if head.seq and head.owner is None]
        for head in waiting:
            if (head.run_id, head.epoch) not in self._waiting:
                await self._watch_run(head)
        self._waiting = {(head.run_id, head.epoch) for head in waiting}

    def _report_foreign_runs(self, heads: Sequence[Head]) -> None:
        """Log, once, that there are runs that were written under another secret: nothing else would say so."""
        foreign = {head.run_id: key_id for head in heads if (key_id := self._agents.keyring.foreign_key_id(head.mac))}
        if new := sorted(foreign.keys() - self._foreign):
            logger.error(
                "runs such as %s (%d in all) were written under another secret, with key id %s, and are left alone: %s",
                new[0],
                len(new),
                foreign[new[0]],
                WHICH_SECRET,
            )
        self._foreign = set(foreign)

    async def _watch_run(self, head: Head) -> None:
        listed = await find_listing(self._store, head.run_id)
        if listed is None or listed.parent:  # what a sub-agent's run asks is asked by the run that called it
            return
        may_be_due = listed.expires is not None or bool(listed.waiting_for and listed.waiting_for.roles)
        with contextlib.suppress(JournalError):  # what cannot be read is nothing for a worker
            await self.watch_request(await self._agent_of(head) if may_be_due else None, head)

    async def watch_request(self, served: ServedAgent | None, head: Head) -> None:
        """Have a suspended run woken when its request expires or is escalated, and people told of it.

        Args:
            served: The agent that can continue the run; None to leave that to another worker.
            head: The head of the run.

        Raises:
            JournalError: What it waits for cannot be read.
            StoreError: The store or the engine cannot be reached.
        """
        if self._notices is not None:
            await self._notices.begin(head)
        request = None if served is None else await pending_request(self._store, head)
        if served is not None and request is not None and (due := due_at(request, served.agent.graph)) < float("inf"):
            delay_s = max(0.0, due - served.agent.config.host.clock.time())
            timer = Activation(head.run_id, head.epoch, served.queue, is_timer=True)
            await self._waker.wake(timer, delay_s=delay_s)

    async def _wake_cut_off_runs(self) -> None:
        """Wake the runs that were left by their owner, if this worker can continue them.

        One that another worker has just woken is left to the workers of the queue that it is in, for a while.
        """
        now = asyncio.get_running_loop().time()
        left = [head for head in await self._store.heads("cut off") if head.run_id not in self._counts.runs]
        self._seen = known = {key: self._seen[key] for key in map(_place, left) if key in self._seen}
        new = [head for head in left if now - known.get(_place(head), float("-inf")) >= WAKE_AGAIN_S]
        random.shuffle(new)  # so that each of the workers that find them begins with another one
        for first in range(0, len(new), WAKEN_AT_ONCE):
            some = {Activation(*_place(head), "").key: head for head in new[first : first + WAKEN_AT_ONCE]}
            timers = {key: timer_key(*_place(head)) for key, head in some.items()}
            due = await self._waker.due([*timers, *timers.values()])
            waits = {key for key, timer in timers.items() if due.get(timer, 0.0) > time.time()}  # nobody holds it then
            woken = {key for key, head in some.items() if key in due and _place(head) not in known}
            await asyncio.gather(*(self._take_over(some[key]) for key in some if key not in waits | woken))
            self._seen = self._seen | dict.fromkeys(map(_place, some.values()), now)  # not if that failed

    async def _take_over(self, head: Head) -> None:
        """Wake a run that was cut off, if this worker can continue it."""
        served = await self._agent_of(head)
        if served is not None and await self._waker.wake(Activation(head.run_id, head.epoch, served.queue)):
            self._counts.find_cut_off(served.queue)
            logger.info("run %s was cut off in epoch %d and is taken over", head.run_id, head.epoch)

    async def _settle_activations(self) -> None:
        """Settle the activations of workers that died before they acquired the run, or after they were done with it.

        An activation is finished only if that is still due at the next look: its worker may be about to do so.
        """
        seen, self._done = self._done, set()
        now = asyncio.get_running_loop().time()
        self._at_work = {key: until for key, until in self._at_work.items() if now < until}
        stale = await self._waker.unfinished(self._settings.settle_s)
        if any(each.activation.notice for each in stale):  # nobody acquires a run to send one, so a worker gets longer
            slow = {each.activation.key for each in await self._waker.unfinished(NOTICE_SETTLE_S)}
            stale = [each for each in stale if not each.activation.notice or each.activation.key in slow]
        for each in stale:
            activation = each.activation
            if activation.run_id in self._counts.runs or activation.key in self._at_work:
                continue
            head = await self._store.head(activation.run_id)
            action = stale_action(activation, head)
            if action == "leave" and head is not None and head.seq:
                self._at_work[activation.key] = now + AT_WORK_S
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
