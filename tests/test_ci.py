"""``.ci/run`` installs missing programs, runs the tests, builds the site, and exits with the first bad code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[1] / ".ci" / "run"
ORACLES = ("dot", "spin", "gcc", "genhtml", "npm", "chromium", "pgbouncer", "faketime")
LOG = '#!{bash}\necho "{name} $*" >> "$LOG"\nexit {code}\n'


def run(
    folder: Path,
    *,
    installed: tuple[str, ...] = (),
    make: int = 0,
    root: bool = True,
    apt: int = 0,
    python: str = "python3",
) -> tuple[int, list[str], str]:
    """The exit code, the commands and the output of ``.ci/run``, on a machine with only these programs."""
    programs = folder / "bin"
    programs.mkdir()
    bash = shutil.which("bash")
    assert bash is not None
    for name in ("bash", "env", "dirname"):
        (programs / name).symlink_to(shutil.which(name) or "")
    (programs / python).symlink_to(sys.executable)
    stubs = {"make": make, "apt-get": apt, **dict.fromkeys(installed, 0)}
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


def test_on_a_complete_machine_only_the_tests_run(tmp_path: Path) -> None:
    code, commands, output = run(tmp_path, installed=ORACLES)
    assert code == 0
    tests, slow, docs = commands
    assert tests.startswith("make test PYTHON=")
    assert slow.startswith("make slow")
    assert docs.startswith("make docs")
    assert "== make test" in output
    assert "all tests passed" in output


def test_missing_programs_are_installed_first(tmp_path: Path) -> None:
    code, commands, output = run(tmp_path, installed=tuple(name for name in ORACLES if name not in ("spin", "genhtml")))
    assert code == 0
    assert commands[0] == "apt-get update -qq"
    assert [command.split()[-1] for command in commands[1:3]] == ["spin", "lcov"]
    assert commands[-3].startswith("make test")
    assert "== installing spin lcov" in output


def test_a_failed_installation_is_reported_and_the_tests_run(tmp_path: Path) -> None:
    code, commands, output = run(tmp_path, apt=100)
    assert code == 0
    assert commands[-3].startswith("make test")
    assert "graphviz cannot be installed" in output


def test_without_root_nothing_is_installed(tmp_path: Path) -> None:
    code, commands, output = run(tmp_path, root=False)
    assert code == 0
    assert [command.split()[0] for command in commands] == ["make", "make", "make"]
    assert "root" in output


def test_a_test_failure_is_the_exit_code(tmp_path: Path) -> None:
    code, _, output = run(tmp_path, installed=ORACLES, make=2)
    assert code == 2
    assert "all tests passed" not in output


def test_an_old_or_missing_python_is_an_error(tmp_path: Path) -> None:
    code, commands, output = run(tmp_path, installed=(*ORACLES, "python3.12"), python="no-python")
    assert commands[-3].startswith("make test PYTHON=")  # python3.12 says yes to everything here
    assert code == 0
    (tmp_path / "none").mkdir()
    code, commands, output = run(tmp_path / "none", installed=ORACLES, python="no-python")
    assert code != 0
    assert "no Python 3.11 or newer" in output
    assert commands == []
