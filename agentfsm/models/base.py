"""``HttpModel``: what the wires have in common: a call that is whole, one that streams, and what is kept out.

A wire brings six things: a path, how a request becomes a body, how its messages are written, how a body
becomes a reply, how a stream is cut into events, and how events add up to a body.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import SecretStr

from agentfsm.core.messages import FinishReason, Reply, Role
from agentfsm.core.model import ModelRequest
from agentfsm.core.streaming import Piece, Pulse
from agentfsm.errors import ProviderError, TransientProviderError
from agentfsm.models.assembly import Assembly
from agentfsm.models.faults import Caller
from agentfsm.models.folding import BROKE_DOWN, Folding
from agentfsm.models.framing import EventLines, Frames
from agentfsm.models.http import Answer, HttpOptions, HttpWire
from agentfsm.models.providers import Endpoint, locate
from agentfsm.models.settings import ModelSettings
from agentfsm.models.wire import call_ids, mended
from agentfsm.models.written import Units, Written, joined, written

__all__ = ["HttpModel"]

_BLANK = b" \t\r\n\xef\xbb\xbf"
"""What may stand before the first byte that tells what an answer is, a byte-order mark included."""


_BLANKS = 1024 * 1024
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
        self.settings = self._checked(settings or ModelSettings())
        self._endpoint = self._located(base_url, api_key)
        self._caller = Caller(model, self._endpoint)
        self._http = HttpWire(
            self._caller,
            headers=self._headers,
            key_header=self._key_header,
            key_scheme=self._key_scheme,
            options=http,
        )

    @property
    def name(self) -> str:
        """``provider:model``."""
        return self._caller.name

    @property
    def secrets(self) -> tuple[SecretStr, ...]:
        """The key, which no journal may hold."""
        return () if self._endpoint.key is None else (self._endpoint.key,)

    @property
    def _voice(self) -> str:
        """Who gets back what they said they thought: this model on this server, and no other.

        A signature is good for the model alone that gave it
        (https://github.com/anthropics/anthropic-sdk-python/issues/1598).
        """
        server = self._endpoint.provider.name if self._endpoint.at_home else self._endpoint.base_url
        return f"{server} {self.model}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r}, base_url={self._endpoint.base_url!r})"

    async def reply(self, request: ModelRequest) -> Reply:
        """Answer one request.

        Raises:
            agentfsm.errors.ModelError: The call failed.
        """
        answer = await self._http.post(self._path(), self._content(request, stream=False), request)
        return self._read(answer, request)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Piece | Reply, None]:
        """Answer one request piece by piece; the last piece is the whole reply.

        Raises:
            agentfsm.errors.ModelError: The call failed; so did one whose stream broke off, or ended without
                its end.
        """
        options = self._http.options
        content = self._content(request, stream=True)
        async with self._http.open(self._path(), content, request, options.max_stream_bytes) as answer:
            head = await self._head(answer, request)
            if self._is_no_stream(head):
                yield self._read(self._http.judge(answer, await self._rest(answer, head), request), request)
                return
            assembly, frames = self._assembly(), self._frames(options.max_body_bytes)
            folding = Folding(
                assembly, self._caller, lambda error: self._http.refused(answer, error, request, BROKE_DOWN)
            )
            chunk = head
            while chunk and not assembly.closed:
                silent = True
                for piece in folding.add(frames.feed(chunk)):
                    silent = False
                    yield piece
                if silent:
                    yield Pulse()
                if not assembly.closed:
                    chunk = await answer.read(request.heartbeat_s)
            if assembly.closed:
                await answer.drain()
            else:
                for piece in folding.add(frames.rest(), last=True):
                    yield piece
            if not assembly.whole:
                raise self._caller.broken("the stream ended before the reply did")
        yield self._read(self._mended(assembly), request)

    async def aclose(self) -> None:
        """Let go of connections; may be called more than once, and the model may be used after it."""
        await self._http.aclose()

    # -- what a wire brings ---------------------------------------------------------------------------

    def _located(self, base_url: str | None, api_key: str | SecretStr | None) -> Endpoint:
        """Where calls go, and the key for them."""
        return locate(self._provider, base_url, api_key)

    @staticmethod
    @abstractmethod
    def _checked(settings: ModelSettings) -> ModelSettings:
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
    def _units(self, request: ModelRequest) -> tuple[str, Units]:
        """Where in a body the messages stand, and the form of an empty transcript.

        What it writes must be what ``_encode`` gives for the same messages.
        """

    @abstractmethod
    def _decode(self, body: object, taken: Collection[str]) -> Reply:
        """The reply that the body of an answer holds.

        Raises:
            agentfsm.errors.ProviderError: The body lacks what a reply must hold.
            agentfsm.errors.TransientProviderError: It says that the server gave up on it.
        """

    @abstractmethod
    def _assembly(self) -> Assembly:
        """What folds a stream."""

    def _frames(self, limit: int) -> Frames:
        return EventLines(limit)

    def _is_no_stream(self, head: bytes) -> bool:
        """Whether an answer is one JSON body, though a stream was asked for, or a web page.

        Both happen (servers that know no ``stream``, proxies that know better), often under a wrong
        content type; no line of an event stream begins so.
        """
        return head[:1] in (b"{", b"[", b"<")

    def _cap(self, request: ModelRequest) -> int | None:
        """The cap on the reply that a request asks for, in tokens."""
        return request.max_output_tokens or self.settings.max_tokens

    # -- what they share ------------------------------------------------------------------------------

    def _taken(self, request: ModelRequest) -> Collection[str]:
        """The ids of the transcript's calls, known since the request was written."""
        kept = request.memo.get(self)
        return kept.ids if isinstance(kept, Written) else call_ids(request.messages)

    def _content(self, request: ModelRequest, *, stream: bool) -> bytes:
        key, empty = self._units(request)
        known, tail = written(request, self, lambda: empty)
        bare = replace(request, messages=[*known.system, *(m for m in tail if m.role is Role.SYSTEM)])
        return joined(self._encode(bare, stream=stream), key, known.units.text(tail))

    async def _head(self, answer: Answer, request: ModelRequest) -> bytes:
        """The beginning of the body, blanks and byte-order mark left out; nothing where there is no more."""
        blanks = 0
        while blanks < _BLANKS and (chunk := await answer.read(request.heartbeat_s)):
            if told := chunk.lstrip(_BLANK):
                return told
            blanks += len(chunk)
        if blanks >= _BLANKS:
            raise self._caller.unusable("the answer is blank, and very long", answer.status)
        return b""

    async def _rest(self, answer: Answer, head: bytes) -> bytes:
        body = bytearray(head)
        limit = self._http.options.max_body_bytes
        while chunk := await answer.read():
            body += chunk
            if len(body) > limit:
                raise self._caller.unusable(f"the answer is longer than {limit} bytes", answer.status)
        return bytes(body)

    def _mended(self, assembly: Assembly) -> object:
        try:
            return mended(assembly.body())
        except ValueError as error:
            raise self._caller.unusable(f"the answer is no JSON that can be kept ({error})") from None

    def _read(self, body: object, request: ModelRequest) -> Reply:
        try:
            reply = self._decode(body, self._taken(request))
        except TransientProviderError as error:
            raise self._caller.broken(str(error)) from None
        except ProviderError as error:
            raise self._caller.unusable(str(error)) from None
        return _cut_off(reply, self._cap(request))


def _cut_off(reply: Reply, cap: int | None) -> Reply:
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
