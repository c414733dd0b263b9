"""Messages of a chat completions request take turns where the server wants that, and nothing that was said is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from agentfsm.loop.messages import Image, Message, Role, ToolCall
from agentfsm.loop.model import ModelRequest
from agentfsm.models.openai_chat import EXTRA_KEY, encode
from agentfsm.models.providers import PROVIDERS
from agentfsm.models.role_rules import ANY_ORDER, HOSTED_ROLES, TEMPLATE_ROLES, RoleRules, short_call_id
from tests.helpers.model_clients import GOOD_BODIES, build_model, request_reply

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


CALLS = Message.assistant("Let me look.", tuple(ToolCall(name, "look", {}) for name in "xyz"))
RESULTS = [Message(Role.TOOL, f"seen {name}", tool_call_id=name, name="look") for name in "xyz"]


def outline(items: list[dict[str, Any]]) -> list[str]:
    """Who says what: the ids of calls, or the text."""
    calls = ["+".join(call["id"] for call in item.get("tool_calls") or ()) for item in items]
    return [f"{item['role'][0]} {call or item['content']}" for item, call in zip(items, calls, strict=True)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_each_call_of_a_reply_is_a_reply_where_a_template_allows_one(order: tuple[int, ...]) -> None:
    items = messages(USER, CALLS, *(RESULTS[n] for n in order), roles=TEMPLATE_ROLES)
    pairs = [line for n in order for line in (f"a {'xyz'[n]}", f"t seen {'xyz'[n]}")]
    assert outline(items) == ["u a", *pairs]
    assert [item["content"] for item in items if item["role"] == "assistant"] == ["Let me look.", None, None]


def test_hosted_providers_get_the_calls_of_a_reply_together() -> None:
    items = messages(USER, CALLS, *RESULTS, roles=HOSTED_ROLES)
    assert outline(items) == ["u a", "a x+y+z", "t seen x", "t seen y", "t seen z"]


def test_signed_calls_stay_together() -> None:
    """The signature of the first covers the others."""
    signed = [{"extra_content": {"google": {"thought_signature": "c2ln"}}}, None, None]
    extra = {EXTRA_KEY: {"voice": "o", "calls": signed}}
    body = encode(ModelRequest((USER, replace(CALLS, extra=extra), *RESULTS)), "m", origin="o", roles=TEMPLATE_ROLES)
    assert "extra_content" in body["messages"][1]["tool_calls"][0]
    assert outline(body["messages"]) == ["u a", "a x+y+z", "t seen x", "t seen y", "t seen z"]


@pytest.mark.parametrize("name", ["llamacpp", "vllm", "lmstudio"])
def test_servers_of_local_models_get_what_every_template_accepts(name: str) -> None:
    assert PROVIDERS[name].roles == TEMPLATE_ROLES


def test_a_server_that_is_not_known_gets_what_every_template_accepts() -> None:
    sent: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return httpx.Response(200, json=GOOD_BODIES["openai"])

    request_reply(build_model("openai", answer), ModelRequest((USER, CALLS, *RESULTS)))
    expected = ["u a", "a x", "t seen x", "a y", "t seen y", "a z", "t seen z"]
    assert outline(sent[0]["messages"]) == expected


def test_mistral_gets_ids_of_nine_letters() -> None:
    _, call, result = messages(USER, CALL, RESULT, roles=RoleRules(short_call_ids=True))
    made = call["tool_calls"][0]["id"]
    assert (len(made), made.isalnum(), made) == (9, True, result["tool_call_id"])
    assert short_call_id("call_1") == made != short_call_id("call_2")
    assert short_call_id("D681PevKs") == "D681PevKs"
