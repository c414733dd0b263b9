"""What the pages of ``docs/`` show is true: each page's blocks run in order in a folder, and print what it says.

A block ``python NAME.py`` is a file; a block ``python`` is run, and prints what a ``text`` block behind it
shows; in a ``console`` block each command prints the lines that follow it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from agentfsm.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```(\w*) ?([\w.]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLUGIN = () if "agentfsm.testing.pytest_plugin" in {e.value for e in entry_points(group="pytest11")} else (
    "-p", "agentfsm.testing.pytest_plugin",
)  # fmt: skip
PROGRAMS = {
    "agentfsm": ("-m", "agentfsm.cli"),
    "pytest": ("-m", "pytest", "-p", "no:cacheprovider", "--rootdir=.", *PLUGIN),
}


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "AGENTFSM_STORE": str(folder / "agentfsm.db")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block, and what it prints."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_true(page: Path, tmp_path: Path) -> None:
    printed = ""
    source = page.read_text(encoding="utf-8")
    found = list(FENCE.finditer(source))
    for _, name, text in (block.groups() for block in found):
        if name:
            (tmp_path / name).write_text(text)  # what is a file is there before the first command
    for block in found:
        language, name, text = block.groups()
        where = f"{page.name}, line {source.count(chr(10), 0, block.start()) + 1}"
        match language:
            case "python" if not name:
                done = run(["-W", "error", "-c", text], tmp_path)
                assert done.returncode == 0, f"{where}: {done.stderr}"
                printed = done.stdout
            case "text":
                assert printed == text, f"{where}: {printed}"
            case "console":
                for command, shown in commands(text):
                    program, *words = shlex.split(command)
                    done = run([*PROGRAMS[program], *words], tmp_path)
                    assert done.returncode <= bool(shown), f"{where}: {command}: {done.stdout}{done.stderr}"
                    assert shown in done.stdout, f"{where}: {command}: {done.stdout}"
            case _:
                assert name, f"{where}: nothing tests a block of {language!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_it_points_to_is_there(page: Path) -> None:
    source = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", source):
        assert (page.parent / link).exists(), link
    assert set(re.findall(r"`agentfsm (\w+)", source)) <= set(app.commands)


def test_the_readme_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"(docs/{page.name})" in readme for page in PAGES)
