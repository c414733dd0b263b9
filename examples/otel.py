"""OpenTelemetry spans of a run, its model calls and its tool calls, printed as a tree.

Shows: tracing, the attributes of spans, a sub-agent's run below the call that it answers.

Needs the extra ``otel``, and the package ``opentelemetry-sdk``. A program that has set up an exporter needs only
``hooks=[*tracing()]``. The models are scripted, so no API key is needed.
"""

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentfsm import Agent, Message, Reply, Usage
from agentfsm.integrations.otel import tracing
from agentfsm.testing import ScriptedModel, call

collected = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(collected))


def look_up(word: str) -> str:
    """Look a word up in the dictionary."""
    return f"{word}: a small reed flute"


answer = Reply(Message.assistant("A small reed flute."), usage=Usage(input_tokens=40, output_tokens=6))
lexicographer = Agent(
    ScriptedModel([call("look_up", word="kaval"), answer], name="openai:small"),
    tools=[look_up],
    hooks=[*tracing(agent_name="lexicographer", tracer_provider=provider)],
)
clerk = Agent(
    ScriptedModel([call("ask_lexicographer", task="What is a kaval?"), "It is a flute."], name="openai:large"),
    tools=[lexicographer.as_tool("ask_lexicographer", "Explains words.")],
    hooks=[*tracing(agent_name="clerk", tracer_provider=provider)],
)
print(clerk.run_sync("What is a kaval?").output)


def show(parent: ReadableSpan | None, depth: int) -> None:
    for span in sorted(collected.get_finished_spans(), key=lambda s: s.start_time or 0):
        if (span.parent and span.parent.span_id) == (parent and parent.context and parent.context.span_id):
            tokens = (span.attributes or {}).get("gen_ai.usage.output_tokens")
            print("  " * depth + span.name + (f" ({tokens} tokens out)" if tokens else ""))
            show(span, depth + 1)


show(None, 0)
(first, *_) = [s for s in collected.get_finished_spans() if s.name == "invoke_agent clerk"]
for event in first.events[:3]:
    print(event.name, (event.attributes or {})["agentfsm.transition"])
