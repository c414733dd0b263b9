"""What `make build` makes can be installed, and works without the checkout."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

import agentfsm
from tests.helpers.fresh_environment import build

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["*.whl", "*.tar.gz"])
def test_a_build_can_be_installed_and_run(built: Path, pattern: str, tmp_path: Path):
    (archive,) = built.glob(pattern)
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    packages = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target"]
    subprocess.run([sys.executable, *install, packages, archive], check=True, capture_output=True, timeout=120)
    # Dependencies come from this environment, the package from the build: its folder is first on the path.
    (packages / "dependencies.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    shown = subprocess.run(
        [python, "-c", "import agentfsm; print(agentfsm.__file__, agentfsm.__version__)"],
        cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert shown.stdout.split() == [str(packages / "agentfsm" / "__init__.py"), agentfsm.__version__]
    assert (packages / "agentfsm" / "py.typed").exists()
    drawn = subprocess.run(
        [python, "-m", "agentfsm", "diagram", "--format", "text"],
        cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "approval_required" in drawn.stdout


def test_the_version_is_written_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert project["dynamic"] == ["version"]
    source = (ROOT / "agentfsm" / "__init__.py").read_text()
    assert re.findall(r'^__version__ = "(.+)"$', source, re.M) == [agentfsm.__version__]


def test_ci_tests_the_lowest_versions_that_are_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(d for name, extra in extras.items() if name not in ("dev", "docs") for d in extra),
    ]
    lowest = {re.split(r">=", d)[0]: re.split(r"[,;]", d.split(">=")[1])[0] for d in wanted}
    pinned = dict(
        line.split("==")
        for line in (ROOT / ".ci" / "lowest.txt").read_text().splitlines()
        if "==" in line and line[0] != "#"
    )
    assert {name: parts(version) for name, version in pinned.items()} == {n: parts(v) for n, v in lowest.items()}


def parts(version: str) -> tuple[int, ...]:
    """A version's numbers, with trailing zeros dropped: 2 and 2.0.0 are one version."""
    numbers = [int(n) for n in version.strip().split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
