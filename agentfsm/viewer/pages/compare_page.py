"""Two runs, or a run and its replay under other settings: the first difference, in the ledger and in the picture."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentfsm.analysis import diff
from agentfsm.diagrams import LayoutName
from agentfsm.errors import AgentfsmError
from agentfsm.journal.listing import find_run_id
from agentfsm.journal.replay import Divergence
from agentfsm.journal.run_info import RunQuery
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.transition_table import BUILT_IN_GUARDS
from agentfsm.machine.graph import Graph
from agentfsm.report.ledger import LedgerRow
from agentfsm.report.reported_run import graph_of_run
from agentfsm.viewer.access import visitor_of
from agentfsm.viewer.followed_run import FollowedRun
from agentfsm.viewer.pages.what_if_page import name_of_settings, replay_settings
from agentfsm.viewer.step_reader import move_json
from agentfsm.viewer.viewer_context import ViewerContext, context_of, run_json
from agentfsm.viewer.viewer_page import Page, PageError, json_response, markup_response, shown

BLOCK = 200
"""So many moves are read at a time."""

SHOWN_BEFORE, SHOWN_AFTER = 3, 5
"""How many moves of each run are shown before and after the first difference."""

PRESETS_IN_WORDS: Mapping[str, str] = {
    "standard": "The preset standard retries what may succeed the next time, asks a person about repeated calls, and "
    "hands the task off when it cannot go on.",
    "funnel": "The preset funnel lets only a call of return_done end the run: text without a call is not an answer. "
    "Failed tool calls are retried less often than under standard.",
    "feedback": "The preset feedback returns every mistake to the model, which has five calls in all; a failed model "
    "call ends the run.",
    "breaker": "The preset breaker returns errors to the model until the same one has occurred five times in a row, "
    "and lets only a tool end the run; a failed model call ends it, too.",
    "strict": "The preset strict retries no failed call: the failure of a tool is a result that the model reads, and a "
    "failed model call ends the run.",
}
"""What each preset does, for readers who do not know it."""


class FirstDifference(NamedTuple):
    """Where two runs part.

    Attributes:
        starts: How many moves of each come before the first that is compared: a fork has none of those that its
            parent made before.
        same: How many moves they have in common from there on, with what these say.
        what: ``move`` if another row was taken, ``outcome`` if the same row was taken on something else, ``end`` if
            one of them stops there; empty if they are the same.
    """

    starts: tuple[int, int]
    same: int
    what: str


async def first_difference(one: FollowedRun, other: FollowedRun) -> FirstDifference:
    """Where two runs part: the first move in which they differ."""
    starts, same = (_moves_before(one, other), _moves_before(other, one)), 0
    while True:
        mine, theirs = [
            await run.moves(start + same, start + same + BLOCK) for run, start in zip((one, other), starts, strict=True)
        ]
        for a, b in zip(mine, theirs, strict=False):
            if a.transition != b.transition:
                return FirstDifference(starts, same, "move")
            if _said(a) != _said(b):
                return FirstDifference(starts, same, "outcome")
            same += 1
        if len(mine) != len(theirs):
            return FirstDifference(starts, same, "end")
        if len(mine) < BLOCK:
            return FirstDifference(starts, same, "")


def _moves_before(run: FollowedRun, fork: FollowedRun) -> int:
    """How many moves a run had made when another one was forked from it; 0 if it was not."""
    try:
        parent = fork.path.pins[0].data["parent"]
        if parent["run"] != run.run_id:
            return 0
        return bisect_right(run.path.moves, int(parent["seq"]), key=lambda move: move.seq)
    except (LookupError, TypeError, ValueError):  # it is not a fork, or its journal was changed
        return 0


def _said(row: LedgerRow) -> tuple[object, ...]:
    """What a move says, apart from when it was made."""
    return row.target, row.outcome, row.summary, row.failure, row.action, row.ends


async def _run(request: Request, name: str) -> FollowedRun:
    run_id = request.query_params.get(name, "")
    if not run_id:
        raise PageError(400, "name two runs, or a run and a preset")
    visitor_of(request).check_sees(run_id)
    context = context_of(request)
    return await context.followed.get(await find_run_id(context.store, run_id))


async def _info_json(context: ViewerContext, run_id: str) -> dict[str, Any]:
    page = await context.runs.list(RunQuery(exact_id=run_id))
    return run_json(page.runs[0]) if page.runs else {"id": run_id}


async def _window(run: FollowedRun, at: int) -> list[dict[str, Any]]:
    return [move_json(row) for row in await run.moves(max(0, at - SHOWN_BEFORE), at + SHOWN_AFTER)]


async def compare_runs(request: Request) -> Response:
    """Where two runs part, with the moves around."""
    context = context_of(request)
    one, other = await _run(request, "a"), await _run(request, "b")
    found = await first_difference(one, other)
    return json_response(
        {
            "a": await _info_json(context, one.run_id),
            "b": await _info_json(context, other.run_id),
            "starts": dict(zip("ab", found.starts, strict=True)),
            "same": found.same,
            "what": found.what,
            "moves": {"a": len(one.path.moves), "b": len(other.path.moves)},
            "window": {
                name: await _window(run, start + found.same)
                for name, run, start in zip("ab", (one, other), found.starts, strict=True)
            },
            "graphs": shown(await asyncio.to_thread(_graph_difference, one, other)),
        }
    )


def _graph_difference(one: FollowedRun, other: FollowedRun) -> str:
    """How the graphs of two runs differ; empty if they do not, or if that is not known."""
    try:
        mine, theirs = graph_of_run(one.path.pins), graph_of_run(other.path.pins)
        return "" if mine.fingerprint == theirs.fingerprint else str(diff(mine, theirs))
    except (AgentfsmError, LookupError, TypeError, ValueError, AttributeError, StopIteration):
        return "their graphs cannot be compared: a journal does not pin one that can be read"


async def compare_replay(request: Request) -> Response:
    """Where a replay of a run under other settings parts from it."""
    context, run = context_of(request), await _run(request, "a")
    settings, name = replay_settings(request), name_of_settings(request)
    try:
        replay = await context.runs.replay(run.run_id, settings)
        graph = settings.graph or graph_of_run(run.path.pins)
    except (AgentfsmError, ValidationError) as error:  # such as a value that was redacted, or a changed record
        a = await _info_json(context, run.run_id)
        return json_response({"a": a, "settings": shown(name), "error": shown(f"the run cannot be replayed: {error}")})
    first = replay.divergences[0] if replay.divergences else None
    same = next((at for at, move in enumerate(run.path.moves) if first and move.seq >= first.seq), len(run.path.moves))
    return json_response(
        {
            "a": await _info_json(context, run.run_id),
            "settings": shown(name),
            "same": same,
            "about": PRESETS_IN_WORDS.get(request.query_params.get("preset", ""), ""),
            "words": "" if first is None else shown(in_plain_words(first, same + 1, name, graph)),
            "divergences": [
                {"seq": each.seq, "recorded": shown(each.recorded), "instead": shown(each.instead)}
                for each in replay.divergences
            ],
            "recorded_ending": replay.recorded_ending,
            "ending": replay.ending,
            "unknown": shown(replay.unknown),
            "window": {"a": await _window(run, same)},
        }
    )


async def show_presets(request: Request) -> Response:
    """The presets and graphs under which a run can be replayed."""
    return json_response({"presets": list(PRESETS), "graphs": [shown(name) for name in context_of(request).graphs]})


async def show_picture(request: Request) -> Response:
    """The graph of a run with its first moves."""
    run = await _run(request, "run")
    layout: LayoutName = "vertical" if request.query_params.get("layout") == "vertical" else "wide"
    try:
        moves = int(request.query_params.get("moves", "0"))
        return markup_response(await run.picture(layout, moves), "image/svg+xml")
    except (AgentfsmError, LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise PageError(422, "the graph cannot be drawn: the journal does not pin one that can be read") from error


PAGE = Page(
    "/compare",
    "Compare",
    "compare.js",
    (
        Route("/compare", compare_runs),
        Route("/compare/replay", compare_replay),
        Route("/compare/presets", show_presets),
        Route("/compare/picture", show_picture),
    ),
)


_MEANINGS: Mapping[str, str] = {
    guard.__name__: (guard.__doc__ or "").partition("\n")[0].rstrip(".").replace("``", "") for guard in BUILT_IN_GUARDS
}
"""What each guard of the presets says when it holds."""


def in_plain_words(divergence: Divergence, number: int, settings: str, graph: Graph) -> str:
    """What a run did in a move, what it would have done under other settings instead, and why.

    Args:
        divergence: The first transition that would have been another one.
        number: The number of the move, counted from 1.
        settings: What these are called, such as ``strict``.
        graph: The graph of the replay.
    """
    recorded, _, went = divergence.recorded.partition(" -> ")
    instead, arrow, would_go = divergence.instead.partition(" -> ")
    if not arrow:  # it would have started elsewhere, or no row would have held
        return f"Under {settings}, move {number} would have been another: {divergence.instead}."
    notes = {str(spec.name): spec.note for spec in graph.states}

    def state(name: str) -> str:
        return f"{name} ({notes[name]})" if notes.get(name) else name

    source, _, guard = recorded.rpartition(".")
    rows, holding = [row.id for row in graph], instead.rpartition(".")[2]
    held = "no guard would have held" if holding == "otherwise" else f"the guard {_named(holding)} would have held"
    if recorded not in rows:
        why = f"{settings} has no such row: {held}"
    elif instead in rows and rows.index(instead) < rows.index(recorded):
        why = f"under {settings} the guard {_named(holding)}, which is evaluated before it, would have held"
    else:
        rest = "nor would any other" if holding == "otherwise" else f"and {held}"
        why = f"under {settings} that guard would not have held, {rest}"
    took = "No guard held" if guard == "otherwise" else f"The guard {_named(guard)} held"
    return (
        f"In move {number} the run was in {state(source)}. {took}, so it went to {state(went)}. "
        f"But {why}, so it would have gone to {state(would_go)}."
    )


def _named(guard: str) -> str:
    meaning = _MEANINGS.get(guard, "")
    return f"{guard} (\N{LEFT DOUBLE QUOTATION MARK}{meaning}\N{RIGHT DOUBLE QUOTATION MARK})" if meaning else guard
