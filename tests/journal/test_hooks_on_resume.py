"""Hooks of a resumed run: a once hook runs once, and a gate runs before every call, approved or not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentfsm import Allow, Edit, HookContext, Migration, RunResult, StateSpec, Transition, hook
from agentfsm.runtime.hooks import DenyCall
from tests.helpers.journal_scenarios import SAMPLE_SCRIPT, sample_agent, waiting_run
from tests.journal.test_migration import LONGER, LOOP, stored


async def done(run: Any) -> RunResult:
    return await run


@pytest.mark.parametrize("graph", [LOOP, LONGER])
def test_a_once_hook_does_not_run_again_after_a_suspension(graph):
    store, _ = waiting_run()
    seen: list[str] = []
    doors = ("pre_step", "call_llm", "post_llm", "dispatch_tool", "terminal")
    hooks = [hook(door, once=True)(lambda c: seen.append(c.state)) for door in doors]
    agent = sample_agent(store, ["all done"], hooks=hooks, graph=graph, migrations=[Migration(LOOP)])
    asyncio.run(done(agent.resume("sample", Allow())))
    assert seen == ["terminal"]


def test_a_once_hook_runs_again_after_an_interrupted_effect():
    first, _ = waiting_run()
    rows = asyncio.run(first.records("sample"))
    at = next(n for n, r in enumerate(rows) if '"name":"scripted"' in r.body)
    seen: list[str] = []
    hooks = [hook(door, once=True)(lambda c: seen.append(c.state)) for door in ("pre_step", "call_llm")]
    agent = sample_agent(stored(rows[: at + 1]), SAMPLE_SCRIPT, hooks=hooks)
    asyncio.run(done(agent.resume("sample")))
    assert seen == ["call_llm"]  # it may have stopped the call that nobody knows the end of


def test_without_a_store_a_once_hook_runs_once_per_process():
    seen: list[str] = []
    watch = hook("pre_step", once=True)(lambda c: seen.append(c.state))

    async def scene() -> None:
        agent = sample_agent(None, SAMPLE_SCRIPT, hooks=[watch])
        first = await agent.run("Do it all.")
        await agent.resume(first.outcome.suspension_record, Allow())

    asyncio.run(scene())
    assert seen == ["pre_step", "pre_step"]


def test_a_gate_runs_again_before_a_call_that_was_approved():
    store, _ = waiting_run()
    seen: list[dict[str, Any]] = []

    def gate(context: HookContext) -> DenyCall | None:
        if context.call is not None and context.call.name == "pay":
            seen.append(dict(context.arguments))
            return DenyCall("the bank is closed")
        return None

    agent = sample_agent(store, ["all done"], hooks=[hook("dispatch_tool", fail_open=False)(gate)])
    result = asyncio.run(done(agent.resume("sample", Edit({"to": "Bob", "amount": 2.0}))))
    assert seen == [{"to": "Bob", "amount": 2.0}]
    assert any("the bank is closed" in m.content for m in result.messages)


def test_a_hook_on_a_renamed_state_is_the_same_hook():
    def reviewing(name: str) -> Any:
        spec = StateSpec(name, effect=lambda context: None)
        return LOOP.with_state(spec, [Transition(name, None, "dispatch_tool")], entered_by="post_llm.tool_calls")

    from agentfsm import MemoryStore

    old, new, store, seen = reviewing("review"), reviewing("check"), MemoryStore(), []
    asyncio.run(done(sample_agent(store, graph=old).run("Do it all.", run_id="sample")))
    script = [SAMPLE_SCRIPT[0], "all done"]
    watch = hook("check", once=True)(lambda c: seen.append(c.state))
    let = [Migration(old, states={"review": "check"})]
    asyncio.run(done(sample_agent(store, script, hooks=[watch], graph=new, migrations=let).resume("sample", Allow())))
    assert seen == []
