"""Models that wrap other models: fallbacks, shared limits, and prices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentfsm import (
    Agent,
    AgentGuardrails,
    ReplyRestarted,
    RunCompleted,
    RunWarning,
    TextDelta,
    UserInputRequested,
    observer,
)
from agentfsm.errors import (
    ConfigurationError,
    ContextOverflowError,
    ModelError,
    ProviderError,
    TransientProviderError,
    UnknownModelError,
)
from agentfsm.loop.messages import Message, Reply, ToolCall, Usage
from agentfsm.loop.model import Model, ModelRequest, StreamChunk, StreamRestart, TextChunk
from agentfsm.models import ConcurrencyLimit, FallbackModel, Limited, Price, Priced, RateLimit, Unstreamed
from agentfsm.runtime.host import Host
from agentfsm.testing import FakeClock, ScriptedModel
from tests.helpers.model_clients import REQUEST, ScriptedStream, hang
from tests.helpers.stepped_clock import SteppedClock

HELLO = Reply(Message.assistant("Hello"))
SOON = ModelRequest(REQUEST.messages, timeout_s=0.2, heartbeat_s=0.2)


def ask(model: Model, request: ModelRequest = REQUEST) -> Reply:
    return asyncio.run(_reply(model, request))


async def _reply(model: Model, request: ModelRequest) -> Reply:
    return await model.reply(request)


def stream(model: Any, request: ModelRequest = REQUEST) -> list[StreamChunk | Reply]:
    async def main() -> list[StreamChunk | Reply]:
        return [piece async for piece in model.stream(request)]

    return asyncio.run(main())


# -- fallbacks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [TransientProviderError("busy"), ProviderError("no key"), ValueError("what?")])
def test_if_the_first_model_fails_the_next_replies_and_is_named(failure: Exception) -> None:
    first, second = ScriptedModel([failure], name="a"), ScriptedModel(["Hello"], name="b")
    reply = ask(FallbackModel(first, second))
    assert reply.message.content == "Hello"
    assert reply.model == "b"


def test_if_the_first_model_replies_the_next_is_not_called() -> None:
    second = ScriptedModel([], name="b")
    assert ask(FallbackModel(ScriptedModel(["Hello"], name="a"), second)).model == "a"
    assert second.calls == 0


def test_only_the_selected_failure_kinds_fall_back() -> None:
    second = ScriptedModel(["Hello"], name="b")
    with pytest.raises(ContextOverflowError):
        ask(FallbackModel(ScriptedModel([ContextOverflowError("long")]), second))
    with pytest.raises(ProviderError):
        ask(FallbackModel(ScriptedModel([ProviderError("no")]), second, on=["transient_provider"]))
    assert second.calls == 0
    larger = FallbackModel(ScriptedModel([ContextOverflowError("long")]), second, on=["context_overflow"])
    assert ask(larger).message.content == "Hello"


@pytest.mark.parametrize(
    ("failures", "kind", "wait"),
    [
        ([ProviderError("a"), TransientProviderError("b", retry_after_s=7)], TransientProviderError, 7),
        (
            [TransientProviderError("a", retry_after_s=7), TransientProviderError("b", retry_after_s=3)],
            TransientProviderError,
            3,
        ),
        ([TransientProviderError("a", retry_after_s=7), TransientProviderError("b")], TransientProviderError, None),
        ([ProviderError("a"), ProviderError("b")], ProviderError, None),
    ],
)
def test_if_all_models_fail_the_most_retryable_failure_is_raised(
    failures: list[ModelError], kind: type[ModelError], wait: float | None
) -> None:
    with pytest.raises(ModelError) as caught:
        ask(FallbackModel(*(ScriptedModel([failure]) for failure in failures)))
    assert type(caught.value) is kind
    assert caught.value.retry_after_s == wait
    assert all(str(failure) in str(caught.value) for failure in failures)


class Hanging:
    """A model that never replies."""

    name = "hanging"

    async def reply(self, request: ModelRequest) -> Reply:
        await hang()
        return HELLO


def test_a_model_that_hangs_leaves_time_for_the_next_model() -> None:
    assert ask(FallbackModel(Hanging(), ScriptedModel(["Hello"])), SOON).message.content == "Hello"
    pieces = stream(FallbackModel(ScriptedStream([TextChunk("Half a"), hang]), ScriptedModel(["Hello"])), SOON)
    assert isinstance(pieces[-1], Reply)


def test_an_interrupted_stream_restarts_with_the_next_model_and_emits_an_event() -> None:
    first = ScriptedStream([TextChunk("Half a"), TransientProviderError("gone")])
    pieces = stream(FallbackModel(first, ScriptedStream([TextChunk("Hello"), HELLO])))
    assert [type(piece) for piece in pieces] == [TextChunk, StreamRestart, TextChunk, Reply]
    assert first.closed == 1
    nothing_told = ScriptedStream([TransientProviderError("gone")])
    pieces = stream(FallbackModel(nothing_told, ScriptedStream([HELLO])))
    assert [type(piece) for piece in pieces] == [Reply]


def test_a_run_falls_back_and_its_journal_names_the_model_that_replied() -> None:
    async def main() -> tuple[list[Any], str]:
        first = ScriptedStream([TextChunk("Half a"), TransientProviderError("gone")])
        run = Agent(FallbackModel(first, ScriptedStream([TextChunk("Hello"), HELLO]))).run("go")
        events = [event async for event in run]
        assert run.run_state.reply is not None
        return events, run.run_state.reply.model

    events, answered = asyncio.run(main())
    assert [type(e) for e in events if isinstance(e, TextDelta | ReplyRestarted)] == [
        TextDelta,
        ReplyRestarted,
        TextDelta,
    ]
    assert isinstance(events[-1], RunCompleted)
    assert answered == "scripted-stream"


def failing(times: int) -> ScriptedModel:
    return ScriptedModel([ProviderError("down")] * times)


@pytest.mark.parametrize("streamed", [False, True])
def test_every_call_of_a_fallback_counts_towards_max_iterations(streamed: bool) -> None:
    models = [failing(9), failing(9), ScriptedModel(["Hello"])]
    agent = Agent(FallbackModel(*models), hooks=[observer(lambda event: None)] if streamed else [])
    run = agent.run_sync("go").run_state
    assert (run.model_calls, run.iterations) == (3, 3)


@pytest.mark.parametrize(("allowed", "made"), [(1, [1, 0]), (2, [1, 1]), (3, [2, 1]), (5, [3, 2])])
def test_a_fallback_makes_no_call_that_the_run_has_not_left(allowed: int, made: list[int]) -> None:
    models = [ScriptedModel([TransientProviderError("down")] * 9) for _ in range(2)]
    limits = AgentGuardrails(max_iterations=allowed, on_limit="stop")
    agent = Agent(FallbackModel(*models), guardrails=limits, host=Host(clock=FakeClock()))
    assert agent.run_sync("go").run_state.model_calls == allowed
    assert [model.calls for model in models] == made


def test_the_calls_of_fallbacks_within_a_fallback_are_counted_once_each() -> None:
    models = [failing(9) for _ in range(3)]
    inner = FallbackModel(models[0], models[1])
    run = Agent(FallbackModel(inner, models[2], ScriptedModel(["Hello"]))).run_sync("go").run_state
    assert run.model_calls == 4


def test_models_may_be_names_and_invalid_arguments_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k" * 20)
    assert FallbackModel("openai:gpt-5-mini", "ollama:llama3.2").name == "openai:gpt-5-mini | ollama:llama3.2"
    with pytest.raises(ConfigurationError, match="needs a model"):
        FallbackModel()
    with pytest.raises(ConfigurationError, match="tool_error"):
        FallbackModel("ollama:llama3.2", on=["tool_error"])
    with pytest.raises(UnknownModelError):
        FallbackModel("nobody:knows")


def test_cancelling_a_fallback_is_not_a_failure_of_its_models() -> None:
    second = ScriptedModel(["Hello"])

    async def main() -> None:
        asked = asyncio.ensure_future(FallbackModel(Hanging(), second).reply(REQUEST))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(main())
    assert second.calls == 0


# -- limits ------------------------------------------------------------------------------------------------


class Crowd:
    """A slow model that counts its concurrent calls."""

    name = "crowd"

    def __init__(self) -> None:
        self.now = self.most = self.calls = 0

    async def reply(self, request: ModelRequest) -> Reply:
        self.now += 1
        self.calls += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        return Reply(Message.assistant("done"), usage=Usage(60, 40))

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply, None]:
        yield await self.reply(request)


@pytest.mark.parametrize("watched", [True, False])
def test_a_concurrency_limit_holds_across_agents(watched: bool) -> None:
    crowd, limit = Crowd(), ConcurrencyLimit(3)
    agents = [Agent(Limited(crowd, limit)) for _ in range(4)]

    async def one(agent: Agent) -> None:
        run = agent.run("go")
        if watched:
            async for _ in run:
                pass
        assert (await run).output == "done"

    async def main() -> None:
        await asyncio.gather(*(one(agents[i % 4]) for i in range(20)))

    asyncio.run(main())
    assert crowd.calls == 20
    assert crowd.most == 3


def test_waiting_for_a_limit_does_not_count_towards_the_timeout() -> None:
    clock = SteppedClock()

    class Slow:
        name = "slow"

        async def reply(self, request: ModelRequest) -> Reply:
            await clock.sleep(20)
            return Reply(Message.assistant("done"))

    async def main() -> list[bool]:
        limits = AgentGuardrails(llm_timeout_s=60, max_execution_time_s=1e6)
        agent = Agent(Limited(Slow(), ConcurrencyLimit(1)), guardrails=limits, host=Host(clock=clock))
        results = await asyncio.gather(*(agent.run("go") for _ in range(10)))
        return [result.ok and len(result.decisions) == 3 for result in results]

    assert all(clock.run(main()))


def test_permits_are_granted_in_order_and_passed_on_by_cancelled_calls() -> None:
    async def main() -> list[int]:
        limit, order = ConcurrencyLimit(1), list[int]()

        async def one(place: int) -> None:
            async with limit.acquire():
                order.append(place)
                await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(one(place)) for place in range(9)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        tasks[4].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with limit.acquire():
            pass
        return order

    assert asyncio.run(main()) == [0, 1, 2, 5, 6, 7, 8]


def test_a_permit_granted_to_a_call_cancelled_at_the_same_time_is_not_lost() -> None:
    async def main() -> None:
        limit = ConcurrencyLimit(1)
        permit = limit.acquire()
        await permit.__aenter__()
        waiting = [asyncio.ensure_future(limit.acquire().__aenter__()) for _ in range(2)]
        await asyncio.sleep(0)
        await permit.__aexit__(None, None, None)  # the first waiting call has it now
        waiting[0].cancel()
        async with asyncio.timeout(30):
            await asyncio.wait({waiting[1]})
        assert waiting[1].done()

    asyncio.run(main())


def test_one_limit_works_across_event_loops_in_several_threads() -> None:
    crowd, limit = Crowd(), ConcurrencyLimit(2)
    agent = Agent(Limited(crowd, limit))
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda _: agent.run_sync("go").output, range(24)))
    assert results == ["done"] * 24
    assert crowd.most <= 2


class Tap:
    """A streaming model behind a limit; ``seen`` records the order of their events."""

    name = "tap"

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def reply(self, request: ModelRequest) -> Reply:
        return HELLO

    async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply, None]:
        self.seen.append("opened")
        try:
            yield TextChunk("Hel")
            yield HELLO
        finally:
            self.seen.append("closed")

    @asynccontextmanager
    async def acquire(self) -> AsyncGenerator[Any, None]:
        yield lambda usage: None
        self.seen.append("left")


STREAMED: dict[str, Callable[[Tap], Any]] = {
    "limited": lambda tap: Limited(tap, tap),
    "priced": lambda tap: Priced(tap, {}),
    "fallback": FallbackModel,
    "priced and limited": lambda tap: Limited(Priced(tap, {}), tap),
    "limited and priced": lambda tap: Priced(Limited(tap, tap), {}),
    "limited fallback": lambda tap: Limited(FallbackModel(tap), tap),
}


@pytest.mark.parametrize("wrapped", STREAMED)
def test_closing_a_stream_closes_the_wrapped_streams_before_releasing_the_permit(wrapped: str) -> None:
    tap = Tap()

    async def early() -> None:
        told = STREAMED[wrapped](tap).stream(REQUEST)
        assert await anext(told) == TextChunk("Hel")
        await told.aclose()
        assert tap.seen[:2] == ["opened", "closed"]

    async def whole() -> None:
        run = Agent(STREAMED[wrapped](tap)).run("go")
        assert any([isinstance(event, TextDelta) async for event in run])
        assert tap.seen[:2] == ["opened", "closed"]

    asyncio.run(early())
    tap.seen.clear()
    asyncio.run(whole())


def rate(clock: FakeClock, **wanted: float) -> RateLimit:
    return RateLimit(**wanted, now=clock.monotonic, sleep=clock.sleep)


def times(limit: RateLimit, calls: int, usage: Usage | None = None) -> list[float]:
    """When each of the calls was admitted, in seconds from the first."""
    clock = limit._sleep.__self__  # type: ignore[attr-defined]  # the fake clock

    async def main() -> list[float]:
        begun, found = clock.monotonic(), list[float]()
        for _ in range(calls):
            async with limit.acquire() as spend:
                found.append(round(clock.monotonic() - begun, 6))
                spend(usage or Usage())
        return found

    return asyncio.run(main())


def test_a_full_bucket_allows_a_burst_and_then_a_constant_rate() -> None:
    assert times(rate(FakeClock(), calls=3, per_s=60), 6) == [0, 0, 0, 20, 40, 60]


def test_less_than_one_call_per_period_is_one_in_a_longer_period() -> None:
    assert times(rate(FakeClock(), calls=0.5, per_s=60), 3) == [0, 120, 240]


def test_sleep_may_return_any_awaitable() -> None:
    clock = FakeClock()

    def sleep(seconds: float) -> asyncio.Future[None]:
        return asyncio.ensure_future(clock.sleep(seconds))

    async def main() -> list[float]:
        limit, begun, found = RateLimit(calls=1, per_s=5, now=clock.monotonic, sleep=sleep), clock.monotonic(), []
        for _ in range(3):
            async with limit.acquire():
                found.append(clock.monotonic() - begun)
        return found

    assert asyncio.run(main()) == [0, 5, 10]


def test_tokens_are_subtracted_after_a_call_and_calls_wait_for_a_negative_bucket() -> None:
    usage = Usage(input_tokens=900, output_tokens=600)
    assert times(rate(FakeClock(), tokens=1000, per_s=10), 4, usage) == [0, 5, 20, 35]


def test_a_bucket_never_exceeds_its_size() -> None:
    clock = FakeClock()
    limit = rate(clock, calls=2, per_s=2)
    clock.advance(1000)
    assert times(limit, 4) == [0, 0, 1, 2]


def test_calls_wait_for_a_rate_limit_in_order() -> None:
    async def main() -> list[int]:
        limit, order = rate(FakeClock(), calls=1, per_s=1), list[int]()

        async def one(place: int) -> None:
            async with limit.acquire():
                order.append(place)

        await asyncio.gather(*(one(place) for place in range(8)))
        return order

    assert asyncio.run(main()) == list(range(8))


def test_limits_and_fallbacks_may_wrap_each_other() -> None:
    clock = FakeClock()
    limits = rate(clock, tokens=100, per_s=1), ConcurrencyLimit(1)
    for model in (
        Limited(FallbackModel(ScriptedModel([ProviderError("no")] * 4), Crowd()), *limits),
        FallbackModel(Limited(ScriptedModel([ProviderError("no")] * 4), *limits), Limited(Crowd(), *limits)),
        Limited(Limited(Crowd(), *limits), ConcurrencyLimit(3)),
        Limited(Priced(Crowd(), {}), *limits),
        Priced(Limited(Crowd(), *limits), {"crowd": Price()}),
    ):
        assert ask(model).message.content == "done"
        assert isinstance(stream(model)[-1], Reply)
        assert Agent(model).run_sync("go").output == "done"


@pytest.mark.parametrize("wrong", [{"calls": 0}, {"tokens": -1}, {"per_s": 0}, {"calls": float("nan")}])
def test_limits_out_of_range_are_rejected_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        RateLimit(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="at least 1"):
        ConcurrencyLimit(0)


# -- prices ------------------------------------------------------------------------------------------------


def spending(name: str = "acme:big", **usage: Any) -> ScriptedModel:
    return ScriptedModel([Reply(Message.assistant("done"), usage=Usage(**usage))] * 9, name=name)


def test_a_reply_includes_its_cost() -> None:
    price = Price(input=3, cached=0.3, written=3.75, output=15)
    usage = {"input_tokens": 1_000_000, "cached_tokens": 600_000, "written_tokens": 100_000, "output_tokens": 200_000}
    reply = ask(Priced(spending(**usage), {"acme:big": price}))
    assert reply.usage.cost_usd == pytest.approx(0.3 * 3 + 0.6 * 0.3 + 0.1 * 3.75 + 0.2 * 15)
    assert reply.usage.unpriced_tokens == 0


@pytest.mark.parametrize(
    ("table", "cost"),
    [
        ({"acme:big": Price(input=1), "acme:*": Price(input=2)}, 1),
        ({"acme:*": Price(input=2), "*": Price(input=3)}, 2),
        ({"*": Price(input=3)}, 3),
        ({"other:*": Price(input=4)}, 0),
    ],
)
def test_the_most_specific_price_pattern_wins(table: dict[str, Price], cost: float) -> None:
    reply = ask(Priced(spending(input_tokens=1_000_000), table))
    assert reply.usage.cost_usd == cost
    assert reply.usage.unpriced_tokens == (0 if cost else 1_000_000)


def test_a_fallback_is_priced_by_the_model_that_replied() -> None:
    both = FallbackModel(
        ScriptedModel([ProviderError("no")], name="acme:big"), spending("acme:small", input_tokens=10**6)
    )
    table = {"acme:big": Price(input=9), "acme:small": Price(input=1)}
    assert ask(Priced(both, table)).usage.cost_usd == 1


def test_a_cost_reported_by_the_provider_is_kept() -> None:
    model = spending(input_tokens=1_000_000, cost_usd=0.07)
    assert ask(Priced(model, {"acme:big": Price(input=9)})).usage.cost_usd == 0.07


def test_a_free_model_is_priced_at_zero() -> None:
    reply = ask(Priced(spending(input_tokens=1_000_000), {"acme:*": Price()}))
    assert (reply.usage.cost_usd, reply.usage.unpriced_tokens) == (0, 0)


def calling(name: str, **usage: Any) -> ScriptedModel:
    """A model that calls the time tool repeatedly."""
    replies = [
        Reply(Message.assistant("", (ToolCall("", "clock", {"zone": place}),)), usage=Usage(**usage))
        for place in range(9)
    ]
    return ScriptedModel(replies, name=name)


def clock(zone: int) -> str:
    """Tell the time."""
    return f"noon in zone {zone}"


def test_a_cost_limit_uses_the_price_table() -> None:
    model = Priced(calling("acme:big", input_tokens=100_000), {"acme:big": Price(input=1)})
    agent = Agent(model, tools=[clock], guardrails=AgentGuardrails(max_cost_usd=0.25), host=Host(clock=FakeClock()))
    result = agent.run_sync("go")
    assert isinstance(result.outcome, UserInputRequested)
    assert result.outcome.originating_failure_kind == "cost_limit"
    assert result.usage.cost_usd == pytest.approx(0.3)


def test_a_cost_limit_that_cannot_be_enforced_is_warned_about_once() -> None:
    async def main(limit: float | None) -> list[str]:
        model = Priced(calling("acme:big", input_tokens=100_000), {})
        agent = Agent(model, tools=[clock], guardrails=AgentGuardrails(max_cost_usd=limit))
        events = [event async for event in agent.run("go")]
        return [event.text for event in events if isinstance(event, RunWarning)]

    (warning,) = asyncio.run(main(0.25))
    assert "acme:big" in warning
    assert "price" in warning
    assert asyncio.run(main(None)) == []


@pytest.mark.parametrize("wrong", [{"input": -1}, {"output": float("nan")}, {"cached": float("inf")}])
def test_prices_out_of_range_are_rejected_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Price(**wrong)


@pytest.mark.parametrize("wrapped", [FallbackModel, Limited, lambda model: Priced(model, {})])
def test_closing_a_wrapper_closes_the_wrapped_model(wrapped: Any) -> None:
    closed: list[bool] = []

    class Closing(ScriptedModel):
        async def aclose(self) -> None:
            closed.append(True)

    async def main() -> None:
        await wrapped(Closing()).aclose()
        await wrapped(ScriptedModel()).aclose()

    asyncio.run(main())
    assert closed == [True]


def test_an_unstreamed_model_is_asked_for_whole_replies_within_the_limits_of_the_inner_one() -> None:
    asked: list[str] = []

    class Streaming:
        name = "streaming"

        async def reply(self, request: ModelRequest) -> Reply:
            asked.append("whole")
            return Reply(Message.assistant("one two"))

        async def stream(self, request: ModelRequest) -> AsyncGenerator[StreamChunk | Reply, None]:
            asked.append("streamed")
            yield TextChunk("one ")
            yield TextChunk("two")
            yield Reply(Message.assistant("one two"))

    async def deltas(model: Any) -> list[str]:
        return [event.text async for event in Agent(model).run("go") if isinstance(event, TextDelta)]

    assert asyncio.run(deltas(Streaming())) == ["one ", "two"]
    assert asyncio.run(deltas(Unstreamed(Streaming()))) == ["one two"]
    assert asyncio.run(deltas(Unstreamed(Limited(Streaming(), ConcurrencyLimit(1))))) == ["one two"]
    assert asked == ["streamed", "whole", "whole"]
    assert Unstreamed(Streaming()).name == "streaming"
