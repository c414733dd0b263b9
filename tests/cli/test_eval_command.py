"""``agentfsm eval``: a table and JSON of how often a model does its tasks, and an exit code for CI."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentfsm import Agent, AgentGuardrails, Allow, Deny, Host, Message, Runs, SqliteStore, Tool, ask_user, tool
from agentfsm.testing import ScriptedModel, call
from tests.cli.conftest import Cli
from tests.helpers.fake_model_server import fake_model_server, text_output

SECRET = b"of the host, 32 bytes at the least"

PAYER = """
from agentfsm import Agent, tool
from agentfsm.testing import ScriptedModel, call


@tool(requires_approval=True)
def pay() -> str:
    "Pay."
    return "paid"


AGENT = Agent(ScriptedModel([call("pay"), "done"]), tools=[pay])
"""

SELLER = """
from agentfsm import Agent, Message, Reply, Role


class Seller:
    name = "scripted"

    async def reply(self, request):
        known = [message.content for message in request.messages]
        return Reply(Message(Role.ASSISTANT, "Seven euros." if "Tea is 3.50." in known else ""))


AGENT = Agent(Seller())
"""

SHOP = '''
from agentfsm import Agent, Message, Reply, TransientProviderError, Usage
from agentfsm.testing import Case, ScriptedModel, call

def price(item: str) -> float:
    """Look up a price."""
    return 4.5

USAGE = Usage(input_tokens=100, output_tokens=20, cost_usd=0.01)
SCRIPT = [call("price", item="tea"), Reply(Message.assistant("Tea is 4.50."), "stop", USAGE), TransientProviderError("busy"), "No idea."]
AGENT = Agent(ScriptedModel(SCRIPT), tools=[price])
CASES = [Case(name="tea", prompt="What does tea cost?", tools=("price",), contains=("4.5",)),
         Case(name="cup", prompt="What does a cup cost?", tools=("price",))]
'''  # noqa: E501


@pytest.fixture
def shop(cli: Cli, tmp_path: Path) -> Path:
    file = tmp_path / "shop.py"
    file.write_text(SHOP)
    return file


@pytest.mark.slow
def test_the_table_says_how_many_runs_are_good_and_what_is_wrong_with_the_others(cli: Cli, shop: Path) -> None:
    result = cli("eval", "shop.py", "--agent", "shop.py:AGENT", "--concurrency", "1")
    assert result.exit_code == 1
    assert [" ".join(line.split()) for line in result.stdout.splitlines()] == [
        "case good cost what is wrong",
        "tea 1/1 0.0100 USD",
        "cup 0/1 0.0000 USD price was not called",
        "",
        "1 of 2 runs with scripted are good (50%); 120 tokens, 0.0100 USD",
        "failures: transient_provider 1",
        "rows: pre_step.otherwise 4, call_llm.otherwise 3, post_llm.otherwise 2, post_llm.tool_calls 1, "
        "dispatch_tool.otherwise 1, post_tool.otherwise 1, call_llm.transient_provider 1, recover.otherwise 1",
    ]
    assert result.stderr.splitlines() == ["1/2  tea  good", "2/2  cup  bad: price was not called"]


@pytest.mark.slow
def test_json_has_every_run_and_the_exit_code_follows_the_wanted_rate(cli: Cli, shop: Path) -> None:
    words = ("eval", "shop.py:CASES", "--agent", "shop.py:AGENT", "--concurrency", "1", "--json", "--quiet")
    result = cli(*words, "--min-pass-rate", "0.5")
    assert (result.exit_code, result.stderr) == (0, "")
    data = json.loads(result.stdout)
    assert (data["pass_rate"], len(data["attempts"])) == (0.5, 2)


def test_one_case_is_repeated_with_another_model(cli: Cli, shop: Path) -> None:
    with fake_model_server(text_output("It is 4.50.")) as server:
        result = cli(
            "eval", "shop.py", "--agent", "shop.py:AGENT", "--only", "tea", "--repeat", "3", "--model", "openai:gpt-5",
            OPENAI_BASE_URL=server.url, OPENAI_API_KEY="sk-test",
        )  # fmt: skip
    assert "tea    0/3  unpriced  price was not called" in result.stdout
    assert "0 of 3 runs with openai:gpt-5 are good (0%); 45 tokens, unpriced" in result.stdout


def test_cases_in_json_lines(cli: Cli, shop: Path, tmp_path: Path) -> None:
    (tmp_path / "cases.jsonl").write_text('{"name": "tea", "prompt": "What does tea cost?", "tools": ["price"]}\n')
    assert cli("eval", "cases.jsonl", "--agent", "shop.py:AGENT").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("shop.py", "--agent", "shop.py:price"), "shop.py:price is a function, not an agent"),
        (("shop.py:SHOP", "--agent", "shop.py:AGENT"), "SHOP"),
        (("shop.py:SCRIPT", "--agent", "shop.py:AGENT"), "shop.py:SCRIPT is not a list of agentfsm.testing.Case"),
        (("shop.py", "--agent", "shop.py:AGENT", "--only", "te"), "there is no case 'te'; there are: tea, cup"),
        (("no.jsonl", "--agent", "shop.py:AGENT"), "no.jsonl cannot be read"),
    ],
)
def test_wrong_usage_is_named(cli: Cli, shop: Path, words: tuple[str, ...], message: str) -> None:
    result = cli("eval", *words)
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


def test_a_stored_run_becomes_a_case_unless_it_has_not_ended(cli: Cli, shop: Path, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")

    @tool(requires_approval=True)
    def pay() -> str:
        """Pay."""
        return "paid"

    agent = Agent(ScriptedModel([call("pay"), "done"]), tools=[pay], host=Host(store=store))
    result = agent.run_sync("Pay.", run_id="one")
    refused = cli("export", "one", "--case", "pay", "--store", "runs.db")
    assert (refused.exit_code, "one has not ended" in refused.stderr) == (2, True)
    agent.resume_sync(result.run_id, Allow())
    store.close()
    line = cli("export", "on", "--case", "pay", "--store", "runs.db").stdout  # the beginning of an id is enough
    assert json.loads(line) == {
        "name": "pay", "prompt": "Pay.", "ending": "completed", "tools": ["pay"], "replies": {"approval": "allow"},
    }  # fmt: skip
    (tmp_path / "cases.jsonl").write_text(line)
    (tmp_path / "payer.py").write_text(PAYER)
    good = cli("eval", "cases.jsonl", "--agent", "payer.py:AGENT")
    assert (good.exit_code, "1 of 1 runs with scripted are good" in good.stdout) == (0, True), good.output


@pytest.mark.parametrize(
    ("script", "answers", "replies"),
    [
        ([call("pay")], [Deny("not today")], {"approval": "deny not today"}),
        ([call("pay"), call("pay")], [Allow(), Deny("once is enough")], {}),
        ([call("ask_user", question="How many?")], ["Two."], {"question": "Two."}),
    ],
)
def test_a_case_has_what_people_answered_if_they_always_answered_the_same(
    cli: Cli, shop: Path, tmp_path: Path, script: list[Any], answers: list[Any], replies: dict[str, str]
) -> None:
    @tool(requires_approval=True)
    def pay() -> str:
        """Pay."""
        return "paid"

    with SqliteStore(tmp_path / "runs.db") as store:
        agent = Agent(ScriptedModel([*script, "done"]), tools=[pay, ask_user], host=Host(store=store))
        agent.run_sync("Pay.", run_id="one")
        for reply in answers:
            agent.resume_sync("one", reply)
    line = cli("export", "one", "--case", "pay", "--store", "runs.db").stdout
    assert json.loads(line).get("replies", {}) == replies


@pytest.mark.parametrize("purged", [False, True])
def test_a_fork_becomes_the_case_that_its_first_parent_was_given(cli: Cli, tmp_path: Path, purged: bool) -> None:
    @tool(requires_approval=True)
    def pay() -> str:
        """Pay."""
        return "paid"

    with SqliteStore(tmp_path / "runs.db") as store:
        script = [call("ask_user", question="How much?"), call("pay"), call("price"), "Paid.", "Paid anyway.", "It is."]
        agent = Agent(
            ScriptedModel(script),
            tools=[pay, ask_user, Tool.from_schema("price", "A price.", {"type": "object"}, lambda: "5")],
            guardrails=AgentGuardrails(max_iterations=3),
            host=Host(store=store, secret=SECRET),
        )
        earlier = [Message.user("Hello."), Message.assistant("Good morning.")]
        agent.run_sync("Pay it.", run_id="one", message_history=earlier)
        for reply in ("Five.", Allow(), "Go on."):
            agent.resume_sync("one", reply)
        runs = Runs(store, secret=SECRET)
        moves = asyncio.run(runs.get("one")).ledger.moves
        last = max(move.seq for move in moves if move.source == "pre_step")
        asyncio.run(runs.fork("one", last, "two"))
        assert agent.resume_sync("two").output == "Paid anyway."
        asyncio.run(runs.fork("two", 2, "three"))
        assert agent.resume_sync("three").output == "It is."
        if purged:
            assert asyncio.run(runs.purge(["one"])).purged == ("one",)
    done = cli("export", "three", "--case", "again", "--store", "runs.db")
    assert done.exit_code == 0, done.output
    case = json.loads(done.stdout)
    if purged:  # what is left begins with the last message of the user
        assert (case["prompt"], len(case["message_history"])) == ("Go on.", 9)
        return
    assert {name: value for name, value in case.items() if name != "message_history"} == {
        "name": "again", "prompt": "Pay it.", "ending": "completed", "tools": ["ask_user", "pay", "price"],
        "replies": {"question": "Five.", "approval": "allow", "limit": "Go on."},
    }  # fmt: skip
    assert [each["content"] for each in case["message_history"]] == ["Hello.", "Good morning."]


def test_a_run_of_a_session_becomes_a_case_with_its_own_prompt_and_the_conversation_before_it(
    cli: Cli, shop: Path, tmp_path: Path
) -> None:
    def price(item: str) -> str:
        """Say what an item costs."""
        return "3.50"

    async def talk() -> str:
        async with SqliteStore(tmp_path / "runs.db") as store:
            script = [call("price", item="tea"), "Tea is 3.50.", "Seven euros."]
            agent = Agent(ScriptedModel(script), tools=[price], instructions="Be short.", host=Host(store=store))
            session = agent.session("ann")
            await session.run("What does tea cost?")
            return (await session.run("And two?")).run_id

    line = cli("export", asyncio.run(talk()), "--case", "two", "--store", "runs.db").stdout
    case = json.loads(line)
    assert (case["prompt"], case["tools"]) == ("And two?", [])
    assert [(each["role"], each.get("content", "")) for each in case["message_history"]] == [
        ("user", "What does tea cost?"), ("assistant", ""), ("tool", "3.50"), ("assistant", "Tea is 3.50."),
    ]  # fmt: skip
    (tmp_path / "cases.jsonl").write_text(line)
    (tmp_path / "seller.py").write_text(SELLER)
    good = cli("eval", "cases.jsonl", "--agent", "seller.py:AGENT")
    assert (good.exit_code, "1 of 1 runs with scripted are good" in good.stdout) == (0, True), good.output
    (tmp_path / "cases.jsonl").write_text(json.dumps({**case, "tools": ["price"]}))  # only an earlier run called it
    bad = cli("eval", "cases.jsonl", "--agent", "seller.py:AGENT")
    assert (bad.exit_code, "price was not called" in bad.stdout) == (1, True), bad.output
