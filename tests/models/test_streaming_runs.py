"""Runs with listeners: the events of a streaming model, and what happens to an interrupted reply."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from agentfsm import (
    Action,
    Agent,
    AgentGuardrails,
    DefaultPolicy,
    Event,
    FailureKind,
    Handoff,
    ModelReplied,
    ReasoningDelta,
    RecoveryStarted,
    ReplyRestarted,
    RunCancelled,
    RunCompleted,
    RunStarted,
    TextDelta,
    ToolCallDelta,
    ToolFinished,
    ToolStarted,
    Transitioned,
    UserInputRequested,
    tool,
)
from agentfsm.errors import TransientProviderError
from agentfsm.loop.messages import Message, Reply, ToolCall
from agentfsm.loop.model import (
    KeepAlive,
    ReasoningChunk,
    StreamRestart,
    TextChunk,
    ToolCallChunk,
)
from agentfsm.models.limits import ConcurrencyLimit
from agentfsm.models.model_wrappers import FallbackModel, Limited
from agentfsm.runtime.host import Host
from agentfsm.testing import FakeClock, ScriptedModel
from tests.helpers.fake_model_server import ModelOutput, encode_events, stream_events, whole_body
from tests.helpers.model_clients import GOOD_BODIES, WIRES, ByteChunks, ScriptedStream, build_model, hang, raw_server
from tests.helpers.stepped_clock import SteppedClock


def agent(model: Any, clock: Any = None, **limits: Any) -> Agent:
    return Agent(model, guardrails=AgentGuardrails(**limits), host=Host(clock=clock or FakeClock()))


async def watched(made: Agent) -> list[Event]:
    return [event async for event in made.run("go")]


def kinds(events: list[Event]) -> list[type[Event]]:
    return [type(event) for event in events if not isinstance(event, Transitioned)]


HELLO = Reply(Message.assistant("Hello"))


def test_chunk_events_come_in_order_between_the_start_and_the_reply() -> None:
    model = ScriptedStream([ReasoningChunk("hm"), KeepAlive(), TextChunk("Hel"), TextChunk("lo"), HELLO])
    events = asyncio.run(watched(agent(model)))
    assert kinds(events) == [RunStarted, ReasoningDelta, TextDelta, TextDelta, ModelReplied, RunCompleted]
    assert [e.text for e in events if isinstance(e, TextDelta | ReasoningDelta)] == ["hm", "Hel", "lo"]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert {event.run_id for event in events} == {events[0].run_id}
    assert model.closed == 1


def test_a_run_without_listeners_does_not_stream() -> None:
    model = ScriptedStream([HELLO])
    assert asyncio.run(_result(agent(model))) == "whole"
    assert model.calls == ["whole"]


async def _result(made: Agent) -> Any:
    return (await made.run("go")).output


def test_a_delta_arrives_before_the_reply_is_complete() -> None:
    async def main() -> None:
        may_go_on = asyncio.Event()
        model = ScriptedStream([TextChunk("first"), may_go_on.wait, TextChunk("second"), HELLO])
        run = agent(model).run("go")
        async for event in run:
            if isinstance(event, TextDelta) and event.text == "first":
                assert not run.finished
                may_go_on.set()
        assert (await run).output == "Hello"

    asyncio.run(main())


def test_chunks_of_a_call_are_emitted_and_the_call_runs_once() -> None:
    ran: list[int] = []

    @tool
    def double(n: int) -> int:
        """Double a number."""
        ran.append(n)
        return 2 * n

    call = Reply(Message.assistant("", (ToolCall("c1", "double", {"n": 4}),)))
    model = ScriptedStream([ToolCallChunk(0, "double", ""), ToolCallChunk(0, "double", '{"n": 4}'), call], [HELLO])
    made = Agent(model, tools=[double])
    events = asyncio.run(watched(made))
    deltas = [event for event in events if isinstance(event, ToolCallDelta)]
    assert [(d.index, d.name, d.arguments) for d in deltas] == [(0, "double", ""), (0, "double", '{"n": 4}')]
    assert kinds(events).index(ToolCallDelta) < kinds(events).index(ModelReplied) < kinds(events).index(ToolStarted)
    assert ToolFinished in kinds(events)
    assert ran == [4]


def test_an_interrupted_stream_is_retried_and_its_part_is_discarded() -> None:
    broken = [TextChunk("Half a"), TransientProviderError("gone")]
    model = ScriptedStream(broken, [TextChunk("Hello"), HELLO])
    events = asyncio.run(watched(agent(model)))
    assert kinds(events) == [RunStarted, TextDelta, RecoveryStarted, TextDelta, ModelReplied, RunCompleted]
    last = events[-1]
    assert isinstance(last, RunCompleted)
    assert last.output == "Hello"
    assert model.closed == 2


def test_a_stream_without_its_reply_is_transient() -> None:
    events = asyncio.run(watched(agent(ScriptedStream([TextChunk("Half a")], [HELLO]))))
    (error,) = [event for event in events if isinstance(event, RecoveryStarted)]
    assert error.failure.kind == "transient_provider"
    assert "without a reply" in error.failure.explanation


def passing(clock: SteppedClock, seconds: float) -> Callable[[], Awaitable[None]]:
    """Lets time pass within a stream; whatever waits for it learns of that first."""

    async def pass_time() -> None:
        clock.advance(seconds)
        for _ in range(20):
            await asyncio.sleep(0)

    return pass_time


def test_an_idle_stream_is_transient_and_reported_as_idle() -> None:
    clock = SteppedClock()
    model = ScriptedStream([TextChunk("Half a"), passing(clock, 21), hang], [HELLO])
    events = clock.run(watched(agent(model, clock)))
    (error,) = [event for event in events if isinstance(event, RecoveryStarted)]
    assert error.failure.kind == "transient_provider"
    assert "sent nothing for 20 s" in error.failure.explanation
    assert model.closed == 2


def test_an_idle_stream_that_swallows_its_cancellation_is_left_and_the_call_repeated() -> None:
    async def swallow() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    complaints: list[dict[str, Any]] = []

    async def scene() -> list[Event]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        model = ScriptedStream([TextChunk("Half a"), swallow], [HELLO])
        events = await watched(agent(model, stream_heartbeat_s=0.01, cancel_grace_s=0.02))
        assert model.closed == 2
        gc.collect()
        await asyncio.sleep(0)
        return events

    events = asyncio.run(scene())
    (error,) = [event for event in events if isinstance(event, RecoveryStarted)]
    assert "sent nothing for 0.01 s" in error.failure.explanation
    assert isinstance(events[-1], RunCompleted)
    assert complaints == []


def test_a_stream_that_flows_outlasts_the_timeout_of_a_whole_reply() -> None:
    clock = SteppedClock()
    parts = [x for _ in range(10) for x in (passing(clock, 15), TextChunk("a"))]
    events = clock.run(watched(agent(ScriptedStream([*parts, HELLO]), clock, llm_timeout_s=60)))
    assert kinds(events) == [RunStarted, *[TextDelta] * 10, ModelReplied, RunCompleted]


def test_ten_minutes_at_a_word_per_second_are_one_request() -> None:
    clock = SteppedClock()
    model = ScriptedStream([*(x for _ in range(600) for x in (passing(clock, 1), TextChunk("word "))), HELLO])
    events = clock.run(watched(agent(model, clock, max_execution_time_s=900)))
    assert kinds(events) == [RunStarted, *[TextDelta] * 600, ModelReplied, RunCompleted]
    assert model.closed == 1


@pytest.mark.parametrize(
    ("first", "silence"),
    [((), "60 s"), ((TextChunk("Half a"),), "20 s")],
    ids=["before the first piece", "after it"],
)
def test_keepalives_are_silence(first: tuple[Any, ...], silence: str) -> None:
    clock = SteppedClock()
    parts = [*first, *(x for _ in range(1000) for x in (passing(clock, 5), KeepAlive()))]
    events = clock.run(watched(agent(ScriptedStream(parts, [HELLO]), clock)))
    (error,) = [event for event in events if isinstance(event, RecoveryStarted)]
    assert error.failure.kind == "transient_provider"
    assert f"sent nothing for {silence}" in error.failure.explanation


# -- the end of the run's time ---------------------------------------------------------------------------

STRICT = DefaultPolicy(actions={FailureKind.transient_provider: Action.handoff})


def flowing(clock: SteppedClock) -> ScriptedStream:
    return ScriptedStream([x for _ in range(1000) for x in (passing(clock, 15), TextChunk("a"))])


@pytest.mark.parametrize("policy", [None, STRICT], ids=["default", "no provider failure is retried"])
@pytest.mark.parametrize("wrapped", ["alone", "first of two", "in a wrapper"])
def test_a_stream_that_flows_is_cut_by_the_time_limit_of_the_run(wrapped: str, policy: Any) -> None:
    clock = SteppedClock()
    model = flowing(clock)
    outer: Any = {
        "alone": lambda: model,
        "first of two": lambda: FallbackModel(model, ScriptedModel(["from the other"])),
        "in a wrapper": lambda: Limited(model, ConcurrencyLimit(1)),
    }[wrapped]()
    made = Agent(outer, guardrails=AgentGuardrails(max_execution_time_s=100), host=Host(clock=clock), policy=policy)
    events = clock.run(watched(made))
    last = events[-1]
    assert isinstance(last, UserInputRequested)
    assert last.originating_failure_kind is FailureKind.time_limit
    assert last.limit is not None
    assert 100 <= last.limit.spent < 120
    assert kinds(events).count(TextDelta) == 6
    assert (model.calls, model.closed) == (["streamed"], 1)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_whole_reply_is_cut_by_the_time_limit_of_the_run(wrapped: bool) -> None:
    clock = SteppedClock()

    async def hanging(_: Any) -> str:
        await passing(clock, 31)()
        await hang()
        return "never"

    model: Any = FallbackModel(ScriptedModel([hanging])) if wrapped else ScriptedModel([hanging])
    made = agent(model, clock, max_execution_time_s=30)
    outcome = clock.run(_outcome(made))
    assert isinstance(outcome, UserInputRequested)
    assert outcome.originating_failure_kind is FailureKind.time_limit


async def _outcome(made: Agent) -> Event:
    return (await made.run("go")).outcome


def test_the_models_to_fall_back_to_share_what_is_left_of_the_runs_time() -> None:
    """Of 30 s, the first of two models gets 15, and the second the rest."""
    clock = SteppedClock()
    first = ScriptedStream([passing(clock, 16), hang])
    second = ScriptedStream([TextChunk("Hello"), HELLO])
    events = clock.run(watched(agent(FallbackModel(first, second), clock, max_execution_time_s=30)))
    assert isinstance(events[-1], RunCompleted)
    assert (first.calls, second.calls) == (["streamed"], ["streamed"])


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("wire", WIRES)
def test_a_server_that_never_stops_talking_is_cut_by_the_time_limit_of_the_run(wire: str, fallback: bool) -> None:
    clock = SteppedClock()
    hung_up: list[bool] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind = b"application/x-ndjson" if wire == "ollama" else b"text/event-stream"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\n\r\n")
        events = stream_events(wire, ModelOutput("word " * 3))
        writer.write(encode_events(wire, events[:-3] or events[:1]))
        await writer.drain()
        clock.advance(101)
        hung_up.append(await reader.read() == b"")

    async def main() -> list[Event]:
        async with raw_server(talk) as url:
            model: Any = build_model(wire, base_url=url)
            made = FallbackModel(model, ScriptedModel(["other"])) if fallback else model
            events = await watched(agent(made, clock, max_execution_time_s=100, stream_heartbeat_s=1000))
            await model.aclose()
            return events

    last = clock.run(main())[-1]
    assert isinstance(last, UserInputRequested)
    assert last.originating_failure_kind is FailureKind.time_limit
    assert hung_up == [True]


def test_a_run_cancelled_in_mid_stream_ends_and_closes_the_stream() -> None:
    model = ScriptedStream([TextChunk("Half a"), hang])

    async def main() -> list[Event]:
        run = agent(model).run("go")
        events: list[Event] = []
        async for event in run:
            events.append(event)
            if isinstance(event, TextDelta):
                run.cancel("enough")
        return events

    events = asyncio.run(main())
    assert isinstance(events[-1], RunCancelled)
    assert model.closed == 1


def test_a_restarted_reply_emits_an_event() -> None:
    model = ScriptedStream([TextChunk("Half a"), StreamRestart("the first broke off"), TextChunk("Hello"), HELLO])
    events = asyncio.run(watched(agent(model)))
    assert kinds(events) == [RunStarted, TextDelta, ReplyRestarted, TextDelta, ModelReplied, RunCompleted]


def test_a_stream_that_raises_something_else_is_a_provider_error() -> None:
    events = asyncio.run(watched(agent(ScriptedStream([TextChunk("x"), ValueError("what?")]))))
    assert isinstance(events[-1], Handoff)
    assert events[-1].failure is not None
    assert events[-1].failure.kind == "provider_error"


def test_a_model_that_does_not_stream_shows_its_whole_text_as_one_delta() -> None:
    events = asyncio.run(watched(agent(ScriptedModel(["Hello"]))))
    assert kinds(events) == [RunStarted, TextDelta, ModelReplied, RunCompleted]
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["Hello"]


def test_a_server_that_ignores_the_request_for_a_stream_shows_its_whole_text_as_one_delta() -> None:
    model = build_model("openai", lambda _: httpx.Response(200, json=GOOD_BODIES["openai"]))
    events = asyncio.run(watched(agent(model)))
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["hello"]


# -- over the wires ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
def test_a_streamed_run_on_each_wire_emits_its_chunks_and_ends_like_an_unstreamed_one(wire: str) -> None:
    outputs = [ModelOutput("Let me see.", "hm", (("c1", "weather", {"city": "Paris"}),)), ModelOutput("It is sunny.")]
    bodies: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        bodies.append(body)
        now = outputs[len(bodies) % 2 - 1]
        if body.get("stream"):
            return httpx.Response(200, stream=ByteChunks([encode_events(wire, stream_events(wire, now))]))
        return httpx.Response(200, json=whole_body(wire, now))

    @tool
    def weather(city: str) -> str:
        """Tell the weather."""
        return f"sunny in {city}"

    made = Agent(build_model(wire, handler), tools=[weather])
    events = asyncio.run(watched(made))
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert text == "Let me see.It is sunny."
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "hm"
    assert "".join(event.arguments for event in events if isinstance(event, ToolCallDelta)) == '{"city": "Paris"}'
    last = events[-1]
    assert isinstance(last, RunCompleted)
    assert last.output == "It is sunny." == asyncio.run(_result(made))
    streamed, whole = bodies[:2], bodies[2:]
    for body in (*streamed, *whole):
        for key in ("stream", "stream_options"):
            body.pop(key, None)
    assert streamed == whole  # the transcript does not depend on the listeners
