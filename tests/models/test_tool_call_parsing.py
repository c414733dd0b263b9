"""Undocumented variants of tool calls: handled the same on every wire, streamed or not.

Arguments as an object instead of a text, as a text instead of an object, as an empty text, as null or missing; ids
that are missing, empty, null or repeated; calls with a finish reason that says there are none.
"""

from __future__ import annotations

from typing import Any

import pytest

from agentfsm.loop.messages import FinishReason, Reply
from tests.helpers.fake_model_server import ModelOutput, encode_events, stream_events, whole_body
from tests.helpers.model_clients import WIRES, build_model, request_reply, request_stream, respond_with, streaming_model

ABSENT = object()
PLACE = {"openai": ("function", "arguments"), "responses": ("arguments",), "anthropic": ("input",)}
PLACE["ollama"] = PLACE["openai"]
ID = {"openai": "id", "responses": "call_id", "anthropic": "id", "ollama": "id"}
SAID = ModelOutput(calls=(("a", "weather", {}), ("b", "weather", {})))


def calls_of(wire: str, body: Any) -> list[dict[str, Any]]:
    """The calls of a response, or of one event of a stream."""
    if wire == "openai":
        return [
            c for x in body.get("choices", ()) for c in (x.get("message") or x.get("delta") or {}).get("tool_calls", ())
        ]
    if wire == "ollama":
        return list(body.get("message", {}).get("tool_calls", ()))
    items = [*body.get("output", ()), *body.get("content", ()), *body.get("response", {}).get("output", ())]
    items += [body[key] for key in ("item", "content_block") if key in body]
    return [item for item in items if item.get("type") in ("function_call", "tool_use")]


def put(holder: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    for key in path[:-1]:
        holder = holder.setdefault(key, {})
    if value is ABSENT:
        holder.pop(path[-1], None)
    else:
        holder[path[-1]] = value


def both(wire: str, change: Any) -> list[Reply]:
    """The reply, streamed or not, of a server that changes its calls this way."""
    body = whole_body(wire, SAID)
    for place, call in enumerate(calls_of(wire, body)):
        change(place, call)
    seen: dict[str, int] = {}
    events = []
    for event in stream_events(wire, SAID, lambda text: [text]):
        if isinstance(event, dict):
            if event.get("type") in ("response.function_call_arguments.delta", "response.function_call_arguments.done"):
                continue  # all that is said of arguments is in the items
            for call in calls_of(wire, event):
                if wire == "openai" and "id" not in call:  # no more of the arguments behind the first piece
                    call["function"] = {}
                    continue
                known = str(call.get(ID[wire]) or call.get("index"))
                change(seen.setdefault(known, len(seen)), call)
        events.append(event)
    whole = request_reply(build_model(wire, respond_with(200, body)))
    streamed = request_stream(streaming_model(wire, encode_events(wire, events)))[1]
    assert whole.finish_reason is streamed.finish_reason is FinishReason.TOOL_CALLS
    return [whole, streamed]


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({"city": "Paris"}, {"city": "Paris"}),
        ('{"city": "Paris"}', {"city": "Paris"}),
        ("", {}),
        (" \n", {}),
        (None, {}),
        (ABSENT, {}),
        ({}, {}),
        ("{}", {}),
    ],
)
@pytest.mark.parametrize("wire", WIRES)
def test_arguments_come_in_any_shape(wire: str, given: object, arguments: dict[str, Any]) -> None:
    for reply in both(wire, lambda _, call: put(call, PLACE[wire], given)):
        assert [(c.name, c.arguments, c.malformed) for c in reply.message.tool_calls] == [
            ("weather", arguments, None)
        ] * 2


@pytest.mark.parametrize("given", ["{", '{"city": ', "[1]", "7", "null and void", [1], 7, True])
@pytest.mark.parametrize("wire", WIRES)
def test_invalid_arguments_make_a_call_that_is_never_executed(wire: str, given: object) -> None:
    for reply in both(wire, lambda _, call: put(call, PLACE[wire], given)):
        assert [c.arguments for c in reply.message.tool_calls] == [{}, {}]
        assert all((c.malformed or "").startswith("they are ") for c in reply.message.tool_calls)


@pytest.mark.parametrize("given", [ABSENT, None, "", "the same", 7])
@pytest.mark.parametrize("wire", WIRES)
def test_call_ids_are_unique_for_any_input(wire: str, given: object) -> None:
    def change(_: int, call: dict[str, Any]) -> None:
        put(call, (ID[wire],), given)
        if wire == "responses":
            put(call, ("id",), given)

    for reply in both(wire, change):
        ids = [c.id for c in reply.message.tool_calls]
        assert len(ids) == 2
        assert all(ids)
        assert ids[0] != ids[1]


@pytest.mark.parametrize("wire", ["openai", "anthropic"])
def test_calls_with_stop_reason_end_turn_are_calls(wire: str) -> None:
    body = whole_body(wire, SAID)
    if wire == "openai":
        body["choices"][0]["finish_reason"] = "stop"
    else:
        body["stop_reason"] = "end_turn"
    assert request_reply(build_model(wire, respond_with(200, body))).finish_reason is FinishReason.TOOL_CALLS
