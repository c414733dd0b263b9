"""Sampling: what an MCP server asks a model during a call, within the budgets of the run and charged to it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")

from pydantic import ValidationError

from agentfsm import (
    Agent,
    AgentGuardrails,
    Event,
    Host,
    ItDidNotRun,
    ItRan,
    Message,
    ModelReplied,
    Reply,
    Role,
    RunCancelled,
    RunCompleted,
    RunResult,
    SqliteStore,
    StaleLease,
    SubagentEvent,
    Usage,
    UserInputRequested,
    hand_over,
)
from agentfsm.errors import ProviderError
from agentfsm.integrations.mcp import MCPSettings, MCPTools
from agentfsm.journal.purge import purge_runs
from agentfsm.journal.verification import GOOD, verify
from agentfsm.loop.messages import FinishReason
from agentfsm.testing import RecordingModel, ScriptedModel, call
from tests.helpers.mcp_servers import SdkServer, sdk_http, sdk_legacy_http, sdk_stdio
from tests.helpers.npm_servers import everything_command
from tests.helpers.scenarios import await_run

FIXTURES = sdk_http, sdk_legacy_http, everything_command  # importing registers the fixtures

ROOT = Path(__file__).parents[2]
SECRET = b"a secret of these tests"
SHORT = Reply(Message.assistant("short"), usage=Usage(input_tokens=30, output_tokens=4))


def results(result: RunResult) -> list[str]:
    return [m.content for m in result.messages if m.role == "tool"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with SqliteStore(tmp_path / "runs.db") as store:
        yield store


def run(
    tools: MCPTools,
    script: Any,
    *,
    store: SqliteStore | None = None,
    guardrails: AgentGuardrails | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> RunResult:
    """A run that calls a tool once, under the id ``r``."""

    async def main() -> RunResult:
        async with tools:
            host = Host(secret=SECRET, store=store)
            run = Agent(ScriptedModel([script, "ok"]), tools=tools, host=host, guardrails=guardrails).run(
                "go", run_id="r"
            )
            if on_event is not None:
                async for event in run:
                    on_event(event)
            result = await run
        assert [task for task in asyncio.all_tasks() if task.get_name().startswith("agentfsm")] == []
        return result

    return asyncio.run(main())


def model(*replies: Any) -> RecordingModel:
    return RecordingModel(ScriptedModel([*replies]))


def over_http(server: SdkServer, model: Any, **settings: Any) -> MCPTools:
    return MCPTools.http(server.url, settings=MCPSettings(sampling=Agent(model), **settings))


@pytest.fixture(params=["modern over HTTP", "legacy over HTTP", "modern over stdio"])
def summarizing(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Callable[..., MCPTools], str]:
    """What opens a server with settings, and its tool that asks a model."""
    protocol, _, transport = request.param.partition(" over ")
    tool = {"modern": "abstract", "legacy": "summarize"}[protocol]
    if transport == "HTTP":
        server: SdkServer = request.getfixturevalue("sdk_server" if protocol == "modern" else "legacy_server")
        return lambda settings: MCPTools.http(server.url, settings=settings), tool
    return lambda settings: sdk_stdio(tmp_path, settings=settings), tool


# -- in every protocol and transport ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_of_the_app_replies_to_the_server_and_the_run_is_charged(
    summarizing: tuple[Callable[..., MCPTools], str],
) -> None:
    open_tools, tool = summarizing
    asked = model(SHORT)
    events: list[Event] = []
    settings = MCPSettings(sampling=Agent(asked, instructions="You work for Acme."))
    result = run(open_tools(settings), call(tool, text="long"), on_event=events.append)
    assert results(result) == ["scripted: short (endTurn)"]
    (request,) = asked.requests
    assert [(m.role, m.content) for m in request.messages] == [
        (Role.SYSTEM, "You work for Acme.\n\nBe short."),
        (Role.USER, "Summarize: long"),
    ]
    assert (request.max_output_tokens, list(request.tools)) == (50, [])
    assert (result.run_state.model_calls, result.run_state.iterations) == (3, 3)
    assert (result.usage.input_tokens, result.usage.output_tokens) >= (30, 4)
    inner = [event for event in events if isinstance(event, SubagentEvent)]
    assert {event.tools for event in inner} == {(tool,)}
    assert sum(isinstance(event.event, ModelReplied) for event in inner) == 1


@pytest.mark.slow
def test_without_the_setting_the_server_is_told_that_it_may_not_ask(
    summarizing: tuple[Callable[..., MCPTools], str],
) -> None:
    open_tools, tool = summarizing
    result = run(open_tools(MCPSettings()), call(tool, text="long"))
    assert "sampling" in results(result)[0].lower()
    assert result.run_state.model_calls == 2


def test_a_server_of_another_vendor_asks_over_stdio_in_the_old_protocol(everything: list[str]) -> None:
    program, *arguments = everything
    tools = MCPTools.stdio(program, arguments, settings=MCPSettings(sampling=Agent(model("a haiku"))))
    result = run(tools, call("trigger-sampling-request", prompt="Write.", maxTokens=30))
    assert "a haiku" in results(result)[0]
    assert result.run_state.model_calls == 3


# -- budgets ---------------------------------------------------------------------------------------------


def test_what_the_server_asks_counts_towards_the_limit_on_model_calls(legacy_server: SdkServer) -> None:
    asked = model(*[SHORT] * 9)
    limits = AgentGuardrails(max_iterations=3, on_limit="stop")
    result = run(over_http(legacy_server, asked), call("compare", text="long", requests=5), guardrails=limits)
    assert "nothing is left of the budget of this run" in results(result)[0]
    assert (len(asked.requests), result.run_state.model_calls) == (2, 3)  # the run had made one itself


def test_its_tokens_count_towards_the_limit_on_tokens(legacy_server: SdkServer) -> None:
    asked = model(*[SHORT] * 9)
    limits = AgentGuardrails(max_tokens=100, on_limit="stop")
    result = run(over_http(legacy_server, asked), call("compare", text="long", requests=9), guardrails=limits)
    assert "nothing is left of the budget" in results(result)[0]
    assert len(asked.requests) == 3  # 34 tokens each, and at most one reply beyond the limit
    assert result.usage.total_tokens >= 34 * len(asked.requests)


def test_the_agents_own_limits_hold_for_each_request(legacy_server: SdkServer) -> None:
    asked = RecordingModel(ScriptedModel([SHORT]))
    agent = Agent(asked, guardrails=AgentGuardrails(max_output_tokens=20))
    tools = MCPTools.http(legacy_server.url, settings=MCPSettings(sampling=agent))
    run(tools, call("summarize", text="long"))
    assert asked.requests[0].max_output_tokens == 20


def test_a_reply_that_reaches_the_maximum_length_is_passed_on_as_such_and_not_asked_for_again(
    legacy_server: SdkServer,
) -> None:
    cut = Reply(Message.assistant("Once upon"), finish_reason=FinishReason.LENGTH)
    asked = model(cut, SHORT)
    result = run(over_http(legacy_server, asked), call("compare", text="long", requests=1, max_tokens=2))
    assert results(result) == ["Once upon (maxTokens)"]
    assert len(asked.requests) == 1


def test_a_failure_of_the_provider_is_retried_as_in_any_run_and_then_told_to_the_server(
    legacy_server: SdkServer,
) -> None:
    result = run(over_http(legacy_server, model(ProviderError("the model is gone"))), call("summarize", text="long"))
    assert "the model is gone" in results(result)[0]


# -- what is not answered --------------------------------------------------------------------------------


def test_an_agent_with_tools_is_refused() -> None:
    def shell(command: str) -> str:
        """Run a command."""
        return command

    with pytest.raises(ValidationError, match=r"the agent has tools \(shell\)"):
        MCPSettings(sampling=Agent(ScriptedModel([]), tools=[shell]))


def test_a_request_that_is_no_text_is_refused_with_the_reason(legacy_server: SdkServer) -> None:
    asked = model(SHORT)
    result = run(over_http(legacy_server, asked), call("play"))
    assert "content of type 'audio' is not supported" in results(result)[0]
    assert asked.requests == []


def test_a_cancelled_call_ends_the_model_call(legacy_server: SdkServer) -> None:
    state: list[str] = []

    class Slow:
        name = "slow"

        async def reply(self, request: Any) -> Reply:
            state.append("asked")
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                state.append("ended")
            raise AssertionError

    async def main() -> RunResult:
        async with over_http(legacy_server, Slow()) as tools:
            run = Agent(ScriptedModel([call("summarize", text="long"), "ok"]), tools=tools).run("go")
            task = asyncio.ensure_future(run)
            await started.wait()
            run.cancel("enough")
            return await task

    started = asyncio.Event()
    result = asyncio.run(main())
    assert state == ["asked", "ended"]
    assert result.run_state.model_calls == 2  # the one that was cut off counts


# -- in the journal --------------------------------------------------------------------------------------


def test_each_request_is_a_run_of_its_own_in_the_journal(legacy_server: SdkServer, store: SqliteStore) -> None:
    result = run(over_http(legacy_server, model(SHORT, SHORT)), call("compare", text="long"), store=store)
    assert results(result) == ["short (endTurn) / short (endTurn)"]

    async def check() -> list[str]:
        names = sorted(head.run_id for head in await store.heads())
        for name in names:
            report = verify(
                name, await store.records(name), await store.head(name), keyring=Host(secret=SECRET).keyring
            )
            assert report.code == GOOD, report
        return names

    names = asyncio.run(check())
    assert len(names) == 3
    assert all(name.startswith("r") for name in names)
    assert {name.rpartition(".")[2] for name in names if name != "r"} == {"1", "2"}  # the same request, twice


def kill(database: Path, server: SdkServer, tool: str, replies: int) -> None:
    command = [sys.executable, "-m", "tests.helpers.sampling_kill", str(database), server.url, tool, str(replies)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def resume(server: SdkServer, store: SqliteStore, asked: Any, *replies: Any) -> RunResult:
    async def main() -> RunResult:
        async with over_http(server, asked, idempotent="annotated") as tools:
            agent = Agent(ScriptedModel(["ok"]), tools=tools, host=Host(secret=SECRET, store=store))
            result = await agent.resume("r")
            for reply in replies:
                assert isinstance(result.outcome, UserInputRequested)
                assert result.outcome.kind == "in_doubt"
                result = await agent.resume("r", reply)
            return result

    return asyncio.run(main())


@pytest.mark.slow
def test_after_a_kill_a_repeated_call_pays_no_reply_twice(
    legacy_server: SdkServer, store: SqliteStore, tmp_path: Path
) -> None:
    kill(tmp_path / "runs.db", legacy_server, "compare", replies=1)
    asked = model(SHORT, "never asked")
    result = resume(legacy_server, store, asked)
    assert results(result) == ["short (endTurn) / short (endTurn)"]
    assert len(asked.requests) == 1
    # The two of the run itself, and the two replies.
    assert result.run_state.model_calls == 4


@pytest.mark.slow
def test_after_a_kill_any_other_call_is_in_doubt(legacy_server: SdkServer, store: SqliteStore, tmp_path: Path) -> None:
    kill(tmp_path / "runs.db", legacy_server, "summarize", replies=0)
    asked = model(SHORT)
    result = resume(legacy_server, store, asked, ItDidNotRun())
    assert results(result) == ["scripted: short (endTurn)"]
    assert len(asked.requests) == 1


def test_a_call_may_ask_a_model_and_a_person(legacy_server: SdkServer, store: SqliteStore) -> None:
    asked = model(SHORT, "shorter")

    async def main() -> RunResult:
        async with over_http(legacy_server, asked, elicitation=True) as tools:
            own = ScriptedModel([call("confirm_summary", text="long"), "ok"])
            agent = Agent(own, tools=tools, host=Host(secret=SECRET, store=store))
            first = await agent.run("go", run_id="r")
            assert isinstance(first.outcome, UserInputRequested)
            assert first.run_state.model_calls == 2
            return await agent.resume("r", "true")

    result = asyncio.run(main())
    assert results(result) == ["short, accept, shorter"]
    assert result.run_state.model_calls == 4


# -- hand-over -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("then", ["repeated", "settled", "dismissed"])
def test_a_run_that_is_handed_over_while_a_model_replies_to_the_server_leaves_nothing_behind(
    then: str, is_cancelled: bool, legacy_server: SdkServer, store: SqliteStore
) -> None:
    """The run of the reply is handed over, too: it is continued, or ends with its caller."""
    begun, held = asyncio.Event(), asyncio.Event()
    name = "compare" if then == "repeated" else "summarize"  # the former is idempotent, and asks twice

    class Slow:
        name = "slow"

        async def reply(self, request: Any) -> Reply:
            begun.set()
            await held.wait()
            return SHORT

    async def hand_over_in_the_reply() -> None:
        async with over_http(legacy_server, Slow(), idempotent="annotated") as tools:
            run = agent([call(name, text="long"), "ok"], tools).run("go", run_id="r")
            awaiting = asyncio.create_task(await_run(run))
            await begun.wait()
            await hand_over(run)
            if is_cancelled:
                awaiting.cancel()
            held.set()
            with pytest.raises(asyncio.CancelledError if is_cancelled else StaleLease):
                await awaiting
        assert [(head.status, head.owner) for head in await store.heads()] == [("running", None)] * 2

    async def go_on() -> RunResult:
        async with over_http(legacy_server, model(SHORT, SHORT), idempotent="annotated") as tools:
            if then == "dismissed":
                return await agent([], tools).dismiss("r", "enough")
            result = await agent(["ok"], tools).resume("r")
            return result if then == "repeated" else await agent(["ok"], tools).resume("r", ItRan("read by somebody"))

    def agent(script: list[Any], tools: MCPTools) -> Agent:
        return Agent(ScriptedModel(script), tools=tools, host=Host(secret=SECRET, store=store))

    async def main() -> None:
        await hand_over_in_the_reply()
        result = await go_on()
        assert type(result.outcome) is (RunCancelled if then == "dismissed" else RunCompleted)
        texts = {"repeated": "short (endTurn) / short (endTurn)", "settled": "read by somebody"}
        assert results(result) == [texts.get(then, "Interrupted: the run was cancelled before this call had a result.")]
        keyring = Host(secret=SECRET).keyring
        for head in await store.heads():
            assert (head.status, head.owner) == ("finished", None)
            assert verify(head.run_id, await store.records(head.run_id), head, keyring=keyring).code == GOOD
        purged = await purge_runs(store, ["r"], keyring)
        assert (len(purged.purged), purged.kept) == (3 if then == "repeated" else 2, ())

    asyncio.run(main())
