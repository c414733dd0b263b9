"""A user's app whose dependencies and answers are typed: mypy and pyright accept it, and find each misspelt name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

APP = Path(__file__).parents[1] / "examples" / "typed_app.py"

MISSPELT = {
    "context.deps.shop.find(order_number)": "context.deps.shopp.find(order_number)",
    'context.deps.clerk_limit_usd else': 'context.deps.clerk_limit_eur else',
    "context.deps.shop.refunds.append": "context.deps.shop.refund.append",
    "context.metadata['tenant']": "context.meta['tenant']",
    "not in context.deps.shop.refunds": "not in context.deps.shop.refund",
    "run.deps.clerk_limit_usd)": "run.deps.clerk_limit)",
    "resolution.message}": "resolution.massage}",
    "resolution = result.output": "resolution = result.outputs",
    ").session(": ").sesion(",
    "settings=settings)": "setting=settings)",
}  # fmt: skip
"""What stands in the app, and what is planted in its place; each in a line of its own."""


Places = set[tuple[str, int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the app and ten copies of it, each with one misspelling."""
    folder = tmp_path_factory.mktemp("typed")
    text = APP.read_text(encoding="utf-8")
    (folder / "app.py").write_text(text, encoding="utf-8")
    for number, (right, misspelling) in enumerate(MISSPELT.items()):
        assert text.count(right) == 1, right
        (folder / f"copy_{number}.py").write_text(text.replace(right, misspelling), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def planted() -> Places:
    """The copies, and the line of each that is wrong."""
    text = APP.read_text(encoding="utf-8")
    assert len(MISSPELT) == 10
    return {(f"copy_{n}", text[: text.index(right)].count("\n") + 1) for n, right in enumerate(MISSPELT)}


def run_checker(folder: Path, *command: str) -> str:
    names = [path.name for path in folder.glob("*.py")]
    done = subprocess.run(
        [sys.executable, "-m", *command, *names], cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def assert_found(found: Places, planted: Places, output: str) -> None:
    """Assert that nothing was found in the app, and each misspelling; what follows from one may be found, too."""
    assert {name for name, _ in found} == {name for name, _ in planted}, output
    assert planted <= found, output


def test_the_app_has_about_150_lines_and_all_that_an_app_needs():
    text = APP.read_text(encoding="utf-8")
    assert 120 <= len(text.splitlines()) <= 200
    for part in (
        "deps_type=",
        "output_type=",
        "tools=",
        "requires_approval=",
        ".session(",
        ".as_tool(",
        "MCPTools.stdio(",
    ):
        assert part in text


@pytest.mark.slow
def test_mypy_accepts_the_app_and_finds_ten_misspellings(folder: Path, planted: Places):
    output = run_checker(folder, "mypy", "--strict", "--cache-dir", str(folder / "cache"))
    found = re.findall(r"^(\w+)\.py:(\d+): error:", output, re.MULTILINE)
    assert_found({(name, int(line)) for name, line in found}, planted, output)


@pytest.mark.slow
def test_pyright_accepts_the_app_and_finds_ten_misspellings(folder: Path, planted: Places):
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict", "pythonVersion": "3.11"}')
    output = run_checker(folder, "pyright", "--outputjson", "--pythonpath", sys.executable)
    errors = [each for each in json.loads(output)["generalDiagnostics"] if each["severity"] == "error"]
    found = {(Path(each["file"]).stem, each["range"]["start"]["line"] + 1) for each in errors}
    assert_found(found, planted, output)
