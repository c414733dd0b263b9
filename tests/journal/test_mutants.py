"""Mutation tests of the journal: each deliberate fault is caught by a test."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.child_process import child_environment
from tests.helpers.mutation import MUTANTS, ROOT, Mutant, try_mutant

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")

PARTS = 10


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in range(2, PARTS + 1))])
def test_each_mutant_is_caught(part, counted):
    command = [sys.executable, "-m", "tests.helpers.mutation", f"{part}/{PARTS}"]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    caught = sum(line.startswith("caught ") for line in done.stdout.splitlines())
    assert caught == len(MUTANTS[part - 1 :: PARTS])
    counted(f"mutants of our own code, part {part} of {PARTS}: {caught} of {caught} caught")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_code_that_each_mutant_changes_is_there(mutant):
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1


ONE = "import sys\nfrom tests.helpers.mutation import Mutant, try_mutant\nprint(*try_mutant(Mutant(*sys.argv[1:])))"
OLD = "    attempts: list[int] = []\n"
SAME = f"{OLD}    # nothing else\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("new", "tests", "result"),
    [
        (SAME, "crashes linear", "False \n"),
        (SAME, "simulation 2", "False \n"),
        (SAME, "tests/journal/test_cancel_and_store_errors.py", "False \n"),
        (SAME, "tests/journal/test_that_does_not_exist.py", "False RuntimeError: pytest ended with"),
        ("    attempts = (\n", "tests/journal/test_cancel_and_store_errors.py", "False SyntaxError: "),
    ],
    ids=["crashes", "simulation", "tests", "no test has run", "syntax error"],
)
def test_a_harmless_change_is_not_caught_and_a_syntax_error_is_not_a_mutant(new, tests, result):
    arguments = ["none", "agentfsm/runtime/tool_dispatch.py", OLD, new, tests]
    command = [sys.executable, "-c", ONE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=True, cwd=ROOT)
    assert done.stdout.startswith(result), done.stdout


def test_the_snippet_to_replace_must_occur_once():
    with pytest.raises(SystemExit, match="occurs 0 times"):
        try_mutant(Mutant("none", "agentfsm/journal/records.py", "no such text", "", "simulation 1"))
