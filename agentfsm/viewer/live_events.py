"""Server-sent events: what a page is told while it is open."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from starlette.responses import StreamingResponse

__all__ = ["LiveEvent", "event_response"]

RETRY_MS = 500
"""After so long a browser connects anew, as when the viewer was restarted."""


class LiveEvent(NamedTuple):
    """An event.

    Attributes:
        data: What it says, as JSON data.
        id: What the browser sends when it connects anew, to go on after this event.
    """

    data: Any
    id: str = ""


def event_response(events: AsyncIterator[LiveEvent | None]) -> StreamingResponse:
    """An answer that goes on for as long as the page is open.

    Args:
        events: The events; None for nothing new, which is sent as a comment so that a broken connection is noticed.
    """

    async def lines() -> AsyncIterator[str]:
        yield f"retry: {RETRY_MS}\n\n"
        async for event in events:
            if event is None:
                yield ":\n\n"
                continue
            text = json.dumps(event.data, default=str)  # has no line breaks
            yield f"id: {event.id}\ndata: {text}\n\n" if event.id else f"data: {text}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})
