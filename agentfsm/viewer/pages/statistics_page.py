"""Statistics: runs, failures and costs day by day, how often each row is taken, the slowest and dearest runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentfsm.diagrams import HeatMap, LayoutName, diagram
from agentfsm.diagrams.svg import style_sheet
from agentfsm.errors import AgentfsmError, UnknownRunError
from agentfsm.journal.run_info import RunInfo
from agentfsm.report.reported_run import graph_of_run
from agentfsm.viewer.pages.runs_page import query_of
from agentfsm.viewer.run_figures import Figures, Listed, figures_of, totals_by_day, totals_by_graph
from agentfsm.viewer.viewer_context import ViewerContext, context_of, run_json
from agentfsm.viewer.viewer_page import Page, PageError, json_response, markup_response, shown

MAX_RUNS = 2_000
"""So many of the newest runs are read at most."""

SHOWN_EXTREMES = 10
"""How many of the slowest and the most expensive runs are shown."""

PAGE_SIZE = 100


async def _listed(request: Request) -> list[Listed]:
    """The newest runs that a request asks for, with their figures."""
    context, query = context_of(request), query_of(request)
    try:
        most = min(max(1, int(request.query_params.get("most", 200))), MAX_RUNS)
    except ValueError:
        raise PageError(400, "most must be a number of runs") from None
    found: list[Listed] = []
    query = replace(query, after="")
    while len(found) < most:
        page = await context.runs.list(replace(query, limit=min(PAGE_SIZE, most - len(found))))
        for info in page.runs:
            figures = await _figures(context, info)
            if figures is not None:
                found.append(Listed(info, figures))
        if not page.next:
            break
        query = replace(query, after=page.next)
    return found


async def _figures(context: ViewerContext, info: RunInfo) -> Figures | None:
    known = context.figures.get(info)
    if known is None:
        try:
            records = await context.store.records(info.run_id)
        except UnknownRunError:  # it was purged in the meantime
            return None
        known = await asyncio.to_thread(figures_of, info.run_id, records)
        context.figures.put(info, known)
    return known


async def show_statistics(request: Request) -> Response:
    """The totals of the newest runs that a query finds."""
    runs = await _listed(request)
    all_of_them = replace(query_of(request), after="", limit=1)
    took = [(info, max(0.0, (info.updated or 0) - info.started)) for info, _ in runs if info.started is not None]
    slowest = sorted(took, key=lambda each: -each[1])[:SHOWN_EXTREMES]
    priced = [info for info, _ in runs if info.cost_usd]
    dearest = sorted(priced, key=lambda info: -(info.cost_usd or 0.0))[:SHOWN_EXTREMES]
    return json_response(
        {
            "read": len(runs),
            "count": await context_of(request).runs.count(all_of_them),
            "days": shown(totals_by_day(runs)),
            "graphs": shown(totals_by_graph(runs)),
            "slowest": [{**run_json(info), "took": seconds} for info, seconds in slowest],
            "dearest": [run_json(info) for info in dearest],
        }
    )


async def show_heat_map(request: Request) -> Response:
    """A graph with how often each of its rows was taken by the same runs."""
    wanted = request.query_params.get("fingerprint", "")
    runs = [each.figures for each in await _listed(request) if each.figures.fingerprint == wanted]
    if not runs:
        raise PageError(404, "none of these runs has this graph")
    layout: LayoutName = "vertical" if request.query_params.get("layout") == "vertical" else "wide"
    try:
        return markup_response(await asyncio.to_thread(_draw, runs, layout), "image/svg+xml")
    except (AgentfsmError, LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise PageError(422, "the graph cannot be drawn: no journal pins one that can be read") from error


def _draw(runs: list[Figures], layout: LayoutName) -> str:
    graph = graph_of_run(runs[0].pins)
    ids = {row.id for row in graph}
    counts: dict[str, Any] = {}
    for figures in runs:
        for row, number in figures.moves.items():
            if row in ids:
                counts[row] = counts.get(row, 0) + number
    drawn = diagram(graph, layout=layout, overlay=HeatMap(counts, len(runs)))
    return drawn.replace(f"<style>{style_sheet('auto')}</style>\n", "")


PAGE = Page(
    "/statistics",
    "Statistics",
    "statistics.js",
    (Route("/statistics", show_statistics), Route("/statistics/picture", show_heat_map)),
)
