"""Reading a streamed response: bytes to events (SSE or NDJSON), and events to the body of a whole response.

A wire accumulates its events into the body that a whole response would have had and decodes it with the same
``decode``, so a streamed reply equals a whole one. Parsers accept bytes cut anywhere and run in linear time. Lines end
at CR, LF or CRLF and nowhere else, as the standard says
(https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream): U+2028 is an ordinary
character in JSON (https://github.com/florimondmanca/httpx-sse/issues/34).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from agentfsm.errors import ModelError, ProviderError
from agentfsm.loop.model import StreamChunk
from agentfsm.models.error_mapping import CallErrors, extract_error
from agentfsm.models.wire_format import as_object, loads_unrepaired

__all__ = [
    "MIDSTREAM_ERROR_STATUS",
    "FrameParser",
    "NDJSONParser",
    "SSEParser",
    "StreamAccumulator",
    "StreamReader",
    "TextAccumulator",
]


_BOM = b"\xef\xbb\xbf"

Frame = tuple[str, bytes]
"""The event's name (or an empty string) and its data."""


class FrameParser(Protocol):
    """Cuts a stream into events."""

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """The events that end in these bytes.

        Raises:
            ProviderError: An event is longer than the limit.
        """
        ...

    def flush(self) -> Iterator[Frame]:
        """What had begun when the stream ended; servers leave out the last line end."""
        ...


class _LineSplitter:
    """Lines from bytes; what they cost does not depend on where the bytes are cut."""

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
        for piece in chunk.splitlines(keepends=True):  # of bytes: CR, LF and CRLF, and no other
            line = piece.rstrip(b"\r\n")
            self._partial_line.append(line)
            self._size += len(line)
            if self._size > self._limit:
                raise ProviderError(f"one event of the stream is longer than {self._limit} bytes")
            if line != piece:
                yield self.flush()

    def flush(self) -> bytes:
        """The line that has begun, without its end."""
        line = b"".join(self._partial_line)
        self._partial_line.clear()
        self._size = 0
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        return line


class SSEParser:
    """Server-sent events.

    Args:
        limit: Bytes of one event; a longer one is refused.
    """

    def __init__(self, limit: int) -> None:
        self._lines = _LineSplitter(limit)
        self._limit = limit
        self._name = ""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """The events that end in these bytes.

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
        """An event without the blank line that ends it: the standard drops it, and servers forget the line."""
        if line := self._lines.flush():
            self._parse_field(line)
        if self._data:
            yield self._pop_event()

    def _parse_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")  # a comment has no name
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
    """JSON values, one a line (``application/x-ndjson``).

    Args:
        limit: Bytes of one line; a longer one is refused.
    """

    def __init__(self, limit: int) -> None:
        self._lines = _LineSplitter(limit)

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """The lines that end in these bytes.

        Raises:
            ProviderError: A line is longer than the limit.
        """
        return (("", line) for line in self._lines.feed(chunk) if line.strip())

    def flush(self) -> Iterator[Frame]:
        """The last line, where its end is missing."""
        line = self._lines.flush()
        return iter([("", line)] if line.strip() else [])


class StreamAccumulator(Protocol):
    """Folds a stream's events into the body of a whole answer.

    Attributes:
        closed: Whether the stream has said its last word; what follows is not read.
    """

    closed: bool

    def add(self, event: dict[str, Any]) -> Iterator[StreamChunk]:
        """Fold one event in, and say what of it people may see."""
        ...

    @property
    def complete(self) -> bool:
        """Whether nothing of the reply is missing, should the stream end here."""
        ...

    def body(self) -> object:
        """The body of the whole answer, as ``decode`` takes it."""
        ...


_CHUNKS_PER_BLOCK = 500
"""How many pieces of a text become one."""


class TextAccumulator:
    """A text that comes in pieces, each of which may be cut inside a letter.

    Servers that count in UTF-16 cut letters outside the basic plane (most emoji) in two. In the whole text
    the halves meet again; what is shown on the way waits for the second.

    Attributes:
        last_chunk: The last piece.
    """

    def __init__(self) -> None:
        self._blocks: list[str] = []
        self._chunks: list[str] = []
        self._pending_surrogate = ""
        self.last_chunk = ""

    def add(self, chunk: object) -> str:
        """Add a piece; gives what may be shown now. Anything but a text adds nothing."""
        if not isinstance(chunk, str) or not chunk:
            return ""
        self.last_chunk = chunk
        self._chunks.append(chunk)
        if len(self._chunks) == _CHUNKS_PER_BLOCK:  # a short text of its own takes ten times its letters
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
"""The status that an error in mid-stream stands for, where it names none."""


class StreamReader:
    """Folds the events of one stream.

    An event that is no JSON is the end of all trust in a stream: what else is missing, nobody knows. An error that
    names no status is the server's: it had taken the request, and broke down over it.

    Args:
        accumulator: What they are folded into.
        errors: Who calls, for the texts of errors.
        make_error: The error that an event stands for which tells of one.
    """

    def __init__(
        self, accumulator: StreamAccumulator, errors: CallErrors, make_error: Callable[[dict[str, Any]], ModelError]
    ) -> None:
        self._accumulator, self._errors, self._make_error = accumulator, errors, make_error

    def feed(self, frames: Iterator[tuple[str, bytes]], *, last: bool = False) -> Iterator[StreamChunk]:
        """Fold events in, until the stream has said its last word.

        Args:
            frames: Names and data of events.
            last: Whether no more bytes will come.

        Raises:
            ModelError: The stream broke off, tells of an error, or cannot be read.
        """
        assembly = self._accumulator
        for name, data in self._parsed_frames(frames):
            if data.strip() == b"[DONE]":
                assembly.closed = True
                return
            try:
                value = loads_unrepaired(data)
            except ValueError as error:
                if name == "error":
                    text = data.decode(errors="replace")
                    raise self._make_error({"error": {"message": text}}) from None
                where = "broke off" if last else "is broken"
                raise self._errors.transient(f"the stream {where}: an event is no whole JSON ({error})") from None
            event = as_object(value)
            if extract_error(event):
                raise self._make_error(event)
            if name == "error":
                raise self._make_error({"error": event or str(value)})
            yield from assembly.add(event)
            if assembly.closed:
                return

    def _parsed_frames(self, frames: Iterator[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
        try:
            yield from frames
        except ProviderError as error:
            raise self._errors.invalid_response(str(error)) from None
