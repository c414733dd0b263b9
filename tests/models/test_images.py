"""Images: those of tools and users reach the model, in the format of each wire."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx
import pytest

from agentfsm import Agent, Image, RunCompleted
from agentfsm.errors import ProviderError
from agentfsm.loop.messages import Message, Role, ToolCall, Transcript
from agentfsm.loop.model import ModelRequest
from agentfsm.models import ModelSettings
from tests.helpers.fake_model_server import ModelOutput, whole_body
from tests.helpers.model_clients import MODEL_CLASSES, WEATHER, WIRES, build_model, request_error, respond_with
from tests.helpers.npm_servers import AiMock, aimock_server  # noqa: F401  # importing registers the fixture

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
RED = Image.from_bytes(PNG)
BLUE = Image.from_bytes(b"\xff\xd8\xff\xe0 blue")
CALLS = (ToolCall("a", "look", {}), ToolCall("b", "look", {"n": 2}))
LOOKED = [
    Message.user("look"),
    Message.assistant("", CALLS),
    Message(Role.TOOL, "red: [note]", tool_call_id="a", name="look", images=(RED,)),
    Message(Role.TOOL, "blue", tool_call_id="b", name="look", images=(BLUE, RED)),
]


def body(wire: str, messages: list[Message], **settings: Any) -> dict[str, Any]:
    """The request body."""
    model = MODEL_CLASSES[wire]("m", base_url="http://127.0.0.1:9/v1", settings=ModelSettings(**settings))
    sent = json.loads(model._request_body(ModelRequest(messages, tools=(WEATHER,)), stream=False))
    assert isinstance(sent, dict)
    return sent


def url(image: Image) -> str:
    return f"data:{image.media_type};base64,{image.data}"


def test_chat_completions_send_images_in_a_user_message_after_the_last_result() -> None:
    sent = body("openai", [*LOOKED, Message.assistant("seen")])["messages"]
    assert [m["role"] for m in sent] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert sent[5]["content"] == "OK."  # many servers reject a user message right after a result
    assert [sent[n]["content"] for n in (2, 4)] == ["red: [note]", "blue"]  # a tool message accepts text only
    assert sent[6]["content"] == [
        {"type": "text", "text": "From look (call a):"},
        {"type": "image_url", "image_url": {"url": url(RED)}},
        {"type": "text", "text": "From look (call b, image 1 of 2):"},
        {"type": "image_url", "image_url": {"url": url(BLUE)}},
        {"type": "text", "text": "From look (call b, image 2 of 2):"},
        {"type": "image_url", "image_url": {"url": url(RED)}},
    ]


def test_responses_send_images_in_the_call_output() -> None:
    sent = body("responses", LOOKED)["input"]
    image = {"type": "input_image", "detail": "auto"}
    assert [item.get("output") for item in sent[-2:]] == [
        [{"type": "input_text", "text": "red: [note]"}, image | {"image_url": url(RED)}],
        [{"type": "input_text", "text": "blue"}, image | {"image_url": url(BLUE)}, image | {"image_url": url(RED)}],
    ]


def test_anthropic_messages_send_images_in_the_result() -> None:
    def source(image: Image) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": image.media_type, "data": image.data}}

    first, second = body("anthropic", LOOKED)["messages"][-1]["content"]
    assert first["content"] == [{"type": "text", "text": "red: [note]"}, source(RED)]
    assert second["content"] == [{"type": "text", "text": "blue"}, source(BLUE), source(RED)]


def test_anthropic_messages_send_only_text_of_a_failed_call() -> None:
    failed = Message(Role.TOOL, "no", tool_call_id="a", name="look", is_error=True, images=(RED,))
    (result,) = body("anthropic", [*LOOKED[:1], Message.assistant("", CALLS[:1]), failed])["messages"][-1]["content"]
    assert result["is_error"] is True
    assert result["content"] == "no\n[Images are not shown here.]"


def test_ollama_sends_images_with_the_result() -> None:
    sent = body("ollama", LOOKED)["messages"]
    assert [m.get("images") for m in sent] == [None, None, [RED.data], [BLUE.data, RED.data]]


@pytest.mark.parametrize("wire", WIRES)
def test_user_messages_may_contain_images(wire: str) -> None:
    transcript = body(wire, [Message.user("what is this?", [RED])])
    (message,) = transcript["input" if wire == "responses" else "messages"]
    assert message["role"] == "user"
    assert json.dumps(message).count(RED.data) == 1
    assert "what is this?" in json.dumps(message)


@pytest.mark.parametrize("wire", WIRES)
def test_a_model_without_image_support_gets_a_note_instead(wire: str) -> None:
    text = json.dumps(body(wire, LOOKED, images=False))
    assert RED.data not in text
    assert text.count("not shown here") == 2


@pytest.mark.parametrize("wire", WIRES)
def test_requests_without_images_are_unchanged(wire: str) -> None:
    plain = [Message(m.role, m.content, m.tool_calls, m.tool_call_id, m.name) for m in LOOKED]
    text = json.dumps(body(wire, plain))
    assert not any(word in text for word in ("input_text", "image", '"type": "text", "text": "red'))


@pytest.mark.parametrize("wire", WIRES)
def test_encoded_messages_are_unchanged_in_the_next_request(wire: str) -> None:
    """A prompt cache stores a prefix of bytes, images included."""
    model = MODEL_CLASSES[wire]("m", base_url="http://127.0.0.1:9/v1")
    transcript, memo, before = [Message.user("look")], dict[object, object](), b""
    for step in range(4):
        sent = model._request_body(ModelRequest(Transcript(transcript, len(transcript)), cache=memo), stream=False)
        key = b'"input":[' if wire == "responses" else b'"messages":['
        turns = sent[sent.index(key) :].rpartition(b"]")[0]
        assert turns.startswith(before)
        before = turns
        call = ToolCall(f"c{step}", "look", {})
        transcript.append(Message.assistant("", (call,)))
        transcript.append(Message(Role.TOOL, "red", tool_call_id=call.id, name="look", images=(RED,) * (step % 3)))


@pytest.mark.parametrize("wire", WIRES)
def test_old_images_are_removed_with_their_results_when_the_prompt_is_too_long(wire: str) -> None:
    """An image of a tool is sent until the provider reports that the prompt is too long."""
    bodies: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content.decode())
        if len(bodies) == 1:
            return httpx.Response(200, json=whole_body(wire, ModelOutput(calls=(("a", "look", {}),))))
        if len(bodies) < 7:
            return httpx.Response(200, json=whole_body(wire, ModelOutput(calls=((f"a{len(bodies)}", "other", {}),))))
        if len(bodies) == 7:
            error = {"message": "prompt is too long: 9 tokens > 8 maximum", "code": "context_length_exceeded"}
            return httpx.Response(400, json={"error": error})
        return httpx.Response(200, json=whole_body(wire, ModelOutput("done")))

    def look() -> Image:
        """Look."""
        return RED

    def other() -> str:
        """Do something else."""
        return "ok"

    result = asyncio.run(_run(Agent(build_model(wire, handler), tools=[look, other])))
    assert isinstance(result, RunCompleted)
    assert [RED.data in sent for sent in bodies] == [False, True, True, True, True, True, True, False]


async def _run(agent: Agent) -> Any:
    return (await agent.run("go")).outcome


@pytest.mark.parametrize("wire", WIRES)
def test_in_envelope_mode_a_note_replaces_the_image(wire: str) -> None:
    transcript = ['{"kind": "tool_call", "tool_name": "look", "arguments": {}}', '{"kind": "final", "content": "red"}']
    bodies: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content.decode())
        return httpx.Response(200, json=whole_body(wire, ModelOutput(transcript[len(bodies) - 1])))

    def look() -> Image:
        """Look."""
        return RED

    agent = Agent(build_model(wire, handler), tools=[look], preset="feedback")
    assert asyncio.run(_run(agent)).output == "red"
    assert RED.data not in bodies[1]
    assert "[image, image/png, 70 bytes]" in bodies[1]


@pytest.mark.parametrize("wire", WIRES)
def test_a_real_server_accepts_a_transcript_with_images(wire: str, aimock: AiMock) -> None:
    def look() -> list[Any]:
        """Look."""
        return ["here:", RED]

    aimock.script(
        {
            "match": {"turnIndex": 0},
            "response": {"toolCalls": [{"id": "toolu_01", "name": "look", "arguments": {}}]},
        },
        {"match": {"turnIndex": 1}, "response": {"content": "A red dot."}},
    )
    name = "claude-sonnet-4-6" if wire == "anthropic" else "gpt-5-mini"
    at = aimock.openai_url if wire in ("openai", "responses") else aimock.url
    agent = Agent(MODEL_CLASSES[wire](name, base_url=at, api_key=aimock.key), tools=[look])
    assert asyncio.run(_run(agent)).output == "A red dot."


def test_an_error_about_unsupported_images_names_the_setting() -> None:
    body = {"error": {"message": "this model does not support image input"}}
    request = ModelRequest(LOOKED)
    error = request_error(build_model("openai", respond_with(400, body)), request)
    assert isinstance(error, ProviderError)
    assert "ModelSettings(images=False)" in str(error)
    assert "images=False" not in str(
        request_error(build_model("openai", respond_with(400, body)))
    )  # the request had no images


def test_an_image_quoted_in_an_error_is_removed() -> None:
    body = {"error": {"message": f"invalid image: data:image/png;base64,{RED.data}"}}
    text = str(request_error(build_model("openai", respond_with(400, body)), ModelRequest(LOOKED)))
    assert "invalid image: data:image/png;base64,[...]" in text
