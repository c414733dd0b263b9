"""Long runs, for what must stay small or quick."""

from __future__ import annotations

from agentfsm import Agent, AgentGuardrails, Host, tool
from agentfsm.journal.memory_store import MemoryStore
from agentfsm.testing import FakeClock, ScriptedModel, call

__all__ = ["long_run", "look"]


@tool
def look(page: int) -> str:
    """Look a page up."""
    return f"page {page} says that everything is as it should be, and that there is more on the next one"


def long_run(steps: int) -> MemoryStore:
    """A store with a run, "long", of that many model calls, each but the last of a tool.

    It is not checked against the model of its proofs, which takes a hundred times as long: its steps are all alike.
    """
    store, last = MemoryStore(), steps - 1
    limits = AgentGuardrails(max_iterations=steps + 1, max_execution_time_s=1e6)
    model = ScriptedModel([*(call("look", page=n) for n in range(last)), "done"])
    host = Host(clock=FakeClock(), store=store, secret=b"of the tests", monitor="off")
    assert Agent(model, tools=[look], guardrails=limits, host=host).run_sync("Read all.", run_id="long").ok
    return store
