"""The JSON envelope: both kinds, with and without a Markdown fence, and why anything else cannot be parsed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm.loop.messages import ToolCall
from agentfsm.loop.model import ToolSpec
from agentfsm.loop.outcomes import ReplyParsed
from agentfsm.loop.reply_reader import envelope_instructions, parse_envelope, parse_json


def test_a_final_answer():
    assert parse_envelope('{"kind": "final", "content": "42"}', "id") == ReplyParsed(answer="42")


def test_a_tool_call_gets_the_id_that_it_is_given():
    text = '{"kind": "tool_call", "tool_name": "add", "arguments": {"a": 1}}'
    assert parse_envelope(text, "call_7") == ReplyParsed(calls=(ToolCall("call_7", "add", {"a": 1}),))


def test_a_tool_call_without_arguments_has_none():
    assert parse_envelope('{"kind": "tool_call", "tool_name": "now"}', "i") == ReplyParsed(
        calls=(ToolCall("i", "now", {}),)
    )


FENCES = ["```json\n{}\n```", "```\n{}\n```", "  ```JSON  \n{}\n```\n\n", "```json\n{}```", "\n```\n  {}  \n\n  ```  "]


@pytest.mark.parametrize("fence", FENCES)
def test_a_fence_is_tolerated(fence):
    text = fence.replace("{}", '{"kind": "final", "content": "x"}')
    assert parse_envelope(text, "i") == ReplyParsed(answer="x")


def test_a_fence_inside_an_answer_is_part_of_it():
    content = "```python\nprint()\n```"
    assert parse_envelope(json.dumps({"kind": "final", "content": content}), "i").answer == content


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not valid JSON"),
        ("Sure! Here it is:", "not valid JSON"),
        ('{"kind": "final", "content": "x"} and more', "not valid JSON"),
        ('{"kind": "final", "content": "x"', "not valid JSON"),
        ('{"kind": "final", "content": "x"}{"kind": "final", "content": "y"}', "not valid JSON"),
        ("{'kind': 'final', 'content': 'x'}", "not valid JSON"),
        ('```json\n{"kind": }\n```', "not valid JSON"),
        ('text in front ```json\n{"kind": "final", "content": "x"}\n```', "not valid JSON"),
        ('{"kind": "final", "content": NaN}', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "not an object"),
        ('"final"', "not an object"),
        ("null", "not an object"),
        ("{}", "needs a 'kind'"),
        ('{"kind": "maybe"}', "needs a 'kind'"),
        ('{"kind": ["final"]}', "needs a 'kind'"),
        ('{"kind": "final"}', "needs a text in 'content'"),
        ('{"kind": "final", "content": 42}', "needs a text in 'content'"),
        ('{"kind": "final", "content": null}', "needs a text in 'content'"),
        ('{"kind": "tool_call"}', "needs a 'tool_name'"),
        ('{"kind": "tool_call", "tool_name": ""}', "needs a 'tool_name'"),
        ('{"kind": "tool_call", "tool_name": 3}', "needs a 'tool_name'"),
    ],
)
def test_what_cannot_be_read_says_why(text, why):
    read = parse_envelope(text, "i")
    assert (read.calls, read.answer) == ((), None)
    assert why in read.malformed


@pytest.mark.parametrize("arguments", ['"a=1"', "[1]", "null", "3"])
def test_arguments_that_are_no_object_make_a_call_that_is_never_run(arguments):
    read = parse_envelope(f'{{"kind": "tool_call", "tool_name": "t", "arguments": {arguments}}}', "i")
    (call,) = read.calls
    assert (call.name, call.arguments) == ("t", {})
    assert call.malformed == "'arguments' must be an object"
    assert read.malformed is None


@pytest.mark.slow
@given(st.text())
def test_any_text_is_read_or_refused_in_order(text):
    read = parse_envelope(text, "i")
    assert (read.malformed is None) == (read.answer is not None or bool(read.calls))


@given(st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4) | st.none(), max_size=4))
def test_any_object_is_read_or_refused_in_order(value):
    for kind in ("final", "tool_call"):
        read = parse_envelope(json.dumps({**value, "kind": kind}), "i")
        assert (read.malformed is None) == (read.answer is not None or bool(read.calls))


# -- parse_json ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, True]}, [], "text", 3, 10**30, "\u00fc\n", ""])
def test_json_is_parsed_with_and_without_a_fence(value):
    text = json.dumps(value)
    assert parse_json(text) == parse_json(f"```json\n{text}\n```") == value


@pytest.mark.parametrize(
    "text",
    [
        'Here is my call:\n```json\n{"a": 1}\n```\nI hope it helps.',
        'First, some code:\n```python\nprint({})\n```\nThen:\n\n```\n{"a": 1}\n```',
        '```json\n{"a": 1}\n```\nDone.',
    ],
)
def test_prose_around_the_only_fence_that_holds_json_is_accepted(text):
    assert parse_json(text) == {"a": 1}


def test_a_fence_may_hold_json_with_a_fence_in_a_text():
    value = {"content": "```py\nx\n```"}
    assert parse_json(f"See:\n```json\n{json.dumps(value)}\n```\nBye.") == value


@pytest.mark.parametrize("text", ["```\n1\n```\n```\n2\n```", 'So: {"a": 1}', "```json\n{\n```", "```json\n{}"])
def test_it_is_not_guessed_which_json_is_meant(text):
    with pytest.raises(ValueError, match=r".+"):
        parse_json(text)


def test_a_text_with_very_many_fences_is_read_in_linear_time():
    with pytest.raises(ValueError, match=r".+"):
        parse_json("```a\n" * 200_000)


NO_NUMBERS = ["NaN", "[Infinity]", "-Infinity", "1e999", '{"a": [-1e400]}', "```\n1e999\n```"]


@pytest.mark.parametrize("text", [*NO_NUMBERS, "", "nul", "\ud800"])
def test_what_is_no_json_says_where(text):
    with pytest.raises(ValueError, match=r".+"):
        parse_json(text)


@pytest.mark.parametrize("arguments", ['{"a": 1e999}', '{"a": [{"b": -1e400}]}'])
@pytest.mark.parametrize("text", ["%s", "```json\n%s\n```"])
def test_an_argument_that_is_out_of_range_makes_the_reply_malformed(arguments, text):
    envelope = '{"kind": "tool_call", "tool_name": "add", "arguments": ' + arguments + "}"
    parsed = parse_envelope(text % envelope, "c1")
    assert (parsed.calls, parsed.malformed) == ((), "the reply is not valid JSON (a number is out of range)")


# -- instructions -------------------------------------------------------------------------------------


def test_the_instructions_name_both_forms_and_every_tool_with_its_schema():
    text = envelope_instructions(
        [ToolSpec("add", "Add two numbers.", {"type": "object"}), ToolSpec("now", "Tell the time.", {})]
    )
    assert '{"kind": "final", "content": ' in text
    assert '{"kind": "tool_call", "tool_name": ' in text
    assert '- add: {"arguments":{"type":"object"},"description":"Add two numbers."}' in text
    assert '- now: {"arguments":{},"description":"Tell the time."}' in text


def test_the_instructions_name_no_final_answer_where_text_is_none():
    text = envelope_instructions([ToolSpec("now", "Tell the time.", {})], text_is_answer=False)
    assert "final" not in text
    assert '{"kind": "tool_call", "tool_name": ' in text
    assert '- now: {"arguments":{},"description":"Tell the time."}' in text


def test_the_instructions_say_so_where_there_is_no_tool():
    assert envelope_instructions([]).endswith("Tools:\n- none")
