"""Forms of MCP servers: what a person is shown, and which replies fit."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jsonschema", reason="the extra 'mcp' is not installed")

from agentfsm import HumanReplyError
from agentfsm.integrations.mcp.forms import Form, read_reply
from agentfsm.loop.human_input import HumanReply


def form(**properties: Any) -> Form:
    return Form(message="?", fields={"type": "object", "properties": properties, "required": [*properties][:1]})


def text(reply: str) -> HumanReply:
    return HumanReply("text", reply)


@pytest.mark.parametrize(
    ("schema", "reply", "value"),
    [
        ({"type": "string"}, "Ann ", "Ann"),
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": "boolean"}, "true", True),
        ({"type": "string", "format": "email"}, "ann@example.com", "ann@example.com"),
        ({"type": "string", "format": "uri"}, "https://example.com", "https://example.com"),
        ({"type": "string", "format": "date-time"}, "2027-01-02T10:00:00+01:00", "2027-01-02T10:00:00+01:00"),
    ],
)
def test_the_text_is_the_value_of_the_only_field(schema: dict[str, Any], reply: str, value: object) -> None:
    answer = read_reply(form(a=schema), text(reply))
    assert (answer.action, answer.content) == ("accept", {"a": value})


@pytest.mark.parametrize(
    ("schema", "reply"),
    [
        ({"type": "integer"}, "twelve"),
        ({"type": "boolean"}, "perhaps"),
        ({"type": "string", "enum": ["red"]}, "blue"),
        ({"type": "string", "format": "email"}, "ann"),
        ({"type": "string", "format": "uri"}, "no address"),
        ({"type": "string", "format": "date"}, "2027-13-01"),
        ({"type": "string", "format": "date-time"}, "2027-01-02"),
    ],
)
def test_a_text_that_does_not_fit_the_field_is_refused_by_its_name(schema: dict[str, Any], reply: str) -> None:
    with pytest.raises(HumanReplyError, match="a: "):
        read_reply(form(a=schema), text(reply))


def test_defaults_fill_what_was_left_out() -> None:
    answer = read_reply(form(a={"type": "string"}, b={"type": "integer", "default": 3}), text('{"a": "x"}'))
    assert answer.content == {"a": "x", "b": 3}


@pytest.mark.parametrize(
    ("schema", "choices"),
    [
        ({"type": "boolean"}, ("true", "false")),
        ({"type": "string", "enum": ["red", "blue"]}, ("red", "blue")),
        ({"type": "string", "oneOf": [{"const": "r", "title": "Red"}, {"const": "b", "title": "Blue"}]}, ("r", "b")),
        ({"type": "string"}, ()),
    ],
)
def test_the_values_of_a_single_field_are_choices(schema: dict[str, Any], choices: tuple[str, ...]) -> None:
    assert form(a=schema).choices == choices


def test_a_person_is_shown_the_address_that_they_should_open_and_their_consent_is_the_answer() -> None:
    asked = Form(message="Sign in", url="https://example.com/login")
    assert "https://example.com/login" in asked.describe("vault")
    assert read_reply(asked, text("ok")).model_dump() == {"action": "accept", "content": None}
