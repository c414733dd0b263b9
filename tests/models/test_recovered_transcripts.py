"""After every kind of recovery the transcript keeps the role rules of each provider and of the models' chat templates.

Each case is a run in which one kind of failure happens, in a turn of text or after a tool turn, under each preset; then
the run goes on with a tool turn and an answer, or another run goes on from its transcript.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentfsm import (
    Agent,
    AgentGuardrails,
    ContextOverflowError,
    Deny,
    FailureKind,
    FinishReason,
    Host,
    Message,
    ModelRequest,
    ProviderError,
    Reply,
    ToolCall,
    ToolError,
    TransientProviderError,
    Usage,
    UserInputRequested,
    tool,
)
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.read_only import thaw
from agentfsm.models.anthropic import encode as encode_anthropic
from agentfsm.models.openai_chat import encode as encode_chat
from agentfsm.models.openai_responses import encode as encode_responses
from agentfsm.models.providers import PROVIDERS
from agentfsm.models.role_rules import ANY_ORDER, TEMPLATE_ROLES
from agentfsm.testing import FakeClock, RecordingModel, ScriptedModel
from tests.helpers.chat_templates import TEMPLATES, render
from tests.helpers.local_servers import run_llama_server, shipped_templates
from tests.helpers.provider_rules import gemini_errors, mistral_errors, role_errors

K = FailureKind
numbers = iter(range(10**9))


def calls(*named: tuple[str, dict[str, Any]]) -> Reply:
    """A reply with calls, whose ids are nine letters long, as Mistral wants them."""
    made = tuple(ToolCall(f"c{next(numbers) % 10**8:08}", name, arguments) for name, arguments in named)
    return Reply(Message.assistant("", made), FinishReason.TOOL_CALLS, Usage(10, 5))


def text(words: str, **more: Any) -> Reply:
    return Reply(Message.assistant(words), usage=Usage(10, 5), **more)


def malformed() -> ToolCall:
    return replace(calls(("look", {})).message.tool_calls[0], malformed="not JSON")


def look(where: str = "here") -> str:
    """Look somewhere."""
    return f"seen {where}"


def fail(how: str) -> str:
    """Fail in some way."""
    if how == "os":
        raise FileNotFoundError("no such file")
    if how == "raise":
        raise ValueError("it broke")
    raise ToolError("it broke", kind=how)


def wait_for_ages(clock: FakeClock) -> Callable[..., str]:
    def wait() -> str:
        """Wait for ages."""
        clock.advance(10_000)
        return "at last"

    return wait


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


def again(make: Callable[[], Any], times: int = 6) -> list[Any]:
    return [make() for _ in range(times)]


LOOK = ("look", {"where": "here"})
REPORTED = (
    K.ambiguous_input, K.scope_too_large, K.capability_gap, K.policy_violation, K.kernel_invalidated, K.tool_error,
    K.environment_error,
)  # fmt: skip

FAULTS: dict[str, Callable[[], list[Any]]] = {
    "transient_provider": lambda: [TransientProviderError("busy")],
    "transient_provider, given up": lambda: again(lambda: TransientProviderError("busy"), 9),
    "provider_error": lambda: [ProviderError("no")],
    "context_overflow": lambda: [ContextOverflowError("too long")],
    "output_truncated, text": lambda: [text("Once upon a ti", finish_reason=FinishReason.LENGTH)],
    "output_truncated, call": lambda: [replace(calls(LOOK), finish_reason=FinishReason.LENGTH)],
    "output_truncated, twice": lambda: again(lambda: text("Once upon", finish_reason=FinishReason.LENGTH), 2),
    "output_refused": lambda: [text("I cannot do that.", finish_reason=FinishReason.REFUSAL, refusal="I cannot.")],
    "output_malformed": lambda: [Reply(Message.assistant("", (malformed(),)))],
    "output_malformed, beside a good call": lambda: [
        Reply(Message.assistant("", (malformed(), *calls(LOOK).message.tool_calls)))
    ],
    "no_progress, empty": lambda: [text(""), text(" ")],
    "no_progress, text": lambda: [text("Let me think."), text("Hm.")],
    "loop_detected": lambda: again(lambda: calls(LOOK)),
    "repeated_error": lambda: again(lambda: calls(("fail", {"how": "raise"}))),
    "unknown_tool": lambda: [calls(("nothing", {}))],
    "unknown_tool, given up": lambda: again(lambda: calls(("nothing", {"n": next(numbers)}))),
    "invalid_arguments": lambda: [calls(("look", {"where": [1, 2]}))],
    "a batch of which one fails": lambda: [calls(LOOK, ("fail", {"how": "raise"}), LOOK)],
    "environment_error, raised": lambda: [calls(("fail", {"how": "os"}))],
    "denied by a person": lambda: [calls(("pay", {"amount": 3}), LOOK)],
    "time_limit": lambda: [calls(("wait", {})), calls(LOOK)],
    "iteration_limit": lambda: [calls(("look", {"where": str(n)})) for n in range(12)],
    "token_limit": lambda: [Reply(calls(LOOK).message, FinishReason.TOOL_CALLS, Usage(10**6, 10))],
    "cost_limit": lambda: [Reply(calls(LOOK).message, FinishReason.TOOL_CALLS, Usage(10, 10, cost_usd=99.0))],
    **{f"{kind}, reported": lambda kind=kind: [calls(("fail", {"how": str(kind)}))] for kind in REPORTED},
}
"""How each kind of failure comes about."""

BEFORE: dict[str, Callable[[], list[Any]]] = {
    "in the first turn": list,
    "after a tool turn": lambda: [calls(LOOK), calls(("look", {"where": "there"}), ("look", {"where": "up"}))],
}


@dataclass(frozen=True)
class Case:
    """A kind of failure, where it happens, and the preset of the agent."""

    fault: str
    before: str
    preset: str

    def __str__(self) -> str:
        return f"{self.preset}: {self.fault}, {self.before}"


CASES = [Case(fault, before, preset) for preset in PRESETS for before in BEFORE for fault in FAULTS]


def answers(preset: str) -> list[Any]:
    """A tool turn, and the answer as the preset wants it."""
    if not PRESETS[preset].behavior.text_is_answer:
        return [calls(LOOK), calls(("return_done", {"summary": "Done."}))]
    return [calls(LOOK), text("Done.")]


def in_envelope(entry: Any) -> Any:
    """An entry of a script for a model that calls tools by JSON in its text."""
    if not isinstance(entry, Reply) or (not entry.message.tool_calls and entry.message.content != "Done."):
        return entry
    made: dict[str, Any] = {"kind": "final", "content": "Done."}
    if entry.message.tool_calls:
        first = entry.message.tool_calls[0]
        made = {"kind": "tool_call", "tool_name": first.name, "arguments": thaw(first.arguments)}
    return replace(entry, message=Message.assistant(json.dumps(made)), finish_reason=FinishReason.STOP)


@cache
def requests_of(case: Case) -> list[ModelRequest]:
    """The requests of a run in which the failure happens, and of one that goes on from its transcript."""
    clock = FakeClock()
    script = [
        *BEFORE[case.before](),
        *FAULTS[case.fault](),
        *(entry for _ in range(8) for entry in answers(case.preset)),
    ]
    if PRESETS[case.preset].behavior.envelope:
        script = list(map(in_envelope, script))
    model = RecordingModel(ScriptedModel(script))
    guardrails = AgentGuardrails(max_iterations=8, max_execution_time_s=5000.0, max_tokens=500_000, max_cost_usd=50.0)
    agent = Agent(
        model, tools=[look, fail, pay, tool(wait_for_ages(clock), name="wait")], preset=case.preset,
        guardrails=guardrails, host=Host(clock=clock, secret=b"secret"), instructions="Be brief.",
    )  # fmt: skip

    async def go() -> None:
        earlier = [Message.user("Hello."), Message.assistant("Hello. What can I do?")]
        result = await agent.run("Look around.", message_history=earlier)
        for _ in range(4):
            if not isinstance(result.outcome, UserInputRequested):
                break
            record = result.outcome.suspension_record
            result = await agent.resume(record, Deny("no") if record.kind == "approval" else "Go on.")
        await agent.run("And now?", message_history=result.messages)

    asyncio.run(go())
    return model.requests


RULES = {"mistral": mistral_errors, "gemini": gemini_errors}
ENCODERS: dict[str, Callable[[ModelRequest], dict[str, Any]]] = {
    "openai": lambda request: encode_chat(request, "gpt-4o", roles=ANY_ORDER),
    "responses": lambda request: encode_responses(request, "gpt-4o"),
    "anthropic": lambda request: encode_anthropic(request, "claude-sonnet-4-6"),
}


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("wire", ENCODERS)
def test_openai_and_anthropic_accept_it(wire: str, preset: str) -> None:
    for case in CASES:
        if case.preset == preset:
            for request in requests_of(case):
                assert role_errors(wire, ENCODERS[wire](request)) == [], str(case)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("provider", RULES)
def test_mistral_and_gemini_accept_it(provider: str, preset: str) -> None:
    for case in CASES:
        if case.preset == preset:
            for request in requests_of(case):
                assert RULES[provider](encode_chat(request, "m", roles=PROVIDERS[provider].roles)) == [], str(case)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_templates_of_one_call_for_each_reply_accept_it(preset: str) -> None:
    """Those of Llama 3, whose licence keeps them out of this repository, raise an error at two calls."""
    for case in CASES:
        if case.preset == preset:
            for request in requests_of(case):
                body = encode_chat(request, "m", roles=TEMPLATE_ROLES)
                assert role_errors("openai", body) == [], str(case)
                called = [call["id"] for m in body["messages"] for call in m.get("tool_calls") or ()]
                assert called == [call.id for message in request.messages for call in message.tool_calls], str(case)
                assert {len(m["tool_calls"]) for m in body["messages"] if m.get("tool_calls")} <= {1}, str(case)


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_chat_template_accepts_it(template: Path) -> None:
    for case in CASES:
        for request in requests_of(case):
            assert "Look around." in render(template, encode_chat(request, "m")), str(case)


def _bodies() -> Iterator[dict[str, Any]]:
    return (encode_chat(request, "m") for case in CASES for request in requests_of(case))


def _shape(body: dict[str, Any]) -> str:
    """What a template can object to: which roles follow each other, with which parts."""
    kinds = [(m["role"], bool(m.get("content")), len(m.get("tool_calls") or ())) for m in body["messages"]]
    return repr((kinds, bool(body.get("tools"))))


def _has_tool_turn(body: dict[str, Any]) -> bool:
    return any(m["role"] == "tool" for m in body["messages"])


def _has_parameter_without_type(body: dict[str, Any]) -> bool:
    schemas = [each["function"]["parameters"]["properties"] for each in body.get("tools") or ()]
    return any("type" not in value for schema in schemas for value in schema.values())


KNOWN: dict[str, tuple[str, Callable[[dict[str, Any]], bool]]] = {
    "google-gemma-2-2b-it": ("Conversation roles must alternate", _has_tool_turn),
    "ByteDance-Seed-OSS": ("Cannot perform operation in on undefined values", _has_parameter_without_type),
}
"""What a template refuses whether or not something was recovered: turns with tools; and, by an error of llama.cpp that
jinja2 does not have, a parameter of several types."""


@pytest.mark.servers
@pytest.mark.timeout(7200)  # the first time, the server is built
def test_llama_server_renders_it_with_every_template_that_it_ships(tmp_path: Path) -> None:
    bodies = {_shape(body): body for body in _bodies()}  # one of each order of messages
    refused: list[str] = []
    with httpx.Client(trust_env=False, timeout=60) as client:
        for template in shipped_templates():
            text, expected = KNOWN.get(template.stem, ("", lambda body: False))
            with run_llama_server(tmp_path, template) as server:
                for shape, body in bodies.items():
                    answer = client.post(f"{server.url}/apply-template", json=body)
                    if answer.is_success and "Look around." in answer.json()["prompt"]:
                        continue
                    if not (expected(body) and text in answer.text):
                        refused.append(f"{template.stem}: {answer.text[-300:]} for {shape[:600]}")
                        break
    assert refused == []
