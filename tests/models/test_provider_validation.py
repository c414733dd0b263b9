"""However a run ended, its requests and those of the next run are valid by the providers' own types and rules."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from agentfsm import Agent, Allow, Deny, Edit, Host, Image, Message, RunResult, ToolStarted, UserInputRequested, tool
from agentfsm.loop.model import ModelRequest
from agentfsm.models import ModelSettings
from agentfsm.models.http_client import HttpOptions
from agentfsm.testing import FakeClock
from tests.helpers.fake_model_server import ModelOutput, whole_body
from tests.helpers.model_clients import MODEL_CLASSES, WEATHER, WIRES, AnyModel
from tests.helpers.provider_rules import request_errors, show_body
from tests.helpers.scenarios import await_run

CALLS: tuple[tuple[str, str, dict[str, Any]], ...] = (("toolu_1", "send", {"to": "ann"}), ("toolu_2", "look", {}))
SAID: dict[str, list[ModelOutput]] = {
    "two calls": [ModelOutput("Let me see.", "hm", CALLS), ModelOutput("done")],
    "the same id again": [ModelOutput("", "", CALLS[:1]), ModelOutput("", "", CALLS[:1]), ModelOutput("done")],
    "a name of its own": [ModelOutput("", "", (("", "foo.bar baz", {"x": None}),)), ModelOutput("done")],
    "cut off": [ModelOutput("", "", CALLS[:1], finish="length"), ModelOutput("done")],
    "cut off in words": [ModelOutput("Once upon", finish="length"), ModelOutput("done")],
    "nothing": [ModelOutput(), ModelOutput(" \n"), ModelOutput("done")],
    "asks": [ModelOutput("", "", (("toolu_4", "ask_user", {"question": "Which?"}), *CALLS)), ModelOutput("done")],
}


class Wire:
    """A model of one wire on a transport that records the requests."""

    def __init__(self, wire: str, outputs: list[ModelOutput]) -> None:
        self.wire, self.bodies = wire, list[dict[str, Any]]()
        self._outputs = iter(outputs)
        http = HttpOptions(transport=httpx.MockTransport(self._answer))
        name = "claude-sonnet-4-6" if wire == "anthropic" else "gpt-5-mini"
        made = ModelSettings(top_p=0.5, max_tokens=500) if wire != "anthropic" else ModelSettings(max_tokens=500)
        self.model: AnyModel = MODEL_CLASSES[wire](
            name, base_url="http://127.0.0.1:9/v1", api_key="k" * 20, settings=made, http=http
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(request.content))
        output = next(self._outputs, ModelOutput("done"))
        if self.wire == "openai":  # OpenAI's own chat completions contain no reasoning
            output = replace(output, thought="")
        return httpx.Response(200, json=whole_body(self.wire, output))

    def check(self, requests: int) -> None:
        assert len(self.bodies) == requests
        for body in self.bodies:
            found = request_errors(self.wire, body)
            assert not found, "\n".join([*found, show_body(body)])


@tool(requires_approval=True)
def send(to: str) -> str:
    """Send a letter."""
    return f"sent to {to}"


def look() -> list[Any]:
    """Look."""
    return ["", Image.from_bytes(b"GIF89a...")]


reached: list[asyncio.Event] = []


async def hang() -> str:
    """Hang."""
    for event in reached:
        event.set()
    await asyncio.Event().wait()
    return ""


def agent_of(wire: Wire, **more: Any) -> Agent:
    host = Host(secret=b"x", clock=FakeClock())
    return Agent(wire.model, tools=[send, look, hang], host=host, instructions="Be brief.", **more)


def both(wire: str, outputs: list[ModelOutput], go: Callable[[Agent], Any], **more: Any) -> tuple[Wire, RunResult]:
    kept = Wire(wire, outputs)
    return kept, asyncio.run(go(agent_of(kept, **more)))


async def _next(agent: Agent, result: RunResult) -> RunResult:
    return await agent.run("Never mind. What now?", message_history=result.messages)


# -- the five endings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
def test_suspended(wire: str) -> None:
    async def go(agent: Agent) -> RunResult:
        first = await agent.run("go")
        assert isinstance(first.outcome, UserInputRequested)
        return await _next(agent, first)

    kept, result = both(wire, SAID["two calls"], go)
    assert result.output == "done"
    kept.check(2)


@pytest.mark.parametrize("answer", [Allow(), Deny("no"), Edit({"to": "bob"})], ids=["approved", "denied", "edited"])
@pytest.mark.parametrize("wire", WIRES)
def test_approved_and_denied(wire: str, answer: Any) -> None:
    async def go(agent: Agent) -> RunResult:
        first = await agent.run("go")
        assert isinstance(first.outcome, UserInputRequested)
        result = await agent.resume(first.outcome.suspension_record.to_json(), answer)
        return await _next(agent, result)

    kept, result = both(wire, SAID["two calls"], go)
    assert result.output == "done"
    kept.check(3)


@pytest.mark.parametrize("case", ["cut off", "cut off in words"])
@pytest.mark.parametrize("wire", WIRES)
def test_truncated(wire: str, case: str) -> None:
    async def go(agent: Agent) -> RunResult:
        return await _next(agent, await agent.run("go"))

    kept, result = both(wire, SAID[case], go)
    assert result.output == "done"
    kept.check(3)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("watched", [True, False])
def test_cancelled(wire: str, watched: bool) -> None:
    async def go(agent: Agent) -> RunResult:
        run = agent.run("go")
        if watched:
            async for event in run:
                if isinstance(event, ToolStarted) and event.call.name == "look":
                    run.cancel("enough")
            return await _next(agent, await run)
        reached[:] = [asyncio.Event()]
        over = asyncio.create_task(await_run(run))
        await reached[0].wait()
        run.cancel("enough")
        return await _next(agent, await over)

    kept, result = both(wire, [ModelOutput("", "hm", (CALLS[1], ("toolu_3", "hang", {}))), ModelOutput("done")], go)
    assert result.output == "done"
    kept.check(2)


# -- other runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["a name of its own", "nothing"])
@pytest.mark.parametrize("wire", WIRES)
def test_recorded_requests_are_valid(wire: str, case: str) -> None:
    async def go(agent: Agent) -> RunResult:
        return await _next(agent, await agent.run("go"))

    kept, _ = both(wire, SAID[case], go)
    kept.check(len(kept.bodies))
    assert len(kept.bodies) >= 3


@pytest.mark.parametrize("wire", WIRES)
def test_a_question_and_its_answer(wire: str) -> None:
    async def go(agent: Agent) -> RunResult:
        first = await agent.run("go")
        assert isinstance(first.outcome, UserInputRequested)
        return await agent.resume(first.outcome.suspension_record, "the second")

    done = ModelOutput("", "", (("toolu_9", "return_done", {"output": "x"}),))
    kept, result = both(wire, [*SAID["asks"][:1], done], go, preset="funnel")
    assert result.output == "x"
    kept.check(2)


@pytest.mark.parametrize("wire", WIRES)
def test_a_repeated_call_id_and_images_of_a_user(wire: str) -> None:
    async def go(agent: Agent) -> RunResult:
        first = await agent.run("go", message_history=[Message.user("see", [Image.from_bytes(b"GIF89a")])])
        assert isinstance(first.outcome, UserInputRequested)
        second = await agent.resume(first.outcome.suspension_record, Allow())
        assert isinstance(second.outcome, UserInputRequested)
        return await agent.resume(second.outcome.suspension_record, Deny("no"))

    kept, result = both(wire, SAID["the same id again"], go)
    assert result.output == "done"
    kept.check(3)


# -- the rules themselves ------------------------------------------------------------------------------------------

BAD: dict[str, list[Callable[[dict[str, Any]], Any]]] = {
    "openai": [
        lambda b: b["messages"].pop(3),
        lambda b: b["messages"][3].update(tool_call_id="zz"),
        lambda b: b["messages"][0].update(role="boss"),
        lambda b: b["messages"][1].update(images=[]),
        lambda b: b["messages"][3].update(content=[{"type": "image_url", "image_url": {"url": "x"}}]),
    ],
    "responses": [
        lambda b: b["input"].pop(-1),
        lambda b: b["input"].pop(-2),
        lambda b: b["input"][0].update(role="boss"),
        lambda b: b["input"][0].update(stuff=1),
    ],
    "anthropic": [
        lambda b: b["messages"].pop(2),
        lambda b: b["messages"].pop(0),
        lambda b: b["messages"][0].update(role="boss"),
        lambda b: b["messages"][2]["content"][0].update(tool_use_id="zz"),
        lambda b: b["messages"][0]["content"][0].update(text=" "),
    ],
    "ollama": [
        lambda b: b["messages"].pop(3),
        lambda b: b["messages"][0].update(role="boss"),
        lambda b: b["messages"][1].update(content=[]),
        lambda b: b["messages"][1].update(stuff=1),
    ],
}


@pytest.mark.parametrize(("wire", "number"), [(wire, n) for wire, all_ in BAD.items() for n in range(len(all_))])
def test_an_invalid_body_is_rejected(wire: str, number: int) -> None:
    async def go(agent: Agent) -> RunResult:
        return await agent.run("go")

    kept, _ = both(wire, [ModelOutput("", "", CALLS[1:]), ModelOutput("done")], go)
    body = kept.bodies[-1]
    assert request_errors(wire, body) == []
    BAD[wire][number](body)
    assert request_errors(wire, body) != []


# -- settings ------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "all": [
        {"max_tokens": 7},
        *({"reasoning_effort": effort} for effort in ("low", "medium", "high", "xhigh", "max")),
    ],
    "openai": [
        {"temperature": 1.5, "top_p": 0.5},
        {"stop": ("a", "b")},
        {"seed": 3},
        *({"tool_choice": choice} for choice in ("auto", "none", "required", "weather")),
        *({"reasoning_effort": effort} for effort in ("none", "minimal")),
    ],
    "responses": [
        {"temperature": 1.5, "top_p": 0.5},
        *({"tool_choice": choice} for choice in ("auto", "none", "required", "weather")),
        *({"reasoning_effort": effort} for effort in ("none", "minimal")),
    ],
    "anthropic": [  # temperature and top_p are for its older models, and no longer in its types
        {"stop": ("a", "b")},
        *({"tool_choice": choice} for choice in ("auto", "none", "required", "weather")),
        *({"prompt_cache": time} for time in ("5m", "1h", "off")),
    ],
    "ollama": [
        {"temperature": 1.5, "top_p": 0.5, "seed": 3, "stop": ("a",), "max_tokens": 5},
        *({"reasoning_effort": effort} for effort in ("none", "minimal")),
    ],
}
CLOSED = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("schema", [None, CLOSED, {"type": "array", "items": {"type": "integer"}}])
@pytest.mark.parametrize("wire", WIRES)
def test_every_setting_is_sent_in_the_format_of_the_api(wire: str, schema: dict[str, Any] | None) -> None:
    for settings in [{}, *SETTINGS["all"], *SETTINGS[wire]]:
        for home in (True, False):
            model = MODEL_CLASSES[wire](
                "m",
                base_url=None if home else "http://127.0.0.1:9/v1",
                api_key="k" * 20,
                settings=ModelSettings(**settings),
            )
            for tools in ((), (WEATHER,)):
                request = ModelRequest((Message.system("x"), Message.user("y")), tools=tools, output_schema=schema)
                for stream in (True, False):
                    body = json.loads(model._request_body(request, stream=stream))
                    found = request_errors(wire, body)
                    assert not found, (settings, home, found, show_body(body))
