"""How a call travels: one POST with a deadline, a limit on the answer, no redirects, and no key in an error.

``HttpWire.open`` gives an answer to read as it comes, ``HttpWire.post`` the whole of one. Every await has a
time limit of its own, so that no server holds a call past its deadline, however slowly it drips.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

import httpx

from agentfsm.core.model import ModelRequest
from agentfsm.errors import ConfigurationError, ModelError
from agentfsm.models.clients import Clients, KeyHeader
from agentfsm.models.exchange import Exchange
from agentfsm.models.faults import Caller, error_in
from agentfsm.models.inflate import ACCEPTED, Inflate
from agentfsm.models.wire import loads

__all__ = ["Answer", "HttpOptions", "HttpWire"]

_ERROR_BYTES = 64 * 1024
"""How much of an error answer is read; its first words are enough."""

_DRAIN_S = 0.1
"""How long a stream that has said all may take to close; after that its connection is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """How calls travel; the defaults are right for almost everyone.

    Attributes:
        connect_timeout_s: Seconds to reach the server; the request's own deadline still holds.
        max_body_bytes: Bytes of an answer, or of one event of a stream, unpacked; a longer one is refused.
        max_stream_bytes: Bytes of all events of a stream, unpacked; a longer one is refused. A piece of
            text travels in an envelope many times its size.
        transport: What carries the calls instead of the network; for tests.
        clock: The wall clock, in seconds since 1970, to read a Retry-After date by.

    Raises:
        ConfigurationError: A number is not above zero.
    """

    connect_timeout_s: float = 10.0
    max_body_bytes: int = 32 * 1024 * 1024
    max_stream_bytes: int = 512 * 1024 * 1024
    transport: httpx.AsyncBaseTransport | None = None
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "max_body_bytes", "max_stream_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be above zero")


class Answer:
    """An answer under way: its head is there, its body is read as it comes.

    Attributes:
        status: The HTTP status.
        headers: Its headers.
    """

    def __init__(
        self,
        exchange: Exchange,
        response: httpx.Response,
        caller: Caller,
        *,
        deadline: float,
        timeout_s: float,
        limit: int,
    ) -> None:
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers
        self._exchange = exchange
        self._caller = caller
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._limit = limit
        self._size = 0
        self._begun = False
        self._inflate = Inflate(response.headers.get("content-encoding", ""))
        self._slices: Iterator[bytes] = iter(())

    @property
    def ok(self) -> bool:
        """Whether the status says yes."""
        return 200 <= self.status < 300

    @property
    def length_known(self) -> bool:
        """Whether the wire marked the body's end; one that it did not mark can be cut off unnoticed."""
        return "content-length" in self.headers or "transfer-encoding" in self.headers

    async def read(self, heartbeat_s: float | None = None) -> bytes:
        """More of the body, unpacked, as it comes; nothing at its end.

        Args:
            heartbeat_s: Seconds of silence, once the body has begun, after which it counts as dropped.

        Raises:
            ModelError: The connection broke, fell silent or took too long; the body is too long or broken.
        """
        while True:
            try:
                plain = next(self._slices, b"")
            except ValueError as error:
                raise self._caller.broken(f"the answer is {error}") from None
            if plain:
                self._size += len(plain)
                if self._size > self._limit and self.ok:
                    raise self._caller.unusable(f"the answer is longer than {self._limit} bytes", self.status)
                return plain
            packed = await self._next(heartbeat_s if self._begun else None)
            if packed is None:
                return b""
            self._begun = self._begun or bool(packed)
            self._slices = self._inflate.feed(packed)

    async def whole(self) -> bytes:
        """The body in one piece; of an error answer only its beginning.

        Raises:
            ModelError: As ``read``.
        """
        body = bytearray()
        while (self.ok or len(body) < _ERROR_BYTES) and (chunk := await self.read()):
            body += chunk
        return bytes(body)

    async def drain(self) -> None:
        """Wait a moment for the end, so that the connection can serve the next call."""
        await self._exchange.finished(asyncio.get_running_loop().time() + _DRAIN_S)

    async def _next(self, heartbeat_s: float | None) -> bytes | None:
        """The next bytes as they came, or None at the end."""
        until = self._deadline
        if heartbeat_s is not None:
            until = min(until, asyncio.get_running_loop().time() + heartbeat_s)
        try:
            return await self._exchange.read(until)
        except TimeoutError:
            late = f"no whole answer within {self._timeout_s:g} s"
            silent = f"the stream fell silent for {heartbeat_s or 0:g} s"
            failure: ModelError = self._caller.broken(late if until == self._deadline else silent)
        except httpx.HTTPError as error:
            failure = _lost(self._caller, error)
        raise failure  # out here: an error of httpx holds the request, and that the key


class HttpWire:
    """Posts JSON to one address and gives back what it answers, or raises ``ModelError``.

    Args:
        caller: Who calls, for the texts of errors.
        headers: Headers of every call; no secrets.
        key_header: The name of the header that carries the key.
        key_scheme: What stands before the key in it.
        options: How calls travel.
    """

    def __init__(
        self,
        caller: Caller,
        *,
        headers: Mapping[str, str],
        key_header: str,
        key_scheme: str = "",
        options: HttpOptions | None = None,
    ) -> None:
        self._caller = caller
        common = {"content-type": "application/json", "accept-encoding": ACCEPTED, "user-agent": "agentfsm"}
        self._headers = {**common, **headers}
        self._auth = KeyHeader(key_header, key_scheme, caller.endpoint.key)
        self._clients = Clients(options.transport if options else None)
        self.options = options or HttpOptions()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a model holds a key and connections and is never pickled: keep its name, and resolve() it")

    def __deepcopy__(self, memo: dict[int, object]) -> HttpWire:
        return self

    async def post(self, path: str, content: bytes, request: ModelRequest) -> object:
        """Post a body and give back the JSON of the answer.

        Args:
            path: What follows the base URL.
            content: The body, JSON.
            request: What it stands for: its deadline, and its messages, so that no error text repeats them.

        Raises:
            ModelError: There was no answer, it was an error, or it was no JSON.
        """
        async with self.open(path, content, request, self.options.max_body_bytes) as answer:
            return self.judge(answer, await answer.whole(), request)

    @asynccontextmanager
    async def open(self, path: str, content: bytes, request: ModelRequest, limit: int) -> AsyncGenerator[Answer, None]:
        """Post a body and give the answer to read; whatever happens, its connection is not left open.

        Args:
            path: What follows the base URL.
            content: The body, JSON.
            request: What it stands for: its deadline, and its messages, so that no error text repeats them.
            limit: Bytes of the answer, unpacked.

        Raises:
            ModelError: There was no answer, or the status says no.
        """
        deadline = asyncio.get_running_loop().time() + request.timeout_s
        connect = self.options.connect_timeout_s
        connect_s = connect if connect < request.timeout_s else None
        url = self._caller.endpoint.base_url + path
        exchange = Exchange(self._clients, url, content, self._headers, self._auth, connect_s)
        try:
            response = await self._head(exchange, deadline, request.timeout_s)
            try:
                answer = Answer(
                    exchange, response, self._caller, deadline=deadline, timeout_s=request.timeout_s, limit=limit
                )
            except ValueError as error:
                if response.is_success:
                    raise self._caller.unusable(f"the answer is {error}", response.status_code) from None
                now = self.options.clock()
                raise self._caller.refused(response.status_code, "", response.headers, now, ()) from None
            if not answer.ok:
                self.judge(answer, await answer.whole(), request)
            yield answer
        finally:
            await exchange.aclose()

    def judge(self, answer: Answer, body: bytes, request: ModelRequest) -> object:
        """The JSON of an answer that says yes.

        Raises:
            ModelError: It says no, or is no JSON.
        """
        fault = ""
        value: object
        try:
            value = loads(body)
        except ValueError as error:
            value, fault = body.decode(errors="replace"), str(error)
        if not answer.ok or (not fault and error_in(value)):
            raise self.refused(answer, value, request)
        page = body.lstrip()[:1] == b"<"
        if fault and body and not page and not answer.length_known:
            raise self._caller.broken(f"the answer broke off: it is no whole JSON ({fault})")
        if fault:
            kind = self._caller.blank(answer.headers.get("content-type", "of no type")) if body else "empty"
            raise self._caller.unusable(f"the answer is {kind}, no JSON ({fault}): is base_url right?", answer.status)
        return value

    def refused(self, answer: Answer, body: object, request: ModelRequest, unnamed: int = 200) -> ModelError:
        """The error for an answer, or an event of one, that says no.

        Args:
            answer: The answer.
            body: What it says.
            request: The request.
            unnamed: What a status of 200 means where the body names no other.
        """
        now = self.options.clock()
        return self._caller.refused(answer.status, body, answer.headers, now, request.messages, unnamed=unnamed)

    async def aclose(self) -> None:
        """Let go of this loop's connections; the next call opens new ones."""
        await self._clients.aclose()

    async def _head(self, exchange: Exchange, deadline: float, timeout_s: float) -> httpx.Response:
        try:
            return await exchange.head(deadline)
        except TimeoutError:
            failure: ModelError = self._caller.broken(f"no whole answer within {timeout_s:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            failure = _lost(self._caller, error)
        raise failure  # out here: an error of httpx holds the request, and that the key


def _lost(caller: Caller, error: httpx.HTTPError | httpx.InvalidURL) -> ModelError:
    """The error for a call without a whole answer; quotes only texts that cannot hold a header."""
    match error:
        case httpx.ConnectTimeout():
            return caller.unreachable("timed out")
        case httpx.ConnectError() | httpx.ProxyError():
            return caller.unreachable(str(error))
        case httpx.TimeoutException():
            return caller.broken("the server fell silent")
        case httpx.NetworkError() | httpx.RemoteProtocolError():
            return caller.broken("the connection broke before the answer was whole")
        case _:
            return caller.unusable(f"the call cannot be made: {type(error).__name__}")
