"""HTTP calls to a provider: one POST with a deadline, a response size limit, no redirects, and no key in any error.

``HttpClient.open`` gives a response to read incrementally, ``HttpClient.post`` a whole one. Compressed bodies are
decompressed in bounded chunks. Every await has a timeout of its own, so no server can hold a call past its deadline.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

import httpx

from agentfsm.errors import ConfigurationError, ModelError
from agentfsm.loop.model import ModelRequest
from agentfsm.models.error_mapping import CallErrors, extract_error
from agentfsm.models.transport import ApiKeyAuth, ClientPool, HttpExchange
from agentfsm.models.wire_format import loads

__all__ = ["ACCEPT_ENCODING", "Decompressor", "HttpClient", "HttpOptions", "HttpResponse"]


ACCEPT_ENCODING = "gzip, deflate"
"""What a request says it takes; other packings need other packages, and give no way to stop in time."""

_MAX_CHUNK_BYTES = 64 * 1024

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class Decompressor:
    """Unpacks one answer.

    Args:
        encoding: The answer's ``content-encoding``.

    Raises:
        ValueError: It is packed in a way that was not asked for.
    """

    def __init__(self, encoding: str) -> None:
        name = encoding.strip().lower()
        if name not in ("", "identity", *_WINDOW_BITS):
            raise ValueError("compressed in a way that was not asked for")
        self._is_compressed = name in _WINDOW_BITS
        self._encoding = name
        self._decompressor = zlib.decompressobj(_WINDOW_BITS.get(name, 31))
        self._started = False

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The bytes that these stand for, at most 64 KiB at a time.

        Raises:
            ValueError: They are not what the answer says they are.
        """
        if not self._is_compressed:
            yield chunk
            return
        while chunk and not self._decompressor.eof:
            try:
                plain = self._decompressor.decompress(chunk, _MAX_CHUNK_BYTES)
            except zlib.error:
                if self._started or self._encoding != "deflate":
                    raise ValueError("compressed and cannot be unpacked") from None
                self._started = True  # "deflate" is zlib by the book (RFC 9110, 8.4.1.2), and bare from some servers
                self._decompressor = zlib.decompressobj(-15)
                continue
            self._started = True
            chunk = self._decompressor.unconsumed_tail
            if plain:
                yield plain


_MAX_ERROR_BYTES = 64 * 1024
"""How much of an error answer is read; its first words are enough."""

_DRAIN_TIMEOUT_S = 0.1
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


class HttpResponse:
    """An answer under way: its head is there, its body is read as it comes.

    Attributes:
        status: The HTTP status.
        headers: Its headers.
    """

    def __init__(
        self,
        exchange: HttpExchange,
        response: httpx.Response,
        errors: CallErrors,
        *,
        deadline: float,
        timeout_s: float,
        limit: int,
    ) -> None:
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers
        self._exchange = exchange
        self._errors = errors
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._limit = limit
        self._size = 0
        self._started = False
        self._decompressor = Decompressor(response.headers.get("content-encoding", ""))
        self._decompressed: Iterator[bytes] = iter(())

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
                plain = next(self._decompressed, b"")
            except ValueError as error:
                raise self._errors.transient(f"the answer is {error}") from None
            if plain:
                self._size += len(plain)
                if self._size > self._limit and self.ok:
                    raise self._errors.invalid_response(f"the answer is longer than {self._limit} bytes", self.status)
                return plain
            packed = await self._next_chunk(heartbeat_s if self._started else None)
            if packed is None:
                return b""
            self._started = self._started or bool(packed)
            self._decompressed = self._decompressor.feed(packed)

    async def read_all(self) -> bytes:
        """The body in one piece; of an error answer only its beginning.

        Raises:
            ModelError: As ``read``.
        """
        body = bytearray()
        while (self.ok or len(body) < _MAX_ERROR_BYTES) and (chunk := await self.read()):
            body += chunk
        return bytes(body)

    async def drain(self) -> None:
        """Wait a moment for the end, so that the connection can serve the next call."""
        await self._exchange.drain(asyncio.get_running_loop().time() + _DRAIN_TIMEOUT_S)

    async def _next_chunk(self, heartbeat_s: float | None) -> bytes | None:
        """The next bytes as they came, or None at the end."""
        until = self._deadline
        if heartbeat_s is not None:
            until = min(until, asyncio.get_running_loop().time() + heartbeat_s)
        try:
            return await self._exchange.read(until)
        except TimeoutError:
            late = f"no whole answer within {self._timeout_s:g} s"
            silent = f"the stream fell silent for {heartbeat_s or 0:g} s"
            failure: ModelError = self._errors.transient(late if until == self._deadline else silent)
        except httpx.HTTPError as error:
            failure = _connection_error(self._errors, error)
        raise failure  # out here: an error of httpx holds the request, and that the key


class HttpClient:
    """Posts JSON to one address and gives back what it answers, or raises ``ModelError``.

    Args:
        errors: Who calls, for the texts of errors.
        headers: Headers of every call; no secrets.
        key_header: The name of the header that carries the key.
        key_scheme: What stands before the key in it.
        options: How calls travel.
    """

    def __init__(
        self,
        errors: CallErrors,
        *,
        headers: Mapping[str, str],
        key_header: str,
        key_scheme: str = "",
        options: HttpOptions | None = None,
    ) -> None:
        self._errors = errors
        common = {"content-type": "application/json", "accept-encoding": ACCEPT_ENCODING, "user-agent": "agentfsm"}
        self._headers = {**common, **headers}
        self._auth = ApiKeyAuth(key_header, key_scheme, errors.endpoint.key)
        self._pool = ClientPool(options.transport if options else None)
        self.options = options or HttpOptions()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a model holds a key and connections and is never pickled: keep its name, and resolve() it")

    def __deepcopy__(self, memo: dict[int, object]) -> HttpClient:
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
            return self.parse_response(answer, await answer.read_all(), request)

    @asynccontextmanager
    async def open(
        self, path: str, content: bytes, request: ModelRequest, limit: int
    ) -> AsyncGenerator[HttpResponse, None]:
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
        url = self._errors.endpoint.base_url + path
        exchange = HttpExchange(self._pool, url, content, self._headers, self._auth, connect_s)
        try:
            response = await self._response_head(exchange, deadline, request.timeout_s)
            try:
                answer = HttpResponse(
                    exchange, response, self._errors, deadline=deadline, timeout_s=request.timeout_s, limit=limit
                )
            except ValueError as error:
                if response.is_success:
                    raise self._errors.invalid_response(f"the answer is {error}", response.status_code) from None
                now = self.options.clock()
                raise self._errors.from_response(response.status_code, "", response.headers, now, ()) from None
            if not answer.ok:
                self.parse_response(answer, await answer.read_all(), request)
            yield answer
        finally:
            await exchange.aclose()

    def parse_response(self, response: HttpResponse, body: bytes, request: ModelRequest) -> object:
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
        if not response.ok or (not fault and extract_error(value)):
            raise self.error_from_response(response, value, request)
        page = body.lstrip()[:1] == b"<"
        if fault and body and not page and not response.length_known:
            raise self._errors.transient(f"the answer broke off: it is no whole JSON ({fault})")
        if fault:
            kind = self._errors.scrub(response.headers.get("content-type", "of no type")) if body else "empty"
            raise self._errors.invalid_response(
                f"the answer is {kind}, no JSON ({fault}): is base_url right?", response.status
            )
        return value

    def error_from_response(
        self, response: HttpResponse, body: object, request: ModelRequest, default_status: int = 200
    ) -> ModelError:
        """The error for an answer, or an event of one, that says no.

        Args:
            response: The answer.
            body: What it says.
            request: The request.
            default_status: What a status of 200 means where the body names no other.
        """
        now = self.options.clock()
        return self._errors.from_response(
            response.status, body, response.headers, now, request.messages, default_status=default_status
        )

    async def aclose(self) -> None:
        """Let go of this loop's connections; the next call opens new ones."""
        await self._pool.aclose()

    async def _response_head(self, exchange: HttpExchange, deadline: float, timeout_s: float) -> httpx.Response:
        try:
            return await exchange.response_head(deadline)
        except TimeoutError:
            failure: ModelError = self._errors.transient(f"no whole answer within {timeout_s:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            failure = _connection_error(self._errors, error)
        raise failure  # out here: an error of httpx holds the request, and that the key


def _connection_error(errors: CallErrors, error: httpx.HTTPError | httpx.InvalidURL) -> ModelError:
    """The error for a call without a whole answer; quotes only texts that cannot hold a header."""
    match error:
        case httpx.ConnectTimeout():
            return errors.unreachable("timed out")
        case httpx.ConnectError() | httpx.ProxyError():
            return errors.unreachable(str(error))
        case httpx.TimeoutException():
            return errors.transient("the server fell silent")
        case httpx.NetworkError() | httpx.RemoteProtocolError():
            return errors.transient("the connection broke before the answer was whole")
        case _:
            return errors.invalid_response(f"the call cannot be made: {type(error).__name__}")
