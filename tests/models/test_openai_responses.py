"""The responses API: encoding of requests and decoding of responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm.errors import ConfigurationError, ProviderError, TransientProviderError
from agentfsm.loop.messages import FinishReason, Message, Role, ToolCall, Usage
from agentfsm.loop.model import ModelRequest
from agentfsm.models import ModelSettings, OpenAIResponses
from agentfsm.models.http_client import HttpOptions
from agentfsm.models.openai_responses import decode, encode
from tests.helpers.model_clients import GOOD_BODIES, REQUEST, WEATHER
from tests.models.test_openai_chat import CLOSED, json_values

PARIS = ToolCall("call_a", "weather", {"city": "Paris"})
SEALED = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "xyz", "status": "completed"}


def answered(*items: dict[str, Any], status: str = "completed", **top: object) -> dict[str, Any]:
    return {"id": "resp_1", "status": status, "output": list(items), "model": "m-1", **top}


def text_item(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def call(arguments: object, call_id: object = "call_a", name: object = "weather") -> dict[str, Any]:
    return {"type": "function_call", "id": "fc_1", "call_id": call_id, "name": name, "arguments": arguments}


def test_a_conversation_is_sent_as_items_without_storage() -> None:
    body = encode(
        ModelRequest(
            (
                Message.system("be brief"),
                Message.user("weather?"),
                Message.assistant("Looking.", (PARIS,)),
                Message(Role.TOOL, "sunny", tool_call_id="call_a", name="weather"),
                Message(Role.TOOL, "[TOOL ERROR] no"),
                Message.assistant("sunny"),
            )
        ),
        "m",
    )
    assert body == {
        "model": "m",
        "store": False,
        "input": [
            {"type": "message", "role": "system", "content": "be brief"},
            {"type": "message", "role": "user", "content": "weather?"},
            {"type": "message", "role": "assistant", "content": "Looking."},
            {"type": "function_call", "call_id": "call_a", "name": "weather", "arguments": '{"city":"Paris"}'},
            {"type": "function_call_output", "call_id": "call_a", "output": "sunny"},
            {
                "type": "message",
                "role": "user",
                "content": "Feedback on your last message:\n<feedback>\n[TOOL ERROR] no\n</feedback>",
            },
            {"type": "message", "role": "assistant", "content": "sunny"},
        ],
    }


def test_settings_tools_and_schema_are_sent_in_the_format_of_the_api() -> None:
    settings = ModelSettings(
        temperature=0, top_p=0.5, reasoning_effort="low", tool_choice="weather", max_tokens=9, extra_body={"user": "x"}
    )
    body = encode(ModelRequest(REQUEST.messages, tools=(WEATHER,)), "m", settings)
    del body["input"]
    tool = {"type": "function", "name": "weather", "description": "Tells the weather.", "strict": False}
    assert body == {
        "model": "m",
        "store": False,
        "tools": [tool | {"parameters": dict(WEATHER.parameters)}],
        "tool_choice": {"type": "function", "name": "weather"},
        "max_output_tokens": 9,
        "temperature": 0.0,
        "top_p": 0.5,
        "reasoning": {"effort": "low"},
        "user": "x",
    }
    schema = encode(ModelRequest(REQUEST.messages, output_schema=CLOSED, output_name="my answer"), "m")["text"]
    assert schema == {"format": {"type": "json_schema", "name": "my_answer", "schema": CLOSED, "strict": True}}


def test_the_limit_of_the_request_overrides_the_settings() -> None:
    request = ModelRequest(REQUEST.messages, max_output_tokens=77)
    assert encode(request, "m", ModelSettings(max_tokens=9))["max_output_tokens"] == 77


@pytest.mark.parametrize("wrong", [{"seed": 1}, {"stop": ("END",)}])
def test_an_unsupported_setting_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        OpenAIResponses("m", base_url="http://127.0.0.1:9/v1", settings=ModelSettings(**wrong))


@pytest.mark.parametrize("wrong", ["input", "instructions", "tools", "stream"])
def test_reserved_fields_are_rejected_in_extra_body(wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        ModelSettings(extra_body={wrong: 1})


def test_encrypted_reasoning_is_requested_from_openai_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, json=GOOD_BODIES["responses"])

    monkeypatch.setenv("OPENAI_API_KEY", "k" * 20)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    http = HttpOptions(transport=httpx.MockTransport(handler))
    asyncio.run(OpenAIResponses("m", http=http).reply(REQUEST))
    asyncio.run(OpenAIResponses("m", base_url="http://127.0.0.1:9/v1", http=http).reply(REQUEST))
    own, other = (json.loads(request.content) for request in sent)
    assert str(sent[0].url) == "https://api.openai.com/v1/responses"
    assert own["include"] == ["reasoning.encrypted_content"]
    assert "include" not in other


def test_a_text_reply_with_its_usage() -> None:
    usage = {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 64},
        "output_tokens": 50,
        "output_tokens_details": {"reasoning_tokens": 30},
    }
    reply = decode(answered(text_item("hi"), usage=usage))
    assert reply.message == Message.assistant("hi")
    assert reply.finish_reason is FinishReason.STOP
    assert reply.usage == Usage(input_tokens=100, output_tokens=50, cached_tokens=64, reasoning_tokens=30)
    assert reply.model == "m-1"


def test_encrypted_reasoning_is_sent_back_before_its_calls_and_without_its_id() -> None:
    """https://github.com/github/copilot-sdk/issues/615"""
    reply = decode(answered(SEALED, text_item("Looking."), call('{"city": "Paris"}')))
    items = encode(ModelRequest((Message.user("x"), reply.message)), "m")["input"]
    assert items[1] == {"type": "reasoning", "summary": [], "encrypted_content": "xyz"}
    assert [item.get("type") for item in items[2:]] == ["message", "function_call"]


def test_reasoning_that_is_not_encrypted_or_has_no_call_is_not_stored() -> None:
    assert decode(answered(SEALED, text_item("hi"))).message.extra is None
    open_ = {k: v for k, v in SEALED.items() if k != "encrypted_content"}
    assert decode(answered(open_, call("{}"))).message.extra is None


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"city": "Paris"}', {"city": "Paris"}),
        ({"city": "Paris"}, {"city": "Paris"}),
        ("", {}),
        (None, {}),
        ("null", {}),
    ],
)
def test_arguments_come_as_text_object_or_nothing(arguments: object, parsed: dict[str, Any]) -> None:
    reply = decode(answered(call(arguments)))
    assert reply.message.tool_calls == (ToolCall("call_a", "weather", parsed),)
    assert reply.finish_reason is FinishReason.TOOL_CALLS


def test_missing_or_repeated_ids_are_replaced() -> None:
    items = [call("{}", None) | {"id": None}, call("{}", "b"), call("{}", "b"), call("{}", "old")]
    found = [c.id for c in decode(answered(*items), used_ids={"old"}).message.tool_calls]
    assert found == ["call_1", "b", "call_2", "call_3"]


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("max_output_tokens", FinishReason.LENGTH),
        ("content_filter", FinishReason.CONTENT_FILTER),
        (None, FinishReason.LENGTH),
    ],
)
def test_an_incomplete_response_has_its_reason(why: str | None, reason: FinishReason) -> None:
    body = answered(text_item("Once upon"), status="incomplete", incomplete_details={"reason": why})
    assert decode(body).finish_reason is reason
    body = answered(call('{"city": "Pa'), status="incomplete", incomplete_details={"reason": why})
    assert decode(body).finish_reason is reason


def test_a_refusal_keeps_the_models_text() -> None:
    item = {"type": "message", "content": [{"type": "refusal", "refusal": "I can't."}]}
    reply = decode(answered(item))
    assert (reply.finish_reason, reply.refusal, reply.message.content) == (FinishReason.REFUSAL, "I can't.", "I can't.")


@pytest.mark.parametrize("status", ["failed", "cancelled", "queued", "in_progress"])
def test_an_unfinished_response_is_transient(status: str) -> None:
    with pytest.raises(TransientProviderError):
        decode(answered(status=status))


@pytest.mark.parametrize("body", [None, [], {}, {"output": None}, {"output": "x"}])
def test_a_body_without_output_is_a_provider_error(body: object) -> None:
    with pytest.raises(ProviderError):
        decode(body)


@given(json_values, json_values, st.lists(json_values, max_size=3))
def test_any_body_is_decoded_or_rejected_with_our_error(content: object, arguments: object, items: list[Any]) -> None:
    body = answered({"type": "message", "content": content}, call(arguments, arguments, content), *items, usage=content)
    reply = decode(body)
    again = encode(ModelRequest((Message.user("x"), reply.message)), "m")
    assert json.loads(json.dumps(again)) == again
