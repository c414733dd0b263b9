"""Journals and suspension records of version 0.1.0 are still read, verified, replayed and resumed.

``tests/data/v0.1.0`` was written by the code before its modules were renamed: ``runs.db`` is a store with 16 runs,
``records.json`` holds the suspension records of the three that wait for a human reply, and ``expected.json`` says
what the old code made of each run. Nothing here is derived from the code under test.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentfsm import (
    LOOP,
    Agent,
    AgentGuardrails,
    Allow,
    Behavior,
    Deny,
    FileReplayGuard,
    Graph,
    Host,
    ItDidNotRun,
    ItRan,
    MemoryStore,
    RunCompleted,
    RunResult,
    SqliteStore,
    SuspensionRegistryError,
    UserInputRequested,
    tool,
)
from agentfsm.errors import JournalError
from agentfsm.journal.adoption import adopt
from agentfsm.journal.records import SealedRecord, open_record
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.replay import replay
from agentfsm.journal.verification import GOOD, OPEN, verify_stored_run
from agentfsm.loop.keys import Keyring
from agentfsm.loop.presets import PRESETS
from agentfsm.runtime.host import InMemoryReplayGuard
from agentfsm.testing import FakeClock, ScriptedModel, call

DATA = Path(__file__).parent / "data" / "v0.1.0"
EXPECTED: dict[str, Any] = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))
SUSPENSION_RECORDS: dict[str, str] = json.loads((DATA / "records.json").read_text(encoding="utf-8"))
SECRET = b"kept with the test data"
WAITING = {"waiting-approval": "approval", "waiting-question": "question", "waiting-limit": "limit"}
KILLED = "killed"  # inside a tool call, so there was no result to expect


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
    return f"contents of {path}"


@pytest.fixture
def store(tmp_path: Path):
    with SqliteStore(shutil.copy(DATA / "runs.db", tmp_path / "runs.db")) as copied:
        yield copied


def agent(
    store: SqliteStore | None, run_id: str, *script: Any, tools: Any = (add, pay, look), guard: Any = None
) -> Agent:
    old = EXPECTED.get(run_id, {"preset": "standard", "guardrails": {}})
    return Agent(
        ScriptedModel(script),
        tools=tools,
        instructions="Be brief.",
        preset=old["preset"],
        guardrails=AgentGuardrails(**old["guardrails"]),
        host=Host(clock=FakeClock(), store=store, secret=SECRET, replay_guard=guard or InMemoryReplayGuard()),
    )


def texts(messages: Any) -> list[list[str]]:
    return without_notes([[message.role.value, message.content] for message in messages])


def without_notes(messages: list[list[str]]) -> list[list[str]]:
    """The messages without the loop's notes about repeated calls, which no journal holds and which are worded anew."""
    return [[role, text.partition("\n[Note: this exact call")[0]] for role, text in messages]


FORMER_STRICT = (
    "policy_violation",
    "repeated_error",
    "unknown_tool",
    "invalid_arguments",
    "environment_error",
    "tool_error",
)


def former_graph(preset: str) -> Graph:
    """The table on which version 0.1.0 ran a preset."""
    if preset != "strict":
        return LOOP
    return replace(LOOP.without(*(f"post_tool.{name}" for name in FORMER_STRICT)), name="strict")


def decisions(records: list[SealedRecord]) -> list[list[Any]]:
    """Each recorded transition with the guards that were evaluated for it, named by the table that the run pinned."""
    guards: dict[str, list[str]] = {}
    for source, guard, _, _ in open_record(records[0])["graph"]["transitions"]:
        guards.setdefault(str(source), []).append(str(guard))
    rows: list[list[Any]] = []
    for body in map(open_record, records):
        if body["kind"] == "transition":
            names = guards[body["transition"].rpartition(".")[0]]
            verdicts = [digit == "1" for digit in body["tried"]]
            rows.append([body["transition"], [list(pair) for pair in zip(names, verdicts, strict=False)]])
    return rows


def test_the_store_has_every_run_that_was_written(store: SqliteStore) -> None:
    assert {head.run_id for head in asyncio.run(store.heads())} == {*EXPECTED, KILLED}
    assert {head.run_id for head in asyncio.run(store.heads("suspended"))} == {*WAITING} == {*SUSPENSION_RECORDS}
    assert [head.run_id for head in asyncio.run(store.heads("running"))] == [KILLED]


@pytest.mark.parametrize("run_id", [*EXPECTED, KILLED])
def test_a_journal_verifies_and_replays(store: SqliteStore, run_id: str) -> None:
    report = asyncio.run(verify_stored_run(store, run_id, {}))
    assert (report.code, report.reason) == (OPEN if run_id in WAITING or run_id == KILLED else GOOD, "")
    preset = EXPECTED[run_id]["preset"] if run_id in EXPECTED else "standard"
    replayed = replay(asyncio.run(store.records(run_id)), former_graph(preset))
    assert replayed.same, replayed


@pytest.mark.parametrize("run_id", EXPECTED)
def test_a_journal_gives_the_decisions_messages_and_endings_of_the_old_code(store: SqliteStore, run_id: str) -> None:
    old, records = EXPECTED[run_id], asyncio.run(store.records(run_id))
    assert decisions(records) == [row for life in old["lives"] for row in life["decisions"]]
    run = rehydrate(records).run
    last = old["lives"][-1]
    assert run.state == last["state"]
    assert texts(run.messages) == without_notes(last["messages"])
    bodies = [open_record(record) for record in records]
    endings = [body["ending"] for body in bodies if body["kind"] == "run.finished"]
    assert endings == ([] if old["waits"] else [last["kind"]])


def resume(resumed: Agent, record: Any, reply: Any) -> RunResult:
    async def wait() -> RunResult:
        return await resumed.resume(record, reply)

    return asyncio.run(wait())


def take_over(store: SqliteStore, run_id: str, resumed: Agent) -> None:
    """Adopt a run, without which it is not resumed: version 0.1.0 did not seal journals."""
    with pytest.raises(JournalError, match="adopt"):
        asyncio.run(resumed.resume(run_id, None).load())
    assert asyncio.run(adopt(store, run_id, Keyring(SECRET), by="Ann"))
    assert not asyncio.run(adopt(store, run_id, Keyring(SECRET)))


@pytest.mark.parametrize("stored", [True, False], ids=["stored run", "suspension record"])
@pytest.mark.parametrize(
    ("run_id", "reply", "script", "shown"),
    [
        ("waiting-approval", Allow(), "done", "paid 3.0 to Ann"),
        ("waiting-approval", Deny("too much"), "done", "Denied by the user: too much"),
        ("waiting-question", "The first.", call("return_done", output="done"), "The first."),
        ("waiting-limit", "Two more calls.", "done", "Two more calls."),
    ],
    ids=["approval allowed", "approval denied", "question answered", "limit extended"],
)
def test_a_waiting_run_resumes(
    store: SqliteStore, stored: bool, run_id: str, reply: Any, script: Any, shown: str, tmp_path: Path
) -> None:
    resumed = agent(store if stored else None, run_id, script, guard=FileReplayGuard(tmp_path / "used"))
    if stored:
        take_over(store, run_id, resumed)
    result = resume(resumed, run_id if stored else SUSPENSION_RECORDS[run_id], reply)
    if isinstance(reply, Allow):  # it says nothing about the tool that was shown, so it is asked again
        assert isinstance(result.outcome, UserInputRequested)
        assert "not for this definition of the tool" in result.outcome.question
        result = resume(resumed, run_id if stored else result.outcome.suspension_record, reply)
    assert isinstance(result.outcome, RunCompleted), result.outcome
    assert result.output == "done"
    before, messages = without_notes(EXPECTED[run_id]["lives"][0]["messages"]), texts(result.messages)
    assert messages[: len(before)] == before
    assert shown in [content for _, content in messages[len(before) :]]
    if stored:
        assert asyncio.run(verify_stored_run(store, run_id, {})).code == GOOD
        assert replay(asyncio.run(store.records(run_id)), resumed.graph).same


def test_a_suspension_record_is_resumed_only_where_it_is_known_whether_it_was_used() -> None:
    with pytest.raises(SuspensionRegistryError, match="FileReplayGuard"):
        asyncio.run(agent(None, "waiting-question").resume(SUSPENSION_RECORDS["waiting-question"], "The first.").load())


@pytest.mark.parametrize("reply", [ItRan("it ran"), ItDidNotRun()], ids=["it ran", "it did not run"])
def test_a_run_that_was_killed_during_a_tool_call_asks_whether_the_call_ran(store: SqliteStore, reply: Any) -> None:
    calls: list[int] = []

    @tool
    def once(n: int) -> str:
        """Once."""
        calls.append(n)
        return "it ran now"

    take_over(store, KILLED, agent(store, KILLED, tools=(once,)))
    interrupted = resume(agent(store, KILLED, tools=(once,)), KILLED, None)
    assert isinstance(interrupted.outcome, UserInputRequested)
    assert (interrupted.outcome.kind, calls) == ("in_doubt", [])
    result = resume(agent(store, KILLED, "done", tools=(once,)), KILLED, reply)
    assert result.output == "done"
    ran_now = isinstance(reply, ItDidNotRun)
    assert calls == ([1] if ran_now else [])
    assert texts(result.messages)[-2:] == [["tool", "it ran now" if ran_now else "it ran"], ["assistant", "done"]]
    assert asyncio.run(verify_stored_run(store, KILLED, {})).code == GOOD
    assert replay(asyncio.run(store.records(KILLED)), PRESETS["standard"].graph).same


def failing_five_times(behavior: Behavior) -> list[SealedRecord]:
    """The journal of a run whose only reply makes five calls that fail in the same way."""

    @tool
    def broken(n: int) -> str:
        """It always fails."""
        raise ValueError("broken")

    calls = [call("broken", n=n) for n in range(5)]
    store = MemoryStore()
    made = Agent(ScriptedModel([calls, "done"]), tools=[broken], host=Host(store=store))
    made = made.with_config(replace(made.config, behavior=behavior))
    made.run_sync("go", run_id="r1")
    return asyncio.run(store.records("r1"))


@pytest.mark.parametrize(
    ("counts", "taken", "ending"),
    [("calls", "post_tool.repeated_error", "Handoff"), ("batches", "post_tool.tool_error", "RunCompleted")],
)
def test_what_the_breaker_of_a_run_counts_stands_in_its_journal(counts: Any, taken: str, ending: str) -> None:
    records = failing_five_times(Behavior(breaker_counts=counts))
    rows = [json.loads(record.body).get("transition") for record in records]
    assert taken in rows
    assert replay(records, LOOP).same
    other = "batches" if counts == "calls" else "calls"
    replayed = replay(records, LOOP, behavior=Behavior(breaker_counts=other))
    assert not replayed.same
    assert (replayed.recorded_ending, replayed.divergences[0].recorded.partition(" ")[0]) == (ending, taken)


def test_a_run_whose_journal_does_not_say_what_its_breaker_counts_is_replayed_as_it_ran() -> None:
    """Its breaker counted each call, and its first record has no such switch."""
    first, *rest = failing_five_times(Behavior(breaker_counts="calls"))
    body = json.loads(first.body)
    assert body["rules"].pop("breaker_counts") == "calls"
    old = [first._replace(body=json.dumps(body)), *rest]
    assert replay(old, LOOP).same
    assert rehydrate(old).run.behavior.breaker_counts == "calls"
