"""Messages of a chat completions request take turns where the server wants that, and nothing that was said is lost."""

from __future__ import annotations

from typing import Any

import pytest

from agentfsm.loop.messages import Image, Message, Role, ToolCall
from agentfsm.loop.model import ModelRequest
from agentfsm.models.openai_chat import encode
from agentfsm.models.role_rules import ANY_ORDER, RoleRules, short_call_id

USER, ANSWER = Message.user("a"), Message.assistant("b")
CALL = Message.assistant("", (ToolCall("call_1", "look", {}),))
RESULT = Message(Role.TOOL, "seen", tool_call_id="call_1", name="look")
CALL_ITEM = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
}
RESULT_ITEM = {"role": "tool", "tool_call_id": "call_1", "content": "seen"}
IMAGE = Image.from_bytes(b"GIF89a...")
IMAGE_PART = {"type": "image_url", "image_url": {"url": f"data:image/gif;base64,{IMAGE.data}"}}


def messages(*given: Message, roles: RoleRules | None = None) -> list[dict[str, Any]]:
    body = encode(ModelRequest(given), "m", **({} if roles is None else {"roles": roles}))
    return body["messages"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([USER, ANSWER, USER], [("user", "a"), ("assistant", "b"), ("user", "a")]),
        ([USER, Message.user("c")], [("user", "a\n\nc")]),
        ([USER, Message.user(""), Message.user("c")], [("user", "a\n\nc")]),
        ([USER, ANSWER, Message.assistant("c"), USER], [("user", "a"), ("assistant", "b\n\nc"), ("user", "a")]),
        ([USER, Message.assistant(""), Message.user("c")], [("user", "a\n\nc")]),
        ([Message.system("s"), USER], [("system", "s"), ("user", "a")]),
    ],
)
def test_messages_of_one_role_become_one(given: list[Message], expected: list[tuple[str, str]]) -> None:
    assert messages(*given) == [{"role": role, "content": content} for role, content in expected]


def test_a_reply_stands_between_a_result_and_a_user_message() -> None:
    expected = [{"role": "user", "content": "a"}, CALL_ITEM, RESULT_ITEM]
    assert messages(USER, CALL, RESULT) == expected
    assert messages(USER, CALL, RESULT, USER) == [*expected, {"role": "assistant", "content": "OK."}, expected[0]]


def test_a_text_and_the_calls_after_it_are_one_reply() -> None:
    assert messages(USER, ANSWER, CALL, RESULT)[1] == CALL_ITEM | {"content": "b"}


def test_images_stay_in_their_places() -> None:
    (item,) = messages(USER, Message.user("c", [IMAGE]), Message.user("d"))
    texts = [{"type": "text", "text": text} for text in "acd"]
    assert item == {"role": "user", "content": [*texts[:2], IMAGE_PART, texts[2]]}


def test_openai_gets_the_transcript_as_it_is() -> None:
    given = [USER, USER, Message.assistant(""), CALL, RESULT, USER]
    roles = [item["role"] for item in messages(*given, roles=ANY_ORDER)]
    assert roles == ["user", "user", "assistant", "assistant", "tool", "user"]


def test_mistral_gets_ids_of_nine_letters() -> None:
    _, call, result = messages(USER, CALL, RESULT, roles=RoleRules(short_call_ids=True))
    made = call["tool_calls"][0]["id"]
    assert (len(made), made.isalnum(), made) == (9, True, result["tool_call_id"])
    assert short_call_id("call_1") == made != short_call_id("call_2")
    assert short_call_id("D681PevKs") == "D681PevKs"
