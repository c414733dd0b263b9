"""``agentfsm demo``: the whole run as a newcomer sees it, with and without a terminal."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import agentfsm
from agentfsm.loop.presets import FUNNEL
from tests.cli.conftest import Cli
from tests.helpers.fake_model_server import fake_model_server, text_output
from tests.helpers.terminal import TerminalProcess, run_without_terminal


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "long.py").write_text('"""A long module."""\n' + "x = 1\n" * 399)
    (folder / "short.py").write_text("x = 1\n")
    return folder


def test_without_a_terminal_the_demo_answers_itself(cli: Cli, tmp_path: Path) -> None:
    result = cli("demo")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "(the demo answers itself: 300)" in result.stdout
    assert "(the demo answers itself: allow)" in result.stdout
    assert "demo-out/run.svg" in result.stdout
    assert (tmp_path / "demo-out" / "report.md").read_text().startswith("# Modules that are too long")


def test_the_default_folder_is_the_package(cli: Cli) -> None:
    root = Path(agentfsm.__file__).parent
    lines = {path: len(path.read_text().splitlines()) for path in root.rglob("*.py")}
    too_long = [path for path, count in lines.items() if count > 300]
    assert f"{len(too_long)} of {len(lines)} modules have more than 300 lines" in cli("demo").stdout


def test_other_files_give_another_answer(cli: Cli, source: Path) -> None:
    first = cli("demo", "source").stdout
    assert "1 of 2 modules have more than 300 lines; the longest is long.py with 400." in first
    (source / "longer.py").write_text("x = 1\n" * 500)
    second = cli("demo", "source").stdout
    assert "2 of 3 modules have more than 300 lines; the longest is longer.py with 500." in second


def test_the_table_shows_every_transition_of_the_run(cli: Cli) -> None:
    printed = cli("demo", COLUMNS="400").stdout
    moves = json.loads(cli("demo", "--json").stdout)["transitions"]
    _, _, table = printed.partition("evaluated before it, all false")
    rows = [line.split(maxsplit=4) for line in table.splitlines()[1 : len(moves) + 1]]
    assert [row[:4] for row in rows] == [
        [str(i), move["from"], move["to"], move["guard"]] for i, move in enumerate(moves, 1)
    ]
    for row in rows:
        guards = [t.name for t in FUNNEL.graph.rows(row[1])]
        before = guards[: guards.index(row[3])]
        assert row[4].rstrip() == f"{len(before)}: {', '.join(before)}"


def test_every_kind_of_event_is_shown(cli: Cli) -> None:
    data = json.loads(cli("demo", "--json").stdout)
    guards = {move["guard"] for move in data["transitions"]}
    assert {
        "transient_provider",
        "unknown_tool",
        "invalid_arguments",
        "no_progress",
        "environment_error",
        "question_asked",
        "approval_required",
        "approval_decided",
        "replied",
        "declared_done",
    } <= guards
    assert (data["outcome"], data["ok"], data["recoveries"]) == ("RunCompleted", True, 5)


def test_the_diagram_shows_the_path_of_the_run(cli: Cli, tmp_path: Path) -> None:
    data = json.loads(cli("demo", "--json", "--out", "here").stdout)
    assert data["files"] == {"picture": "here/run.svg"}
    picture = ET.fromstring((tmp_path / "here" / "run.svg").read_text())
    message = " ".join(picture.itertext())
    taken = sum(move["from"] == "recover" for move in data["transitions"])
    assert f"\u00d7{taken}" in message
    assert f"{len(data['transitions'])} transitions" in message


def test_an_empty_folder_is_handed_off_with_exit_code_1(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = cli("demo", "empty")
    assert result.exit_code == 1
    assert "handed off" in result.stdout
    assert "no file here fits **/*.py" in result.stdout
    assert "next: name a folder that holds Python modules" in result.stdout


def test_the_demo_runs_with_a_real_model(cli: Cli, source: Path) -> None:
    with fake_model_server(text_output("I would rather not.")) as server:
        result = cli("demo", "source", "--model", "ollama:little", OLLAMA_HOST=server.host)
    assert result.exit_code == 1  # it calls no tool: scope narrowed once, then handed off
    assert "the model is ollama:little" in result.stdout
    assert "no_progress" in result.stdout
    names = {tool["function"]["name"] for tool in server.requests[0]["tools"]}
    assert {"list_files", "write_report", "ask_user", "return_done"} <= names


# -- as a process ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_without_a_terminal_prints_plain_lines(tmp_path: Path) -> None:
    done = run_without_terminal(["demo"], tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "call_llm       waiting for stand-in ..." in done.stdout
    assert "recover        backing off for 2 s ..." in done.stdout


@pytest.mark.slow
def test_at_a_terminal_the_user_answers(tmp_path: Path, source: Path) -> None:
    with TerminalProcess(["demo", str(source)], tmp_path) as terminal:
        terminal.expect("How many lines may a module have?")
        terminal.expect("Your answer:")
        terminal.type("")  # a blank answer is asked for again
        terminal.expect("Your answer:")
        terminal.type("100")
        terminal.expect("May 'write_report' run with these arguments?")
        terminal.expect("1 of 2 modules have more than 100 lines")
        terminal.expect("[a]llow, [d]eny or [e]dit?")
        terminal.type("perhaps")
        terminal.expect("'perhaps' is not a valid reply")
        terminal.expect("[a]llow, [d]eny or [e]dit?")
        terminal.type("a")
        terminal.expect("completed")
        assert terminal.wait() == 0
    assert "answers itself" not in terminal.text
    assert "waiting for stand-in" in terminal.text  # the spinner
    assert "\x1b[33m" in terminal.raw  # colors
    assert (tmp_path / "demo-out" / "report.md").exists()


@pytest.mark.slow
def test_at_a_terminal_a_call_can_be_denied_with_a_reason(tmp_path: Path, source: Path) -> None:
    with TerminalProcess(["demo", str(source)], tmp_path, columns=80) as terminal:
        terminal.expect("Your answer:")
        terminal.type("100")
        terminal.expect("[e]dit?")
        terminal.type("d")
        terminal.expect("Why not?")
        terminal.type("not today")
        terminal.expect("There is no report: Denied by the user: not today")
        assert terminal.wait() == 0
    assert not (tmp_path / "demo-out" / "report.md").exists()
    _, _, table = terminal.text.partition("guard that held")
    rows = [line for line in table.split("\n") if line[:2].strip().isdigit()]
    assert len(rows) > 50
    assert [line for line in rows if len(line) > 80] == []


@pytest.mark.slow
def test_at_a_terminal_arguments_can_be_edited(tmp_path: Path, source: Path) -> None:
    with TerminalProcess(["demo", str(source)], tmp_path) as terminal:
        terminal.expect("Your answer:")
        terminal.type("100")
        terminal.expect("[e]dit?")
        terminal.type("e")
        terminal.expect("New arguments as JSON")
        terminal.type("[1]")
        terminal.expect("not a JSON object")
        terminal.expect("[e]dit?")
        terminal.type("e")
        terminal.expect("New arguments as JSON")
        terminal.type('{"name": "mine.md", "text": "mine"}')
        assert terminal.wait() == 0
    assert (tmp_path / "demo-out" / "mine.md").read_text() == "mine"


@pytest.mark.slow
def test_ctrl_c_at_a_question_cancels_the_run(tmp_path: Path, source: Path) -> None:
    with TerminalProcess(["demo", str(source)], tmp_path) as terminal:
        terminal.expect("Your answer:")
        terminal.interrupt("cancelled")
        terminal.expect("it was in state suspended")
        assert terminal.wait() == 130
    assert "Traceback" not in terminal.text


@pytest.mark.slow
def test_no_color_disables_colors(tmp_path: Path, source: Path) -> None:
    with TerminalProcess(["demo", str(source), "--yes"], tmp_path, {"NO_COLOR": "1"}) as terminal:
        assert terminal.wait() == 0
    assert "\x1b[33m" not in terminal.raw
    assert "(the demo answers itself: 300)" in terminal.text
