"""How many faults of the table of docs/paths.md its tests notice, with reviewed paths; the page says the figures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_docs import ROOT, blocks

COMMAND = (sys.executable, "-m", "agentfsm")


def write_app(folder: Path) -> None:
    """The app and the tests of the page, which take their paths from a file."""
    page = {block.name: block.text for block in blocks(ROOT / "docs" / "paths.md") if block.name}
    (folder / "policy.py").write_text(page["policy.py"])
    generated, reviewed = "@pytest.mark.fsm(graph=AGENT)", '@pytest.mark.fsm(graph=AGENT, paths="paths.json")'
    assert generated in page["test_policy.py"]
    (folder / "test_policy.py").write_text(page["test_policy.py"].replace(generated, reviewed))
    subprocess.run([*COMMAND, "paths", "policy:AGENT", "-o", "paths.json"], cwd=folder, check=True, timeout=120)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_thirty_faults_of_the_table_are_noticed(tmp_path: Path, counted: Callable[[str], None]) -> None:
    write_app(tmp_path)
    words = ("mutate", "policy:AGENT", "--sample", "30", "--seed", "11", "--jobs", "2", "--json", "-q")
    done = subprocess.run([*COMMAND, *words], cwd=tmp_path, capture_output=True, text=True, timeout=3_500, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    totals = ", ".join(f"{found[name]} {name}" for name in ("caught", "refused", "excluded", "survived"))
    counted(f"30 faults of a table: {totals}")
    assert [mutant["id"] for mutant in found["mutants"] if mutant["result"] == "survived"] == []
    text = (ROOT / "docs" / "paths.md").read_text()
    assert f"catch {found['caught']}, the library\nrefuses {found['refused']}, and none survives" in text


@pytest.mark.slow
def test_the_app_notices_a_removed_rule_a_deleted_row_and_a_tool_that_always_raises(tmp_path: Path) -> None:
    """Each by the tests alone: the mutants are made in the source of the app, by hand."""
    write_app(tmp_path)
    source = (tmp_path / "policy.py").read_text()
    faults = {
        "nothing": ("AGENT = ", "AGENT = "),
        "no rule": ('@tool(requires_approval=lambda arguments: arguments["amount"] > 100)', "@tool"),
        "no row": ('GRAPH = LOOP.with_detector("post_llm", too_much, before="tool_calls")', "GRAPH = LOOP"),
        "raises": ('return "paid"', 'raise ValueError("no money")'),
    }
    codes: dict[str, int] = {}
    for name, (old, new) in faults.items():
        assert source.count(old) == 1, name
        (tmp_path / "policy.py").write_text(source.replace(old, new))
        pytest_run = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        codes[name] = subprocess.run(pytest_run, cwd=tmp_path, capture_output=True, timeout=200, check=False).returncode
    assert codes == {"nothing": 0, "no rule": 1, "no row": 1, "raises": 1}


@pytest.mark.soak
def test_the_recorded_runs_for_the_mutants_of_the_core_are_the_same_each_time(tmp_path: Path) -> None:
    write_app(tmp_path)
    shutil.copy(Path(__file__).with_name("recorded_runs.py"), tmp_path / "test_recorded.py")
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "test_recorded.py"]
    for options in (["--fsm-record"], []):
        done = subprocess.run(
            [*pytest_run, *options], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout
