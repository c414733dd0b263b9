"""The inbox: what waits for a person, and the answers that they give."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentfsm.errors import (
    ActorIsRequesterError,
    ActorRoleError,
    AgentfsmError,
    AuthenticationError,
    ConfigurationError,
    HumanReplyError,
    JournalError,
    RepeatedVoteError,
    RunError,
    StaleHumanReplyError,
    StaleLease,
    StoreLockedError,
    SuspensionExpiredError,
    SuspensionRecordError,
    UnknownRunError,
)
from agentfsm.journal.load import StoredRequest, pending_request
from agentfsm.journal.records import open_record
from agentfsm.journal.run_info import RunInfo, RunQuery
from agentfsm.journal.signals import Signal, read_signals
from agentfsm.journal.store import Head
from agentfsm.loop.human_input import Allow, Deny, Edit, Extend, Fill, GiveUp, HumanInput, ItDidNotRun, ItRan
from agentfsm.loop.quorum import Actor
from agentfsm.viewer.access import Visitor, visitor_of
from agentfsm.viewer.step_reader import plain
from agentfsm.viewer.viewer_context import ViewerContext, context_of, run_json, ticks
from agentfsm.viewer.viewer_page import LiveEvent, Page, PageError, event_response, json_response, read_body, shown

Data = dict[str, Any]

SHOWN_REQUESTS = 50
REREAD_TICKS = 20
"""After so many looks at the list of runs, requests are read again even if the list is unchanged: votes, answers."""

DIGEST_DIGITS = 64


async def list_requests(request: Request) -> Response:
    """What waits for a person, the newest first."""
    context, visitor = context_of(request), visitor_of(request)
    return json_response(await _inbox_json(context, visitor, request.query_params.get("run", "")))


async def follow_requests(request: Request) -> Response:
    """What waits for a person, whenever that changes."""
    context, visitor, run_id = context_of(request), visitor_of(request), request.query_params.get("run", "")

    async def events() -> AsyncIterator[LiveEvent | None]:
        listed: Any = None
        known, looks = "", 0
        async for silent in ticks(context):
            page = await context.runs.list(_query(visitor, run_id))
            looks += 1
            if page != listed or looks >= REREAD_TICKS:
                listed, looks = page, 0
                found = await _inbox_json(context, visitor, run_id)
                if (text := json.dumps(found)) != known:
                    known = text
                    yield LiveEvent(found)
                    continue
            if silent:
                yield None

    return event_response(events())


def _query(visitor: Visitor, run_id: str) -> RunQuery:
    wanted = visitor.only_run or run_id
    query = RunQuery(status="suspended", limit=SHOWN_REQUESTS)
    return replace(query, run_id=wanted) if wanted else replace(query, parent="")


async def _inbox_json(context: ViewerContext, visitor: Visitor, run_id: str) -> Data:
    page = await context.runs.list(_query(visitor, run_id))
    wanted = visitor.only_run or run_id
    infos = [info for info in page.runs if not wanted or info.run_id == wanted]
    signals: list[Signal] = []
    if infos and context.may_change:
        signals = await read_signals(context.store.signals, context.access.keyring, wanted or None)
    found = [await _request_json(context, visitor, info, signals) for info in infos]
    return {"requests": [each for each in found if each is not None], "more": bool(page.next)}


async def _request_json(context: ViewerContext, visitor: Visitor, info: RunInfo, signals: list[Signal]) -> Data | None:
    """What a run asks; None if it asks nobody, as one that a worker is to start."""
    head = await context.store.head(info.run_id)
    if head is None or not head.seq:
        return None
    try:
        request, waiting = await _read_request(context, head)
    except AgentfsmError as error:
        return {"run": run_json(info), "problem": shown(str(error))}
    if request is None:
        return None
    quorum, limit = request.quorum, request.limit
    schema, known = _schema(context, request, waiting)
    return {
        "run": run_json(info),
        "digest": request.digest,
        "seq": request.seq,
        "kind": request.kind,
        "question": plain(waiting.get("question", "")),
        "context": plain(waiting.get("context", "")),
        "choices": plain(waiting.get("choices", ())),
        "asker": plain(waiting.get("asker", "")),
        "tool": plain(request.tool),
        "arguments": plain(waiting.get("arguments", {})),
        "fields": {name: json.dumps(value, ensure_ascii=False) for name, value in request.arguments.items()},
        "schema": schema,
        "tool_known": known,
        "expires": request.expires_at,
        "expired": request.has_expired(context.access.clock()),
        "limit": None
        if limit is None
        else {"unit": limit.unit, "spent": limit.spent, "limit": limit.limit, "default": limit.default},
        "quorum": None
        if quorum is None
        else {
            "needed": quorum.rule.n,
            "missing": quorum.missing,
            "roles": shown(list(quorum.roles)),
            "requester": None if quorum.requester is None else _actor_json(quorum.requester),
            "not_requester": quorum.rule.not_requester,
            "votes": [_actor_json(actor) for actor in quorum.votes],
            "escalates_at": quorum.escalates_at,
            "escalate_to": shown(list(quorum.rule.escalate_to)),
        },
        "sent": [
            {
                "kind": signal.kind,
                "by": None if signal.actor is None else _actor_json(signal.actor),
                "reply": "" if signal.reply is None else signal.reply.kind,
                "at": signal.sent_at,
                "refused": shown(signal.reason if signal.kind == "refusal" else ""),
            }
            for signal in signals
            if signal.run_id == info.run_id and (signal.kind == "cancel" or signal.to[0] == request.seq)
        ],
        "refused": shown(_why_not(context, request, visitor.actor)),
        "may_only_deny": _may_only_deny(context, request, visitor.actor),
    }


async def _read_request(context: ViewerContext, head: Head) -> tuple[StoredRequest | None, Mapping[str, Any]]:
    request = await pending_request(context.store, head)
    if request is None:
        return None, {}
    (record, *_) = await context.store.records(head.run_id, request.seq - 1)
    return request, cast("Data", open_record(record).get("waiting", {}))


def _why_not(context: ViewerContext, request: StoredRequest, actor: Actor | None) -> str:
    """Why a person may not allow what is asked; an empty string if they may."""
    if not context.may_change:
        return "nobody can be answered for here: the viewer was started without the secret of the host"
    if actor is None:
        return "sign in to answer"
    if request.quorum is not None:
        try:
            request.quorum.check_reply("allow", actor, authenticated=context.runner.authenticates)
        except HumanReplyError as error:
            return str(error)
    return ""


def _may_only_deny(context: ViewerContext, request: StoredRequest, actor: Actor | None) -> bool:
    """Whether nobody may allow a call, as its requester is not known, and a person may deny it."""
    quorum = request.quorum
    if quorum is None or actor is None or not context.may_change or request.kind != "approval":
        return False
    return quorum.lacks_requester(authenticated=context.runner.authenticates) and quorum.roles_allow(actor)


def _schema(context: ViewerContext, request: StoredRequest, waiting: Mapping[str, Any]) -> tuple[Any, bool]:
    """The schema of what can be filled in, and whether it is that of the tool as the run knew it."""
    if request.kind == "form":
        return plain(dict(request.form)), True
    for agent in context.runner.agents:
        tool = agent.config.tools.get(request.tool)
        if tool is not None and tool.digest == waiting.get("tool_digest"):
            return plain(dict(tool.spec.parameters)), True
    return {}, False


def _actor_json(actor: Actor) -> Data:
    return {"id": shown(actor.id), "roles": shown(list(actor.roles)), "verified": actor.verified}


async def _writer(request: Request) -> tuple[ViewerContext, Actor, Data, str]:
    """Whoever may change something, what they send, and the run that it is about."""
    context, visitor, data = context_of(request), visitor_of(request), await read_body(request)
    run_id = data.get("run")
    if visitor.actor is None:
        raise PageError(401, "sign in to answer")
    if not context.may_change:
        raise PageError(503, "nothing can be changed here: the viewer was started without the secret of the host")
    if not (isinstance(run_id, str) and run_id):
        raise PageError(422, "the page named no run")
    visitor.check_sees(run_id)
    if await context.store.head(run_id) is None:  # Runs takes the beginning of an id, too: that would be another run
        raise PageError(404, f"there is no run {run_id!r}: it may have been deleted")
    return context, visitor.actor, data, run_id


async def answer(request: Request) -> Response:
    """Answer what a run asks. It is refused if the run asks something other than what the page showed."""
    context, actor, data, run_id = await _writer(request)
    digest = data.get("to")
    if not (isinstance(digest, str) and len(digest) == DIGEST_DIGITS):
        raise PageError(422, "the page did not say what it answers: reload it")
    try:
        head = await context.store.head(run_id)
        asked = None if head is None else await pending_request(context.store, head)
        if asked is not None and asked.digest != digest:
            raise StaleHumanReplyError(f"the run now asks something else: {asked}")
        reply = reply_from(data.get("reply"), {} if asked is None else asked.arguments)
        sent = await context.runs_of(actor).answer(run_id, reply, by=actor, to=digest)
    except AgentfsmError as error:
        raise refusal(error) from error
    return json_response({"run": run_id, "owner": sent.owner, "here": bool(context.runner.agents)})


async def cancel(request: Request) -> Response:
    """Cancel a run."""
    context, actor, data, run_id = await _writer(request)
    reason: object = data.get("reason")
    if not isinstance(reason, str):
        raise PageError(422, "the reason is not a text")
    try:
        sent = await context.runs_of(actor).cancel(run_id, reason.strip() or "cancelled", by=actor)
    except AgentfsmError as error:
        raise refusal(error) from error
    return json_response({"run": run_id, "owner": sent.owner, "here": bool(context.runner.agents)})


_STATUSES: tuple[tuple[type[AgentfsmError], int], ...] = (
    (UnknownRunError, 404),
    (StaleHumanReplyError, 409),
    (SuspensionExpiredError, 409),
    (StaleLease, 409),
    (RunError, 409),
    (ActorRoleError, 403),
    (ActorIsRequesterError, 403),
    (RepeatedVoteError, 403),
    (AuthenticationError, 403),
    (HumanReplyError, 422),
    (SuspensionRecordError, 422),
    (JournalError, 422),
    (StoreLockedError, 503),
    (ConfigurationError, 503),
)
"""What a page is answered for each error, the first that fits: 409 is for an answer that came too late."""


def refusal(error: AgentfsmError) -> PageError:
    """An error as the answer to a page."""
    return PageError(next((status for kind, status in _STATUSES if isinstance(error, kind)), 500), str(error))


def reply_from(given: Any, arguments: Mapping[str, Any]) -> HumanInput:
    """The reply that a page sends.

    Args:
        given: What the page sends: a ``kind``, and what belongs to it.
        arguments: The arguments that the page showed, which an edit changes. The values of fields are JSON texts, so
            that what is not changed stays as it is, however large its numbers are.
    """
    data: dict[str, Any] = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    match data:
        case {"kind": "allow"}:
            return Allow()
        case {"kind": "deny"}:
            return Deny(_text(data, "text"))
        case {"kind": "edit"}:
            return Edit({**arguments, **_fields(data)})
        case {"kind": "fill"}:
            return Fill(_fields(data))
        case {"kind": "text"}:
            return _text(data, "text")
        case {"kind": "extend", "unit": "tokens" | "usd" | "seconds" | "model_calls" as unit}:
            return Extend(**{str(unit): _json(data.get("amount"), "amount")}, message=_text(data, "text"))
        case {"kind": "ran"}:
            return ItRan(_text(data, "text") or "done")
        case {"kind": "did_not_run"}:
            return ItDidNotRun()
        case {"kind": "give_up"}:
            return GiveUp()
        case _:
            raise PageError(422, "the page sent an unknown kind of answer: reload it")


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name, "")
    if not isinstance(value, str):
        raise PageError(422, f"{name} is not a text")
    return value


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    given = data.get("fields")
    if not isinstance(given, dict):
        raise PageError(422, "the page sent no fields: reload it")
    texts = cast("dict[str, Any]", given)
    return {name: _json(text, name) for name, text in texts.items()}


def _json(text: Any, name: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError) as error:
        raise PageError(422, f"{name} is not valid JSON: {error}") from error


PAGE = Page(
    "/inbox",
    "Inbox",
    "inbox.js",
    (
        Route("/inbox", list_requests),
        Route("/inbox/events", follow_requests),
        Route("/inbox/answer", answer, methods=["POST"]),
        Route("/inbox/cancel", cancel, methods=["POST"]),
    ),
    shared=True,
)
