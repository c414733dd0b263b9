"""A loopback server in place of Amazon Bedrock and Vertex AI, which checks who calls, and asks for one tool call."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import struct
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit
from zlib import crc32

__all__ = ["Call", "CloudServer", "cloud_server", "event_frame", "signature_problem"]

CALL = {"id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}
ANSWER = "It is sunny in Paris."


@dataclass(frozen=True)
class Call:
    """A request that the server got.

    Attributes:
        path: Its path, with its query.
        headers: Its headers, by their names in small letters.
        body: Its body.
    """

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def data(self) -> dict[str, Any]:
        """Its body, parsed."""
        return dict(json.loads(self.body))


@dataclass
class CloudServer:
    """The server.

    Attributes:
        url: Its address.
        calls: What it got.
        refuse: The reason to reject a call, or an empty string.
        refused_with: The status of a rejected call.
        tokens: How many access tokens it has given out.
        exception: The kind of exception that its streams end with, or an empty string.
    """

    url: str
    calls: list[Call] = field(default_factory=list[Call])
    refuse: Callable[[Call], str] = lambda call: ""
    refused_with: int = 403
    tokens: int = 0
    exception: str = ""


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


def chunk_frame(event: Mapping[str, Any]) -> bytes:
    """The frame of one event of a model in Bedrock."""
    data = base64.b64encode(json.dumps(event).encode()).decode()
    return event_frame(json.dumps({"bytes": data}).encode(), event_type="chunk", message_type="event")


def _answer(call: Call) -> tuple[str, bytes]:
    """The type and the body of the answer: a call of the tool, or the last words where it has its result."""
    asked = b"tool_result" in call.body or b'"role":"tool"' in call.body.replace(b" ", b"")
    if "/openapi/" in call.path or "/openai/" in call.path:
        return _chat(asked, streamed=call.data.get("stream") is True)
    block: dict[str, Any] = {"type": "text", "text": ANSWER} if asked else {"type": "tool_use", **CALL}
    usage = {"input_tokens": 20, "output_tokens": 6}
    message = {"id": "m", "type": "message", "role": "assistant", "model": "claude", "usage": usage}
    reason = "end_turn" if asked else "tool_use"
    if "stream" not in call.path.rpartition("/")[2]:
        return "application/json", json.dumps(message | {"content": [block], "stop_reason": reason}).encode()
    start: dict[str, Any] = block | (dict[str, Any](text="") if asked else dict[str, Any](input={}))
    text = ANSWER if asked else json.dumps(CALL["input"])
    kind, name = ("text_delta", "text") if asked else ("input_json_delta", "partial_json")
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": message | {"content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": start},
        {"type": "content_block_delta", "index": 0, "delta": {"type": kind, name: text}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 6}},
        {"type": "message_stop"},
    ]
    if "/model/" in call.path:
        return "application/vnd.amazon.eventstream", b"".join(map(chunk_frame, events))
    return "text/event-stream", "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events).encode()


def _chat(asked: bool, *, streamed: bool) -> tuple[str, bytes]:
    function = {"name": CALL["name"], "arguments": json.dumps(CALL["input"])}
    calls = [{"index": 0, "id": CALL["id"], "type": "function", "function": function}]
    said: dict[str, Any] = {"content": ANSWER} if asked else {"tool_calls": calls}
    message = {"role": "assistant", **said}
    reason = "stop" if asked else "tool_calls"
    if not streamed:
        return "application/json", json.dumps({"choices": [{"message": message, "finish_reason": reason}]}).encode()
    chunks: list[dict[str, Any]] = [{"delta": message, "finish_reason": None}, {"delta": {}, "finish_reason": reason}]
    lines = "".join(f"data: {json.dumps({'choices': [chunk]})}\n\n" for chunk in chunks)
    return "text/event-stream", f"{lines}data: [DONE]\n\n".encode()


@contextmanager
def cloud_server() -> Generator[CloudServer]:
    """The server, while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            call = Call(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            if self.path == "/token":
                server.tokens += 1
                token = {"access_token": f"token-{server.tokens:010}", "expires_in": 3600, "token_type": "Bearer"}
                self._send(200, "application/json", json.dumps(token).encode())
                return
            server.calls.append(call)
            reason = server.refuse(call)
            kind, answer = ("application/json", json.dumps({"message": reason}).encode()) if reason else _answer(call)
            if server.exception and "eventstream" in kind:
                payload = json.dumps({"message": "not now"}).encode()
                first = answer[: int.from_bytes(answer[:4], "big")]
                answer = first + event_frame(payload, exception_type=server.exception, message_type="exception")
            self._send(server.refused_with if reason else 200, kind, answer)

        def _send(self, status: int, kind: str, answer: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name in the base class
            """Log nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server = CloudServer(f"http://127.0.0.1:{http.server_address[1]}")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
