"""Spans of runs, model calls and tool calls: names, parents, and no content by default."""

from __future__ import annotations

import asyncio
import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the OpenTelemetry SDK is not installed")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    FinishReason,
    Message,
    MissingExtraError,
    Reply,
    RunResult,
    TransientProviderError,
    Usage,
    UserInputRequested,
    deny,
    permissions,
    tool,
)
from agentfsm.integrations.otel import tracing
from agentfsm.loop.events import RunCompleted, RunResumed, RunStarted
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.graphs import renamed
from tests.helpers.provider_rules import check_transcript

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as conventions


class Collected:
    """The exporter of these tests."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def spans(self) -> list[ReadableSpan]:
        return sorted(self.exporter.get_finished_spans(), key=lambda s: s.start_time or 0)

    def named(self, name: str) -> ReadableSpan:
        (span,) = [s for s in self.spans if s.name == name]
        return span

    def hooks(self, **options: Any) -> list[Any]:
        return [*tracing(tracer_provider=self.provider, **options)]


@pytest.fixture
def collected() -> Collected:
    return Collected()


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def broken() -> str:
    """Break."""
    raise ValueError("canary")


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


class Named(ScriptedModel):
    """A scripted model with a provider's name."""

    def __init__(self, script: Sequence[Any], name: str = "openai:gpt-x") -> None:
        super().__init__(script, name=name)


def reply(message: Message, finish: FinishReason = FinishReason.STOP) -> Reply:
    return Reply(message, finish, Usage(10, 5, 3, reasoning_tokens=4, written_tokens=2), model="gpt-x-2026")


def parent_of(span: ReadableSpan, spans: list[ReadableSpan]) -> str | None:
    ids = {s.context.span_id: s.name for s in spans if s.context is not None}
    return None if span.parent is None else ids[span.parent.span_id]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def awaited(run: Any) -> RunResult:
    return await run


async def iterated(run: Any) -> RunResult:
    async for _ in run:
        pass
    return run.result


either = pytest.mark.parametrize("go", [awaited, iterated])


# -- names and parents ---------------------------------------------------------------------------------------


@either
def test_a_run_is_a_span_and_each_call_is_a_child_span(collected: Collected, go: Any) -> None:
    model = Named([call("add", a=1, b=2), reply(Message.assistant("3"))])
    agent = Agent(model, tools=[add], hooks=collected.hooks(agent_name="clerk"))
    asyncio.run(go(agent.run("go", session_id="talk", run_id="r1")))
    spans = collected.spans
    assert [s.name for s in spans] == ["invoke_agent clerk", "chat gpt-x", "execute_tool add", "chat gpt-x"]
    assert [s.kind for s in spans] == [SpanKind.INTERNAL, SpanKind.CLIENT, SpanKind.INTERNAL, SpanKind.CLIENT]
    assert [parent_of(s, spans) for s in spans] == [None, *["invoke_agent clerk"] * 3]
    assert len({s.context.trace_id for s in spans if s.context is not None}) == 1
    for span in spans:
        assert attributes(span)["gen_ai.conversation.id"] == "talk"
        assert attributes(span)["agentfsm.run.id"] == "r1"
        assert span.status.status_code is StatusCode.UNSET
    assert [attributes(s)["gen_ai.operation.name"] for s in spans] == ["invoke_agent", "chat", "execute_tool", "chat"]
    assert [attributes(s).get("agentfsm.state") for s in spans] == [None, "call_llm", "dispatch_tool", "call_llm"]


def test_the_span_of_a_model_call_has_usage_and_finish_reason(collected: Collected) -> None:
    agent = Agent(
        Named([reply(Message.assistant("hi"))]),
        hooks=collected.hooks(),
        guardrails=AgentGuardrails(max_output_tokens=99),
    )
    agent.run_sync("go")
    recorded = attributes(collected.named("chat gpt-x"))
    expected = {
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-x",
        "gen_ai.request.max_tokens": 99,
        "gen_ai.response.model": "gpt-x-2026",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.cache_creation.input_tokens": 2,
        "gen_ai.usage.reasoning.output_tokens": 4,
    }
    assert expected.items() <= recorded.items()
    whole = attributes(collected.named("invoke_agent"))
    assert whole["gen_ai.usage.input_tokens"] == 10
    assert whole["agentfsm.outcome"] == "RunCompleted"


def test_every_attribute_name_is_in_the_conventions_or_has_our_prefix(collected: Collected) -> None:
    known = {v for k, v in vars(conventions).items() if k.startswith("GEN_AI_") and isinstance(v, str)}
    model = Named([call("add", a=1, b=2), call("broken"), reply(Message.assistant("3"))])
    Agent(model, tools=[add, broken], hooks=collected.hooks(agent_name="x", content=True)).run_sync("go")
    names = {n for s in collected.spans for n in attributes(s)}
    names |= {n for s in collected.spans for e in s.events for n in (e.attributes or {})}
    assert {n for n in names if not n.startswith("agentfsm.")} <= known | {"error.type"}
    assert any(n.startswith("gen_ai.input") for n in names)


@pytest.mark.parametrize(
    ("name", "provider", "model"),
    [
        ("anthropic:claude-x", "anthropic", "claude-x"),
        ("openai-responses:gpt-x", "openai", "gpt-x"),
        ("mistral:small:2", "mistral_ai", "small:2"),
        ("ollama:llama", "ollama", "llama"),
        ("my own", "my own", "my own"),
    ],
)
def test_the_provider_is_named_as_the_conventions_do(
    collected: Collected, name: str, provider: str, model: str
) -> None:
    Agent(Named(["hi"], name), hooks=collected.hooks()).run_sync("go")
    recorded = attributes(collected.named(f"chat {model}"))
    assert (recorded["gen_ai.provider.name"], recorded["gen_ai.request.model"]) == (provider, model)


def test_every_transition_is_an_event_of_the_run(collected: Collected) -> None:
    result = Agent(Named([call("add", a=1, b=2), "3"]), tools=[add], hooks=collected.hooks()).run_sync("go")
    events = [e for e in collected.named("invoke_agent").events if e.name == "agentfsm.transition"]
    seen = [dict(e.attributes or {}) for e in events]
    assert [e["agentfsm.transition"] for e in seen] == [d.transition.id for d in result.decisions]
    assert seen[0] == {
        "agentfsm.state.from": "pre_step",
        "agentfsm.state.to": "call_llm",
        "agentfsm.guard": "otherwise",
        "agentfsm.transition": "pre_step.otherwise",
    }


@either
def test_spans_created_by_a_tool_and_a_model_are_children_of_their_spans(collected: Collected, go: Any) -> None:
    tracer = collected.provider.get_tracer("theirs")

    def think(_: Any) -> Any:
        with tracer.start_as_current_span("http"):
            return call("look") if not collected.spans else "done"

    def look() -> str:
        """Look."""
        with tracer.start_as_current_span("database"):
            return "seen"

    asyncio.run(go(Agent(Named([think, "ok"]), tools=[look], hooks=collected.hooks()).run("go")))
    spans = collected.spans
    assert parent_of(collected.named("http"), spans) == "chat gpt-x"
    assert parent_of(collected.named("database"), spans) == "execute_tool look"


@either
def test_a_run_is_a_child_of_the_span_that_started_it_and_restores_the_context(collected: Collected, go: Any) -> None:
    tracer = collected.provider.get_tracer("theirs")

    async def main() -> None:
        with tracer.start_as_current_span("request") as outer:
            await go(Agent(Named([call("add", a=1, b=2), "3"]), tools=[add], hooks=collected.hooks()).run("go"))
            assert trace.get_current_span() is outer
        assert not trace.get_current_span().is_recording()

    asyncio.run(main())
    assert parent_of(collected.named("invoke_agent"), collected.spans) == "request"


@either
def test_concurrent_calls_have_a_span_each(collected: Collected, go: Any) -> None:
    tracer = collected.provider.get_tracer("theirs")

    @tool(parallel=True)
    async def wait(n: int) -> str:
        """Wait."""
        await asyncio.sleep(0)
        with tracer.start_as_current_span(f"inside {n}"):
            return str(n)

    model = Named([[call("wait", n=1), call("wait", n=2)], "ok"])
    asyncio.run(go(Agent(model, tools=[wait], hooks=collected.hooks()).run("go")))
    tools = {s.context.span_id: s for s in collected.spans if s.name == "execute_tool wait" and s.context is not None}
    assert len(tools) == 2
    inside = [collected.named(f"inside {n}") for n in (1, 2)]
    assert {s.parent.span_id for s in inside if s.parent is not None} == set(tools)


@either
def test_the_span_of_a_sub_agent_is_a_child_of_the_call(collected: Collected, go: Any) -> None:
    hooks = collected.hooks()
    helper = Agent(Named(["x"], "openai:small"), hooks=hooks)
    agent = Agent(Named([call("h", task="a"), "ok"]), tools=[helper.as_tool("h", "Helps.")], hooks=hooks)
    asyncio.run(go(agent.run("go", run_id="top")))
    spans = collected.spans
    inner = next(s for s in spans if attributes(s).get("agentfsm.run.parent.id") == "top")
    assert parent_of(inner, spans) == "execute_tool h"
    assert parent_of(collected.named("chat small"), spans) == "invoke_agent"
    assert (
        attributes(collected.named("execute_tool h"))["agentfsm.subagent.run.id"]
        == attributes(inner)["agentfsm.run.id"]
    )


# -- failures ------------------------------------------------------------------------------------------------


def test_a_tool_that_fails_fails_its_span_and_not_the_run(collected: Collected) -> None:
    Agent(Named([call("broken"), "ok"]), tools=[broken], hooks=collected.hooks()).run_sync("go")
    span = collected.named("execute_tool broken")
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "ValueError"
    assert attributes(span)["agentfsm.tool.status"] == "failed"
    assert collected.named("invoke_agent").status.status_code is StatusCode.UNSET


def test_a_failed_model_call_fails_its_span_and_the_run_recovers(collected: Collected) -> None:
    from agentfsm import Host

    model = Named([TransientProviderError("canary", status=503), "ok"])
    Agent(model, hooks=collected.hooks(), host=Host(clock=FakeClock())).run_sync("go")
    first, second = [s for s in collected.spans if s.name == "chat gpt-x"]
    assert (first.status.status_code, attributes(first)["error.type"]) == (StatusCode.ERROR, "transient_provider")
    assert second.status.status_code is StatusCode.UNSET
    (recovery,) = [e for e in collected.named("invoke_agent").events if e.name == "agentfsm.recovery"]
    assert dict(recovery.attributes or {}) == {
        "agentfsm.failure.kind": "transient_provider",
        "agentfsm.action": "retry",
        "agentfsm.attempt": 1,
        "agentfsm.backoff_s": 2.0,
    }


def test_a_handoff_fails_the_span_of_the_run(collected: Collected) -> None:
    Agent(Named([ValueError("no")]), hooks=collected.hooks()).run_sync("go")
    span = collected.named("invoke_agent")
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "provider_error"
    assert attributes(span)["agentfsm.outcome"] == "Handoff"


def test_a_denied_call_is_an_event_and_not_a_span(collected: Collected) -> None:
    hooks = [*collected.hooks(), permissions(deny("add"))]
    Agent(Named([call("add", a=1, b=2), "ok"]), tools=[add], hooks=hooks).run_sync("go")
    assert [s.name for s in collected.spans if s.name.startswith("execute_tool")] == []
    (event,) = [e for e in collected.named("invoke_agent").events if e.name == "agentfsm.tool.not_run"]
    assert (event.attributes or {})["agentfsm.tool.status"] == "denied"


@pytest.mark.parametrize("where", ["model", "tool"])
@either
def test_a_cancelled_run_ends_every_span(collected: Collected, go: Any, where: str) -> None:
    async def main() -> None:
        reached = asyncio.Event()

        async def hang(*_: Any) -> str:
            """Hang."""
            reached.set()
            await asyncio.Event().wait()
            return ""

        async def stuck() -> str:
            """Hang."""
            return await hang()

        script = [hang] if where == "model" else [call("stuck")]
        run = Agent(Named(script), tools=[stuck], hooks=collected.hooks()).run("go")
        task = asyncio.create_task(go(run))
        await reached.wait()
        run.cancel()
        check_transcript((await task).messages, request=False)

    asyncio.run(main())
    names = [s.name for s in collected.spans]
    assert names == ["invoke_agent", "chat gpt-x", "execute_tool stuck"][: len(names)]
    assert len(names) == (2 if where == "model" else 3)
    last = collected.spans[-1]
    assert attributes(last)["error.type"] == "cancelled"
    assert attributes(collected.named("invoke_agent"))["agentfsm.outcome"] == "RunCancelled"


def test_a_suspended_run_ends_its_span_and_resuming_starts_another(collected: Collected) -> None:
    from agentfsm import Allow

    agent = Agent(Named([call("pay", amount=1), "ok"]), tools=[pay], hooks=collected.hooks())
    first = agent.run_sync("go")
    assert isinstance(first.outcome, UserInputRequested)
    asyncio.run(awaited(agent.resume(first.outcome.suspension_record, Allow())))
    one, two = [s for s in collected.spans if s.name == "invoke_agent"]
    assert attributes(one)["agentfsm.outcome"] == "UserInputRequested"
    assert attributes(one)["agentfsm.waiting.kind"] == "approval"
    assert one.status.status_code is StatusCode.UNSET
    assert attributes(two)["agentfsm.run.resumed"] == "approval"
    assert attributes(one)["agentfsm.run.id"] == attributes(two)["agentfsm.run.id"]


# -- content ---------------------------------------------------------------------------------------------------


def everything(collected: Collected) -> str:
    return "\n".join(span.to_json() for span in collected.spans)


def talk(collected: Collected, **options: Any) -> None:
    model = Named([call("add", a=47110815471108154711, b=2), call("broken"), "canary reply"])
    agent = Agent(model, tools=[add, broken], instructions="canary instructions", hooks=collected.hooks(**options))
    agent.run_sync("canary prompt")


def test_spans_contain_no_content_by_default(collected: Collected) -> None:
    talk(collected)
    assert "canary" not in everything(collected)
    assert "47110815471108154711" not in everything(collected)
    assert "47110815471108154713" not in everything(collected)


def test_spans_contain_content_on_request(collected: Collected) -> None:
    talk(collected, content=True)
    first, _, third = [attributes(s) for s in collected.spans if s.name == "chat gpt-x"]
    assert json.loads(first["gen_ai.input.messages"]) == [
        {"role": "system", "parts": [{"type": "text", "content": "canary instructions"}]},
        {"role": "user", "parts": [{"type": "text", "content": "canary prompt"}]},
    ]
    (recorded,) = json.loads(first["gen_ai.output.messages"])
    assert (recorded["role"], recorded["finish_reason"]) == ("assistant", "tool_calls")
    assert recorded["parts"][0]["type"] == "tool_call"
    assert recorded["parts"][0]["arguments"] == {"a": 47110815471108154711, "b": 2}
    assert json.loads(third["gen_ai.output.messages"])[0]["parts"] == [{"type": "text", "content": "canary reply"}]
    heard = [m["parts"][0] for m in json.loads(third["gen_ai.input.messages"]) if m["role"] == "tool"]
    assert heard[0] == {
        "type": "tool_call_response",
        "id": recorded["parts"][0]["id"],
        "response": "47110815471108154713",
    }
    done = attributes(collected.named("execute_tool add"))
    assert json.loads(done["gen_ai.tool.call.arguments"]) == {"a": 47110815471108154711, "b": 2}
    assert done["gen_ai.tool.call.result"] == "47110815471108154713"


# -- other ---------------------------------------------------------------------------------------------------


def test_without_an_sdk_nothing_happens() -> None:
    agent = Agent(Named([call("add", a=1, b=2), "3"]), tools=[add], hooks=[*tracing()])
    assert agent.run_sync("go").output == "3"


def test_one_observer_and_hook_trace_many_concurrent_runs(collected: Collected) -> None:
    hooks = collected.hooks()

    async def main() -> None:
        agents = [Agent(Named([call("add", a=1, b=2), "3"]), tools=[add], hooks=hooks) for _ in range(20)]
        await asyncio.gather(*(awaited(a.run("go")) for a in agents))

    asyncio.run(main())
    spans = collected.spans
    assert len(spans) == 20 * 4
    per_trace = [
        [s.name for s in spans if s.context and s.context.trace_id == t]
        for t in {s.context.trace_id for s in spans if s.context is not None}
    ]
    assert len(per_trace) == 20
    assert all(sorted(names) == ["chat gpt-x", "chat gpt-x", "execute_tool add", "invoke_agent"] for names in per_trace)


def started(run_id: str) -> RunStarted:
    return RunStarted(run_id=run_id, seq=1, time=0.0, prompt="go", model="scripted")


def test_the_span_of_an_interrupted_run_ends_when_the_run_is_resumed(collected: Collected) -> None:
    """For example because its store was full: the caller gets an error, but there is no event."""
    watch = collected.hooks()[0].function
    watch(started("r"))
    watch(RunResumed(run_id="r", seq=1, time=0.0, kind="interrupted", model="scripted"))
    (lost,) = collected.spans
    assert (lost.status.status_code, attributes(lost)["error.type"]) == (StatusCode.ERROR, "lost")
    watch(RunCompleted(run_id="r", seq=2, time=0.0, output="done"))
    assert [s.status.status_code for s in collected.spans] == [StatusCode.ERROR, StatusCode.UNSET]


def test_spans_of_runs_that_never_end_are_bounded(collected: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfsm.integrations.otel.MAX_OPEN_RUNS", 3)
    watch = collected.hooks()[0].function
    for n in range(5):
        watch(started(f"r{n}"))
    assert [attributes(s)["agentfsm.run.id"] for s in collected.spans] == ["r0", "r1"]


def test_a_run_that_started_without_tracing_is_ignored(collected: Collected) -> None:
    """The hook may be used without the observer: it must not harm a run."""
    _, before_model = tracing(tracer_provider=collected.provider)
    assert Agent(Named(["hi"]), hooks=[before_model]).run_sync("go").output == "hi"
    assert collected.spans == []


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingExtraError, match=r"agentfsm\[otel\]"):
        tracing()


def test_a_renamed_loop_has_the_same_spans_with_its_own_names() -> None:
    def spans(**graph: Any) -> list[tuple[str, Any]]:
        collected = Collected()
        hooks = tracing(tracer_provider=collected.provider)
        agent = Agent(ScriptedModel([call("add", a=20, b=22), "42"]), tools=[add], hooks=hooks, **graph)
        agent.run_sync("20 + 22?")
        return [(span.name, (span.attributes or {}).get("agentfsm.state")) for span in collected.spans]

    usual = spans()
    assert ("execute_tool add", "dispatch_tool") in usual
    assert spans(graph=renamed(LOOP, "my_")) == [(name, state and f"my_{state}") for name, state in usual]
