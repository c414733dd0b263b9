"""What a sub-agent asks of people when its run begins, or goes on, in a process whose sub-agent asks less."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from dataclasses import replace
from typing import Any

import pytest

from agentfsm import LOOP, Agent, Allow, FilteredToolset, Host, MemoryStore, Migration, RunContext, tool
from agentfsm.errors import SuspensionApprovalError
from agentfsm.testing import ScriptedModel, call
from tests.runtime.test_pinned_approvals import PAID, SECRET, look, nothing_paid, pay  # noqa: F401  # a fixture

STRICT, WEAK = replace(pay, requires_approval=True), pay


def returning(rule: Any) -> Any:
    def tools(context: RunContext[Any]) -> list[Any]:
        return [rule]

    return tools


def filtered(rule: Any) -> Any:
    return [FilteredToolset([rule], lambda context, each: True)]


def listed(rule: Any) -> Any:
    return [rule]


def caller(store: Any, tools: Any, *script: Any, inner: Any = (), migrations: Any = ()) -> Agent[Any, Any]:
    payer = Agent(ScriptedModel(list(inner)), tools=tools)
    host = Host(store=store, secret=SECRET)
    tools = [look, payer.as_tool("payer", "Pays.")]
    return Agent(ScriptedModel(list(script)), tools=tools, host=host, migrations=migrations)


class Hanging:
    """A model that never replies."""

    name = "hanging"

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def reply(self, request: Any) -> Any:
        self.asked.set()
        await asyncio.Event().wait()


async def interrupted(store: MemoryStore, tools: Any) -> None:
    """A run ``r`` whose process is lost while the model of its sub-agent replies."""
    hanging = Hanging()
    payer = Agent(hanging, tools=tools)
    agent = Agent(
        ScriptedModel([call("payer", task="Pay 666.")]),
        tools=[look, payer.as_tool("payer", "Pays.")],
        host=Host(store=store, secret=SECRET),
    )
    lost = asyncio.create_task(_end(agent.run("go", run_id="r")))
    await hanging.asked.wait()
    for kept in store._runs.values():
        kept.lease = None
    lost.cancel()
    with contextlib.suppress(BaseException):
        await lost


async def _end(run: Any) -> None:
    await run


INNER = (call("pay", amount=666), "done")


@pytest.mark.parametrize("made", [listed, filtered, returning])
def test_a_sub_agents_run_that_was_interrupted_does_not_go_on_with_a_weaker_toolset(made: Any):
    async def scenario(now: Any) -> Any:
        store = MemoryStore()
        await interrupted(store, made(STRICT))
        agent = caller(store, made(now), "done", inner=INNER)
        with contextlib.suppress(SuspensionApprovalError):
            return (await agent.resume("r")).outcome
        return None

    outcome = asyncio.run(scenario(STRICT))
    assert (outcome.kind, outcome.tool) == ("approval", "pay")
    asyncio.run(scenario(WEAK))
    assert PAID == []


def test_a_toolset_that_may_return_a_tool_that_was_pinned_is_refused_before_the_sub_agent_begins():
    async def scenario(began: Any, now: Any) -> Any:
        store = MemoryStore()
        await caller(store, began, call("look")).run("go", run_id="r")
        script = call("payer", task="Pay 666."), "done"
        return (await caller(store, now, *script, inner=INNER).resume("r", Allow())).outcome

    with pytest.raises(
        SuspensionApprovalError, match=r"'payer/pay' .* and a toolset may return one here that asks less"
    ):
        asyncio.run(scenario([STRICT], returning(WEAK)))
    outcome = asyncio.run(scenario(returning(STRICT), returning(STRICT)))
    assert (outcome.kind, outcome.tool) == ("approval", "pay")
    assert PAID == []


@pytest.mark.parametrize("made", [listed, filtered, returning])
def test_a_secret_argument_of_a_sub_agents_tool_is_not_in_its_callers_journal(made: Any):
    @tool(secret=["pin"], requires_approval=True)
    def unlock(pin: str) -> str:
        """Unlock."""
        return f"unlocked with {pin}"

    async def scenario() -> Any:
        store = MemoryStore()
        inner = call("unlock", pin="kq8-Zt3-wv5"), "done"
        agent = caller(store, made(unlock), call("payer", task="Unlock it."), "done", inner=inner)
        waits = await agent.run("go", run_id="r")
        written = [str(await store.records(head.run_id)) for head in await store.heads()]
        ended = await agent.resume("r", Allow())
        written += [str(await store.records(head.run_id)) for head in await store.heads()]
        return waits.outcome, ended, written

    waits, ended, written = asyncio.run(scenario())
    assert waits.tool == "unlock"
    assert ended.ok
    assert "kq8" not in repr(waits) + str(waits.to_dict()) + repr(ended)
    assert not any("kq8" in each for each in written)


def weak_by_global(context: RunContext[Any]) -> list[Any]:
    return [pay]


def strict_by_global(context: RunContext[Any]) -> list[Any]:
    return [STRICT]


class Shelf:
    """A toolset that holds its tools."""

    def __init__(self, rule: Any) -> None:
        self.tools = [rule]
        self.chosen = 0

    def get_tools(self, context: RunContext[Any]) -> list[Any]:
        self.chosen += 1
        return list(self.tools)


class Drawer(Shelf):
    """The same in another class."""


def on_shelf(rule: Any) -> Any:
    return [Shelf(rule)]


def in_drawer(rule: Any) -> Any:
    return [Drawer(rule)]


def by_partial(rule: Any) -> Any:
    return functools.partial(_choose, rule)


def _choose(rule: Any, context: RunContext[Any]) -> list[Any]:
    return [rule]


@pytest.mark.parametrize(
    ("began", "now"),
    [
        (returning(STRICT), returning(WEAK)),
        (strict_by_global, weak_by_global),
        (returning(STRICT), weak_by_global),
        (on_shelf(STRICT), on_shelf(WEAK)),
        (on_shelf(STRICT), in_drawer(WEAK)),
        (in_drawer(STRICT), returning(WEAK)),
        (by_partial(STRICT), by_partial(WEAK)),
    ],
)
def test_a_sub_agent_that_had_not_begun_does_not_begin_with_tools_that_another_function_chooses(
    began: Any, now: Any
) -> None:
    async def scenario(tools: Any, *migrations: Any) -> Any:
        store = MemoryStore()
        await caller(store, began, call("look")).run("go", run_id="r")
        script = call("payer", task="Pay 666."), "done"
        agent = caller(store, tools, *script, inner=INNER, migrations=migrations)
        return (await agent.resume("r", Allow())).outcome

    with pytest.raises(SuspensionApprovalError, match=r"the toolset .payer/.*. is new here, or has other"):
        asyncio.run(scenario(now))
    assert PAID == []
    outcome = asyncio.run(scenario(began))
    assert (outcome.kind, outcome.tool) == ("approval", "pay")
    assert PAID == []


def test_a_migration_admits_another_toolset_of_a_sub_agent_that_had_not_begun() -> None:
    async def scenario() -> Any:
        store = MemoryStore()
        await caller(store, strict_by_global, call("look")).run("go", run_id="r")
        admits = Migration(LOOP.fingerprint[:12], approvals=(f"payer/{__name__}.weak_by_global",))
        script = call("payer", task="Pay 666."), "done"
        agent = caller(store, weak_by_global, *script, inner=INNER, migrations=[admits])
        return (await agent.resume("r", Allow())).outcome

    assert asyncio.run(scenario()).output == "done"
    assert PAID == [666]


def test_a_toolset_that_counts_what_it_chose_chooses_as_it_did() -> None:
    async def scenario() -> Any:
        shelf = Shelf(STRICT)
        store = MemoryStore()
        await caller(store, [shelf], call("payer", task="Pay 1."), call("look"), inner=INNER).run("go", run_id="other")
        await caller(store, [shelf], call("look")).run("go", run_id="r")
        script = call("payer", task="Pay 666."), "done"
        return (await caller(store, on_shelf(STRICT), *script, inner=INNER).resume("r", Allow())).outcome

    assert asyncio.run(scenario()).tool == "pay"
