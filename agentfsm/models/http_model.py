"""``HttpModel``: the base class of all wires. It makes one call, streamed or not, and defines what a wire implements.

A wire implements six methods: which settings it supports, the URL path, the request body, the encoding of messages, the
decoding of a response body, and the accumulation of stream events into such a body.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import SecretStr

from agentfsm.errors import ConfigurationError, ProviderError, TransientProviderError
from agentfsm.loop.messages import FinishReason, Reply, Role
from agentfsm.loop.model import KeepAlive, ModelRequest, StreamChunk
from agentfsm.models.error_mapping import CallErrors
from agentfsm.models.http_client import HttpClient, HttpOptions
from agentfsm.models.providers import ApiKey, Endpoint, Provider, resolve_endpoint
from agentfsm.models.settings import ModelSettings, WithSettings
from agentfsm.models.stream_reader import FrameParser, SSEParser, StreamAccumulator
from agentfsm.models.wire_format import MessageEncoder, RequestCache, cached_encoding, call_ids, join_body, refuse_parts

_UNASKED_STREAM = "the server streamed its reply, although a whole one was requested"
"""The repair of such a reply, in ``Reply.repairs``."""


class HttpModel(WithSettings):
    """A client of a model's HTTP API; each wire is a subclass.

    Args:
        model: The model's name at its provider.
        provider: The row of ``providers.PROVIDERS`` with the address and the variable of the API key; by default
            the provider that defined the wire.
        base_url: An address to use instead of the provider's own. Only ``api_key`` is sent to it.
        api_key: The API key, a function that returns it and is called again when the provider rejects the key, or an
            account of a cloud; by default the one in the provider's environment variable, or this machine's account.
        settings: Sampling and output settings.
        http: Headers, certificates, proxy, timeouts and limits of the HTTP calls.

    Attributes:
        model: The model's name at its provider.
        settings: Sampling and output settings.

    Raises:
        MissingKeyError: The provider's own address needs an API key and there is none.
        ConfigurationError: The provider, the address or the key is invalid, or the wire does not support a setting.
    """

    _default_provider: ClassVar[str]
    """The name of the provider that defined the wire."""

    _default_files: ClassVar[bool] = False
    """Whether all servers of the wire accept PDFs in prompts."""

    _headers: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Headers of every call."""

    _key_header: ClassVar[str] = "authorization"
    _key_scheme: ClassVar[str] = "Bearer "
    """The header that carries the API key, and what precedes the key in it."""

    _frame_parser: ClassVar[type[FrameParser]] = SSEParser
    """Splits a stream into events."""

    _plain_body_starts: ClassVar[tuple[bytes, ...]] = (b"{", b"[", b"<")
    """First bytes of a response that is one JSON body or a web page although a stream was requested.

    Servers that ignore ``stream`` send the one and proxies the other, often with a wrong content type. No line of an
    event stream starts like this.
    """

    _stream_start: ClassVar[re.Pattern[bytes]] = re.compile(rb"(\xef\xbb\xbf)?\s*(data|event|id|retry)?:")
    """How a stream begins, and a whole response does not: some gateways stream whatever is requested."""

    def __init__(
        self,
        model: str,
        *,
        provider: str | None = None,
        base_url: str | None = None,
        api_key: ApiKey | None = None,
        settings: ModelSettings | None = None,
        http: HttpOptions | None = None,
    ) -> None:
        self.model = model
        self.settings = self._validate_settings(settings or ModelSettings())
        self._endpoint = self._resolve_endpoint(provider or self._default_provider, base_url, api_key)
        if self._endpoint.base_url.endswith(self._path()):
            raise ConfigurationError(f"base_url ends with {self._path()}, which is added to it: leave that out")
        self._errors = CallErrors(model, self._endpoint)
        self._sends_files = self._default_files or (self._known_row is not None and self._known_row.files)
        row = self._endpoint.provider
        fixed = bool(row.key_header) and self._endpoint.key_function is None
        self._http = HttpClient(
            self._errors,
            headers=self._headers,
            key_header=row.key_header if fixed else self._key_header,
            key_scheme="" if fixed else self._key_scheme,
            options=http,
        )

    @property
    def name(self) -> str:
        """``provider:model``."""
        return self._errors.name

    @property
    def secrets(self) -> tuple[SecretStr, ...]:
        """The keys, tokens and passwords of its calls, which must not appear in a journal."""
        return tuple(self._errors.secrets)

    @property
    def _is_official(self) -> bool:
        """Whether calls go to the own address of the provider that defined the wire."""
        return self._endpoint.is_official and self._endpoint.provider.name == self._default_provider

    @property
    def _known_row(self) -> Provider | None:
        """The row of the provider, if it describes the server.

        A model with the provider that defined the wire, at another address, is any server that speaks the wire.
        """
        row = self._endpoint.provider
        return row if self._endpoint.is_official or row.name != self._default_provider else None

    @property
    def _origin(self) -> str:
        """This server and this model; what it stored in ``Message.extra`` is sent back to it alone.

        A signature is valid only for the model that made it
        (https://github.com/anthropics/anthropic-sdk-python/issues/1598).
        """
        server = self._endpoint.provider.name if self._endpoint.is_official else self._endpoint.base_url
        return f"{server} {self.model}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r}, base_url={self._endpoint.base_url!r})"

    async def reply(self, request: ModelRequest) -> Reply:
        """The reply to one request.

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        refuse_parts(request.messages, self.settings.images, takes_files(self.settings, self._sends_files))
        content = self._request_body(request, stream=False)
        async with self._http.open(self._path(), content, request, self._http.options.max_body_bytes) as response:
            body = await response.read_all()
            if not self._stream_start.match(body):
                return self._parse_reply(self._http.parse_response(response, body, request), request)
            reader = self._http.stream_reader(response, request, self._frame_parser, self._accumulator())
            deque(chain(reader.feed(body), reader.flush()), maxlen=0)
        return self._parse_reply(reader.body(), request, (_UNASKED_STREAM, *reader.repairs))

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply, None]:
        """The reply to one request as it is generated: its chunks, and last the complete ``Reply``.

        Raises:
            agentfsm.errors.ModelError: The call failed, or the stream was interrupted or ended early.
        """
        refuse_parts(request.messages, self.settings.images, takes_files(self.settings, self._sends_files))
        options = self._http.options
        content = self._request_body(request, stream=True)
        async with self._http.open(self._stream_path(), content, request, options.max_stream_bytes) as response:
            chunk = await response.read_start()
            if chunk.startswith(self._plain_body_starts):
                text = await response.read_remaining(chunk, options.max_body_bytes)
                yield self._parse_reply(self._http.parse_response(response, text, request), request)
                return
            reader = self._http.stream_reader(response, request, self._frame_parser, self._accumulator())
            while chunk and not reader.closed:
                produced = False
                for part in reader.feed(chunk):
                    produced = True
                    yield part
                    response.allow_silence(request.heartbeat_s)  # from the first piece on; a comment is silence
                if not produced:
                    yield KeepAlive()
                if not reader.closed:
                    chunk = await response.read()
            if reader.closed:
                await response.drain()
            for part in reader.flush():
                yield part
        yield self._parse_reply(reader.body(), request, reader.repairs)

    async def aclose(self) -> None:
        """Close the connections. May be called more than once; the next call opens new ones."""
        await self._http.aclose()

    # -- implemented by a wire ------------------------------------------------------------------------

    def _resolve_endpoint(self, provider: str, base_url: str | None, api_key: ApiKey | None) -> Endpoint:
        """The base URL and the API key."""
        return resolve_endpoint(provider, base_url, api_key)

    @abstractmethod
    def _path(self) -> str:
        """The URL path after the base URL."""

    def _stream_path(self) -> str:
        """The same for a streamed reply, if it differs."""
        return self._path()

    @abstractmethod
    def _encode(self, request: ModelRequest, *, stream: bool) -> dict[str, Any]:
        """The request body."""

    @abstractmethod
    def _message_encoder(self) -> tuple[str, MessageEncoder]:
        """The field of the body that holds the messages, and an encoder for an empty transcript.

        It must encode messages exactly as ``_encode`` does.
        """

    @abstractmethod
    def _decode(self, body: object, used_ids: Collection[str]) -> Reply:
        """The reply in a response body.

        Raises:
            agentfsm.errors.ProviderError: The body lacks a required part.
            agentfsm.errors.TransientProviderError: It says that the server gave up, or not that the reply has ended.
        """

    @abstractmethod
    def _accumulator(self) -> StreamAccumulator:
        """An accumulator for one stream."""

    def _max_output_tokens(self, request: ModelRequest) -> int | None:
        """The limit on the reply that is sent with a request, in tokens."""
        return request.max_output_tokens or self.settings.max_tokens

    # -- shared by all wires --------------------------------------------------------------------------

    def _request_body(self, request: ModelRequest, *, stream: bool) -> bytes:
        """The request body as JSON; messages that an earlier request of the run has encoded are reused."""
        key, empty = self._message_encoder()
        cached, tail = cached_encoding(request, self, lambda: empty)
        without_messages = replace(request, messages=[*cached.system, *(m for m in tail if m.role is Role.SYSTEM)])
        return join_body(self._encode(without_messages, stream=stream), key, cached.encoder.encoded_items(tail))

    def _parse_reply(self, body: object, request: ModelRequest, repairs: tuple[str, ...] = ()) -> Reply:
        """The reply in a response body.

        Args:
            body: The body.
            request: The request.
            repairs: How the body was read although the response broke rules.
        """
        cached = request.cache.get(self)
        used_ids = cached.call_ids if isinstance(cached, RequestCache) else call_ids(request.messages)
        try:
            reply = self._decode(body, used_ids)
        except TransientProviderError as error:
            raise self._errors.transient(str(error)) from None
        except ProviderError as error:
            raise self._errors.invalid_response(str(error), body=body, prompt=request.messages) from None
        if repairs:
            reply = replace(reply, repairs=(*repairs, *reply.repairs))
        return _mark_truncated(reply, self._max_output_tokens(request))


def takes_files(settings: ModelSettings, by_default: bool) -> bool:
    """Whether a model accepts PDFs in prompts."""
    return by_default if settings.files is None else settings.files


def _mark_truncated(reply: Reply, cap: int | None) -> Reply:
    """The reply, with finish reason ``LENGTH`` if it was truncated, whatever its server says.

    An answer that used up the limit is truncated. So is a call without arguments: some servers close one that
    reached the limit with ``{}``, or leave it at ``{``, and report it as finished. Executing it would do something
    that the model never requested (https://github.com/LibreChat-AI/agents/pull/280).
    """
    calls = reply.message.tool_calls
    spent = cap is not None and reply.usage.output_tokens >= cap
    cut_call = reply.finish_reason is FinishReason.TOOL_CALLS and any(not call.arguments for call in calls)
    if spent and (cut_call or reply.finish_reason is FinishReason.STOP):
        return replace(reply, finish_reason=FinishReason.LENGTH)
    return reply
