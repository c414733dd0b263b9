"""Text of models, tools, users and servers, made safe to show: nothing in it is markup, hidden or reorders a line."""

from __future__ import annotations

import html
import re
import unicodedata
from datetime import UTC, datetime

_SUSPICIOUS = re.compile(r"[^\t\n\x20-\x7e]")
_KEPT = frozenset("\u200c\u200d")  # joiners, without which some scripts and pictographs cannot be written
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_MAX_COMBINING = 4
"""Combining characters on one letter; more are shown as their codes, because they paint over other lines."""


def visible(text: str) -> str:
    """A text in which every character that is not seen, or changes how others are seen, is replaced by its code.

    Those are control characters (escape sequences), marks for writing direction, lone surrogates, characters without
    a width or a meaning, and piles of combining characters.
    """
    if _SUSPICIOUS.search(text) is None:
        return text
    shown: list[str] = []
    pile = 0
    for char in text:
        category = unicodedata.category(char) if char > "~" or char < " " else "L"
        pile = pile + 1 if category in ("Mn", "Me") else 0
        hidden = category in _HIDDEN_CATEGORIES and char not in _KEPT and char not in "\t\n"
        shown.append(
            f"\N{MATHEMATICAL LEFT ANGLE BRACKET}U+{ord(char):04X}\N{MATHEMATICAL RIGHT ANGLE BRACKET}"
            if hidden or pile > _MAX_COMBINING
            else char
        )
    return "".join(shown)


def clip(text: str, limit: int) -> str:
    """The start of a text, on one line, with an ellipsis if there is more."""
    line = " ".join(text[: limit * 4].split())
    return line if len(line) <= limit and len(text) <= limit * 4 else line[: limit - 1] + "…"


def escape(text: str) -> str:
    """A text for an HTML element or attribute: nothing in it is markup."""
    return html.escape(visible(text))


def code_span(text: str) -> str:
    """A text as a Markdown code span, in which nothing is markup, a link or a mention; empty for an empty text."""
    line = " ".join(visible(text).split())
    if not line:
        return ""
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    pad = " " if line[0] == "`" or line[-1] == "`" else ""
    return f"{fence}{pad}{line}{pad}{fence}".replace("|", "\\|")


def format_time(seconds: float) -> str:
    """A time in UTC, to the second; what no clock shows is shown as a number."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, OSError, ValueError):
        return f"{seconds:g} s"
