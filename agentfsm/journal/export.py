"""A journal as JSON lines, each record exactly as it was hashed, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from agentfsm.errors import JournalError
from agentfsm.journal.records import Row

__all__ = ["export_lines", "read_line", "read_lines"]


def export_lines(rows: Iterable[Row]) -> Iterator[str]:
    """One line a record: ``{"hash":...,"hidden":[...],"record":...}``, where ``record`` is what was hashed."""
    for row in rows:
        yield f'{{"hash":"{row.hash}","hidden":{row.hidden or "[]"},"record":{row.body}}}\n'


def read_lines(lines: Iterable[str]) -> list[Row]:
    """The rows of an exported journal.

    Raises:
        JournalError: A line is none of an export.
    """
    return [read_line(number, line) for number, line in enumerate(lines, 1)]


def read_line(number: int, line: str) -> Row:
    """The row of one line of an exported journal.

    Args:
        number: The line's number, from 1.
        line: The line.

    Raises:
        JournalError: It is none of an export.
    """
    head, mark, rest = line.rstrip("\r\n").partition('","hidden":')
    hidden, mark2, body = _split(rest)
    if not (head.startswith('{"hash":"') and mark and mark2 and body.endswith("}}")):
        raise JournalError(f"line {number} is no line of an exported journal")
    return Row(number, body[:-1], head.removeprefix('{"hash":"'), "" if hidden == "[]" else hidden)


def _split(text: str) -> tuple[str, str, str]:
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return "", "", ""
    mark = ',"record":'
    return (text[:end], mark, text[end + len(mark) :]) if text.startswith(mark, end) else ("", "", "")
