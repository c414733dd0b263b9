"""``agentfsm diagram``: every format, printed, written, or compared with a file."""

from __future__ import annotations

import asyncio
import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from agentfsm import LOOP, Agent, Graph, Host, SqliteStore, tool
from agentfsm.diagrams import COMMITTED_FORMATS, FORMATS, Coverage, RunPath, diagram
from agentfsm.loop.presets import PRESETS, STRICT
from agentfsm.testing import ScriptedModel, call
from tests.cli.conftest import Cli
from tests.helpers.terminal import TerminalProcess


def test_no_arguments_print_the_loop_as_text(cli: Cli) -> None:
    printed = cli("diagram").stdout
    for row in LOOP:
        assert row.name in printed
    assert printed.index("pre_step") < printed.index("terminal")


@pytest.mark.parametrize("form", [name for name, form in FORMATS.items() if not form.image])
def test_every_text_format_is_printed(cli: Cli, form: str) -> None:
    result = cli("diagram", "--format", form)
    assert result.exit_code == 0
    assert result.stdout.rstrip("\n") == diagram(LOOP, form).rstrip("\n")


def test_the_format_comes_from_the_extension_or_the_option(cli: Cli, tmp_path: Path) -> None:
    assert cli("diagram", "--output", "deep/er/loop.svg").exit_code == 0
    assert ET.fromstring((tmp_path / "deep/er/loop.svg").read_text()).tag.endswith("svg")
    assert cli("diagram", "--output", "loop.txt", "--format", "dot").exit_code == 0
    assert (tmp_path / "loop.txt").read_text().startswith("digraph")


def test_the_theme_is_applied(cli: Cli) -> None:
    assert cli("diagram", "-f", "svg", "--theme", "dark").stdout != cli("diagram", "-f", "svg").stdout


def test_the_vertical_layout_is_for_svg(cli: Cli, tmp_path: Path) -> None:
    narrow = cli("diagram", "--layout", "vertical", "-f", "svg").stdout
    assert narrow.rstrip("\n") == diagram(LOOP, "svg", layout="vertical").rstrip("\n")
    assert int(ET.fromstring(narrow).attrib["width"]) < int(ET.fromstring(diagram(LOOP)).attrib["width"]) / 2
    wrong = cli("diagram", "--layout", "vertical", "-o", "loop.dot")
    assert (wrong.exit_code, "for SVG: dot has no such layout" in wrong.stderr) == (2, True)
    assert not list(tmp_path.glob("loop.*"))


def test_the_graph_comes_from_a_preset_or_a_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from agentfsm.loop.presets import PRESETS, STRICT as MINE")
    expected = diagram(STRICT.graph, "text").rstrip("\n")
    assert cli("diagram", "--preset", "strict").stdout.rstrip("\n") == expected
    assert cli("diagram", "mine.py:MINE").stdout.rstrip("\n") == expected


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_can_be_drawn(cli: Cli, name: str) -> None:
    drawn = cli("diagram", "--preset", name, "-f", "svg").stdout
    assert drawn.rstrip("\n") == PRESETS[name].graph.diagram("svg").rstrip("\n")
    assert f">{PRESETS[name].graph.name}<" in drawn


def test_a_folder_gets_the_committed_formats_and_check_compares_them(cli: Cli, tmp_path: Path) -> None:
    assert cli("diagram", "--output", "kept/", "--check").exit_code == 1
    assert not (tmp_path / "kept").exists()
    written = cli("diagram", "--output", "kept/")
    assert sorted(Path(line).name for line in written.stderr.splitlines()) == sorted(
        f"loop{FORMATS[form].suffixes[0]}" for form in COMMITTED_FORMATS
    )
    fresh = cli("diagram", "--output", "kept", "--check")
    assert (fresh.exit_code, fresh.output) == (0, "")
    (tmp_path / "kept" / "loop.dot").write_text("digraph {}")
    (tmp_path / "kept" / "loop.svg").unlink()
    stale = cli("diagram", "--output", "kept", "--check")
    assert stale.exit_code == 1
    assert sorted(stale.stderr.splitlines()) == [
        "agentfsm: kept/loop.dot is out of date: draw it again",
        "agentfsm: kept/loop.svg is missing: draw it again",
    ]
    assert (tmp_path / "kept" / "loop.dot").read_text() == "digraph {}"


def test_a_check_shows_what_has_changed_in_a_format_that_is_easy_to_read(cli: Cli, tmp_path: Path) -> None:
    cli("diagram", "--output", "kept/")
    (tmp_path / "kept" / "loop.md").write_text(
        (tmp_path / "kept" / "loop.md").read_text().replace("tool_calls", "calls")
    )
    (tmp_path / "kept" / "loop.svg").write_text("<svg/>")
    result = cli("diagram", "--output", "kept/", "--check")
    assert result.exit_code == 1
    removed = [line for line in result.stdout.splitlines() if line.startswith("-") and "`calls`" in line]
    added = [line for line in result.stdout.splitlines() if line.startswith("+") and "`tool_calls`" in line]
    assert (len(removed), len(added)) == (1, 1)
    assert "<svg" not in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--check",), "name them with --output"),
        (("--check", "--output", "loop.png"), "--check compares text formats"),
        (("--output", "loop.doc"), "no diagram format has the file extension"),
        (("--format", "doc"), "Invalid value for '-f'"),
        (("agentfsm:LOOP", "--preset", "strict"), "not both"),
        (("--run", "one", "--coverage", __file__), "not both"),
        (("--run", "one", "--store", "nowhere.db"), "there is no store at nowhere.db"),
        (("--coverage", __file__), "is not a coverage report: write one with pytest --fsm-report=json"),
    ],
)
def test_wrong_usage_is_explained(cli: Cli, words: tuple[str, ...], message: str) -> None:
    result = cli("diagram", *words)
    assert result.exit_code == 2
    assert message in result.stderr


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return "paid"


def odd(run: object) -> bool:
    """Never."""
    return False


MINE = LOOP.with_detector("post_llm", odd, before="tool_calls")


def keep(store: Path, graph: Graph = LOOP) -> None:
    """A run that waits for the approval of a payment."""

    async def wait() -> None:
        model = ScriptedModel([call("pay", amount=5)])
        await Agent(model, tools=[pay], graph=graph, host=Host(store=runs)).run("Pay.", run_id="one")

    runs = SqliteStore(store)
    asyncio.run(wait())
    runs.close()


WAY = ["pre_step.otherwise", "call_llm.otherwise", "post_llm.tool_calls", "dispatch_tool.approval_required"]


def test_the_path_of_a_stored_run_is_drawn_on_its_graph(cli: Cli, tmp_path: Path) -> None:
    keep(tmp_path / "runs.db")
    expected = diagram(LOOP, "svg", overlay=RunPath.from_ids(WAY, "suspended"))
    assert cli("diagram", "--run", "one", "--store", "runs.db", "-o", "run.svg").exit_code == 0
    assert (tmp_path / "run.svg").read_text() == expected
    text = cli("diagram", "--run", "one", "--store", "runs.db").stdout
    assert "a run of 4 transitions, now in suspended" in text


def test_a_run_of_an_unknown_graph_is_drawn_on_the_graph_its_journal_pins(cli: Cli, tmp_path: Path) -> None:
    keep(tmp_path / "runs.db", MINE)
    result = cli("diagram", "--run", "one", "--store", "runs.db", "-f", "svg")
    assert result.stdout.rstrip("\n") == diagram(MINE, overlay=RunPath.from_ids(WAY, "suspended")).rstrip("\n")
    (tmp_path / "mine.py").write_text("from agentfsm import LOOP\nSHORT = LOOP.without('post_llm.tool_calls')\n")
    other = cli("diagram", "mine.py:SHORT", "--run", "one", "--store", "runs.db")
    assert other.exit_code == 2
    assert "the run took post_llm.tool_calls, but graph 'loop' has no such row" in other.stderr
    unknown = cli("diagram", "--run", "two", "--store", "runs.db")
    assert (unknown.exit_code, unknown.stderr.count("\n")) == (2, 1)
    assert "there is no run 'two'" in unknown.stderr


def test_coverage_is_drawn_on_the_graph(cli: Cli, tmp_path: Path) -> None:
    windows = {"pre_step.otherwise": 3, "pre_step.otherwise > call_llm.otherwise": 2, "call_llm.otherwise": 2}
    shares = [{"what": "transitions", "impossible": ["pre_step.cost_limit"]}]
    (tmp_path / "fsm-coverage.json").write_text(json.dumps({"windows": windows, "shares": shares}))
    printed = cli("diagram", "--coverage", "fsm-coverage.json").stdout
    counts = {"pre_step.otherwise": 3, "call_llm.otherwise": 2}
    assert printed.rstrip("\n") == diagram(LOOP, "text", overlay=Coverage(counts, ["pre_step.cost_limit"])).rstrip("\n")


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz paints images, and dot is not on the path")
def test_an_image_is_written_to_a_file_or_pipe_but_not_to_a_terminal(cli: Cli, tmp_path: Path) -> None:
    assert cli("diagram", "-f", "png").stdout_bytes.startswith(b"\x89PNG")
    cli("diagram", "-o", "loop.png")
    assert (tmp_path / "loop.png").read_bytes().startswith(b"\x89PNG")
    with TerminalProcess(["diagram", "-f", "png"], tmp_path) as terminal:
        terminal.expect("name a file with --output")
        assert terminal.wait() == 2


def test_a_missing_graphviz_is_one_clear_line(cli: Cli) -> None:
    result = cli("diagram", "-o", "loop.png", PATH="/nowhere")
    assert result.exit_code == 2
    assert result.stderr.startswith("agentfsm: ")
    assert result.stderr.count("\n") == 1
    assert "raphviz" in result.stderr
