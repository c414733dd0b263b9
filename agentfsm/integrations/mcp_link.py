"""One connection to an MCP server, held by a task of its own.

The SDK's scopes must be left by the task that entered them, while calls come from any task; so one task holds
the connection for as long as it is wanted, and the others only use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from agentfsm.errors import ToolError

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import ListToolsResult
    from mcp.types import Tool as Listed

__all__ = ["Link", "ServerGoneError"]

START_S = 60.0
"""Seconds within which a server must be there; one that is installed when first started takes its time."""

MAX_PAGES = 100
"""How many pages a list of tools may have; a server whose pages never end is given up there."""

_NO_SESSION = frozenset({"Session terminated", "Server returned an error response"})
"""The SDK's words for an HTTP status that is no answer: the server was started anew and knows no such session."""

T = TypeVar("T")


class ServerGoneError(Exception):
    """The server cannot be reached any more, or never could; never leaves the integration."""


class Link:
    """One connection.

    Args:
        connect: Opens a client and closes it again.
    """

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[Client]]) -> None:
        self._connect = connect
        self._task: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()

    async def open(self) -> None:
        """Connect.

        Raises:
            ServerGoneError: There is no server there, or none that answers in time.
        """
        self._task = asyncio.create_task(self._hold(), name="agentfsm-mcp")
        either: set[asyncio.Future[Any]] = {self._client, self._task}
        done, _ = await asyncio.wait(either, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise ServerGoneError(f"it does not answer within {START_S:g} s")
        if not self._client.done():
            raise ServerGoneError(_words(self._task.exception()))

    async def _hold(self) -> None:
        async with self._connect() as client:
            self._client.set_result(client)
            await self._closing.wait()

    async def ask(self, request: Callable[[Client], Awaitable[T]]) -> T:
        """The answer to a request; cancelled, it tells the server so.

        Raises:
            ServerGoneError: The server is gone.
            ToolError: It refuses.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        if self._task is None or self._task.done() or not self._client.done():
            raise ServerGoneError("the connection has ended")
        try:
            return await request(self._client.result())
        except MCPError as error:
            if error.code == CONNECTION_CLOSED or error.message in _NO_SESSION:
                raise ServerGoneError("the connection has ended") from error
            raise ToolError(error.message) from error
        except RuntimeError as error:  # the SDK's word for a result that breaks its own schema
            raise ToolError(str(error)) from error
        except ToolError:
            raise
        except Exception as error:
            raise ServerGoneError(_words(error)) from error

    async def tools(self) -> list[Listed]:
        """The server's tools, from every page of its list.

        Raises:
            ServerGoneError: The server is gone, or its list never ends.
            ToolError: It refuses.
        """
        found: list[Listed] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self.ask(partial(_page, cursor=cursor))
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found
        raise ServerGoneError(f"its list of tools does not end after {MAX_PAGES} pages")

    async def close(self) -> None:
        """Part from the server, and wait until a child process has ended. Whatever goes wrong then is of no use."""
        self._closing.set()
        task = self._task
        if task is None:
            return
        if not self._client.done():
            task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()


def _page(client: Client, cursor: str | None) -> Awaitable[ListToolsResult]:
    return client.list_tools(cursor=cursor)


def _words(error: Any) -> str:
    """An exception's class, and of one of the system its reason: its text may hold an address, or more."""
    inner: list[Any] = [error]
    while len(inner) == 1:  # a task group wraps what went wrong in it
        error = inner[0]
        inner = list(getattr(error, "exceptions", ()))
    if error is None:
        return "it has ended"
    reason = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
    return f"{type(error).__name__}{reason}"
