"""A loopback server in place of Amazon Bedrock and Vertex AI, which checks who calls, and asks for one tool call."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from agentfsm import Message, tool
from agentfsm.loop.model import ModelRequest
from tests.helpers.event_frames import event_frame
from tests.helpers.fake_model_server import (
    ModelOutput,
    encode_events,
    stream_events,
    stream_type,
    whole_body,
    wire_of_path,
)
from tests.helpers.recording_server import Call, RecordingServer, Response, running

__all__ = ["ANSWER", "REQUEST", "Call", "CloudServer", "ask", "cloud_server", "signature_problem", "weather"]

CALL = ("toolu_1", "weather", {"city": "Paris"})
ANSWER = "It is sunny in Paris."
REQUEST = ModelRequest((Message.system("Be brief."), Message.user("Hello.")))


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: sunny"


class CloudServer(RecordingServer):
    """The server.

    Attributes:
        tokens: How many access tokens it has given out.
        exception: The kind of exception that its streams end with, or an empty string.
    """

    refused_with = 403

    def __init__(self) -> None:
        super().__init__(self._next_turn)
        self.tokens = 0
        self.exception = ""

    def respond(self, call: Call) -> Response:
        """The response to a call; calls of the token server are not remembered."""
        if call.path != "/token":
            return super().respond(call)
        self.tokens += 1
        token = {"access_token": f"token-{self.tokens:010}", "expires_in": 3600, "token_type": "Bearer"}
        return Response(json.dumps(token).encode())

    def _next_turn(self, call: Call) -> Response:
        """A call of the tool, or the last words where it has its result."""
        has_result = b"tool_result" in call.body or b'"role":"tool"' in call.body.replace(b" ", b"")
        said = ModelOutput(ANSWER) if has_result else ModelOutput(calls=(CALL,))
        wire, streamed = wire_of_path(call.path, call.data)
        if not streamed:
            return Response(json.dumps(whole_body(wire, said)).encode())
        stream = encode_events(wire, stream_events(wire, said))
        if self.exception and wire == "bedrock":
            payload = json.dumps({"message": "not now"}).encode()
            first = stream[: int.from_bytes(stream[:4], "big")]
            stream = first + event_frame(payload, exception_type=self.exception, message_type="exception")
        return Response(stream, stream_type(wire))


def signature_problem(call: Call, secrets: Mapping[str, str], region: str, service: str = "bedrock") -> str:
    """What is wrong with the signature of a call, by the steps of AWS's documentation; empty if it is valid.

    (https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html)
    """
    algorithm, _, rest = call.headers.get("authorization", "").partition(" ")
    if algorithm != "AWS4-HMAC-SHA256":
        return "not signed"
    parts = dict(part.strip().split("=", 1) for part in rest.split(","))
    key_id, date, *scope = parts["Credential"].split("/")
    if scope != [region, service, "aws4_request"]:
        return f"signed for {scope}"
    names = parts["SignedHeaders"].split(";")
    url = urlsplit(call.path)
    query = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in parse_qsl(url.query))
    canonical = "\n".join(
        [
            "POST",
            quote(url.path, safe="/-_.~"),
            "&".join(f"{k}={v}" for k, v in query),
            *(f"{name}:{' '.join(call.headers[name].split())}" for name in names),
            "",
            ";".join(names),
            hashlib.sha256(call.body).hexdigest(),
        ]
    )
    text = "\n".join(
        [
            algorithm,
            call.headers["x-amz-date"],
            "/".join([date, *scope]),
            hashlib.sha256(canonical.encode()).hexdigest(),
        ]
    )
    key = f"AWS4{secrets.get(key_id, '')}".encode()
    for step in (date, *scope):
        key = hmac.digest(key, step.encode(), "sha256")
    good = hmac.compare_digest(hmac.digest(key, text.encode(), "sha256").hex(), parts["Signature"])
    if {"host", "x-amz-date"} - set(names) or ("x-amz-security-token" in call.headers) > (
        "x-amz-security-token" in names
    ):
        return "a header is not signed"
    return "" if good else "the signature does not match"


@contextmanager
def cloud_server() -> Generator[CloudServer]:
    """The server, while the block runs."""
    with running(CloudServer()) as server:
        yield server


def ask(model: Any, *, stream: bool = False) -> None:
    """Make one call of a model."""

    async def call() -> None:
        if not stream:
            await model.reply(REQUEST)
            return
        async for _ in model.stream(REQUEST):
            pass

    asyncio.run(call())
