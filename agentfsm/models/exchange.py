"""``Exchange``: one request and its answer, carried by a task of their own while the caller waits beside it.

An HTTP client that is cancelled at the wrong moment keeps a connection open for good. Callers have several
time limits, and people who stop runs: they are cancelled at any moment, any number of times. What is carried
here is cancelled once at most, and then its client is given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable
from typing import cast

import httpx

from agentfsm.models.clients import Clients

__all__ = ["Exchange"]

_AHEAD = 256 * 1024
"""Bytes of an answer, as they come, that are read before anybody asks for them."""


class Exchange:
    """A request on its way and the answer to it.

    Args:
        clients: Who carries it.
        url: Where it goes.
        content: Its body.
        headers: Its headers; no secrets.
        auth: What adds the key.
        connect_s: Seconds to reach the server, or None. The client has no other limit: two that strike at
            once would be two cancellations.
    """

    def __init__(
        self,
        clients: Clients,
        url: str,
        content: bytes,
        headers: dict[str, str],
        auth: httpx.Auth,
        connect_s: float | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._response: httpx.Response | None = None
        self._chunks: deque[bytes] = deque()
        self._ahead = 0
        self._news: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._task = self._loop.create_task(self._carry(clients, url, content, headers, auth, connect_s))
        self._task.add_done_callback(lambda _: _tell(self._news))

    async def head(self, until: float) -> httpx.Response:
        """The answer's head.

        Raises:
            TimeoutError: It has not come by then, by the event loop's clock.
            httpx.HTTPError: It will not come.
        """
        while self._response is None:
            if self._task.done():
                self._task.result()
            await self._wait(until)
        return self._response

    async def read(self, until: float) -> bytes | None:
        """More of the body, as it came, or None at its end.

        Raises:
            TimeoutError: Nothing has come by then, by the event loop's clock.
            httpx.HTTPError: It will not come.
        """
        while not self._chunks:
            if self._task.done():
                self._task.result()
                return None
            await self._wait(until)
        chunk = self._chunks.popleft()
        self._ahead -= len(chunk)
        _tell(self._room)
        return chunk

    async def finished(self, until: float) -> None:
        """Wait for the end of the body, which nobody reads any more; but no longer than until then."""
        try:
            while await self.read(until) is not None:
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

    async def _wait(self, until: float) -> None:
        if until <= self._loop.time():
            raise TimeoutError
        self._news = self._loop.create_future()
        timer = self._loop.call_at(until, _tell, self._news)
        try:
            await self._news
        finally:
            timer.cancel()
            self._news = None

    async def _carry(
        self,
        clients: Clients,
        url: str,
        content: bytes,
        headers: dict[str, str],
        auth: httpx.Auth,
        connect_s: float | None,
    ) -> None:
        held, cut_off = await clients.borrow(), False
        try:
            timeout = httpx.Timeout(None, connect=connect_s)
            request = held.client.build_request("POST", url, content=content, headers=headers, timeout=timeout)
            response = await held.client.send(request, auth=auth, stream=True)
            self._response = response
            _tell(self._news)
            try:
                async for chunk in cast("AsyncIterable[bytes]", response.stream):  # packed as it came
                    await self._keep(chunk)
            finally:
                await response.aclose()
        except asyncio.CancelledError:
            cut_off = True
            raise
        finally:
            await clients.give_back(held, cut_off=cut_off)

    async def _keep(self, chunk: bytes) -> None:
        """Keep a chunk for the reader, and wait while it is far behind."""
        self._chunks.append(chunk)
        self._ahead += len(chunk)
        _tell(self._news)
        while self._ahead > _AHEAD:
            self._room = self._loop.create_future()
            await self._room


def _tell(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
