"""What a run needs before its first record: dependencies from a factory, also after a restart, and instructions."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentfsm import (
    Agent,
    Allow,
    Host,
    MissingDepsError,
    RunContext,
    RunError,
    SqliteStore,
    ToolContext,
    UserInputRequested,
    hook,
    tool,
)
from agentfsm.journal.replay import replay
from agentfsm.testing import RecordingModel, ScriptedModel, call


@dataclass
class Desk:
    name: str


def desk_of(context: RunContext) -> Desk:
    return Desk(f"{context.metadata['tenant']}/{context.actor.id if context.actor else ''}/{context.tags[0]}")


async def desk_later(context: RunContext) -> Desk:
    await asyncio.sleep(0)
    return desk_of(context)


@tool(requires_approval=True)
def pay(context: ToolContext[Desk], usd: int) -> str:
    """Pay."""
    return f"{context.deps.name} paid {usd}"


GIVEN: dict[str, Any] = {"actor": "kim", "tags": ["t"], "metadata": {"tenant": "acme"}, "run_id": "r1"}


def payer(host: Host, *script: Any, **more: Any) -> Agent[Desk, str]:
    return Agent(ScriptedModel(list(script)), tools=[pay], host=host, **{"deps_factory": desk_of, **more})


def results(result: Any) -> list[str]:
    return [m.content for m in result.messages if m.role == "tool"]


@pytest.mark.parametrize("factory", [desk_of, desk_later])
def test_a_run_that_is_given_no_dependencies_gets_those_that_the_factory_makes_and_so_does_a_resumed_one(factory: Any):
    agent = payer(Host(), call("pay", usd=1), "ok", deps_factory=factory)
    run = agent.run("go", **GIVEN)
    with pytest.raises(RunError, match="has not started: its dependencies are made when it does"):
        _ = run.deps

    async def wait() -> Any:
        return await run

    request = asyncio.run(wait()).outcome
    assert isinstance(request, UserInputRequested)
    assert run.deps == Desk("acme/kim/t")
    assert results(agent.resume_sync(request.suspension_record.to_json(), Allow())) == ["acme/kim/t paid 1"]


def test_dependencies_that_are_given_are_not_made():
    made: list[str] = []

    def factory(context: RunContext) -> Desk:
        made.append(context.run_id)
        return Desk("made")

    agent = payer(Host(), call("pay", usd=1), "ok", deps_factory=factory)
    request = agent.run_sync("go", deps=Desk("given"), **GIVEN).outcome
    assert isinstance(request, UserInputRequested)
    assert made == []
    assert results(agent.resume_sync(request.suspension_record, Allow(), deps=Desk("again"))) == ["again paid 1"]
    assert made == []


def explode(context: RunContext) -> Desk:
    raise ConnectionError("no database")


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (explode, "deps_factory tests.runtime.test_preparation.explode raised ConnectionError: no database"),
        (lambda context: None, "returned None"),
        (lambda context: "text", r"must be a Desk \(deps_type\), not str"),
    ],
)
def test_a_factory_that_fails_leaves_nothing_behind(factory: Any, words: str, tmp_path: Path):
    store = SqliteStore(tmp_path / "runs.db")
    agent = payer(Host(store=store), deps_factory=factory, deps_type=Desk)
    with pytest.raises(RunError, match=words):
        agent.run_sync("go", **GIVEN)
    assert asyncio.run(store.head("r1")) is None


def test_a_factory_that_fails_leaves_a_suspended_run_as_it_is(tmp_path: Path):
    host = Host(store=SqliteStore(tmp_path / "runs.db"))
    payer(host, call("pay", usd=1)).run_sync("go", **GIVEN)
    with pytest.raises(RunError, match="no database"):
        payer(host, deps_factory=explode).resume_sync("r1", Allow())
    assert results(payer(host, "ok").resume_sync("r1", Allow())) == ["acme/kim/t paid 1"]


def test_a_run_is_dismissed_although_its_dependencies_cannot_be_made(tmp_path: Path):
    seen: list[Any] = []

    @hook("terminal")
    def at_end(context: Any) -> None:
        seen.append(context.deps)

    host = Host(store=SqliteStore(tmp_path / "runs.db"))
    payer(host, call("pay", usd=1)).run_sync("go", **GIVEN)

    async def dismiss(factory: Any) -> Any:
        return await payer(host, deps_factory=factory, hooks=[at_end]).dismiss("r1")

    assert asyncio.run(dismiss(explode)).state == "terminal"
    assert seen == [None]


def test_a_sub_agent_with_a_factory_makes_its_own_from_what_its_caller_was_given():
    seen: list[Any] = []

    @hook("pre_step")
    def watch(context: Any) -> None:
        seen.append((context.deps, context.run.run_id == "r1"))

    sub = Agent(ScriptedModel(["done"]), hooks=[watch], deps_factory=desk_of)
    agent: Agent[Any, str] = Agent(
        ScriptedModel([call("ask", task="x"), "ok"]), tools=[sub.as_tool("ask", "Asks.")], deps_type=str
    )
    assert agent.run_sync("go", deps="its own", **GIVEN).ok
    assert seen == [(Desk("acme/kim/t"), False)]


# -- a restart -------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys
from dataclasses import dataclass
from agentfsm import Agent, Allow, Host, RunContext, SqliteStore, ToolContext, tool
from agentfsm.testing import ScriptedModel, call

@dataclass
class Desk:
    name: str
    pid: int

async def desk_of(context: RunContext) -> Desk:
    given = context.run_id, context.session_id, context.actor.id, context.tags, dict(context.metadata)
    return Desk(" ".join(map(str, given)), os.getpid())

def large(arguments: dict) -> bool:
    return arguments["usd"] > 5

@tool(idempotent=True, requires_approval=large)
def pay(context: ToolContext[Desk], usd: int) -> str:
    "Pay."
    if sys.argv[1] == "crash":
        os._exit(9)
    return f"{context.deps.name} paid {usd}, in this process: {context.deps.pid == os.getpid()}"

script = {"suspend": [call("pay", usd=9)], "crash": [call("pay", usd=1)]}.get(sys.argv[1], ["ok"])
factory = desk_of if "bare" not in sys.argv else None
host = Host(store=SqliteStore("runs.db"), secret=b"s")
agent = Agent(ScriptedModel(script), tools=[pay], host=host, deps_factory=factory)
given = dict(session_id="s1", actor="kim", tags=["t"], metadata={"tenant": 7}, run_id="r1")
if sys.argv[1] in ("suspend", "crash"):
    result = agent.run_sync("go", **given)
else:
    result = agent.resume_sync("r1", Allow() if sys.argv[1] == "allow" else None)
print([m.content for m in result.messages if m.role == "tool"])
"""


def run_program(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, "program.py", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "AGENTFSM_SECRET": ""},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("first", "code", "second"), [("suspend", 0, "allow"), ("crash", 9, "resume")])
def test_another_process_makes_the_dependencies_again_and_without_a_factory_refuses(
    first: str, code: int, second: str, tmp_path: Path
):
    begun = run_program(tmp_path, first)
    assert begun.returncode == code, begun.stderr
    refused = run_program(tmp_path, second, "bare")
    assert refused.returncode == 1
    assert "MissingDepsError: run 'r1' was started with dependencies, which no journal holds" in refused.stderr
    done = run_program(tmp_path, second)
    usd = 9 if first == "suspend" else 1
    assert f"r1 s1 kim ('t',) {{'tenant': 7}} paid {usd}, in this process: True" in done.stdout, done.stderr


def test_a_run_whose_dependencies_are_missing_is_not_among_those_to_go_on_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run_program(tmp_path, "crash")
    host = Host(store=SqliteStore(tmp_path / "runs.db"), secret=b"s")
    assert asyncio.run(Agent(ScriptedModel(), tools=[pay], host=host).unfinished_runs()) == []
    assert "was started with dependencies" in caplog.text
    assert [run.run_id for run in asyncio.run(payer(host).unfinished_runs())] == ["r1"]


# -- instructions ----------------------------------------------------------------------------------------------


def greet(context: RunContext[Desk]) -> str:
    return f"You work at {context.deps.name} for {context.actor}."


async def greet_later(context: RunContext[Desk]) -> str:
    await asyncio.sleep(0)
    return greet(context)


@pytest.mark.parametrize("function", [greet, greet_later])
def test_instructions_may_be_a_function_of_the_context(function: Any):
    model = RecordingModel(ScriptedModel(["ok"]))
    agent = Agent(model, instructions=function, deps_type=Desk)
    result = agent.run_sync("go", deps=Desk("front"), actor="kim")
    assert model.requests[0].messages[0].content == "You work at front for kim, claimed, not verified."
    assert result.journal[0].data["messages"][0]["content"] == "You work at front for kim, claimed, not verified."
    assert [m.role for m in result.messages] == ["system", "user", "assistant"]
    assert agent.instructions == ""


def test_the_form_of_the_answer_is_added_to_what_the_function_returns():
    agent = Agent(ScriptedModel(["7"]), instructions=lambda context: "Count.", output_type=int)
    system = agent.run_sync("go").messages[0].content
    assert system.startswith("Count.\n\n")
    assert system == f"Count.\n\n{agent.instructions}"


def test_a_function_of_instructions_is_called_once_and_its_text_is_in_the_journal(tmp_path: Path):
    calls: list[str] = []

    def count(context: RunContext[Desk]) -> str:
        calls.append(context.run_id)
        return f"call {len(calls)}"

    store = SqliteStore(tmp_path / "runs.db")
    host = Host(store=store)
    payer(host, call("pay", usd=1), instructions=count).run_sync("go", **GIVEN)
    result = payer(host, "ok", instructions=count).resume_sync("r1", Allow())
    assert result.messages[0].content == "call 1"
    assert calls == ["r1"]
    assert replay(asyncio.run(store.records("r1")), result.graph).same
    assert calls == ["r1"]


@pytest.mark.parametrize(
    ("function", "words"),
    [(explode, "instructions .*explode raised ConnectionError"), (lambda context: 7, "must return a string, not int")],
)
def test_instructions_that_fail_leave_nothing_behind(function: Any, words: str, tmp_path: Path):
    store = SqliteStore(tmp_path / "runs.db")
    with pytest.raises(RunError, match=words):
        Agent(ScriptedModel(["ok"]), instructions=function, host=Host(store=store)).run_sync("go", run_id="r1")
    assert asyncio.run(store.head("r1")) is None


def test_a_sub_agent_gets_its_instructions_from_the_context_of_its_own_run():
    model = RecordingModel(ScriptedModel(["done"]))
    sub = Agent(model, instructions=lambda context: f"For {context.metadata['tenant']}.")
    agent = Agent(ScriptedModel([call("ask", task="x"), "ok"]), tools=[sub.as_tool("ask", "Asks.")])
    assert agent.run_sync("go", metadata={"tenant": "acme"}).ok
    assert model.requests[0].messages[0].content == "For acme."


def test_a_run_that_was_started_with_dependencies_says_so_if_there_are_none(tmp_path: Path):
    host = Host(store=SqliteStore(tmp_path / "runs.db"))
    payer(host, call("pay", usd=1)).run_sync("go", **GIVEN)
    with pytest.raises(MissingDepsError):
        payer(host, deps_factory=None).resume_sync("r1", Allow())
