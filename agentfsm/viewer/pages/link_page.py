"""The page that a one-time link leads to: a click makes it a session, and nothing before that uses it up."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentfsm.viewer.access import address_of, mount_path_of
from agentfsm.viewer.passes import Pass, open_pass, seal_pass
from agentfsm.viewer.viewer_context import context_of
from agentfsm.viewer.viewer_page import Page, PageError, json_response, read_body

SESSION_S = 8 * 3600
"""How long a session lasts that a link opens."""


async def open_link(request: Request) -> Response:
    """Make a link a session, once."""
    context = context_of(request)
    access, token = context.access, (await read_body(request)).get("token")
    address, now = address_of(request), access.clock()
    granted = open_pass("link", token, access.keyring, now, address) if isinstance(token, str) else None
    if granted is None:
        raise PageError(403, "this link is not valid, or has expired: ask for a new one")
    guard = context.replay_guard
    if guard is None:
        raise PageError(503, "links cannot be opened here: app(store, replay_guard=...) remembers which were used")
    if not await asyncio.to_thread(guard.claim, granted.id):
        raise PageError(403, "this link was opened already, and works once: ask for a new one")
    session = Pass(granted.actor, granted.run_id, now + SESSION_S, granted.id, granted.viewer)
    answer = json_response({"next": "inbox" if granted.run_id else ""})
    answer.set_cookie(
        access.cookie_name,
        seal_pass("session", session, access.keyring),
        max_age=SESSION_S,
        path=mount_path_of(request) or "/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return answer


PAGE = Page(
    "/link", "Open your link", "link.js", (Route("/link", open_link, methods=["POST"]),), in_menu=False, shared=True
)
