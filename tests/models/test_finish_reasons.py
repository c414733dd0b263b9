"""A reply without a finish reason counts only if nothing of it can be missing, on any wire, streamed or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from agentfsm import Agent, FailureKind, Host, RunCompleted, observer
from agentfsm.errors import TransientProviderError
from agentfsm.loop.events import RunWarning
from agentfsm.loop.failures import Failure
from agentfsm.loop.messages import FinishReason
from agentfsm.testing import FakeClock
from tests.helpers.fake_model_server import ModelOutput, encode_events, stream_events, whole_body
from tests.helpers.model_clients import (
    GOOD_BODIES,
    WIRES,
    build_model,
    request_error,
    request_reply,
    request_stream,
    respond_with,
    stream_error,
    streaming_model,
)
from tests.helpers.scenarios import await_run

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


COMPLETE = [(wire, value) for wire, value in CASES if wire != "ollama" and value not in ("in_progress", "queued")]
INCOMPLETE = [case for case in CASES if case not in COMPLETE]
REPAIRED = "gave no finish reason"


@pytest.mark.parametrize("model_output", SAID, ids=["text", "call"])
@pytest.mark.parametrize(("wire", "value"), COMPLETE)
def test_a_complete_response_without_a_finish_reason_is_taken_as_finished(
    wire: str, value: Any, model_output: ModelOutput
) -> None:
    reply = request_reply(build_model(wire, respond_with(200, without_end(wire, model_output, value))))
    assert reply.message.content == model_output.text
    assert [(c.name, dict(c.arguments)) for c in reply.message.tool_calls] == [c[1:] for c in model_output.calls]
    assert reply.finish_reason is (FinishReason.TOOL_CALLS if model_output.calls else FinishReason.STOP)
    assert [REPAIRED in repair for repair in reply.repairs] == [True]


@pytest.mark.parametrize("model_output", SAID, ids=["text", "call"])
@pytest.mark.parametrize(("wire", "value"), INCOMPLETE)
def test_a_response_that_says_it_has_not_ended_is_transient(wire: str, value: Any, model_output: ModelOutput) -> None:
    error = request_error(build_model(wire, respond_with(200, without_end(wire, model_output, value))))
    assert type(error) is TransientProviderError
    assert "the server" in str(error)


@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire != "ollama"])
def test_without_a_finish_reason_an_empty_reply_and_a_call_that_is_cut_off_are_transient(wire: str) -> None:
    empty = without_end(wire, ModelOutput(""), ABSENT)
    cut = json.loads(
        json.dumps(without_end(wire, SAID[1], ABSENT))
        .replace(r"{\"city\": \"Paris\"}", r"{\"city\": \"Par")
        .replace('{"city": "Paris"}', r'"{\"city\": \"Par"')
    )
    for body in (empty, cut):
        assert type(request_error(build_model(wire, respond_with(200, body)))) is TransientProviderError


@pytest.mark.parametrize("model_output", SAID, ids=["text", "call"])
@pytest.mark.parametrize("wire", WIRES)
def test_a_plain_response_to_a_streaming_request_is_judged_by_the_same_rules(
    wire: str, model_output: ModelOutput
) -> None:
    text = json.dumps(without_end(wire, model_output, ABSENT)).encode()
    model = streaming_model(wire, text, kind="application/json")
    if wire == "ollama":
        assert type(stream_error(model)) is TransientProviderError
    else:
        assert REPAIRED in request_stream(model)[1].repairs[0]


@pytest.mark.parametrize("model_output", SAID, ids=["text", "call"])
@pytest.mark.parametrize("wire", WIRES)
def test_a_stream_without_a_finish_reason_is_taken_as_finished_only_after_its_last_event(
    wire: str, model_output: ModelOutput
) -> None:
    events = [e for e in stream_events(wire, model_output) if not (isinstance(e, dict) and _ends(wire, e))]
    last = events[-1]
    if last == "[DONE]" or (isinstance(last, dict) and last.get("type") == "message_stop"):
        reply = request_stream(streaming_model(wire, encode_events(wire, events)))[1]
        assert (reply.message.content, len(reply.message.tool_calls)) == (model_output.text, len(model_output.calls))
        assert REPAIRED in reply.repairs[0]
        events = events[:-1]
    assert type(stream_error(streaming_model(wire, encode_events(wire, events)))) is TransientProviderError


def _ends(wire: str, event: dict[str, Any]) -> bool:
    if wire == "openai":
        return any(choice["finish_reason"] for choice in event["choices"])
    return event.get("type") in ("response.completed", "message_delta") or event.get("done") is True


@pytest.mark.parametrize("wire", WIRES)
def test_a_run_takes_a_complete_reply_and_warns_or_retries_an_incomplete_one(wire: str) -> None:
    bodies = [without_end(wire, SAID[0], ABSENT), GOOD_BODIES[wire]]
    model = build_model(wire, lambda _: httpx.Response(200, json=bodies.pop(0)))
    warnings: list[str] = []
    note = observer(lambda e: warnings.append(e.text) if isinstance(e, RunWarning) else None)
    result = asyncio.run(await_run(Agent(model, hooks=[note], host=Host(clock=FakeClock())).run("go")))
    assert isinstance(result.outcome, RunCompleted)
    kinds = [d.guard_result.kind for d in result.decisions if isinstance(d.guard_result, Failure)]
    if wire == "ollama":
        assert (result.output, kinds, warnings) == ("hello", [FailureKind.transient_provider], [])
    else:
        assert (result.output, kinds) == ("All is done.", [])
        assert [model.name in text and REPAIRED in text for text in warnings] == [True]


def test_older_versions_of_ollama_give_no_done_reason() -> None:
    body = {"message": {"role": "assistant", "content": "hello"}, "done": True}
    assert request_reply(build_model("ollama", respond_with(200, body))).message.content == "hello"
