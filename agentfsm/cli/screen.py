"""Where the command line writes: results to stdout, all that is said about them to stderr; texts made safe."""

from __future__ import annotations

import os
import sys
import unicodedata
from dataclasses import dataclass
from typing import IO, Any

from rich.console import Console

__all__ = ["PLAIN_WIDTH", "Screen", "on_a_line", "open_screen", "safe", "short"]

PLAIN_WIDTH = 120
"""Columns where the output is no terminal and ``COLUMNS`` says nothing."""

_KEPT = "\n\t"
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def safe(text: str) -> str:
    """A text of a model or a tool as a terminal may show it.

    What would steer the terminal (escape sequences) or turn the order of what is read (bidirectional marks)
    is shown as its code; a lone surrogate, which no encoding takes, too.
    """
    return "".join(c if _harmless(c) else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _harmless(c: str) -> bool:
    return c in _KEPT or (c not in _BIDI and unicodedata.category(c) not in ("Cc", "Cs"))


def on_a_line(text: str) -> str:
    """A text safe to show, on one line, and otherwise as it is."""
    return safe(text).replace("\n", "\\n").replace("\t", "\\t")


def short(value: object, limit: int = 400) -> str:
    """A text on one line, safe to show, at most so many characters."""
    line = " ".join(safe(str(value)).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


@dataclass(frozen=True)
class Screen:
    """Where one command writes, and whether a person sits there.

    Attributes:
        out: Results.
        err: What is said about them: progress, tables, questions.
        person: Whether somebody can be asked: stdin and what ``err`` writes to are a terminal.
        live: Whether ``err`` can show something that moves.
    """

    out: Console
    err: Console
    person: bool
    live: bool


def open_screen(*, quiet: bool = False, together: bool = False) -> Screen:
    """The screen of this process.

    Args:
        quiet: Whether nothing is said beside results.
        together: Whether all of it goes to stdout, where what is said is the result.
    """
    out = _console(sys.stdout)
    err = out if together else _console(sys.stderr, quiet=quiet)
    tty = err.file.isatty()
    return Screen(
        out=out,
        err=err,
        person=sys.stdin.isatty() and tty,
        live=tty and not quiet and not err.is_dumb_terminal,
    )


def _console(stream: IO[str], *, quiet: bool = False) -> Console:
    reconfigure: Any = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")  # a terminal that cannot show an arrow shows a question mark
    wide = None if stream.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    return Console(file=stream, quiet=quiet, width=wide, markup=False, highlight=False, emoji=False)
