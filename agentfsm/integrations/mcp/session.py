"""The connection to an MCP server: its transports (stdio, streamable HTTP), and a session owned by one task.

The SDK's context managers must be exited by the task that entered them, but calls come from any task. So one task owns
the connection for its whole lifetime, and the others only send requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar, cast

from pydantic import ValidationError

from agentfsm.errors import MissingExtraError, ToolError

if TYPE_CHECKING:
    import httpx2
    from mcp import Client, StdioServerParameters
    from mcp.client._transport import Transport, TransportStreams
    from mcp.types import ListToolsResult
    from mcp.types import Tool as Listed

__all__ = ["HttpServer", "MCPSession", "MessageHandler", "Server", "ServerGoneError", "StdioServer", "require_sdk"]

logger = logging.getLogger("agentfsm")


class MessageHandler(Protocol):
    """Receives every message that the server sends on its own."""

    async def __call__(self, message: Any) -> None:
        """Handle a message."""
        ...


class Server(Protocol):
    """An MCP server: how to reach it, and what is known if that fails."""

    @property
    def name(self) -> str:
        """The command or the address, without arguments and headers."""
        ...

    def connect(self, on_message: MessageHandler) -> AbstractAsyncContextManager[Client]:
        """A context manager that opens a client and closes it."""
        ...

    def diagnosis(self) -> str:
        """What the server said apart from the protocol, for the error if it does not start; may be empty."""
        ...


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


_KEPT_LINES, _MAX_LINE_CHARS = 10, 300
"""How much of what a server writes to stderr an error quotes."""


@dataclass
class StdioServer:
    """A server that runs as a child process and uses stdin and stdout.

    Attributes:
        parameters: The command to start.
        errlog: Receives its stderr. By default only the last lines are kept, for the error if it does not start.
    """

    parameters: StdioServerParameters
    errlog: TextIO | None = None
    _lines: deque[str] = field(default_factory=lambda: deque[str](maxlen=_KEPT_LINES), repr=False)

    @property
    def name(self) -> str:
        """The command, without its folder and its arguments."""
        return os.path.basename(self.parameters.command)  # noqa: PTH119  # as the shell names it

    @asynccontextmanager
    async def connect(self, on_message: MessageHandler) -> AsyncGenerator[Client]:
        """Start the server, and stop it at the end."""
        from mcp import Client
        from mcp.client.stdio import stdio_client

        self._lines.clear()
        with _line_reader(self._lines) as tail:
            transport = _without_invalid_tools(stdio_client(self.parameters, self.errlog or tail), self.name)
            async with Client(transport, cache=None, message_handler=on_message) as client:
                yield client

    def diagnosis(self) -> str:
        """The last lines of its stderr."""
        if not self._lines:
            return ""
        return "; the last lines of its stderr:" + "".join(f"\n    {line}" for line in self._lines)


@contextmanager
def _line_reader(lines: deque[str]) -> Generator[TextIO]:
    """A file whose lines are added to ``lines`` until every process that writes to it has closed it."""
    read_end, write_end = os.pipe()

    def read() -> None:
        with os.fdopen(read_end, encoding="utf-8", errors="replace") as file:
            while text := file.readline(_MAX_LINE_CHARS):
                shown = "".join(c if c.isprintable() else " " for c in text).strip()
                if shown:
                    lines.append(shown)

    reader = threading.Thread(target=read, name="agentfsm-mcp-stderr", daemon=True)
    reader.start()
    try:
        with os.fdopen(write_end, "w") as file:
            yield file
    finally:
        reader.join(0.2)  # at most: a process that the server left behind may keep the file open


@dataclass
class HttpServer:
    """A server that uses streamable HTTP.

    Attributes:
        url: Its URL.
        name: Its host.
        headers: Sent with every request.
    """

    url: str
    name: str
    headers: Mapping[str, str] = field(repr=False)
    _status: int | None = field(default=None, init=False)

    @asynccontextmanager
    async def connect(self, on_message: MessageHandler) -> AsyncGenerator[Client]:
        """Connect to the server."""
        import httpx2
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        self._status = None
        timeout = httpx2.Timeout(CONNECT_TIMEOUT_S, read=None)
        hooks = {"response": [self._note_status]}
        async with httpx2.AsyncClient(headers=dict(self.headers), timeout=timeout, event_hooks=hooks) as http:
            transport = _without_invalid_tools(streamable_http_client(self.url, http_client=http), self.name)
            async with Client(transport, cache=None, message_handler=on_message) as client:
                yield client

    async def _note_status(self, response: httpx2.Response) -> None:
        if response.status_code >= HTTPStatus.BAD_REQUEST:
            self._status = response.status_code

    def diagnosis(self) -> str:
        """The last HTTP status that was an error."""
        if self._status is None:
            return ""
        known = self._status in HTTPStatus._value2member_map_
        return f"; it answered {self._status}{f' {HTTPStatus(self._status).phrase}' if known else ''}"


@asynccontextmanager
async def _without_invalid_tools(transport: Transport, server: str) -> AsyncGenerator[TransportStreams]:
    """A transport whose lists of tools hold only valid definitions: the SDK would reject the whole list for one."""
    import anyio
    from mcp.shared.message import SessionMessage

    async with transport as (read, write):
        send, receive = anyio.create_memory_object_stream[SessionMessage | Exception](0)

        async def pump() -> None:
            async with send:
                async for message in read:
                    if isinstance(message, SessionMessage):
                        _drop_invalid_tools(getattr(message.message, "result", None), server)
                    await send.send(message)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pump)
            async with receive:
                yield receive, write
            tasks.cancel_scope.cancel()


def _drop_invalid_tools(result: Any, server: str) -> None:
    """Remove from a list of tools what is not a tool; an input schema without a type is one of an object."""
    from mcp.types import Tool as Listed

    page = cast("dict[str, Any]", result) if isinstance(result, dict) else {}
    if not isinstance(page.get("tools"), list):
        return
    kept: list[Any] = []
    for each in page["tools"]:
        definition = cast("dict[str, Any]", each) if isinstance(each, dict) else {}
        schema: Any = definition.get("inputSchema")
        if isinstance(schema, dict):
            cast("dict[str, Any]", schema).setdefault("type", "object")
        try:
            Listed.model_validate(definition, by_name=False)
            if schema["type"] != "object":
                raise ValueError
        except ValueError:  # pydantic's error is one, and quotes the definition
            name = definition.get("name")
            logger.warning("the tool %r of the MCP server %r is left out: its definition is invalid", name, server)
        else:
            kept.append(definition)
    page["tools"] = kept


MAX_PAGES = 100
"""The maximum number of pages in a list of tools, for servers whose list never ends."""

_CONNECTION_CLOSED = -32000
"""The SDK's code of an error for a connection that was closed, ``mcp.types.CONNECTION_CLOSED``."""

_SESSION_LOST_MESSAGES = frozenset({"Session terminated", "Server returned an error response"})
"""The SDK's messages for an HTTP error status, as after a restart of the server, when the session is unknown."""

T = TypeVar("T")


class ServerGoneError(Exception):
    """The server cannot be reached. This error is not raised outside the integration."""


class MCPSession:
    """One connection to a server.

    Args:
        server: The server.
        on_message: Receives what the server sends on its own.
        start_timeout: Seconds for it to start and respond.
    """

    def __init__(self, server: Server, on_message: MessageHandler, start_timeout: float) -> None:
        self._server, self._on_message, self._start_timeout = server, on_message, start_timeout
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
        done, _ = await asyncio.wait(either, timeout=self._start_timeout, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise ServerGoneError(f"it does not respond within {self._start_timeout:g} s (start_timeout)")
        if not self._client.done():
            raise ServerGoneError(_describe_error(self._task.exception()))

    async def _run(self) -> None:
        async with self._server.connect(self._on_message) as client:
            client.session.validate_tool_result = _accept_result  # type: ignore[method-assign]
            self._client.set_result(client)
            await self._closing.wait()

    async def send(self, request: Callable[[Client], Awaitable[T]]) -> T:
        """The response to a request; a cancellation is sent to the server.

        Args:
            request: Sends the request with a client.

        Raises:
            ServerGoneError: The server cannot be reached.
            ToolError: The server returned an error, or a result that is not valid.
        """
        from mcp import MCPError

        if self._task is None or self._task.done() or not self._client.done():
            raise ServerGoneError("the connection has ended")
        try:
            return await request(self._client.result())
        except MCPError as error:
            if error.code == _CONNECTION_CLOSED or error.message in _SESSION_LOST_MESSAGES:
                raise ServerGoneError("the connection has ended") from error
            raise ToolError(error.message) from error
        except ValidationError as error:
            raise ToolError(f"the MCP server returned a result that is not valid: {_invalid(error)}") from None
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


def _invalid(error: ValidationError) -> str:
    """Where a result is invalid, without its content."""
    return ", ".join(sorted({".".join(map(str, each["loc"][:3])) for each in error.errors(include_input=False)})[:3])


def _list_page(client: Client, cursor: str | None) -> Awaitable[ListToolsResult]:
    return client.list_tools(cursor=cursor)


def _describe_error(error: Any) -> str:
    """The class of an exception, and the reason of an OSError; other texts may contain an address or a secret."""
    inner: list[Any] = [error]
    while len(inner) == 1:  # a task group wraps its exceptions
        error = inner[0]
        inner = list(getattr(error, "exceptions", ()))
    if error is None or getattr(error, "code", None) == _CONNECTION_CLOSED:
        return "it has ended"
    reason = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
    return f"{type(error).__name__}{reason}"
