"""``Webhook``: sends notices to a URL, signed as the Standard Webhooks specification says."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Mapping

from agentfsm.errors import ConfigurationError
from agentfsm.workers.notices import Notice, NoticeError

__all__ = ["Webhook", "signature"]

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
            raise ConfigurationError("the URL of a webhook begins with https:// or http://, and names a host")
        if secret is not None and len(secret) < MIN_SECRET_BYTES:
            raise ConfigurationError(f"the secret of a webhook has at least {MIN_SECRET_BYTES} bytes")
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
        except (httpx.HTTPError, TimeoutError) as error:
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
