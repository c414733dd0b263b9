"""OpenTelemetry spans for runs, model calls and tool calls (extra ``otel``, the API alone).

    agent = Agent(model, tools=tools, hooks=[*tracing(agent_name="clerk")])

A run is an ``invoke_agent`` span; each model call is a ``chat`` span and each tool call an ``execute_tool`` span
below it. Names follow the GenAI conventions (https://github.com/open-telemetry/semantic-conventions-genai); names that
are not in the conventions begin with ``agentfsm.``. Every transition is an event of the run's span. During a model or
tool call its span is the current one, so spans created by the call, and a sub-agent's run, are its children. Prompts,
replies, arguments and results are recorded only with ``content=True``, and never the secrets in them.

Without an SDK that collects them, spans are not recorded and cost almost nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentfsm.errors import MissingExtraError
from agentfsm.loop.events import (
    Ending,
    Event,
    Handoff,
    ModelReplied,
    PartialRunSummary,
    RecoveryStarted,
    RunAborted,
    RunResumed,
    RunStarted,
    ToolFinished,
    ToolStarted,
    Transitioned,
    UserInputRequested,
)
from agentfsm.loop.failures import Failure
from agentfsm.loop.messages import Message, Role, Usage
from agentfsm.loop.outcomes import CALL_MODEL
from agentfsm.loop.prompts import render_messages
from agentfsm.runtime.hooks import Hook, HookContext, Observer

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer, TracerProvider

GENAI_PROVIDER_NAMES = {
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "gemini": "gcp.gemini",
    "google": "gcp.gemini",
    "mistral": "mistral_ai",
    "moonshot": "moonshot_ai",
    "openai-responses": "openai",
    "xai": "x_ai",
}
"""The names of providers in the conventions, where they differ from ours."""


MAX_OPEN_RUNS = 10_000
"""The number of runs whose spans are kept open; a run that dies with its store reports no ending."""


def tracing(
    *, agent_name: str = "", content: bool = False, tracer_provider: TracerProvider | None = None
) -> tuple[Observer, Hook]:
    """The observer and the hook that create spans, for an agent's ``hooks``; any number of agents can share them.

    Args:
        agent_name: The name of the agent in spans (``gen_ai.agent.name``).
        content: Whether spans contain prompts, replies, arguments and results.
        tracer_provider: Receives the spans; by default the global one.

    Raises:
        MissingExtraError: The ``opentelemetry-api`` package is not installed.
    """
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise MissingExtraError("OpenTelemetry spans", "otel") from error
    spans = _SpanRecorder(trace.get_tracer("agentfsm", tracer_provider=tracer_provider), agent_name, content)
    return Observer(spans.observe), Hook(CALL_MODEL, spans.before_model, name="tracing")


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """A span that has not ended."""

    span: Span
    previous_context: Context


@dataclass
class _RunSpans:
    """The open spans of one run."""

    run: Span
    started: Event
    provider: str
    model: str
    common: dict[str, Any]
    state: str = ""
    chat: OpenSpan | None = None
    tools: dict[str, OpenSpan] = field(default_factory=dict[str, OpenSpan])
    usage: Usage = field(default_factory=Usage)


class _SpanRecorder:
    """Creates spans from the events of runs and from a hook before each model call."""

    def __init__(self, tracer: Tracer, agent_name: str, content: bool) -> None:
        self._tracer, self._name, self._content = tracer, agent_name, content
        self._runs: dict[str, _RunSpans] = {}
        self._handlers: Mapping[type[Event], Callable[[_RunSpans, Any], None]] = {
            Transitioned: self._on_transition,
            ModelReplied: self._on_model_replied,
            ToolStarted: self._on_tool_started,
            ToolFinished: self._on_tool_finished,
            RecoveryStarted: self._on_recovery,
        }

    # -- entry points -----------------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """Handle an event of a run."""
        if isinstance(event, RunStarted | RunResumed):
            self._on_run_started(event)
            return
        traced = self._runs.get(event.run_id)
        if traced is None:
            return
        if isinstance(event, Ending):
            self._on_run_ended(traced, event)
        elif (handler := self._handlers.get(type(event))) is not None:
            handler(traced, event)

    def before_model(self, context: HookContext[Any]) -> None:
        """Start the span of a model call, in the task that makes the call."""
        traced = self._runs.get(context.run.run_id)
        if traced is None:
            return
        cap = context.run.output_cap or context.run.guardrails.max_output_tokens
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": traced.provider,
            "gen_ai.request.model": traced.model,
            "gen_ai.request.max_tokens": cap,
            "agentfsm.state": str(context.state),
            "agentfsm.model_call": context.run.turns + 1,
            "gen_ai.input.messages": traced.started.mask(messages_json(render_messages(context.run)))
            if self._content
            else None,
        }
        traced.chat = self._start_child_span(traced, f"chat {traced.model}", attributes, client=True)

    # -- runs --------------------------------------------------------------------------------------------

    def _on_run_started(self, event: RunStarted | RunResumed) -> None:
        prefix, colon, model = event.model.partition(":")
        provider, model = (GENAI_PROVIDER_NAMES.get(prefix, prefix), model) if colon else (event.model, event.model)
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
        if (interrupted := self._runs.pop(event.run_id, None)) is not None:  # it ended without an event, and is resumed
            _abandon(interrupted)
        span = self._tracer.start_span(name, attributes=drop_none(attributes))
        self._runs[event.run_id] = _RunSpans(span, event, provider, model, common)
        if len(self._runs) > MAX_OPEN_RUNS:
            _abandon(self._runs.pop(next(iter(self._runs))))

    def _on_transition(self, traced: _RunSpans, event: Transitioned) -> None:
        decision = event.decision
        failure = decision.guard_result if isinstance(decision.guard_result, Failure) else None
        kind = None if failure is None else failure.kind.value
        traced.run.add_event(
            "agentfsm.transition",
            drop_none(
                {
                    "agentfsm.state.from": str(decision.source),
                    "agentfsm.state.to": str(decision.target),
                    "agentfsm.guard": decision.guard,
                    "agentfsm.transition": decision.transition.id,
                    "agentfsm.failure.kind": kind,
                }
            ),
        )
        traced.state = str(decision.target)
        ends = decision.transition.ends
        stopped = ends if ends in ("cancelled", "aborted") else None
        if traced.chat is not None:
            end_span(traced.chat, kind or stopped)
            traced.chat = None
        for open_span in traced.tools.values():  # calls without a result: cancelled, or a sub-agent that waits
            open_span.span.set_attribute("agentfsm.tool.status", "cut_off" if stopped else "waiting")
            end_span(open_span, stopped)
        traced.tools.clear()

    def _on_recovery(self, traced: _RunSpans, event: RecoveryStarted) -> None:
        traced.run.add_event(
            "agentfsm.recovery",
            {
                "agentfsm.failure.kind": event.failure.kind.value,
                "agentfsm.action": event.action.value,
                "agentfsm.attempt": event.attempt,
                "agentfsm.backoff_s": event.backoff_s,
            },
        )

    def _on_run_ended(self, traced: _RunSpans, event: Ending) -> None:
        del self._runs[event.run_id]
        for open_span in (traced.chat, *traced.tools.values()):
            if open_span is not None:
                end_span(open_span, "cancelled")
        span, request = traced.run, event if isinstance(event, UserInputRequested) else None
        span.set_attributes(
            drop_none(
                {
                    "agentfsm.outcome": type(event).__name__,
                    "agentfsm.waiting.kind": None if request is None else request.kind,
                    "agentfsm.cost_usd": traced.usage.cost_usd or None,
                    **usage_attributes(traced.usage),
                }
            )
        )
        if isinstance(event, Handoff | PartialRunSummary | RunAborted) and event.failure is not None:
            mark_failed(span, event.failure.kind.value)
        span.end()

    # -- a model's reply ------------------------------------------------------------------------------------

    def _on_model_replied(self, traced: _RunSpans, event: ModelReplied) -> None:
        traced.usage += event.usage
        if traced.chat is None:
            return
        output = event.mask(messages_json([event.message], event.finish_reason.value)) if self._content else None
        attributes = {
            "gen_ai.response.finish_reasons": [event.finish_reason.value],
            "gen_ai.response.model": event.model or None,
            "gen_ai.output.messages": output,
            **usage_attributes(event.usage),
        }
        traced.chat.span.set_attributes(drop_none(attributes))

    # -- a tool's call --------------------------------------------------------------------------------------

    def _on_tool_started(self, traced: _RunSpans, event: ToolStarted) -> None:
        call = event.call
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call.name,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": call.id,
            "gen_ai.tool.call.arguments": event.mask(value_json(call.arguments)) if self._content else None,
            "agentfsm.state": traced.state or None,
        }
        traced.tools[call.id] = self._start_child_span(traced, f"execute_tool {call.name}", attributes)

    def _on_tool_finished(self, traced: _RunSpans, event: ToolFinished) -> None:
        result = event.result
        open_span = traced.tools.pop(result.call_id, None)
        if open_span is None:  # denied, skipped or unknown: nothing was executed
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
            "gen_ai.tool.call.result": event.mask(result.content) if self._content else None,
        }
        open_span.span.set_attributes(drop_none(attributes))
        end_span(open_span, None if result.failure is None else result.error_class or result.failure.kind.value)

    def _start_child_span(
        self, traced: _RunSpans, name: str, attributes: Mapping[str, Any], client: bool = False
    ) -> OpenSpan:
        """Start a child of the run's span, and make it the current span."""
        from opentelemetry import context, trace

        previous = context.get_current()
        span = self._tracer.start_span(
            name,
            context=trace.set_span_in_context(traced.run, previous),
            kind=trace.SpanKind.CLIENT if client else trace.SpanKind.INTERNAL,
            attributes=drop_none({**attributes, **traced.common}),
        )
        context.attach(trace.set_span_in_context(span, previous))
        return OpenSpan(span, previous)


def _abandon(traced: _RunSpans) -> None:
    """End the spans of a run that will report no more events. The current span is not one of them."""
    calls = (traced.chat, *traced.tools.values())
    for span in (*(open_span.span for open_span in calls if open_span is not None), traced.run):
        mark_failed(span, "lost")
        span.end()


def value_json(value: Any) -> str:
    """A value as JSON text."""
    return json.dumps(value, ensure_ascii=False, default=str)


def messages_json(messages: Iterable[Message], finish_reason: str | None = None) -> str:
    """Messages as JSON text.

    Args:
        messages: The messages.
        finish_reason: For a model's reply, why it stopped.
    """
    more = {} if finish_reason is None else {"finish_reason": finish_reason}
    return value_json([{"role": m.role.value, "parts": _message_parts(m), **more} for m in messages])


def _message_parts(message: Message) -> list[dict[str, Any]]:
    if message.role is Role.TOOL and message.tool_call_id is not None:
        return [{"type": "tool_call_response", "id": message.tool_call_id, "response": message.content}]
    parts: list[dict[str, Any]] = []
    if message.content:
        parts.append({"type": "text", "content": message.content})
    parts += [
        {"type": "tool_call", "id": c.id, "name": c.name, "arguments": dict(c.arguments)} for c in message.tool_calls
    ]
    return parts


def end_span(open_span: OpenSpan, error_type: str | None) -> None:
    """End a span, and make the previous span the current one.

    ``detach`` only works in the context in which the span was made current, but a cancelled call may end in
    another one; attaching the previous context works in both.
    """
    from opentelemetry import context

    if error_type is not None:
        mark_failed(open_span.span, error_type)
    open_span.span.end()
    context.attach(open_span.previous_context)


def mark_failed(span: Span, error_type: str) -> None:
    """Mark a span as failed. The error text is omitted, since it may contain anything."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", error_type)
    span.set_status(StatusCode.ERROR, error_type)


def usage_attributes(usage: Usage) -> dict[str, Any]:
    """The usage as span attributes."""
    return {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens or None,
        "gen_ai.usage.cache_creation.input_tokens": usage.written_tokens or None,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens or None,
    }


def drop_none(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes without those that are None."""
    return {name: value for name, value in attributes.items() if value is not None}
