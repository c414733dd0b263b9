"""What is secret in the text of a reply is found in it, valid or not."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel, SecretStr, TypeAdapter

from agentfsm.loop.reply_secrets import ReplySecrets

PIN = "9941-7700-zz"


class Login(BaseModel):
    user: str
    token: SecretStr


ANSWERS = ReplySecrets(TypeAdapter(Login).json_schema(), {})
LISTS = ReplySecrets(TypeAdapter(list[Login]).json_schema(), {})
ENVELOPES = ReplySecrets(TypeAdapter(Login).json_schema(), {"unlock": (frozenset({"pin"}), {})}, envelope=True)
CALLS = ReplySecrets(None, {"unlock": (frozenset({"pin"}), {})})
ANSWER = json.dumps({"user": "ann", "token": PIN})


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        (ANSWERS, ANSWER),
        (ANSWERS, f"Here it is:\n```json\n{ANSWER}\n```\nBye."),
        (ANSWERS, f"Here it is: {ANSWER} {{and more"),
        (ANSWERS, '{"token": "' + PIN + '"}'),
        (ANSWERS, '{"user": 5, "token": "' + PIN + '", "other": []}'),
        (ANSWERS, '{"user": "ann", "token": "' + PIN),
        (ANSWERS, '{"user": "ann", "token": "\\u0039941-7700-zz"}'),
        (LISTS, f"[{ANSWER}]"),
        (ENVELOPES, json.dumps({"kind": "final", "content": ANSWER})),
        (ENVELOPES, json.dumps({"kind": "tool_call", "tool_name": "unlock", "arguments": {"pin": PIN}})),
        (CALLS, f'<tool_call>{{"name": "unlock", "arguments": {{"pin": "{PIN}"}}}}</tool_call>'),
        (CALLS, json.dumps([{"function": {"name": "unlock", "arguments": json.dumps({"pin": PIN})}}])),
    ],
)
def test_it_is_found(reader: ReplySecrets, text: str) -> None:
    assert reader.find(text) == (PIN,)


@pytest.mark.parametrize(
    "text", ["", "No.", "{", "[[[", "{}", '{"token": null}', '{"user": "ann"}', "{" * 500, "[" * 100_000]
)
def test_nothing_is_found_where_nothing_is(text: str) -> None:
    assert ANSWERS.find(text) == CALLS.find(text) == ()


def test_a_secret_that_a_truncated_answer_ends_in_is_found_in_both_parts() -> None:
    begun = '{"user": "ann", "token": "9941-77'
    assert ANSWERS.find(begun) == ("9941-77",)
    assert set(ANSWERS.find('00-zz"}', begun)) == {PIN, "00-zz"}


def test_only_replies_that_always_have_secrets_are_hidden_while_they_stream() -> None:
    assert ANSWERS.in_answers
    assert ENVELOPES.in_answers
    assert not CALLS.in_answers
