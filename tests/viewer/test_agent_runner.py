"""The viewer's agents go on with a run only if exactly one of them fits it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agentfsm import Agent, Allow, Host, MemoryStore, Runs, tool
from agentfsm.runtime.tools import Tool
from agentfsm.testing import ScriptedModel, call
from agentfsm.viewer.agent_runner import AgentRunner

SECRET = b"the secret of these tests, long enough"
PAID: list[int] = []


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay an amount."""
    PAID.append(amount)
    return f"paid {amount}"


@tool(name="pay")
def note(amount: int) -> str:
    """Note an amount that somebody else pays."""
    return f"noted {amount}"


def agent(store: Any, tool: Tool, *script: Any) -> Agent[Any, Any]:
    return Agent(ScriptedModel(script), tools=[tool], host=Host(store=store, secret=SECRET))


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (list[Tool](), ("finished", [1])),
        ([note], ("finished", [1])),
        ([replace(pay, requires_approval=False)], ("finished", [1])),
        ([pay], ("suspended", list[int]())),
    ],
)
def test_an_approved_run_goes_on_with_the_one_agent_that_has_its_tools(
    others: list[Tool], expected: tuple[str, list[int]]
) -> None:
    async def scenario() -> str:
        store = MemoryStore()
        await agent(store, pay, call("pay", amount=1)).run("Pay 1.", run_id="r")
        agents = [*(agent(store, each, call("pay", amount=666), "done") for each in others), agent(store, pay, "done")]
        await Runs(store, secret=SECRET).answer("r", Allow(), by="ann")
        await AgentRunner(store, agents)._run_pending("r")  # pyright: ignore[reportPrivateUsage]
        head = await store.head("r")
        assert head is not None
        return head.status

    PAID.clear()
    assert (asyncio.run(scenario()), PAID) == expected


@pytest.mark.parametrize("grace_s", [30.0, 0.0])
def test_a_viewer_that_stops_leaves_its_runs_to_other_processes_and_ends_none(
    grace_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentfsm.viewer.agent_runner.GRACE_S", grace_s)

    async def serve(store: MemoryStore) -> None:
        begun, may_end = asyncio.Event(), asyncio.Event()

        @tool(name="pay", requires_approval=True, idempotent=True)
        async def slowly(amount: int) -> str:
            """Pay an amount."""
            begun.set()
            await may_end.wait()
            return f"paid {amount}"

        paying = agent(store, slowly, call("pay", amount=1), "done")
        await paying.run("Pay 1.", run_id="r")
        await Runs(store, secret=SECRET).answer("r", Allow(), by="ann")
        runner = AgentRunner(store, [paying])
        runner.start()
        await begun.wait()
        stopping = asyncio.create_task(runner.stop())
        if grace_s:
            may_end.set()
        await stopping  # what is left in the event loop is cancelled with it

    store = MemoryStore()
    asyncio.run(serve(store))
    head = asyncio.run(store.head("r"))
    assert head is not None
    assert (head.status, head.owner) == ("running", None)


def test_a_viewer_stops_although_what_it_listens_to_swallows_a_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As psycopg does before Python 3.12, if the server's answer comes in the same moment."""
    monkeypatch.setattr("agentfsm.runtime.timeout.CANCEL_AGAIN_S", 0.01)
    swallowed = list[str]()

    async def listen(runner: AgentRunner) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            swallowed.append("once")
        await asyncio.Event().wait()

    monkeypatch.setattr(AgentRunner, "_listen", listen)

    async def scenario() -> None:
        store = MemoryStore()
        runner = AgentRunner(store, [agent(store, pay)])
        runner.start()
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await runner.stop()
        assert swallowed == ["once"]

    asyncio.run(scenario())
