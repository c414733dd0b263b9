"""The connection to an MCP server across restarts: opened again when it is needed, with tool definitions pinned."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from agentfsm.errors import ConfigurationError, ToolError
from agentfsm.integrations.mcp.forms import Form
from agentfsm.integrations.mcp.remote_call import Flight
from agentfsm.integrations.mcp.remote_tool import definition_pin
from agentfsm.integrations.mcp.session import MCPSession, ServerGoneError
from agentfsm.integrations.mcp.transports import Server, ServerHandlers

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import Tool as Listed

T = TypeVar("T")


class ServerConnection:
    """The connection to one server. A session that is lost is replaced by another before the next request."""

    def __init__(
        self, server: Server, start_timeout: float, recheck: bool, *, elicitation: bool, sampling: bool
    ) -> None:
        self._server, self._start_timeout, self._recheck = server, start_timeout, recheck
        elicit, sample = self._elicit if elicitation else None, self._sample if sampling else None
        self._handlers = ServerHandlers(self._on_message, elicit, sample)
        self._turn = asyncio.Lock()
        self._flight: Flight | None = None
        self._pinned: Mapping[str, str] = {}
        self._session: MCPSession | None = None
        self._changed = False
        self._lock = asyncio.Lock()

    @property
    def instructions(self) -> str:
        """What the server says about its use; an empty string if it says nothing."""
        return "" if self._session is None else self._session.instructions

    async def open(self) -> list[Listed]:
        """Start or reach the server, and read its list of tools.

        Raises:
            ConfigurationError: It is open already, or cannot be started or reached.
        """
        name = self._server.name
        if self._session is not None:
            raise ConfigurationError(f"the MCP server {name!r} is already open")
        try:
            return await self._open()
        except ServerGoneError as error:
            said = f"{self._ending(error)}{self._server.output}"
            raise ConfigurationError(f"the MCP server {name!r} cannot be started or reached: {said}") from error
        except ToolError as error:
            raise ConfigurationError(f"the MCP server {name!r} does not return its list of tools: {error}") from error

    def _ending(self, error: ServerGoneError) -> str:
        return (self._server.ending if error.by_itself else "") or str(error)

    def pin(self, definitions: Mapping[str, str]) -> None:
        """Refuse calls of tools whose definition is another from now on."""
        self._pinned = dict(definitions)

    async def close(self) -> None:
        """Stop or leave the server."""
        await self._disconnect(self._session)

    async def send(self, request: Callable[[Client], Awaitable[T]]) -> T:
        """The response to a request that is not a call of a tool.

        Raises:
            ToolError: The server cannot be reached, or returned an error.
        """
        return await self.request(lambda session: session.send(request))

    async def request(self, request: Callable[[MCPSession], Awaitable[T]]) -> T:
        """The response to requests that are not calls of tools.

        Raises:
            ToolError: The server cannot be reached, or returned an error.
        """
        return await self._within(self._current_session, request)

    async def call(self, name: str, request: Callable[[Client], Awaitable[T]]) -> T:
        """The response to a call of a tool.

        Raises:
            ToolError: The server cannot be reached or returned an error, or the definition of the tool has changed.
        """
        return await self._within(lambda: self._verified_session(name), lambda session: session.send(request))

    async def exchange(self, flight: Flight, name: str, request: Callable[[Client], Awaitable[T]]) -> T:
        """The response to a call of a tool whose server may ask a person or a model during the call.

        In the protocol before 2026-07-28 a server does not say during which call it asks. So such calls are made one
        after the other, but for those that wait for a person.

        Raises:
            ToolError: The server cannot be reached or returned an error, or the definition of the tool has changed.
        """

        async def send(session: MCPSession) -> T:
            if session.asks_in_results:
                return await session.send(request)
            await self._turn.acquire()
            self._flight = flight
            try:
                return await session.send(request)
            finally:
                flight.is_over = True
                self._end_turn(flight)

        return await self._within(lambda: self._verified_session(name), send)

    def _end_turn(self, flight: Flight) -> None:
        if self._flight is flight:
            self._flight = None
            self._turn.release()

    async def _elicit(self, context: Any, params: Any) -> Any:
        """Ask a person what the server asks during a call."""
        from mcp import types

        flight = self._flight
        if flight is None:
            return types.ErrorData(
                code=types.INVALID_REQUEST, message="a person can be asked only during a call that a reply makes"
            )
        self._end_turn(flight)
        try:
            answer = await flight.ask(Form.from_sdk(params), None)
        except ToolError as error:
            return types.ErrorData(code=types.INVALID_PARAMS, message=str(error))
        finally:
            await self._turn.acquire()
            self._flight = flight
            if flight.is_over:
                self._end_turn(flight)
        return types.ElicitResult.model_validate(answer.model_dump())

    async def _sample(self, context: Any, params: Any) -> Any:
        """Ask a model what the server asks during a call."""
        from mcp import types

        flight = self._flight
        if flight is None:
            return types.ErrorData(
                code=types.INVALID_REQUEST, message="a model can be asked only during a call that a reply makes"
            )
        try:
            return await flight.sample(params)
        except ToolError as error:
            return types.ErrorData(code=types.INVALID_REQUEST, message=str(error))

    async def _within(
        self, enter: Callable[[], Awaitable[MCPSession]], request: Callable[[MCPSession], Awaitable[T]]
    ) -> T:
        session: MCPSession | None = None
        try:
            session = await enter()
            return await request(session)
        except ServerGoneError as error:
            await self._disconnect(session)
            gone = f"the MCP server {self._server.name!r} is gone: {self._ending(error)}"
            text = f"{gone}; the next call reconnects, without its state"
            raise ToolError(text, kind="environment_error") from error

    async def _current_session(self) -> MCPSession:
        async with self._lock:
            if self._session is None:
                await self._open()
            session = self._session
        if session is None:
            raise ServerGoneError("it was closed")
        return session

    async def _verified_session(self, name: str) -> MCPSession:
        """The session, after checking that the definition of the tool has not changed."""
        async with self._lock:
            listed: list[Listed] | None = None
            if self._session is None:
                listed = await self._open()
            session = self._session
            if session is None:
                raise ServerGoneError("it was closed")
            if listed is None and (self._recheck or self._changed):
                self._changed = False
                try:
                    listed = await session.list_tools()
                except BaseException as error:
                    self._changed = True  # the list is unknown, so the next call reads it even without recheck
                    if isinstance(error, ServerGoneError):
                        await self._disconnect(session)
                    raise
        if listed is not None:
            current = {definition_pin(t) for t in listed if t.name == name}
            if current != {self._pinned[name]}:
                self._changed = True  # the next call reads the list again
                what = "no longer has" if not current else "has changed the description or schema of"
                label = self._server.name
                raise ToolError(
                    f"the MCP server {label!r} {what} {name!r} since this agent was created; the call is rejected",
                    kind="policy_violation",
                    blockers=(f"{label} {what} {name}",),
                )
        return session

    async def _on_message(self, message: Any) -> None:
        """Record that the server reported a change of its list of tools."""
        if getattr(message, "method", None) == "notifications/tools/list_changed":
            self._changed = True

    async def _open(self) -> list[Listed]:
        session = self._session = MCPSession(self._server, self._handlers, self._start_timeout)
        try:
            await session.open()
            self._changed = False
            return await session.list_tools()
        except BaseException:
            await self._disconnect(self._session)
            raise

    async def _disconnect(self, session: MCPSession | None) -> None:
        """Close a session; the next request opens another."""
        if session is not None:
            if self._session is session:
                self._session = None
            await session.close()
