"""``.ci/run``: it installs what is missing, runs the README's test command, and ends with its exit code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[1] / ".ci" / "run"
ORACLES = ("dot", "spin", "gcc", "genhtml", "npm")
LOG = '#!{bash}\necho "{name} $*" >> "$LOG"\nexit {code}\n'


def run(
    folder: Path,
    *,
    there: tuple[str, ...] = (),
    make: int = 0,
    root: bool = True,
    apt: int = 0,
    python: str = "python3",
) -> tuple[int, list[str], str]:
    """Its exit code, the commands that it gave, and what it printed, on a machine with nothing but these."""
    programs = folder / "bin"
    programs.mkdir()
    bash = shutil.which("bash")
    assert bash is not None
    for name in ("bash", "env", "dirname"):
        (programs / name).symlink_to(shutil.which(name) or "")
    (programs / python).symlink_to(sys.executable)
    stubs = {"make": make, "apt-get": apt, **dict.fromkeys(there, 0)}
    for name, code in stubs.items():
        (programs / name).write_text(LOG.format(bash=bash, name=name, code=code))
        (programs / name).chmod(0o755)
    (programs / "id").write_text(f"#!{bash}\necho {0 if root else 1000}\n")
    (programs / "id").chmod(0o755)
    log = folder / "log"
    log.touch()
    home = {"PYTHONHOME": os.environ["PYTHONHOME"]} if "PYTHONHOME" in os.environ else {}
    done = subprocess.run(
        [bash, str(CI)],
        env={"PATH": str(programs), "LOG": str(log), **home},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, log.read_text().splitlines(), done.stdout + done.stderr


@pytest.fixture(autouse=True)
def _bash() -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")


def test_a_machine_with_everything_only_runs_the_tests(tmp_path: Path) -> None:
    code, commands, said = run(tmp_path, there=ORACLES)
    assert code == 0
    (command,) = commands
    assert command.startswith("make test PYTHON=")
    assert "== make test" in said


def test_what_is_missing_is_installed_first(tmp_path: Path) -> None:
    code, commands, said = run(tmp_path, there=tuple(name for name in ORACLES if name not in ("spin", "genhtml")))
    assert code == 0
    assert commands[0] == "apt-get update -qq"
    assert [command.split()[-1] for command in commands[1:3]] == ["spin", "lcov"]
    assert commands[-1].startswith("make test")
    assert "== installing spin lcov" in said


def test_what_cannot_be_installed_is_said_and_the_tests_run(tmp_path: Path) -> None:
    code, commands, said = run(tmp_path, apt=100)
    assert code == 0
    assert commands[-1].startswith("make test")
    assert "graphviz cannot be installed" in said


def test_without_root_nothing_is_installed(tmp_path: Path) -> None:
    code, commands, said = run(tmp_path, root=False)
    assert code == 0
    assert [command.split()[0] for command in commands] == ["make"]
    assert "root" in said


def test_a_failure_is_its_own(tmp_path: Path) -> None:
    code, _, said = run(tmp_path, there=ORACLES, make=2)
    assert code == 2
    assert "all is well" not in said


def test_an_old_or_missing_python_is_said_to_be_missing(tmp_path: Path) -> None:
    code, commands, said = run(tmp_path, there=(*ORACLES, "python3.12"), python="no-python")
    assert commands[-1].startswith("make test PYTHON=")  # python3.12 says yes to everything here
    assert code == 0
    (tmp_path / "none").mkdir()
    code, commands, said = run(tmp_path / "none", there=ORACLES, python="no-python")
    assert code != 0
    assert "no Python 3.11 or newer" in said
    assert commands == []
