"""A loopback server that answers every call or rejects it, and remembers who called with what."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

from tests.helpers.model_clients import GOOD_BODIES

__all__ = ["Call", "RecordingServer", "Response", "good_server", "running"]


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

    @property
    def key(self) -> str:
        """The API key or token that it carries; empty without one."""
        return (self.headers.get("authorization") or self.headers.get("x-api-key") or "").removeprefix("Bearer ")


@dataclass(frozen=True)
class Response:
    """A complete response."""

    content: bytes
    kind: str = "application/json"
    status: int = 200


class RecordingServer:
    """The server.

    Args:
        answer: Makes the answer to a call.

    Attributes:
        url: Its address.
        calls: What it got.
        refuse: The reason to reject a call, or an empty string.
        refused_with: The status of a rejected call.
    """

    refused_with = 401

    def __init__(self, answer: Callable[[Call], Response]) -> None:
        self._answer = answer
        self.url = ""
        self.calls: list[Call] = []
        self.refuse: Callable[[Call], str] = lambda call: ""

    def respond(self, call: Call) -> Response:
        """The response to a call."""
        self.calls.append(call)
        if reason := self.refuse(call):
            return Response(json.dumps({"message": reason}).encode(), status=self.refused_with)
        return self._answer(call)


Server = TypeVar("Server", bound=RecordingServer)


@contextmanager
def running(server: Server, context: ssl.SSLContext | None = None) -> Generator[Server]:
    """Run a server while the block runs, over TLS if a context is given."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            response = server.respond(Call(self.path, {name.lower(): v for name, v in self.headers.items()}, body))
            self.send_response(response.status)
            self.send_header("content-type", response.kind)
            self.send_header("content-length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name in the base class
            """Log nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    if context is not None:
        http.socket = context.wrap_socket(http.socket, server_side=True)
    server.url = f"{'http' if context is None else 'https'}://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


@contextmanager
def good_server(wire: str, context: ssl.SSLContext | None = None) -> Generator[RecordingServer]:
    """A server of one wire whose answer is ``hello``, over TLS if a context is given."""
    answer = Response(json.dumps(GOOD_BODIES[wire]).encode())
    with running(RecordingServer(lambda call: answer), context) as server:
        yield server
