"""What if: stored runs replayed under a preset, another graph or other limits, and which of them would go elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentfsm.errors import ConfigurationError, JournalError, UnknownRunError
from agentfsm.journal.replay import Replay, ReplayTotals
from agentfsm.journal.replay_settings import ReplaySettings
from agentfsm.loop.guardrails import AgentGuardrails
from agentfsm.loop.presets import PRESETS
from agentfsm.viewer.pages.runs_page import query_of
from agentfsm.viewer.viewer_context import ViewerContext, context_of, run_json
from agentfsm.viewer.viewer_page import Page, PageError, json_response, shown

PAGE_SIZE = 20
"""Runs that are replayed for one answer."""


async def show_choices(request: Request) -> Response:
    """What runs can be replayed under: presets, the graphs that the viewer was given, and limits."""
    return json_response(
        {
            "presets": list(PRESETS),
            "graphs": [shown(name) for name in context_of(request).graphs],
            "limits": list(AgentGuardrails.model_fields),
        }
    )


def replay_settings(request: Request) -> ReplaySettings:
    """What a request replays runs under; runs may be recorded on the graphs and by the agents of the viewer."""
    given = request.query_params
    preset, policy, graph = (given.get(name) or None for name in ("preset", "policy", "graph"))
    context = context_of(request)
    graphs = context.graphs
    if graph is not None and graph not in graphs:
        raise PageError(400, f"the viewer was given no graph {graph!r}")
    limits: dict[str, Any] = {}
    for each in given.get("limits", "").replace(",", " ").split():
        name, equals, value = each.partition("=")
        if not equals:
            raise PageError(400, f"{each!r} is not a limit: write max_iterations=5")
        limits[name] = None if value in ("none", "null") else value
    if not (preset or policy or graph or limits):
        raise PageError(400, "choose a preset, a policy, a graph or a limit")
    try:
        settings = ReplaySettings.of_preset(
            preset, graph=None if graph is None else graphs[graph], policy=policy, limits=limits
        )
        known = (*graphs.values(), *(agent.graph for agent in context.runner.agents))
        return replace(settings, known_graphs=known)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise PageError(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except ConfigurationError as error:
        raise PageError(400, str(error)) from error


def name_of_settings(request: Request) -> str:
    """What the settings of a request are called in a sentence: ``strict, max_iterations=5``."""
    given = request.query_params
    forms = (("preset", "{}"), ("policy", "the policy of {}"), ("graph", "graph {}"), ("limits", "{}"))
    return ", ".join(form.format(given[name]) for name, form in forms if given.get(name))


async def replay_runs(request: Request) -> Response:
    """The next runs that a query finds, replayed: those that would go elsewhere, and the totals of all of them."""
    context, settings = context_of(request), replay_settings(request)
    page = await context.runs.list(replace(query_of(request), limit=PAGE_SIZE))
    replays: list[Replay | None] = []
    changed: list[dict[str, Any]] = []
    for info in page.runs:
        found = await _replay(context, info.run_id, settings)
        replays.append(found if isinstance(found, Replay) else None)
        if isinstance(found, str):
            changed.append({**run_json(info), "error": shown(found)})
        elif not found.same:
            first = found.divergences[0]
            changed.append(
                {
                    **run_json(info),
                    "seq": first.seq,
                    "recorded": shown(first.recorded),
                    "instead": shown(first.instead),
                    "recorded_ending": found.recorded_ending,
                    "new_ending": found.ending,
                    "unknown": shown(found.unknown),
                    "ends_differently": found.ends_differently,
                }
            )
    totals = ReplayTotals.of(replays)
    return json_response(
        {
            "totals": {
                "runs": totals.runs,
                "same": totals.same,
                "alike": totals.alike,
                "end_differently": totals.end_differently,
                "unknown": totals.unknown,
                "failed": totals.failed,
            },
            "changed": changed,
            "next": page.next,
        }
    )


async def _replay(context: ViewerContext, run_id: str, settings: ReplaySettings) -> Replay | str:
    """A replay, or why there is none."""
    try:
        return await context.runs.replay(run_id, settings)
    except (JournalError, UnknownRunError, ValidationError) as error:
        return str(error)
    except (LookupError, TypeError, ValueError) as error:  # a journal that was changed
        return f"the journal cannot be read: {type(error).__name__}"


PAGE = Page(
    "/what-if",
    "What if",
    "what_if.js",
    (Route("/what-if", replay_runs), Route("/what-if/choices", show_choices)),
)
