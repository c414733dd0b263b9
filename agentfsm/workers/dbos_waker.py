"""``DbosWaker``: wakes runs through DBOS (extra ``dbos``), on PostgreSQL or, for one machine, on SQLite.

Each activation is one workflow, with the id ``RUN:EPOCH``. Its arguments are JSON, never a pickle. DBOS itself recovers
nothing here: each process is an executor of its own, whose unfinished workflows the sweep of the workers settles.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from math import ceil
from typing import Any, TypeVar, cast

from agentfsm.errors import ConfigurationError, MissingExtraError, StoreError
from agentfsm.workers.dbos_database import PORTABLE, SCHEMA, SERIALIZER, queue_error
from agentfsm.workers.waker import MAX_PRIORITY, Activation, Deliver, DeliveredActivation, QueueSettings, SetAside

try:
    from dbos import DBOS, DBOSClient, DBOSConfig, EnqueueOptions, WorkflowStatus, error
    from sqlalchemy import Engine, exc
except ImportError as reason:
    raise MissingExtraError("a worker on DBOS", "dbos") from reason

APPLICATION, WORKFLOW, DELAYED, DELIVERED = "agentfsm", "agentfsm.activation", "DELAYED", "PENDING"
QUEUED, UNFINISHED = ["ENQUEUED", DELAYED], ["ENQUEUED", DELAYED, DELIVERED]
FINISHED, SET_ASIDE, PUT_BACK = ["SUCCESS", "ERROR", "CANCELLED"], "set aside", "put back"
FORGET_AT_ONCE, CONNECTIONS, SHARE_EVERY_S = 500, 3, 4.0
Result = TypeVar("Result")


class DbosWaker:
    """Wakes runs through DBOS. There is one in a process that serves; others only submit.

    Args:
        url: The database of DBOS: ``postgresql://...``, in which it has a schema of its own, or ``sqlite:///FILE``.
        settings: How its queues are served.
        create: Whether its tables are created if they are missing; without them, nothing is set aside.
        engine: What connects to the database, if DBOS is not to do so itself; it is closed with the waker.
    """

    def __init__(self, url: str, settings: QueueSettings, *, create: bool = True, engine: Engine | None = None) -> None:
        self._url, self._settings, self._create, self._engine = url, settings, create, engine
        self._sharing: asyncio.Task[None] | None = None
        self._opened: DBOSClient | None = None
        self._opening = threading.Lock()

    async def wake(self, activation: Activation, *, delay_s: float = 0.0) -> bool:
        """Have an activation delivered once; see ``Waker.wake``."""
        return await self._call(lambda: self._wake(activation, delay_s))

    def _wake(self, activation: Activation, delay_s: float) -> bool:
        known = _status(self._client, activation.key)
        if known is not None:
            if known.status not in QUEUED or known.queue_name == activation.queue:  # else it moves to another queue
                _bring_forward(self._client, known, time.time() + max(0.0, delay_s))
                if known.status in UNFINISHED or _attributes(known).get("state") == SET_ASIDE:
                    return False
            self._client.delete_workflow(activation.key)
        options: EnqueueOptions = {
            "workflow_name": WORKFLOW,
            "queue_name": activation.queue,
            "workflow_id": activation.key,
            "workflow_id_reuse_policy": "reject",
            "priority": 1 + MAX_PRIORITY + activation.priority,  # its own begin at 1
            "queue_partition_key": activation.tenant or "-",
            "serialization_type": PORTABLE,
        }
        if delay_s > 0:
            options["delay_seconds"] = delay_s
        try:
            self._client.enqueue(options, asdict(activation))
        except error.DBOSWorkflowIDInUseError:  # by another process, in the meantime
            return False
        return True

    async def bring_forward(self, key: str) -> None:
        """Deliver an activation now if it waits for its time; see ``Waker.bring_forward``."""
        await self._call(lambda: _bring_forward(self._client, _status(self._client, key), time.time()))

    async def due(self, keys: Collection[str] = (), *, prefix: str | None = None) -> dict[str, float]:
        """When each of some activations is delivered; see ``Waker.due``."""
        ids = ["", *keys] if prefix is None else None  # of none at all, DBOS would list every one
        found = await self._call(
            lambda: self._client.list_workflows(workflow_ids=ids, workflow_id_prefix=prefix, status=UNFINISHED)
        )
        return {each.workflow_id: _due_at(each) for each in found}

    async def unfinished(self, older_than_s: float) -> list[DeliveredActivation]:
        """What was delivered and is not finished; see ``Waker.unfinished``."""
        found = await self._call(lambda: _delivered(self._client, older_than_s))
        return [
            DeliveredActivation(activation, 1 + int(attributes.get("redelivered", 0)))
            for activation, attributes in _readable(found)
            if attributes.get("state") != SET_ASIDE
        ]

    async def redeliver(self, activation: Activation, older_than_s: float) -> None:
        """Deliver an unfinished activation again; see ``Waker.redeliver``."""

        def resume() -> None:
            for known in _delivered(self._client, older_than_s, [activation.key]):
                times = int(_attributes(known).get("redelivered", 0)) + 1
                self._client.update_workflow_attributes(activation.key, {"redelivered": times})
                self._client.resume_workflow(activation.key, queue_name=activation.queue)

        await self._call(resume)

    async def drop(self, activation: Activation) -> None:
        """Finish an unfinished activation; see ``Waker.drop``."""
        await self._call(lambda: self._client.cancel_workflow(activation.key))

    async def forget(self, older_than_s: float) -> None:
        """Delete activations that were finished a while ago; see ``Waker.forget``."""

        def delete() -> None:
            before = datetime.fromtimestamp(time.time() - older_than_s, UTC).isoformat()
            found = self._client.list_workflows(
                status=FINISHED, name=WORKFLOW, completed_before=before, limit=FORGET_AT_ONCE, load_input=False
            )
            if keys := [each.workflow_id for each in found if _attributes(each).get("state") != SET_ASIDE]:
                self._client.delete_workflows(keys)

        await self._call(delete)

    async def set_aside(self, activation: Activation, reason: str, until: float | None = None) -> None:
        """Keep an activation, with a reason; see ``Waker.set_aside``."""

        def keep() -> None:
            attributes = {"state": SET_ASIDE, "reason": reason, "until": until}
            self._client.update_workflow_attributes(activation.key, attributes)
            self._client.cancel_workflow(activation.key)  # what is cancelled can be resumed, in one transaction

        await self._call(keep)

    async def list_set_aside(self, keys: Collection[str] | None = None) -> list[SetAside]:
        """The activations that are set aside; see ``Waker.list_set_aside``."""
        return await self._call(lambda: list(self._set_aside(None if keys is None else list(keys))))

    def _set_aside(self, keys: list[str] | None, prefix: str | None = None) -> Iterator[SetAside]:
        filtered = None if self._url.startswith("sqlite") else {"state": SET_ASIDE}  # there, it cannot filter
        try:
            found = self._client.list_workflows(
                workflow_ids=keys, name=WORKFLOW, workflow_id_prefix=prefix, attributes=filtered, load_output=False
            )
        except exc.ProgrammingError as failure:
            if type(failure.orig).__name__ != "UndefinedTable":
                raise
            return
        for activation, attributes in _readable(found):
            if attributes.get("state") == SET_ASIDE:
                yield SetAside(activation, str(attributes.get("reason", "")), attributes.get("until"))

    async def put_back(self, run_id: str) -> bool:
        """Have a run that is set aside delivered again; see ``Waker.put_back``."""

        def put_back() -> bool:
            found = [each.activation for each in self._set_aside(None, f"{run_id}:")]
            for activation in found:
                self._client.update_workflow_attributes(activation.key, {"state": PUT_BACK})
                self._client.resume_workflow(activation.key, queue_name=activation.queue)
            return bool(found)

        return await self._call(put_back)

    async def was_put_back(self, activation: Activation) -> bool:
        """Whether an activation was set aside and put back since; see ``Waker.was_put_back``."""
        return _attributes(await self._call(lambda: _status(self._client, activation.key))).get("state") == PUT_BACK

    async def serve(self, queues: Sequence[str], deliver: Deliver) -> None:
        """Deliver activations of some queues to this process; see ``Waker.serve``."""
        loop = asyncio.get_running_loop()
        config: DBOSConfig = {
            "name": APPLICATION,
            "system_database_url": self._url,
            "system_database_engine": self._engine,
            "dbos_system_schema": SCHEMA,
            "executor_id": uuid.uuid4().hex,  # under a shared one, two processes would run each other's workflows
            "application_version": APPLICATION,  # the queues say which worker knows what
            "log_level": "CRITICAL",
            "serializer": SERIALIZER,
            "db_engine_kwargs": {"pool_size": CONNECTIONS, "pool_pre_ping": False},  # what loses one is repeated anyway
        }

        DBOS(config=config)  # the one of this process
        if DBOS.executor_id != config["executor_id"]:
            raise ConfigurationError("DBOS serves in this process already: give each worker a process of its own")

        async def activation_workflow(arguments: dict[str, Any]) -> str:  # in an event loop of DBOS
            work = asyncio.run_coroutine_threadsafe(deliver(Activation(**arguments)), loop)  # stores belong to this one
            return await asyncio.shield(asyncio.wrap_future(work))  # DBOS cancels what outlasts the grace period

        def launch() -> None:
            own, rate = self._settings, self._settings.rate  # of new runs: those that have begun are not limited
            for queue in queues:
                self._client.register_queue(
                    queue,
                    worker_concurrency=own.concurrency,
                    partition_concurrency=own.tenant_concurrency,
                    limiter={"limit": rate.runs, "period": rate.seconds} if rate and "@" not in queue else None,
                    polling_interval_sec=own.poll_s,
                    on_conflict="always_update",
                )
            DBOS.workflow(name=WORKFLOW, serialization_type=PORTABLE, max_recovery_attempts=None)(activation_workflow)
            DBOS.listen_queues(queues)
            DBOS.launch()

        self._sharing = asyncio.create_task(self._share_polling(queues))
        await self._call(launch)

    async def _share_polling(self, queues: Sequence[str]) -> None:
        """Have each process poll the queues less often, the more of them are at work, until cancelled."""

        def share() -> None:
            processes = {each.executor_id for each in _delivered(self._client, 0.0) if each.queue_name in queues}
            poll_s = self._settings.shared_poll_s(len(processes))
            for queue in filter(None, map(self._client.retrieve_queue, queues)):
                if queue.polling_interval_sec != poll_s:  # a write waits for the disk
                    queue.set_polling_interval_sec(poll_s)

        while True:
            await asyncio.sleep(SHARE_EVERY_S)
            with contextlib.suppress(StoreError):  # the database is away
                await self._call(share)

    async def stop(self, grace_s: float) -> None:
        """Accept no more activations, and wait for those that are being handled; see ``Waker.stop``."""
        if self._sharing is not None:
            self._sharing.cancel()
            await asyncio.wait({self._sharing})
            self._sharing = None
            await asyncio.to_thread(DBOS.destroy, workflow_completion_timeout_sec=ceil(grace_s), destroy_registry=True)

    async def aclose(self) -> None:
        """Release all resources; see ``Waker.aclose``."""
        await self.stop(0)
        if self._opened is not None:
            client, self._opened = self._opened, None
            await asyncio.to_thread(client.destroy)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.dispose)

    @property
    def _client(self) -> DBOSClient:
        """What reads and writes the queues."""
        with self._opening:
            if self._opened is None:
                if self._create:
                    DBOS.migrate(self._url, schema=SCHEMA)
                self._opened = DBOSClient(
                    system_database_url=self._url,
                    system_database_engine=self._engine,
                    dbos_system_schema=SCHEMA,
                    system_database_pool_size=CONNECTIONS,
                    application_name=APPLICATION,
                    serializer=SERIALIZER,
                    retry_connection_errors=False,
                )
            return self._opened

    async def _call(self, work: Callable[[], Result]) -> Result:
        """What a function of the engine returns, which blocks; a ``StoreError`` if its database cannot be used."""
        try:
            return await asyncio.to_thread(work)
        except (exc.SQLAlchemyError, error.DBOSException) as failure:
            raise queue_error(failure) from failure


def _status(client: DBOSClient, key: str) -> WorkflowStatus | None:
    return next(iter(client.list_workflows(workflow_ids=[key], load_input=False, load_output=False)), None)


def _delivered(client: DBOSClient, older_than_s: float, keys: list[str] | None = None) -> list[WorkflowStatus]:
    before = datetime.fromtimestamp(time.time() - older_than_s, UTC).isoformat()
    return client.list_workflows(workflow_ids=keys, status=DELIVERED, name=WORKFLOW, dequeued_before=before)


def _bring_forward(client: DBOSClient, known: WorkflowStatus | None, due: float) -> None:
    if known is not None and due < _due_at(known):
        client.set_workflow_delay(known.workflow_id, delay_until_epoch_ms=int(due * 1000))


def _due_at(workflow: WorkflowStatus) -> float:
    return (workflow.delay_until_epoch_ms or 0) / 1000 if workflow.status == DELAYED else 0.0


def _attributes(workflow: WorkflowStatus | None) -> dict[str, Any]:
    return {} if workflow is None else workflow.attributes or {}


def _readable(found: Iterable[WorkflowStatus]) -> Iterator[tuple[Activation, dict[str, Any]]]:
    for each in found:
        with contextlib.suppress(TypeError, LookupError):  # somebody else wrote it: nothing can be delivered
            yield Activation(**cast("Any", each.input)["args"][0]), _attributes(each)
