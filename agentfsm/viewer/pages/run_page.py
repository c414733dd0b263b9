"""One run: the picture with its path, the ledger of moves, and everything about each step, followed live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentfsm.diagrams import LayoutName
from agentfsm.errors import AgentfsmError
from agentfsm.journal.run_info import RunInfo, RunQuery
from agentfsm.report import fragments
from agentfsm.report.ledger import RunLedger
from agentfsm.viewer.access import visitor_of
from agentfsm.viewer.followed_run import FollowedRun
from agentfsm.viewer.step_reader import move_json, prompt_json
from agentfsm.viewer.viewer_context import ViewerContext, context_of, run_json, ticks
from agentfsm.viewer.viewer_page import (
    LiveEvent,
    Page,
    PageError,
    event_response,
    json_response,
    markup_response,
    shown,
)

MAX_MOVES = 500
"""Moves of the ledger in one answer."""

FOLLOW_S = 0.05
"""How often the head of a run that is open is looked at, in seconds: one row of the store by its key."""

MAX_MESSAGES = 100
MAX_CHILDREN = 200
MAX_DEPTH = 4
"""How deep sub-agents of sub-agents are shown; each of them has a page of its own."""

PARTS: dict[str, Callable[[RunLedger], str]] = {
    "answer": lambda ledger: fragments.text_html(ledger.answer),
    "decisions": lambda ledger: fragments.decisions_html(ledger.decisions),
    "transcript": lambda ledger: fragments.transcript_html(ledger.transcript),
    "failures": lambda ledger: fragments.failures_html(ledger.failures),
    "costs": lambda ledger: fragments.costs_html(ledger.costs),
    "graph": fragments.graph_html,
    "redactions": lambda ledger: fragments.list_html(ledger.redactions, "Nothing was redacted."),
}
"""The parts of a report that the page of a run has, too."""


async def followed_run(request: Request) -> FollowedRun:
    """The run that a request names, up to date.

    Raises:
        PageError: Whoever asks may not see it.
        agentfsm.errors.UnknownRunError: There is no such run.
    """
    run_id = request.query_params.get("run", "")
    visitor_of(request).check_sees(run_id)
    return await context_of(request).followed.get(run_id)


async def _info(context: ViewerContext, run_id: str) -> RunInfo | None:
    page = await context.runs.list(RunQuery(exact_id=run_id))
    return next(iter(page.runs), None)


async def _info_json(context: ViewerContext, info: RunInfo | None) -> dict[str, Any] | None:
    """What the page says of a run besides its path."""
    return None if info is None else run_json(info, (await context.set_aside.find([info])).get(info.run_id))


async def show_run(request: Request) -> Response:
    """What is known of a run without reading its texts, and its path."""
    run = await followed_run(request)
    context = context_of(request)
    about = await _info_json(context, await _info(context, run.run_id))
    run.read_ahead()
    pins = run.path.pins
    graph: dict[str, Any] = pins[-1].data.get("graph", {}) if pins else {}
    first: dict[str, Any] = pins[0].data if pins else {}
    parent = first.get("parent", {})
    return json_response(
        {
            "run": about,
            "graph": {"name": shown(graph.get("name", "")), "fingerprint": shown(graph.get("fingerprint", ""))},
            "parent": {"run": shown(parent["run"]), "seq": parent.get("seq")} if "run" in parent else None,
            **_path_json(run, 0, 0),
        }
    )


def _path_json(run: FollowedRun, moves: int, kinds: int) -> dict[str, Any]:
    """The path of a run from some move and some kind of move on, both counted from 0."""
    path, head = run.path, run.head
    return {
        "status": None if head is None else head.status,
        "interrupted": head is not None and head.status == "running" and head.owner is None,
        "seq": 0 if head is None else head.seq,
        "hash": "" if head is None else head.hash,
        "state": shown(path.state),
        "from": moves,
        "moves": path.moves[moves:],
        "kinds_from": kinds,
        "kinds": [shown(kind._asdict()) for kind in path.kinds[kinds:]],
    }


async def follow_run(request: Request) -> Response:
    """The new moves of a run, and its status, whenever something is written."""
    run = await followed_run(request)
    given = request.headers.get("last-event-id") or request.query_params.get("from", "0-0-0")
    try:
        seq, moves, kinds = (int(each) for each in given.split("-"))
    except ValueError:
        raise PageError(400, f"{given!r} is not where the events of a run can go on") from None
    context = context_of(request)

    async def events() -> AsyncIterator[LiveEvent | None]:
        known_seq, known_moves, known_kinds, status = seq, moves, kinds, None
        info: RunInfo | None = None
        about: dict[str, Any] | None = None
        async for silent in ticks(context, FOLLOW_S):
            head = await run.refresh()
            if head.seq != known_seq or (head.status, head.owner) != status:
                known = _path_json(run, known_moves, known_kinds)
                known_seq, status = head.seq, (head.status, head.owner)
                known_moves, known_kinds = len(run.path.moves), len(run.path.kinds)
                yield LiveEvent(known, f"{known_seq}-{known_moves}-{known_kinds}")
                info = await _info(context, run.run_id)
                about = await _info_json(context, info)
                yield LiveEvent({"run": about})
            elif (now := await _info_json(context, info)) != about:  # workers have set it aside, or it was put back
                about = now
                yield LiveEvent({"run": about})
            elif silent:
                yield None

    return event_response(events())


def _number(request: Request, name: str, default: int) -> int:
    try:
        return max(0, int(request.query_params.get(name, default)))
    except ValueError:
        raise PageError(400, f"{name} must be a number") from None


async def list_moves(request: Request) -> Response:
    """Some moves of the ledger, counted from 0."""
    run = await followed_run(request)
    start = _number(request, "start", 0)
    stop = min(_number(request, "stop", start + 100), start + MAX_MOVES)
    return json_response({"start": start, "moves": [move_json(row) for row in await run.moves(start, stop)]})


async def show_step(request: Request) -> Response:
    """Everything about a move, counted from 1."""
    run = await followed_run(request)
    found = await run.step(_number(request, "number", 0))
    if found is None:
        raise PageError(404, f"run {run.run_id} has no such move")
    return json_response(found)


async def show_prompt(request: Request) -> Response:
    """Some messages of what the model was sent in a move."""
    run = await followed_run(request)
    prompt = await run.prompt(_number(request, "number", 0))
    if prompt is None:
        raise PageError(404, "no model was called in this move, or a value before it was redacted")
    start = _number(request, "start", 0)
    return json_response(prompt_json(prompt, start, min(_number(request, "stop", start + 50), start + MAX_MESSAGES)))


async def show_picture(request: Request) -> Response:
    """The graph of a run with its path."""
    run = await followed_run(request)
    layout: LayoutName = "vertical" if request.query_params.get("layout") == "vertical" else "wide"
    try:
        return markup_response(await run.picture(layout), "image/svg+xml")
    except (AgentfsmError, LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise PageError(422, "the graph cannot be drawn: the journal does not pin one that can be read") from error


async def show_part(request: Request) -> Response:
    """A part of the run's report, as HTML."""
    run = await followed_run(request)
    render = PARTS.get(request.query_params.get("name", ""))
    if render is None:
        raise PageError(404, "there is no such part")
    ledger = await run.ledger()
    return markup_response(await asyncio.to_thread(render, ledger))


async def show_children(request: Request) -> Response:
    """The runs that a run called as sub-agents, each with those that it called."""
    run = await followed_run(request)
    return json_response({"runs": await _children(context_of(request), run.run_id, MAX_DEPTH)})


async def _children(context: ViewerContext, run_id: str, depth: int) -> list[dict[str, Any]]:
    query = RunQuery(parent=run_id, limit=MAX_CHILDREN)
    found: list[dict[str, Any]] = []
    for info in reversed((await context.runs.list(query)).runs):
        below = await _children(context, info.run_id, depth - 1) if depth > 1 else []
        found.append({**run_json(replace(info, parent="")), "runs": below})
    return found


PAGE = Page(
    "/run",
    "Run",
    "run.js",
    (
        Route("/run", show_run),
        Route("/run/events", follow_run),
        Route("/run/moves", list_moves),
        Route("/run/step", show_step),
        Route("/run/prompt", show_prompt),
        Route("/run/picture", show_picture),
        Route("/run/part", show_part),
        Route("/run/children", show_children),
    ),
    in_menu=False,
    shared=True,
)
"""Runs are named in the query of an address, because their ids may have any character."""
