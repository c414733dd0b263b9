"""The connection to an MCP server: its transports (stdio, streamable HTTP), and a session owned by one task.

The SDK's scopes must be exited by the task that entered them, while calls come from any task; so one task owns the
connection for its whole lifetime, and the others only send requests.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar

from agentfsm.errors import MissingExtraError, ToolError

if TYPE_CHECKING:
    from mcp import Client, StdioServerParameters
    from mcp.types import ListToolsResult
    from mcp.types import Tool as Listed

__all__ = [
    "ClientFactory",
    "MCPSession",
    "MessageHandler",
    "ServerGoneError",
    "http_client_factory",
    "require_sdk",
    "stdio_client_factory",
]


class MessageHandler(Protocol):
    """Is told of every message that the server sends of itself."""

    async def __call__(self, message: Any) -> None:
        """Take note of a message."""
        ...


ClientFactory = Callable[[MessageHandler], "AbstractAsyncContextManager[Client]"]
"""Opens a client, and closes it behind the block."""

CONNECT_TIMEOUT_S = 30.0
"""Seconds to reach a server over HTTP; how long an answer may take is for the call's limit to say."""


def require_sdk() -> None:
    """Make sure that the SDK is there.

    Raises:
        MissingExtraError: It is not.
    """
    try:
        import mcp  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise MissingExtraError("using MCP servers", "mcp") from error


def stdio_client_factory(server: StdioServerParameters, errlog: TextIO | None) -> ClientFactory:
    """Start a child process and speak over its pipes.

    Args:
        server: What to start.
        errlog: Where what it writes to stderr goes; nowhere unless given.
    """

    @asynccontextmanager
    async def connect(heard: MessageHandler) -> AsyncGenerator[Client]:
        from mcp import Client
        from mcp.client.stdio import stdio_client

        with open(os.devnull, "w") as nowhere:  # noqa: ASYNC230, PTH123  # a device, opened at once
            async with Client(stdio_client(server, errlog or nowhere), cache=None, message_handler=heard) as client:
                yield client

    return connect


def http_client_factory(url: str, headers: Mapping[str, str]) -> ClientFactory:
    """Speak streamable HTTP.

    Args:
        url: The server's address.
        headers: Sent with every request.
    """

    @asynccontextmanager
    async def connect(heard: MessageHandler) -> AsyncGenerator[Client]:
        import httpx2
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        timeout = httpx2.Timeout(CONNECT_TIMEOUT_S, read=None)
        async with (
            httpx2.AsyncClient(headers=dict(headers), timeout=timeout) as http,
            Client(streamable_http_client(url, http_client=http), cache=None, message_handler=heard) as client,
        ):
            yield client

    return connect


START_TIMEOUT_S = 60.0
"""Seconds within which a server must be there; one that is installed when first started takes its time."""

MAX_PAGES = 100
"""How many pages a list of tools may have; a server whose pages never end is given up there."""

_SESSION_LOST_MESSAGES = frozenset({"Session terminated", "Server returned an error response"})
"""The SDK's words for an HTTP status that is no answer: the server was started anew and knows no such session."""

T = TypeVar("T")


class ServerGoneError(Exception):
    """The server cannot be reached any more, or never could; never leaves the integration."""


class MCPSession:
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
        self._task = asyncio.create_task(self._run(), name="agentfsm-mcp")
        either: set[asyncio.Future[Any]] = {self._client, self._task}
        done, _ = await asyncio.wait(either, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise ServerGoneError(f"it does not answer within {START_TIMEOUT_S:g} s")
        if not self._client.done():
            raise ServerGoneError(_describe_error(self._task.exception()))

    async def _run(self) -> None:
        async with self._connect() as client:
            self._client.set_result(client)
            await self._closing.wait()

    async def send(self, request: Callable[[Client], Awaitable[T]]) -> T:
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
            if error.code == CONNECTION_CLOSED or error.message in _SESSION_LOST_MESSAGES:
                raise ServerGoneError("the connection has ended") from error
            raise ToolError(error.message) from error
        except RuntimeError as error:  # the SDK's word for a result that breaks its own schema
            raise ToolError(str(error)) from error
        except ToolError:
            raise
        except Exception as error:
            raise ServerGoneError(_describe_error(error)) from error

    async def list_tools(self) -> list[Listed]:
        """The server's tools, from every page of its list.

        Raises:
            ServerGoneError: The server is gone, or its list never ends.
            ToolError: It refuses.
        """
        found: list[Listed] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self.send(partial(_list_page, cursor=cursor))
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


def _list_page(client: Client, cursor: str | None) -> Awaitable[ListToolsResult]:
    return client.list_tools(cursor=cursor)


def _describe_error(error: Any) -> str:
    """An exception's class, and of one of the system its reason: its text may hold an address, or more."""
    inner: list[Any] = [error]
    while len(inner) == 1:  # a task group wraps what went wrong in it
        error = inner[0]
        inner = list(getattr(error, "exceptions", ()))
    if error is None:
        return "it has ended"
    reason = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
    return f"{type(error).__name__}{reason}"
