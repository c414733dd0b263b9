"""A run's journal holds its whole state: rehydrating gives the live state without calling a model or a tool."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentfsm import Agent, AgentGuardrails, Allow, Host, RunResult, UserInputRequested
from agentfsm.journal.hash_chain import GENESIS_HASH, record_hash
from agentfsm.journal.memory_store import MemoryStore
from agentfsm.journal.records import export_lines, read_lines
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.replay import replay
from agentfsm.journal.verification import GOOD, OPEN, verify
from agentfsm.loop.canonical_json import decode, encode
from agentfsm.loop.presets import PRESETS
from agentfsm.loop.state_json import dump_state
from agentfsm.runtime.run import Run
from tests import test_properties as drawn


async def check(store: MemoryStore, result: RunResult) -> None:
    rows = await store.records(result.run_state.run_id)
    assert dump_state(rehydrate(rows).run) == dump_state(result.run_state)
    assert [r.seq for r in rows] == list(range(1, len(rows) + 1))
    head = GENESIS_HASH
    for row in rows:
        head = record_hash(head, row.body)
        assert row.hash == head
        assert encode(decode(row.body)) == row.body  # canonical, also where it was put together by hand
    told = verify(result.run_state.run_id, rows, await store.head(result.run_state.run_id))
    assert told.code == (GOOD if result.run_state.done else OPEN), told
    again = replay(rows, result.graph)
    assert again.same, again
    assert again.moves == sum('"kind":"transition"' in row.body for row in rows)
    assert read_lines(export_lines(rows)) == rows


async def life(agent: Agent, people: Sequence[Any], store: MemoryStore, by_id: bool) -> RunResult:
    result = await agent.run("go")
    await check(store, result)
    for answer in people:
        outcome = result.outcome
        if not isinstance(outcome, UserInputRequested):
            break
        use = answer
        if answer is not None and not drawn.fits(answer, outcome.kind):
            use = Allow() if outcome.kind == "approval" else "go"
        held: Any = result.run_state.run_id if by_id else outcome.suspension_record
        run: Run = agent.dismiss(held) if use is None else agent.resume(held, use)
        result = await run
        await check(store, result)
    return result


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    preset=st.sampled_from(sorted(PRESETS)),
    replies=st.lists(drawn.replies, min_size=1, max_size=6),
    outcomes=st.lists(st.sampled_from(["ok", "raise", "os", "report"]), min_size=1, max_size=5),
    jumps=st.lists(st.sampled_from([0.0, 0.5, 0.1, 3.0, 40.0]), min_size=1, max_size=4),
    people=st.lists(drawn.answers, max_size=drawn.MAX_ANSWERS),
    limits=drawn.limits,
    by_id=st.booleans(),
)
def test_the_journal_gives_the_live_state_back(
    preset: str, replies: Any, outcomes: Any, jumps: Any, people: Any, limits: AgentGuardrails, by_id: bool
) -> None:
    world = drawn.World(replies, outcomes, jumps)
    store = MemoryStore()
    host = Host(clock=world.clock, store=store)
    agent = Agent(world, tools=world.tools(), preset=preset, guardrails=limits, host=host)
    result = asyncio.run(life(agent, people, store, by_id))
    acted = world.acted, len(world.requests)
    assert dump_state(rehydrate(asyncio.run(store.records(result.run_state.run_id))).run) == dump_state(
        result.run_state
    )
    assert acted == (world.acted, len(world.requests))  # nothing was called
    head = asyncio.run(store.head(result.run_state.run_id))
    assert head is not None
    assert head.status == ("finished" if result.run_state.done else "suspended")
    assert head.owner is None


def test_a_run_without_a_store_has_a_journal_too():
    world = drawn.World([drawn.Reply(drawn.Message.assistant("hi"))], ["ok"], [0.0])
    result = asyncio.run(_run(Agent(world, host=Host(clock=world.clock))))
    kinds = [r.kind for r in result.journal]
    assert kinds == ["run.created", "transition", "effect.intent", "transition", "transition", "run.finished"]
    assert result.journal[0].data["run"] == result.run_state.run_id


async def _run(agent: Agent) -> RunResult:
    return await agent.run("go")
