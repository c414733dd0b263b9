"""``HttpModel``: what the wires have in common: a call that is whole, one that streams, and what is kept out.

A wire brings six things: a path, how a request becomes a body, how its messages are written, how a body
becomes a reply, how a stream is cut into events, and how events add up to a body.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection, Iterator
from dataclasses import replace
from typing import Any

from agentfsm.core.messages import FinishReason, Reply, Role
from agentfsm.core.model import ModelRequest
from agentfsm.core.streaming import Piece, Pulse
from agentfsm.errors import ProviderError, TransientProviderError
from agentfsm.models.assembly import Assembly
from agentfsm.models.faults import Caller, error_in
from agentfsm.models.framing import EventLines, Frames
from agentfsm.models.http import Answer, HttpOptions, HttpWire
from agentfsm.models.providers import Endpoint
from agentfsm.models.settings import ModelSettings
from agentfsm.models.wire import as_object, call_ids, loads_as_it_is, mended
from agentfsm.models.written import Units, Written, joined, written

__all__ = ["HttpModel"]

_BLANK = b" \t\r\n\xef\xbb\xbf"
"""What may stand before the first byte that tells what an answer is, a byte-order mark included."""


_BLANKS = 1024 * 1024
"""How many blanks, in bytes, an answer may begin with."""

_BROKE_DOWN = 500
"""The status that an error in mid-stream stands for, where it names none."""


class HttpModel(ABC):
    """A model behind an HTTP interface; each wire is a class below this one.

    Args:
        model: The model's name at its provider.
        endpoint: Where calls go, and the key for them.
        settings: How the model is asked to answer.
        http: How calls travel.
        headers: Headers of every call; no secrets.
        key_header: The name of the header that carries the key.
        key_scheme: What stands before the key in it.

    Attributes:
        model: The model's name at its provider.
        settings: How the model is asked to answer.
    """

    def __init__(
        self,
        model: str,
        endpoint: Endpoint,
        settings: ModelSettings,
        http: HttpOptions | None,
        *,
        headers: dict[str, str] | None = None,
        key_header: str = "authorization",
        key_scheme: str = "Bearer ",
    ) -> None:
        self.model = model
        self.settings = settings
        self._endpoint = endpoint
        self._caller = Caller(model, endpoint)
        self._http = HttpWire(
            self._caller, headers=headers or {}, key_header=key_header, key_scheme=key_scheme, options=http
        )

    @property
    def name(self) -> str:
        """``provider:model``."""
        return self._caller.name

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
            chunk = head
            while chunk and not assembly.closed:
                silent = True
                for piece in self._fold(assembly, self._guarded(frames.feed(chunk)), answer, request):
                    silent = False
                    yield piece
                if silent:
                    yield Pulse()
                if not assembly.closed:
                    chunk = await answer.read(request.heartbeat_s)
            if assembly.closed:
                await answer.drain()
            else:
                for piece in self._fold(assembly, self._guarded(frames.rest()), answer, request, last=True):
                    yield piece
            if not assembly.whole:
                raise self._caller.broken("the stream ended before the reply did")
        yield self._read(self._mended(assembly), request)

    async def aclose(self) -> None:
        """Let go of connections; may be called more than once, and the model may be used after it."""
        await self._http.aclose()

    # -- what a wire brings ---------------------------------------------------------------------------

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
        head = b""
        while len(head) < _BLANKS and (chunk := await answer.read(request.heartbeat_s)):
            head += chunk
            if told := head.lstrip(_BLANK):
                return told
        if head and len(head) >= _BLANKS:
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

    def _guarded(self, frames: Iterator[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
        try:
            yield from frames
        except ProviderError as error:
            raise self._caller.unusable(str(error)) from None

    def _fold(
        self,
        assembly: Assembly,
        frames: Iterator[tuple[str, bytes]],
        answer: Answer,
        request: ModelRequest,
        *,
        last: bool = False,
    ) -> Iterator[Piece]:
        """Fold events in, until the stream has said its last word.

        An event that is no JSON is the end of all trust in a stream: what else is missing, nobody knows. An
        error that names no status is the server's: it had taken the request, and broke down over it.
        """
        for name, data in frames:
            if data.strip() == b"[DONE]":
                assembly.closed = True
                return
            try:
                value = loads_as_it_is(data)
            except ValueError as error:
                if name == "error":
                    text = data.decode(errors="replace")
                    raise self._http.refused(answer, {"error": {"message": text}}, request, _BROKE_DOWN) from None
                where = "broke off" if last else "is broken"
                raise self._caller.broken(f"the stream {where}: an event is no whole JSON ({error})") from None
            event = as_object(value)
            if error_in(event):
                raise self._http.refused(answer, event, request, _BROKE_DOWN)
            if name == "error":
                raise self._http.refused(answer, {"error": event or str(value)}, request, _BROKE_DOWN)
            yield from assembly.add(event)
            if assembly.closed:
                return

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
