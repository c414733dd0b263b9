"""What a person may reply, as the loop keeps it."""

from __future__ import annotations

import math

import pytest

from agentfsm.core.state import PersonReply
from agentfsm.errors import RecordError, ReplyError
from agentfsm.runtime.replies import Allow, Deny, Edit, GiveUp, ItDidNotRun, ItRan, person_reply


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("go on", PersonReply("text", "go on")),
        ("", PersonReply("text", "")),
        (Allow(), PersonReply("allow")),
        (Deny(), PersonReply("deny", "")),
        (Deny("too dear"), PersonReply("deny", "too dear")),
        (Edit({"a": 1}), PersonReply("edit", arguments={"a": 1})),
        (Edit(), PersonReply("edit")),
        (ItRan("42"), PersonReply("ran", "42")),
        (ItRan(), PersonReply("ran", "done")),
        (ItDidNotRun(), PersonReply("did_not_run")),
        (GiveUp(), PersonReply("give_up")),
    ],
)
def test_an_answer_is_kept_as_plain_data(answer, kept):
    assert person_reply(answer) == kept


@pytest.mark.parametrize("answer", [None, True, 3, b"yes", ["yes"], Allow, Deny(None), ItRan(42)])
def test_what_is_no_answer_is_refused_with_those_that_there_are(answer):
    with pytest.raises(ReplyError, match=r"Allow\(\)") as caught:
        person_reply(answer)
    assert isinstance(caught.value, RecordError)


@pytest.mark.parametrize("arguments", [{"a": math.nan}, {"a": {1, 2}}, {"a": object()}])
def test_edited_arguments_are_json(arguments):
    with pytest.raises(ReplyError, match="no JSON object"):
        person_reply(Edit(arguments))


def test_edited_arguments_are_the_persons_no_longer():
    arguments = {"a": [1]}
    kept = person_reply(Edit(arguments))
    arguments["a"].append(2)
    assert kept.arguments == {"a": [1]}
