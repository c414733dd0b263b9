"""Models for tests: one that follows a script, and one that keeps what another was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agentfsm.errors import ModelError, ProviderError, TransientProviderError
from agentfsm.loop.messages import FinishReason, Message, Reply, ToolCall, Usage
from agentfsm.loop.model import ModelRequest
from agentfsm.testing import RecordingModel, ScriptedModel, ScriptExhaustedError, call

REQUEST = ModelRequest([Message.user("hi")])


def replies(*script: Any, times: int | None = None) -> list[Reply]:
    model = ScriptedModel(script)

    async def scene() -> list[Reply]:
        return [await model.reply(REQUEST) for _ in range(len(script) if times is None else times)]

    return asyncio.run(scene())


# -- entries ------------------------------------------------------------------------------------------


def test_a_text_is_a_reply_that_stops():
    assert replies("hello") == [Reply(Message.assistant("hello"), FinishReason.STOP)]


def test_a_call_is_a_reply_that_calls_with_an_id_that_says_which_it_is():
    (reply,) = replies(call("add", a=1))
    assert reply == Reply(Message.assistant("", (ToolCall("call_1_1", "add", {"a": 1}),)), FinishReason.TOOL_CALLS)


def test_several_calls_have_an_id_each_and_a_call_may_bring_its_own():
    first, second = replies([call("a"), call("b", "mine"), call("c")], [call("a")])
    assert [c.id for c in first.message.tool_calls] == ["call_1_1", "mine", "call_1_3"]
    assert [c.id for c in second.message.tool_calls] == ["call_2_1"]


def test_arguments_that_did_not_parse_may_be_scripted():
    (reply,) = replies(ToolCall("", "add", malformed="no JSON"))
    assert reply.message.tool_calls[0].malformed == "no JSON"


def test_whole_messages_and_replies_are_given_as_they_are():
    calling = Message.assistant("look", (ToolCall("1", "look"),))
    whole = Reply(Message.assistant("x"), FinishReason.LENGTH, Usage(1, 2))
    assert replies(Message.assistant("x"), calling, whole) == [
        Reply(Message.assistant("x"), FinishReason.STOP),
        Reply(calling, FinishReason.TOOL_CALLS),
        whole,
    ]


@pytest.mark.parametrize("entry", [ValueError("broken"), TransientProviderError("busy"), asyncio.CancelledError()])
def test_an_exception_is_raised(entry):
    with pytest.raises(type(entry)) as caught:
        replies(entry)
    assert caught.value is entry


@pytest.mark.parametrize("entry", [ValueError, TransientProviderError])
def test_a_class_of_exceptions_is_raised_too(entry):
    with pytest.raises(entry, match="scripted"):
        replies(entry)


def test_a_function_sees_the_messages_and_gives_an_entry():
    def echo(messages: Sequence[Message]) -> str:
        return f"you said {messages[-1].content}"

    async def later(messages: Sequence[Message]) -> ToolCall:
        await asyncio.sleep(0)
        return call("look", n=len(messages))

    def fails(messages: Sequence[Message]) -> Exception:
        return ProviderError("no")

    first, second = replies(echo, later)
    assert first.message.content == "you said hi"
    assert second.message.tool_calls[0].arguments == {"n": 1}
    with pytest.raises(ProviderError):
        replies(fails)


@pytest.mark.parametrize("entry", [{"content": "x"}, 42, None, ["text"], [call("a"), "text"], int, lambda messages: 3])
def test_what_is_no_entry_says_so(entry):
    with pytest.raises(TypeError, match="a script entry"):
        replies(entry)


# -- the end of the script ----------------------------------------------------------------------------


def test_a_script_that_is_out_says_so_and_by_how_much():
    with pytest.raises(ScriptExhaustedError, match=r"'scripted' has 1 entries, and this is call 2") as caught:
        replies("one", times=2)
    assert isinstance(caught.value, ModelError)
    with pytest.raises(ScriptExhaustedError, match="0 entries"):
        replies(times=1)


def test_it_counts_what_it_was_asked_and_what_is_left():
    model = ScriptedModel(["a", ValueError("b"), "c"], name="mine")

    async def scene() -> None:
        assert (model.calls, model.remaining, model.name) == (0, 3, "mine")
        await model.reply(REQUEST)
        with pytest.raises(ValueError, match="b"):
            await model.reply(REQUEST)
        assert (model.calls, model.remaining) == (2, 1)
        await model.reply(REQUEST)
        with pytest.raises(ScriptExhaustedError):
            await model.reply(REQUEST)
        assert (model.calls, model.remaining) == (4, 0)

    asyncio.run(scene())


def test_a_script_is_read_once_from_any_iterable():
    entries = ["a"]
    model = ScriptedModel(iter(entries))
    entries.append("b")
    assert model.remaining == 1


# -- recording ----------------------------------------------------------------------------------------


def test_a_recorder_passes_everything_on_and_keeps_it():
    model = RecordingModel(ScriptedModel(["a", ValueError("b")], name="mine"))
    other = ModelRequest([Message.user("again")])

    async def scene() -> None:
        assert (await model.reply(REQUEST)).message.content == "a"
        with pytest.raises(ValueError, match="b"):
            await model.reply(other)

    asyncio.run(scene())
    assert model.name == "mine"
    assert model.requests == [REQUEST, other]
    assert model.requests[1] is other
