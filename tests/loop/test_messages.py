"""Messages: canonical JSON, call signatures, missing results, sums of usage."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm.loop.canonical_json import canonical_json
from agentfsm.loop.messages import FinishReason, Message, Reply, Role, ToolCall, Usage
from agentfsm.loop.model import ModelRequest, ToolSpec


def test_canonical_json_sorts_keys_adds_no_space_and_keeps_letters():
    assert canonical_json({"b": [1, 2.5, None, True], "a": "ü\n"}) == '{"a":"ü\\n","b":[1,2.5,null,true]}'


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, [math.nan]])
def test_canonical_json_has_no_nan(value):
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(value)


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=5))
def test_canonical_json_is_one_text_for_equal_values(value):
    assert canonical_json(dict(reversed(list(value.items())))) == canonical_json(value)
    assert json.loads(canonical_json(value)) == value


# -- signatures ---------------------------------------------------------------------------------------


def test_a_signature_is_the_tool_and_eight_digits_of_the_hash_of_its_arguments():
    digest = hashlib.sha256(b'{"a":1,"b":[2]}').hexdigest()
    assert ToolCall("x", "add", {"b": [2], "a": 1}).signature == f"add:{digest[:8]}"


def test_a_signature_ignores_the_id_the_order_and_the_ui_message():
    one = ToolCall("1", "t", {"a": 1, "b": 2})
    assert one.signature == ToolCall("2", "t", {"b": 2, "a": 1, "_ui_message": "Looking again..."}).signature


@pytest.mark.parametrize("other", [ToolCall("1", "u", {"a": 1}), ToolCall("1", "t", {"a": 2}), ToolCall("1", "t")])
def test_another_tool_or_another_argument_has_another_signature(other):
    assert ToolCall("1", "t", {"a": 1}).signature != other.signature


def test_a_tools_own_name_may_hold_a_colon():
    assert ToolCall("1", "a:b").signature.startswith("a:b:")


@pytest.mark.parametrize("argument", [math.nan, {1, 2}, object()])
def test_arguments_that_are_no_json_have_no_signature(argument):
    with pytest.raises((TypeError, ValueError)):
        _ = ToolCall("1", "t", {"a": argument}).signature


# -- values -------------------------------------------------------------------------------------------


def test_usage_adds_up():
    total = Usage(1, 2, 3, 0.5) + Usage(10, 20, 30, 0.25)
    assert total == Usage(11, 22, 33, 0.75)
    assert total.total_tokens == 33
    assert Usage() + total == total


def test_sums_and_differences_of_costs_are_exact_to_a_billionth_of_a_dollar():
    """The floats differ: three times 0.1 is more than 0.3, and 0.8 less 0.7 is more than 0.1."""
    tenth = Usage(cost_usd=0.1)
    assert (tenth + tenth + tenth).cost_usd == 0.3
    assert (Usage(cost_usd=0.8) - Usage(cost_usd=0.7)).cost_usd == 0.1
    assert (Usage(cost_usd=1.5) + Usage(cost_usd=2e-9)).cost_usd == 1.500000002


def test_short_ways_to_write_a_message():
    calls = [ToolCall("1", "t")]
    assert Message.system("s") == Message(Role.SYSTEM, "s")
    assert Message.user("u") == Message(Role.USER, "u")
    assert Message.assistant("a", calls) == Message(Role.ASSISTANT, "a", tuple(calls))  # type: ignore[arg-type]
    assert Message.assistant().tool_calls == ()


@pytest.mark.parametrize(
    "value",
    [
        Message.user("x"),
        ToolCall("1", "t"),
        Usage(),
        Reply(Message.assistant("x")),
        ModelRequest([]),
        ToolSpec("t", "", {}),
    ],
)
def test_what_was_said_cannot_be_changed(value):
    name = next(iter(value.__slots__))
    with pytest.raises(AttributeError):
        setattr(value, name, None)


def test_a_reply_stops_of_itself_unless_it_says_otherwise():
    reply = Reply(Message.assistant("x"))
    assert (reply.finish_reason, reply.usage, reply.refusal, reply.model) == (FinishReason.STOP, Usage(), None, "")


def test_roles_and_reasons_may_be_given_as_strings():
    message: Any = Message("assistant", "x")  # type: ignore[arg-type]
    reply: Any = Reply(message, "length")  # type: ignore[arg-type]
    assert message.role is Role.ASSISTANT
    assert reply.finish_reason is FinishReason.LENGTH
    with pytest.raises(ValueError, match="'bot' is not a valid Role"):
        Message("bot")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'max_tokens' is not a valid FinishReason"):
        Reply(message, "max_tokens")  # type: ignore[arg-type]


def test_a_request_waits_a_minute_unless_it_says_otherwise():
    request = ModelRequest([Message.user("x")])
    assert (request.tools, request.max_output_tokens, request.timeout_s) == ((), None, 60)
    assert (request.output_schema, request.output_name) == (None, "answer")
