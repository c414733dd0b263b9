"""Cancellation-safe transport: one pooled httpx client per event loop, and each exchange in a task of its own.

An HTTP client that is cancelled at the wrong moment leaks its connection. Callers have several timeouts and may be
cancelled at any time, so each exchange runs in its own task, which is cancelled at most once; its client then gets no
more calls. A connection belongs to the event loop that opened it, so each loop has its own client, which is closed when
the loop shuts down its asynchronous generators.
"""

from __future__ import annotations

import asyncio
import inspect
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from dataclasses import dataclass
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import cast
from weakref import WeakKeyDictionary

import httpx
from pydantic import SecretStr

from agentfsm.errors import ConfigurationError
from agentfsm.models.providers import KeyFunction, parse_key

_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=100)
"""Calls never wait for a connection: ``ConcurrencyLimit`` limits how many run at once."""


@cache
def _ssl_context() -> ssl.SSLContext:
    """The trusted certificates; loaded once, since that is the slowest part of creating a client."""
    return httpx.create_ssl_context()


class ApiKeyError(Exception):
    """The function that returns the API key raised, or returned something else."""


class ApiKeyAuth(httpx.Auth):
    """Adds the API key to a request just before it is sent, so that no variable shown in a traceback holds it.

    Args:
        header: The header that carries the key.
        scheme: What precedes the key in it.
        key: The key, or None.
        function: Returns the key, where ``key`` is None. It is called before the first request, and once more if a
            request is rejected with 401, which is then repeated with the new key. A plain function runs in a thread.
        on_key: Receives each key that the function returned.
    """

    def __init__(
        self,
        header: str,
        scheme: str,
        key: SecretStr | None,
        function: KeyFunction | None,
        on_key: Callable[[SecretStr], None],
    ) -> None:
        self._header, self._scheme, self._key = header, scheme, key
        self._function, self._on_key = function, on_key
        self._locks = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """Add the key to the request, and repeat it once with a renewed key.

        Raises:
            ApiKeyError: The function that returns the key failed.
        """
        if self._key is None:
            await self._renew_key(None)
        sent = self._add_key(request)
        response = yield request
        if response.status_code == 401 and self._function is not None:
            await self._renew_key(sent)
            self._add_key(request)
            yield request

    def _add_key(self, request: httpx.Request) -> SecretStr | None:
        if self._key is not None:
            request.headers[self._header] = self._scheme + self._key.get_secret_value()
        return self._key

    async def _renew_key(self, rejected: SecretStr | None) -> None:
        """Fetch a key, unless another call has done so since this one read the key."""
        if self._function is None:
            return
        async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if self._key is rejected:
                self._key = await self._fetch_key(self._function)

    async def _fetch_key(self, function: KeyFunction) -> SecretStr:
        try:
            value = await asyncio.to_thread(function) if not inspect.iscoroutinefunction(function) else function()
            value = await value if inspect.isawaitable(value) else value
            key = parse_key(value, "the api_key function")
        except ConfigurationError as error:
            raise ApiKeyError(str(error)) from None
        except Exception as error:
            raise ApiKeyError(f"the api_key function raised {type(error).__name__}") from None
        if key is None:
            raise ApiKeyError("the api_key function returned no key")
        self._on_key(key)
        return key


@dataclass(slots=True, eq=False)
class PooledClient:
    """An HTTP client and its use count.

    Attributes:
        client: The client.
        lifetime: Closes the client when the event loop shuts down.
        users: The number of calls in progress.
        retired: Whether it gets no more calls, and is closed after the last.
    """

    client: httpx.AsyncClient
    lifetime: AsyncGenerator[None]
    users: int = 0
    retired: bool = False


class ClientPool:
    """The HTTP clients of a model, one per event loop.

    Args:
        transport: Replaces the network, or None.
        verify: The certificates of the authorities to trust; by default the system's and certifi's.
        proxy: The URL of a proxy; by default what the environment says.
        client: A client to use for every call, which is never closed here, or None.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport | None = None,
        verify: ssl.SSLContext | None = None,
        proxy: SecretStr | None = None,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        self._transport, self._verify, self._proxy = transport, verify, proxy
        self._given = None if client is None else PooledClient(client, _never())
        self._clients: dict[asyncio.AbstractEventLoop, PooledClient] = {}

    async def acquire(self) -> PooledClient:
        """The client of the running loop, to be released; clients of closed loops are dropped."""
        if self._given is not None:
            return self._given
        for loop in [loop for loop in list(self._clients) if loop.is_closed()]:
            self._clients.pop(loop, None)
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            # The client keeps no cookies: one run's would be sent with another's calls.
            client = httpx.AsyncClient(
                transport=self._transport,
                verify=self._verify or _ssl_context(),
                proxy=None if self._proxy is None else self._proxy.get_secret_value(),
                limits=_LIMITS,
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            )
            self._clients[loop] = pooled = PooledClient(client, _close_on_loop_shutdown(client))
            await anext(pooled.lifetime)
        pooled = self._clients[loop]
        pooled.users += 1
        return pooled

    async def release(self, pooled: PooledClient, *, cancelled: bool) -> None:
        """Return a client after a call.

        Args:
            pooled: The client.
            cancelled: Whether the call was cancelled. The client may then consider a connection busy forever, so
                it gets no more calls and is closed after the last.
        """
        if pooled is self._given:
            return
        pooled.users -= 1
        if cancelled:
            pooled.retired = True
            loop = asyncio.get_running_loop()
            if self._clients.get(loop) is pooled:
                del self._clients[loop]
        if pooled.retired and not pooled.users:
            await pooled.lifetime.aclose()

    async def aclose(self) -> None:
        """Close the client of the running loop; the next call opens another."""
        pooled = self._clients.pop(asyncio.get_running_loop(), None)
        if pooled is not None:
            await pooled.lifetime.aclose()


async def _close_on_loop_shutdown(client: httpx.AsyncClient) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        await client.aclose()


async def _never() -> AsyncGenerator[None]:
    """The lifetime of a client that others close."""
    return
    yield


_MAX_BUFFERED_BYTES = 256 * 1024
"""Bytes of a response, as received, that are read ahead of the consumer."""


class HttpExchange:
    """One request and its response.

    Args:
        pool: The clients.
        url: The URL.
        content: The request body.
        headers: The request headers, without secrets.
        auth: Adds the API key.
        connect_s: Seconds to connect to the server, or None. The client has no other timeout: two that expired
            together would cancel it twice.
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
        """The status and headers of the response.

        Raises:
            TimeoutError: They have not arrived by the deadline.
            httpx.HTTPError: The request failed.
            ApiKeyError: The function that returns the API key failed.
        """
        while self._response is None:
            if self._task.done():
                self._task.result()
            await self._wait_for_data(deadline)
        return self._response

    async def read(self, deadline: float) -> bytes | None:
        """The next chunk of the body, as received, or None at its end.

        Raises:
            TimeoutError: Nothing has arrived by the deadline.
            httpx.HTTPError: The connection failed.
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
        """Discard the rest of the body, at most until the deadline."""
        try:
            while await self.read(deadline) is not None:
                pass
        except (TimeoutError, httpx.HTTPError):
            pass

    async def aclose(self) -> None:
        """End the exchange; if it is not complete, it is cancelled and its connection closed."""
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # mark it as retrieved; the reader has seen it

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
        pooled, cancelled = await pool.acquire(), False
        try:
            timeout = httpx.Timeout(None, connect=connect_s)
            request = pooled.client.build_request("POST", url, content=content, headers=headers, timeout=timeout)
            response = await pooled.client.send(request, auth=auth, stream=True, follow_redirects=False)
            self._response = response
            _wake(self._data_ready)
            try:
                async for chunk in cast("AsyncIterable[bytes]", response.stream):  # still compressed
                    await self._buffer_chunk(chunk)
            finally:
                await response.aclose()
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            await pool.release(pooled, cancelled=cancelled)

    async def _buffer_chunk(self, chunk: bytes) -> None:
        """Buffer a chunk, and wait while the buffer is full."""
        self._chunks.append(chunk)
        self._buffered_bytes += len(chunk)
        _wake(self._data_ready)
        while self._buffered_bytes > _MAX_BUFFERED_BYTES:
            self._buffer_space = self._loop.create_future()
            await self._buffer_space


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
