"""The options that several commands share: limits, and how the model is called."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import pytest

from agentfsm import Agent, Host, SqliteStore
from agentfsm.cli.options import AgentCliOptions
from agentfsm.testing import ScriptedModel
from tests.cli.conftest import Cli
from tests.helpers.recording_server import good_server


@pytest.fixture
def stored(tmp_path: Path) -> None:
    """A store with one run that made two model calls."""
    store = SqliteStore(tmp_path / "runs.db")

    async def keep() -> None:
        await Agent(ScriptedModel(["", "hello"]), host=Host(store=store)).run("hi", run_id="one")

    asyncio.run(keep())
    store.close()


@pytest.mark.parametrize(
    "words",
    [
        ("--guardrails", "max_iterations=1", "-g", "max_continues=0"),
        ("--guardrails", '{"max_iterations": 1, "max_continues": 0}'),
        ("-g", '{"max_iterations": 1}', "-g", "max_continues = 0"),
    ],
)
def test_limits_are_pairs_or_json_objects_in_check_and_in_replay(
    cli: Cli, stored: None, words: tuple[str, ...]
) -> None:
    checked = json.loads(cli("check", "--json", *words).stdout)
    assert checked["bounds"]["model_calls"] == 1
    replayed = cli("replay", "one", "--store", "runs.db", *words)
    assert "pre_step.iteration_limit -> recover instead of pre_step.otherwise -> call_llm" in replayed.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "replay"])
def test_a_limit_may_be_lifted(cli: Cli, stored: None, command: str) -> None:
    store = ("--store", "runs.db") if command == "replay" else ()
    for text in ("max_iterations=none", '{"max_iterations": null}'):
        assert cli(command, *store, "--guardrails", text).exit_code == 0


@pytest.mark.parametrize("command", ["check", "replay"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_iterations", "neither NAME=VALUE, as in max_iterations=8, nor a JSON object"),
        ("[1]", "neither NAME=VALUE"),
        ("max_iterations=0", "max_iterations"),
        ('{"max_wishes": 3}', "max_wishes"),
    ],
)
def test_what_is_neither_or_not_a_limit_is_refused_with_the_reason(
    cli: Cli, stored: None, command: str, text: str, message: str
) -> None:
    store = ("--store", "runs.db") if command == "replay" else ()
    result = cli(command, *store, "--guardrails", text)
    assert result.exit_code == 2
    assert message in result.stderr


def test_what_a_call_to_the_model_carries_can_be_said(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "token.txt").write_text("expired-token")
    renew = (
        "import pathlib, sys; p = pathlib.Path('token.txt'); t = p.read_text(); p.write_text('fresh-token'); print(t)"
    )
    with good_server("openai") as server:
        server.refuse = lambda call: "" if call.key == "fresh-token" else "expired"
        result = cli(
            *("run", "hi", "--no-store", "--model", "openai:gpt-5", "--base-url", f"{server.url}/v1"),
            *("--api-key-command", shlex.join([sys.executable, "-c", renew])),
            *("--header", "OpenAI-Project: proj_1", "--query", "api-version=2024-10-21", "--timeout", "30"),
            *("--temperature", "0.5", "--max-tokens", "77", "--effort", "low"),
        )
    assert result.stdout.strip() == "hello", result.stderr
    assert [call.key for call in server.calls] == ["expired-token", "fresh-token"]
    assert {call.path for call in server.calls} == {"/v1/chat/completions?api-version=2024-10-21"}
    assert {call.headers["openai-project"] for call in server.calls} == {"proj_1"}
    sent = server.calls[-1].data
    assert (sent["temperature"], sent["max_completion_tokens"], sent["reasoning_effort"]) == (0.5, 77, "low")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--header", "no colon"), "write 'NAME: VALUE'"),
        (("--query", "api-version"), "write NAME=VALUE"),
        (("--api-key-env", "HOME", "--api-key-command", "true"), "give one of them"),
        (("--proxy", "localhost:3128"), "proxy is not a URL"),
        (("--temperature", "9"), "temperature"),
        (("--ca-bundle", "nowhere.pem"), "nowhere.pem"),
    ],
)
def test_an_option_of_the_call_that_is_wrong_is_refused(cli: Cli, words: tuple[str, ...], says: str) -> None:
    result = cli("run", "hi", "--no-store", "--model", "ollama:m", *words)
    assert result.exit_code == 2
    assert says in result.stderr


SECRET_PARAMETERS = ("--query", "api-key=...", "--query", "token=...")


def test_a_command_to_resume_with_repeats_no_secret() -> None:
    options = dict.fromkeys(each.name for each in fields(AgentCliOptions)) | {
        "tools": (),
        "query": ("a=b", "api-key=hidden-3", "token=s"),
        "model": "m",
    }
    options |= {"header": ("X-Key: hidden-1",), "proxy": "http://ann:hidden-2@p:1"}
    shown = cast("Any", AgentCliOptions)(**options).to_args()
    assert shown == ["--model", "m", "--header", "X-Key: ...", "--query", "a=b", *SECRET_PARAMETERS, "--proxy", "..."]
