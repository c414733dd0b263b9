"""A little model server on loopback, for runs of the command line and of examples that need some model behind HTTP.

It speaks every wire that ``tests.models.wires`` has written down, whole or as a stream, as it is asked.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.models.wires import Said, as_bytes, stream_events, whole_body

Body = dict[str, Any]
Answer = Said | int | Callable[[Body], Said]
"""An answer, the status of an error, or a function of the request's body that gives an answer."""

WIRES = {"/chat/completions": "openai", "/responses": "responses", "/messages": "anthropic", "/api/chat": "ollama"}


def text(words: str) -> Said:
    """An answer in words."""
    return Said(words, prompt_tokens=10, reply_tokens=5)


def calls(*wanted: tuple[str, Body]) -> Said:
    """An answer that calls tools: pairs of name and arguments."""
    numbered = tuple((f"c{i}", name, arguments) for i, (name, arguments) in enumerate(wanted))
    return Said(calls=numbered, prompt_tokens=10, reply_tokens=5)


class Little:
    """The running server.

    Attributes:
        host: Its address without a path.
        url: What ``--base-url`` takes for chat completions.
        requests: The bodies of all requests so far.
        asked: Set as soon as there is one.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.url = f"{host}/v1"
        self.requests: list[Body] = []
        self.asked = threading.Event()


@contextmanager
def little(*script: Answer, hang: bool = False) -> Iterator[Little]:
    """A server that gives the answers of a script, one a request; the last one again and again.

    Args:
        script: What it answers.
        hang: Whether to give no answer at all.
    """
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            served.requests.append(body)
            served.asked.set()
            if hang:
                over.wait()
                return
            entry = script[min(len(served.requests), len(script)) - 1]
            if isinstance(entry, int):
                self._send(entry, "application/json", json.dumps({"error": {"message": "not now"}}).encode())
                return
            said = entry if isinstance(entry, Said) else entry(body)
            wire = next(wire for path, wire in WIRES.items() if self.path.endswith(path))
            if body.get("stream", False):
                self._send(200, "text/event-stream", as_bytes(wire, stream_events(wire, said)))
            else:
                self._send(200, "application/json", json.dumps(whole_body(wire, said)).encode())

        def _send(self, status: int, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Nothing: the tests look at what the command line says."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    http.block_on_close = False
    served = Little(f"http://127.0.0.1:{http.server_address[1]}")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        over.set()
        http.shutdown()
        http.server_close()
        thread.join()
