"""Verification: whether the journals and the store are intact, and what could not be checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentfsm.errors import JournalError, StoreError, UnknownRunError
from agentfsm.journal.checkpoint import verify_store
from agentfsm.journal.verification import (
    UNVERIFIABLE,
    VerificationReport,
    unchecked_lines,
)
from agentfsm.report.reported_run import key_ids_of, verdict_of
from agentfsm.viewer.access import visitor_of
from agentfsm.viewer.pages.runs_page import query_of
from agentfsm.viewer.viewer_context import ViewerContext, context_of, run_json
from agentfsm.viewer.viewer_page import Page, json_response, shown

PAGE_SIZE = 25
"""Runs that are verified for one answer."""


async def verify_page(request: Request) -> Response:
    """The next runs that a query finds, each with its badge."""
    context, query = context_of(request), query_of(request)
    page = await context.runs.list(replace(query, limit=PAGE_SIZE))
    reports = [(info, await _verify(context, info.run_id)) for info in page.runs]
    return json_response(
        {"runs": [{**run_json(info), "report": _report_json(report)} for info, report in reports], "next": page.next}
    )


async def verify_run(request: Request) -> Response:
    """One run, with the keys that sealed it."""
    context, run_id = context_of(request), request.query_params.get("run", "")
    visitor_of(request).check_sees(run_id)
    report = await _verify(context, run_id)
    keys = key_ids_of(await context.store.records(run_id))
    return json_response({**_report_json(report), "keys": list(keys), "unchecked": _unchecked(context)})


async def show_store(request: Request) -> Response:
    """What is wrong with the store itself, signed runs that are missing, and what was not checked."""
    context = context_of(request)
    found = await verify_store(context.store, context.host_keyring, context.checkpoint)
    problems = [{"where": shown(each.run_id), "reason": shown(each.reason)} for each in found]
    return json_response({"problems": problems, "unchecked": _unchecked(context)})


def _unchecked(context: ViewerContext) -> list[str]:
    signed = context.checkpoint
    return unchecked_lines(context.host_keyring is not None, None if signed is None else signed.date)


async def _verify(context: ViewerContext, run_id: str) -> VerificationReport:
    hashes = None if context.checkpoint is None else context.checkpoint.hashes
    try:
        return await context.runs.verify(run_id, checkpoint=hashes)
    except UnknownRunError:
        raise
    except (JournalError, StoreError) as error:
        return VerificationReport(run_id, UNVERIFIABLE, 0, None, str(error))


def _report_json(report: VerificationReport) -> dict[str, Any]:
    return {
        "verdict": verdict_of(report),
        "code": report.code,
        "records": report.records,
        "seq": report.seq,
        "reason": shown(report.reason),
        "open": shown(list(report.open)),
        "claimed": shown(list(report.claimed)),
    }


PAGE = Page(
    "/verification",
    "Verification",
    "verification.js",
    (
        Route("/verification", verify_page),
        Route("/verification/run", verify_run),
        Route("/verification/store", show_store),
    ),
)
