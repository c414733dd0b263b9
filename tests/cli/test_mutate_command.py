"""``agentfsm mutate``: which faults a suite notices, however it imports the table, and what is printed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.cli.conftest import Cli

APP = """
from dataclasses import replace

from agentfsm import LOOP, Agent, tool
from agentfsm.testing import ScriptedModel


@tool(requires_approval=lambda arguments: arguments["amount"] > 100)
def pay(amount: int) -> str:
    "Pay."
    return "paid"


def greedy(run):
    return any(c.call.arguments.get("amount", 0) > 500 for c in run.batch)


GRAPH = replace(LOOP.with_detector("post_llm", greedy, before="tool_calls"), name="money")


def make(graph=GRAPH):
    return Agent(ScriptedModel(), tools=[pay], graph=graph)


AGENT = make()
"""

TESTS = {
    "by name": "from money import AGENT, pay\n",
    "by module": "import money\nAGENT, pay = money.AGENT, money.pay\n",
    "by function": "from money import make, pay\nAGENT = make()\n",
    "in conftest": "from conftest import AGENT, pay\n",
}
"""Ways to import the table."""

CHECKS = """
def test_the_greedy_are_stopped_before_their_calls():
    rows = [(row.name, row.target) for row in AGENT.graph.rows("post_llm")]
    assert ("greedy", "recover") in rows
    assert rows.index(("greedy", "recover")) < [name for name, _ in rows].index("tool_calls")


def test_a_large_payment_needs_approval():
    assert callable(pay.requires_approval)
"""

ONLY = ("--only", "*greedy*", "--only", "approval:*")


def project(folder: Path, tests: str = TESTS["by name"], checks: str = CHECKS) -> None:
    (folder / "money.py").write_text(APP)
    (folder / "conftest.py").write_text("from money import AGENT, pay\n" if "conftest" in tests else "")
    (folder / "test_money.py").write_text(tests + checks)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """However the command ends, it leaves no temporary file."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []


@pytest.fixture
def cli(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line; the pytest that it starts loads no plugins of others, which takes longer than the tests.

    It has none of the options of this test run either: its words are compared.
    """
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return cli


@pytest.fixture(autouse=True)
def fresh_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command runs in this process, and imports the module of each test's own folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("money", "agentfsm_user_money"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in TESTS if way != "by name"])
def test_the_tests_have_the_mutant_however_they_import_the_table(cli: Cli, tmp_path: Path, way: str) -> None:
    project(tmp_path, TESTS[way])
    result = cli("mutate", "money:AGENT", "--only", "drop:*greedy", "--only", "approval:*", "--jobs", "2", "-q")
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_faults_that_no_test_notices_are_listed_with_their_line(cli: Cli, tmp_path: Path) -> None:
    project(tmp_path)
    result = cli("mutate", "money:AGENT", *ONLY, "--jobs", "2", "--json", "-q")
    assert result.exit_code == 1, result.output
    found = {row["id"]: row for row in json.loads(result.stdout)["mutants"]}
    assert {name: row["result"] for name, row in found.items()} == {
        "drop:post_llm.greedy": "caught",
        "swap:post_llm.no_progress,post_llm.greedy": "survived",
        "swap:post_llm.greedy,post_llm.tool_calls": "caught",
        "retarget:post_llm.greedy": "caught",
        "negate:post_llm.greedy": "survived",
        "approval:pay": "caught",
    }
    line = 1 + APP.splitlines().index(next(text for text in APP.splitlines() if text.startswith("GRAPH")))
    assert found["negate:post_llm.greedy"]["where"] == f"money.py:{line}"
    assert found["approval:pay"]["by"] == "test_money.py::test_a_large_payment_needs_approval"
    begun, *progress = result.stderr.splitlines()  # off a terminal, each mutant has a line as soon as it is done
    assert begun == "running the tests without a mutant"
    assert [line.partition(": ")[0] for line in progress] == [f"{n} of 6" for n in range(1, 7)]
    assert {line.partition(": ")[2] for line in progress} == {f"{row['result']} {name}" for name, row in found.items()}


@pytest.mark.slow
def test_equivalent_mutants_are_left_out_with_their_reason(cli: Cli, tmp_path: Path) -> None:
    project(tmp_path)
    (tmp_path / "equivalent.txt").write_text("# reviewed\n\nnegate:post_llm.greedy = tested elsewhere\n")
    reason = "swap:post_llm.no_progress,post_llm.greedy=an empty reply makes no call"
    result = cli("mutate", "money.py:AGENT", *ONLY, "--exclude", reason, "--exclusions", "equivalent.txt", "-q")
    assert result.exit_code == 0, result.output
    expected = "6 mutants: 4 caught by tests, 0 refused by the library, 2 excluded, 0 survived; 100.0 % caught\n"
    assert result.stdout == expected


def test_what_the_library_refuses_needs_no_test(cli: Cli, tmp_path: Path) -> None:
    project(tmp_path)
    result = cli("mutate", "money:GRAPH", "--only", "*:post_llm.otherwise", "--kind", "drop", "-q")
    assert result.exit_code == 0
    assert "1 mutant: 0 caught by tests, 1 refused by the library" in result.stdout


@pytest.mark.slow
def test_some_may_survive(cli: Cli, tmp_path: Path) -> None:
    project(tmp_path)
    words = ("mutate", "money:AGENT", "--only", "negate:*greedy", "--only", "drop:*greedy", "--fail-under")
    result = cli(*words, "50", "-q")
    assert result.exit_code == 0
    assert result.stdout.startswith("survived  negate:post_llm.greedy")
    assert "post_llm.greedy holds where it should not, and the reverse" in result.stdout
    assert cli(*words, "51", "-q").exit_code == 1


@pytest.mark.slow
def test_a_sample_is_drawn_by_its_seed(cli: Cli, tmp_path: Path) -> None:
    project(tmp_path)
    words = ("mutate", "money:GRAPH", "--sample", "2", "--kind", "drop", "--only", "drop:*.otherwise", "--json", "-q")
    drawn = [[row["id"] for row in json.loads(cli(*words, "--seed", seed).stdout)["mutants"]] for seed in "112"]
    assert drawn[0] == drawn[1] != drawn[2]
    assert [len(each) for each in drawn] == [2, 2, 2]


@pytest.mark.parametrize(
    ("checks", "words", "expected"),
    [
        ("def test_it(): assert 0", (), "the tests must pass before anything is changed: 1 failed"),
        ("def test_it(): assert 0, 'the price is gone'", (), "AssertionError: the price is gone"),
        (CHECKS, ("test_nowhere.py",), "the tests must pass before anything is changed"),
        (CHECKS, ("--exclude", "drop:post_llm.greedy"), "gives no reason: write ID=REASON"),
        (CHECKS, ("--exclude", "drop:post_llm.gone=x"), "there is no mutant 'drop:post_llm.gone'"),
    ],
)
def test_a_suite_or_an_exclusion_that_makes_no_sense_is_wrong_usage(
    cli: Cli, tmp_path: Path, checks: str, words: tuple[str, ...], expected: str
) -> None:
    project(tmp_path, checks=checks)
    result = cli("mutate", "money:AGENT", *ONLY, *words, "-q")
    assert (result.exit_code, expected in result.stderr) == (2, True), result.stderr


def test_tests_that_do_not_import_the_table_are_wrong_usage(cli: Cli, tmp_path: Path) -> None:
    project(tmp_path, tests="", checks="def test_it(): pass")
    result = cli("mutate", "money:AGENT", "-q")
    assert result.exit_code == 2
    assert "the tests do not import" in result.stderr


@pytest.mark.slow
def test_a_mutant_that_makes_tests_hang_is_caught(monkeypatch: pytest.MonkeyPatch, cli: Cli, tmp_path: Path) -> None:
    from agentfsm.cli import mutate_command

    monkeypatch.setattr(mutate_command, "HANGS_AFTER", -1)
    monkeypatch.setattr(mutate_command, "HANGS_AT_LEAST_S", 4)
    hang = "def test_it():\n    while not any(row.name == 'greedy' for row in AGENT.graph):\n        pass\n"
    project(tmp_path, checks=hang)
    result = cli("mutate", "money:AGENT", "--only", "drop:*greedy", "--json", "-q")
    assert [row["by"] for row in json.loads(result.stdout)["mutants"]] == ["the tests do not end"]


def test_an_interrupted_command_leaves_no_file(monkeypatch: pytest.MonkeyPatch, cli: Cli, tmp_path: Path) -> None:
    project(tmp_path)
    interrupt = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(subprocess, "run", interrupt)
    assert cli("mutate", "money:AGENT", "-q").exit_code == 130
    assert interrupt.called


@pytest.mark.slow
def test_workers_of_xdist_have_the_mutant(cli: Cli, tmp_path: Path) -> None:
    project(tmp_path)
    result = cli("mutate", "money:AGENT", "--only", "drop:*greedy", "-q", "-p", "xdist", "-n", "1")
    assert result.exit_code == 0, result.output
