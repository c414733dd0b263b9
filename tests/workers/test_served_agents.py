"""Which stored runs an agent of a worker goes on with: never one that would spare a call its approval."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentfsm import LOOP, Agent, Host, MemoryStore, tool
from agentfsm.agent.config import with_host
from agentfsm.runtime.tools import Tool
from agentfsm.testing import ScriptedModel, call
from agentfsm.workers.served_agents import ServedAgents

HOST = Host(secret=b"the secret of these tests, long enough")


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


@tool(name="pay")
def note(amount: int) -> str:
    """Note an amount that somebody else pays."""
    return f"noted {amount}"


def agent(store: Any, *tools: Tool) -> Agent[Any, Any]:
    return Agent(ScriptedModel([call("pay", amount=1)]), tools=list(tools), host=replace(HOST, store=store))


def taken_by(tags: Sequence[str], **served: Tool) -> str:
    """The name of the agent that goes on with a run that began with ``pay``; empty if none does."""

    async def scenario() -> str:
        store = MemoryStore()
        await agent(store, pay).run("Pay 1.", run_id="r", tags=tags)
        agents = ServedAgents({name: agent(store, each) for name, each in served.items()})
        head, (begun,) = await store.head("r"), await store.records("r", limit=1)
        assert head is not None
        found = agents.for_run(head, begun)
        return "" if found is None else found.name

    return asyncio.run(scenario())


def test_a_run_of_a_program_is_for_the_agent_with_the_very_tools_that_it_began_with() -> None:
    assert taken_by([], same=pay) == "same"
    assert taken_by([], other=note) == ""
    assert taken_by([], other=note, same=pay) == "same"


def test_a_run_is_for_the_agent_with_its_approval_and_for_none_if_several_have_it() -> None:
    assert taken_by([], asks=pay, free=replace(pay, requires_approval=False)) == "asks"
    assert taken_by([], free=replace(pay, requires_approval=False)) == ""
    assert taken_by([], asks=pay, too=pay) == ""


@pytest.mark.parametrize(
    ("tags", "expected"),
    [(["agent:chat"], "chat"), (["agent:absent"], ""), (["agent:batch", "agent:chat"], "")],
)
def test_a_run_with_the_tag_of_an_agent_is_for_that_agent_only(tags: list[str], expected: str) -> None:
    assert taken_by(tags, batch=replace(pay, requires_approval=False), chat=pay) == expected


@pytest.mark.parametrize(
    ("served", "tags", "expected"),
    [
        ({"chat": Agent(ScriptedModel([]), tools=[pay])}, ["agent:chat"], ""),
        ({"chat": Agent(ScriptedModel([]))}, ["agent:chat"], "agent 'chat' of this worker lacks the tool 'pay'"),
        (
            {"chat": Agent(ScriptedModel([]), tools=[replace(pay, requires_approval=False)])},
            ["agent:chat"],
            "agent 'chat' of this worker lacks approval rules as strict as the run's",
        ),
        (
            {"chat": Agent(ScriptedModel([]), tools=[pay], graph=LOOP.without("post_llm.loop_detected"))},
            ["agent:chat"],
            f"agent 'chat' of this worker lacks the graph {LOOP.fingerprint[:12]}, or a migration from it",
        ),
        ({"chat": Agent(ScriptedModel([]))}, ["agent:absent"], ""),  # that of another worker
        ({"chat": Agent(ScriptedModel([]))}, [], ""),  # that of a program
    ],
)
def test_what_the_agent_of_a_run_lacks_is_said(
    served: dict[str, Agent[Any, Any]], tags: list[str], expected: str
) -> None:
    async def scenario() -> str:
        store = MemoryStore()
        await agent(store, pay).run("Pay 1.", run_id="r", tags=tags)
        head, (begun,) = await store.head("r"), await store.records("r", limit=1)
        assert head is not None
        own = {name: each.with_config(with_host(each.config, HOST)) for name, each in served.items()}
        assert (ServedAgents(own).for_run(head, begun) is None) == (bool(expected) or tags != ["agent:chat"])
        return ServedAgents(own).reason_to_leave(head, begun)

    assert asyncio.run(scenario()) == expected
