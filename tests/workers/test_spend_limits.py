"""Limits on what the runs with a tag may cost a day."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from agentfsm import (
    Agent,
    AgentGuardrails,
    ConfigurationError,
    Host,
    MemoryStore,
    Message,
    Reply,
    Runs,
    SqliteStore,
    Usage,
    UserInputRequested,
    tool,
)
from agentfsm.testing import ScriptedModel, call
from agentfsm.viewer.run_figures import Listed, figures_of, totals_by_day
from agentfsm.workers.spend_limits import DAY_S, KNOWN_FOR_S, SpendLimit, SpendLimits

SECRET = b"of the tests"


@tool
def look() -> str:
    """Look."""
    return "seen"


async def spend(store: MemoryStore, usd: float, *tags: str) -> None:
    """Run an agent whose one call costs so much."""
    model = ScriptedModel([Reply(Message.assistant("Hello."), usage=Usage(input_tokens=1, cost_usd=usd))])
    await Agent(model, host=Host(store=store)).run("Say hello.", tags=tags)


def test_a_limit_is_reached_by_the_runs_with_its_tag_in_the_last_day() -> None:
    async def scenario() -> None:
        store, now = MemoryStore(), time.time()
        clock = [now]
        limits = SpendLimits([SpendLimit("tenant:*", 5), SpendLimit("batch", 1)], store, lambda: clock[0])
        await spend(store, 4.0, "tenant:acme")
        await spend(store, 4.0, "tenant:other")
        assert await limits.reached(["tenant:acme", "batch"]) == ""
        await spend(store, 1.5, "tenant:acme")
        assert await limits.reached(["tenant:acme"]) == ""  # the sum is used again for a moment
        clock[0] += KNOWN_FOR_S
        assert "tenant:acme cost 5.50 USD" in await limits.reached(["x", "tenant:acme"])
        assert await limits.reached(["tenant:other"]) == ""
        clock[0] += DAY_S
        assert await limits.reached(["tenant:acme"]) == ""

    asyncio.run(scenario())


@pytest.mark.parametrize(("usd", "runs"), [(0.1, 10), (0.1, 3), (0.07, 100), (0.0001, 7)])
def test_a_limit_is_reached_by_runs_that_cost_exactly_as_much(usd: float, runs: int) -> None:
    async def scenario() -> None:
        store, limit = MemoryStore(), SpendLimit("batch", float(f"{Decimal(str(usd)) * runs}"))
        for _ in range(runs - 1):
            await spend(store, usd, "batch")
        assert await SpendLimits([limit], store).reached(["batch"]) == ""
        await spend(store, usd, "batch")
        assert "cost" in await SpendLimits([limit], store).reached(["batch"])

    asyncio.run(scenario())


def costing(usd: float, text: str, *calls: Any) -> Reply:
    return Reply(Message.assistant(text, calls), usage=Usage(input_tokens=1, cost_usd=usd))


@pytest.mark.parametrize("store", [MemoryStore, lambda: SqliteStore("runs.db")], ids=["memory", "sqlite"])
def test_what_a_run_cost_before_it_was_forked_counts_once(
    store: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def agent(*script: Any) -> Agent:
        limits = AgentGuardrails(max_cost_usd=2.0)
        return Agent(ScriptedModel(script), tools=[look], guardrails=limits, host=Host(store=kept, secret=SECRET))

    async def scenario() -> None:
        runs = Runs(kept, secret=SECRET)
        whole = agent(costing(1.5, "", call("look")), costing(0.5, "Done."))
        await whole.run("Look.", run_id="r", tags=["tenant:acme"])
        rows = await kept.records("r")
        at = next(row.seq for row in rows if "post_tool.otherwise" in row.body)
        await runs.fork("r", at, "fork")
        info = (await runs.get("fork")).info
        assert (info.cost_usd, info.tokens) == (0.0, 0)
        forked = await agent(costing(0.25, "", call("look")), costing(0.5, "Done.")).resume("fork")
        assert forked.usage.cost_usd == 2.25  # its limits count all of it
        at = next(row.seq for row in await kept.records("fork") if "post_tool.otherwise" in row.body)
        await runs.fork("fork", at, "again")
        asked = (await agent(costing(0.75, "", call("look"))).resume("again")).outcome
        assert isinstance(asked, UserInputRequested)
        assert asked.kind == "limit"  # 1.5 + 0.25 + 0.75 USD of 2
        listed = {each.run_id: (each.cost_usd, each.tokens) for each in (await runs.list()).runs}
        assert listed == {"r": (2.0, 2), "fork": (0.75, 2), "again": (0.75, 1)}
        assert [(await runs.verify(run_id)).reason for run_id in listed] == ["", "", ""]
        reached = await SpendLimits([SpendLimit("tenant:acme", 1)], kept).reached(["tenant:acme"])
        assert "cost 3.50 USD" in reached
        figures = [
            Listed(each, figures_of(each.run_id, await kept.records(each.run_id))) for each in (await runs.list()).runs
        ]
        assert [(day["cost"], day["tokens"]) for day in totals_by_day(figures)] == [(3.5, 5)]
        await kept.aclose()

    kept = store()
    asyncio.run(scenario())


def test_what_sub_agents_cost_counts_once() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        reader = Agent(ScriptedModel([costing(1.5, "It is at ten.")]))
        helper = Agent(
            ScriptedModel([costing(0.25, "", call("read", task="Read.")), costing(0.25, "At ten.")]),
            tools=[reader.as_tool("read", "Reads.")],
        )
        model = ScriptedModel([costing(0.5, "", call("help", task="Look.")), costing(0.5, "At ten.")])
        agent = Agent(model, tools=[helper.as_tool("help", "Helps.")], host=Host(store=store))
        result = await agent.run("When?", tags=["tenant:acme"])
        assert (result.usage.cost_usd, len(await store.heads())) == (3.0, 3)
        assert await SpendLimits([SpendLimit("tenant:acme", 3.5)], store).reached(["tenant:acme"]) == ""
        assert "cost 3.00 USD" in await SpendLimits([SpendLimit("tenant:acme", 3)], store).reached(["tenant:acme"])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("tag", "usd"), [(" ", 1.0), ("a", 0.0), ("a", -1.0), ("a", float("nan")), ("a", float("inf"))]
)
def test_a_limit_that_says_nothing_is_refused(tag: str, usd: float) -> None:
    with pytest.raises(ConfigurationError, match="spend limit"):
        SpendLimit(tag, usd)
