"""The usage of a run that another process resumed is equal, field by field."""

from __future__ import annotations

import asyncio
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from agentfsm import (
    Agent,
    AgentGuardrails,
    Allow,
    Host,
    MemoryStore,
    Message,
    Reply,
    RunResult,
    SqliteStore,
    Usage,
    tool,
)
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.testing import ScriptedModel, call
from tests.helpers.scenarios import await_run

FIRST = Usage(100, 20, 30, 0.5, 7, 11, 13)
SECOND = Usage(1000, 200, 300, 0.25, 70, 110, 130)
BOTH = (1100, 220, 330, 0.75, 77, 121, 143)


@tool(requires_approval=True)
def send() -> str:
    """Send it."""
    return "sent"


def reply(usage: Usage, *calls: Any) -> Reply:
    return Reply(Message.assistant("" if calls else "done", calls), usage=usage)


@pytest.mark.parametrize("by", ["id", "record"])
def test_every_count_is_restored(by: str, tmp_path: Path) -> None:
    script = ScriptedModel([reply(FIRST, call("send", "c1")), reply(SECOND)])

    def process(go: Any) -> RunResult:
        store = SqliteStore(tmp_path / "runs.db") if by == "id" else None
        agent = Agent(script, tools=[send], host=Host(secret=b"x", store=store), guardrails=AgentGuardrails())
        try:
            return asyncio.run(await_run(go(agent)))
        finally:
            if store is not None:
                store.close()

    first: Any = process(lambda agent: agent.run("go")).outcome
    record = first.suspension_record.to_json() if by == "record" else first.run_id
    result = process(lambda agent: agent.resume(record, Allow()))
    assert result.output == "done"
    assert astuple(result.usage) == BOTH


def test_the_journal_restores_them_for_a_finished_run() -> None:
    store = MemoryStore()
    agent = Agent(ScriptedModel([reply(FIRST)]), host=Host(store=store))
    run_id = asyncio.run(await_run(agent.run("go"))).outcome.run_id
    assert astuple(rehydrate(asyncio.run(store.records(run_id))).run.usage) == astuple(FIRST)
