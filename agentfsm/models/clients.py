"""One HTTP client for each event loop, with the key put on a request at the last moment.

A model may be used from several event loops, one after the other (``run_sync``) or in several threads. A
connection belongs to the loop that opened it, so each loop gets a client of its own, which is closed when
the loop shuts down: a loop closes its asynchronous generators then, and nothing else.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from functools import cache

import httpx
from pydantic import SecretStr

__all__ = ["Clients", "Held", "KeyHeader"]

_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=100)
"""A call never waits for another's connection: how many there are at once is for ``ConcurrencyLimit`` to say."""


@cache
def _trust() -> ssl.SSLContext:
    """Whose certificates are believed; read once, since that takes longer than all else about a client."""
    return httpx.create_ssl_context()


class KeyHeader(httpx.Auth):
    """Puts the key on a request at the last moment, so that it stands in no variable a traceback shows."""

    def __init__(self, header: str, scheme: str, key: SecretStr | None) -> None:
        self._header, self._scheme, self._key = header, scheme, key

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """The request with its key."""
        if self._key is not None:
            request.headers[self._header] = self._scheme + self._key.get_secret_value()
        yield request


@dataclass(slots=True, eq=False)
class Held:
    """A client and who uses it.

    Attributes:
        client: The client.
        lifetime: Ends with the loop, and closes it.
        users: How many calls it carries.
        retired: Whether it takes no more, and is closed with its last.
    """

    client: httpx.AsyncClient
    lifetime: AsyncGenerator[None, None]
    users: int = 0
    retired: bool = False


class Clients:
    """The clients of a model.

    Args:
        transport: What carries the calls instead of the network, or None.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport | None) -> None:
        self._transport = transport
        self._held: dict[asyncio.AbstractEventLoop, Held] = {}

    async def borrow(self) -> Held:
        """The running loop's client, to be given back; those of closed loops are forgotten."""
        for loop in [loop for loop in list(self._held) if loop.is_closed()]:
            self._held.pop(loop, None)
        loop = asyncio.get_running_loop()
        if loop not in self._held:
            client = httpx.AsyncClient(
                transport=self._transport, verify=_trust(), follow_redirects=False, limits=_LIMITS
            )
            self._held[loop] = held = Held(client, _close_with_the_loop(client))
            await anext(held.lifetime)
        held = self._held[loop]
        held.users += 1
        return held

    async def give_back(self, held: Held, *, cut_off: bool) -> None:
        """A call has ended.

        Args:
            held: What carried it.
            cut_off: Whether it was cancelled. A client may then keep a connection that it takes for busy, for
                ever; so it carries no more calls, and is closed with its last.
        """
        held.users -= 1
        if cut_off:
            held.retired = True
            loop = asyncio.get_running_loop()
            if self._held.get(loop) is held:
                del self._held[loop]
        if held.retired and not held.users:
            await held.lifetime.aclose()

    async def aclose(self) -> None:
        """Close the running loop's client; the next call opens another."""
        held = self._held.pop(asyncio.get_running_loop(), None)
        if held is not None:
            await held.lifetime.aclose()


async def _close_with_the_loop(client: httpx.AsyncClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.aclose()
