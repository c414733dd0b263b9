"""Every token count in the vendors' own types is read, streamed or not: cached, cache-written and reasoning tokens."""

from __future__ import annotations

from typing import Any

import pytest

from agentfsm.loop.messages import Usage
from tests.helpers.fake_model_server import ModelOutput, encode_events, stream_events, whole_body
from tests.helpers.model_clients import WIRES, build_model, request_reply, request_stream, respond_with, streaming_model

COUNTS: dict[str, dict[str, Any]] = {
    "openai": {  # openai.types.CompletionUsage
        "prompt_tokens": 100,
        "completion_tokens": 50,
        "total_tokens": 150,
        "prompt_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 20, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 30, "accepted_prediction_tokens": 0},
    },
    "responses": {  # openai.types.responses.ResponseUsage
        "input_tokens": 100,
        "output_tokens": 50,
        "total_tokens": 150,
        "input_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 20},
        "output_tokens_details": {"reasoning_tokens": 30},
    },
    "anthropic": {  # anthropic.types.Usage: input tokens do not include the cached ones
        "input_tokens": 20,
        "cache_read_input_tokens": 60,
        "cache_creation_input_tokens": 20,
        "output_tokens": 50,
        "output_tokens_details": {"thinking_tokens": 30},
    },
}
EXPECTED = Usage(100, 50, cached_tokens=60, reasoning_tokens=30, written_tokens=20)


def counted(wire: str, counts: object) -> tuple[dict[str, Any], list[Any]]:
    """A response with these counts, and a stream."""
    events = stream_events(wire, ModelOutput("hello"))
    for event in events:
        if isinstance(event, dict) and event.get("usage"):
            event["usage"] = counts
        if isinstance(event, dict) and event.get("type") == "response.completed":
            event["response"]["usage"] = counts
        if isinstance(event, dict) and event.get("type") == "message_start":
            event["message"]["usage"] = counts
    return whole_body(wire, ModelOutput("hello")) | {"usage": counts}, events


@pytest.mark.parametrize("wire", COUNTS)
def test_all_token_counts_are_read_streamed_or_not(wire: str) -> None:
    body, events = counted(wire, COUNTS[wire])
    assert request_reply(build_model(wire, respond_with(200, body))).usage == EXPECTED
    assert request_stream(streaming_model(wire, encode_events(wire, events)))[1].usage == EXPECTED


@pytest.mark.parametrize(
    "odd",
    [
        *(None, [], "many", {}, {"prompt_tokens": -3, "input_tokens": True, "eval_count": 1.5}),
        {"prompt_tokens": 10**30, "input_tokens": 10**30, "cost": 1e308},  # more than any model can have read
    ],
)
@pytest.mark.parametrize("wire", WIRES)
def test_invalid_token_counts_are_zero(wire: str, odd: object) -> None:
    body, _ = counted(wire, odd)
    body = {k: v for k, v in body.items() if k not in ("eval_count", "prompt_eval_count")}
    assert request_reply(build_model(wire, respond_with(200, body))).usage == Usage()
