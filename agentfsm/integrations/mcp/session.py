"""The connection to an MCP server: its transports (stdio, streamable HTTP), and a session owned by one task.

The SDK's context managers must be exited by the task that entered them, but calls come from any task. So one task owns
the connection for its whole lifetime, and the others only send requests.
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
    """Receives every message that the server sends on its own."""

    async def __call__(self, message: Any) -> None:
        """Handle a message."""
        ...


ClientFactory = Callable[[MessageHandler], "AbstractAsyncContextManager[Client]"]
"""Makes a context manager that opens a client and closes it."""

CONNECT_TIMEOUT_S = 30.0
"""Seconds to connect to a server over HTTP; the tool's timeout limits how long a call may take."""


def require_sdk() -> None:
    """Check that the MCP SDK is installed.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        import mcp  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise MissingExtraError("using MCP servers", "mcp") from error


def stdio_client_factory(server: StdioServerParameters, errlog: TextIO | None) -> ClientFactory:
    """A factory of clients that start the server as a child process and use its stdin and stdout.

    Args:
        server: The command to start.
        errlog: Receives the stderr of the server; discarded by default.
    """

    @asynccontextmanager
    async def connect(on_message: MessageHandler) -> AsyncGenerator[Client]:
        from mcp import Client
        from mcp.client.stdio import stdio_client

        with open(os.devnull, "w") as devnull:  # noqa: ASYNC230, PTH123  # opening a device does not block
            async with Client(
                stdio_client(server, errlog or devnull), cache=None, message_handler=on_message
            ) as client:
                yield client

    return connect


def http_client_factory(url: str, headers: Mapping[str, str]) -> ClientFactory:
    """A factory of clients that use streamable HTTP.

    Args:
        url: The server's URL.
        headers: Sent with every request.
    """

    @asynccontextmanager
    async def connect(on_message: MessageHandler) -> AsyncGenerator[Client]:
        import httpx2
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        timeout = httpx2.Timeout(CONNECT_TIMEOUT_S, read=None)
        async with (
            httpx2.AsyncClient(headers=dict(headers), timeout=timeout) as http,
            Client(streamable_http_client(url, http_client=http), cache=None, message_handler=on_message) as client,
        ):
            yield client

    return connect


START_TIMEOUT_S = 60.0
"""Seconds for a server to start; a server that is installed on its first start takes long."""

MAX_PAGES = 100
"""The maximum number of pages in a list of tools, for servers whose list never ends."""

_SESSION_LOST_MESSAGES = frozenset({"Session terminated", "Server returned an error response"})
"""The SDK's messages for an HTTP error status, as after a restart of the server, when the session is unknown."""

T = TypeVar("T")


class ServerGoneError(Exception):
    """The server cannot be reached. This error is not raised outside the integration."""


class MCPSession:
    """One connection to a server.

    Args:
        connect: Makes a context manager that opens and closes a client.
    """

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[Client]]) -> None:
        self._connect = connect
        self._task: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()

    async def open(self) -> None:
        """Connect.

        Raises:
            ServerGoneError: The server cannot be reached or does not respond in time.
        """
        self._task = asyncio.create_task(self._run(), name="agentfsm-mcp")
        either: set[asyncio.Future[Any]] = {self._client, self._task}
        done, _ = await asyncio.wait(either, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise ServerGoneError(f"it does not respond within {START_TIMEOUT_S:g} s")
        if not self._client.done():
            raise ServerGoneError(_describe_error(self._task.exception()))

    async def _run(self) -> None:
        async with self._connect() as client:
            client.session.validate_tool_result = _accept_result  # type: ignore[method-assign]
            self._client.set_result(client)
            await self._closing.wait()

    async def send(self, request: Callable[[Client], Awaitable[T]]) -> T:
        """The response to a request; a cancellation is sent to the server.

        Args:
            request: Sends the request with a client.

        Raises:
            ServerGoneError: The server cannot be reached.
            ToolError: The server returned an error.
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
        except ToolError:
            raise
        except Exception as error:
            raise ServerGoneError(_describe_error(error)) from error

    async def list_tools(self) -> list[Listed]:
        """The server's tools, from every page of its list.

        Raises:
            ServerGoneError: The server cannot be reached, or its list has too many pages.
            ToolError: The server returned an error.
        """
        tools: list[Listed] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self.send(partial(_list_page, cursor=cursor))
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise ServerGoneError(f"its list of tools does not end after {MAX_PAGES} pages")

    async def close(self) -> None:
        """Disconnect, and wait until a child process has ended; errors are ignored."""
        self._closing.set()
        task = self._task
        if task is None:
            return
        if not self._client.done():
            task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()


async def _accept_result(name: str, result: object) -> None:
    """In place of the SDK's check by the server's schema, which has no bounds; ``MCPTools`` checks results itself."""


def _list_page(client: Client, cursor: str | None) -> Awaitable[ListToolsResult]:
    return client.list_tools(cursor=cursor)


def _describe_error(error: Any) -> str:
    """The class of an exception, and the reason of an OSError; other texts may contain an address or a secret."""
    inner: list[Any] = [error]
    while len(inner) == 1:  # a task group wraps its exceptions
        error = inner[0]
        inner = list(getattr(error, "exceptions", ()))
    if error is None:
        return "it has ended"
    reason = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
    return f"{type(error).__name__}{reason}"
