"""``agentfsm verify --proof``: stored runs are followed through the model of their proofs, with their counters."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentfsm import LOOP, Agent, Allow, Host, MemoryStore, SqliteStore, Transition, tool
from agentfsm.analysis import Assumptions, GuardAssumption, run_monitor
from agentfsm.analysis.state_space import StateSpace
from agentfsm.machine.graph import Graph
from agentfsm.testing import ScriptedModel, call
from agentfsm.testing.invariants import check_stored_run
from tests.cli.conftest import Cli, cli

__all__ = ["cli"]

SECRET = b"of the tests"


@tool(requires_approval=True)
async def gated(text: str) -> str:
    """It needs approval."""
    return text


def never(run: object) -> bool:
    return False


OWN = LOOP.with_transition(Transition("post_llm", never, "terminal", ends="partial"))


def make_agent(store: MemoryStore | SqliteStore, **options: object) -> Agent:
    script = [[call("gated", text="a"), call("gated", text="b")], "done"]
    return Agent(ScriptedModel(script), tools=[gated], host=Host(store=store, secret=SECRET), **options)  # type: ignore[arg-type]


async def approved_run(agent: Agent) -> int:
    """A run whose two calls are approved, one after the other; returns how many moves it made."""
    result = await agent.run("go", run_id="one")
    moves = len(result.decisions)
    for _ in range(2):
        result = await agent.resume("one", Allow())
        moves += len(result.decisions)
    assert result.ok
    return moves


def test_a_stored_run_is_checked_from_its_first_move_to_its_last() -> None:
    store = MemoryStore()
    moves = asyncio.run(approved_run(make_agent(store)))
    check = check_stored_run(asyncio.run(store.records("one")))
    assert (check.inside, check.moves) == (True, moves)


def test_a_run_on_a_graph_of_your_own_needs_its_agent() -> None:
    store = MemoryStore()
    agent = make_agent(store, graph=OWN)
    asyncio.run(approved_run(agent))
    without = check_stored_run(asyncio.run(store.records("one")))
    assert without.inside is None
    assert without.reason == "its graph is not a preset's: name the agent that made it"
    assert check_stored_run(asyncio.run(store.records("one")), agent).inside


def test_a_run_outside_the_model_is_reported_with_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is made wrong: it says that no call ever needs approval."""
    store = MemoryStore()
    asyncio.run(approved_run(make_agent(store)))
    monkeypatch.setattr(run_monitor, "_cached_space", _without_approvals)
    check = check_stored_run(asyncio.run(store.records("one")))
    assert check.inside is False
    assert "record " in check.reason
    assert "the run took dispatch_tool.approval_required" in check.reason


def _without_approvals(graph: Graph, *_: object) -> StateSpace:
    wrong = Assumptions(guards=(GuardAssumption("approval_required", may="never", why="nobody approves"),))
    return StateSpace(graph, wrong)


def test_the_command_reports_each_run(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    moves = asyncio.run(approved_run(make_agent(store)))
    store.close()
    good = cli("verify", "--proof", "--store", "runs.db")
    assert good.exit_code == 0
    assert f"{moves} moves inside the model of its proofs" in good.stdout
    monkeypatch.setattr(run_monitor, "_cached_space", _without_approvals)
    bad = cli("verify", "--proof", "--store", "runs.db")
    assert bad.exit_code == 1
    assert "OUTSIDE the model of its proofs: record " in bad.stdout
    wrong = cli("verify", "--proof", "--agent", "agentfsm:LOOP", "--store", "runs.db")
    assert wrong.exit_code == 2
    assert "agentfsm:LOOP is a Graph, not an agent" in wrong.stderr
