"""Streams are parsed into events as the standard requires, for any chunking."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm.errors import ProviderError
from agentfsm.models.stream_reader import NDJSONParser, SSEParser


def read(*chunks: bytes, limit: int = 10_000) -> list[tuple[str, bytes]]:
    frames = SSEParser(limit)
    found = [frame for chunk in chunks for frame in frames.feed(chunk)]
    return [*found, *frames.flush()]


@pytest.mark.parametrize(
    ("sent", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [("", b"a"), ("", b"b")]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [("", b"a"), ("", b"b")]),
        (b"data: a\r\rdata: b\r\r", [("", b"a"), ("", b"b")]),
        (b"event: x\ndata: a\n\ndata: b\n\n", [("x", b"a"), ("", b"b")]),
        (b"event: x\n\ndata: b\n\n", [("", b"b")]),  # a name without data is ignored
        (b"data: a\ndata: b\ndata:\ndata: c\n\n", [("", b"a\nb\n\nc")]),
        (b"data:a\ndata:  b\n\n", [("", b"a\n b")]),  # one blank belongs to the field, a second to the data
        (b"data\n\n", [("", b"")]),
        (b": a comment\n\n:\ndata: a\n: another\n\n", [("", b"a")]),
        (b"id: 7\nretry: 9\nnonsense\ndata: a\n\n", [("", b"a")]),
        (b"\xef\xbb\xbfdata: a\n\n", [("", b"a")]),
        (b"data: \xef\xbb\xbfa\n\n", [("", b"\xef\xbb\xbfa")]),  # a byte-order mark counts only at the very start
        ("data: a\u2028b\u2029c\x85d\x0be\x0cf\n\n".encode(), [("", "a\u2028b\u2029c\x85d\x0be\x0cf".encode())]),
        (b"\n\n\r\n\n", []),
        (b"", []),
        (b"data: a\n\ndata: b", [("", b"a"), ("", b"b")]),  # the end of the stream ends the last event
        (b"data: a\n", [("", b"a")]),
    ],
)
def test_an_event_stream_is_read_as_the_standard_says(sent: bytes, events: list[tuple[str, bytes]]) -> None:
    assert read(sent) == events
    assert read(*(sent[i : i + 1] for i in range(len(sent)))) == events


LINES = st.lists(st.sampled_from([b"data: a", b"data:", b"data: \xe2\x80\xa8", b"event: e", b": c", b"", b"x: y"]))
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


def by_the_book(stream: bytes) -> list[tuple[str, bytes]]:
    """The steps of the standard, on the whole stream at once."""
    found: list[tuple[str, bytes]] = []
    name, data = "", []
    for line in re.split(rb"\r\n|\r|\n", stream):
        if not line:
            if data:
                found.append((name, b"\n".join(data)))
            name, data = "", []
            continue
        field, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        if field == b"data":
            data.append(value)
        if field == b"event":
            name = value.decode()
    return found


@given(st.lists(st.tuples(LINES, ENDS)), st.data())
def test_events_do_not_depend_on_the_chunks(parts: list[tuple[list[bytes], bytes]], data: st.DataObject) -> None:
    stream = b"".join(line + end for lines, end in parts for line in lines) + b"\n\n"
    places = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    chunks = [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]
    assert read(*chunks) == by_the_book(stream)


@pytest.mark.parametrize("frames", [SSEParser, NDJSONParser])
def test_an_endless_line_is_rejected_at_the_limit(frames: type[SSEParser] | type[NDJSONParser]) -> None:
    reader = frames(1000)
    assert not [frame for _ in range(40) for frame in reader.feed(b"data: " + b"x" * 18)]
    with pytest.raises(ProviderError, match="longer than 1000 bytes"):
        list(reader.feed(b"x" * 50))


def test_an_event_with_endless_lines_is_rejected_at_the_limit() -> None:
    reader = SSEParser(1000)
    assert not [frame for _ in range(40) for frame in reader.feed(b"data: " + b"x" * 20 + b"\n")]
    with pytest.raises(ProviderError, match="longer than 1000 bytes"):
        list(reader.feed((b"data: " + b"x" * 20 + b"\n") * 20))


def test_json_lines_are_read_with_any_line_ending_and_without_the_last() -> None:
    reader = NDJSONParser(1000)
    sent = b'{"a": 1}\n\r\n{"b": "\xe2\x80\xa8"}\r\n{"c"'
    found = [data for i in range(len(sent)) for _, data in reader.feed(sent[i : i + 1])]
    assert found == [b'{"a": 1}', b'{"b": "\xe2\x80\xa8"}']
    assert list(reader.flush()) == [("", b'{"c"')]
