"""``examples/review_a_policy``: it passes as its README says, covers everything, and its pictures are true."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentfsm.cli.app import run_app
from tests.testing.test_pytest_plugin import entry_points

EXAMPLE = Path(__file__).parents[2] / "examples" / "review_a_policy"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "review_a_policy"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    monkeypatch.chdir(folder)
    return folder


def pytest_there(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    plugin = () if "agentfsm.testing.pytest_plugin" in entry_points() else ("-p", "agentfsm.testing.pytest_plugin")
    command = [sys.executable, "-m", "pytest", *plugin, "-q", "-p", "no:cacheprovider", "--rootdir=.", *words]
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_it_passes_and_covers_every_pair_that_can_happen(copy: Path) -> None:
    done = pytest_there(copy, "--fsm-graph=test_policy:AGENT", "--fsm-report=term", "--fsm-fail-under=100")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^pairs +233 of 233 +100.0 %$", done.stdout, re.M)
    assert re.search(r"^guards both ways +51 of 51 +100.0 %$", done.stdout, re.M)


@pytest.mark.slow
def test_its_pictures_are_those_that_its_commands_write(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = {name: (copy / name).read_text() for name in ("policy.svg", "difference.svg", "coverage.svg")}
    for name in pictures:
        (copy / name).unlink()
    assert run_app(["diagram", "app.py:GRAPH", "--output", "policy.svg"]) == 0
    assert run_app(["diff", "app.py:GRAPH", "app.py:HURRIED", "--output", "difference.svg"]) == 1
    told = capsys.readouterr().out
    assert told in (copy / "README.md").read_text()
    pytest_there(copy, "-k", "every_path", "--fsm-graph=test_policy:AGENT", "--fsm-report=svg:coverage.svg")
    for name, text in pictures.items():
        assert (copy / name).read_text() == text, f"{name} is stale"
