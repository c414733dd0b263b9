"""A run with every feature, full of canary secrets: none appears in a log, a span, a repr or an error.

At default settings, over real sockets, with every logger at its lowest level. Messages may appear in the events that
are meant to contain them; a key, a header or an environment variable of a server appears nowhere.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")
pytest.importorskip("opentelemetry.sdk", reason="the OpenTelemetry SDK is not installed")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentfsm import Agent, Allow, Event, Host, Image, MemoryStore, UserInputRequested, tool
from agentfsm.integrations.mcp import MCPSettings, MCPTools
from agentfsm.integrations.otel import tracing
from agentfsm.models import ConcurrencyLimit, FallbackModel, Limited, OpenAIChat, Price, Priced
from tests.helpers.fake_model_server import fake_model_server, text_output, tool_call_output
from tests.helpers.mcp_stdio_server import PIXEL

SERVER = Path(__file__).parents[1] / "helpers" / "mcp_stdio_server.py"
KEY = "sk-canary-5d41402abc4b2a76b971"
VARIABLE = "canary-variable-9b1d"
SECRET = b"canary-host-secret-77aa"
PICTURE = Image.from_bytes(b"\x89PNG\r\n\x1a\n canary picture " * 3)
NEVER = (KEY, KEY[:16], VARIABLE, SECRET.decode(), PICTURE.data[:40], PIXEL[:40])
"""What must appear nowhere: secrets, and images, which no event contains as text."""

SAID = ("canary", "kanarie")
"""A word in every message and result of the run."""


@tool(requires_approval=True)
def send(to: str) -> list[Any]:
    """Send it."""
    return [f"canary result for {to}", PICTURE]


def broken(at: str) -> str:
    """Fail."""
    raise ValueError(f"canary error at {at}")


def test_no_secret_leaks_in_a_run_with_every_feature(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "descriptions.json").write_text(json.dumps({}))
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    script = [
        tool_call_output(("echo", {"text": "canary words"}), ("many_parts", {}), ("broken", {"at": "canary place"})),
        tool_call_output(("helper", {"task": "canary task"})),
        text_output("canary answer of the helper"),
        tool_call_output(("send", {"to": "canary person"}), ("refuse", {})),
        text_output("canary end"),
    ]

    async def main(url: str) -> tuple[list[Event], list[Any]]:
        inner = OpenAIChat("m", base_url=url, api_key=KEY)
        model = Limited(Priced(FallbackModel(inner, inner), {"*": Price(input=1)}), ConcurrencyLimit(2))
        host = Host(secret=SECRET, store=MemoryStore())
        hooks = tracing(tracer_provider=provider)
        settings = MCPSettings(prefix="")
        server = MCPTools.stdio(
            sys.executable, [str(SERVER), str(tmp_path)], env={"TOKEN": VARIABLE}, settings=settings
        )
        async with server as remote:
            helper = Agent(inner, instructions="canary instructions below", hooks=hooks)
            agent = Agent(
                model,
                tools=[*remote, send, broken, helper.as_tool("helper", "Helps.")],
                instructions="canary instructions",
                host=host,
                hooks=hooks,
            )
            run = agent.run("canary prompt")
            events = [event async for event in run]
            asked = events[-1]
            assert isinstance(asked, UserInputRequested), asked
            again = agent.resume(asked.run_id, Allow())
            events += [event async for event in again]
            things = [agent, helper, model, inner, run, again, host, server, list(remote), asked.suspension_record]
            things += [result.usage for result in (run.result, again.result)]
            await model.aclose()
        return events, things

    with fake_model_server(*script) as served, caplog.at_level(logging.DEBUG):
        events, things = asyncio.run(main(served.url))
    assert "canary end" in repr(events[-1])
    assert any(VARIABLE in json.dumps(request) or PICTURE.data in json.dumps(request) for request in served.requests)

    logged = "\n".join(f"{r.name} {r.getMessage()} {r.exc_text or ''}" for r in caplog.records)
    ours = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("agentfsm"))
    told = "\n".join(map(repr, events))
    spanned = "\n".join(span.to_json() for span in spans.get_finished_spans())
    shown = "\n".join(map(repr, things))
    assert "helper" in ours
    assert "execute_tool" in spanned
    for canary in NEVER:
        for where, what in {"log": logged, "events": told, "spans": spanned, "representations": shown}.items():
            assert canary not in what, f"{canary!r} in the {where}"
    for word in SAID:
        for where, what in {"our log": ours, "spans": spanned, "representations": shown}.items():
            assert word not in what, f"{word!r} in the {where}: ...{what[max(0, what.find(word) - 300) :][:400]}"
