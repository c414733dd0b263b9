"""What the README shows is true: its table is the loop's, its blocks run in an empty folder and print what it says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentfsm import LOOP, SqliteStore
from agentfsm.cli.app import app
from agentfsm.journal.records import read_records
from tests.helpers.fake_model_server import fake_model_server, text_output
from tests.helpers.generated_docs import README, readme_table, split_readme

ROOT = README.parent
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: What stands behind the fence.
        text: What stands in it.
        line: Its line in the README.
        prints: For a ``python`` block, the ``text`` block that follows it, or None.
    """

    language: str
    text: str
    line: int
    prints: str | None

    def __str__(self) -> str:
        return f"line {self.line}"


def blocks() -> Iterator[Block]:
    source = README.read_text(encoding="utf-8")
    found = list(FENCE.finditer(source))
    for place, block in enumerate(found):
        following = found[place + 1] if place + 1 < len(found) else None
        shown = None
        if following is not None and following[1] == "text" and len(source[block.end() : following.start()]) < 20:
            shown = following[2]
        yield Block(block[1], block[2], source.count("\n", 0, block.start()) + 1, shown)


def of(language: str) -> list[Block]:
    return [block for block in blocks() if block.language == language]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command where every provider is a little server on loopback that says hello."""
    with fake_model_server(text_output("Hello.")) as server:
        environment = {
            "OPENAI_BASE_URL": server.url,
            "OPENAI_API_KEY": "sk-test",
            "ANTHROPIC_BASE_URL": server.host,
            "ANTHROPIC_API_KEY": "sk-test",
            "OLLAMA_HOST": server.host,
            "AGENTFSM_STORE": str(folder / "agentfsm.db"),  # and not the data folder of whoever runs the tests
        }
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, **environment},
            timeout=60,
            check=False,
        )


def test_the_table_is_that_of_the_loop() -> None:
    _, shown, _ = split_readme(README.read_text(encoding="utf-8"))
    assert shown == readme_table(LOOP), "write it anew with: make diagrams"


def test_the_table_holds_every_row_in_its_order() -> None:
    _, shown, _ = split_readme(README.read_text(encoding="utf-8"))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines()[2:]]
    rows = [(name.strip("`*"), target) for _, _, names, target in cells if names for name in names.split(", ")]
    assert rows == [(row.name, str(row.target)) for row in LOOP]


def test_every_kind_of_block_is_one_that_is_tested() -> None:
    assert {block.language for block in blocks()} == {"sh", "console", "python", "text"}
    assert len(of("text")) == sum(block.prints is not None for block in blocks())


def test_the_shell_blocks_only_install() -> None:
    assert {line for block in of("sh") for line in block.text.splitlines()} == {"pip install 'agentfsm[cli]'"}


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_a_python_block_runs_and_prints_what_the_readme_says(block: Block, tmp_path: Path) -> None:
    if "os.fork" in block.text and not hasattr(os, "fork"):
        pytest.skip("there is no fork")
    for word, module in (("mcp_server_time", "mcp_server_time"), ("integrations.otel", "opentelemetry")):
        if word in block.text and find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    done = run([sys.executable, "-W", "error", "-c", block.text], tmp_path)
    assert done.returncode == 0, done.stderr
    if block.prints is not None:
        assert done.stdout == block.prints


@pytest.mark.parametrize(
    "command", [line for block in of("console") for line in block.text.splitlines() if line.startswith("$ ")]
)
def test_a_command_runs(command: str, tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text("def add(a: int, b: int) -> int:\n    'Add.'\n    return a + b\n")
    program, *words = shlex.split(command.removeprefix("$ "))
    assert program == "agentfsm"
    done = run([sys.executable, "-m", "agentfsm.cli", *words], tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_run_that_is_killed_is_in_the_store_once_and_whole(tmp_path: Path) -> None:
    (block,) = [block for block in of("python") if "SIGKILL" in block.text]
    done = run([sys.executable, "-W", "error", "-c", block.text], tmp_path)
    assert done.returncode == 0, done.stderr
    store = SqliteStore(tmp_path / "runs.db")
    (head,) = store.heads()
    kinds = [record.kind for record in read_records(store.records(head.run_id), head.run_id)]
    assert (head.status, kinds.count("run.created"), kinds.count("run.resumed")) == ("finished", 1, 1)
    asked = [json.loads(row.body) for row in store.records(head.run_id)]
    begun = [body["eid"] for body in asked if body["kind"] == "effect.intent"]
    assert begun == ["1", "1.0", "1.0", "2"]  # the tool was begun twice, the model asked once for each reply
    store.close()


def test_commands_of_the_text_are_there() -> None:
    named = set(re.findall(r"`agentfsm (\w+)", README.read_text(encoding="utf-8")))
    assert named <= set(app.commands)


def test_the_first_example_is_short() -> None:
    assert len(of("python")[0].text.splitlines()) <= 10


def test_files_that_it_points_to_are_there() -> None:
    source = README.read_text(encoding="utf-8")
    for link in re.findall(r'(?:\]\(|src=")([^)"#]+)', source):
        assert (ROOT / link).exists(), link


def test_make_targets_that_it_names_are_there() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make (\w+)`", README.read_text(encoding="utf-8"))) <= targets
