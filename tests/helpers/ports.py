"""Ports of the loopback interface for servers in other processes."""

from __future__ import annotations

import socket

__all__ = ["own_port"]


def own_port() -> int:
    """A port that nobody else is given as long as this process runs; servers of the test can come and go on it.

    A socket that only holds the port refuses connections, and lets others listen that reuse the address, as servers do.
    """
    holding = socket.socket()
    holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holding.bind(("127.0.0.1", 0))
    port = int(holding.getsockname()[1])
    holding.detach()  # it is closed with the process
    return port
