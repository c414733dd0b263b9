"""The files that the pages load: the modules and styles of ``static``, and the styles of reports and pictures."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from agentfsm.diagrams.svg import style_sheet
from agentfsm.report.stylesheet import STYLE

__all__ = ["serve_asset"]

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
