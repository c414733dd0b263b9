"""Runs of which every field that a model, a tool, a user or a server fills is one text."""

from __future__ import annotations

from typing import Any

from agentfsm import (
    Actor,
    Agent,
    AgentGuardrails,
    Allow,
    Deny,
    Host,
    ProviderError,
    Reply,
    ToolError,
    TransientProviderError,
    tool,
)
from agentfsm.journal.memory_store import MemoryStore
from agentfsm.journal.redact import redact
from agentfsm.journal.verification import verify
from agentfsm.loop.keys import Keyring
from agentfsm.loop.messages import Message, ToolCall, Usage
from agentfsm.report.reported_run import ReportedRun
from agentfsm.testing import FakeClock, ScriptedModel

__all__ = ["SECRET", "run_full_of"]

SECRET = b"of the tests"


async def run_full_of(
    text: str, *, redacted: bool = False, store: MemoryStore | None = None, run_id: str = "hostile", answers: int = 5
) -> ReportedRun:
    """A finished run in which a text is the prompt, a name, a role, arguments, results, errors and answers.

    Args:
        text: The text.
        redacted: Whether its prompt is redacted, at the request of somebody with that name.
        store: Where it is stored; by default in a store of its own.
        run_id: Its id.
        answers: How many of its requests are answered: with 0 it waits for an approval.
    """

    @tool
    def echo(text: str) -> str:
        """Give a text back."""
        return text

    @tool
    def fail(text: str) -> str:
        """Fail with a text."""
        raise ToolError(text)

    @tool(requires_approval=True)
    def pay(note: str) -> str:
        """Pay."""
        return note

    def calls(*named: tuple[str, dict[str, Any]]) -> Reply:
        made = tuple(ToolCall(f"{text[:20]}-{n}", name, arguments) for n, (name, arguments) in enumerate(named))
        return Reply(Message.assistant(text, made), usage=Usage(10, 5, cost_usd=0.25), model=text)

    script: list[Reply | BaseException] = [
        TransientProviderError(text),
        calls(("echo", {"text": text}), ("fail", {"text": text})),
        calls((text or "unnamed", {text: text})),
        calls(("pay", {"note": text})),
        calls(("pay", {"note": text})),
        calls(("ask_user", {"question": text})),
        ProviderError(text),
        Reply(Message.assistant(text)),
    ]
    store = MemoryStore() if store is None else store
    who = Actor(text if text.strip() and text.isprintable() else f"x{text}", (f"r{text}",))
    host = Host(clock=FakeClock(), store=store, secret=SECRET)
    limits = AgentGuardrails(loop_soft_threshold=18, loop_hard_threshold=19)
    agent = Agent(ScriptedModel(script), tools=[echo, fail, pay], host=host, preset="funnel", guardrails=limits)
    result = await agent.run(text, run_id=run_id, session_id=text[:50], tags=[f"t{text[:50]}"], actor=who)
    for answer in (Deny(text), Allow(), text, text, text)[:answers]:
        if result.run_state.state != "suspended":
            break
        result = await agent.resume(run_id, answer, by=who)
    if redacted:
        await redact(store, run_id, "1.messages", Keyring(SECRET), by=text)
    records = tuple(await store.records(run_id))
    return ReportedRun(run_id, records, verify(run_id, records, None, None, Keyring(SECRET)))
