"""Answers as a page sends them, and errors as it shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

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
from agentfsm.runtime.approval import Allow, Deny, Edit, Extend, Fill, GiveUp, HumanInput, ItDidNotRun, ItRan
from agentfsm.viewer.viewer_page import PageError

__all__ = ["refusal", "reply_from"]

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

    Raises:
        PageError: It is no reply.
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
