"""Limits on what the runs with a tag may cost a day."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agentfsm import Agent, ConfigurationError, Host, MemoryStore, Message, Reply, Usage
from agentfsm.testing import ScriptedModel, call
from agentfsm.workers.spend_limits import DAY_S, KNOWN_FOR_S, SpendLimit, SpendLimits


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


def test_what_sub_agents_cost_counts_once() -> None:
    def costing(usd: float, text: str, *calls: Any) -> Reply:
        return Reply(Message.assistant(text, calls), usage=Usage(input_tokens=1, cost_usd=usd))

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
