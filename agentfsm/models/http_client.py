"""HTTP calls to a provider: one POST with a deadline and a size limit, without redirects, and no API key in any error.

``HttpClient.open`` gives a response to read, incrementally or as a whole. Compressed bodies are decompressed
in bounded chunks. Every wait has a timeout, so no server can hold a call past its deadline.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, cast
from urllib.parse import quote, unquote, urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
from pydantic import SecretStr

from agentfsm.errors import ConfigurationError, ModelError
from agentfsm.loop.model import ModelRequest
from agentfsm.models.error_mapping import CallErrors, extract_error
from agentfsm.models.stream_reader import MIDSTREAM_ERROR_STATUS, FrameParser, StreamAccumulator, StreamReader
from agentfsm.models.transport import ApiKeyAuth, ApiKeyError, ClientPool, HttpExchange
from agentfsm.models.wire_json import loads

ACCEPT_ENCODING = "gzip, deflate"
"""The compressions that a request accepts; others need more packages, and cannot be decompressed in bounded chunks."""

_MAX_CHUNK_BYTES = 64 * 1024

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}

_GZIP_START = b"\x1f"

_MAX_ERROR_BYTES = 64 * 1024
"""How much of an error response is read; the start of it is enough."""

_DRAIN_TIMEOUT_S = 0.1
"""Seconds that a finished stream gets to close; after that its connection is closed from this side."""

_LEADING_WHITESPACE = b" \t\r\n\xef\xbb\xbf"
"""What may precede the first meaningful byte of a response, a byte-order mark included."""

_MAX_LEADING_WHITESPACE = 1024 * 1024
"""Bytes of whitespace that a response may start with."""


class Decompressor:
    """Decompresses one response.

    Raises:
        ValueError: It is not one of ``ACCEPT_ENCODING``.
    """

    def __init__(self, encoding: str) -> None:
        name = encoding.strip().lower()
        if name not in ("", "identity", *_WINDOW_BITS):
            raise ValueError(f"compressed in a way that was not requested ({name[:20]!r})")
        self._is_compressed = name in _WINDOW_BITS
        self._encoding = name
        self._decompressor = zlib.decompressobj(_WINDOW_BITS.get(name, 31))
        self._started = False

    @property
    def is_truncated(self) -> bool:
        """Whether the compressed data has begun and not ended."""
        return self._started and not self._decompressor.eof

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The decompressed bytes, at most 64 KiB at a time.

        Raises:
            ValueError: The bytes are not in the stated encoding.
        """
        if not self._is_compressed:
            yield chunk
            return
        while chunk:
            if self._decompressor.eof:
                if not (self._encoding.endswith("gzip") and chunk.startswith(_GZIP_START)):
                    return
                self._decompressor = zlib.decompressobj(31)  # several members are one body (RFC 1952, 2.2)
            try:
                plain = self._decompressor.decompress(chunk, _MAX_CHUNK_BYTES)
            except zlib.error:
                if self._started or self._encoding != "deflate":
                    raise ValueError("compressed and cannot be decompressed") from None
                self._started = True  # "deflate" means zlib (RFC 9110, 8.4.1.2); some servers send raw deflate
                self._decompressor = zlib.decompressobj(-15)
                continue
            self._started = True
            chunk = self._decompressor.unconsumed_tail or self._decompressor.unused_data
            if plain:
                yield plain


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """How HTTP calls are made; the defaults suit almost every use.

    Attributes:
        headers: More headers of every call, such as ``anthropic-beta`` or ``OpenAI-Organization``. A value that is a
            secret is a ``SecretStr``.
        query: Parameters of every URL, such as ``api-version``. A value that is a secret is a ``SecretStr``; but
            ``httpx`` logs each URL (level INFO), so pass a key in a header if the server takes it there.
        verify: The certificates of the authorities to trust: a file in PEM format, a folder of such files, or an
            ``ssl.SSLContext`` (for a client certificate, too). By default those of ``SSL_CERT_FILE`` and
            ``SSL_CERT_DIR``, else the usual ones.
        proxy: The URL of a proxy, as a ``SecretStr`` if it contains a password; by default the one that
            ``HTTPS_PROXY``, ``HTTP_PROXY``, ``ALL_PROXY`` and ``NO_PROXY`` say.
        client: Your own client, which makes every call and is never closed here. It belongs to the event loop in
            which it is first used. ``verify``, ``proxy`` and ``transport`` are its own then.
        connect_timeout_s: Seconds to connect to the server; the request's own timeout also applies.
        max_body_bytes: Maximum size of a response, or of one event of a stream, in bytes after decompression.
        max_stream_bytes: Maximum size of all events of a stream, in bytes after decompression. Each chunk of
            text is sent in an event many times its size.
        transport: Replaces the network; for tests.
        clock: The wall clock, in seconds since 1970, to compare the date in a Retry-After header with.

    Raises:
        ConfigurationError: A number is not above zero, a header or the proxy is invalid, there are no certificates, or
            ``client`` is given together with a setting of its own.
    """

    headers: Mapping[str, str | SecretStr] = field(default_factory=dict[str, "str | SecretStr"], repr=False)
    query: Mapping[str, str | SecretStr] = field(default_factory=dict[str, "str | SecretStr"])
    verify: str | Path | ssl.SSLContext | None = None
    proxy: str | SecretStr | None = field(default=None, repr=False)
    client: httpx.AsyncClient | None = None
    connect_timeout_s: float = 10.0
    max_body_bytes: int = 32 * 1024 * 1024
    max_stream_bytes: int = 512 * 1024 * 1024
    transport: httpx.AsyncBaseTransport | None = None
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "max_body_bytes", "max_stream_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be above zero")
        for header, value in self.headers.items():
            _check_header(header, _plain(value))
        if self.proxy is not None and urlsplit(_plain(self.proxy)).scheme not in ("http", "https"):
            raise ConfigurationError("proxy is not a URL such as http://127.0.0.1:3128")
        if self.client is not None and (self.verify, self.proxy, self.transport) != (None, None, None):
            raise ConfigurationError("verify, proxy and transport are settings of the client that you pass as client")
        if not (self.verify is None or isinstance(self.verify, ssl.SSLContext)):
            object.__setattr__(self, "verify", _load_certificates(Path(self.verify)))

    @property
    def secrets(self) -> tuple[SecretStr, ...]:
        """The secrets among the headers and parameters, and the password of the proxy."""
        values = (*self.headers.values(), *self.query.values())
        found = [value for value in values if isinstance(value, SecretStr)]
        password = urlsplit(_plain(self.proxy)).password if self.proxy is not None else None
        return (*found, *([SecretStr(unquote(password))] if password else ()))

    def header(self, name: str) -> str:
        """The value of one of ``headers``, or an empty string.

        Args:
            name: Its name, in lower case.
        """
        return next((_plain(value) for each, value in self.headers.items() if each.lower() == name), "")


def _plain(value: str | SecretStr) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else value


_RESERVED_HEADERS = frozenset({"accept-encoding", "content-length", "content-type", "host", "transfer-encoding"})


def _check_header(name: str, value: str) -> None:
    if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
        raise ConfigurationError(f"{name!r} is not the name of an HTTP header")
    if name.lower() in _RESERVED_HEADERS:
        raise ConfigurationError(f"the header {name} is set by agentfsm itself")
    if not (value.isascii() and value.isprintable()):
        raise ConfigurationError(f"the header {name} contains a character that is not allowed in one (a line break?)")


def _load_certificates(path: Path) -> ssl.SSLContext:
    try:
        if path.is_dir():
            return ssl.create_default_context(capath=path)
        return ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        raise ConfigurationError(f"verify: {path} is not a file of certificates in PEM format") from None
    except OSError as error:
        raise ConfigurationError(f"verify: cannot read the certificates in {path}: {error.strerror}") from None


class HttpResponse:
    """A response whose headers have arrived, and whose body is read as it arrives."""

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
        self._too_late = f"no complete response within {timeout_s:g} s"
        self._limit = limit
        self._size = 0
        self._decompressor = Decompressor(response.headers.get("content-encoding", ""))
        self._decompressed: Iterator[bytes] = iter(())

    @property
    def ok(self) -> bool:
        """Whether the status is a success (2xx)."""
        return 200 <= self.status < 300

    @property
    def may_be_truncated(self) -> bool:
        """Whether the end of the body may be missing: no header marks it, or its compressed data has not ended."""
        length_known = "content-length" in self.headers or "transfer-encoding" in self.headers
        return not length_known or self._decompressor.is_truncated

    def allow_silence(self, seconds: float) -> None:
        """Give the next piece of a stream this many seconds from now on, in place of the deadline of the whole call."""
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._too_late = f"the stream sent nothing for {seconds:g} s"

    async def read(self) -> bytes:
        """The next chunk of the body, decompressed; empty at the end.

        Raises:
            ModelError: The connection was lost, idle or too slow, or the body is too long or corrupt.
        """
        while True:
            try:
                plain = next(self._decompressed, b"")
            except ValueError as error:
                raise self._errors.transient(f"the response is {error}") from None
            if plain:
                self._size += len(plain)
                if self._size > self._limit and self.ok:
                    raise self._too_long(self._limit)
                return plain
            raw = await self._next_chunk()
            if raw is None:
                return b""
            self._decompressed = self._decompressor.feed(raw)

    async def read_all(self) -> bytes:
        """The complete body; of an error response only the start, as far as it can be read: its status says more.

        Raises:
            ModelError: As for ``read``, for a response that is not an error.
        """
        body = bytearray()
        try:
            while (self.ok or len(body) < _MAX_ERROR_BYTES) and (chunk := await self.read()):
                body += chunk
        except ModelError:
            if self.ok:
                raise
        return bytes(body)

    async def read_start(self) -> bytes:
        """The first chunk of the body without leading whitespace and byte-order mark; empty if there is no more.

        Raises:
            ModelError: As for ``read``, or the body starts with too much whitespace.
        """
        skipped = 0
        while chunk := await self.read():
            if start := chunk.lstrip(_LEADING_WHITESPACE):
                return start
            skipped += len(chunk)
            if skipped >= _MAX_LEADING_WHITESPACE:
                raise self._errors.invalid_response("the response is a lot of whitespace", self.status)
        return b""

    async def read_remaining(self, start: bytes, limit: int) -> bytes:
        """The complete body, given its start.

        Raises:
            ModelError: As for ``read``.
        """
        body = bytearray(start)
        while chunk := await self.read():
            body += chunk
            if len(body) > limit:
                raise self._too_long(limit)
        return bytes(body)

    async def drain(self) -> None:
        """Wait briefly for the end of the body, so that the connection can be reused."""
        await self._exchange.drain(asyncio.get_running_loop().time() + _DRAIN_TIMEOUT_S)

    def _too_long(self, limit: int) -> ModelError:
        return self._errors.invalid_response(f"the response is longer than {limit} bytes", self.status)

    async def _next_chunk(self) -> bytes | None:
        """The next bytes from the network, or None at the end."""
        try:
            return await self._exchange.read(self._deadline)
        except TimeoutError:
            failure: ModelError = self._errors.transient(self._too_late)
        except httpx.HTTPError as error:
            failure = _connection_error(self._errors, error)
        raise failure  # outside the except block: an httpx error holds the request, and the request holds the key


class HttpClient:
    """Posts JSON to one address, and yields the response or raises ``ModelError``.

    Args:
        errors: Makes the errors; it knows the model and the endpoint.
        headers: Headers of every call, without secrets.
        key_header: The header that carries the API key.
        key_scheme: What precedes the key in it.
        options: Timeouts and limits.
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
        self.options = options = options or HttpOptions()
        endpoint = errors.endpoint
        errors.secrets.extend((*([endpoint.key] if endpoint.key is not None else ()), *options.secrets))
        self._auth: httpx.Auth = (
            ApiKeyAuth(key_header, key_scheme, endpoint.key, endpoint.key_function, errors.secrets.append)
            if endpoint.account is None
            else endpoint.account.authentication(errors.secrets.append)
        )
        self._pool = ClientPool(
            options.transport,
            cast("ssl.SSLContext | None", options.verify),
            None if options.proxy is None else SecretStr(_plain(options.proxy)),
            options.client,
        )
        query = {name: _plain(value) for name, value in options.query.items()}
        self._query = urlencode(query, quote_via=quote)  # signatures of AWS know no other blank than %20

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a model holds an API key and connections and is never pickled: store its name, and resolve() it again"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> HttpClient:
        return self

    @asynccontextmanager
    async def open(
        self, path: str, content: bytes, request: ModelRequest, limit: int
    ) -> AsyncGenerator[HttpResponse, None]:
        """Post a body and yield the response to read; on exit the connection is reusable or closed.

        Args:
            path: The URL path after the base URL.
            content: The body, JSON.
            request: The request it encodes: for its timeout, and for its messages, which no error text repeats.
            limit: Maximum size of the response, in bytes after decompression.

        Raises:
            ModelError: There was no response, or its status is an error.
        """
        deadline = asyncio.get_running_loop().time() + request.timeout_s
        connect = self.options.connect_timeout_s
        connect_s = connect if connect < request.timeout_s else None
        url = f"{self._errors.endpoint.base_url}{path}{self._query and f'?{self._query}'}"
        headers = self._headers | {name.lower(): _plain(value) for name, value in self.options.headers.items()}
        exchange = HttpExchange(self._pool, url, content, headers, self._auth, connect_s)
        try:
            raw = await self._response_head(exchange, deadline, request.timeout_s)
            try:
                response = HttpResponse(
                    exchange, raw, self._errors, deadline=deadline, timeout_s=request.timeout_s, limit=limit
                )
            except ValueError as error:
                if raw.is_success:
                    raise self._errors.invalid_response(f"the response is {error}", raw.status_code) from None
                now = self.options.clock()
                raise self._errors.from_response(raw.status_code, "", raw.headers, now, ()) from None
            if not response.ok:
                self.parse_response(response, await response.read_all(), request)
            yield response
        finally:
            await exchange.aclose()

    def parse_response(self, response: HttpResponse, body: bytes, request: ModelRequest) -> object:
        """The JSON value of a successful response.

        Raises:
            ModelError: The status or the body is an error, or the body is not JSON.
        """
        problem = ""
        value: object
        try:
            value = loads(body)
        except ValueError as error:
            value, problem = body.decode(errors="replace"), str(error)
        if not response.ok or (not problem and extract_error(value)):
            raise self.error_from_response(response, value, request)
        is_page = body.lstrip()[:1] == b"<"
        if problem and body and not is_page and response.may_be_truncated:
            raise self._errors.transient(f"the response was truncated: it is not complete JSON ({problem})")
        if problem:
            kind = self._errors.scrub(response.headers.get("content-type", "of no type")) if body else "empty"
            raise self._errors.invalid_response(
                f"the response is {kind}, not JSON ({problem}): is base_url right?",
                response.status,
                body=value,
                prompt=request.messages,
            )
        return value

    def error_from_response(
        self, response: HttpResponse, body: object, request: ModelRequest, default_status: int = 200
    ) -> ModelError:
        """The error for an error response, or for an error event of a stream.

        Args:
            response: The response.
            body: Its parsed body, or the event.
            request: The request.
            default_status: What a status of 200 means if the body names no other status.
        """
        now = self.options.clock()
        return self._errors.from_response(
            response.status, body, response.headers, now, request.messages, default_status=default_status
        )

    def stream_reader(
        self, response: HttpResponse, request: ModelRequest, parser: type[FrameParser], accumulator: StreamAccumulator
    ) -> StreamReader:
        """What reads the stream in a response."""
        return StreamReader(
            parser(self.options.max_body_bytes),
            accumulator,
            self._errors,
            lambda error: self.error_from_response(response, error, request, MIDSTREAM_ERROR_STATUS),
        )

    async def aclose(self) -> None:
        """Close the connections of the running event loop; the next call opens new ones."""
        await self._pool.aclose()

    async def _response_head(self, exchange: HttpExchange, deadline: float, timeout_s: float) -> httpx.Response:
        try:
            return await exchange.response_head(deadline)
        except TimeoutError:
            failure: ModelError = self._errors.transient(f"no complete response within {timeout_s:g} s")
        except ApiKeyError as error:
            failure = self._errors.no_key(str(error))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            failure = _connection_error(self._errors, error, proxied=self._uses_proxy())
        raise failure  # outside the except block: an httpx error holds the request, and the request holds the key

    def _uses_proxy(self) -> bool:
        """Whether calls go through a proxy, as far as the options and the environment say."""
        url = urlsplit(self._errors.endpoint.base_url)
        proxies = getproxies()
        named = url.scheme in proxies or "all" in proxies
        return self.options.proxy is not None or (named and not proxy_bypass(url.hostname or ""))


def _connection_error(
    errors: CallErrors, error: httpx.HTTPError | httpx.InvalidURL, *, proxied: bool = False
) -> ModelError:
    """The error for a call without a complete response; quotes only texts that cannot contain a header."""
    match error:
        case httpx.ConnectTimeout():
            return errors.unreachable("timed out")
        case httpx.ProxyError():
            return errors.proxy_failed(str(error))
        case httpx.ConnectError():
            return _no_connection(errors, error, proxied=proxied)
        case httpx.TimeoutException():
            return errors.transient("the server sent nothing in time")
        case httpx.RemoteProtocolError() if not _CONNECTION_LOST.match(str(error)):
            return errors.transient("the server does not speak HTTP: is base_url right?")
        case httpx.NetworkError() | httpx.RemoteProtocolError():
            return errors.transient("the connection was lost before the response was complete")
        case _:
            return errors.invalid_response(f"the call cannot be made: {type(error).__name__}")


_CONNECTION_LOST = re.compile(r"server disconnected|peer closed|incomplete", re.IGNORECASE)
"""How the texts of ``httpx.RemoteProtocolError`` begin where the server said nothing wrong, but not all."""

_UNKNOWN_HOST_CODES = {getattr(socket, name, None) for name in ("EAI_NONAME", "EAI_NODATA")}
"""The codes of ``getaddrinfo`` for a name that does not exist; with the others a retry may help."""


_NO_TLS_REASONS = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"}
"""OpenSSL's reasons for a first answer that is not TLS; several versions name it differently."""


def _no_connection(errors: CallErrors, error: httpx.ConnectError, *, proxied: bool) -> ModelError:
    """The error for a connection that was not made; a retry changes neither a certificate nor a name."""
    cause: BaseException | None = error
    why = str(error)
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return errors.untrusted_certificate(cause.verify_message)
        if isinstance(cause, ssl.SSLError) and cause.reason in _NO_TLS_REASONS:
            return errors.no_tls()
        if isinstance(cause, socket.gaierror) and not proxied and cause.errno in _UNKNOWN_HOST_CODES:
            return errors.unknown_host()
        if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
            why = os.strerror(cause.errno)  # httpx itself only says that all attempts failed
        cause = cause.__cause__ or cause.__context__
    return errors.proxy_failed(why) if proxied else errors.unreachable(why)
