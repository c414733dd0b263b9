"""What the formats share: colors in a light and a dark theme, line styles, and XML escaping.

Line widths and dashes tell the kinds of lines apart without color.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from agentfsm.diagrams.view import RowKind, RowMark

Theme = Literal["auto", "light", "dark"]
"""``auto`` follows the reader's setting where the format can, and is light where it cannot."""


@dataclass(frozen=True, slots=True)
class Palette:
    """The colors of one theme.

    Attributes:
        ink: Text.
        grey: Secondary text: numbers, notes.
        dim: Text that is greyed out; still readable, at least 4.5:1 on every background.
        faint: Lines that are greyed out.
        paper: The page.
        box: The inside of a box.
        line: For each kind, the color of its lines and words.
        tint: For each kind, the color of the head of its boxes.
        never: The background of rows that were never taken, or are removed.
        added: The background of rows that are new.
        changed: The background of rows that have moved or have another target.
    """

    ink: str
    grey: str
    dim: str
    faint: str
    paper: str
    box: str
    line: dict[RowKind, str]
    tint: dict[RowKind, str]
    never: str
    added: str
    changed: str

    def mark_color(self, mark: RowMark) -> str:
        """The background of rows with a mark."""
        return {"added": self.added, "never": self.never, "removed": self.never}.get(mark, self.changed)


LIGHT = Palette(
    ink="#1f2328",
    grey="#59636e",
    dim="#636c75",
    faint="#c8d1da",
    paper="#ffffff",
    box="#ffffff",
    line={
        "happy": "#1a7f37",
        "recover": "#9a6700",
        "wait": "#0969da",
        "resume": "#8250df",
        "done": "#1a7f37",
        "stop": "#cf222e",
    },
    tint={
        "happy": "#dafbe1",
        "recover": "#fff8c5",
        "wait": "#ddf4ff",
        "resume": "#fbefff",
        "done": "#dafbe1",
        "stop": "#ffebe9",
    },
    never="#fff5f4",
    added="#e6fced",
    changed="#fff8c5",
)
DARK = Palette(
    ink="#e6edf3",
    grey="#9198a1",
    dim="#868e97",
    faint="#3d444d",
    paper="#0d1117",
    box="#151b23",
    line={
        "happy": "#3fb950",
        "recover": "#d29922",
        "wait": "#4493f8",
        "resume": "#b083f0",
        "done": "#3fb950",
        "stop": "#f85149",
    },
    tint={
        "happy": "#12261e",
        "recover": "#272115",
        "wait": "#121d2f",
        "resume": "#1e1829",
        "done": "#12261e",
        "stop": "#25171c",
    },
    never="#3c1618",
    added="#0e2a18",
    changed="#2f240b",
)
LINE_WIDTHS: dict[RowKind, float] = {"happy": 2.4, "recover": 1.5, "wait": 1.7, "resume": 1.5, "done": 1.8, "stop": 1.4}
"""Pixels."""

LINE_DASHES: dict[RowKind, str] = {"wait": "2.5 2.5", "resume": "8 3 2 3", "done": "7 4"}
"""Pixels of dash and gap; a kind without an entry is solid."""


def palette_for(theme: Theme) -> Palette:
    """The colors for a format that shows one theme only: ``auto`` is light."""
    return DARK if theme == "dark" else LIGHT


_INVALID_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape_xml(text: str) -> str:
    """Text for an XML element or attribute; characters that XML does not allow become U+FFFD."""
    text = _INVALID_XML.sub("\ufffd", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
