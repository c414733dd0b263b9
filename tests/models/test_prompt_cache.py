"""Prompt caching needs a stable prefix: each request starts with the previous one."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import httpx
import pytest

from agentfsm import Agent, AgentGuardrails, tool
from agentfsm.errors import ConfigurationError
from agentfsm.loop.messages import Message, Role, ToolCall, Transcript
from agentfsm.loop.model import ModelRequest
from agentfsm.models import AnthropicMessages, ModelSettings, OllamaChat, OpenAIChat, OpenAIResponses
from agentfsm.models.anthropic import encode
from agentfsm.models.http_client import HttpOptions
from tests.helpers.fake_model_server import ModelOutput, whole_body
from tests.helpers.model_clients import WEATHER, WIRES, build_model

MARK = {"cache_control": {"type": "ephemeral"}}


@tool
def look(place: int) -> str:
    """Look somewhere."""
    if place == 3:
        raise ValueError("nothing to see")
    return f"seen {place}"


def bodies_of_a_run(wire: str) -> list[bytes]:
    """The requests of a run: parallel calls, a failing tool, a truncated reply, lessons, and an answer."""
    sent: list[bytes] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(request.content)
        step = len(sent)
        calls = tuple((f"c{step}_{i}", "look", {"place": 2 * step - i}) for i in range(2))
        output = ModelOutput(
            "Thinking about it.", "hm", calls if step < 8 else (), finish="length" if step == 4 else "stop"
        )
        return httpx.Response(200, json=whole_body(wire, output))

    agent = Agent(build_model(wire, handler), tools=[look], instructions="Be brief.", guardrails=AgentGuardrails())
    assert asyncio.run(_ok(agent))
    assert len(sent) == 8
    return sent


async def _ok(agent: Agent) -> bool:
    return (await agent.run("Look around.")).ok


def without_marks(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_marks(v) for k, v in value.items() if k != "cache_control"}
    return [without_marks(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("wire", WIRES)
def test_the_prompt_prefix_is_identical_between_steps(wire: str) -> None:
    """Everything but the last message (which may end with feedback and lessons) is repeated byte for byte."""
    sent = bodies_of_a_run(wire)
    for earlier, later in pairwise(sent):
        same = next((i for i, (a, b) in enumerate(zip(earlier, later, strict=False)) if a != b), len(earlier))
        body = json.loads(earlier)
        turns = body.get("messages") or body["input"]
        steady = turns[:-1] if "context_addendum" in json.dumps(turns[-1]) else turns
        settled = json.dumps(steady, ensure_ascii=False, separators=(",", ":")).encode()[1:-1]
        place = earlier.find(settled)
        assert place > 0
        assert same >= place + len(settled)


def marked(body: dict[str, Any]) -> list[tuple[str, int, int]]:
    """The cache breakpoints: the part of the body, and the position in it."""
    found: list[tuple[str, int, int]] = []
    for part in ("tools", "system"):
        blocks = body.get(part, [])
        found += [
            (part, place, 0)
            for place, block in enumerate(blocks)
            if isinstance(block, dict) and MARK.items() <= block.items()
        ]
    for turn, message in enumerate(body["messages"]):
        found += [
            ("messages", turn, place) for place, block in enumerate(message["content"]) if "cache_control" in block
        ]
    return found


CALL = ToolCall("c1", "weather", {"city": "Paris"})
STEPS = [
    Message.system("Be brief."),
    Message.user("the weather?"),
    Message.assistant("Looking.", (CALL,)),
    Message(Role.TOOL, "sunny", tool_call_id="c1", name="weather"),
]


def test_cache_breakpoints_follow_the_instructions_and_the_stable_messages() -> None:
    for count, marks in (
        (2, [("system", 0, 0), ("messages", 0, 0)]),
        (4, [("system", 0, 0), ("messages", 0, 0), ("messages", 2, 0)]),
    ):
        request = ModelRequest(Transcript(STEPS, count), tools=(WEATHER,))
        assert marked(encode(request, "m", cache_ttl="5m")) == marks


def test_messages_of_one_request_only_come_after_the_last_breakpoint() -> None:
    feedback = Message.user("<context_addendum>lessons</context_addendum>")
    request = ModelRequest(Transcript(STEPS, 4, (feedback,)), tools=(WEATHER,))
    body = encode(request, "m", cache_ttl="5m")
    last = body["messages"][-1]["content"]
    assert [block["type"] for block in last] == ["tool_result", "text"]
    assert "cache_control" in last[0]
    assert "cache_control" not in last[1]


def test_the_cache_breakpoint_of_one_step_is_in_the_next_request() -> None:
    long = [
        *STEPS,
        Message.assistant("", (ToolCall("c2", "weather", {}),)),
        Message(Role.TOOL, "wet", tool_call_id="c2"),
    ]
    before = marked(encode(ModelRequest(Transcript(long, 4), tools=(WEATHER,)), "m", cache_ttl="5m"))
    after = marked(encode(ModelRequest(Transcript(long, 6), tools=(WEATHER,)), "m", cache_ttl="5m"))
    assert before[-1] in after
    assert len(after) <= 4


def test_without_instructions_the_tools_have_the_breakpoint() -> None:
    request = ModelRequest(STEPS[1:2], tools=(WEATHER, WEATHER))
    assert marked(encode(request, "m", cache_ttl="5m"))[0] == ("tools", 1, 0)
    assert marked(encode(ModelRequest(STEPS[1:2]), "m", cache_ttl="5m")) == [("messages", 0, 0)]


def test_thinking_gets_no_cache_breakpoint() -> None:
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "x"}]
    thought = Message(Role.ASSISTANT, "", extra={"anthropic": {"voice": "me", "blocks": blocks}})
    body = encode(ModelRequest([*STEPS, thought]), "m", cache_ttl="5m", origin="me")
    assert body["messages"][-1]["content"] == blocks
    assert ("messages", 2, 0) in marked(body)
    assert all("cache_control" not in block for block in body["messages"][-1]["content"])


def test_cache_breakpoints_change_nothing_else() -> None:
    request = ModelRequest(Transcript(STEPS, 4), tools=(WEATHER,))
    plain, cached = encode(request, "m"), encode(request, "m", cache_ttl="1h")
    assert cached["system"][0]["cache_control"] == {"type": "ephemeral", "ttl": "1h"}
    bare = without_marks(cached)
    assert bare.pop("system") == [{"type": "text", "text": plain.pop("system")}]
    assert bare == plain


@pytest.mark.parametrize(
    ("base_url", "setting", "marks"),
    [
        (None, None, True),
        (None, "off", False),
        ("https://api.anthropic.com", "1h", True),
        ("http://127.0.0.1:9", None, False),
        ("http://127.0.0.1:9", "5m", True),
    ],
)
def test_cache_breakpoints_are_sent_to_anthropic_itself_and_elsewhere_on_request(
    base_url: str | None, setting: Any, marks: bool
) -> None:
    sent: list[bytes] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(request.content)
        return httpx.Response(200, json=whole_body("anthropic", ModelOutput("hi")))

    http = HttpOptions(transport=httpx.MockTransport(handler))
    settings = ModelSettings(prompt_cache=setting)
    model = AnthropicMessages("m", base_url=base_url, api_key="k" * 20, settings=settings, http=http)
    asyncio.run(model.reply(ModelRequest(STEPS)))
    assert (b"cache_control" in sent[0]) is marks


@pytest.mark.parametrize("wire", [OpenAIChat, OpenAIResponses, OllamaChat])
def test_wires_with_automatic_caching_reject_prompt_cache(wire: Any) -> None:
    with pytest.raises(ConfigurationError, match="prompt_cache"):
        wire("m", base_url="http://127.0.0.1:9/v1", settings=ModelSettings(prompt_cache="1h"))
    wire("m", base_url="http://127.0.0.1:9/v1", settings=ModelSettings(prompt_cache="off"))
