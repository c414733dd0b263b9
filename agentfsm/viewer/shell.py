"""The HTML document of a page, and the files that it loads: the modules and styles of ``static``, and of reports."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from agentfsm.diagrams.svg import style_sheet
from agentfsm.report.page import STYLE
from agentfsm.report.visible_text import escape
from agentfsm.viewer.viewer_page import Page

__all__ = ["error_html", "page_html", "serve_asset"]

STYLE_SHEETS = ("report.css", "picture.css", "viewer.css")


def page_html(page: Page, pages: Sequence[Page], root: str) -> str:
    """The document of a page.

    Args:
        page: The page.
        pages: All pages, for the menu.
        root: The path of the viewer in its app; empty if it is the whole app.
    """
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
    """The document that says why a page is not shown.

    Args:
        message: Why.
        root: The path of the viewer in its app.
    """
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
