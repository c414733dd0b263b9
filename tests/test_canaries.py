"""Secrets in many places of many runs appear in nothing that is written or shown, and tools get them after a restart.

``tests.helpers.canaries`` makes the runs. What they wrote is searched as it is, and in every form that can be decoded
or decompressed without the key.
"""

from __future__ import annotations

import base64
import codecs
import gzip
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")
pytest.importorskip("opentelemetry.sdk", reason="the OpenTelemetry SDK is not installed")

from click.testing import CliRunner

from agentfsm.cli.app import app
from tests.helpers.canaries import ENTER, HOST_SECRET, PLACES, canary, environment
from tests.helpers.child_process import child_environment
from tests.helpers.fake_model_server import fake_model_server, tool_call_output
from tests.helpers.secret_search import found_in

RUNS = (
    "texts",
    "enter",
    "gate-ask",
    "model-refused",
    "results",
    "restart",
    "edit",
    "votes",
    "calls",
    "server",
    "answer",
    "odd",
)


def run_part(part: str, folder: Path) -> None:
    command = [sys.executable, "-m", "tests.helpers.canaries", part, str(folder)]
    child = subprocess.run(
        command, capture_output=True, text=True, env={**child_environment(), **environment()}, check=False
    )
    assert child.returncode == 0, child.stderr[-4000:]
    (folder / "out" / f"printed-{part}.txt").write_text(child.stdout + child.stderr)


def run_commands(folder: Path, part: str) -> None:
    """Everything that the command line says about the store, at default settings."""
    store = str(folder / "out" / "runs.db")
    (folder / "out" / f"commands-{part}").mkdir()
    every = [
        [*words]
        for words in (
            ("runs",),
            ("runs", "--json"),
            ("verify",),
            ("verify", "--json"),
            ("replay",),
            ("replay", "--json"),
        )
    ]
    each = [("show",), ("show", "--json"), ("export",), ("replay", "--json"), ("report",), ("report", "--markdown")]
    for number, words in enumerate([*every, *([name, run, *more] for run in RUNS for name, *more in each)]):
        result = CliRunner().invoke(app, [*words, "--store", store], env={"AGENTFSM_SECRET": HOST_SECRET.decode()})
        assert result.exit_code in (0, 4) or words[0] == "replay", result.output  # some graphs are not a preset's
        (folder / "out" / f"commands-{part}" / f"{number}.txt").write_text(f"{words}\n{result.output}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("canaries")
    run_part("begin", made)
    (made / "out" / "before").mkdir()
    for file in (made / "out").glob("runs.db*"):
        (made / "out" / "before" / file.name).write_bytes(file.read_bytes())
    run_commands(made, "begin")
    run_part("resume", made)
    run_commands(made, "resume")
    return made


# -- what is found ------------------------------------------------------------------------------------------


def needles(place: str) -> list[bytes]:
    """What must not be found: the secret, and the lines of a key."""
    value = canary(place)
    lines = [line for line in value.splitlines() if "-----" not in line]
    return [line.encode() for line in (lines if len(lines) > 1 else [value])]


def test_the_search_finds_what_is_hidden_in_any_form(tmp_path: Path) -> None:
    """Without this, a search that finds nothing would prove nothing."""
    value = canary("environment: a key").encode()
    hidden = {
        "plain": value,
        "json": json.dumps(json.dumps({"a": [value.decode()]})).encode(),
        "repr": repr({"a": value.decode()}).encode(),
        "base64": b"Basic " + base64.b64encode(b"u:" + value),
        "base64url": base64.urlsafe_b64encode(json.dumps({"a": value.decode()}).encode()),
        "hex": b"x'" + value.hex().encode() + b"'",
        "url": "".join(f"%{byte:02x}" for byte in value).encode(),
        "gzip": b"..." + gzip.compress(b"a" + value),
        "zlib": zlib.compress(codecs.encode(base64.b64encode(value), "hex")),
    }
    for name, data in hidden.items():
        (tmp_path / name).write_bytes(b"some text " + data + b" more text")
        assert found_in([tmp_path / name], {"x": [value]}), name


@pytest.mark.slow
def test_no_secret_appears_in_anything_that_is_written_or_shown(folder: Path, counted: Callable[[str], None]) -> None:
    files = [file for file in (folder / "out").rglob("*") if file.is_file()]
    assert found_in(files, {place: needles(place) for place in PLACES}) == []
    size = sum(file.stat().st_size for file in files)
    assert len(PLACES) >= 30
    assert b"logged in as ann" in b"".join(file.read_bytes() for file in files)
    counted(f"canaries: {len(PLACES)} secrets, 0 found in {len(files)} files of {size // 1000:,} kB")


@pytest.mark.slow
def test_what_was_approved_runs_after_a_restart_with_the_approved_bytes(folder: Path) -> None:
    got = [json.loads(line) for line in (folder / "got.jsonl").read_text().splitlines()]
    entered = [each for each in got if "pin" in each]
    assert [json.dumps(each) for each in entered] == [json.dumps(ENTER)]
    doors = [each["password"] for each in got if "password" in each and "pin" not in each]
    assert doors == [
        "a door 2",
        canary("edit: a secret argument"),
        canary("sub-agent: a secret of its caller"),
        canary("sub-agent: a secret argument of its tool"),
        canary("record: a secret argument in a suspension record"),
    ]
    assert [each["key"]["value"] for each in got if "key" in each] == [canary("votes: approved by two people")]


@pytest.mark.slow
def test_the_files_are_for_their_owner_alone(folder: Path) -> None:
    if os.name == "posix":
        assert {oct(file.stat().st_mode & 0o777) for file in (folder / "out").glob("runs.db*")} == {"0o600"}


TOOLS = """
import os
from agentfsm import tool

@tool(secret=["password"])
def log_in(user: str, password: str) -> str:
    "Log in."
    return f"{user} has {password} and {os.environ['STRIPE_API_KEY']}"

@tool(secret=["password"], requires_approval=True)
def log_out(password: str) -> str:
    "Log out."
    return "out"
"""


def test_no_secret_appears_in_what_the_command_line_shows_of_a_run(tmp_path: Path) -> None:
    key, password = canary("environment: a key"), canary("argument: secret")
    (tmp_path / "my_tools.py").write_text(TOOLS)
    script = [
        tool_call_output(("log_in", {"user": "ann", "password": password})),
        tool_call_output(("log_out", {"password": password})),
    ]
    for more in (["--diagram", str(tmp_path / "run.svg"), "--record", str(tmp_path / "record")], ["--json"]):
        with fake_model_server(*script) as served:
            words = ["run", f"use {key}", "--model", "openai:m", "--base-url", served.url, "--api-key-env", "MODEL_KEY"]
            files = ["--tools", str(tmp_path / "my_tools.py"), "--store", str(tmp_path / "runs.db")]
            environment = {"MODEL_KEY": "sk-of-the-model-471108", "STRIPE_API_KEY": key, "AGENTFSM_SECRET": "x" * 32}
            result = CliRunner().invoke(app, [*words, *files, *more], env=environment)
        assert "log_in(user='ann', password='[withheld]')" in result.stderr or "--json" in more, result.output
        assert "ann has [withheld] and [withheld]" in result.stderr or "--json" in more
        (tmp_path / f"printed-{more[0]}").write_text(result.output)
    files_written = [file for file in tmp_path.iterdir() if file.is_file()]
    assert len(files_written) >= 6
    assert found_in(files_written, {"a": [key.encode()], "b": [password.encode()], "c": [b"sk-of-the-model"]}) == []
