"""``agentfsm replay``: every divergence of each run, how it would have ended, and totals over a store."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentfsm import Agent, Host, SqliteStore, TransientProviderError
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.cli.conftest import Cli
from tests.helpers.terminal import run_with_stderr_on_terminal

BUSY = TransientProviderError("busy")


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


SCRIPTS: dict[str, list[Any]] = {
    "busy": [BUSY, "done"],
    "calls": [call("add", a=1, b=2), call("add", a=3, b=4), "done"],
    "plain": ["done"],
    "twice": [BUSY, call("add", a=1, b=2), BUSY, "done"],
}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A store with four finished runs; two of them met a busy provider."""
    path = tmp_path / "runs.db"
    with SqliteStore(path) as store:

        async def keep() -> None:
            for run_id, script in SCRIPTS.items():
                host = Host(clock=FakeClock(), store=store)
                await Agent(ScriptedModel(script), tools=[add], host=host).run("go", run_id=run_id)

        asyncio.run(keep())
    return path


def test_a_whole_store_under_a_preset_has_totals(cli: Cli, stored: Path) -> None:
    result = cli("replay", "--preset", "strict", "--store", str(stored))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].endswith(
        "recover.handoff -> terminal instead of recover.otherwise -> pre_step; "
        "would end as Handoff instead of RunCompleted"
    )
    assert lines[1].endswith("the same")
    assert lines[-1] == "2 of 4 runs would end differently: 2 Handoff instead of RunCompleted"


def test_a_preset_brings_its_limits_which_can_be_changed(cli: Cli, stored: Path) -> None:
    one = ("replay", "calls", "--preset", "strict", "--store", str(stored))
    assert cli(*one).exit_code == 0
    changed = cli(*one, "-g", "max_iterations=1", "-g", "on_limit=stop")
    assert changed.exit_code == 1
    assert "would end as PartialRunSummary instead of RunCompleted" in changed.stdout


def test_the_ending_that_is_not_known_is_said_to_be_unknown(cli: Cli, stored: Path) -> None:
    result = cli("replay", "plain", "busy", "--preset", "funnel", "--store", str(stored))
    assert (
        "how it would end is not known: it would send the model a request to which no reply was recorded"
        in result.stdout
    )
    assert "2 would take other transitions, and how they end is not known" in result.stdout


def test_json_has_one_object_per_run_and_the_totals(cli: Cli, stored: Path) -> None:
    result = cli("replay", "--preset", "strict", "--json", "--store", str(stored))
    *runs, totals = map(json.loads, result.stdout.splitlines())
    assert [run["run_id"] for run in runs] == list(SCRIPTS)
    assert runs[0]["ends_differently"] is True
    assert runs[0]["divergences"][0]["instead"] == "recover.handoff -> terminal"
    assert totals["totals"]["runs"] == 4
    assert totals["totals"]["end_differently"] == 2
    assert totals["totals"]["endings"] == [["Handoff", "RunCompleted", 2]]


def test_exported_runs_are_replayed_without_a_store(cli: Cli, stored: Path, tmp_path: Path) -> None:
    for run_id in ("busy", "plain"):
        (tmp_path / f"{run_id}.jsonl").write_text(cli("export", run_id, "--store", str(stored)).stdout)
    stored.unlink()
    result = cli("replay", "--file", "busy.jsonl", "--file", "plain.jsonl", "--preset", "strict")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "1 of 2 runs would end differently: 1 Handoff instead of RunCompleted"
    assert cli("replay", "--file", "plain.jsonl").exit_code == 0
    edited = (tmp_path / "plain.jsonl").read_text().replace("post_llm", "post_lm")
    (tmp_path / "plain.jsonl").write_text(edited)
    tampered = cli("replay", "--file", "plain.jsonl")
    assert tampered.exit_code == 1
    assert "cannot be replayed: record" in tampered.stdout


def test_one_run_has_no_totals_and_the_same_run_exits_with_0(cli: Cli, stored: Path) -> None:
    result = cli("replay", "plain", "--store", str(stored))
    assert (result.exit_code, result.stdout) == (0, "plain  3 transitions  the same\n")
    assert "runs would end" not in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nobody",), "nobody"),
        (("--preset", "lenient"), "lenient"),
        (("plain", "--file", "runs.db"), "not both"),
        (("--guardrails", "max_iterations"), "NAME=VALUE"),
    ],
)
def test_wrong_usage_exits_with_2(cli: Cli, stored: Path, words: tuple[str, ...], message: str) -> None:
    result = cli("replay", *words, "--store", str(stored))
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_terminal_shows_how_far_it_is_and_a_file_gets_the_results_alone(stored: Path, tmp_path: Path) -> None:
    words = ["replay", "--preset", "strict", "--store", str(stored)]
    printed, shown = run_with_stderr_on_terminal(words, tmp_path, TERM="xterm")
    assert printed.splitlines()[-1].startswith("2 of 4 runs would end differently")
    assert "\x1b" not in printed
    assert "replaying" in shown
