"""The checker of transcripts sees each thing that a wire would refuse, and nothing else."""

from __future__ import annotations

import pytest

from agentfsm.loop.messages import Message, Role, ToolCall
from tests.helpers.provider_rules import check_transcript, transcript_errors

USER, SYSTEM, ANSWER = Message.user("hi"), Message.system("be good"), Message.assistant("hello")


def calls(*ids: str) -> Message:
    return Message.assistant("", tuple(ToolCall(i, "look") for i in ids))


def result(id: str | None) -> Message:  # noqa: A002
    return Message(Role.TOOL, "seen", tool_call_id=id, name="look")


GOOD = [
    [USER],
    [SYSTEM, USER],
    [USER, USER],
    [USER, ANSWER, USER],
    [USER, calls("1"), result("1")],
    [USER, calls("1", "2"), result("2"), result("1"), USER],
    [USER, calls("1"), result("1"), calls("2"), result("2")],
    [USER, ANSWER, result(None)],
    [USER, calls("1"), result("1"), result(None)],
]

BAD = [
    ([], "no turn"),
    ([SYSTEM], "no turn"),
    ([ANSWER, USER], "first turn is the assistant's"),
    ([USER, ANSWER], "ends with the assistant"),
    ([USER, calls("1")], "nothing answers ['1']"),
    ([USER, calls("1"), USER], "stands in front of the answers to ['1']"),
    ([USER, calls("1"), SYSTEM, result("1")], "stands in front of the answers to ['1']"),
    ([USER, calls("1"), result(None), result("1")], "stands in front of the answers to ['1']"),
    ([USER, calls("1", "2"), result("1"), USER], "stands in front of the answers to ['2']"),
    ([USER, calls("1"), calls("2"), result("1"), result("2")], "stands in front of the answers to ['1']"),
    ([USER, calls("1"), result("1"), result("1")], "answers no call"),
    ([USER, result("1")], "answers no call"),
    ([USER, calls("1"), result("2"), result("1")], "answers no call"),
    ([USER, calls("1"), result("1"), USER, calls("1"), result("1")], "was used before"),
    ([USER, calls("1", "1"), result("1"), result("1")], "was used before"),
    ([USER, calls(""), result("")], "empty id"),
    ([Message(Role.USER, "x", (ToolCall("1", "look"),))], "only an assistant calls"),
]


@pytest.mark.parametrize("messages", GOOD)
def test_what_both_wires_take_is_taken(messages):
    check_transcript(messages)


@pytest.mark.parametrize(("messages", "why"), BAD)
def test_what_a_wire_refuses_is_seen(messages, why):
    assert any(why in problem for problem in transcript_errors(messages))
    with pytest.raises(AssertionError):
        check_transcript(messages)


def test_a_transcript_that_is_over_may_end_with_the_assistant():
    check_transcript([USER, ANSWER], request=False)
