"""``agentfsm diagram``: every form, printed, written, or compared with a file."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from agentfsm import LOOP
from agentfsm.core.presets import STRICT
from agentfsm.diagrams import COMMITTED, FORMATS, diagram
from tests.cli.conftest import Cli
from tests.cli.terminal import AtTerminal


def test_without_a_word_it_prints_the_loop_as_text(cli: Cli) -> None:
    printed = cli("diagram").stdout
    for row in LOOP:
        assert row.name in printed
    assert printed.index("pre_step") < printed.index("terminal")


@pytest.mark.parametrize("form", FORMATS)
def test_every_form_of_text_is_printed(cli: Cli, form: str) -> None:
    result = cli("diagram", "--format", form)
    assert result.exit_code == 0
    assert result.stdout.rstrip("\n") == diagram(LOOP, form).rstrip("\n")


def test_a_file_has_the_form_of_its_ending_or_the_one_that_is_named(cli: Cli, tmp_path: Path) -> None:
    assert cli("diagram", "--output", "deep/er/loop.svg").exit_code == 0
    assert ET.fromstring((tmp_path / "deep/er/loop.svg").read_text()).tag.endswith("svg")
    assert cli("diagram", "--output", "loop.txt", "--format", "dot").exit_code == 0
    assert (tmp_path / "loop.txt").read_text().startswith("digraph")


def test_a_theme_is_drawn(cli: Cli) -> None:
    assert cli("diagram", "-f", "svg", "--theme", "dark").stdout != cli("diagram", "-f", "svg").stdout


def test_the_graph_of_a_preset_and_one_of_a_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from agentfsm.core.presets import STRICT as MINE")
    expected = diagram(STRICT.graph, "text").rstrip("\n")
    assert cli("diagram", "--preset", "strict").stdout.rstrip("\n") == expected
    assert cli("diagram", "mine.py:MINE").stdout.rstrip("\n") == expected


def test_a_folder_gets_the_forms_that_are_kept_and_check_compares_them(cli: Cli, tmp_path: Path) -> None:
    assert cli("diagram", "--output", "kept/", "--check").exit_code == 1
    assert not (tmp_path / "kept").exists()
    written = cli("diagram", "--output", "kept/")
    assert sorted(Path(line).name for line in written.stderr.splitlines()) == sorted(
        f"loop{FORMATS[form].endings[0]}" for form in COMMITTED
    )
    fresh = cli("diagram", "--output", "kept", "--check")
    assert (fresh.exit_code, fresh.output) == (0, "")
    (tmp_path / "kept" / "loop.dot").write_text("digraph {}")
    (tmp_path / "kept" / "loop.svg").unlink()
    stale = cli("diagram", "--output", "kept", "--check")
    assert stale.exit_code == 1
    assert sorted(stale.stderr.splitlines()) == [
        "agentfsm: kept/loop.dot is stale: draw it anew",
        "agentfsm: kept/loop.svg is missing: draw it anew",
    ]
    assert (tmp_path / "kept" / "loop.dot").read_text() == "digraph {}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--check",), "say which with --output"),
        (("--check", "--output", "loop.png"), "--check compares text forms"),
        (("--output", "loop.doc"), "names no form"),
        (("--format", "doc"), "Invalid value for '-f'"),
        (("agentfsm:LOOP", "--preset", "strict"), "not both"),
    ],
)
def test_wrong_usage_says_what_is_right(cli: Cli, words: tuple[str, ...], said: str) -> None:
    result = cli("diagram", *words)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz paints images, and dot is not on the path")
def test_an_image_goes_to_a_file_or_through_a_pipe_but_not_to_a_terminal(cli: Cli, tmp_path: Path) -> None:
    assert cli("diagram", "-f", "png").stdout_bytes.startswith(b"\x89PNG")
    cli("diagram", "-o", "loop.png")
    assert (tmp_path / "loop.png").read_bytes().startswith(b"\x89PNG")
    with AtTerminal(["diagram", "-f", "png"], tmp_path) as terminal:
        terminal.expect("say where it goes with --output")
        assert terminal.wait() == 2


def test_an_image_without_graphviz_is_one_clear_line(cli: Cli) -> None:
    result = cli("diagram", "-o", "loop.png", PATH="/nowhere")
    assert result.exit_code == 2
    assert result.stderr.startswith("agentfsm: ")
    assert result.stderr.count("\n") == 1
    assert "raphviz" in result.stderr
