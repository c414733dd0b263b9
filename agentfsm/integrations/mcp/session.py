"""A session with an MCP server, owned by one task.

The SDK's context managers must be exited by the task that entered them, but calls come from any task. So one task owns
the connection for its whole lifetime, and the others only send requests.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import SecretStr, ValidationError

from agentfsm.errors import ConfigurationError, ToolError
from agentfsm.integrations.mcp.transports import NO_MESSAGE, Server, ServerHandlers
from agentfsm.loop.withholding import mask_secrets

if TYPE_CHECKING:
    from mcp import Client, MCPError, types

MAX_PAGES = 100
"""The maximum number of pages in a list of tools, for servers whose list never ends."""

_CONNECTION_LOST = re.compile(
    "Connection closed|SSE stream (ended|failed).*|Session terminated|Server returned an error response", re.DOTALL
)
"""The SDK's messages for a connection that is lost, or an HTTP error status without a reason."""

_SESSION_LOST = re.compile(
    r"\b(session id|(invalid|unknown|expired) session|session (not found|expired|terminated)|server not initialized)\b",
    re.IGNORECASE,
)
"""What servers say with HTTP status 400 where a session is unknown, as after their restart.

(``No valid session ID provided`` and ``Server not initialized`` in the official TypeScript SDK and its examples.)
"""

T = TypeVar("T")


_ENDED = "the connection has ended"

_UNREADABLE = "Failed to parse"
"""How the SDK's error for an answer that it cannot read begins; the rest of it describes the SDK's types."""


class ServerGoneError(Exception):
    """The server cannot be reached. This error is not raised outside the integration.

    Attributes:
        by_itself: Whether it ended by itself.
    """

    def __init__(self, text: str, *, by_itself: bool = False) -> None:
        super().__init__(text)
        self.by_itself = by_itself


class RefusedError(ToolError):
    """The server answered a request with an error of the protocol."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class MCPSession:
    """One connection to a server."""

    def __init__(self, server: Server, handlers: ServerHandlers, start_timeout: float) -> None:
        self._server, self._handlers, self._start_timeout = server, handlers, start_timeout
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
        done: set[asyncio.Future[Any]] = set()
        waiting = True
        while waiting and not done:  # a person who is asked to authorize the app takes their time
            done, _ = await asyncio.wait(either, timeout=self._start_timeout, return_when=asyncio.FIRST_COMPLETED)
            waiting = self._server.asks_user
        if not done:
            raise ServerGoneError(f"it does not respond within {self._start_timeout:g} s (start_timeout)")
        if not self._client.done():
            said = _describe_error(self._task.exception(), self._server.secrets)
            raise ServerGoneError(said, by_itself=said == _ENDED)

    async def _run(self) -> None:
        async with self._server.connect(self._handlers) as client:
            client.session.validate_tool_result = _accept_result  # type: ignore[method-assign]
            self._client.set_result(client)
            await self._closing.wait()

    async def send(self, request: Callable[[Client], Awaitable[T]]) -> T:
        """The response to a request; a cancellation is sent to the server.

        Raises:
            ServerGoneError: The server cannot be reached.
            ToolError: The server returned an error, or a result that is not valid.
        """
        from mcp import MCPError

        if self._task is None or self._task.done() or not self._client.done():
            raise ServerGoneError(_ENDED, by_itself=True)
        try:
            return await request(self._client.result())
        except MCPError as error:
            if _CONNECTION_LOST.fullmatch(error.message):
                raise ServerGoneError(_ENDED, by_itself=True) from error
            text = NO_MESSAGE if error.message.startswith(_UNREADABLE) else error.message
            if _is_session_lost(error, self._server.status):
                raise ServerGoneError(f"its session has ended ({text})") from error
            raise RefusedError(text, error.code) from error
        except ValidationError as error:
            raise ToolError(f"the MCP server returned a result that is not valid: {_invalid(error)}") from None
        except ToolError:
            raise
        except Exception as error:
            raise ServerGoneError(_describe_error(error, self._server.secrets)) from error

    async def list_tools(self) -> list[types.Tool]:
        """The server's tools, from every page of its list.

        Raises:
            ServerGoneError: The server cannot be reached, or its list has too many pages.
            ToolError: The server returned an error.
        """
        return await self._list("tools", lambda cursor: lambda client: client.list_tools(cursor=cursor))

    async def list_resources(self) -> list[types.Resource]:
        """The server's resources, as ``list_tools`` returns its tools."""
        return await self._list("resources", lambda cursor: lambda client: client.list_resources(cursor=cursor))

    async def list_resource_templates(self) -> list[types.ResourceTemplate]:
        """The server's resource templates, as ``list_tools`` returns its tools."""
        return await self._list(
            "resource_templates", lambda cursor: lambda client: client.list_resource_templates(cursor=cursor)
        )

    async def list_prompts(self) -> list[types.Prompt]:
        """The server's prompts, as ``list_tools`` returns its tools."""
        return await self._list("prompts", lambda cursor: lambda client: client.list_prompts(cursor=cursor))

    async def _list(self, field: str, read: Callable[[str | None], Callable[[Client], Awaitable[Any]]]) -> list[Any]:
        """Every page of a list; empty if the server has none and says so."""
        items: list[Any] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            try:
                page = await self.send(read(cursor))
            except RefusedError:
                if cursor is None and not self._declares(field.partition("_")[0].rstrip("s") + "s"):
                    return []
                raise
            items += getattr(page, field)
            cursor = page.next_cursor or None  # some servers end a list with an empty one
            if cursor is None:
                return items
        raise ServerGoneError(f"its list of {field.replace('_', ' ')} does not end after {MAX_PAGES} pages")

    def _declares(self, capability: str) -> bool:
        """Whether the server says that it has ``tools``, ``resources`` or ``prompts``."""
        return getattr(self._client.result().session.server_capabilities, capability, None) is not None

    @property
    def asks_in_results(self) -> bool:
        """Whether the protocol is one in which a call comes back with the server's questions (since 2026-07-28)."""
        from mcp.types.version import MODERN_PROTOCOL_VERSIONS

        return self._client.done() and self._client.result().protocol_version in MODERN_PROTOCOL_VERSIONS

    @property
    def instructions(self) -> str:
        """What the server says about its use; an empty string if it says nothing."""
        return (self._client.result().instructions or "").strip() if self._client.done() else ""

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


def _is_session_lost(error: MCPError, status: int | None) -> bool:
    """Whether an error says that the server does not know the session, and not that it refuses the request."""
    from mcp import types

    if error.code in (types.METHOD_NOT_FOUND, types.INVALID_PARAMS):  # which may come with either status
        return False
    said = _SESSION_LOST.search(error.message) is not None
    return status == HTTPStatus.NOT_FOUND or (status == HTTPStatus.BAD_REQUEST and said)


def _invalid(error: ValidationError) -> str:
    """Where a result is invalid, without its content."""
    return ", ".join(sorted({".".join(map(str, each["loc"][:3])) for each in error.errors(include_input=False)})[:3])


_MAX_REASON_CHARS = 300
"""How much of a reason that a server may have written an error quotes."""


def _describe_error(error: Any, secrets: Iterable[SecretStr]) -> str:
    """The class of an exception, and some reasons; other texts may contain an address or a secret."""
    from mcp import MCPError
    from mcp.client.auth import OAuthFlowError

    inner: list[Any] = [error]
    while len(inner) == 1:  # a task group wraps its exceptions
        error = inner[0]
        inner = list(getattr(error, "exceptions", ()))
    if error is None or (isinstance(error, MCPError) and _CONNECTION_LOST.fullmatch(error.message)):
        return _ENDED
    if isinstance(error, ConfigurationError):  # of a function that the app gives
        return str(error)
    # Why the server or the authorization refuses, nobody could guess.
    if isinstance(error, (OAuthFlowError, MCPError)) or str(error).startswith("Unsupported protocol version"):
        return f"{type(error).__name__}: {_reason(str(error), secrets)}"
    if isinstance(error, ValidationError):
        return f"its answer is not valid: {_invalid(error)}"
    reason = _system_reason(error)
    return f"{type(error).__name__}{f': {reason}' if reason else ''}"


def _reason(said: str, secrets: Iterable[SecretStr]) -> str:
    """A reason on one line, shortened and without secrets."""
    if said.startswith(_UNREADABLE):
        return NO_MESSAGE
    said = "".join(c if c.isprintable() else " " for c in said)
    return mask_secrets(said, [each.get_secret_value() for each in secrets])[:_MAX_REASON_CHARS]


def _system_reason(error: BaseException | None) -> str:
    """What the operating system or TLS says about a connection that failed; empty if neither says anything."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"its certificate cannot be verified ({error.verify_message})"
        if isinstance(error, OSError) and error.errno is not None:
            return os.strerror(error.errno) if error.errno > 0 else error.strerror or ""
        error = error.__cause__ or error.__context__
    return ""
