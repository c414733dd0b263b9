"""``agentfsm paths``: the list, the file, and what ``--check`` says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentfsm import LOOP
from agentfsm.testing import paths
from tests.cli.conftest import Cli

APP = """
from agentfsm import LOOP, Agent, tool
from agentfsm.testing import ScriptedModel


@tool(requires_approval=lambda arguments: arguments["amount"] > 100)
def pay(amount: int) -> str:
    "Pay."
    return "paid"


AGENT = Agent(ScriptedModel(), tools=[pay])
"""


@pytest.mark.slow
def test_paths_are_listed_one_a_line(cli: Cli) -> None:
    result = cli("paths", "agentfsm.loop.transition_table:LOOP", "--cover", "transitions")
    expected = [" > ".join((*each.ids, "terminal")) for each in paths(LOOP, "transitions")]
    assert result.stdout.splitlines() == expected


@pytest.mark.slow
def test_a_file_is_written_checked_and_updated(cli: Cli, tmp_path: Path) -> None:
    app = tmp_path / "money.py"
    app.write_text(APP)
    command = ("paths", "money.py:AGENT", "--output", "paths.json")
    assert re.fullmatch(r"paths.json: (\d+) paths, \1 new, 0 removed\n", cli(*command, "--cover", "transitions").stderr)
    written = (tmp_path / "paths.json").read_text()
    assert (cli(*command, "--check").exit_code, cli(*command, "--check").stdout) == (0, "")
    app.write_text(
        APP.replace("> 100", "> 500").replace(
            "tools=[pay]", 'tools=[pay], graph=LOOP.without("post_llm.loop_detected")'
        )
    )
    result = cli(*command, "--check")
    assert result.exit_code == 1
    assert "the row post_llm.loop_detected -> recover" in result.stdout
    assert "pay(amount=101) needs no approval any more" in result.stdout
    assert (tmp_path / "paths.json").read_text() == written
    assert "removed" in cli(*command).stderr
    assert cli(*command, "--check").exit_code == 0


@pytest.mark.slow
def test_a_file_with_an_agents_approvals_is_not_compared_with_a_graph(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "money.py").write_text(APP)
    cli("paths", "money.py:AGENT", "--output", "paths.json", "--cover", "transitions")
    for source, what in ((("money.py:LOOP",), "graph"), (("--preset", "standard"), "preset")):
        result = cli("paths", *source, "--output", "paths.json", "--check")
        assert result.exit_code == 1
        expected = f"the file holds the approvals of an agent's tools (pay), and a {what} has none: name the agent"
        assert expected in result.stdout.splitlines()
        assert "has no tool" not in result.stdout


def test_what_contradicts_or_is_missing_is_wrong_usage(cli: Cli) -> None:
    for words, expected in (
        (("paths", "--check"), "name it with --output"),
        (("paths", "x:Y", "--preset", "strict"), "not both"),
        (("paths", "--output", "none.json", "--check"), "there is no file 'none.json'"),
        (("paths", "--cover", "all"), "'all' is not one of"),
    ):
        result = cli(*words)
        assert (result.exit_code, expected in result.stderr) == (2, True), result.stderr


def test_a_preset_has_paths_of_its_own(cli: Cli) -> None:
    assert "repeated_error" not in cli("paths", "--preset", "strict", "--cover", "transitions").stdout
