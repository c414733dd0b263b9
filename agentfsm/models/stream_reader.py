"""Reading a streamed response: bytes to events (SSE or NDJSON), and events to the body of a complete response.

A wire accumulates events into the body that a response without streaming would have had, and decodes that with the same
``decode``, so a streamed reply equals any other. Parsers accept chunks that end anywhere and run in linear time. Lines
end at CR, LF or CRLF and nowhere else, as the standard says
(https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream): U+2028 is an ordinary
character in JSON (https://github.com/florimondmanca/httpx-sse/issues/34).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from agentfsm.errors import ModelError, ProviderError, TransientProviderError
from agentfsm.loop.model import StreamChunk
from agentfsm.models.error_mapping import CallErrors, extract_error
from agentfsm.models.wire_json import as_object, loads_unrepaired, repair_surrogates

_BOM = b"\xef\xbb\xbf"

Frame = tuple[str, bytes]
"""The name of an event (or an empty string) and its data."""


class FrameParser(Protocol):
    """Splits a stream into events.

    Args:
        limit: Maximum size of one event in bytes.
    """

    def __init__(self, limit: int) -> None: ...

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """The events that end in this chunk.

        Raises:
            ProviderError: An event is longer than the limit, or the bytes are not a stream of this kind.
            TransientProviderError: The stream is corrupt.
        """
        ...

    def flush(self) -> Iterator[Frame]:
        """The unfinished event at the end of the stream; some servers omit the last line ending."""
        ...


class _LineSplitter:
    """Splits chunks into lines; the cost does not depend on where the chunks end."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._partial_line: list[bytes] = []
        self._size = 0
        self._after_cr = False
        self._at_start = True

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        if self._after_cr and chunk.startswith(b"\n"):  # the second half of a CRLF
            chunk = chunk[1:]
        if not chunk:
            return
        self._after_cr = chunk.endswith(b"\r")
        for raw_line in chunk.splitlines(keepends=True):  # of bytes: only at CR, LF and CRLF
            line = raw_line.rstrip(b"\r\n")
            self._partial_line.append(line)
            self._size += len(line)
            if self._size > self._limit:
                raise ProviderError(f"one event of the stream is longer than {self._limit} bytes")
            if line != raw_line:
                yield self.flush()

    def flush(self) -> bytes:
        """The unfinished line."""
        line = b"".join(self._partial_line)
        self._partial_line.clear()
        self._size = 0
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        return line


class SSEParser:
    """Parses server-sent events."""

    def __init__(self, limit: int) -> None:
        self._lines = _LineSplitter(limit)
        self._limit = limit
        self._name = ""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """The events that end in this chunk.

        Raises:
            ProviderError: An event is longer than the limit.
        """
        for line in self._lines.feed(chunk):
            if line:
                self._parse_field(line)
            elif self._data:
                yield self._pop_event()
            else:
                self._name = ""

    def flush(self) -> Iterator[Frame]:
        """An event without the blank line that ends it; the standard ignores it, but some servers omit the line."""
        if line := self._lines.flush():
            self._parse_field(line)
        if self._data:
            yield self._pop_event()

    def _parse_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")  # a comment has an empty name
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size += len(value)
            if self._size > self._limit:
                raise ProviderError(f"one event of the stream is longer than {self._limit} bytes")
        elif name == b"event":
            self._name = value.removeprefix(b" ").decode(errors="replace")

    def _pop_event(self) -> Frame:
        event = (self._name, b"\n".join(self._data))
        self._name, self._size = "", 0
        self._data.clear()
        return event


class NDJSONParser:
    """Parses JSON values, one per line (``application/x-ndjson``)."""

    def __init__(self, limit: int) -> None:
        self._lines = _LineSplitter(limit)

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """The lines that end in this chunk.

        Raises:
            ProviderError: A line is longer than the limit.
        """
        return (("", line) for line in self._lines.feed(chunk) if line.strip())

    def flush(self) -> Iterator[Frame]:
        """The last line, if its line ending is missing."""
        line = self._lines.flush()
        return iter([("", line)] if line.strip() else [])


class StreamAccumulator(ABC):
    """Accumulates the events of a stream into the body of a complete response.

    Attributes:
        closed: Whether the last event has arrived; anything after it is not read.
    """

    closed = False

    @abstractmethod
    def add(self, event: dict[str, Any]) -> Iterator[StreamChunk]:
        """Add one event; yields the chunks of the reply in it."""

    @property
    def complete(self) -> bool:
        """Whether the reply is complete if the stream ends here."""
        return self.closed

    @property
    def repairs(self) -> tuple[str, ...]:
        """How the stream broke the API's rules, and how it was read nevertheless; for ``Reply.repairs``."""
        return ()

    @abstractmethod
    def body(self) -> object:
        """The body of the complete response, for ``decode``."""


_CHUNKS_PER_BLOCK = 500
"""How many chunks of a text are joined into one."""


class TextAccumulator:
    """Joins the chunks of a text, each of which may end inside a character.

    Servers that count in UTF-16 split characters outside the basic plane (most emoji) into two surrogates. In the
    complete text the two are joined; the first is not shown before the second arrives.
    """

    def __init__(self) -> None:
        self._blocks: list[str] = []
        self._chunks: list[str] = []
        self._pending_surrogate = ""
        self.last_chunk = ""

    def add(self, chunk: object) -> str:
        """Add a chunk; returns the text that can be shown now. Anything but a string is ignored."""
        if not isinstance(chunk, str) or not chunk:
            return ""
        self.last_chunk = chunk
        self._chunks.append(chunk)
        if len(self._chunks) == _CHUNKS_PER_BLOCK:  # each short string costs ten times its length
            self._blocks.append("".join(self._chunks))
            self._chunks.clear()
        if chunk.isascii() and not self._pending_surrogate:
            return chunk
        shown, self._pending_surrogate = self._pending_surrogate + chunk, ""
        if "\ud800" <= shown[-1] <= "\udbff":
            shown, self._pending_surrogate = shown[:-1], shown[-1]
        return shown.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def __bool__(self) -> bool:
        return bool(self.last_chunk)

    def __str__(self) -> str:
        return "".join((*self._blocks, *self._chunks))


MIDSTREAM_ERROR_STATUS = 500
"""The HTTP status assumed for an error event that names none."""


class StreamReader:
    """Reads one stream: splits it into events, adds them to an accumulator, and raises the errors among them.

    After an event that is not JSON the stream is not used any more, since other parts may be missing. An error event
    without a status counts as a server error: the server had accepted the request.
    """

    def __init__(
        self,
        frames: FrameParser,
        accumulator: StreamAccumulator,
        errors: CallErrors,
        make_error: Callable[[object], ModelError],
    ) -> None:
        self._frames, self._accumulator = frames, accumulator
        self._errors, self._make_error = errors, make_error

    @property
    def closed(self) -> bool:
        """Whether the last event has arrived; anything after it is not read."""
        return self._accumulator.closed

    @property
    def repairs(self) -> tuple[str, ...]:
        """How the stream broke the API's rules, and how it was read nevertheless."""
        return self._accumulator.repairs

    def feed(self, chunk: bytes) -> Iterator[StreamChunk]:
        """Add what ends in this chunk; yields the chunks of the reply.

        Raises:
            ModelError: The stream was interrupted, contains an error event, or is invalid.
        """
        return self._add(self._frames.feed(chunk), "is corrupt")

    def flush(self) -> Iterator[StreamChunk]:
        """Add what is left where the stream ends; yields the chunks of the reply.

        Raises:
            ModelError: As for ``feed``.
        """
        return iter(()) if self.closed else self._add(self._frames.flush(), "was truncated")

    def body(self) -> object:
        """The body of the complete response.

        Raises:
            ModelError: The reply is not complete, or cannot be stored.
        """
        if not self._accumulator.complete:
            raise self._errors.transient("the stream ended before the reply did")
        try:
            return repair_surrogates(self._accumulator.body())
        except ValueError as error:
            raise self._errors.invalid_response(f"the response cannot be stored as JSON ({error})") from None

    def _add(self, frames: Iterator[Frame], problem: str) -> Iterator[StreamChunk]:
        for name, data in self._parsed_frames(frames):
            if data.strip() == b"[DONE]":
                self._accumulator.closed = True
                return
            try:
                value = loads_unrepaired(data)
            except ValueError as error:
                if name == "error":
                    text = data.decode(errors="replace")
                    raise self._make_error({"error": {"message": text}}) from None
                raise self._errors.transient(f"the stream {problem}: an event is not complete JSON ({error})") from None
            event = as_object(value)
            if extract_error(value):
                raise self._make_error(value)
            if name == "error":
                raise self._make_error({"error": event or str(value)})
            yield from self._accumulator.add(event)
            if self._accumulator.closed:
                return

    def _parsed_frames(self, frames: Iterator[Frame]) -> Iterator[Frame]:
        try:
            yield from frames
        except TransientProviderError as error:
            raise self._errors.transient(str(error)) from None
        except ProviderError as error:
            raise self._errors.invalid_response(str(error)) from None
