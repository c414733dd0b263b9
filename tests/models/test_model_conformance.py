"""Every wire and wrapper passes the conformance checks for models; a model that breaks a rule fails its check."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from pydantic import SecretStr

from agentfsm.errors import ConfigurationError, ModelError, ProviderError, TransientProviderError
from agentfsm.loop.messages import FinishReason, Message, Reply, Role, ToolCall, Usage
from agentfsm.loop.model import Model, ModelRequest, StreamChunk, TextChunk, ToolCallChunk
from agentfsm.loop.read_only import thaw
from agentfsm.models import ConcurrencyLimit, FallbackModel, Limited, Price, Priced
from agentfsm.testing import ScriptedModel, model_conformance
from agentfsm.testing.model_conformance import CutOff, ModelCheck, OpenModel, Silence, Turn, checks
from tests.helpers.fake_model_server import fake_model_server
from tests.helpers.model_clients import ALL_MODEL_CLASSES
from tests.helpers.scripted_server import server_reply


def wire(name: str) -> OpenModel:
    @asynccontextmanager
    async def open_model(*turns: Turn) -> AsyncGenerator[Model]:
        with fake_model_server(*map(server_reply, turns)) as server:
            url = server.url if name in ("openai", "responses", "anthropic") else server.host
            model = ALL_MODEL_CLASSES[name]("m-1", base_url=url, api_key="k" * 20)
            yield model
            await model.aclose()

    return open_model


def wrapped(wrap: Callable[[Model], Model]) -> OpenModel:
    @asynccontextmanager
    async def open_model(*turns: Turn) -> AsyncGenerator[Model]:
        async with wire("openai")(*turns) as model:
            yield wrap(model)

    return open_model


MODELS: dict[str, OpenModel] = {
    **{name: wire(name) for name in ALL_MODEL_CLASSES},
    "fallback": wrapped(lambda model: FallbackModel(model)),
    "limited": wrapped(lambda model: Limited(model, ConcurrencyLimit(4))),
    "priced": wrapped(lambda model: Priced(model, {"*": Price(input=1.0, output=2.0)})),
}
LACKS: dict[str, Any] = {name: ["content_filter"] for name in ("ollama", "anthropic", "bedrock", "vertex")}
"""Ollama's API has no such finish reason, and Anthropic's says that the model refused."""


CASES = [(name, check) for name in MODELS for check in checks(without=LACKS.get(name, ()))]


@pytest.mark.parametrize(("name", "check"), CASES, ids=[f"{name}-{check.__name__}" for name, check in CASES])
def test_our_own_models_conform(name: str, check: ModelCheck) -> None:
    asyncio.run(check(MODELS[name]))


@asynccontextmanager
async def scripted(*turns: Turn) -> AsyncGenerator[Model]:
    async def wait(silence: Silence) -> None:
        silence.receive()
        await asyncio.Event().wait()

    script = [partial(lambda turn, _: wait(turn), turn) if isinstance(turn, Silence) else turn for turn in turns]
    yield ScriptedModel(script + script[-1:] * 20)


@pytest.mark.parametrize("check", checks(without=["streaming", "cut_off"]), ids=lambda check: check.__name__)
def test_the_scripted_model_conforms(check: ModelCheck) -> None:
    asyncio.run(check(scripted))


# -- models that break one rule --------------------------------------------------------------------------------


class Good:
    """A model in memory that keeps every rule."""

    def __init__(self, *turns: Turn) -> None:
        self.name, self.secrets = "good", (SecretStr("hunter2-hunter2"),)
        self.turns, self.calls = turns, 0

    async def reply(self, request: ModelRequest) -> Reply:
        turn = self.turns[min(self.calls, len(self.turns) - 1)]
        self.calls += 1
        await asyncio.sleep(0)
        if isinstance(turn, Silence):
            turn.receive()
            await asyncio.Event().wait()
        if isinstance(turn, CutOff):
            raise TransientProviderError("the connection was lost")
        if isinstance(turn, ModelError):
            raise turn
        assert isinstance(turn, Reply)
        return turn

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply]:
        whole = await self.reply(request)
        for start in range(0, len(whole.message.content), 4):
            yield TextChunk(whole.message.content[start : start + 4])
        for index, call in enumerate(whole.message.tool_calls):
            yield ToolCallChunk(index, call.name, json.dumps(thaw(call.arguments)))
        yield whole


class Changed(Good):
    """A model whose replies are changed."""

    def change(self, reply: Reply) -> Any:
        return reply

    async def reply(self, request: ModelRequest) -> Reply:
        return self.change(await super().reply(request))


class WithoutAName(Good):
    def __init__(self, *turns: Turn) -> None:
        super().__init__(*turns)
        self.name = " "


class WithASecretName(Good):
    def __repr__(self) -> str:
        return f"Model({self.secrets[0].get_secret_value()})"


class ReturnsText(Changed):
    def change(self, reply: Reply) -> Any:
        return reply.message.content


class SpeaksAsTheUser(Changed):
    def change(self, reply: Reply) -> Any:
        return replace(reply, message=replace(reply.message, role=Role.USER))


class Strips(Changed):
    def change(self, reply: Reply) -> Any:
        return replace(reply, message=replace(reply.message, content=reply.message.content.strip("\ufeff")))


class FillsWhatIsEmpty(Changed):
    def change(self, reply: Reply) -> Any:
        return replace(reply, message=replace(reply.message, content=reply.message.content or "(empty)"))


class CountsNothing(Changed):
    def change(self, reply: Reply) -> Any:
        return replace(reply, usage=Usage())


class CountsBackwards(Changed):
    def change(self, reply: Reply) -> Any:
        return replace(reply, usage=Usage(-1, 7))


class KeepsTheFirstCall(Changed):
    def change(self, reply: Reply) -> Any:
        return replace(reply, message=replace(reply.message, tool_calls=reply.message.tool_calls[:1]))


class RepeatsIds(Changed):
    def change(self, reply: Reply) -> Any:
        calls = tuple(replace(call, id="same") for call in reply.message.tool_calls)
        return replace(reply, message=replace(reply.message, tool_calls=calls))


class ForgetsArguments(Changed):
    def change(self, reply: Reply) -> Any:
        calls = tuple(ToolCall(call.id, call.name) for call in reply.message.tool_calls)
        return replace(reply, message=replace(reply.message, tool_calls=calls))


class AlwaysStops(Changed):
    def change(self, reply: Reply) -> Any:
        return replace(reply, finish_reason=FinishReason.STOP)


class RejectsFailedResults(Good):
    async def reply(self, request: ModelRequest) -> Reply:
        if any(message.is_error for message in request.messages):
            raise ProviderError("no such field: is_error")
        return await super().reply(request)


class RejectsImages(Good):
    async def reply(self, request: ModelRequest) -> Reply:
        if any(message.images for message in request.messages):
            raise ProviderError("no images")
        return await super().reply(request)


class RejectsSchemas(Good):
    async def reply(self, request: ModelRequest) -> Reply:
        if request.output_schema is not None:
            raise ProviderError("no schemas")
        return await super().reply(request)


class RaisesItsOwnErrors(Good):
    async def reply(self, request: ModelRequest) -> Reply:
        try:
            return await super().reply(request)
        except ModelError as error:
            raise RuntimeError(str(error)) from None


class RetriesNothing(Good):
    async def reply(self, request: ModelRequest) -> Reply:
        try:
            return await super().reply(request)
        except ModelError as error:
            raise ProviderError(str(error), status=error.status, retry_after_s=error.retry_after_s) from None


class ForgetsTheStatus(Good):
    async def reply(self, request: ModelRequest) -> Reply:
        try:
            return await super().reply(request)
        except ModelError as error:
            raise type(error)(str(error)) from None


class StaysBroken(Good):
    broken = False

    async def reply(self, request: ModelRequest) -> Reply:
        if self.broken:
            raise ProviderError("still broken")
        try:
            return await super().reply(request)
        except ModelError:
            self.broken = True
            raise


class SwallowsCancellation(Good):
    async def reply(self, request: ModelRequest) -> Reply:
        try:
            return await super().reply(request)
        except asyncio.CancelledError:
            return Reply(Message.assistant("never mind"))


class LeavesATask(Good):
    def __init__(self, *turns: Turn) -> None:
        super().__init__(*turns)
        self.tasks: list[asyncio.Task[Reply]] = []

    async def reply(self, request: ModelRequest) -> Reply:
        self.tasks.append(asyncio.create_task(super().reply(request)))
        return await asyncio.shield(self.tasks[-1])


class BelongsToOneLoop(Good):
    async def reply(self, request: ModelRequest) -> Reply:
        self.loop = getattr(self, "loop", None) or asyncio.get_running_loop()
        if self.loop is not asyncio.get_running_loop():
            raise RuntimeError("Event loop is closed")
        return await super().reply(request)


class OneAtATime(Good):
    busy = False

    async def reply(self, request: ModelRequest) -> Reply:
        if self.busy:
            raise RuntimeError("busy")
        self.busy = True
        try:
            return await super().reply(request)
        finally:
            self.busy = False


class ClosesForGood(Good):
    closed = False

    async def aclose(self) -> None:
        self.closed = True

    async def reply(self, request: ModelRequest) -> Reply:
        if self.closed:
            raise RuntimeError("closed")
        return await super().reply(request)


class StreamsNoEnd(Good):
    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply]:
        async for part in super().stream(request):
            if not isinstance(part, Reply):
                yield part


class StreamsTheReplyFirst(Good):
    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply]:
        yield await self.reply(request)
        yield TextChunk("and more")


class StreamsHalf(Good):
    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply]:
        whole = await self.reply(request)
        yield TextChunk(whole.message.content[::2])
        yield whole


class StreamsNothing(Good):
    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply]:
        yield await self.reply(request)


class StreamsStrings(Good):
    async def stream(self, request: ModelRequest) -> AsyncGenerator[Any]:
        yield "text"
        yield await self.reply(request)


class StreamsNoCalls(Changed):
    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply]:
        async for part in super().stream(request):
            changed = isinstance(part, Reply) and replace(part.message, tool_calls=())
            yield replace(part, message=changed) if changed and isinstance(part, Reply) else part


class StreamsNoUsage(Good):
    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply]:
        async for part in super().stream(request):
            yield replace(part, usage=Usage()) if isinstance(part, Reply) else part


class StreamsPlainErrors(Good):
    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply]:
        try:
            yield await self.reply(request)
        except ModelError as error:
            raise ConnectionError(str(error)) from None


class TakesAPartForTheWhole(Good):
    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply]:
        try:
            yield await self.reply(request)
        except TransientProviderError:
            yield Reply(Message.assistant("The launch code is"))


class StreamsOn(Good):
    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply]:
        try:
            async for part in super().stream(request):
                yield part
        except asyncio.CancelledError:
            yield Reply(Message.assistant("never mind"))


class HoldsOn(Good):
    """After a stream that is left, the next waits for it."""

    held = False

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply]:
        if self.held:
            raise RuntimeError("the last stream is not finished")
        self.held = True
        async for part in super().stream(request):
            yield part
        self.held = False


BROKEN: dict[type[Good], str] = {
    WithoutAName: "has_a_name",
    WithASecretName: "has_a_name",
    ReturnsText: "replies",
    SpeaksAsTheUser: "replies",
    CountsBackwards: "replies",
    RejectsFailedResults: "accepts_every_message",
    RejectsSchemas: "accepts_an_output_schema",
    StreamsNoEnd: "streams",
    StreamsTheReplyFirst: "streams",
    StreamsHalf: "streams",
    StreamsStrings: "streams",
    HoldsOn: "can_be_left_in_the_middle",
    LeavesATask: "can_be_cancelled_while_it_waits",
    OneAtATime: "makes_calls_at_once",
    ClosesForGood: "can_be_closed",
    BelongsToOneLoop: "works_in_any_event_loop",
    Strips: "returns_the_text",
    FillsWhatIsEmpty: "returns_an_empty_text",
    CountsNothing: "returns_the_usage",
    ForgetsArguments: "returns_a_call",
    KeepsTheFirstCall: "returns_several_calls",
    RepeatsIds: "returns_several_calls",
    AlwaysStops: "says_that_a_reply_was_truncated",
    RejectsImages: "accepts_images",
    StreamsNothing: "streams_what_it_replies",
    StreamsNoCalls: "streams_calls",
    StreamsNoUsage: "streams_the_usage",
    RaisesItsOwnErrors: "reports_failures",
    RetriesNothing: "reports_failures",
    StreamsPlainErrors: "reports_failures_of_streams",
    ForgetsTheStatus: "reports_status_and_time_to_wait",
    StaysBroken: "can_be_called_after_a_failure",
    TakesAPartForTheWhole: "takes_no_part_for_the_whole",
    SwallowsCancellation: "can_be_cancelled_while_it_waits",
    StreamsOn: "streams_can_be_cancelled_while_they_wait",
}
"""A model that breaks one rule, and the check that must see it."""


def in_memory(kind: type[Good]) -> OpenModel:
    @asynccontextmanager
    async def open_model(*turns: Turn) -> AsyncGenerator[Model]:
        model = kind(*turns)
        yield model
        for task in getattr(model, "tasks", ()):
            task.cancel()

    return open_model


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
def test_a_model_that_keeps_the_rules_passes(check: ModelCheck) -> None:
    asyncio.run(check(in_memory(Good)))


@pytest.mark.parametrize(("kind", "name"), BROKEN.items(), ids=[f"{k.__name__}-{v}" for k, v in BROKEN.items()])
def test_a_model_that_breaks_a_rule_fails(kind: type[Good], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_conformance, "_PATIENCE_S", 0.1)
    check = next(check for check in checks() if check.__name__ == name)
    with pytest.raises((AssertionError, ModelError, RuntimeError)) as caught:
        asyncio.run(check(in_memory(kind)))
    if caught.type is AssertionError:
        assert str(caught.value)


def test_every_check_has_a_model_that_fails_it() -> None:
    """But for two, which are close to others."""
    others = {"can_be_cancelled_at_any_time", "says_that_a_filter_has_cut_in"}
    assert {check.__name__ for check in checks()} - {*BROKEN.values()} == others


def test_a_check_without_a_method_to_stream_says_what_to_do() -> None:
    class Whole:
        name = "whole"

        async def reply(self, request: ModelRequest) -> Reply:
            return Reply(Message.assistant("hi"))

    @asynccontextmanager
    async def open_model(*turns: Turn) -> AsyncGenerator[Model]:
        yield Whole()

    streams = next(check for check in checks() if check.__name__ == "streams")
    with pytest.raises(AssertionError, match=r"no method `stream`.*without=\['streaming'\]"):
        asyncio.run(streams(open_model))
    for check in checks(live=True, without=["streaming"]):  # whatever is replied
        asyncio.run(check(open_model))


def test_what_is_left_out_is_left_out_by_name() -> None:
    assert {c.__name__ for c in checks()} - {c.__name__ for c in checks(without=["usage"])} == {
        "returns_the_usage", "streams_the_usage",
    }  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"no feature of a model: uasge; use .*usage"):
        checks(without=["uasge"])  # type: ignore[list-item]
