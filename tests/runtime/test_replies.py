"""What a person may reply, as the loop keeps it."""

from __future__ import annotations

import math

import pytest

from agentfsm.errors import HumanReplyError, SuspensionRecordError
from agentfsm.loop.state import HumanReply
from agentfsm.runtime.approval import Allow, Deny, Edit, GiveUp, ItDidNotRun, ItRan, to_human_reply


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("go on", HumanReply("text", "go on")),
        ("", HumanReply("text", "")),
        (Allow(), HumanReply("allow")),
        (Deny(), HumanReply("deny", "")),
        (Deny("too dear"), HumanReply("deny", "too dear")),
        (Edit({"a": 1}), HumanReply("edit", arguments={"a": 1})),
        (Edit(), HumanReply("edit")),
        (ItRan("42"), HumanReply("ran", "42")),
        (ItRan(), HumanReply("ran", "done")),
        (ItDidNotRun(), HumanReply("did_not_run")),
        (GiveUp(), HumanReply("give_up")),
    ],
)
def test_an_answer_is_kept_as_plain_data(answer, kept):
    assert to_human_reply(answer) == kept


@pytest.mark.parametrize("answer", [None, True, 3, b"yes", ["yes"], Allow, Deny(None), ItRan(42)])
def test_what_is_no_answer_is_refused_with_those_that_there_are(answer):
    with pytest.raises(HumanReplyError, match=r"Allow\(\)") as caught:
        to_human_reply(answer)
    assert isinstance(caught.value, SuspensionRecordError)


@pytest.mark.parametrize("arguments", [{"a": math.nan}, {"a": {1, 2}}, {"a": object()}])
def test_edited_arguments_are_json(arguments):
    with pytest.raises(HumanReplyError, match="not a JSON object"):
        to_human_reply(Edit(arguments))


def test_edited_arguments_are_the_persons_no_longer():
    arguments = {"a": [1]}
    kept = to_human_reply(Edit(arguments))
    arguments["a"].append(2)
    assert kept.arguments == {"a": [1]}
