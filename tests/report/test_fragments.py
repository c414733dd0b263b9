"""Each part of a report shows what the journal has, and hostile text in any field is text."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import html5lib
import pytest

from agentfsm.journal.verification import TAMPERED, VerificationReport
from agentfsm.report.fragments import (
    costs_html,
    decisions_html,
    failures_html,
    graph_html,
    how_to_verify_html,
    ledger_html,
    picture_html,
    summary_html,
    transcript_html,
    verification_html,
)
from agentfsm.report.ledger import read_ledger
from agentfsm.report.reported_run import Findings
from agentfsm.report.visible_text import visible
from tests.helpers.hostile_runs import run_full_of
from tests.helpers.hostile_texts import HOSTILE_TEXTS

Skeleton = list[tuple[str, tuple[str, ...]]]


def fragments(text: str, *, redacted: bool = False) -> str:
    """Every fragment about a run full of a text, without its picture."""
    run = asyncio.run(run_full_of(text, redacted=redacted))
    ledger = read_ledger(run.run_id, run.sealed)
    broken = VerificationReport(text, TAMPERED, 1, 1, text)
    findings = Findings(text, ("00",), text, (text,), (broken,))
    suspect = replace(run, run_id=text, verification=replace(broken, open=(text,), doubt=text, claimed=(text,)))
    named = replace(
        ledger, caller=text, forked_from=text, redactions=(text, *ledger.redactions), problems=(text,), waiting_for=text
    )
    assert ledger.problems == ()
    return "".join(
        [
            summary_html(named, "tampered"),
            decisions_html(ledger.decisions),
            ledger_html(ledger.moves, "r1"),
            transcript_html(ledger.transcript),
            failures_html(ledger.failures),
            costs_html(ledger.costs),
            graph_html(ledger),
            verification_html(suspect, named, findings),
            how_to_verify_html([suspect], findings),
        ]
    )


def parsed(fragment: str) -> Any:
    parser = html5lib.HTMLParser(tree=html5lib.getTreeBuilder("etree"), namespaceHTMLElements=False)
    return parser.parseFragment(fragment)


def skeleton(root: Any) -> Skeleton:
    """The elements in order with the names of their attributes; ids, classes and roles with their values."""
    fixed = {"id", "class", "role", "scope", "tabindex", "dir", "aria-label"}
    return [
        (each.tag, tuple(f"{name}={value}" if name in fixed else name for name, value in sorted(each.attrib.items())))
        for each in root.iter()
        if isinstance(each.tag, str)
    ]


PLAIN = skeleton(parsed(fragments("plain")))


def test_the_plain_run_has_every_kind_of_field() -> None:
    run = asyncio.run(run_full_of("plain"))
    ledger = read_ledger(run.run_id, run.sealed)
    assert [each.answer for each in ledger.decisions] == ["deny", "allow", "text"]
    assert {each.kind for each in ledger.failures} >= {"transient_provider", "tool_error", "unknown_tool"}
    assert {each.role for each in ledger.transcript} >= {"user", "assistant", "tool", "person"}
    assert fragments("plain").count("plain") > 60


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE_TEXTS, ids=range(len(HOSTILE_TEXTS)))
def test_hostile_text_adds_no_element_and_no_attribute(text: str) -> None:
    root = parsed(fragments(text))
    assert skeleton(root) == PLAIN
    said = "".join(each.text or "" for each in root.iter("pre"))
    assert said.count(visible(text).strip("\n")[:200]) >= 10
    assert not any(name.startswith("on") for each in root.iter() for name in each.attrib)


def test_who_requested_a_redaction_is_text_and_what_was_redacted_is_gone() -> None:
    text = "<b>the secret of Ann</b>"
    shown = fragments(text, redacted=True)
    run = asyncio.run(run_full_of(text, redacted=True))
    ledger = read_ledger(run.run_id, run.sealed)
    assert ledger.asked == "(redacted)"
    assert (ledger.transcript[0].role, ledger.transcript[0].text) == ("user", "(redacted)")
    assert ledger.redactions == (f"record 1, 1.messages, requested by {text}",)
    assert "<b>the" not in shown


def test_a_picture_has_the_path_for_wide_and_narrow_screens_and_a_description() -> None:
    run = asyncio.run(run_full_of("plain"))
    root = parsed(picture_html(read_ledger(run.run_id, run.sealed)))
    pictures = [each for each in root.iter() if str(each.tag).rpartition("}")[2] == "svg"]
    assert len(pictures) == 2
    assert all("a run of 40 transitions, now in terminal" in each.attrib["aria-label"] for each in pictures)
    assert int(pictures[1].attrib["width"]) < 500 < int(pictures[0].attrib["width"])


def test_a_journal_without_a_graph_says_so() -> None:
    ledger = read_ledger("nobody", [])
    assert "cannot be drawn" in picture_html(ledger)
    assert "does not pin a graph" in graph_html(ledger)
    assert "There is no message" in transcript_html(ledger.transcript)
