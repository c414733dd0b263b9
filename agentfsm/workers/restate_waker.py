"""``RestateWaker``: wakes runs through a Restate server (extra ``restate``).

Each activation is one workflow, whose key is that of the activation and, behind ``#``, how often it was replaced. The
server calls a worker for it, and calls another one when that dies. What is set aside is a workflow that is suspended
until somebody resolves its awakeable. Nothing is kept of an activation that is finished.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from importlib import import_module
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from agentfsm.errors import MissingExtraError, StoreError
from agentfsm.workers.waker import Activation, Deliver, DeliveredActivation, SetAside

try:
    import uvicorn

    restate: Any = import_module("restate")  # not typed: a checkout without the package can be checked, too
except ImportError as reason:
    raise MissingExtraError("a worker on Restate", "restate") from reason

__all__ = ["RestateWaker"]

RUNNING, GONE = "running", (404, 409)
CONNECTION_BROKE = "RT0010"  # as it does when a worker dies
NO_TIME, FOR_GOOD = timedelta(0), timedelta(days=3650)  # a run may take as long as it likes
RETRIES = restate.InvocationRetryPolicy(
    initial_interval=timedelta(milliseconds=50),
    exponentiation_factor=2.0,
    max_interval=timedelta(seconds=2),
    max_attempts=2**31,  # by default it gives up after 70, which is soon when no worker is there
)
FIND = """
SELECT i.*, j.entry_json, s.value_utf8 FROM sys_invocation i
JOIN sys_journal j ON j.id = i.id AND j.index = 0
LEFT JOIN state s ON s.service_name = i.target_service_name AND s.service_key = i.target_service_key
WHERE starts_with(i.target_service_name, 'agentfsm.') AND starts_with(i.target_service_key, {prefix})
ORDER BY i.created_at
"""


class _Workflow:
    """An unfinished workflow, as the server shows it in a row."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.id, self.status, self.service = (str(row[each]) for each in ("id", "status", "target_service_name"))
        self.replaced = int(row["target_service_key"].rpartition("#")[2])
        self.has_begun = int(row.get("journal_size", 0)) > 1  # its input is followed by the first step
        self.due, self.first_start, self.last_start = (
            datetime.fromisoformat(row[each]).timestamp() if each in row else 0.0
            for each in ("scheduled_start_at", "running_at", "last_start_at")
        )
        worker_died = row.get("last_failure_error_code") == CONNECTION_BROKE
        self.deliveries = int(row.get("retry_count", 1)) if worker_died else 1  # and not how often no worker was there
        self.aside: dict[str, Any] | None = json.loads(row.get("value_utf8", "null"))
        given = json.loads(bytes(json.loads(row["entry_json"])["Command"]["Input"]["payload"]))
        self.activation = Activation(**given["activation"])
        self.request_id = str(given.get("request_id", ""))


@dataclass
class _Delivery:
    """An activation that this process handles: whether it was set aside before, and why it is set aside again."""

    put_back: bool
    aside: dict[str, Any] | None = None


class _Server:
    """A Restate server, and the workflows that it keeps."""

    def __init__(self, ingress: str, admin: str) -> None:
        self.ingress, self.admin = ingress.rstrip("/"), admin.rstrip("/")
        self.client = httpx.AsyncClient(timeout=30.0)

    async def find(self, prefix: str) -> list[_Workflow]:
        """The unfinished workflows whose keys begin so, the oldest first."""
        text = "'" + prefix.replace("'", "''") + "'"
        found = await self.request("POST", f"{self.admin}/query", {"query": FIND.format(prefix=text)})
        return [_Workflow(row) for row in found["rows"]]

    async def replace(
        self, known: Sequence[_Workflow], activation: Activation, *, delay_s: float = 0.0, aside: Any = None
    ) -> bool:
        """Queue an activation, then end the workflows that it had: between the two it has two, never none."""
        key = f"{activation.key}#{1 + max((each.replaced for each in known), default=-1)}"
        delay = f"?delay={round(delay_s * 1000)}ms" if delay_s > 0 else ""
        url = f"{self.ingress}/{_service(activation.queue)}/{quote(key, safe='')}/activate/send{delay}"
        given = {"activation": asdict(activation), "aside": aside, "request_id": uuid.uuid4().hex}
        answered = await self.request("POST", url, given)
        await self.end(known)
        if answered["status"] == "Accepted":
            return True
        # by another process, or this very request, which was sent again somewhere on its way
        return any(each.request_id == given["request_id"] for each in await self.find(key))

    async def end(self, workflows: Iterable[_Workflow]) -> None:
        for each in workflows:
            await self.request("PATCH", f"{self.admin}/invocations/{each.id}/kill", accepted=GONE)

    async def request(self, method: str, url: str, body: Any = None, *, accepted: Sequence[int] = ()) -> Any:
        """What the server answers; a ``StoreError`` if it cannot be reached, or refuses that."""
        try:
            response = await self.client.request(method, url, json=body, headers={"accept": "application/json"})
        except httpx.HTTPError as error:
            raise StoreError(f"Restate cannot be reached at {url}: {type(error).__name__}: {error}") from error
        if response.is_error and response.status_code not in accepted:
            raise StoreError(f"Restate answers {response.status_code} at {url}: {response.text[:500]}")
        return response.json() if response.is_success and response.content else None


class RestateWaker:
    """Wakes runs through a Restate server. It has no priorities and no limits by tenant.

    All workers of one version of an application serve one address, behind whatever balances their load; on one machine
    they can share a port. A queue exists once a worker has served it: until then, nothing can be submitted to it.

    Args:
        ingress: The address of the server for requests, such as ``http://localhost:8080``.
        admin: The address of the server for administration, such as ``http://localhost:9070``.
        endpoint: The address at which the server reaches the workers, such as ``http://workers.internal:9080``; for a
            process that only submits, empty.
        host: The address of this machine at which a worker listens, at the port of ``endpoint``.
        identity_key: The public key of the server (``publickeyv1_...``), so that only it can deliver anything; None
            where nobody else can reach the workers.
        concurrency: How many activations of a queue are handled at a time in one process.
    """

    def __init__(
        self,
        ingress: str,
        admin: str,
        *,
        endpoint: str = "",
        host: str = "127.0.0.1",
        identity_key: str | None = None,
        concurrency: int = 10,
    ) -> None:
        self._restate = _Server(ingress, admin)
        self._endpoint, self._host, self._concurrency = endpoint, host, concurrency
        self._identity_keys = None if identity_key is None else [identity_key]
        self._server: uvicorn.Server | None = None
        self._serving: threading.Thread | None = None
        self._deliveries: dict[str, _Delivery] = {}

    async def wake(self, activation: Activation, *, delay_s: float = 0.0) -> bool:
        """Have an activation delivered once; see ``Waker.wake``."""
        known = await self._restate.find(f"{activation.key}#")
        if any(each.has_begun or each.service == _service(activation.queue) for each in known):
            await self._bring_forward(known, delay_s)
            return False
        return await self._restate.replace(known, activation, delay_s=delay_s)

    async def bring_forward(self, key: str) -> None:
        """Deliver an activation now if it waits for its time; see ``Waker.bring_forward``."""
        await self._bring_forward(await self._restate.find(f"{key}#"), 0.0)

    async def _bring_forward(self, known: Sequence[_Workflow], delay_s: float) -> None:
        if known and min(each.due for each in known) > time.time() + max(0.0, delay_s):
            await self._restate.replace(known, known[0].activation, delay_s=delay_s)

    async def due(self, keys: Collection[str] = (), *, prefix: str | None = None) -> dict[str, float]:
        """When each of some activations is delivered; see ``Waker.due``."""
        due: dict[str, float] = {}
        for begin in [f"{key}#" for key in keys] if prefix is None else [prefix]:
            for each in await self._restate.find(begin):
                if each.aside is None:
                    due[each.activation.key] = min(each.due, due.get(each.activation.key, each.due))
        return due

    async def unfinished(self, older_than_s: float) -> list[DeliveredActivation]:
        """What was delivered and is not finished; see ``Waker.unfinished``."""
        return [
            DeliveredActivation(each.activation, each.deliveries)
            for each in await self._restate.find("")
            if each.has_begun and each.aside is None and each.first_start <= time.time() - older_than_s
        ]

    async def redeliver(self, activation: Activation, older_than_s: float) -> None:
        """Deliver an unfinished activation again, if the server has not done so; see ``Waker.redeliver``."""
        known, before = await self._restate.find(f"{activation.key}#"), time.time() - older_than_s
        if known and all(each.status == RUNNING and each.last_start <= before for each in known):
            await self._restate.replace(known, activation)

    async def drop(self, activation: Activation) -> None:
        """Finish an unfinished activation; see ``Waker.drop``."""
        await self._restate.end(each for each in await self._restate.find(f"{activation.key}#") if each.aside is None)

    async def forget(self, older_than_s: float) -> None:
        """Do nothing: what is finished is not kept; see ``Waker.forget``."""

    async def set_aside(self, activation: Activation, reason: str, until: float | None = None) -> None:
        """Keep an activation, with a reason; see ``Waker.set_aside``."""
        aside = {"reason": reason, "until": until}
        if (delivery := self._deliveries.get(activation.key)) is not None:
            delivery.aside = aside  # its workflow is suspended as soon as it was delivered
        else:
            await self._restate.replace(await self._restate.find(f"{activation.key}#"), activation, aside=aside)

    async def list_set_aside(self, keys: Collection[str] | None = None) -> list[SetAside]:
        """The activations that are set aside; see ``Waker.list_set_aside``."""
        return [
            SetAside(each.activation, each.aside["reason"], each.aside["until"])
            for each in await self._restate.find("")
            if each.aside is not None and (keys is None or each.activation.key in keys)
        ]

    async def put_back(self, run_id: str) -> bool:
        """Have a run that is set aside delivered again; see ``Waker.put_back``."""
        found = [each.aside["awakeable"] for each in await self._restate.find(f"{run_id}:") if each.aside is not None]
        for awakeable in found:
            await self._restate.request("POST", f"{self._restate.ingress}/restate/awakeables/{awakeable}/resolve")
        return bool(found)

    async def was_put_back(self, activation: Activation) -> bool:
        """Whether an activation that this process handles was set aside before; see ``Waker.was_put_back``."""
        delivery = self._deliveries.get(activation.key)
        return delivery is not None and delivery.put_back

    # -- serving --------------------------------------------------------------------------------------

    async def serve(self, queues: Sequence[str], deliver: Deliver) -> None:
        """Deliver activations of some queues to this process; see ``Waker.serve``."""
        workflows = [self._workflow(queue, deliver) for queue in queues]
        app = restate.app(workflows, "request_response", self._identity_keys)
        self._server = uvicorn.Server(uvicorn.Config(app, lifespan="off", ws="none", log_config=None, access_log=False))
        sockets = [_listen(self._host, urlsplit(self._endpoint).port or 80)]
        # not in the event loop of the worker, whose handler of SIGTERM Restate's package would replace
        self._serving = threading.Thread(target=self._server.run, args=(sockets,), daemon=True)
        self._serving.start()
        described = {"uri": self._endpoint, "use_http_11": True, "force": True}
        await self._restate.request("POST", f"{self._restate.admin}/deployments", described)

    def _workflow(self, queue: str, deliver: Deliver) -> Any:
        """What the server calls for each activation of a queue."""
        loop, turns = asyncio.get_running_loop(), asyncio.Semaphore(self._concurrency)

        async def handle(activation: Activation, put_back: bool) -> list[Any]:
            work = asyncio.run_coroutine_threadsafe(self._deliver(deliver, activation, put_back), loop)
            return await asyncio.shield(asyncio.wrap_future(work))  # a connection that breaks cuts off nothing

        workflow = restate.Workflow(
            _service(queue), abort_timeout=FOR_GOOD, journal_retention=NO_TIME, invocation_retry_policy=RETRIES
        )

        async def activate(context: Any, given: dict[str, Any]) -> str:
            word, aside, put_back = "", given.get("aside"), False
            activation = Activation(**given["activation"])
            while aside is not None or not word:
                if aside is not None:
                    awakeable, resolved = context.awakeable(type_hint=str)
                    context.set("aside", {**aside, "awakeable": awakeable})
                    await resolved
                    context.clear("aside")
                    put_back = True
                async with turns:
                    word, aside = await context.run_typed("deliver", partial(handle, activation, put_back))
            return word

        workflow.main(workflow_retention=NO_TIME)(activate)
        return workflow

    async def _deliver(self, deliver: Deliver, activation: Activation, put_back: bool) -> list[Any]:
        """Deliver an activation; returns the word on how that went, and why it was set aside if it was."""
        delivery = self._deliveries[activation.key] = _Delivery(put_back)
        try:
            return [await deliver(activation), delivery.aside]
        finally:
            self._deliveries.pop(activation.key, None)

    async def stop(self, grace_s: float) -> None:
        """Accept no more activations, and wait for those that are being handled; see ``Waker.stop``."""
        if self._server is not None and self._serving is not None:
            self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))  # what was handled is still answered
            self._server.should_exit = True
            await asyncio.to_thread(self._serving.join)
            self._server = self._serving = None

    async def aclose(self) -> None:
        """Release all resources; see ``Waker.aclose``."""
        await self.stop(0)
        await self._restate.client.aclose()


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens at a port, which other workers on this machine may share."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024, reuse_port=hasattr(socket, "SO_REUSEPORT"))


def _service(queue: str) -> str:
    """The name of the service of a queue: a dot and two hex digits for each byte that cannot be in one."""
    return "agentfsm." + re.sub(rb"[^A-Za-z0-9_-]", lambda found: b".%02x" % found[0][0], queue.encode()).decode()
