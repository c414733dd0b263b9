"""No key, header or prompt appears in the logs, errors, reprs and events of a failing run at default settings.

Messages appear only in the events that are meant to contain them: a prompt in ``RunStarted``, a text in ``TextDelta``.
Keys and headers appear in none.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import fields, is_dataclass
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentfsm import Agent, Event, ModelReplied, RunStarted, TextDelta
from agentfsm.loop.events import ReasoningDelta, ToolCallDelta
from agentfsm.loop.messages import Message
from agentfsm.models import ConcurrencyLimit, FallbackModel, Limited, ModelSettings, Price, Priced, error_mapping
from agentfsm.runtime.host import Host
from agentfsm.testing import FakeClock
from tests.helpers.fake_model_server import ModelOutput, encode_events, stream_events
from tests.helpers.model_clients import CANARY_KEY, WIRES, ByteChunks, build_model

PROMPT = "canary prompt: the launch code is tangerine"
INSTRUCTIONS = "canary instructions: never tell about the blue door"
HEADER = "canary-header-3f786850e387550f"
TOLD = (RunStarted, TextDelta, ReasoningDelta, ToolCallDelta, ModelReplied)
"""The events that are meant to contain messages."""


def echoing(wire: str, how: str) -> Any:
    """A server that fails, and echoes the whole request."""

    def handler(request: httpx.Request) -> httpx.Response:
        key = request.headers.get("authorization", request.headers.get("x-api-key", ""))
        said = json.loads(request.content)
        words = f"bad key {key}; you said {json.dumps(said)}; {PROMPT}; {INSTRUCTIONS}"
        error = {"error": {"message": words, "type": "server_error" if how != "refused" else "authentication_error"}}
        headers = {"x-request-id": HEADER, "set-cookie": f"session={HEADER}"}
        if how == "refused":
            return httpx.Response(401, json=error, headers=headers)
        if how == "busy":
            return httpx.Response(503, json=error, headers=headers)
        if how == "dropped":
            raise httpx.ReadError(f"lost {key} {PROMPT}", request=request)
        if how == "no JSON":
            return httpx.Response(200, text=words, headers=headers)
        begun = stream_events(wire, ModelOutput("Hello"))[:3]
        return httpx.Response(200, stream=ByteChunks([encode_events(wire, [*begun, error])]), headers=headers)

    return handler


def shown(thing: Any, seen: set[int]) -> list[str]:
    """The repr of an object, and of everything it refers to."""
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    texts = [repr(thing)]
    if is_dataclass(thing) and not isinstance(thing, type):
        texts += [text for field in fields(thing) for text in shown(getattr(thing, field.name), seen)]
    elif isinstance(thing, list | tuple | set | frozenset):
        texts += [text for item in thing for text in shown(item, seen)]
    elif isinstance(thing, dict):
        texts += [text for item in thing.items() for text in shown(item, seen)]
    return texts


def has_canary(text: str, *, said: bool) -> bool:
    keys = CANARY_KEY in text or CANARY_KEY[:-6] in text or HEADER in text
    return keys or (not said and any(word in text for word in ("tangerine", "launch code", "blue door")))


@pytest.mark.parametrize("how", ["refused", "busy", "dropped", "no JSON", "in mid-stream"])
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("wire", WIRES)
def test_no_secret_leaks(wire: str, streamed: bool, how: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build_model(wire, echoing(wire, how))
    agent = Agent(
        Limited(Priced(FallbackModel(model, model), {"*": Price()}), ConcurrencyLimit(1)), host=Host(clock=FakeClock())
    )

    async def main() -> list[Event]:
        run = agent.run(PROMPT, message_history=[Message.user(INSTRUCTIONS)])
        if streamed:
            return [event async for event in run]
        return [(await run).outcome]

    with caplog.at_level(logging.DEBUG):
        events = asyncio.run(main())
        logging.getLogger("agentfsm").warning("%r %s %r", agent, model, agent.model)
    assert not has_canary(caplog.text, said=False), caplog.text
    for event in events:
        for text in shown(event, set()):
            assert not has_canary(text, said=isinstance(event, TOLD)), text
    for text in (repr(agent), repr(model), repr(agent.model), str(vars(model)), repr(vars(vars(model)["_http"]))):
        assert not has_canary(text, said=False)


def test_rejected_settings_do_not_show_their_values() -> None:
    wrong: list[dict[str, Any]] = [
        {"extra_body": {"messages": [], "token": CANARY_KEY}},
        {"stop": ("", CANARY_KEY)},
        {"temperature": CANARY_KEY},
        {"tokn": CANARY_KEY},
    ]
    for given_ in wrong:
        with pytest.raises(ValidationError) as refused:
            ModelSettings(**given_)
        assert not has_canary(str(refused.value), said=False)
        assert next(iter(given_)) in str(refused.value)


@settings(max_examples=300, deadline=None)
@given(st.text("ab", max_size=40), st.text("ab", max_size=40), st.integers(4, 17))
def test_every_common_substring_of_a_text_and_a_secret_is_found(text: str, secret: str, size: int) -> None:
    size_of_run = min(size, len(secret))
    runs = [i for i in range(len(text) - size_of_run + 1) if text[i : i + size_of_run] in secret]
    wanted = {i + n for i in runs for n in range(size_of_run)} if size_of_run >= 4 else set[int]()
    assert error_mapping._overlap(text, secret, size) == wanted
