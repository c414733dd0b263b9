"""Health and readiness of a worker over HTTP, for whatever watches its process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from http import HTTPStatus

from agentfsm.workers.worker import Worker

REQUEST_LIMIT_S = 5.0
"""Seconds for a client to send its request."""

MAX_LINE = 16_384
"""The longest line of a request, in bytes."""


@contextlib.asynccontextmanager
async def serve_health(worker: Worker, host: str, port: int) -> AsyncGenerator[int]:
    """Answer ``GET /health`` and ``GET /ready`` while the block runs.

    ``/health`` says 200 while the event loop answers, and 503 once the store could not be searched for a while.
    ``/ready`` says 200 while the worker accepts runs. Both say what the worker is doing, as JSON.

    Args:
        worker: The worker.
        host: The address to listen at.
        port: The port; 0 for any that is free.

    Returns:
        The port.

    Raises:
        OSError: The port cannot be listened at.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError):  # a client that goes away, or sends no request
            async with asyncio.timeout(REQUEST_LIMIT_S):
                words = (await reader.readline()).decode("latin-1").split()
                while (await reader.readline()).strip():  # the headers: what is not read resets the connection
                    pass
                writer.write(_response(worker, words))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, host, port, limit=MAX_LINE)
    async with server:
        yield server.sockets[0].getsockname()[1]


def _response(worker: Worker, words: list[str]) -> bytes:
    if len(words) < 2 or words[0] not in ("GET", "HEAD"):
        status = HTTPStatus.METHOD_NOT_ALLOWED
    else:
        path = words[1].partition("?")[0]
        good = {"/health": worker.healthy, "/ready": worker.ready}.get(path)
        status = HTTPStatus.NOT_FOUND if good is None else HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
    counts = worker.counts
    body = json.dumps(
        {
            "ready": worker.ready,
            "active": counts.active,
            "cut_off": counts.cut_off,
            "handled": counts.handled,
            "queues": worker.queues,
        }
    ).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if words[:1] == ["HEAD"] else body)
