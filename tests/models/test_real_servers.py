"""Every wire, whole and streamed, against a server that nobody here wrote."""

from __future__ import annotations

import asyncio

import pytest

from agentfsm.core.messages import FinishReason, Message, Reply, Role, Usage
from agentfsm.core.model import ModelRequest
from agentfsm.errors import ModelError, ProviderError, TransientProviderError
from agentfsm.models import ModelSettings, resolve
from tests.models.aimock import AiMock, aimock_server  # noqa: F401  # the import makes the fixture known
from tests.models.helpers import CLASSES, WEATHER, AnyModel, ask, failure

WIRES = ["openai", "responses", "anthropic", "ollama"]
ASKED = ModelRequest((Message.system("Be brief."), Message.user("the weather in Paris?")), tools=(WEATHER,))

USAGE = {"prompt_tokens": 20, "completion_tokens": 6, "input_tokens": 20, "output_tokens": 6}
"""Both wires' words for the same; the server passes on those that its wire has."""


def model(wire: str, aimock: AiMock, *, api_key: str | None = None, settings: ModelSettings | None = None) -> AnyModel:
    at_v1 = wire in ("openai", "responses")
    name = "claude-sonnet-4-6" if wire == "anthropic" else "gpt-5-mini"
    url = aimock.openai_url if at_v1 else aimock.url
    return CLASSES[wire](name, base_url=url, api_key=api_key or aimock.key, settings=settings)


@pytest.mark.parametrize("wire", WIRES)
def test_a_call_its_result_and_the_answer_go_round(wire: str, aimock: AiMock) -> None:
    aimock.script(
        {
            "match": {"userMessage": "weather in Paris", "systemMessage": "Be brief", "hasToolResult": False},
            "response": {"toolCalls": [{"id": "toolu_01", "name": "weather", "arguments": {"city": "Paris"}}]},
        },
        {
            "match": {"toolCallId": "toolu_01", "toolResultContains": "sunny"},
            "response": {"content": "It is sunny in Paris.", "usage": USAGE},
        },
    )

    async def talk() -> tuple[Reply, Reply]:
        speaker = model(wire, aimock, settings=ModelSettings(temperature=0, max_tokens=300))
        first = await speaker.reply(ASKED)
        result = Message(Role.TOOL, "sunny, 21 degrees", tool_call_id=first.message.tool_calls[0].id, name="weather")
        request = ModelRequest((*ASKED.messages, first.message, result), tools=(WEATHER,), max_output_tokens=100)
        second = await speaker.reply(request)
        await speaker.aclose()
        return first, second

    first, second = asyncio.run(talk())
    (call,) = first.message.tool_calls
    assert (call.name, call.arguments, call.malformed) == ("weather", {"city": "Paris"}, None)
    assert first.finish_reason is FinishReason.TOOL_CALLS
    assert second.message == Message.assistant("It is sunny in Paris.")
    assert second.finish_reason is FinishReason.STOP
    assert second.usage == Usage(input_tokens=20, output_tokens=6)


@pytest.mark.parametrize("wire", WIRES)
def test_two_calls_at_once_and_their_results_go_round(wire: str, aimock: AiMock) -> None:
    towns = ["Paris", "Rome"]
    calls = [{"name": "weather", "arguments": {"city": town}} for town in towns]
    aimock.script(
        {"match": {"turnIndex": 0}, "response": {"content": "Looking.", "toolCalls": calls}},
        {"match": {"turnIndex": 1}, "response": {"content": "Sunny and wet."}},
    )
    first = ask(model(wire, aimock), ASKED)
    assert first.message.content == "Looking."
    assert [call.arguments["city"] for call in first.message.tool_calls] == towns
    results = [
        Message(Role.TOOL, "sunny", tool_call_id=first.message.tool_calls[0].id, name="weather"),
        Message(Role.TOOL, "", tool_call_id=first.message.tool_calls[1].id, name="weather", is_error=True),
    ]
    again = ModelRequest((*ASKED.messages, first.message, *results, Message.user("go on")), tools=(WEATHER,))
    assert ask(model(wire, aimock), again).message.content == "Sunny and wet."
    roles = [message["role"] for message in aimock.requests()[-1]["messages"]]
    assert sorted(roles) == ["assistant", "system", "tool", "tool", "user", "user"]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("status", "retry_after", "kind"),
    [(429, 7, TransientProviderError), (500, None, TransientProviderError), (400, None, ProviderError)],
)
def test_a_failure_has_its_kind_and_its_wait(
    wire: str, status: int, retry_after: int | None, kind: type[ModelError], aimock: AiMock
) -> None:
    wait = {} if retry_after is None else {"retryAfter": retry_after}
    response = {"error": {"message": "not now", "type": "some_error"}, "status": status, **wait}
    aimock.script({"match": {}, "response": response})
    error = failure(model(wire, aimock), ASKED)
    assert type(error) is kind
    assert (error.status, error.retry_after_s) == (status, retry_after)
    assert "not now" in str(error)


@pytest.mark.parametrize("wire", WIRES)
def test_a_wrong_key_is_refused_and_not_shown(wire: str, aimock: AiMock) -> None:
    aimock.script({"match": {}, "response": {"content": "hi"}})
    error = failure(model(wire, aimock, api_key="sk-wrong-0123456789"), ASKED)
    assert type(error) is ProviderError
    assert error.status == 401
    assert "api_key" in str(error)
    assert "sk-wrong" not in str(error)


@pytest.mark.parametrize("wire", WIRES)
def test_an_answer_cut_off_is_said_to_be(wire: str, aimock: AiMock) -> None:
    cut = "max_tokens" if wire == "anthropic" else "length"
    aimock.script({"match": {}, "response": {"content": "Once upon", "finishReason": cut}})
    assert ask(model(wire, aimock), ASKED).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("name", ["openai:gpt-5-mini", "claude-sonnet-4-6"])
def test_the_environment_alone_is_enough(name: str, aimock: AiMock, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in aimock.environ.items():
        monkeypatch.setenv(variable, value)
    aimock.script({"match": {"userMessage": "weather"}, "response": {"content": "hi"}})
    speaker = resolve(name)
    assert asyncio.run(speaker.reply(ASKED)).message.content == "hi"
