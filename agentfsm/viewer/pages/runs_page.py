"""The runs of the store: searched, filtered, a page at a time, and live."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentfsm.errors import ConfigurationError
from agentfsm.journal.run_info import RunQuery
from agentfsm.viewer.viewer_context import ViewerContext, context_of, run_json, ticks
from agentfsm.viewer.viewer_page import LiveEvent, Page, PageError, event_response, json_response

MAX_LIMIT = 200
_TEXTS = ("status", "ending", "actor", "session_id", "tag", "model", "text", "waiting_role", "run_id")


def query_of(request: Request) -> RunQuery:
    """What the address of a request asks for."""
    given = request.query_params
    texts: dict[str, Any] = {name: given[name] for name in _TEXTS if given.get(name)}
    name, equals, value = given.get("metadata", "").partition("=")
    if name and not equals:
        raise PageError(400, f"{name!r} is not an entry of metadata: write NAME=VALUE, as in order=7")
    entries = {name: value} if equals else None
    try:
        times: dict[str, Any] = {name: float(given[name]) for name in ("since", "until") if given.get(name)}
        limit = min(int(given.get("limit") or 50), MAX_LIMIT)
        query = RunQuery(metadata=entries, limit=limit, after=given.get("after", ""), **texts, **times)
    except (ValueError, ConfigurationError) as error:
        raise PageError(400, str(error)) from error
    return query if query.run_id else replace(query, parent=given.get("parent", ""))


async def _page_json(context: ViewerContext, query: RunQuery) -> dict[str, Any]:
    page = await context.runs.list(query)
    aside = await context.set_aside.find(page.runs)
    return {"runs": [run_json(info, aside.get(info.run_id)) for info in page.runs], "next": page.next}


async def list_runs(request: Request) -> Response:
    """A page of the runs that a query finds."""
    return json_response(await _page_json(context_of(request), query_of(request)))


async def count_runs(request: Request) -> Response:
    """How many runs a query finds."""
    return json_response({"count": await context_of(request).runs.count(query_of(request))})


async def follow_runs(request: Request) -> Response:
    """The first page of a query, whenever it changes: its runs in order, and those of them that are new or changed."""
    context, query = context_of(request), query_of(request)

    async def events() -> AsyncIterator[LiveEvent | None]:
        known: dict[str, str] = {}
        async for silent in ticks(context):
            page = await _page_json(context, query)
            texts = {run["id"]: json.dumps(run) for run in page["runs"]}
            if texts != known:
                changed = [run for run in page["runs"] if known.get(run["id"]) != texts[run["id"]]]
                known = texts
                yield LiveEvent({"order": list(texts), "changed": changed, "next": page["next"]})
            elif silent:
                yield None

    return event_response(events())


PAGE = Page(
    "/",
    "Runs",
    "runs.js",
    (Route("/runs", list_runs), Route("/runs/count", count_runs), Route("/runs/events", follow_runs)),
)
