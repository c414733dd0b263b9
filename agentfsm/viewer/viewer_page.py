"""What a page of the viewer is, what its handlers answer with, and the document and the files that it consists of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, cast

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agentfsm.diagrams.svg import style_sheet
from agentfsm.models.wire_json import loads
from agentfsm.report.page import STYLE
from agentfsm.report.visible_text import escape, visible

MAX_BODY = 1_000_000
"""Bytes of what a page sends."""

RETRY_MS = 500
"""After so long a browser reconnects to the server-sent events of a page, as when the viewer was restarted."""


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
    """A request is refused, and the page says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class LiveEvent(NamedTuple):
    """What a page is told while it is open, as a server-sent event.

    Attributes:
        data: What it says, as JSON data.
        id: What the browser sends when it reconnects, to continue after this event.
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
    """The JSON object that a page sends."""
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
    """An answer that is streamed for as long as the page is open.

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


STYLE_SHEETS = ("report.css", "picture.css", "viewer.css")


def page_html(page: Page, pages: Sequence[Page], root: str) -> str:
    """The document of a page."""
    root, current = escape(root), " aria-current=page"
    styles = "".join(f'<link rel="stylesheet" href="{root}/static/{name}">' for name in STYLE_SHEETS)
    menu = "".join(
        f'<li><a href="{root}{escape(each.path)}"{current if each is page else ""}>{escape(each.title)}</a>'
        for each in pages
        if each.in_menu
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(page.title)} - agentfsm</title>"
        f'<link rel="icon" href="{root}/static/icon.svg">{styles}'
        f'<script type="module" src="{root}/static/{escape(page.script)}"></script></head>\n'
        '<body><a class="skip" href="#main">Skip to the content</a>'
        f'<header><nav aria-label="Pages"><ul>{menu}</ul></nav><p id="person" class="note"></p></header>\n'
        f'<main id="main" tabindex="-1"><h1>{escape(page.title)}</h1>'
        "<noscript><p>The viewer needs JavaScript. <code>agentfsm report</code> writes a run into a file that does "
        "not.</p></noscript></main>\n"
        '<div id="notices" role="status" aria-live="polite"></div></body></html>\n'
    )


def error_html(message: str, root: str) -> str:
    """The document that says why a page is not shown."""
    root = escape(root)
    styles = "".join(f'<link rel="stylesheet" href="{root}/static/{name}">' for name in STYLE_SHEETS)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><title>agentfsm</title>'
        f'<link rel="icon" href="{root}/static/icon.svg">{styles}</head>\n'
        f'<body><main><h1>This page is not shown</h1><p class="said">{escape(message)}</p></main></body></html>\n'
    )


_TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


class _Asset(NamedTuple):
    content: bytes
    media_type: str
    tag: str


@cache
def _assets() -> dict[str, _Asset]:
    """All files by name. No request names a path of the file system."""
    found = {each.name: each.read_bytes() for each in files("agentfsm.viewer").joinpath("static").iterdir()}
    found |= {"report.css": STYLE.encode(), "picture.css": style_sheet("auto").encode()}
    return {
        name: _Asset(content, _TYPES[name.rpartition(".")[2]], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
        for name, content in found.items()
        if name.rpartition(".")[2] in _TYPES
    }


async def serve_asset(request: Request) -> Response:
    """A file, or nothing if the browser has it already."""
    asset = _assets().get(request.path_params["name"])
    if asset is None:
        return Response("there is no such file", 404, media_type="text/plain")
    headers = {"etag": asset.tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == asset.tag:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)
