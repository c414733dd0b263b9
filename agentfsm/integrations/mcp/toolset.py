"""``MCPTools``: one MCP server: its tools, for an agent's ``tools``, its resources and its prompts (extra ``mcp``).

    async with MCPTools.stdio("uvx", ["mcp-server-git"], settings=MCPSettings(prefix="git_")) as tools:
        agent = Agent(model, tools=[*tools, my_own_tool])
        result = await agent.run("What changed last week?")

Tool definitions are pinned when the block is entered. The list is read again before each call, and a call of a tool
whose description or schema has changed is rejected as a ``policy_violation`` (a server that shows one description for
approval and later uses another is a known attack, the "rug pull"). If the server dies, the current call fails with an
``environment_error``, and the next call restarts it.

Schemas are evaluated within bounds (``schema_check``). A tool whose schema is too large or nested too deep, whose name
is too long or whose definition is invalid is left out, with a warning in the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import urlsplit

from agentfsm.errors import ConfigurationError, ToolError
from agentfsm.integrations.mcp.connection import ServerConnection
from agentfsm.integrations.mcp.content import result_content
from agentfsm.integrations.mcp.oauth import Authorizer, OAuth
from agentfsm.integrations.mcp.remote_call import Flight, Progress, progress_callback
from agentfsm.integrations.mcp.remote_tool import (
    MCPSettings,
    definition_pin,
    is_valid_name,
    make_remote_tool,
    model_name,
)
from agentfsm.integrations.mcp.resources import (
    Prompt,
    Resource,
    ResourceContent,
    ResourceTemplate,
    prompt_messages,
    reading_tools,
)
from agentfsm.integrations.mcp.session import MCPSession
from agentfsm.integrations.mcp.transports import (
    HttpServer,
    Server,
    StdioServer,
    Values,
    require_sdk,
)
from agentfsm.loop.messages import Image, Message, ToolCall, ToolResult
from agentfsm.runtime.schema_check import MAX_SCHEMA_CHARS, SchemaCheck, schema_problem
from agentfsm.runtime.tool_execution import to_model_content
from agentfsm.runtime.tools import Tool

if TYPE_CHECKING:
    import httpx2
    from mcp import Client
    from mcp.types import CallToolResult, InputRequiredResult
    from mcp.types import Tool as Listed

logger = logging.getLogger("agentfsm")


_CANCEL_GRACE_S = 1.0
"""Seconds for calls that wait for a person to be cancelled at their server when it is closed."""


class MCPTools:
    """The tools of one MCP server, to be iterated inside ``async with``. Made by ``stdio`` or ``http``.

    Attributes:
        label: The name of the server in errors and logs, without arguments and headers.
        settings: How its tools are used.
        instructions: What the server said about its use when the block was entered; an empty string if nothing.
    """

    def __init__(self, server: Server, settings: MCPSettings) -> None:
        self.label = server.name
        self.settings = settings
        self.instructions = ""
        self._secrets = server.secrets
        self._connection = ServerConnection(
            server,
            settings.start_timeout,
            settings.recheck,
            elicitation=settings.elicitation,
            sampling=settings.sampling is not None,
        )
        self._parked: dict[str, Flight] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._outputs: dict[str, SchemaCheck] = {}
        self._tools: tuple[Tool, ...] | None = None

    @classmethod
    def stdio(
        cls,
        command: str,
        args: Sequence[str] = (),
        *,
        env: Values | None = None,
        cwd: str | Path | None = None,
        errlog: TextIO | None = None,
        settings: MCPSettings | None = None,
    ) -> MCPTools:
        """The tools of a server that runs as a child process and uses stdin and stdout.

        Args:
            command: The program.
            args: Its arguments.
            env: Environment variables, in addition to a few of this process (``PATH``, ``HOME``...); or a function,
                plain or async, that returns them, called at each start.
            cwd: The working directory.
            errlog: Receives its stderr. By default the last lines are kept for the error if it does not start.
            settings: How its tools are used.

        Raises:
            MissingExtraError: The ``mcp`` package is not installed.
        """
        require_sdk()
        from mcp import StdioServerParameters

        server = StdioServerParameters(command=command, args=list(args), cwd=cwd, encoding_error_handler="replace")
        return cls(StdioServer(server, _frozen(env), errlog), settings or MCPSettings())

    @classmethod
    def http(
        cls,
        url: str,
        *,
        headers: Values | None = None,
        auth: OAuth | httpx2.Auth | None = None,
        settings: MCPSettings | None = None,
    ) -> MCPTools:
        """The tools of a server that uses streamable HTTP.

        Args:
            url: Its URL (``https://example.com/mcp``). Redirects to another origin are not followed.
            headers: Sent with every request (``{"Authorization": "Bearer ..."}``); or a function, plain or async, that
                returns them, called before each request.
            auth: How the app gets authorized by its user (``OAuth``), or an ``httpx2.Auth``, such as those of
                ``mcp.client.auth.extensions`` for apps that act for themselves.
            settings: How its tools are used.

        Raises:
            MissingExtraError: The ``mcp`` package is not installed.
            ConfigurationError: The URL is invalid.
        """
        require_sdk()
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError("the address of an MCP server must be an http or https URL with a host")
        return cls(HttpServer(url, parts.hostname, _frozen(headers), Authorizer(url, auth)), settings or MCPSettings())

    # -- the tools ------------------------------------------------------------------------------------

    async def __aenter__(self) -> MCPTools:
        """Start or reach the server, and read its list of tools.

        Raises:
            ConfigurationError: It cannot be started or reached, or does not have a tool in ``settings.only``.
            agentfsm.errors.ToolDefinitionError: The name of a tool in ``settings.only`` is not valid for models.
        """
        listed = await self._connection.open()
        try:
            only = self.settings.only
            names = [t.name for t in listed]
            if only is not None and (missing := sorted(set(only) - set(names))):
                has = ", ".join(sorted(names))
                raise ConfigurationError(
                    f"the MCP server {self.label!r} has no tool {', '.join(missing)}; it has: {has}"
                )
            usable = [t for t in listed if (only is None or t.name in only) and self._is_usable(t)]
            selected = _distinct(usable, self.settings.prefix, self.label)
            self._outputs = {t.name: SchemaCheck(t.output_schema) for t in selected if t.output_schema is not None}
            self._connection.pin({t.name: definition_pin(t) for t in selected})
            self.instructions = self._connection.instructions
            notes = self.instructions if self.settings.instructions else ""
            asks = self.settings.elicitation or self.settings.sampling is not None
            channel = self if asks else None
            remote = (make_remote_tool(t, self._call, self.settings, notes, channel) for t in selected)
            every = (*remote, *reading_tools(self, self.settings))
            self._tools = tuple(replace(each, known_secrets=self._secrets) for each in every)
        except BaseException:
            await self._connection.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop or leave the server. Later calls fail."""
        self._tools = None
        self._parked.clear()
        for task in self._tasks:
            task.cancel()
        if self._tasks:  # the server is told that they are cancelled, if it still listens
            await asyncio.wait(self._tasks, timeout=_CANCEL_GRACE_S)
        await self._connection.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def __iter__(self) -> Iterator[Tool]:
        _ = self._opened
        return iter(self._tools or ())

    def __repr__(self) -> str:
        return f"MCPTools({self.label!r}, tools={[t.name for t in self._tools or ()]})"

    # -- resources and prompts --------------------------------------------------------------------------

    async def resources(self) -> list[Resource]:
        """The server's resources; empty if it has none.

        Raises:
            ConfigurationError: The server is not open.
            ToolError: It cannot be reached, or returned an error.
        """
        return [Resource.from_sdk(each) for each in await self._opened.request(MCPSession.list_resources)]

    async def resource_templates(self) -> list[ResourceTemplate]:
        """The forms of the URIs of further resources; empty if the server has none.

        Raises:
            ConfigurationError: The server is not open.
            ToolError: It cannot be reached, or returned an error.
        """
        return [
            ResourceTemplate.from_sdk(each) for each in await self._opened.request(MCPSession.list_resource_templates)
        ]

    async def read_resource(self, uri: str) -> list[ResourceContent]:
        """The contents of a resource: one, or those of the resources in it.

        Args:
            uri: Its URI.

        Raises:
            ConfigurationError: The server is not open.
            ToolError: The server has no such resource, cannot be reached, or returned an error.
        """
        result = await self._opened.send(lambda client: client.read_resource(uri))
        return [ResourceContent.from_sdk(each) for each in result.contents]

    async def prompts(self) -> list[Prompt]:
        """The server's prompts; empty if it has none.

        Raises:
            ConfigurationError: The server is not open.
            ToolError: It cannot be reached, or returned an error.
        """
        return [Prompt.from_sdk(each) for each in await self._opened.request(MCPSession.list_prompts)]

    async def get_prompt(self, name: str, arguments: Mapping[str, str] | None = None) -> list[Message]:
        """The messages of a prompt, which can be passed as the ``message_history`` of a run.

        Args:
            name: Its name.
            arguments: Its arguments.

        Raises:
            ConfigurationError: The server is not open.
            ToolError: The server has no such prompt, needs other arguments, cannot be reached, or returned an error.
        """
        given = dict(arguments or {})
        result = await self._opened.send(lambda client: client.get_prompt(name, given))
        return await prompt_messages(result, self.settings.files)

    @property
    def _opened(self) -> ServerConnection:
        """The connection."""
        if self._tools is None:
            raise ConfigurationError(f"the MCP server {self.label!r} is not open: use it inside 'async with'")
        return self._connection

    def _is_usable(self, listed: Listed) -> bool:
        problem = schema_problem(listed.input_schema) or schema_problem(listed.output_schema)
        why = f"because of its schema: {problem}" if problem else ""
        if not problem and self.settings.only is None and not is_valid_name(listed.name, self.settings.prefix):
            why = f"because its name is empty, or too long with the prefix {self.settings.prefix!r}"
        if len(listed.description or "") > MAX_SCHEMA_CHARS:
            why = f"because its description is longer than {MAX_SCHEMA_CHARS:,} characters"
        if why:
            _warn_left_out(listed, self.label, why)
        return not why

    # -- calls during which the server may ask a person or a model (``ServerChannel``) ---------------------------------

    @property
    def parked(self) -> dict[str, Flight]:
        """The calls that wait for a person in this process, by the id of their suspension."""
        return self._parked

    def own(self, task: asyncio.Task[Any]) -> None:
        """Wait for the task of a call, at the latest when the server is closed."""

        def end(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                task.exception()  # whoever awaits it gets it; a call that nobody awaits any more has failed silently

        self._tasks.add(task)
        task.add_done_callback(end)

    async def exchange(
        self, flight: Flight, name: str, request: Callable[[Client], Any]
    ) -> CallToolResult | InputRequiredResult:
        """Send a call; what the server asks during the call goes to its flight.

        Raises:
            ToolError: The server cannot be reached or returned an error, or the definition of the tool has changed.
        """
        result: CallToolResult | InputRequiredResult = await self._connection.exchange(flight, name, request)
        return result

    async def finish(self, call: ToolCall, name: str, result: CallToolResult) -> ToolResult:
        """The result of a call as a tool's result.

        Raises:
            ToolError: The tool failed, or its result does not fit its schema.
        """
        content, images = to_model_content(await self._parts(name, result))
        return ToolResult(call.id, call.name, content, images=images)

    # -- a call -----------------------------------------------------------------------------------------

    async def _call(self, name: str, arguments: dict[str, Any], progress: Progress | None) -> str | list[str | Image]:
        """The result of a tool."""
        if self._tools is None:
            raise ToolError(f"the MCP server {self.label!r} was closed", kind="environment_error")
        report = progress_callback(progress)
        result: CallToolResult = await self._connection.call(
            name, lambda client: client.call_tool(name, arguments, progress_callback=report)
        )
        return await self._parts(name, result)

    async def _parts(self, name: str, result: CallToolResult) -> str | list[str | Image]:
        """What the model gets of a result."""
        parts = await result_content(result, self.settings.files, self.settings.results)
        if result.is_error:
            raise ToolError(to_model_content(parts)[0] or "the tool failed and gave no reason")
        if (check := self._outputs.get(name)) is not None:
            if result.structured_content is None:
                raise ToolError(f"Tool {name} has an output schema but did not return structured content")
            for _, reason in check.errors(result.structured_content):
                raise ToolError(f"Invalid structured content returned by tool {name}: {reason}")
        return parts


def _distinct(usable: Sequence[Listed], prefix: str, server: str) -> list[Listed]:
    """The tools without those that could be mistaken for another: nobody knows which one the server would call."""
    kept: dict[str, Listed] = {}
    unclear: set[str] = set()
    for each in usable:
        first = kept.setdefault(model_name(each.name, prefix), each)
        if first.name != each.name:
            _warn_left_out(each, server, f"because for models its name is that of {first.name!r}")
        elif definition_pin(first) != definition_pin(each):
            unclear.add(each.name)
    for each in [t for t in kept.values() if t.name in unclear]:
        _warn_left_out(each, server, "because the server lists it several times, with different definitions")
    return [t for t in kept.values() if t.name not in unclear]


def _warn_left_out(listed: Listed, server: str, why: str) -> None:
    logger.warning("the tool %.100r of the MCP server %r is left out, %s", listed.name, server, why)


def _frozen(values: Values | None) -> Values:
    return values if callable(values) else dict(values or {})
