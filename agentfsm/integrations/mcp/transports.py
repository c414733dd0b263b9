"""How an MCP server is reached: as a child process (stdio), or over streamable HTTP."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

from pydantic import SecretStr, TypeAdapter, ValidationError

from agentfsm.errors import ConfigurationError, MissingExtraError
from agentfsm.integrations.mcp.oauth import Authorizer
from agentfsm.loop.withholding import environment_secrets, header_secrets, mask_secrets
from agentfsm.models.wire_json import as_object, loads

if TYPE_CHECKING:
    import httpx2
    from mcp import Client, StdioServerParameters
    from mcp.client._transport import Transport, TransportStreams
    from mcp.shared.message import SessionMessage

logger = logging.getLogger("agentfsm")

Values = Mapping[str, str] | Callable[[], Mapping[str, str] | Awaitable[Mapping[str, str]]]
"""Environment variables or headers, or a function that returns them, plain or async."""


class MessageHandler(Protocol):
    """Receives every message that the server sends on its own."""

    async def __call__(self, message: Any) -> None:
        """Handle a message."""
        ...


class RequestHandler(Protocol):
    """Answers a request of the server."""

    async def __call__(self, context: Any, params: Any) -> Any:
        """The answer, or an error of the protocol."""
        ...


@dataclass(frozen=True, slots=True)
class ServerHandlers:
    """What answers a server that sends something on its own.

    Attributes:
        on_message: Receives its notifications.
        elicit: Answers a request for a person's input; None if there may be none, and the server is told so.
        sample: Answers a request for a model's reply; None if there may be none, and the server is told so.
    """

    on_message: MessageHandler
    elicit: RequestHandler | None = None
    sample: RequestHandler | None = None


class Server(Protocol):
    """An MCP server: how to reach it, and what is known if that fails."""

    @property
    def name(self) -> str:
        """The command or the address, without arguments and headers."""
        ...

    @property
    def secrets(self) -> Sequence[SecretStr]:
        """What the server was given as secret so far; more is added as it is given."""
        ...

    def connect(self, handlers: ServerHandlers) -> AbstractAsyncContextManager[Client]:
        """A context manager that opens a client and closes it."""
        ...

    @property
    def asks_user(self) -> bool:
        """Whether the user is asked to authorize the app now, so that it takes longer until it responds."""
        ...

    @property
    def status(self) -> int | None:
        """The HTTP status of its last answer, if that was an error; None if it does not use HTTP."""
        ...

    @property
    def ending(self) -> str:
        """How a connection that has ended did so: an exit code, a signal, an HTTP status; may be empty."""
        ...

    @property
    def output(self) -> str:
        """What it wrote apart from the protocol, for the error if it does not start; may be empty."""
        ...


_VALUES: TypeAdapter[Mapping[str, str]] = TypeAdapter(Mapping[str, str])

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


async def current_values(given: Values, what: str) -> dict[str, str]:
    """Environment variables or headers as they are now.

    Raises:
        ConfigurationError: The function returns something else.
    """
    values: Any = given() if callable(given) else given
    if isawaitable(values):
        values = await values
    try:
        return dict(_VALUES.validate_python(values, strict=True))
    except ValidationError:
        raise ConfigurationError(f"the function for {what} must return a mapping of strings to strings") from None


def _add_secrets(known: list[SecretStr], found: Iterable[str]) -> None:
    known += [secret for secret in map(SecretStr, found) if secret not in known]


def _open_client(transport: Transport, handlers: ServerHandlers) -> Client:
    from mcp import Client

    return Client(
        transport,
        cache=None,
        message_handler=handlers.on_message,
        elicitation_callback=handlers.elicit,
        sampling_callback=handlers.sample,
    )


_KEPT_LINES, _KEPT_STRAYS, _MAX_LINE_CHARS = 10, 3, 300
"""How much of what a server writes to stderr, and to stdout besides messages, an error quotes."""

_KEPT_LINE_CHARS = 20_000
"""How much of such a line is kept: secrets are masked before it is cut, so it must contain them in full."""


@dataclass
class StdioServer:
    """A server that runs as a child process and uses stdin and stdout.

    Attributes:
        parameters: The command to start.
        env: Environment variables, in addition to a few of this process; a function is called at each start.
        errlog: Receives its stderr. By default only the last lines are kept, for the error if it does not start.
        secrets: The secrets among its environment variables.
    """

    parameters: StdioServerParameters
    env: Values = field(default_factory=dict[str, str], repr=False)
    errlog: TextIO | None = None
    secrets: list[SecretStr] = field(default_factory=list[SecretStr], init=False, repr=False)
    _lines: deque[str] = field(default_factory=lambda: deque[str](maxlen=_KEPT_LINES), init=False, repr=False)
    _strays: list[str] = field(default_factory=list[str], init=False, repr=False)
    _exit_code: int | None = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        """The command, without its folder and its arguments."""
        return os.path.basename(self.parameters.command)  # noqa: PTH119  # as the shell names it

    @asynccontextmanager
    async def connect(self, handlers: ServerHandlers) -> AsyncGenerator[Client]:
        """Start the server, and stop it at the end."""
        from mcp.client.stdio import stdio_client

        self._lines.clear()
        self._strays.clear()
        self._exit_code = None
        env = await current_values(self.env, "env")
        _add_secrets(self.secrets, environment_secrets(env))
        parameters = self.parameters.model_copy(update={"env": env})
        with _line_reader(self._lines) as tail:
            transport = stdio_client(parameters, self.errlog or tail)
            observed = self._note_exit_code(transport)
            async with _open_client(_readable(observed, self.name, self._strays), handlers) as client:
                yield client

    @asynccontextmanager
    async def _note_exit_code(self, transport: Transport) -> AsyncGenerator[TransportStreams]:
        """The transport of a process; in the end, how the process has ended."""
        process = None
        try:
            async with transport as streams:
                # The SDK keeps the process to itself, and nothing else knows how it ended.
                frame: Any = getattr(getattr(transport, "gen", None), "ag_frame", None)
                process = None if frame is None else frame.f_locals.get("process")
                yield streams
        finally:
            self._exit_code = getattr(process, "returncode", None)

    @property
    def asks_user(self) -> bool:
        """False."""
        return False

    @property
    def status(self) -> None:
        """None."""

    @property
    def ending(self) -> str:
        """Its exit code, or the signal that killed it."""
        return "" if self._exit_code is None else f"it has ended{_describe_exit(self._exit_code)}"

    @property
    def output(self) -> str:
        """What it wrote to stdout that is not a message, and the last lines of its stderr."""
        said = {"it wrote to stdout, where only messages may be": self._strays}
        said["the last lines of its stderr"] = list(self._lines)
        secrets = [each.get_secret_value() for each in self.secrets]
        quoted = {what: mask_secrets("\n".join(lines), secrets).split("\n") for what, lines in said.items() if lines}
        return "".join(f"; {what}:" + "".join(map(_quote_line, lines)) for what, lines in quoted.items())


def _quote_line(line: str) -> str:
    return f"\n    {_printable(line)[:_MAX_LINE_CHARS]}"


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f" with exit code {code}"
    known = -code in signal.Signals._value2member_map_
    return f", killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text).strip()


@contextmanager
def _line_reader(lines: deque[str]) -> Generator[TextIO]:
    """A file whose lines are added to ``lines`` until every process that writes to it has closed it."""
    read_end, write_end = os.pipe()

    def read() -> None:
        with os.fdopen(read_end, encoding="utf-8", errors="replace") as file:
            is_start = True
            while text := file.readline(_KEPT_LINE_CHARS):
                if is_start and _printable(text):
                    lines.append(text.rstrip("\n"))
                is_start = text.endswith("\n")

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
        headers: Sent with every request; a function is called before each.
        authorizer: Authorizes the requests.
        secrets: The secrets among its headers, its tokens, and the password in its URL.
        status: The HTTP status of its last answer, if that was an error.
    """

    url: str
    name: str
    headers: Values = field(repr=False)
    authorizer: Authorizer = field(repr=False)
    secrets: list[SecretStr] = field(default_factory=list[SecretStr], init=False, repr=False)
    status: int | None = field(default=None, init=False)

    @asynccontextmanager
    async def connect(self, handlers: ServerHandlers) -> AsyncGenerator[Client]:
        """Connect to the server."""
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        self.status = None
        timeout = httpx2.Timeout(CONNECT_TIMEOUT_S, read=None)
        fixed = {} if callable(self.headers) else dict(self.headers)
        _add_secrets(self.secrets, [*header_secrets(fixed), *environment_secrets({"URL": self.url})])
        hooks: dict[str, list[Callable[..., Any]]] = {"request": [self._set_headers], "response": [self._note_status]}
        async with httpx2.AsyncClient(
            headers=fixed,
            timeout=timeout,
            event_hooks=hooks,
            auth=self.authorizer.auth(partial(_add_secrets, self.secrets)),
        ) as http:
            transport = streamable_http_client(self.url, http_client=http)
            async with _open_client(_readable(transport, self.name), handlers) as client:
                yield client

    async def _set_headers(self, request: httpx2.Request) -> None:
        if callable(self.headers) and self._is_own(request):  # not to an authorization server
            headers = await current_values(self.headers, "headers")
            _add_secrets(self.secrets, header_secrets(headers))
            request.headers.update(headers)

    async def _note_status(self, response: httpx2.Response) -> None:
        if response.request.method == "POST" and self._is_own(response.request):  # it need not have other methods
            self.status = response.status_code if response.status_code >= HTTPStatus.BAD_REQUEST else None

    def _is_own(self, request: httpx2.Request) -> bool:
        import httpx2

        own, asked = httpx2.URL(self.url), request.url
        return (own.scheme, own.host, own.port, own.path) == (asked.scheme, asked.host, asked.port, asked.path)

    @property
    def asks_user(self) -> bool:
        """Whether the user is asked to authorize the app now."""
        return self.authorizer.asks_user

    @property
    def ending(self) -> str:
        """The HTTP status of its last answer, if that was an error."""
        if self.status is None:
            return ""
        known = self.status in HTTPStatus._value2member_map_
        return f"it answered {self.status}{f' {HTTPStatus(self.status).phrase}' if known else ''}"

    @property
    def output(self) -> str:
        """Nothing."""
        return ""


@asynccontextmanager
async def _readable(
    transport: Transport, server: str, strays: list[str] | None = None
) -> AsyncGenerator[TransportStreams]:
    """A transport whose messages the SDK can read.

    Lists of tools hold only valid definitions: the SDK would reject the whole list for one. An answer that is no
    message of the protocol is the error of its request: the SDK would let the request wait forever.

    Args:
        transport: The transport.
        server: The name of the server, for the log.
        strays: Receives the first lines that are nothing of the kind.
    """
    import anyio
    from mcp.shared.message import SessionMessage

    async with transport as (read, write):
        send, receive = anyio.create_memory_object_stream[SessionMessage | Exception](0)

        async def pump() -> None:
            async with send:
                async for message in read:
                    if isinstance(message, ValidationError):
                        message = _mended(message, strays) or message
                    if isinstance(message, SessionMessage):
                        _drop_invalid_tools(getattr(message.message, "result", None), server)
                    await send.send(message)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pump)
            async with receive:
                yield receive, write
            tasks.cancel_scope.cancel()


_ID_OF_ANSWER = re.compile(
    r'\s*\{(?!.*"method"\s*:).*?"id"\s*:\s*(\d+|"[^"\\]*")\s*(?:,\s*"(?:result|error)"\s*:|\}\s*$)', re.DOTALL
)
"""The id of an answer that is not JSON, where servers write it: before the result, or at the end."""

NO_MESSAGE = "the server's answer is not a message of the protocol (JSON-RPC 2.0)"
"""The error of a request whose answer cannot be read."""


def _mended(error: ValidationError, strays: list[str] | None) -> SessionMessage | None:
    """What can be made of a line that the SDK cannot read."""
    from mcp import types
    from mcp.shared.message import SessionMessage

    inputs: list[Any] = [each["input"] for each in error.errors()]
    if isinstance(inputs[0], str):  # not JSON for the SDK, because of a byte-order mark or half a character
        with suppress(ValueError):
            value = loads(inputs[0].removeprefix("\ufeff"))
            return SessionMessage(types.jsonrpc_message_adapter.validate_python(value, by_name=False))
        if (found := _ID_OF_ANSWER.match(inputs[0])) is not None:
            return _error_answer(loads(found[1]), NO_MESSAGE)
        if strays is not None and len(strays) < _KEPT_STRAYS and _printable(inputs[0]):
            strays.append(inputs[0][:_KEPT_LINE_CHARS].rstrip("\n"))
        return None
    answer = next((found for found in map(as_object, inputs) if "id" in found), as_object(None))
    if "method" in answer or not isinstance(answer.get("id"), int | str):
        return None
    said: object = answer.get("error")
    reason = said if isinstance(said, str) else as_object(said).get("message")
    return _error_answer(answer["id"], str(reason or NO_MESSAGE))


def _error_answer(request_id: Any, text: str) -> SessionMessage:
    """The answer that a request has failed."""
    from mcp import types
    from mcp.shared.message import SessionMessage

    error = types.ErrorData(code=types.INTERNAL_ERROR, message=text)
    return SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=request_id, error=error))


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
            logger.warning("the tool %.100r of the MCP server %r is left out: its definition is invalid", name, server)
        else:
            kept.append(definition)
    page["tools"] = kept
