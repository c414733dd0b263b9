"""What a page sends is the reply that a person gave, and each error is told by what it means."""

from __future__ import annotations

from typing import Any

import pytest

from agentfsm import Allow, Deny, Edit, Extend, Fill, GiveUp, ItDidNotRun, ItRan
from agentfsm.errors import (
    ActorRoleError,
    AgentfsmError,
    BlankHumanReplyError,
    ConfigurationError,
    RepeatedVoteError,
    RunError,
    StaleHumanReplyError,
    StaleLease,
    StoreError,
    SuspensionExpiredError,
    UnknownRunError,
)
from agentfsm.viewer.pages.inbox_page import refusal, reply_from
from agentfsm.viewer.viewer_page import PageError


@pytest.mark.parametrize(
    ("given", "reply"),
    [
        ({"kind": "allow"}, Allow()),
        ({"kind": "deny", "text": "no"}, Deny("no")),
        ({"kind": "edit", "fields": {"to": '"Bob"'}}, Edit({"to": "Bob", "amount": 10**30})),
        ({"kind": "edit", "fields": {"amount": "1.50"}}, Edit({"to": "Ann", "amount": 1.5})),
        ({"kind": "fill", "fields": {"yes": "true"}}, Fill({"yes": True})),
        ({"kind": "text", "text": "the one in sales"}, "the one in sales"),
        ({"kind": "extend", "unit": "tokens", "amount": "500", "text": "go on"}, Extend(tokens=500, message="go on")),
        ({"kind": "extend", "unit": "usd", "amount": "0.5"}, Extend(usd=0.5)),
        ({"kind": "ran", "text": "it did"}, ItRan("it did")),
        ({"kind": "ran"}, ItRan()),
        ({"kind": "did_not_run"}, ItDidNotRun()),
        ({"kind": "give_up"}, GiveUp()),
    ],
)
def test_a_reply_is_what_was_sent_and_an_edit_keeps_the_rest_exactly(given: Any, reply: Any) -> None:
    assert reply_from(given, {"to": "Ann", "amount": 10**30}) == reply


@pytest.mark.parametrize(
    "given",
    [
        None, [], "allow", {}, {"kind": "approve"}, {"kind": "deny", "text": 1}, {"kind": "edit"},
        {"kind": "edit", "fields": {"to": "Bob"}}, {"kind": "edit", "fields": {"to": 1}},
        {"kind": "extend", "unit": "days", "amount": "1"}, {"kind": "extend", "unit": "usd"},
    ],
)  # fmt: skip
def test_what_is_no_reply_is_refused(given: Any) -> None:
    with pytest.raises(PageError) as refused:
        reply_from(given, {})
    assert refused.value.status == 422


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StaleHumanReplyError("x"), 409),
        (SuspensionExpiredError("x"), 409),
        (StaleLease("run", None, "x"), 409),
        (RunError("x"), 409),
        (ActorRoleError("x"), 403),
        (RepeatedVoteError("x"), 403),
        (BlankHumanReplyError("x"), 422),
        (UnknownRunError("x"), 404),
        (ConfigurationError("x"), 503),
        (StoreError("x"), 500),
    ],
)
def test_an_error_says_whether_it_came_too_late_or_may_not_be(error: AgentfsmError, status: int) -> None:
    assert refusal(error).status == status
