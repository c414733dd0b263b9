"""The coverage of a graph shows itself: its shares, and the picture."""

from __future__ import annotations

from typing import Any

from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.engine import Decision
from agentfsm.testing.coverage import CoverageCounts, coverage_by_criterion


def counted(*rows: str) -> CoverageCounts:
    counts = CoverageCounts()
    for row in rows:
        transition = LOOP.transition(row)
        counts.record("run", Decision(transition, ((transition.name, True),), None))
    return counts


def test_coverage_shows_its_shares_and_its_picture() -> None:
    found: Any = coverage_by_criterion(LOOP, counted("pre_step.otherwise", "call_llm.otherwise"), "transitions")
    rows, both = found
    assert (rows.what, rows.covered, both.what) == ("transitions", 2, "guards both ways")
    shown = found._repr_html_()
    assert f"<tr><td>transitions<td>2 of {rows.of}<td>{200 / rows.of:.1f} %" in shown
    assert f"coverage: 2 of {rows.of} transitions taken" in shown
    assert shown.count("<svg") == 1
    text = found._repr_markdown_()
    assert f"| transitions | 2 of {rows.of} | {200 / rows.of:.1f} % |" in text
    assert "```mermaid\nflowchart TD\n" in text
    assert found.diagram("text").count("never") >= rows.of - 2
