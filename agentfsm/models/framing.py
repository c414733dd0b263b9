"""Where one event of a stream ends and the next begins: server-sent events, and JSON a line.

Both readers take bytes as they come, cut anywhere (inside a letter too), and cost time linear in them.
Lines end at CR, LF or CRLF and nowhere else, as the standard says
(https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream): U+2028 is a letter
of JSON like any other, and readers that split text at it break replies
(https://github.com/florimondmanca/httpx-sse/issues/34).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from agentfsm.errors import ProviderError

__all__ = ["EventLines", "Frames", "JsonLines"]

_BOM = b"\xef\xbb\xbf"

Frame = tuple[str, bytes]
"""The event's name (or an empty string) and its data."""


class Frames(Protocol):
    """Cuts a stream into events."""

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """The events that end in these bytes.

        Raises:
            ProviderError: An event is longer than the limit.
        """
        ...

    def rest(self) -> Iterator[Frame]:
        """What had begun when the stream ended; servers leave out the last line end."""
        ...


class _Lines:
    """Lines from bytes; what they cost does not depend on where the bytes are cut."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._begun: list[bytes] = []
        self._size = 0
        self._after_cr = False
        self._first = True

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        if self._after_cr and chunk.startswith(b"\n"):  # the second half of a CRLF
            chunk = chunk[1:]
        if not chunk:
            return
        self._after_cr = chunk.endswith(b"\r")
        for piece in chunk.splitlines(keepends=True):  # of bytes: CR, LF and CRLF, and no other
            line = piece.rstrip(b"\r\n")
            self._begun.append(line)
            self._size += len(line)
            if self._size > self._limit:
                raise ProviderError(f"one event of the stream is longer than {self._limit} bytes")
            if line != piece:
                yield self.rest()

    def rest(self) -> bytes:
        """The line that has begun, without its end."""
        line = b"".join(self._begun)
        self._begun.clear()
        self._size = 0
        if self._first:
            self._first = False
            line = line.removeprefix(_BOM)
        return line


class EventLines:
    """Server-sent events.

    Args:
        limit: Bytes of one event; a longer one is refused.
    """

    def __init__(self, limit: int) -> None:
        self._lines = _Lines(limit)
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
                self._field(line)
            elif self._data:
                yield self._event()
            else:
                self._name = ""

    def rest(self) -> Iterator[Frame]:
        """An event without the blank line that ends it: the standard drops it, and servers forget the line."""
        if line := self._lines.rest():
            self._field(line)
        if self._data:
            yield self._event()

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")  # a comment has no name
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size += len(value)
            if self._size > self._limit:
                raise ProviderError(f"one event of the stream is longer than {self._limit} bytes")
        elif name == b"event":
            self._name = value.removeprefix(b" ").decode(errors="replace")

    def _event(self) -> Frame:
        event = (self._name, b"\n".join(self._data))
        self._name, self._size = "", 0
        self._data.clear()
        return event


class JsonLines:
    """JSON values, one a line (``application/x-ndjson``).

    Args:
        limit: Bytes of one line; a longer one is refused.
    """

    def __init__(self, limit: int) -> None:
        self._lines = _Lines(limit)

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """The lines that end in these bytes.

        Raises:
            ProviderError: A line is longer than the limit.
        """
        return (("", line) for line in self._lines.feed(chunk) if line.strip())

    def rest(self) -> Iterator[Frame]:
        """The last line, where its end is missing."""
        line = self._lines.rest()
        return iter([("", line)] if line.strip() else [])
