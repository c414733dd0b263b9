"""The terminal: results on stdout, everything else on stderr, and text from models and tools made safe to show."""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Any, cast

from rich.console import Console

DEFAULT_WIDTH = 120
"""Columns if the output is not a terminal and ``COLUMNS`` is not set."""

_ALLOWED_CONTROLS = "\n\t"
_JOINERS = "\u200c\u200d"  # without which some scripts and pictographs cannot be written
_HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")


def sanitize(text: str) -> str:
    """Text of a model or a tool, safe to print on a terminal.

    Control characters (escape sequences), bidirectional marks (they reorder what is read), other characters that are
    not seen, and lone surrogates (they cannot be encoded) are shown as their codes.
    """
    return "".join(c if _is_safe(c) else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _is_safe(c: str) -> bool:
    return c in _ALLOWED_CONTROLS or c in _JOINERS or unicodedata.category(c) not in _HIDDEN_CATEGORIES


def single_line(text: str) -> str:
    """A text safe to print, on one line; line breaks and tabs are shown as their codes."""
    return sanitize(text).replace("\n", "\\n").replace("\t", "\\t")


def shorten(value: object, limit: int = 400) -> str:
    """A text on one line, safe to print, of at most ``limit`` characters."""
    line = " ".join(sanitize(str(value)).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def utc(seconds: float) -> str:
    """A time in seconds since the epoch, in UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"


def plural(number: int, word: str) -> str:
    """A number of things."""
    return f"{number} {word if number == 1 else word[:-1] + 'ies' if word.endswith('y') else word + 's'}"


def parse_json_object(text: str) -> dict[str, Any]:
    """The JSON object that a text holds.

    Raises:
        ValueError: The text is not valid JSON, or not an object; the message starts with "not".
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return cast("dict[str, Any]", value)


@dataclass(frozen=True)
class CliConsole:
    """Where one command writes, and whether it can ask the user.

    Attributes:
        out: Results.
        err: Everything else: progress, tables, questions.
        interactive: Whether the user can be asked: stdin and the stream of ``err`` are terminals.
        live: Whether ``err`` can show a spinner.
    """

    out: Console
    err: Console
    interactive: bool
    live: bool


def open_console(*, quiet: bool = False, stdout_only: bool = False) -> CliConsole:
    """The console of this process.

    Args:
        quiet: Whether to print results only.
        stdout_only: Whether to print everything on stdout, for a command whose progress is its result.
    """
    out = _make_console(sys.stdout)
    err = out if stdout_only else _make_console(sys.stderr, quiet=quiet)
    tty = err.file.isatty()
    return CliConsole(
        out=out,
        err=err,
        interactive=sys.stdin.isatty() and tty,
        live=tty and not quiet and not err.is_dumb_terminal,
    )


def _make_console(stream: IO[str], *, quiet: bool = False) -> Console:
    reconfigure: Any = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")  # a terminal that cannot show an arrow shows a question mark
    width = None if stream.isatty() or "COLUMNS" in os.environ else DEFAULT_WIDTH
    return Console(file=stream, quiet=quiet, width=width, markup=False, highlight=False, emoji=False)
