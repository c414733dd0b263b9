"""A loopback server of one wire that answers every call, or rejects its API key."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.helpers.model_clients import GOOD_BODIES


@dataclass
class Server:
    """A loopback server that answers every call, and remembers paths and headers.

    Attributes:
        url: Its address.
        calls: The path and the headers of each call.
        bodies: Their bodies.
        accepts: Whether a call with these headers is answered, or rejected with 401.
    """

    url: str
    calls: list[tuple[str, dict[str, str]]] = field(default_factory=list[tuple[str, dict[str, str]]])
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    accepts: Callable[[dict[str, str]], bool] = lambda headers: True


@contextmanager
def serve(wire: str, context: ssl.SSLContext | None = None) -> Generator[Server]:
    """A server of one wire, over TLS if a context is given."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            headers = {name.lower(): value for name, value in self.headers.items()}
            server.calls.append((self.path, headers))
            good = server.accepts(headers)
            body = json.dumps(GOOD_BODIES[wire] if good else {"error": {"message": "expired"}}).encode()
            self.send_response(200 if good else 401)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name in the base class
            """Log nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    scheme = "http"
    if context is not None:
        http.socket = context.wrap_socket(http.socket, server_side=True)
        scheme = "https"
    server = Server(f"{scheme}://127.0.0.1:{http.server_address[1]}/v1")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
