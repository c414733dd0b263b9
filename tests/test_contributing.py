"""CONTRIBUTING.md: its map names files that exist, and each recipe, followed to the letter, works in a running loop."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.import_graph import PACKAGE

ROOT = PACKAGE.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = ("detector", "failure kind", "provider", "wire", "store", "diagram format", "tool source", "command")

_STEP = re.compile(
    r"^(?P<verb>Create|At the end of|In) `(?P<path>[^`]+)`"
    r"(?:, (?P<place>after|before) the line `(?P<line>[^`]+)`)?:\n\n"
    r"```\w*\n(?P<block>.*?)^```$",
    re.M | re.S,
)
_CHECK = re.compile(r"^Then this runs:\n\n```python\n(?P<block>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Recipe:
    """The steps of one section, and the program that shows the result."""

    steps: tuple[re.Match[str], ...]
    check: str

    def follow(self, root: Path) -> None:
        """Do what the steps say, and nothing else."""
        for step in self.steps:
            path, block = root / step["path"], step["block"]
            if step["verb"] == "Create":
                assert not path.exists()
                path.write_text(block)
            elif step["verb"] == "At the end of":
                path.write_text(path.read_text() + "\n\n" + block)
            else:
                lines = path.read_text().splitlines(keepends=True)
                places = [n for n, line in enumerate(lines) if line.strip() == step["line"].strip()]
                assert len(places) == 1, f"{step['line']!r} is in {step['path']} {len(places)} times"
                at = places[0] + (step["place"] == "after")
                path.write_text("".join([*lines[:at], block, *lines[at:]]))


def recipe(name: str) -> Recipe:
    """The section of one recipe."""
    (section,) = re.findall(rf"^### Add a {name}\n(.*?)(?=^###? |\Z)", TEXT, re.M | re.S)
    check = _CHECK.search(section)
    assert check is not None
    return Recipe(tuple(_STEP.finditer(section)), check["block"])


def run(program: str, root: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with the package of a folder."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_works_as_it_is_written(name: str, tmp_path: Path):
    followed = recipe(name)
    assert followed.steps
    shutil.copytree(PACKAGE, tmp_path / "agentfsm", ignore=shutil.ignore_patterns("__pycache__"))
    before = run(followed.check, tmp_path)
    assert before.returncode != 0, "it works without the steps, so it shows nothing"
    followed.follow(tmp_path)
    after = run(followed.check, tmp_path)
    assert after.returncode == 0, after.stderr


def test_every_step_is_read():
    section = TEXT[TEXT.index("### Add a detector") :]
    blocks = section.count("\n```") // 2
    assert blocks == sum(len(recipe(name).steps) + 1 for name in RECIPES)


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:agentfsm|tests|docs|diagrams|examples)/[\w./-]*)`", TEXT)))
)
def test_files_that_are_named_exist(path: str):
    created = {step["path"] for name in RECIPES for step in recipe(name).steps if step["verb"] == "Create"}
    assert path in created or (ROOT / path).exists()
