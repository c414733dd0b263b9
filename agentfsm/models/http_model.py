"""``HttpModel``: the base class of all wires: one whole or streamed call, and the hooks that a wire implements.

A wire implements six methods: the URL path, the request body, the encoding of messages, the decoding of a response
body, the framing of a stream, and the accumulation of stream events into a body.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import SecretStr

from agentfsm.errors import ProviderError, TransientProviderError
from agentfsm.loop.messages import FinishReason, Reply, Role
from agentfsm.loop.model import KeepAlive, ModelRequest, StreamChunk
from agentfsm.models.error_mapping import CallErrors
from agentfsm.models.http_client import HttpClient, HttpOptions, HttpResponse
from agentfsm.models.providers import Endpoint, resolve_endpoint
from agentfsm.models.settings import ModelSettings
from agentfsm.models.stream_reader import (
    MIDSTREAM_ERROR_STATUS,
    FrameParser,
    SSEParser,
    StreamAccumulator,
    StreamReader,
)
from agentfsm.models.wire_format import (
    MessageEncoder,
    RequestCache,
    cached_encoding,
    call_ids,
    join_body,
    repair_surrogates,
)

__all__ = ["HttpModel"]

_LEADING_WHITESPACE = b" \t\r\n\xef\xbb\xbf"
"""What may stand before the first byte that tells what an answer is, a byte-order mark included."""


_MAX_LEADING_WHITESPACE = 1024 * 1024
"""How many blanks, in bytes, an answer may begin with."""


class HttpModel(ABC):
    """A model behind an HTTP interface; each wire is a class below this one.

    Args:
        model: The model's name at its provider.
        base_url: Another address than the provider's own. It gets no key but ``api_key``.
        api_key: The key; else the one in the provider's variable.
        settings: How the model is asked to answer.
        http: How calls travel.

    Attributes:
        model: The model's name at its provider.
        settings: How the model is asked to answer.

    Raises:
        MissingKeyError: The provider's own address needs a key and there is none.
        ConfigurationError: The address or the key cannot be one, or the wire has no word for a setting.
    """

    _provider: str
    """The row of ``providers.PROVIDERS`` to take the address and the key's variable from."""

    _headers: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Headers of every call."""

    _key_header: ClassVar[str] = "authorization"
    _key_scheme: ClassVar[str] = "Bearer "
    """The header that carries the key, and what stands before the key in it."""

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | SecretStr | None = None,
        settings: ModelSettings | None = None,
        http: HttpOptions | None = None,
    ) -> None:
        self.model = model
        self.settings = self._validate_settings(settings or ModelSettings())
        self._endpoint = self._resolve_endpoint(base_url, api_key)
        self._errors = CallErrors(model, self._endpoint)
        self._http = HttpClient(
            self._errors,
            headers=self._headers,
            key_header=self._key_header,
            key_scheme=self._key_scheme,
            options=http,
        )

    @property
    def name(self) -> str:
        """``provider:model``."""
        return self._errors.name

    @property
    def secrets(self) -> tuple[SecretStr, ...]:
        """The key, which no journal may hold."""
        return () if self._endpoint.key is None else (self._endpoint.key,)

    @property
    def _origin(self) -> str:
        """Who gets back what they said they thought: this model on this server, and no other.

        A signature is good for the model alone that gave it
        (https://github.com/anthropics/anthropic-sdk-python/issues/1598).
        """
        server = self._endpoint.provider.name if self._endpoint.is_official else self._endpoint.base_url
        return f"{server} {self.model}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r}, base_url={self._endpoint.base_url!r})"

    async def reply(self, request: ModelRequest) -> Reply:
        """Answer one request.

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        answer = await self._http.post(self._path(), self._request_body(request, stream=False), request)
        return self._parse_reply(answer, request)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply, None]:
        """Answer one request piece by piece; the last piece is the whole reply.

        Raises:
            agentfsm.errors.ModelError: The call failed; so did one whose stream broke off, or ended without
                its end.
        """
        options = self._http.options
        content = self._request_body(request, stream=True)
        async with self._http.open(self._path(), content, request, options.max_stream_bytes) as answer:
            head = await self._first_bytes(answer, request)
            if self._is_not_stream(head):
                yield self._parse_reply(
                    self._http.parse_response(answer, await self._read_remaining(answer, head), request), request
                )
                return
            assembly, frames = self._accumulator(), self._frame_parser(options.max_body_bytes)
            folding = StreamReader(
                assembly,
                self._errors,
                lambda error: self._http.error_from_response(answer, error, request, MIDSTREAM_ERROR_STATUS),
            )
            chunk = head
            while chunk and not assembly.closed:
                silent = True
                for piece in folding.feed(frames.feed(chunk)):
                    silent = False
                    yield piece
                if silent:
                    yield KeepAlive()
                if not assembly.closed:
                    chunk = await answer.read(request.heartbeat_s)
            if assembly.closed:
                await answer.drain()
            else:
                for piece in folding.feed(frames.flush(), last=True):
                    yield piece
            if not assembly.complete:
                raise self._errors.transient("the stream ended before the reply did")
        yield self._parse_reply(self._complete_body(assembly), request)

    async def aclose(self) -> None:
        """Let go of connections; may be called more than once, and the model may be used after it."""
        await self._http.aclose()

    # -- what a wire brings ---------------------------------------------------------------------------

    def _resolve_endpoint(self, base_url: str | None, api_key: str | SecretStr | None) -> Endpoint:
        """Where calls go, and the key for them."""
        return resolve_endpoint(self._provider, base_url, api_key)

    @staticmethod
    @abstractmethod
    def _validate_settings(settings: ModelSettings) -> ModelSettings:
        """The settings, if the wire has a word for each.

        Raises:
            agentfsm.errors.ConfigurationError: It has none for one of them.
        """

    @abstractmethod
    def _path(self) -> str:
        """What follows the base URL."""

    @abstractmethod
    def _encode(self, request: ModelRequest, *, stream: bool) -> dict[str, Any]:
        """The body of a request."""

    @abstractmethod
    def _message_encoder(self, request: ModelRequest) -> tuple[str, MessageEncoder]:
        """Where in a body the messages stand, and the form of an empty transcript.

        What it writes must be what ``_encode`` gives for the same messages.
        """

    @abstractmethod
    def _decode(self, body: object, used_ids: Collection[str]) -> Reply:
        """The reply that the body of an answer holds.

        Raises:
            agentfsm.errors.ProviderError: The body lacks what a reply must hold.
            agentfsm.errors.TransientProviderError: It says that the server gave up on it.
        """

    @abstractmethod
    def _accumulator(self) -> StreamAccumulator:
        """What folds a stream."""

    def _frame_parser(self, limit: int) -> FrameParser:
        return SSEParser(limit)

    def _is_not_stream(self, head: bytes) -> bool:
        """Whether an answer is one JSON body, though a stream was asked for, or a web page.

        Both happen (servers that know no ``stream``, proxies that know better), often under a wrong
        content type; no line of an event stream begins so.
        """
        return head[:1] in (b"{", b"[", b"<")

    def _max_output_tokens(self, request: ModelRequest) -> int | None:
        """The cap on the reply that a request asks for, in tokens."""
        return request.max_output_tokens or self.settings.max_tokens

    # -- what they share ------------------------------------------------------------------------------

    def _used_call_ids(self, request: ModelRequest) -> Collection[str]:
        """The ids of the transcript's calls, known since the request was written."""
        kept = request.cache.get(self)
        return kept.call_ids if isinstance(kept, RequestCache) else call_ids(request.messages)

    def _request_body(self, request: ModelRequest, *, stream: bool) -> bytes:
        key, empty = self._message_encoder(request)
        known, tail = cached_encoding(request, self, lambda: empty)
        bare = replace(request, messages=[*known.system, *(m for m in tail if m.role is Role.SYSTEM)])
        return join_body(self._encode(bare, stream=stream), key, known.encoder.encoded_items(tail))

    async def _first_bytes(self, response: HttpResponse, request: ModelRequest) -> bytes:
        """The beginning of the body, blanks and byte-order mark left out; nothing where there is no more."""
        blanks = 0
        while blanks < _MAX_LEADING_WHITESPACE and (chunk := await response.read(request.heartbeat_s)):
            if told := chunk.lstrip(_LEADING_WHITESPACE):
                return told
            blanks += len(chunk)
        if blanks >= _MAX_LEADING_WHITESPACE:
            raise self._errors.invalid_response("the answer is blank, and very long", response.status)
        return b""

    async def _read_remaining(self, response: HttpResponse, head: bytes) -> bytes:
        body = bytearray(head)
        limit = self._http.options.max_body_bytes
        while chunk := await response.read():
            body += chunk
            if len(body) > limit:
                raise self._errors.invalid_response(f"the answer is longer than {limit} bytes", response.status)
        return bytes(body)

    def _complete_body(self, accumulator: StreamAccumulator) -> object:
        try:
            return repair_surrogates(accumulator.body())
        except ValueError as error:
            raise self._errors.invalid_response(f"the answer is no JSON that can be kept ({error})") from None

    def _parse_reply(self, body: object, request: ModelRequest) -> Reply:
        try:
            reply = self._decode(body, self._used_call_ids(request))
        except TransientProviderError as error:
            raise self._errors.transient(str(error)) from None
        except ProviderError as error:
            raise self._errors.invalid_response(str(error)) from None
        return _mark_truncated(reply, self._max_output_tokens(request))


def _mark_truncated(reply: Reply, cap: int | None) -> Reply:
    """The reply, called truncated where it was, whatever its server says.

    Some servers close a call that hit the cap with ``{}`` or leave it at ``{``, and call it finished: run
    as it stands, it would do something that the model never asked for
    (https://github.com/LibreChat-AI/agents/pull/280).
    """
    calls = reply.message.tool_calls
    spent = cap is not None and reply.usage.output_tokens >= cap
    if spent and reply.finish_reason is FinishReason.TOOL_CALLS and any(not call.arguments for call in calls):
        return replace(reply, finish_reason=FinishReason.LENGTH)
    return reply
