"""The frames in which Amazon Bedrock streams, made by the specification and not by the code under test."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from typing import Any
from zlib import crc32

__all__ = ["chunk_frame", "event_frame"]


def event_frame(payload: bytes, **headers: str) -> bytes:
    """A frame of ``application/vnd.amazon.eventstream``; underscores in the names of headers are hyphens."""
    encoded = b"".join(
        bytes([len(name) + 1])
        + b":"
        + name.replace("_", "-").encode()
        + b"\x07"
        + struct.pack(">H", len(value))
        + value.encode()
        for name, value in headers.items()
    )
    prelude = struct.pack(">II", 16 + len(encoded) + len(payload), len(encoded))
    frame = prelude + struct.pack(">I", crc32(prelude)) + encoded + payload
    return frame + struct.pack(">I", crc32(frame))


def chunk_frame(event: Mapping[str, Any] | bytes) -> bytes:
    """The frame of one event of a model in Bedrock: JSON, or these bytes."""
    data = base64.b64encode(event if isinstance(event, bytes) else json.dumps(event).encode()).decode()
    return event_frame(json.dumps({"bytes": data}).encode(), event_type="chunk", message_type="event")
