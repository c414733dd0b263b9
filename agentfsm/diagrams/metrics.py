"""How wide a text is, without a font at hand: a table that is never too narrow for the fonts we ask for."""

from __future__ import annotations

import math
from functools import lru_cache

__all__ = ["FONT", "fit", "width", "wrap"]

FONT = "Inter, Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
"""The fonts that pictures ask for, best first."""

# Advance widths of the ASCII characters from the space on, in hundredths of the font size: for each the
# widest of Inter, Liberation Sans (the widths of Helvetica and Arial) and DejaVu Sans.
_ASCII = (
    32, 41, 46, 84, 64, 95, 78, 28, 39, 39, 50, 84, 32, 46, 32, 36, 64, 64, 64, 64, 65, 64, 64, 64, 64, 64, 34, 34,
    84, 84, 84, 56, 102, 69, 69, 73, 77, 67, 62, 78, 76, 30, 55, 67, 57, 89, 76, 79, 67, 79, 73, 67, 65, 75, 69, 100,
    69, 67, 69, 39, 36, 39, 84, 56, 50, 62, 64, 56, 64, 62, 37, 64, 64, 28, 28, 58, 28, 98, 64, 62, 64, 64, 42, 53,
    40, 64, 60, 82, 60, 60, 55, 64, 34, 64, 84,
)  # fmt: skip
_OTHER = 100  # an arrow, a letter with a mark: no wider than the font's size
_WIDE = 110  # East Asian letters and pictographs
_BOLD = 1.14  # the widest ratio of bold to regular among the three


@lru_cache(maxsize=4096)
def width(text: str, size: float, *, bold: bool = False) -> int:
    """How much room a text needs.

    Args:
        text: One line of text.
        size: The font's size, in pixels.
        bold: Whether it is set in bold.

    Returns:
        A width in whole pixels that the text does not pass in any of the fonts of ``FONT``.
    """
    total = sum(_advance(ord(char)) for char in text)
    return math.ceil(total * size * (_BOLD if bold else 1) / 100)


def _advance(code: int) -> int:
    if 32 <= code < 127:
        return _ASCII[code - 32]
    return _OTHER if code < 0x1100 or 0x2000 <= code < 0x2600 else _WIDE


def fit(text: str, size: float, room: int) -> str:
    """The text, cut with an ellipsis where it would be wider than ``room`` pixels."""
    if width(text, size) <= room:
        return text
    while text and width(text + "…", size) > room:
        text = text[:-1]
    return text.rstrip() + "…"


def wrap(words: list[str], size: float, room: int) -> list[str]:
    """Words set in lines no wider than ``room`` pixels (or one word, where it alone is wider)."""
    lines: list[str] = []
    for word in words:
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and width(longer, size) <= room:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
