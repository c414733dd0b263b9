"""The demo's tools: they really list, count, search and read files of one folder, and write one report."""

from __future__ import annotations

from pathlib import Path

from agentfsm.runtime.tools import Tool, tool

__all__ = ["workshop"]

_MOST = 50
"""How many places a search gives back."""


def workshop(folder: Path, out: Path) -> list[Tool]:
    """Tools that read in one folder and write in another, and nowhere else.

    Args:
        folder: What may be read.
        out: Where ``write_report`` writes; it is made when that runs.
    """

    def inside(root: Path, path: str) -> Path:
        found = (root / path).resolve()
        if not found.is_relative_to(root.resolve()):
            raise PermissionError(f"{path} lies outside the folder")
        return found

    def lines_of(path: str) -> list[str]:
        return inside(folder, path).read_text(encoding="utf-8", errors="replace").splitlines()

    @tool(idempotent=True, parallel=True)
    def list_files(pattern: str) -> list[str]:
        """The files whose path fits a pattern, sorted.

        Args:
            pattern: Such as "**/*.py".
        """
        root = folder.resolve()
        return sorted(
            found.relative_to(root).as_posix()
            for found in root.glob(pattern)
            if found.is_file() and not any(part.startswith(".") for part in found.relative_to(root).parts)
        )

    @tool(idempotent=True, parallel=True)
    def count_lines(paths: list[str]) -> dict[str, int]:
        """How many lines each file has.

        Args:
            paths: Files, as list_files gives them.
        """
        return {path: len(lines_of(path)) for path in paths}

    @tool(idempotent=True, parallel=True)
    def search_text(text: str, pattern: str) -> list[str]:
        """Where a text stands, as "path:line"; the first 50 places.

        Args:
            text: What to look for.
            pattern: In which files, such as "**/*.py".
        """
        places = [
            f"{path}:{number}"
            for path in list_files(pattern)
            for number, line in enumerate(lines_of(path), 1)
            if text in line
        ]
        return places[:_MOST]

    @tool(idempotent=True, parallel=True)
    def read_file(path: str, first: int = 1, last: int = 40) -> str:
        """Some lines of a file.

        Args:
            path: The file, as list_files gives it.
            first: The first line, from 1.
            last: The last line.
        """
        return "\n".join(lines_of(path)[max(first, 1) - 1 : last])

    @tool(requires_approval=True)
    def write_report(name: str, text: str) -> str:
        """Write the report; a person is asked first.

        Args:
            name: Its file name, such as "report.md".
            text: All of it, Markdown.
        """
        target = inside(out, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        return f"wrote {len(text.splitlines())} lines to {target}"

    return [list_files, count_lines, search_text, read_file, write_report]
