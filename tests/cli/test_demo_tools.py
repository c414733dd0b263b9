"""The demo's tools work, and only inside their folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentfsm.cli.demo_command import demo_tools

Tools = dict[str, Callable[..., Any]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / ".hidden").mkdir()
    (source / "a.py").write_text("one\ntwo\nthree\n")
    (source / "sub" / "b.py").write_text("two")
    (source / ".hidden" / "c.py").write_text("two")
    (source / "notes.txt").write_text("two")
    (tmp_path / "secret.txt").write_text("two")
    return source


@pytest.fixture
def tools(folder: Path, tmp_path: Path) -> Tools:
    return {tool.name: tool.function for tool in demo_tools(folder, tmp_path / "out")}


def test_files_are_listed_sorted_without_hidden_ones(tools: Tools) -> None:
    assert tools["list_files"]("**/*.py") == ["a.py", "sub/b.py"]
    assert tools["list_files"]("*.md") == []


def test_lines_are_counted(tools: Tools) -> None:
    assert tools["count_lines"](["a.py", "sub/b.py"]) == {"a.py": 3, "sub/b.py": 1}


def test_search_returns_path_and_line(tools: Tools) -> None:
    assert tools["search_text"]("two", "**/*.py") == ["a.py:2", "sub/b.py:1"]
    assert tools["search_text"]("four", "**/*.py") == []


def test_search_returns_at_most_50_matches(tools: Tools, folder: Path) -> None:
    (folder / "long.py").write_text("two\n" * 80)
    assert len(tools["search_text"]("two", "long.py")) == 50


def test_read_file_returns_a_range_of_lines(tools: Tools) -> None:
    assert tools["read_file"]("a.py") == "one\ntwo\nthree"
    assert tools["read_file"]("a.py", first=2, last=2) == "two"


@pytest.mark.parametrize("path", ["../secret.txt", "/etc/hostname", "sub/../../secret.txt"])
def test_nothing_outside_the_folder_is_read(tools: Tools, path: str) -> None:
    with pytest.raises(PermissionError):
        tools["read_file"](path)
    with pytest.raises(PermissionError):
        tools["count_lines"]([path])


def test_a_symbolic_link_cannot_leave_the_folder(tools: Tools, folder: Path) -> None:
    (folder / "link.txt").symlink_to(folder.parent / "secret.txt")
    with pytest.raises(PermissionError):
        tools["read_file"]("link.txt")


def test_the_report_is_written_to_the_output_folder_after_approval(folder: Path, tmp_path: Path) -> None:
    (write,) = [tool for tool in demo_tools(folder, tmp_path / "out") if tool.requires_approval]
    assert write.name == "write_report"
    assert write.function("report.md", "one\ntwo\n") == f"wrote 2 lines to {tmp_path / 'out' / 'report.md'}"
    assert (tmp_path / "out" / "report.md").read_text() == "one\ntwo\n"
    with pytest.raises(PermissionError):
        write.function("../report.md", "x")
    assert not (tmp_path / "report.md").exists()
