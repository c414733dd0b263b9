"""What a page of the viewer is, and what its handlers answer with."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agentfsm.models.wire_json import loads
from agentfsm.report.visible_text import visible

__all__ = ["LiveEvent", "Page", "PageError", "event_response", "json_response", "markup_response", "read_body", "shown"]

MAX_BODY = 1_000_000
"""Bytes of what a page sends."""

RETRY_MS = 500
"""After so long a browser connects anew to the server-sent events of a page, as when the viewer was restarted."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its address, its ES module, and what that module asks the server for.

    Attributes:
        path: Its address below the viewer's, such as ``/run``.
        title: Its heading, and its name in the menu.
        script: The file of its ES module in ``static``.
        routes: What the module asks for, below ``/api``. Only what uses POST may change anything.
        in_menu: Whether the menu has it.
        shared: Whether somebody who has a link for one run may see it. Its handlers must then look at the run that
            ``Visitor.only_run`` names, and at no other.
    """

    path: str
    title: str
    script: str
    routes: Sequence[Route]
    in_menu: bool = True
    shared: bool = False


class PageError(Exception):
    """A request is refused, and the page says why.

    Args:
        status: The status of the answer.
        message: What is wrong, and what to do.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class LiveEvent(NamedTuple):
    """What a page is told while it is open, as a server-sent event.

    Attributes:
        data: What it says, as JSON data.
        id: What the browser sends when it connects anew, to go on after this event.
    """

    data: Any
    id: str = ""


def shown(value: Any) -> Any:
    """A JSON value in which every text shows its hidden characters by their codes, as ``visible`` does."""
    match value:
        case str():
            return visible(value)
        case Mapping():
            return {visible(str(name)): shown(item) for name, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case list() | tuple():
            return [shown(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value


def json_response(data: Any, status: int = 200) -> Response:
    """An answer in JSON; lone surrogates are escaped, as everything that is not ASCII is."""
    return Response(json.dumps(data, default=str), status, media_type="application/json")


async def read_body(request: Request) -> dict[str, Any]:
    """The JSON object that a page sends.

    Raises:
        PageError: It is none, or too long.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise PageError(413, "the answer is too long")
    try:
        data = loads(body)
    except ValueError as error:
        raise PageError(422, f"the page sent no JSON: {error}") from error
    if not isinstance(data, dict):
        raise PageError(422, "the page sent no JSON object")
    return cast("dict[str, Any]", data)


def markup_response(markup: str, media_type: str = "text/html") -> Response:
    """An answer that is a fragment of HTML, or a picture, in which everything is escaped already."""
    return Response(markup.encode("utf-8", "replace"), media_type=media_type)


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
