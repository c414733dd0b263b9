"""One HTTP client for each event loop, with the key put on a request at the last moment.

A model may be used from several event loops, one after the other (``run_sync``) or in several threads. A
connection belongs to the loop that opened it, so each loop gets a client of its own, which is closed when
the loop shuts down: a loop closes its asynchronous generators then, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator

import httpx
from pydantic import SecretStr

__all__ = ["Clients", "KeyHeader"]

_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=100)
"""A call never waits for another's connection: how many there are at once is for ``ConcurrencyLimit`` to say."""


class KeyHeader(httpx.Auth):
    """Puts the key on a request at the last moment, so that it stands in no variable a traceback shows."""

    def __init__(self, header: str, scheme: str, key: SecretStr | None) -> None:
        self._header, self._scheme, self._key = header, scheme, key

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """The request with its key."""
        if self._key is not None:
            request.headers[self._header] = self._scheme + self._key.get_secret_value()
        yield request


class Clients:
    """The clients of a model.

    Args:
        transport: What carries the calls instead of the network, or None.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport | None) -> None:
        self._transport = transport
        self._clients: dict[asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, AsyncGenerator[None, None]]] = {}

    async def mine(self) -> httpx.AsyncClient:
        """The running loop's client; those of closed loops are forgotten."""
        for loop in [loop for loop in list(self._clients) if loop.is_closed()]:
            self._clients.pop(loop, None)
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            client = httpx.AsyncClient(transport=self._transport, follow_redirects=False, limits=_LIMITS)
            lifetime = _close_with_the_loop(client)
            self._clients[loop] = (client, lifetime)
            await anext(lifetime)
        return self._clients[loop][0]

    async def aclose(self) -> None:
        """Close the running loop's client; the next call opens another."""
        _, lifetime = self._clients.pop(asyncio.get_running_loop(), (None, None))
        if lifetime is not None:
            await lifetime.aclose()


async def _close_with_the_loop(client: httpx.AsyncClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.aclose()
