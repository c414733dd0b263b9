"""A response without a finish reason is not a success, on any wire, streamed or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from agentfsm import Agent, FailureKind, Host, RunCompleted
from agentfsm.errors import TransientProviderError
from agentfsm.loop.failures import Failure
from agentfsm.testing import FakeClock
from tests.helpers.fake_model_server import ModelOutput, encode_events, stream_events, whole_body
from tests.helpers.model_clients import (
    GOOD_BODIES,
    WIRES,
    build_model,
    request_error,
    request_reply,
    respond_with,
    stream_error,
    streaming_model,
)

WORDS = {
    "openai": ("finish_reason", [None, "", 0]),
    "responses": ("status", [None, "", "in_progress", "queued"]),
    "anthropic": ("stop_reason", [None, ""]),
    "ollama": ("done", [None, False, "true"]),
}
ABSENT = "absent"
CASES = [(wire, value) for wire in WIRES for value in [ABSENT, *WORDS[wire][1]]]
SAID = [ModelOutput("All is done."), ModelOutput(calls=(("a", "weather", {"city": "Paris"}),))]


def without_end(wire: str, model_output: ModelOutput, value: Any) -> dict[str, Any]:
    """A response with another finish reason, or without one."""
    body = whole_body(wire, model_output)
    holder: dict[str, Any] = body["choices"][0] if wire == "openai" else body
    key = WORDS[wire][0]
    assert key in holder
    if value == ABSENT:
        del holder[key]
    else:
        holder[key] = value
    return body


@pytest.mark.parametrize("model_output", SAID, ids=["text", "call"])
@pytest.mark.parametrize(("wire", "value"), CASES)
def test_a_response_without_a_finish_reason_is_transient(wire: str, value: Any, model_output: ModelOutput) -> None:
    error = request_error(build_model(wire, respond_with(200, without_end(wire, model_output, value))))
    assert type(error) is TransientProviderError
    assert "the server" in str(error)


@pytest.mark.parametrize("model_output", SAID, ids=["text", "call"])
@pytest.mark.parametrize("wire", WIRES)
def test_a_plain_response_to_a_streaming_request_without_a_finish_reason_is_transient(
    wire: str, model_output: ModelOutput
) -> None:
    text = json.dumps(without_end(wire, model_output, ABSENT)).encode()
    assert type(stream_error(streaming_model(wire, text, kind="application/json"))) is TransientProviderError


@pytest.mark.parametrize("model_output", SAID, ids=["text", "call"])
@pytest.mark.parametrize("wire", WIRES)
def test_a_stream_without_a_finish_reason_is_transient(wire: str, model_output: ModelOutput) -> None:
    events = [e for e in stream_events(wire, model_output) if not (isinstance(e, dict) and _ends(wire, e))]
    assert type(stream_error(streaming_model(wire, encode_events(wire, events)))) is TransientProviderError


def _ends(wire: str, event: dict[str, Any]) -> bool:
    if wire == "openai":
        return any(choice["finish_reason"] for choice in event["choices"])
    return event.get("type") in ("response.completed", "message_delta") or event.get("done") is True


@pytest.mark.parametrize("wire", WIRES)
def test_a_transient_failure_is_retried_and_the_run_continues(wire: str) -> None:
    bodies = [without_end(wire, SAID[0], ABSENT), GOOD_BODIES[wire]]
    model = build_model(wire, lambda _: httpx.Response(200, json=bodies.pop(0)))
    run = Agent(model, host=Host(clock=FakeClock())).run("go")
    result = asyncio.run(_awaited(run))
    assert isinstance(result.outcome, RunCompleted)
    assert result.output == "hello"
    kinds = [d.guard_result.kind for d in result.decisions if isinstance(d.guard_result, Failure)]
    assert kinds == [FailureKind.transient_provider]


async def _awaited(run: Any) -> Any:
    return await run


def test_older_versions_of_ollama_give_no_done_reason() -> None:
    body = {"message": {"role": "assistant", "content": "hello"}, "done": True}
    assert request_reply(build_model("ollama", respond_with(200, body))).message.content == "hello"
