"""The table of the loop as the README shows it: ``python -m tests.readme_table`` writes it there anew."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from agentfsm import LOOP, Graph

README = Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- loop: written by `make diagrams`, compared by a test -->\n"
END = "<!-- /loop -->\n"


def table(graph: Graph) -> str:
    """A graph as a Markdown table; neighbouring rows with one destination share a line."""
    return "\n".join(_lines(graph)) + "\n"


def _lines(graph: Graph) -> Iterator[str]:
    yield "| in | what it does | if | go to |"
    yield "| --- | --- | --- | --- |"
    for spec in graph.states:
        head, note = f"**{spec.name}**", spec.note
        if spec.final:
            yield f"| {head} | {note} | | |"
        for target, rows in groupby(graph.rows(spec.name), lambda row: row.target):
            names = ", ".join("*otherwise*" if row.guard is None else f"`{row.name}`" for row in rows)
            yield f"| {head} | {note} | {names} | {target} |"
            head = note = ""


def parts(text: str) -> tuple[str, str, str]:
    """The README before the table, the table, and what stands behind it."""
    before, found, rest = text.partition(BEGIN)
    shown, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"{README} has lost its markers {BEGIN.strip()} and {END.strip()}")
    return before + found, shown, ended + after


def main() -> None:
    """Write the table into the README."""
    before, _, after = parts(README.read_text(encoding="utf-8"))
    README.write_text(before + table(LOOP) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
