"""Requests that are encoded incrementally equal requests that are encoded at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfsm.loop.messages import Image, Message, Role, ToolCall, Transcript
from agentfsm.loop.model import ModelRequest
from agentfsm.models import ModelSettings
from agentfsm.models.wire_json import dumps
from tests.helpers.model_clients import MODEL_CLASSES, WEATHER, WIRES, AnyModel

texts = st.sampled_from(["", " ", "hello", '"},{"messages":[]', "naïve 😀\u2028", "half \ud83d"])
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "x"}
thoughts = st.sampled_from(
    [None, *({"anthropic": {"voice": voice, "blocks": [THOUGHT]}} for voice in ("http://127.0.0.1:9/v1 m", "another"))]
)
pictures = st.lists(st.sampled_from([Image.from_bytes(b"GIF87a"), Image.from_bytes(b"\xff\xd8\xff")]), max_size=2).map(
    tuple
)
calls = st.lists(st.builds(ToolCall, st.sampled_from("abc"), st.just("weather"), st.just({"n": 1})), max_size=2)
messages = st.one_of(
    st.builds(Message, st.sampled_from([Role.SYSTEM, Role.USER]), texts),
    st.builds(Message.user, texts, pictures),
    st.builds(
        lambda text, made, extra: Message(Role.ASSISTANT, text, tuple(made), extra=extra), texts, calls, thoughts
    ),
    st.builds(
        lambda text, id_, bad, images: Message(Role.TOOL, text, (), id_, "weather", bad, images=images),
        texts,
        st.sampled_from([*"abc", None]),
        st.booleans(),
        pictures,
    ),
)


def model_of(wire: str, cache: Any = None, *, images: bool = True) -> AnyModel:
    extra = {"x": {"messages": [], "input": []}}
    made = ModelSettings(temperature=0, prompt_cache=cache, images=images, extra_body=extra)
    return MODEL_CLASSES[wire]("m", base_url="http://127.0.0.1:9/v1", api_key="k" * 20, settings=made)


def all_at_once(model: AnyModel, request: ModelRequest, stream: bool) -> bytes:
    return dumps(model._encode(request, stream=stream)).encode(errors="replace")


@pytest.mark.slow
@given(
    wire=st.sampled_from(WIRES),
    steps=st.lists(
        st.tuples(st.lists(messages, max_size=4), st.lists(texts.map(Message.user), max_size=1)), max_size=6
    ),
    stream=st.booleans(),
    images=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_a_request_does_not_depend_on_those_before_it(
    wire: str, steps: list[tuple[list[Message], list[Message]]], stream: bool, images: bool
) -> None:
    model = model_of(wire, "5m" if wire == "anthropic" else None, images=images)
    memo, transcript = dict[object, object](), list[Message]()
    for more, tail in steps:
        transcript += more
        request = ModelRequest(Transcript(transcript, len(transcript), tuple(tail)), tools=(WEATHER,), cache=memo)
        assert model._request_body(request, stream=stream) == all_at_once(model, request, stream)
        assert json.loads(model._request_body(request, stream=stream))


@pytest.mark.parametrize("wire", WIRES)
def test_another_or_shorter_transcript_is_encoded_from_the_start(wire: str) -> None:
    model, memo = model_of(wire), dict[object, object]()
    long = [Message.user("a"), Message.assistant("b"), Message.user("c")]
    for transcript in (long, [*long], long[:1], [Message.user("z")], long):
        for stop in (len(transcript), 1):
            request = ModelRequest(Transcript(transcript, stop), cache=memo)
            assert model._request_body(request, stream=False) == all_at_once(model, request, False)


@pytest.mark.parametrize("wire", WIRES)
def test_models_that_share_a_cache_do_not_mix_their_entries(wire: str) -> None:
    memo, transcript = dict[object, object](), [Message.user("a")]
    for _ in range(3):
        for other in WIRES:
            model = model_of(other)
            request = ModelRequest(Transcript(transcript, len(transcript)), cache=memo)
            assert model._request_body(request, stream=False) == all_at_once(model, request, False)
        transcript.append(Message.assistant("b"))


@pytest.mark.parametrize("wire", WIRES)
def test_a_request_outside_a_run_is_encoded_too(wire: str) -> None:
    model = model_of(wire)
    request = ModelRequest((Message.system("x"), Message.user("a")))
    assert model._request_body(request, stream=False) == all_at_once(model, request, False)
