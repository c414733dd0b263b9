"""Spans of OpenTelemetry for runs, model calls and tool calls (extra ``otel``, the API alone).

    agent = Agent(model, tools=tools, hooks=[*tracing(agent_name="clerk")])

A run is an ``invoke_agent`` span; each model call is a ``chat`` span and each tool call an ``execute_tool`` span
below it. Names follow the GenAI conventions (https://github.com/open-telemetry/semantic-conventions-genai); what
they have no name for begins with ``agentfsm.``. Every transition is an event of the run's span. While a model or
a tool is at work its span is the current one, so what those record themselves, and a sub-agent's run, stands
below it. What people, models and tools say is left out unless it is asked for.

Without an SDK that collects them, spans cost next to nothing and go nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentfsm.core.events import (
    AgentError,
    Ending,
    Event,
    Handoff,
    ModelReplied,
    PartialRunSummary,
    RunResumed,
    RunStarted,
    ToolFinished,
    ToolStarted,
    Transitioned,
    UserInputRequested,
)
from agentfsm.core.failures import Failure
from agentfsm.core.messages import Usage
from agentfsm.core.render import render
from agentfsm.errors import MissingExtraError
from agentfsm.integrations.otel_content import messages_json, value_json
from agentfsm.integrations.otel_span import Opened, end, fail, known, usage
from agentfsm.machine.graph import State
from agentfsm.runtime.hooks import Hook, HookContext, Observer

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider

__all__ = ["tracing"]

PROVIDERS = {
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "gemini": "gcp.gemini",
    "google": "gcp.gemini",
    "mistral": "mistral_ai",
    "moonshot": "moonshot_ai",
    "openai-responses": "openai",
    "xai": "x_ai",
}
"""What the conventions call a provider, where that is not what we call it."""


MOST_RUNS = 10_000
"""Of so many runs spans are kept open; one that dies with its store says no last word, and must not stay for ever."""


def tracing(
    *, agent_name: str = "", content: bool = False, tracer_provider: TracerProvider | None = None
) -> tuple[Observer, Hook]:
    """What an agent's ``hooks`` need for spans; one pair serves any number of agents and runs.

    Args:
        agent_name: What the runs' spans call the agent (``gen_ai.agent.name``).
        content: Whether spans hold prompts, replies, arguments and results.
        tracer_provider: Where spans go; the global one unless given.

    Raises:
        MissingExtraError: The ``opentelemetry-api`` package is not installed.
    """
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise MissingExtraError("OpenTelemetry spans", "otel") from error
    spans = _Spans(trace.get_tracer("agentfsm", tracer_provider=tracer_provider), agent_name, content)
    return Observer(spans.observe), Hook(State.CALL_LLM, spans.before_model, name="tracing")


@dataclass
class _Traced:
    """The open spans of one run."""

    run: Span
    provider: str
    model: str
    common: dict[str, Any]
    chat: Opened | None = None
    tools: dict[str, Opened] = field(default_factory=dict[str, Opened])
    usage: Usage = field(default_factory=Usage)


class _Spans:
    """Makes spans of what an observer and a hook are told."""

    def __init__(self, tracer: Tracer, agent_name: str, content: bool) -> None:
        self._tracer, self._name, self._content = tracer, agent_name, content
        self._runs: dict[str, _Traced] = {}
        self._handlers: Mapping[type[Event], Callable[[_Traced, Any], None]] = {
            Transitioned: self._moved,
            ModelReplied: self._replied,
            ToolStarted: self._tool_started,
            ToolFinished: self._tool_finished,
            AgentError: self._recovering,
        }

    # -- what they are told -----------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """An event of a run."""
        if isinstance(event, RunStarted | RunResumed):
            self._run_started(event)
            return
        traced = self._runs.get(event.run_id)
        if traced is None:
            return
        if isinstance(event, Ending):
            self._run_ended(traced, event)
        elif (handler := self._handlers.get(type(event))) is not None:
            handler(traced, event)

    def before_model(self, seen: HookContext) -> None:
        """A model is about to be called: its span begins in the task that calls it."""
        traced = self._runs.get(seen.run.run_id)
        if traced is None:
            return
        cap = seen.run.output_cap or seen.run.guardrails.max_output_tokens
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": traced.provider,
            "gen_ai.request.model": traced.model,
            "gen_ai.request.max_tokens": cap,
            "agentfsm.state": str(seen.state),
            "agentfsm.model_call": seen.run.model_calls + 1,
            "gen_ai.input.messages": messages_json(render(seen.run)) if self._content else None,
        }
        traced.chat = self._below(traced, f"chat {traced.model}", attributes, client=True)

    # -- a run --------------------------------------------------------------------------------------------

    def _run_started(self, event: RunStarted | RunResumed) -> None:
        prefix, colon, model = event.model.partition(":")
        provider, model = (PROVIDERS.get(prefix, prefix), model) if colon else (event.model, event.model)
        common = {
            "gen_ai.agent.name": self._name or None,
            "gen_ai.conversation.id": event.session_id or None,
            "agentfsm.run.id": event.run_id,
        }
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": provider,
            "gen_ai.request.model": model,
            "agentfsm.run.parent.id": None if event.parent is None else event.parent[0],
            "agentfsm.run.resumed": event.kind if isinstance(event, RunResumed) else None,
            **common,
        }
        name = f"invoke_agent {self._name}" if self._name else "invoke_agent"
        if (lost := self._runs.pop(event.run_id, None)) is not None:  # it died without a word, and goes on now
            _give_up(lost)
        span = self._tracer.start_span(name, attributes=known(attributes))
        self._runs[event.run_id] = _Traced(span, provider, model, common)
        if len(self._runs) > MOST_RUNS:
            _give_up(self._runs.pop(next(iter(self._runs))))

    def _moved(self, traced: _Traced, event: Transitioned) -> None:
        decision = event.decision
        failure = decision.found if isinstance(decision.found, Failure) else None
        kind = None if failure is None else failure.kind.value
        traced.run.add_event(
            "agentfsm.transition",
            known(
                {
                    "agentfsm.state.from": str(decision.source),
                    "agentfsm.state.to": str(decision.target),
                    "agentfsm.guard": decision.guard,
                    "agentfsm.transition": decision.transition.id,
                    "agentfsm.failure.kind": kind,
                }
            ),
        )
        stopped = decision.guard if decision.guard in ("cancelled", "aborted") else None
        if decision.source == State.CALL_LLM and traced.chat is not None:
            end(traced.chat, kind or stopped)
            traced.chat = None
        elif decision.source == State.DISPATCH_TOOL:  # what has no result: cut off, or a sub-agent that waits
            for left in traced.tools.values():
                left.span.set_attribute("agentfsm.tool.status", "cut_off" if stopped else "waiting")
                end(left, stopped)
            traced.tools.clear()

    def _recovering(self, traced: _Traced, event: AgentError) -> None:
        traced.run.add_event(
            "agentfsm.recovery",
            {
                "agentfsm.failure.kind": event.failure.kind.value,
                "agentfsm.action": event.action.value,
                "agentfsm.attempt": event.attempt,
                "agentfsm.backoff_s": event.backoff_s,
            },
        )

    def _run_ended(self, traced: _Traced, event: Ending) -> None:
        del self._runs[event.run_id]
        for left in (traced.chat, *traced.tools.values()):
            if left is not None:
                end(left, "cancelled")
        span, asked = traced.run, event if isinstance(event, UserInputRequested) else None
        span.set_attributes(
            known(
                {
                    "agentfsm.outcome": type(event).__name__,
                    "agentfsm.waiting.kind": None if asked is None else asked.kind,
                    "agentfsm.cost_usd": traced.usage.cost_usd or None,
                    **usage(traced.usage),
                }
            )
        )
        if isinstance(event, Handoff | PartialRunSummary) and event.failure is not None:
            fail(span, event.failure.kind.value)
        span.end()

    # -- a model's reply ------------------------------------------------------------------------------------

    def _replied(self, traced: _Traced, event: ModelReplied) -> None:
        traced.usage += event.usage
        if traced.chat is None:
            return
        said = messages_json([event.message], event.finish_reason.value) if self._content else None
        attributes = {
            "gen_ai.response.finish_reasons": [event.finish_reason.value],
            "gen_ai.response.model": event.model or None,
            "gen_ai.output.messages": said,
            **usage(event.usage),
        }
        traced.chat.span.set_attributes(known(attributes))

    # -- a tool's call --------------------------------------------------------------------------------------

    def _tool_started(self, traced: _Traced, event: ToolStarted) -> None:
        call = event.call
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call.name,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": call.id,
            "gen_ai.tool.call.arguments": value_json(call.arguments) if self._content else None,
            "agentfsm.state": str(State.DISPATCH_TOOL),
        }
        traced.tools[call.id] = self._below(traced, f"execute_tool {call.name}", attributes)

    def _tool_finished(self, traced: _Traced, event: ToolFinished) -> None:
        result = event.result
        opened = traced.tools.pop(result.call_id, None)
        if opened is None:  # denied, skipped, unknown: nothing was executed
            traced.run.add_event(
                "agentfsm.tool.not_run",
                {
                    "gen_ai.tool.name": result.name,
                    "gen_ai.tool.call.id": result.call_id,
                    "agentfsm.tool.status": result.status,
                },
            )
            return
        attributes = {
            "agentfsm.tool.status": result.status,
            "agentfsm.subagent.run.id": result.run_id or None,
            "gen_ai.tool.call.result": result.content if self._content else None,
        }
        opened.span.set_attributes(known(attributes))
        end(opened, None if result.failure is None else result.error_class or result.failure.kind.value)

    def _below(self, traced: _Traced, name: str, attributes: Mapping[str, Any], client: bool = False) -> Opened:
        """A span below the run's, made the current one."""
        from opentelemetry import context, trace

        before = context.get_current()
        span = self._tracer.start_span(
            name,
            context=trace.set_span_in_context(traced.run, before),
            kind=trace.SpanKind.CLIENT if client else trace.SpanKind.INTERNAL,
            attributes=known({**attributes, **traced.common}),
        )
        context.attach(trace.set_span_in_context(span, before))
        return Opened(span, before)


def _give_up(traced: _Traced) -> None:
    """End the spans of a run of which nothing more will be heard; what is current here is none of its."""
    calls = (traced.chat, *traced.tools.values())
    for span in (*(left.span for left in calls if left is not None), traced.run):
        fail(span, "lost")
        span.end()
