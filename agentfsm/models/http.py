"""How a call travels: one POST with a deadline, a limit on the answer, no redirects, and no key in an error.

Streaming has its place beside ``HttpWire.post``: the same client, key and deadline, and another way to read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import httpx
from pydantic import SecretStr

from agentfsm.core.messages import Message
from agentfsm.errors import ConfigurationError, ModelError
from agentfsm.models.faults import Caller, error_in
from agentfsm.models.wire import dumps, loads

__all__ = ["HttpOptions", "HttpWire"]

_ERROR_BYTES = 64 * 1024
"""How much of an error answer is read; its first words are enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """How calls travel; the defaults are right for almost everyone.

    Attributes:
        connect_timeout_s: Seconds to reach the server; the request's own deadline still holds.
        max_body_bytes: Bytes of an answer, decoded; a longer one is refused.
        transport: What carries the calls instead of the network; for tests.
        clock: The wall clock, in seconds since 1970, to read a Retry-After date by.

    Raises:
        ConfigurationError: A number is not above zero.
    """

    connect_timeout_s: float = 10.0
    max_body_bytes: int = 32 * 1024 * 1024
    transport: httpx.AsyncBaseTransport | None = None
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "max_body_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be above zero")


class _KeyHeader(httpx.Auth):
    """Puts the key on a request at the last moment, so that it stands in no variable a traceback shows."""

    def __init__(self, header: str, scheme: str, key: SecretStr | None) -> None:
        self._header, self._scheme, self._key = header, scheme, key

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        if self._key is not None:
            request.headers[self._header] = self._scheme + self._key.get_secret_value()
        yield request


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def length_known(self) -> bool:
        """Whether the wire marked the body's end; one that it did not mark can be cut off unnoticed."""
        return "content-length" in self.headers or "transfer-encoding" in self.headers


class HttpWire:
    """Posts JSON to one address and gives back JSON, or raises ``ModelError``.

    A model may be used from several event loops, one after the other (``run_sync``) or in several threads. A
    connection belongs to the loop that opened it, so each loop gets a client of its own, which is closed when
    the loop shuts down: a loop closes its asynchronous generators then, and nothing else.

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
        self._headers = {"content-type": "application/json", "user-agent": "agentfsm", **headers}
        self._auth = _KeyHeader(key_header, key_scheme, caller.endpoint.key)
        self._options = options or HttpOptions()
        self._clients: dict[asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, AsyncGenerator[None, None]]] = {}

    def __reduce__(self) -> NoReturn:
        raise TypeError("a model holds a key and connections and is never pickled: keep its name, and resolve() it")

    def __deepcopy__(self, memo: dict[int, object]) -> HttpWire:
        return self

    async def post(self, path: str, body: object, *, timeout_s: float, prompt: Sequence[Message]) -> object:
        """Post a body and give back the JSON of the answer.

        Args:
            path: What follows the base URL.
            body: The request, JSON.
            timeout_s: Seconds until the answer must be whole, however it trickles in.
            prompt: The request's messages, so that no error text repeats them.

        Raises:
            ModelError: There was no answer, it was an error, or it was no JSON.
        """
        content = dumps(body).encode(errors="replace")
        failure: ModelError | None = None
        answer: _Answer | None = None
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._exchange(path, content, timeout_s)
        except TimeoutError:
            failure = self._caller.broken(f"no whole answer within {timeout_s:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            failure = self._lost(error)
        if answer is None:
            # Raised out here, not in the handlers: an error of httpx holds the request, and that the key.
            raise failure or self._caller.broken("no answer")
        return self._judge(answer, prompt)

    async def aclose(self) -> None:
        """Let go of this loop's connections; the next call opens new ones."""
        _, lifetime = self._clients.pop(asyncio.get_running_loop(), (None, None))
        if lifetime is not None:
            await lifetime.aclose()

    async def _client(self) -> httpx.AsyncClient:
        """This loop's client; those of closed loops are forgotten."""
        for loop in [loop for loop in list(self._clients) if loop.is_closed()]:
            self._clients.pop(loop, None)
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            client = httpx.AsyncClient(transport=self._options.transport, follow_redirects=False)
            lifetime = _close_with_the_loop(client)
            self._clients[loop] = (client, lifetime)
            await anext(lifetime)
        return self._clients[loop][0]

    async def _exchange(self, path: str, content: bytes, timeout_s: float) -> _Answer:
        client = await self._client()
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, self._options.connect_timeout_s))
        url = self._caller.endpoint.base_url + path
        async with client.stream(
            "POST", url, content=content, headers=self._headers, auth=self._auth, timeout=timeout
        ) as response:
            body = await self._read(response)
        return _Answer(response.status_code, response.headers, body)

    async def _read(self, response: httpx.Response) -> bytes:
        """The decoded body; never more of it in memory than the limit and one chunk."""
        limit = self._options.max_body_bytes if response.is_success else _ERROR_BYTES
        body = bytearray()
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > limit and not response.is_success:
                break
            if len(body) > limit:
                raise self._caller.unusable(f"the answer is longer than {limit} bytes", response.status_code)
        return bytes(body)

    def _judge(self, answer: _Answer, prompt: Sequence[Message]) -> object:
        """The JSON of an answer that says yes."""
        fault = ""
        try:
            body = loads(answer.body)
        except ValueError as error:
            body, fault = answer.body.decode(errors="replace"), str(error)
        if not 200 <= answer.status < 300 or (not fault and error_in(body)):
            raise self._caller.refused(answer.status, body, answer.headers, self._options.clock(), prompt)
        if fault and answer.body and not answer.length_known:
            raise self._caller.broken(f"the answer broke off: it is no whole JSON ({fault})")
        if fault:
            kind = self._caller.blank(answer.headers.get("content-type", "of no type")) if answer.body else "empty"
            raise self._caller.unusable(f"the answer is {kind}, no JSON ({fault}): is base_url right?", answer.status)
        return body

    def _lost(self, error: httpx.HTTPError | httpx.InvalidURL) -> ModelError:
        """The error for a call without a whole answer; quotes only texts that cannot hold a header."""
        caller = self._caller
        match error:
            case httpx.ConnectTimeout():
                return caller.unreachable("timed out")
            case httpx.ConnectError() | httpx.ProxyError():
                return caller.unreachable(str(error))
            case httpx.TimeoutException():
                return caller.broken("the server fell silent")
            case httpx.NetworkError() | httpx.RemoteProtocolError():
                return caller.broken("the connection broke before the answer was whole")
            case httpx.DecodingError():
                return caller.broken("the answer is compressed and cannot be unpacked")
            case _:
                return caller.unusable(f"the call cannot be made: {type(error).__name__}")


async def _close_with_the_loop(client: httpx.AsyncClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.aclose()
