"""Bars as an SVG picture, for figures that the documentation shows."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, BAR, LEFT, RIGHT, TOP = 720, 22, 150, 90, 58
BLUE, RED, GREY = "#3b6ea5", "#b3261e", "#5f6368"


def bar_plot(
    title: str,
    bars: Sequence[tuple[str, float]],
    unit: str,
    *,
    subtitle: str = "",
    bound: tuple[str, float] | None = None,
) -> str:
    """Horizontal bars from 0, each with its value.

    Args:
        title: What is shown.
        bars: Label and value of each.
        unit: The unit of the values.
        subtitle: How it was measured.
        bound: What must hold, and the value that is drawn as a line; None for no line.
    """
    most = max([value for _, value in bars] + [bound[1] if bound else 0.0]) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / most
    height = TOP + BAR * len(bars) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' font-family="sans-serif" font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="12" y="41" fill="{GREY}">{escape(subtitle)}</text>',
    ]
    for place, (label, value) in enumerate(bars):
        y = TOP + place * BAR
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LEFT}" y="{y + 2}" width="{value * scale:.1f}" height="{BAR - 6}" fill="{BLUE}"/>',
            f'<text x="{LEFT + value * scale + 6:.1f}" y="{y + 14}">{_readable(value)} {escape(unit)}</text>',
        ]
    if bound is not None:
        x, bottom = LEFT + bound[1] * scale, TOP + BAR * len(bars)
        lines += [
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{bottom + 6}" stroke="{RED}" stroke-dasharray="4 3"/>',
            f'<text x="{x:.1f}" y="{bottom + 22}" text-anchor="middle" fill="{RED}">{escape(bound[0])}</text>',
        ]
    return "\n".join([*lines, "</svg>\n"])


def _readable(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
