"""``Notices``: tells people, or their systems, what waits for them, and reminds them, while no process holds the run.

Each request that a run waits for has a chain of activations in the engine, one at a time: send, send again after a
failure, remind, look again. The next one is queued before the one at hand is finished, so a worker that dies loses no
notice; at worst one is sent twice, with the same id. A chain ends when its run has gone on. ``Webhook`` sends a notice
to a URL.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from agentfsm.errors import ConfigurationError
from agentfsm.journal.listing import find_listing
from agentfsm.journal.load import StoredRequest, pending_request
from agentfsm.journal.run_info import RunInfo
from agentfsm.journal.store import Head, Store
from agentfsm.workers.waker import Activation, Waker

logger = logging.getLogger("agentfsm.workers")

NOTICES = "@notices"
"""The queue of all notices; no agent can have this name."""

LOOK_AGAIN_S = 86_400.0
"""Seconds after which a chain looks again whether its run still waits, if nothing is due before."""

LONGEST_SEND_S = 45.0
"""Seconds for one attempt to send a notice: less than after which another worker takes it for lost."""

FIRST_RETRY_S, LONGEST_RETRY_S = 5.0, 3600.0
"""Seconds before a notice that could not be sent is sent again, doubled each time, and at most."""


class NoticeError(Exception):
    """A notice was not delivered. A ``Notify`` raises it to say when to try again; any other error does as well.

    Args:
        message: Why, without secrets: it is logged.
        retry_after_s: Seconds to wait at least, as the receiver asks, or None.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Notice:
    """A request waits for somebody. It has none of the arguments, questions and secrets of the run.

    Attributes:
        id: The same for the same notice, however often it is sent; another one for each reminder.
        run_id: The run.
        digest: The digest of the request, which an answer can be bound to.
        kind: ``question``, ``form``, ``approval``, ``limit`` or ``in_doubt``.
        tool: The tool that it is about, or an empty string.
        roles: The roles of which whoever answers must have one; empty for anyone.
        missing: How many approvals are missing; 1 if one answer is enough.
        escalated: Whether those may answer by now to whom it is escalated.
        asked_at: When it was asked, in seconds since the epoch.
        escalates_at: When it is escalated, or None.
        expires_at: When it expires, or None.
        reminder: 0 for the first notice, else the number of the reminder.
        tags: The tags of the run, such as ``tenant:acme``.
        url: Where the viewer shows it, or an empty string.
    """

    id: str
    run_id: str
    digest: str
    kind: str
    tool: str
    roles: tuple[str, ...]
    missing: int
    escalated: bool
    asked_at: float
    escalates_at: float | None
    expires_at: float | None
    reminder: int
    tags: tuple[str, ...]
    url: str

    def to_json(self) -> dict[str, Any]:
        """It as JSON data, with ``type``: ``request.waiting`` or ``request.reminder``."""
        return {"type": "request.reminder" if self.reminder else "request.waiting", **asdict(self)}


Notify = Callable[[Notice], Awaitable[None]]
"""Sends a notice. If it raises, the notice is sent again later, as long as the request waits."""


class Notices:
    """The notices of a worker.

    Args:
        store: The store.
        waker: The engine that keeps what will be sent.
        notify: Sends a notice.
        remind_after_s: Seconds after which people are reminded, again and again, of a request without such a time of
            its own; None for no reminders.
        viewer_url: Where the viewer is, or an empty string.
        now: The clock, in seconds since the epoch.

    Raises:
        ConfigurationError: The time is not greater than 0, or the address is not that of a web page.
    """

    def __init__(
        self,
        store: Store,
        waker: Waker,
        notify: Notify,
        *,
        remind_after_s: float | None = None,
        viewer_url: str = "",
        now: Callable[[], float] = time.time,
    ) -> None:
        if remind_after_s is not None and not 0 < remind_after_s < float("inf"):
            raise ConfigurationError(f"remind_after_s must be greater than 0 seconds, not {remind_after_s!r}")
        if viewer_url and not viewer_url.startswith(("https://", "http://")):
            raise ConfigurationError(
                f"the address of a viewer must look like https://agents.example.org/, not {viewer_url!r}"
            )
        self._store = store
        self._waker = waker
        self._notify = notify
        self._remind_after_s = remind_after_s
        self._viewer_url = viewer_url
        self._now = now

    async def begin(self, head: Head) -> None:
        """Have a notice sent of what a run waits for, unless that has been done.

        Raises:
            agentfsm.errors.StoreError: The engine cannot be reached.
        """
        first = Activation(head.run_id, head.epoch, NOTICES, notice=1)
        if not await self._waker.due(prefix=first.key.removesuffix("1")):
            await self._waker.wake(first)

    async def deliver(self, activation: Activation) -> str:
        """Send the notice that is due, and queue what comes after it.

        Returns:
            A word on how that went.

        Raises:
            agentfsm.errors.JournalError: What the run waits for cannot be read.
            agentfsm.errors.StoreError: The store or the engine cannot be reached.
        """
        head = await self._store.head(activation.run_id)
        if head is None or head.epoch != activation.epoch:
            return "outdated"
        request, listed = await pending_request(self._store, head), await find_listing(self._store, head.run_id)
        if request is None or listed is None or request.has_expired(self._now()):
            return "outdated"
        remind_after_s = self._interval(request)
        due = _due_at(request, activation.reminder, remind_after_s)
        if due > self._now():
            await self._queue_next(activation, activation.reminder, due)
            return "not due"
        try:
            async with asyncio.timeout(LONGEST_SEND_S):
                await self._notify(self._notice(request, listed, activation.reminder))
        except Exception as error:
            asked_s = getattr(error, "retry_after_s", None) or 0.0
            delay_s = max(asked_s, min(LONGEST_RETRY_S, FIRST_RETRY_S * 2**activation.attempt))
            what = str(error) if isinstance(error, NoticeError) else type(error).__name__
            logger.warning("run %s: nobody was told what it waits for: %s", head.run_id, what)
            await self._queue_next(
                activation, activation.reminder, self._now() + delay_s, attempt=min(activation.attempt + 1, 30)
            )
            return "not sent"
        missed = 0 if remind_after_s is None else int((self._now() - request.asked_at) // remind_after_s)
        reminder = max(activation.reminder, missed) + 1
        await self._queue_next(activation, reminder, _due_at(request, reminder, remind_after_s))
        return "sent"

    def _interval(self, request: StoredRequest) -> float | None:
        own = None if request.quorum is None else request.quorum.rule.remind_after_s
        return self._remind_after_s if own is None else own

    async def _queue_next(self, activation: Activation, reminder: int, due: float, *, attempt: int = 0) -> None:
        following = Activation(
            activation.run_id,
            activation.epoch,
            NOTICES,
            notice=activation.notice + 1,
            reminder=reminder,
            attempt=attempt,
        )
        await self._waker.wake(following, delay_s=min(max(0.0, due - self._now()), LOOK_AGAIN_S))

    def _notice(self, request: StoredRequest, listed: RunInfo, reminder: int) -> Notice:
        quorum = request.quorum
        named = f"{request.run_id}\n{request.digest}\n{reminder}"
        return Notice(
            hashlib.sha256(named.encode()).hexdigest()[:32],
            request.run_id,
            request.digest,
            request.kind,
            request.tool,
            () if quorum is None else quorum.roles,
            1 if quorum is None else quorum.missing,
            quorum is not None and quorum.escalated,
            request.asked_at,
            None if quorum is None else quorum.escalates_at,
            request.expires_at,
            reminder,
            listed.tags,
            f"{self._viewer_url.rstrip('/')}/inbox?run={request.run_id}" if self._viewer_url else "",
        )


def _due_at(request: StoredRequest, reminder: int, remind_after_s: float | None) -> float:
    """When a notice is due, in seconds since the epoch: the first one at once, a reminder if there are any."""
    if not reminder:
        return request.asked_at
    return float("inf") if remind_after_s is None else request.asked_at + reminder * remind_after_s


MIN_SECRET_BYTES = 24


class Webhook:
    """Sends each notice as a POST with a JSON body. If the answer is not 2xx, as with a redirect, it is sent again.

    The headers are those of https://www.standardwebhooks.com: ``webhook-id`` (the notice's id, the same each time it is
    sent), ``webhook-timestamp`` (seconds since the epoch) and, with a secret, ``webhook-signature``: ``v1,`` and the
    base64 of the HMAC-SHA256 of ``ID.TIMESTAMP.BODY``.

    Args:
        url: Where to send them.
        secret: The key of the HMAC, which the receiver has, too; None to sign nothing.
        timeout_s: Seconds for one attempt.
        now: The clock, in seconds since the epoch.

    Raises:
        ConfigurationError: The URL is not one of HTTP, or the secret has fewer than 24 bytes.
    """

    def __init__(
        self, url: str, *, secret: bytes | None = None, timeout_s: float = 10.0, now: Callable[[], float] = time.time
    ) -> None:
        import httpx  # only where notices are sent

        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigurationError(f"the URL of a webhook cannot be read: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigurationError("the URL of a webhook must begin with https:// or http:// and name a host")
        if secret is not None and len(secret) < MIN_SECRET_BYTES:
            raise ConfigurationError(f"the secret of a webhook must have at least {MIN_SECRET_BYTES} bytes")
        self._url = parsed
        self._secret = secret
        self._timeout_s = timeout_s
        self._now = now

    def __repr__(self) -> str:
        return f"Webhook({self._url.scheme}://{self._url.host}/...)"  # the rest may be a key

    async def __call__(self, notice: Notice) -> None:
        """Send a notice.

        Raises:
            NoticeError: The receiver cannot be reached, or does not accept it.
        """
        import httpx

        body = json.dumps(notice.to_json(), separators=(",", ":")).encode()
        timestamp = str(int(self._now()))
        headers = {"content-type": "application/json", "webhook-id": notice.id, "webhook-timestamp": timestamp}
        if self._secret is not None:
            headers["webhook-signature"] = signature(self._secret, notice.id, timestamp, body)
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                httpx.AsyncClient(timeout=self._timeout_s, follow_redirects=False) as client,
                client.stream("POST", self._url, content=body, headers=headers) as response,
            ):
                status, said = response.status_code, response.headers
        except (httpx.ReadTimeout, TimeoutError) as error:
            raise NoticeError(f"{self._url.host} did not answer within {self._timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise NoticeError(f"{self._url.host} cannot be reached ({type(error).__name__})") from error
        if not 200 <= status < 300:
            raise NoticeError(f"{self._url.host} answered {status}", _retry_after_s(said))


def signature(secret: bytes, notice_id: str, timestamp: str, body: bytes) -> str:
    """The header ``webhook-signature``, for receivers to compare with ``hmac.compare_digest``.

    Args:
        secret: The key.
        notice_id: The header ``webhook-id``.
        timestamp: The header ``webhook-timestamp``.
        body: The body.
    """
    signed = f"{notice_id}.{timestamp}.".encode() + body
    return f"v1,{base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()}"


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The seconds that a header ``Retry-After`` asks to wait; None if it has none, or a date."""
    text = headers.get("retry-after", "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
