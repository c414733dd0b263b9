"""``--guardrails`` is one option with one syntax in every command that has it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agentfsm import Agent, Host, SqliteStore
from agentfsm.testing import ScriptedModel
from tests.cli.conftest import Cli


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
