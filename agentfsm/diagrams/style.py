"""Colours by meaning in a light and a dark theme, and line widths and dashes that work without colour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentfsm.diagrams.view import RowKind

__all__ = ["DARK", "LIGHT", "LINE_DASHES", "LINE_WIDTHS", "Palette", "Theme", "palette_for"]

Theme = Literal["auto", "light", "dark"]
"""``auto`` follows the reader's own setting where the form can, and is light where it cannot."""


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours of one theme.

    Attributes:
        ink: Text.
        grey: Text that says less: numbers, notes.
        dim: Text that stands back.
        faint: Lines that stand back.
        paper: The page.
        box: The inside of a box.
        line: For each meaning, the colour of its lines and words.
        tint: For each meaning, the colour of the head of its boxes.
        never: Behind rows that were never taken, or are gone.
        added: Behind rows that are new.
        changed: Behind rows that have moved or lead elsewhere.
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


LIGHT = Palette(
    ink="#1f2328",
    grey="#59636e",
    dim="#9ba3ab",
    faint="#c8d1da",
    paper="#ffffff",
    box="#ffffff",
    line={"happy": "#1a7f37", "recover": "#9a6700", "wait": "#0969da", "done": "#1a7f37", "stop": "#cf222e"},
    tint={"happy": "#dafbe1", "recover": "#fff8c5", "wait": "#ddf4ff", "done": "#dafbe1", "stop": "#ffebe9"},
    never="#ffebe9",
    added="#dafbe1",
    changed="#fff8c5",
)
DARK = Palette(
    ink="#e6edf3",
    grey="#9198a1",
    dim="#5d646d",
    faint="#3d444d",
    paper="#0d1117",
    box="#151b23",
    line={"happy": "#3fb950", "recover": "#d29922", "wait": "#4493f8", "done": "#3fb950", "stop": "#f85149"},
    tint={"happy": "#12261e", "recover": "#272115", "wait": "#121d2f", "done": "#12261e", "stop": "#25171c"},
    never="#3c1618",
    added="#12361f",
    changed="#3a2d0e",
)
LINE_WIDTHS: dict[RowKind, float] = {"happy": 2.4, "recover": 1.5, "wait": 1.7, "done": 1.8, "stop": 1.4}
"""Pixels."""

LINE_DASHES: dict[RowKind, str] = {"wait": "2.5 2.5", "done": "7 4"}
"""Pixels of line and of gap; a meaning without an entry is drawn in one stroke."""


def palette_for(theme: Theme) -> Palette:
    """The colours for a form that shows one theme only: ``auto`` is light."""
    return DARK if theme == "dark" else LIGHT
