"""Reasoning is sent back only to the model and server that it came from."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from agentfsm import Agent, RunCompleted
from agentfsm.models import FallbackModel
from agentfsm.models.http_client import HttpOptions
from tests.helpers.fake_model_server import ModelOutput, whole_body
from tests.helpers.model_clients import MODEL_CLASSES, WIRES, AnyModel

THOUGHT = "a secret thought"
SIGNS = {"openai": THOUGHT, "responses": "sealed", "anthropic": "c2ln", "ollama": THOUGHT}
"""The part of the reasoning that is sent back on each wire."""


class Told:
    """A model that reasons and calls a tool twice, then answers; with the requests it got."""

    def __init__(self, wire: str, name: str, host: str, fails: tuple[int, ...] = ()) -> None:
        self.bodies: list[str] = []
        self._wire, self._fails = wire, fails
        http = HttpOptions(transport=httpx.MockTransport(self._answer))
        self.model: AnyModel = MODEL_CLASSES[wire](name, base_url=f"http://{host}/v1", api_key="k" * 20, http=http)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(request.content.decode())
        if len(self.bodies) in self._fails:
            return httpx.Response(503, json={"error": {"message": "busy"}})
        if request.content.count(b"noted") < 3:
            calls = ((f"call_{len(self.bodies)}", "note", {"n": len(self.bodies)}),)
            return httpx.Response(200, json=whole_body(self._wire, ModelOutput("", THOUGHT, calls)))
        return httpx.Response(200, json=whole_body(self._wire, ModelOutput("done")))


def note(n: int) -> str:
    """Take a note."""
    return "noted"


def talk(first: Told, second: Told) -> None:
    async def main() -> Any:
        return (await Agent(FallbackModel(first.model, second.model), tools=[note]).run("go")).outcome

    assert isinstance(asyncio.run(main()), RunCompleted)


@pytest.mark.parametrize("other", ["another model", "another server"])
@pytest.mark.parametrize("wire", WIRES)
def test_a_model_that_takes_over_gets_only_its_own_reasoning(wire: str, other: str) -> None:
    """The first model sends reasoning, then fails; the second sends reasoning; then the first works again."""
    name, host = ("m-2", "a:1") if other == "another model" else ("m-1", "b:1")
    first, second = Told(wire, "m-1", "a:1", fails=(2,)), Told(wire, name, host)
    talk(first, second)
    sign = SIGNS[wire]
    assert [body.count(sign) for body in second.bodies] == [0]
    # its own first reasoning, from the third request on also that of its second reply, but never the other's
    assert [body.count(sign) for body in first.bodies] == [0, 1, 1, 2]


@pytest.mark.parametrize("left", WIRES)
@pytest.mark.parametrize("right", WIRES)
def test_reasoning_is_not_passed_between_wires(left: str, right: str) -> None:
    first, second = Told(left, "m", "a:1", fails=(2, 3, 4)), Told(right, "n", "b:1")
    talk(first, second)
    assert SIGNS[left] not in second.bodies[0]
    assert json.loads(second.bodies[0])


@pytest.mark.parametrize("wire", WIRES)
def test_a_run_resumed_with_another_model_omits_reasoning(wire: str) -> None:
    first, second = Told(wire, "m-1", "a:1"), Told(wire, "m-2", "a:1")

    async def main() -> None:
        messages = (await Agent(first.model, tools=[note]).run("go")).messages
        assert any(message.extra for message in messages)
        await Agent(second.model, tools=[note]).run("again", message_history=messages)

    asyncio.run(main())
    assert SIGNS[wire] not in second.bodies[0]
