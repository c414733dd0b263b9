"""The coverage of a graph shows itself: its shares, and the picture."""

from __future__ import annotations

import re
from typing import Any

from agentfsm.loop.transition_table import LOOP
from agentfsm.machine.engine import Decision
from agentfsm.testing.coverage import CoverageCounts, coverage_by_criterion, lcov, row_lines


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


def test_a_guard_of_a_row_that_was_taken_is_a_branch_with_two_outcomes_and_any_other_one_was_not_evaluated() -> None:
    """genhtml 2 refuses a line that was not hit and of which a branch was evaluated, and the reverse."""
    counts = CoverageCounts()
    taken, last = LOOP.transition("post_llm.tool_calls"), LOOP.transition("post_llm.otherwise")
    counts.record("one", Decision(taken, (("no_progress", False), ("tool_calls", True)), None))
    counts.record("other", Decision(last, (("no_progress", False), ("tool_calls", False)), None))
    text, lines = lcov(LOOP, counts), row_lines(LOOP)
    branches = {(int(line), n): count for line, n, count in re.findall(r"^BRDA:(\d+),0,(\d),(.+)$", text, re.M)}
    assert [branches[lines[taken.id][1], n] for n in "01"] == ["1", "1"]
    assert [branches[lines["post_llm.no_progress"][1], n] for n in "01"] == ["-", "-"]
    hit = {int(line) for line in re.findall(r"^DA:(\d+),[^0]", text, re.M)}
    assert {line for (line, _), count in branches.items() if count != "-"} == hit - {lines[last.id][1]}
