"""Journals to look at: runs with everything in them, kept in a store."""

import asyncio
from typing import Any

from agentfsm import Agent, Edit, Host, MemoryStore, TransientProviderError, tool
from agentfsm.journal.records import START, Row, seal
from agentfsm.testing import FakeClock, ScriptedModel, call


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@tool(requires_approval=True)
def pay(to: str, amount: float) -> str:
    """Pay."""
    return f"paid {amount} to {to}"


@tool(idempotent=True, retryable=True, parallel=True)
async def look(path: str) -> str:
    """Look."""
    if path == "none":
        raise FileNotFoundError("no such file")
    return f"contents of {path}"


SCRIPT = [
    call("add", a=1, b=2),
    TransientProviderError("busy", retry_after_s=1.5),
    [call("look", path="a"), call("look", path="none")],
    [call("pay", to="Ann", amount=1.0), call("add", a=2, b=2)],
    "all done",
]


def an_agent(store: Any, script: Any = SCRIPT, **more: Any) -> Agent:
    host = Host(clock=FakeClock(), store=store, secret=b"of the tests")
    return Agent(ScriptedModel(script), tools=[add, pay, look], instructions="Be brief.", host=host, **more)


def a_whole_run(store: Any = None, run_id: str = "sample") -> tuple[Any, Any]:
    """A store with one finished run in it, and its result."""
    store = MemoryStore() if store is None else store

    async def live() -> Any:
        agent = an_agent(store)
        await agent.run("Do it all.", run_id=run_id)
        return await agent.resume(run_id, Edit({"to": "Bob", "amount": 2.0}))

    return store, asyncio.run(live())


def a_waiting_run(store: Any = None, run_id: str = "sample") -> tuple[Any, Any]:
    """A store with one run in it that waits for an approval, and its result."""
    store = MemoryStore() if store is None else store
    return store, asyncio.run(_awaited(an_agent(store).run("Do it all.", run_id=run_id)))


async def _awaited(run: Any) -> Any:
    return await run


def sealed_anew(rows: list[Row], first: int = 0) -> list[Row]:
    """Rows with every hash from one on made to fit, as somebody would who writes a journal anew."""
    head = rows[first - 1].hash if first else START
    made = rows[:first]
    for row in rows[first:]:
        head = seal(head, row.body)
        made.append(row._replace(hash=head))
    return made
