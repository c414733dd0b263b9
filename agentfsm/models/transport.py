"""Cancellation-safe transport: one pooled httpx client per event loop, and each exchange in a task of its own.

An HTTP client that is cancelled at the wrong moment leaks its connection. Callers have several timeouts and may be
cancelled at any time, so each exchange runs in its own task, which is cancelled at most once; its client is then
retired. A connection belongs to the event loop that opened it, so each loop has a client of its own, which is closed
when the loop shuts down its asynchronous generators.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Generator
from dataclasses import dataclass
from functools import cache
from typing import cast

import httpx
from pydantic import SecretStr

__all__ = ["ApiKeyAuth", "ClientPool", "HttpExchange", "PooledClient"]


_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=100)
"""A call never waits for another's connection: how many there are at once is for ``ConcurrencyLimit`` to say."""


@cache
def _ssl_context() -> ssl.SSLContext:
    """Whose certificates are believed; read once, since that takes longer than all else about a client."""
    return httpx.create_ssl_context()


class ApiKeyAuth(httpx.Auth):
    """Puts the key on a request at the last moment, so that it stands in no variable a traceback shows."""

    def __init__(self, header: str, scheme: str, key: SecretStr | None) -> None:
        self._header, self._scheme, self._key = header, scheme, key

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """The request with its key."""
        if self._key is not None:
            request.headers[self._header] = self._scheme + self._key.get_secret_value()
        yield request


@dataclass(slots=True, eq=False)
class PooledClient:
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


class ClientPool:
    """The clients of a model.

    Args:
        transport: What carries the calls instead of the network, or None.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport | None) -> None:
        self._transport = transport
        self._clients: dict[asyncio.AbstractEventLoop, PooledClient] = {}

    async def acquire(self) -> PooledClient:
        """The running loop's client, to be given back; those of closed loops are forgotten."""
        for loop in [loop for loop in list(self._clients) if loop.is_closed()]:
            self._clients.pop(loop, None)
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            client = httpx.AsyncClient(
                transport=self._transport, verify=_ssl_context(), follow_redirects=False, limits=_LIMITS
            )
            self._clients[loop] = held = PooledClient(client, _close_on_loop_shutdown(client))
            await anext(held.lifetime)
        held = self._clients[loop]
        held.users += 1
        return held

    async def release(self, pooled: PooledClient, *, cancelled: bool) -> None:
        """A call has ended.

        Args:
            pooled: What carried it.
            cancelled: Whether it was cancelled. A client may then keep a connection that it takes for busy, for
                ever; so it carries no more calls, and is closed with its last.
        """
        pooled.users -= 1
        if cancelled:
            pooled.retired = True
            loop = asyncio.get_running_loop()
            if self._clients.get(loop) is pooled:
                del self._clients[loop]
        if pooled.retired and not pooled.users:
            await pooled.lifetime.aclose()

    async def aclose(self) -> None:
        """Close the running loop's client; the next call opens another."""
        held = self._clients.pop(asyncio.get_running_loop(), None)
        if held is not None:
            await held.lifetime.aclose()


async def _close_on_loop_shutdown(client: httpx.AsyncClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.aclose()


_MAX_BUFFERED_BYTES = 256 * 1024
"""Bytes of an answer, as they come, that are read before anybody asks for them."""


class HttpExchange:
    """A request on its way and the answer to it.

    Args:
        pool: Who carries it.
        url: Where it goes.
        content: Its body.
        headers: Its headers; no secrets.
        auth: What adds the key.
        connect_s: Seconds to reach the server, or None. The client has no other limit: two that strike at
            once would be two cancellations.
    """

    def __init__(
        self,
        pool: ClientPool,
        url: str,
        content: bytes,
        headers: dict[str, str],
        auth: httpx.Auth,
        connect_s: float | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._response: httpx.Response | None = None
        self._chunks: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._data_ready: asyncio.Future[None] | None = None
        self._buffer_space: asyncio.Future[None] | None = None
        self._task = self._loop.create_task(self._run(pool, url, content, headers, auth, connect_s))
        self._task.add_done_callback(lambda _: _wake(self._data_ready))

    async def response_head(self, deadline: float) -> httpx.Response:
        """The answer's head.

        Raises:
            TimeoutError: It has not come by then, by the event loop's clock.
            httpx.HTTPError: It will not come.
        """
        while self._response is None:
            if self._task.done():
                self._task.result()
            await self._wait_for_data(deadline)
        return self._response

    async def read(self, deadline: float) -> bytes | None:
        """More of the body, as it came, or None at its end.

        Raises:
            TimeoutError: Nothing has come by then, by the event loop's clock.
            httpx.HTTPError: It will not come.
        """
        while not self._chunks:
            if self._task.done():
                self._task.result()
                return None
            await self._wait_for_data(deadline)
        chunk = self._chunks.popleft()
        self._buffered_bytes -= len(chunk)
        _wake(self._buffer_space)
        return chunk

    async def drain(self, deadline: float) -> None:
        """Wait for the end of the body, which nobody reads any more; but no longer than until then."""
        try:
            while await self.read(deadline) is not None:
                pass
        except (TimeoutError, httpx.HTTPError):
            pass

    async def aclose(self) -> None:
        """Let go: what is not whole by now is cut off, and its connection closed."""
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # whoever cared has seen it

    async def _wait_for_data(self, deadline: float) -> None:
        if deadline <= self._loop.time():
            raise TimeoutError
        self._data_ready = self._loop.create_future()
        timer = self._loop.call_at(deadline, _wake, self._data_ready)
        try:
            await self._data_ready
        finally:
            timer.cancel()
            self._data_ready = None

    async def _run(
        self,
        pool: ClientPool,
        url: str,
        content: bytes,
        headers: dict[str, str],
        auth: httpx.Auth,
        connect_s: float | None,
    ) -> None:
        held, cut_off = await pool.acquire(), False
        try:
            timeout = httpx.Timeout(None, connect=connect_s)
            request = held.client.build_request("POST", url, content=content, headers=headers, timeout=timeout)
            response = await held.client.send(request, auth=auth, stream=True)
            self._response = response
            _wake(self._data_ready)
            try:
                async for chunk in cast("AsyncIterable[bytes]", response.stream):  # packed as it came
                    await self._buffer_chunk(chunk)
            finally:
                await response.aclose()
        except asyncio.CancelledError:
            cut_off = True
            raise
        finally:
            await pool.release(held, cancelled=cut_off)

    async def _buffer_chunk(self, chunk: bytes) -> None:
        """Keep a chunk for the reader, and wait while it is far behind."""
        self._chunks.append(chunk)
        self._buffered_bytes += len(chunk)
        _wake(self._data_ready)
        while self._buffered_bytes > _MAX_BUFFERED_BYTES:
            self._buffer_space = self._loop.create_future()
            await self._buffer_space


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
