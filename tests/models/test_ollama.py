"""Ollama's native API: encoding of requests and decoding of responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfsm.errors import ConfigurationError, ContextOverflowError, ProviderError
from agentfsm.loop.messages import FinishReason, Message, Role, ToolCall, Usage
from agentfsm.loop.model import ModelRequest
from agentfsm.models import ModelSettings, OllamaChat, resolve
from agentfsm.models.http_client import HttpOptions
from agentfsm.models.ollama import decode, encode
from tests.helpers.model_clients import GOOD_BODIES, REQUEST, WEATHER, build_model, request_error, respond_with
from tests.models.test_openai_chat import CLOSED, json_values

PARIS = ToolCall("call_1", "weather", {"city": "Paris"})


def answered(message: dict[str, Any], **top: object) -> dict[str, Any]:
    return {"model": "m-1", "message": {"role": "assistant"} | message, "done": True, "done_reason": "stop", **top}


def test_a_conversation_is_sent_as_messages_with_roles() -> None:
    """Arguments are an object here, and a result names its tool (https://docs.ollama.com/capabilities/tool-calling)."""
    messages = encode(
        ModelRequest(
            (
                Message.system("be brief"),
                Message.user("weather?"),
                Message.assistant("", (PARIS,)),
                Message(Role.TOOL, "sunny", tool_call_id="call_1", name="weather"),
                Message(Role.TOOL, "[TOOL ERROR] no"),
                Message.assistant("sunny"),
            )
        ),
        "m",
    )["messages"]
    assert messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_1", "function": {"name": "weather", "arguments": {"city": "Paris"}}}],
        },
        {"role": "tool", "content": "sunny", "tool_name": "weather", "tool_call_id": "call_1"},
        {"role": "user", "content": "Feedback on your last message:\n<feedback>\n[TOOL ERROR] no\n</feedback>"},
        {"role": "assistant", "content": "sunny"},
    ]


def test_settings_are_merged_with_options_in_extra_body() -> None:
    settings = ModelSettings(
        temperature=0,
        seed=7,
        stop=("END",),
        max_tokens=9,
        reasoning_effort="minimal",
        extra_body={"options": {"num_ctx": 32768, "seed": 8}, "keep_alive": "1h"},
    )
    body = encode(REQUEST, "m", settings)
    del body["messages"]
    assert body == {
        "model": "m",
        "options": {"temperature": 0.0, "seed": 8, "stop": ["END"], "num_predict": 9, "num_ctx": 32768},
        "think": "low",
        "keep_alive": "1h",
    }


def test_a_format_is_sent_only_without_tools() -> None:
    assert encode(ModelRequest(REQUEST.messages, output_schema=CLOSED), "m")["format"] == CLOSED
    assert "format" not in encode(ModelRequest(REQUEST.messages, tools=(WEATHER,), output_schema=CLOSED), "m")


@pytest.mark.parametrize(("effort", "think"), [("none", False), ("low", "low"), ("medium", "medium"), ("max", "high")])
def test_reasoning_effort_is_sent_in_the_format_of_the_api(effort: Any, think: object) -> None:
    assert encode(REQUEST, "m", ModelSettings(reasoning_effort=effort))["think"] == think


@pytest.mark.parametrize("wrong", [{"tool_choice": "required"}, {"extra_body": {"options": 3}}])
def test_an_unsupported_setting_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        OllamaChat("m", settings=ModelSettings(**wrong))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        (None, "http://127.0.0.1:11434/api/chat"),
        ("0.0.0.0", "http://127.0.0.1:11434/api/chat"),
        ("box:9", "http://box:9/api/chat"),
        ("https://box/ollama", "https://box/ollama/api/chat"),
    ],
)
def test_the_address_comes_from_ollama_host(host: str | None, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url).replace(":443/", "/"))
        return httpx.Response(200, json=GOOD_BODIES["ollama"])

    monkeypatch.delenv("OLLAMA_HOST", raising=False)
    if host is not None:
        monkeypatch.setenv("OLLAMA_HOST", host)
    model = OllamaChat("m", http=HttpOptions(transport=httpx.MockTransport(handler)))
    asyncio.run(model.reply(REQUEST))
    assert asked == [url]


def test_the_address_of_the_compatible_api_is_accepted() -> None:
    for base_url in ("http://box:9", "http://box:9/v1", "http://box:9/v1/"):
        assert "base_url='http://box:9'" in repr(resolve("ollama:m", base_url=base_url))


def test_calls_without_ids_get_generated_ones() -> None:
    functions = [{"function": {"name": "weather", "arguments": {"city": town}}} for town in ("Paris", "Rome")]
    reply = decode(answered({"content": "", "tool_calls": functions}), used_ids={"call_1"})
    assert [(c.id, c.arguments) for c in reply.message.tool_calls] == [
        ("call_2", {"city": "Paris"}),
        ("call_3", {"city": "Rome"}),
    ]
    assert reply.finish_reason is FinishReason.TOOL_CALLS


def test_usage_finish_reason_and_reasoning_are_read() -> None:
    reply = decode(
        answered({"content": "Once", "thinking": "hm"}, done_reason="length", prompt_eval_count=9, eval_count=4)
    )
    assert reply.finish_reason is FinishReason.LENGTH
    assert reply.usage == Usage(input_tokens=9, output_tokens=4)
    assert reply.message == Message.assistant("Once")
    call = {"function": {"name": "weather", "arguments": {}}}
    thoughtful = decode(answered({"content": "", "thinking": "hm", "tool_calls": [call]})).message
    assert encode(ModelRequest((thoughtful,)), "m")["messages"][0]["thinking"] == "hm"


@pytest.mark.parametrize(
    ("status", "words", "kind"),
    [
        (404, "model 'm' not found", ProviderError),
        (400, "m does not support tools", ProviderError),
        (400, "input length exceeds maximum context length", ContextOverflowError),
    ],
)
def test_error_responses_are_read(status: int, words: str, kind: type) -> None:
    error = request_error(build_model("ollama", respond_with(status, {"error": words})))
    assert type(error) is kind
    assert words[:12] in str(error)


@pytest.mark.parametrize("body", [None, [], {}, {"message": None}, {"done": True}])
def test_a_body_without_a_message_is_a_provider_error(body: object) -> None:
    with pytest.raises(ProviderError):
        decode(body)


@given(json_values, json_values, st.lists(json_values, max_size=3))
def test_any_body_is_decoded_or_rejected_with_our_error(content: object, arguments: object, calls: list[Any]) -> None:
    call = {"id": content, "function": {"name": content, "arguments": arguments}}
    reply = decode(answered({"content": content, "thinking": content, "tool_calls": [call, *calls]}))
    again = encode(ModelRequest((Message.user("x"), reply.message)), "m")
    assert json.loads(json.dumps(again)) == again
