"""``BedrockMessages`` and ``VertexMessages``: Anthropic's models in the clouds of Amazon and Google.

Both take the body of Anthropic's messages API without the model, whose name is in the URL, and with a version of
their own in a field; each documents one value of it, and ``ModelSettings(extra_body={"anthropic_version": ...})`` sends
another (https://docs.aws.amazon.com/bedrock/latest/userguide/model-parameters-anthropic-claude-messages.html,
https://cloud.google.com/vertex-ai/generative-ai/docs/partner-models/claude/use-claude). Google streams server-sent
events, Amazon frames of its own, ``application/vnd.amazon.eventstream``
(https://smithy.io/2.0/aws/amazon-eventstream.html).
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any
from urllib.parse import quote
from zlib import crc32

from agentfsm.errors import ModelError, ProviderError, TransientProviderError
from agentfsm.loop.model import ModelRequest
from agentfsm.models.anthropic import AnthropicMessages
from agentfsm.models.stream_reader import Frame
from agentfsm.models.wire_json import as_object, as_text, dumps, loads

_PRELUDE = struct.Struct(">III")
_CHECKSUM = struct.Struct(">I")

_VALUE_SIZES = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
"""The size of a header's value by its type; of the others, bytes (6) and text (7), it precedes the value."""

_STATUS_OF_EXCEPTION = {
    "internalServerException": 500,
    "modelStreamErrorException": 500,
    "modelTimeoutException": 408,
    "serviceUnavailableException": 503,
    "throttlingException": 429,
    "validationException": 400,
}
"""(https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_ResponseStream.html)"""


class EventStreamParser:
    """Splits a stream of Amazon Bedrock into events.

    A frame is its length, the length of its headers and a checksum of both (4 bytes each, big-endian), then headers,
    the payload, and a checksum of all. The payload of an event of Bedrock is JSON whose field ``bytes`` holds the event
    that the model sent, in base64.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._has_begun = False

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """The events that end in this chunk.

        Raises:
            ProviderError: A frame is longer than the limit, or the first one is not a frame.
            TransientProviderError: A later frame is corrupt.
        """
        self._buffer += chunk
        while len(self._buffer) >= _PRELUDE.size:
            total, size_of_headers, checksum = _PRELUDE.unpack_from(self._buffer)
            if crc32(self._buffer[: _PRELUDE.size - _CHECKSUM.size]) != checksum:
                raise self._corrupt("the checksum of a frame is wrong")
            if total > self._limit:
                raise ProviderError(f"one event of the stream is longer than {self._limit} bytes")
            start, end = _PRELUDE.size + size_of_headers, total - _CHECKSUM.size
            if start > end:
                raise self._corrupt("a frame is shorter than its headers")
            if len(self._buffer) < total:
                return
            frame = bytes(self._buffer[:total])
            del self._buffer[:total]
            if (crc32(frame[:end]),) != _CHECKSUM.unpack_from(frame, end):
                raise self._corrupt("the checksum of a frame is wrong")
            self._has_begun = True
            try:
                event = _event(_parse_headers(frame[_PRELUDE.size : start]), frame[start:end])
            except ValueError as error:
                raise self._corrupt(str(error)) from None
            if event is not None:
                yield event

    def flush(self) -> Iterator[Frame]:
        """Nothing: an unfinished frame holds no event."""
        return iter(())

    def _corrupt(self, why: str) -> ModelError:
        """The error for bytes that are not a frame; at the beginning, the server does not stream as Amazon does."""
        if self._has_begun:
            return TransientProviderError(f"the stream is corrupt: {why}")
        return ProviderError(f"the response is not an event stream of Amazon's ({why}): is base_url right?")


def _parse_headers(data: bytes) -> dict[str, str]:
    """The headers that are texts."""
    found: dict[str, str] = {}
    at = 0
    try:
        while at < len(data):
            name_end = at + 1 + data[at]
            name, kind = data[at + 1 : name_end].decode(), data[name_end]
            at = name_end + 1
            size = _VALUE_SIZES.get(kind)
            if size is None:
                (size,) = struct.unpack_from(">H", data, at)
                at += 2
            if kind == 7:
                found[name] = data[at : at + size].decode()
            at += size
    except (IndexError, struct.error, UnicodeDecodeError):
        raise ValueError("the headers of a frame are invalid") from None
    return found


def _event(headers: dict[str, str], payload: bytes) -> Frame | None:
    """The event in a frame; an exception of the service is an event of the name ``error``, other frames hold none.

    Raises:
        ValueError: The payload is invalid.
    """
    match headers.get(":message-type"):
        case "event" if headers.get(":event-type") == "chunk":
            return "", base64.b64decode(as_text(_parse_payload(payload).get("bytes")), validate=True)
        case "exception":
            kind = headers.get(":exception-type", "")
            error = {"type": kind, "message": as_text(_parse_payload(payload).get("message"))}
            status = _STATUS_OF_EXCEPTION.get(kind)
            return "error", dumps({"error": error | ({} if status is None else {"status": str(status)})}).encode()
        case "error":
            error = {"type": headers.get(":error-code", ""), "message": headers.get(":error-message", "")}
            return "error", dumps({"error": error}).encode()
        case _:
            return None  # of a kind that does not exist yet


def _parse_payload(payload: bytes) -> dict[str, object]:
    try:
        return as_object(loads(payload))
    except ValueError:
        raise ValueError("the payload of a frame is not JSON") from None


class _CloudMessages(AnthropicMessages):
    """What both have in common."""

    _headers = MappingProxyType[str, str]({})
    _key_header, _key_scheme = "authorization", "Bearer "
    _version: str
    """The value of ``anthropic_version``."""

    @property
    def _is_official(self) -> bool:
        return False  # what Anthropic's own address has is not all there, and comes later

    @property
    def _quoted_model(self) -> str:
        """The model's name as one segment of a path; an ARN contains slashes."""
        return quote(self.model, safe=":@")

    def _encode(self, request: ModelRequest, *, stream: bool) -> dict[str, Any]:
        body = super()._encode(request, stream=stream)
        del body["model"]
        return {"anthropic_version": self._version} | body


class BedrockMessages(_CloudMessages):
    """A client of Anthropic's models in Amazon Bedrock (``bedrock:anthropic.claude-...``).

    Arguments and errors are those of ``HttpModel``. The key is in ``AWS_BEARER_TOKEN_BEDROCK``; without it, AWS
    credentials sign the calls (``AwsAccount``).
    """

    _default_provider = "bedrock-anthropic"
    _version = "bedrock-2023-05-31"
    _frame_parser = EventStreamParser

    def _path(self) -> str:
        return f"/model/{self._quoted_model}/invoke"

    def _stream_path(self) -> str:
        return f"/model/{self._quoted_model}/invoke-with-response-stream"

    def _encode(self, request: ModelRequest, *, stream: bool) -> dict[str, Any]:
        body = super()._encode(request, stream=False)  # the path says whether it streams
        features = self._http.options.header("anthropic-beta")  # Bedrock reads them in the body, as the SDK knows
        return {"anthropic_beta": features.split(",")} | body if features else body


class VertexMessages(_CloudMessages):
    """A client of Anthropic's models in Vertex AI (``vertex:claude-...``), with Google credentials (``GoogleAccount``).

    Arguments and errors are those of ``HttpModel``. A ``base_url`` ends with ``/publishers/anthropic/models``.
    """

    _default_provider = "vertex-anthropic"
    _version = "vertex-2023-10-16"

    def _path(self) -> str:
        return f"/{self._quoted_model}:rawPredict"

    def _stream_path(self) -> str:
        return f"/{self._quoted_model}:streamRawPredict"
