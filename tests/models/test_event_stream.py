"""``EventStreamParser``: frames as Amazon's own library reads them, cut anywhere, and corrupt ones."""

from __future__ import annotations

import base64
import json
import random
import struct
from zlib import crc32

import pytest
from botocore.eventstream import EventStreamBuffer

from agentfsm.errors import ModelError, ProviderError, TransientProviderError
from agentfsm.models.anthropic_clouds import EventStreamParser
from tests.helpers.event_frames import chunk_frame, event_frame

EVENTS = [{"type": "ping", "n": n, "text": "naïve 😀" * n} for n in range(20)]
STREAM = b"".join(map(chunk_frame, EVENTS))


def parse(*chunks: bytes, limit: int = 100_000) -> list[tuple[str, object]]:
    parser = EventStreamParser(limit)
    found = [frame for chunk in chunks for frame in parser.feed(chunk)]
    return [(name, json.loads(data)) for name, data in (*found, *parser.flush())]


def test_the_events_are_those_that_amazons_library_reads() -> None:
    buffer = EventStreamBuffer()
    buffer.add_data(STREAM)
    theirs = [json.loads(base64.b64decode(json.loads(each.payload)["bytes"])) for each in buffer]
    assert [event for _, event in parse(STREAM)] == theirs == EVENTS


def test_a_stream_may_be_cut_anywhere() -> None:
    rng = random.Random(7)
    for _ in range(30):
        cuts = sorted(rng.sample(range(len(STREAM)), rng.randrange(40)))
        chunks = [STREAM[a:b] for a, b in zip([0, *cuts], [*cuts, len(STREAM)], strict=True)]
        assert [event for _, event in parse(*chunks)] == EVENTS
    assert [event for _, event in parse(*(bytes([byte]) for byte in STREAM[:3000]))] == EVENTS[
        : len(parse(STREAM[:3000]))
    ]


def test_headers_of_every_type_are_skipped() -> None:
    values = {
        0: b"",
        1: b"",
        2: b"\1",
        3: b"\0\1",
        4: b"\0" * 4,
        5: b"\0" * 8,
        6: b"\0\2ab",
        8: b"\0" * 8,
        9: b"\0" * 16,
    }
    headers = b"".join(b"\2h" + bytes([97 + kind, kind]) + value for kind, value in values.items())
    whole = chunk_frame({"n": 1})
    total, size = struct.unpack_from(">II", whole)
    prelude = struct.pack(">II", total + len(headers), size + len(headers))
    frame = prelude + struct.pack(">I", crc32(prelude)) + headers + whole[12:-4]
    frame += struct.pack(">I", crc32(frame))
    buffer = EventStreamBuffer()
    buffer.add_data(frame)
    assert len(next(iter(buffer)).headers) == 2 + len(values)  # Amazon's library takes it, too
    assert parse(frame) == [("", {"n": 1})]


def test_an_exception_is_an_error_event_and_an_unknown_event_is_ignored() -> None:
    text = json.dumps({"message": "slow down"}).encode()
    exception = event_frame(text, message_type="exception", exception_type="throttlingException")
    error = event_frame(b"{}", message_type="error", error_code="Internal", error_message="broken")
    other = event_frame(b"{}", message_type="event", event_type="metering")
    assert parse(exception + other + error) == [
        ("error", {"error": {"type": "throttlingException", "message": "slow down", "status": "429"}}),
        ("error", {"error": {"type": "Internal", "message": "broken"}}),
    ]


@pytest.mark.parametrize("at", [0, 5, 9, 20, 60, len(STREAM) - 1])
def test_a_changed_byte_is_an_error(at: int) -> None:
    """In the first frame the server may not stream as Amazon does; after a good one a retry may help."""
    changed = bytearray(STREAM)
    changed[at] ^= 1
    with pytest.raises(ModelError) as caught:
        parse(bytes(changed))
    in_first = at < len(chunk_frame(EVENTS[0]))
    assert type(caught.value) is (ProviderError if in_first else TransientProviderError)
    assert ("is base_url right?" if in_first else "the stream is corrupt") in str(caught.value)
    with pytest.raises(TransientProviderError, match="the stream is corrupt"):
        parse(STREAM + bytes(changed))


def test_a_stream_of_another_kind_is_a_wrong_address() -> None:
    with pytest.raises(ProviderError, match=r"not an event stream of Amazon.s.*is base_url right"):
        parse(b'data: {"type": "ping"}\n\n')


def test_a_frame_above_the_limit_is_not_waited_for() -> None:
    prelude = struct.pack(">II", 2_000_000_000, 0)
    with pytest.raises(ProviderError, match="longer than 1000 bytes"):
        parse(prelude + struct.pack(">I", crc32(prelude)), limit=1000)


@pytest.mark.parametrize("payload", [b"", b"no JSON", b'{"bytes": "%%%"}', b'{"bytes": "a"}'])
def test_a_payload_that_is_not_json_is_corrupt(payload: bytes) -> None:
    with pytest.raises(TransientProviderError, match="corrupt"):
        parse(event_frame(payload, message_type="event", event_type="chunk"))


def test_an_error_of_the_service_needs_no_payload() -> None:
    frame = event_frame(b"", message_type="error", error_code="InternalError", error_message="try later")
    assert parse(frame) == [("error", {"error": {"type": "InternalError", "message": "try later"}})]


def test_headers_longer_than_their_frame_are_corrupt() -> None:
    prelude = struct.pack(">II", 20, 500)
    with pytest.raises(TransientProviderError, match="shorter than its headers"):
        parse(STREAM + prelude + struct.pack(">I", crc32(prelude)) + b"\0" * 8)
