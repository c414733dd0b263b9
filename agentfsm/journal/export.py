"""A journal as JSON lines, each record exactly as it was hashed, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from agentfsm.errors import JournalError
from agentfsm.journal.records import Row

__all__ = ["export_lines", "read_lines"]


def export_lines(rows: Iterable[Row]) -> Iterator[str]:
    """One line a record: ``{"hash":...,"hidden":[...],"record":...}``, where ``record`` is what was hashed."""
    for row in rows:
        yield f'{{"hash":"{row.hash}","hidden":{row.hidden or "[]"},"record":{row.body}}}\n'


def read_lines(lines: Iterable[str]) -> list[Row]:
    """The rows of an exported journal.

    Raises:
        JournalError: A line is none of an export.
    """
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        head, mark, rest = text.partition('","hidden":')
        hidden, mark2, body = _split(rest)
        if not (head.startswith('{"hash":"') and mark and mark2 and body.endswith("}}")):
            raise JournalError(f"line {number} is no line of an exported journal")
        rows.append(Row(number, body[:-1], head.removeprefix('{"hash":"'), "" if hidden == "[]" else hidden))
    return rows


def _split(text: str) -> tuple[str, str, str]:
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return "", "", ""
    mark = ',"record":'
    return (text[:end], mark, text[end + len(mark) :]) if text.startswith(mark, end) else ("", "", "")
