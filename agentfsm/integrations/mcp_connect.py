"""How an MCP server is reached, by the SDK's own client: over the pipes of a child process, or over HTTP."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from agentfsm.errors import MissingExtraError

if TYPE_CHECKING:
    from mcp import Client, StdioServerParameters

__all__ = ["Connect", "Heard", "over_http", "over_pipes", "require_sdk"]


class Heard(Protocol):
    """Is told of every message that the server sends of itself."""

    async def __call__(self, message: Any) -> None:
        """Take note of a message."""
        ...


Connect = Callable[[Heard], "AbstractAsyncContextManager[Client]"]
"""Opens a client, and closes it behind the block."""

PATIENCE_S = 30.0
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


def over_pipes(server: StdioServerParameters, errlog: TextIO | None) -> Connect:
    """Start a child process and speak over its pipes.

    Args:
        server: What to start.
        errlog: Where what it writes to stderr goes; nowhere unless given.
    """

    @asynccontextmanager
    async def connect(heard: Heard) -> AsyncGenerator[Client]:
        from mcp import Client
        from mcp.client.stdio import stdio_client

        with open(os.devnull, "w") as nowhere:  # noqa: ASYNC230, PTH123  # a device, opened at once
            async with Client(stdio_client(server, errlog or nowhere), cache=None, message_handler=heard) as client:
                yield client

    return connect


def over_http(url: str, headers: Mapping[str, str]) -> Connect:
    """Speak streamable HTTP.

    Args:
        url: The server's address.
        headers: Sent with every request.
    """

    @asynccontextmanager
    async def connect(heard: Heard) -> AsyncGenerator[Client]:
        import httpx2
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        timeout = httpx2.Timeout(PATIENCE_S, read=None)
        async with (
            httpx2.AsyncClient(headers=dict(headers), timeout=timeout) as http,
            Client(streamable_http_client(url, http_client=http), cache=None, message_handler=heard) as client,
        ):
            yield client

    return connect
