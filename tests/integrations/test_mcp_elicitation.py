"""Elicitation: what an MCP server asks a person during a call, in the old protocol and the new one."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")

from agentfsm import (
    LOOP,
    Agent,
    Deny,
    Fill,
    GiveUp,
    Host,
    HumanReplyError,
    ItDidNotRun,
    ItRan,
    RunResult,
    SqliteStore,
    StateContext,
    StateSpec,
    Transition,
    UserInputRequested,
)
from agentfsm.integrations.mcp import MCPSettings, MCPTools
from agentfsm.journal.verification import GOOD, verify
from agentfsm.loop.human_input import HumanInput
from agentfsm.testing import ScriptedModel, call
from tests.helpers.mcp_servers import SdkServer, sdk_http, sdk_legacy_http, sdk_stdio
from tests.helpers.npm_servers import everything_command, everything_http

FIXTURES = sdk_http, sdk_legacy_http, everything_command, everything_http  # importing registers the fixtures

ROOT = Path(__file__).parents[2]
SECRET = b"a secret of these tests"
FORM = {
    "type": "object",
    "properties": {
        "day": {"description": "The day of the departure", "format": "date", "title": "Day", "type": "string"},
        "seat": {"default": "window", "enum": ["aisle", "window"], "title": "Seat", "type": "string"},
        "bags": {"default": 1, "maximum": 3, "minimum": 0, "title": "Bags", "type": "integer"},
    },
    "required": ["day"],
}


def results(result: RunResult) -> list[str]:
    return [m.content for m in result.messages if m.role == "tool"]


class Client:
    """An agent with the tools of a server, as one process has it."""

    def __init__(self, server: SdkServer, store: SqliteStore, *script: Any, **settings: Any) -> None:
        self.tools = MCPTools.http(server.url, settings=MCPSettings(**{"elicitation": True, **settings}))
        self.model = ScriptedModel([*script, "ok"])
        self.host = Host(secret=SECRET, store=store)

    @property
    def agent(self) -> Agent:
        return Agent(self.model, tools=self.tools, host=self.host)

    def do(self, work: Callable[[Agent], Awaitable[RunResult]]) -> RunResult:
        async def main() -> RunResult:
            async with self.tools:
                result = await work(self.agent)
            assert [task for task in asyncio.all_tasks() if task.get_name().startswith("agentfsm")] == []
            return result

        return asyncio.run(main())

    def run(self) -> UserInputRequested:
        async def work(agent: Agent) -> RunResult:
            return await agent.run("go", run_id="r")

        return asked(self.do(work))

    def resume(self, reply: HumanInput | None) -> RunResult:
        async def work(agent: Agent) -> RunResult:
            return await agent.resume("r", reply)

        return self.do(work)


def asked(result: RunResult) -> UserInputRequested:
    assert isinstance(result.outcome, UserInputRequested)
    return result.outcome


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with SqliteStore(tmp_path / "runs.db") as store:
        yield store


@pytest.fixture(params=["modern", "legacy"])
def booking(request: pytest.FixtureRequest) -> tuple[SdkServer, str]:
    """A server and its tool that asks about a trip."""
    name, tool = {"modern": ("sdk_server", "reserve"), "legacy": ("legacy_server", "book")}[request.param]
    server: SdkServer = request.getfixturevalue(name)
    (server.folder / "done.txt").unlink(missing_ok=True)
    return server, tool


def once(server: SdkServer, tool: str) -> list[str]:
    """What the tool does if it is called once."""
    return ["reserve Rome"] if tool == "reserve" else ["book Rome: begun", "book Rome: booked"]


# -- in one process -----------------------------------------------------------------------------------------------


def in_one_process(
    server: SdkServer, store: SqliteStore, tool: str, *replies: HumanInput
) -> tuple[UserInputRequested, RunResult]:
    """The first request, and the result after these replies to it and those after it."""
    first: list[UserInputRequested] = []

    async def work(agent: Agent) -> RunResult:
        result = await agent.run("go", run_id="r")
        for reply in replies:
            first.append(asked(result))
            try:
                result = await agent.resume("r", reply)
            except HumanReplyError as error:
                assert "and the run still waits" in str(error)  # noqa: PT017  # each reply but the last may be wrong
        return result

    result = Client(server, store, call(tool, city="Rome")).do(work)
    return first[0], result


@pytest.mark.slow
def test_a_person_is_asked_with_the_schema_of_the_server(booking: tuple[SdkServer, str], store: SqliteStore) -> None:
    server, tool = booking
    request, result = in_one_process(server, store, tool, Fill({"day": "2027-01-02", "bags": 2}))
    assert (request.kind, request.question, request.asker) == ("form", "When do you go to Rome?", tool)
    assert request.form == request.suspension_record.form
    assert {name: request.form[name] for name in FORM} == FORM
    assert request.context.splitlines() == [
        "The MCP server '127.0.0.1' asks this.",
        "day (date; required): The day of the departure",
        'seat (string; one of aisle, window; default "window"): Seat',
        "bags (integer; default 1): Bags",
    ]
    assert results(result) == ["Rome on 2027-01-02, window, 2 bags"]
    assert server.done == once(server, tool)


@pytest.mark.parametrize(
    ("reply", "action"), [(Deny("not now"), "decline"), (GiveUp(), "cancel")], ids=["declined", "cancelled"]
)
def test_a_person_may_decline_or_cancel(
    booking: tuple[SdkServer, str], store: SqliteStore, reply: HumanInput, action: str
) -> None:
    server, tool = booking
    _, result = in_one_process(server, store, tool, reply)
    (text,) = results(result)
    assert action in text
    assert server.done == once(server, tool)[:-1]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (Fill({"day": "soon"}), "day: 'soon' is not a valid date"),
        (Fill({"day": "2027-01-02", "bags": 9}), "bags: 9 is greater than the maximum of 3"),
        (Fill({}), "'day' is a required property"),
        (Fill({"day": "2027-01-02", "pets": 1}), "pets: there is no such field"),
        ("tomorrow", "several fields"),
    ],
)
def test_a_reply_that_does_not_fit_the_schema_is_refused_and_the_run_waits(
    sdk_server: SdkServer, store: SqliteStore, wrong: HumanInput, reason: str
) -> None:
    async def work(agent: Agent) -> RunResult:
        await agent.run("go", run_id="r")
        with pytest.raises(HumanReplyError) as refused:
            await agent.resume("r", wrong)
        assert reason in str(refused.value)
        return await agent.resume("r", '{"day": "2027-01-02"}')

    result = Client(sdk_server, store, call("reserve", city="Rome")).do(work)
    assert results(result) == ["Rome on 2027-01-02, window, 1 bags"]


def test_a_call_may_ask_several_questions(legacy_server: SdkServer, store: SqliteStore) -> None:
    _, result = in_one_process(legacy_server, store, "quote", Fill({"day": "2027-01-02"}), "true")
    assert results(result) == ["1 bags, sure: True"]


def test_a_server_may_not_ask_unless_the_app_allows_it(booking: tuple[SdkServer, str], store: SqliteStore) -> None:
    server, tool = booking
    client = Client(server, store, call(tool, city="Rome"), elicitation=False)

    async def work(agent: Agent) -> RunResult:
        return await agent.run("go")

    (text,) = results(client.do(work))
    assert "licitation" in text
    assert server.done == once(server, tool)[:-1]


def test_a_server_may_not_ask_during_a_call_of_a_users_state(booking: tuple[SdkServer, str]) -> None:
    server, tool = booking
    said: list[str] = []

    async def reserve(context: StateContext) -> None:
        result = await context.call_tool(tool, {"city": "Rome"})
        said.append(f"{result.status}: {result.content}")

    rows = [Transition("reserve", None, "terminal", ends="completed")]
    graph = LOOP.with_state(StateSpec("reserve", effect=reserve), rows, entered_by="post_llm.otherwise")

    async def main() -> RunResult:
        async with MCPTools.http(server.url, settings=MCPSettings(elicitation=True)) as tools:
            return await Agent(ScriptedModel(["ok"]), tools=tools, graph=graph).run("go")

    assert asyncio.run(main()).ok
    assert said[0].startswith("failed: ")
    assert "only during a call that a reply makes" in said[0]


@pytest.mark.parametrize(("name", "tool"), [("sdk_server", "abstract"), ("legacy_server", "summarize")])
@pytest.mark.parametrize("elicitation", [False, True])
def test_a_server_that_asks_for_a_models_reply_is_refused(
    request: pytest.FixtureRequest, store: SqliteStore, name: str, tool: str, elicitation: bool
) -> None:
    server: SdkServer = request.getfixturevalue(name)
    client = Client(server, store, call(tool, text="long"), elicitation=elicitation)

    async def work(agent: Agent) -> RunResult:
        return await agent.run("go")

    result = client.do(work)
    assert "sampling" in results(result)[0].lower()
    assert result.run_state.model_calls == 2  # the run's own


def test_other_calls_of_the_server_run_while_one_waits(legacy_server: SdkServer, store: SqliteStore) -> None:
    async def work(agent: Agent) -> RunResult:
        await agent.run("go", run_id="r")
        other = Agent(ScriptedModel([call("seen"), "ok"]), tools=tools)
        assert results(await other.run("go")) == ["None"]
        return await agent.resume("r", Fill({"day": "2027-01-02"}))

    client = Client(legacy_server, store, call("book", city="Rome"))
    tools = client.tools
    assert results(client.do(work)) == ["Rome on 2027-01-02, window, 1 bags"]


def test_a_server_of_another_vendor_asks(everything_http: Any, store: SqliteStore) -> None:
    name = {"name": "Ada", "untitledSingleSelectEnum": "Monica", "email": "ada@example.com"}
    request, result = in_one_process(everything_http, store, "trigger-elicitation-request", Fill(name))
    assert "name" in request.form["properties"]
    assert "Ada" in results(result)[0]


# -- in another process -------------------------------------------------------------------------------------------


def test_a_question_of_the_new_protocol_is_answered_in_another_process(
    sdk_server: SdkServer, store: SqliteStore
) -> None:
    (sdk_server.folder / "done.txt").unlink(missing_ok=True)
    Client(sdk_server, store, call("reserve", city="Rome")).run()
    result = Client(sdk_server, store).resume(Fill({"day": "2027-01-02"}))
    assert results(result) == ["Rome on 2027-01-02, window, 1 bags"]
    assert sdk_server.done == ["reserve Rome"]


@pytest.mark.slow
def test_a_server_that_forgot_its_question_gets_the_answer_when_it_asks_again(
    tmp_path: Path, store: SqliteStore
) -> None:
    server = SdkServer(tmp_path)
    server.start()
    try:
        Client(server, store, call("reserve", city="Rome")).run()
        server.kill()
        server.start()  # with another key, so that it does not accept its own state
        result = Client(server, store).resume(Fill({"day": "2027-01-02"}))
    finally:
        server.kill()
    assert results(result) == ["Rome on 2027-01-02, window, 1 bags"]
    assert server.done == ["reserve Rome"]


@pytest.mark.slow
def test_in_the_old_protocol_an_idempotent_call_is_repeated_with_the_recorded_answers(
    legacy_server: SdkServer, store: SqliteStore
) -> None:
    (legacy_server.folder / "done.txt").unlink(missing_ok=True)
    Client(legacy_server, store, call("quote", city="Rome"), idempotent="annotated").run()
    second = asked(Client(legacy_server, store, idempotent="annotated").resume(Fill({"day": "2027-01-02", "bags": 3})))
    assert second.question == "Is that sure?"
    result = Client(legacy_server, store, idempotent="annotated").resume("true")
    assert results(result) == ["3 bags, sure: True"]
    assert legacy_server.done == ["quote Rome: begun"] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "text", "done"),
    [
        (ItDidNotRun(), "Rome on 2027-01-02, window, 1 bags", ["begun", "begun", "booked"]),
        (ItRan("it is booked"), "it is booked", ["begun"]),
        (GiveUp(), "It is not known whether this call ran, and it was given up. Do not repeat it.", ["begun"]),
    ],
)
def test_in_the_old_protocol_any_other_call_is_in_doubt(
    legacy_server: SdkServer, store: SqliteStore, reply: HumanInput, text: str, done: list[str]
) -> None:
    (legacy_server.folder / "done.txt").unlink(missing_ok=True)
    Client(legacy_server, store, call("book", city="Rome")).run()
    doubt = asked(Client(legacy_server, store).resume(Fill({"day": "2027-01-02"})))
    assert (doubt.kind, doubt.tool, dict(doubt.arguments)) == ("in_doubt", "book", {"city": "Rome"})
    assert results(Client(legacy_server, store).resume(reply)) == [text]
    assert legacy_server.done == [f"book Rome: {each}" for each in done]


def test_a_run_without_a_store_is_resumed_from_its_record(sdk_server: SdkServer) -> None:
    host = Host(secret=SECRET)
    settings = MCPSettings(elicitation=True)

    async def start() -> str:
        async with MCPTools.http(sdk_server.url, settings=settings) as tools:
            agent = Agent(ScriptedModel([call("reserve", city="Rome")]), tools=tools, host=host)
            return asked(await agent.run("go")).suspension_record.to_json()

    async def resume(record: str) -> RunResult:
        async with MCPTools.http(sdk_server.url, settings=settings) as tools:
            return await Agent(ScriptedModel(["ok"]), tools=tools, host=host).resume(record, '{"day": "2027-01-02"}')

    assert results(asyncio.run(resume(asyncio.run(start())))) == ["Rome on 2027-01-02, window, 1 bags"]


def kill_while_asked(database: Path, *arguments: str) -> None:
    """Run the agent in a process that is killed while it waits."""
    command = [sys.executable, "-m", "tests.helpers.elicitation_kill", str(database), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.slow
def test_after_a_kill_the_server_that_died_too_gets_the_answer_and_acts_once(
    store: SqliteStore, tmp_path: Path
) -> None:
    kill_while_asked(tmp_path / "runs.db", "reserve", "stdio", str(tmp_path))

    async def main() -> RunResult:
        async with sdk_stdio(tmp_path, settings=MCPSettings(elicitation=True)) as tools:
            agent = Agent(ScriptedModel(["ok"]), tools=tools, host=Host(secret=SECRET, store=store))
            return await agent.resume("r", Fill({"day": "2027-01-02"}))

    assert results(asyncio.run(main())) == ["Rome on 2027-01-02, window, 1 bags"]
    assert (tmp_path / "done.txt").read_text() == "reserve Rome\n"


@pytest.mark.slow
def test_after_a_kill_a_call_of_the_old_protocol_is_in_doubt_and_runs_with_the_answer_that_was_given(
    legacy_server: SdkServer, store: SqliteStore, tmp_path: Path
) -> None:
    (legacy_server.folder / "done.txt").unlink(missing_ok=True)
    kill_while_asked(tmp_path / "runs.db", "book", legacy_server.url)
    assert asked(Client(legacy_server, store).resume(Fill({"day": "2027-01-02", "bags": 3}))).kind == "in_doubt"
    result = Client(legacy_server, store).resume(ItDidNotRun())
    assert results(result) == ["Rome on 2027-01-02, window, 3 bags"]
    assert legacy_server.done == [f"book Rome: {each}" for each in ("begun", "begun", "booked")]
    records, head = asyncio.run(store.records("r")), asyncio.run(store.head("r"))
    report = verify("r", records, head, keyring=Host(secret=SECRET).keyring)
    assert report.code == GOOD, report
