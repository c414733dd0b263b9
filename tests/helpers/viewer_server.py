"""A viewer behind a real server, in a thread of the test's process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

__all__ = ["served"]


@contextmanager
def served(app: Starlette, port: int = 0) -> Generator[str]:
    """The address of a server of a viewer, which is stopped at the end of the block.

    Args:
        app: The viewer.
        port: Its port; 0 for one that is free.
    """
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen()  # so that a browser that is quicker than the server waits for it
    config = uvicorn.Config(app, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        app.state.viewer.stopping.set()
        server.should_exit = True
        thread.join(3)
        for connection in list(server.server_state.connections):  # of a browser that connected while the server stopped
            connection.loop.call_soon_threadsafe(connection.transport.abort)
        thread.join(20)
        listening.close()
        assert not thread.is_alive(), "the server did not stop"
