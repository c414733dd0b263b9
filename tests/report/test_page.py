"""A report is one page that needs no network, shows what happened, and says whether the journals are intact."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import html5lib
import pytest

from agentfsm.journal.memory_store import MemoryStore
from agentfsm.journal.verification import TAMPERED, VerificationReport, verify
from agentfsm.loop.keys import Keyring
from agentfsm.report.page import DecisionFilter, find_decisions, period_page, run_page
from agentfsm.report.reported_run import Findings, ReportedRun
from tests.helpers.browser import open_page
from tests.helpers.hostile_runs import run_full_of
from tests.helpers.hostile_texts import HOSTILE_TEXTS
from tests.helpers.journal_scenarios import finished_run, waiting_run
from tests.helpers.long_runs import long_run
from tests.helpers.npm_servers import install_package

SECRET = b"of the tests"
FINDINGS = Findings("runs.db", Keyring(SECRET).key_ids, "", ("without a checkpoint: whether records were cut off",))


def reported(store: Any, run_id: str) -> ReportedRun:
    records = tuple(asyncio.run(store.records(run_id)))
    return ReportedRun(run_id, records, verify(run_id, records, asyncio.run(store.head(run_id)), None, Keyring(SECRET)))


@pytest.fixture(scope="module")
def whole() -> ReportedRun:
    store, _ = finished_run(MemoryStore(), "whole", secret=SECRET)
    return reported(store, "whole")


def parsed(page: str) -> Any:
    return html5lib.parse(page, namespaceHTMLElements=False)


def text_of(element: Any) -> str:
    return " ".join(" ".join(element.itertext()).split())


def section(root: Any, title: str) -> str:
    """The text of the section with a heading."""
    return next(
        text_of(s) for s in root.iter("section") if any(text_of(h) == title for h in (*s.iter("h2"), *s.iter("h3")))
    )


def test_a_report_says_what_was_asked_how_it_ended_who_allowed_what_and_what_was_checked(whole: ReportedRun) -> None:
    root = parsed(run_page([whole], FINDINGS, 0))
    facts = dict(zip((text_of(e) for e in root.iter("dt")), (text_of(e) for e in root.iter("dd")), strict=True))
    assert facts["Asked"] == "Do it all."
    assert facts["Ended"] == "completed"
    assert facts["Answer"] == "all done"
    assert facts["Result"] == facts["Verification"] == "intact"
    assert facts["Last hash"] == whole.sealed[-1].hash
    assert facts["Sealed under"] == f"key {Keyring(SECRET).key_ids[0]}"
    assert facts["Checkpoint"] == "none was given"
    allowed = section(root, "Who allowed what")
    assert "edit" in allowed
    assert '{"amount": 2.0, "to": "Bob"}' in allowed
    assert '{"amount": 1.0, "to": "Ann"}' in allowed
    assert "done: paid 2.0 to Bob" in allowed
    assert "transient_provider busy retry, after 2 s" in section(root, "Failures")
    assert "without a checkpoint" in section(root, "How this was checked")
    assert "intact Not everything was checked ." in text_of(root)
    assert "Not everything" not in run_page([whole], Findings("runs.db"), 0)
    assert "verify_journal.py run.jsonl" in section(root, "How this was checked")
    assert "43a019295c44626c1ceebc8c070fcf173047dc8fbe2115bc7efb82ba961d46fc" in section(root, "Graph")
    (ledger,) = (t for t in root.iter("table") if t.attrib.get("class") == "ledger")
    rows = [[text_of(cell) for cell in row.iter("td")] for row in ledger.iter("tr")][1:]
    assert len(rows) == 29
    assert rows[7][7] == "recovered action retry, after 2 s left steps 797 took 2.0 s"
    assert rows[6][3:7] == ["call_llm", "transient_provider", "recover", "cancelled, aborted"]


def test_a_report_can_be_read_by_machines_for_people(whole: ReportedRun) -> None:
    root = parsed(run_page([whole, whole], FINDINGS, 0))
    assert root.attrib["lang"] == "en"
    levels = [int(e.tag[1]) for e in root.iter() if re.fullmatch("h[1-6]", str(e.tag))]
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    for table in root.iter("table"):
        assert table.find("caption") is not None
        assert all(head.attrib["scope"] == "col" for head in table.iter("th"))
    pictures = [e for e in root.iter() if str(e.tag).endswith("svg")]
    assert all(e.attrib["role"] == "img" and e.attrib["aria-label"] for e in pictures)
    ids = [e.attrib["id"] for e in root.iter() if "id" in e.attrib]
    assert len(ids) == len(set(ids))


def test_nothing_in_a_report_may_load_anything_and_only_our_style_and_script_run(whole: ReportedRun) -> None:
    page = run_page([whole], FINDINGS, 0)
    root = parsed(page)
    (policy,) = (m.attrib["content"] for m in root.iter("meta") if m.attrib.get("http-equiv"))
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        texts = [e.text for e in root.iter() if str(e.tag).rpartition("}")[2] == tag]
        sources = {f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in texts}
        assert set(rules[rule].split()) == sources
    for element in root.iter():
        assert not {"src", "style", "onclick", "action"} & set(element.attrib)
        assert element.attrib.get("href", "#").startswith("#")


def test_a_report_says_tampered_where_one_run_or_the_store_is(whole: ReportedRun) -> None:
    broken = ReportedRun("cut", whole.sealed[:9], VerificationReport("cut", TAMPERED, 9, 4, "its hash does not match"))
    page = run_page([whole, broken], FINDINGS, 0)
    first = next(parsed(page).iter("strong"))
    assert (first.attrib["class"], first.text) == ("verdict bad", "tampered")
    assert "record 4: its hash does not match" in page
    assert "<title>Report on 2 runs: tampered</title>" in page
    trigger = VerificationReport("(schema)", TAMPERED, 0, None, "a trigger is missing")
    page = run_page([whole], Findings("runs.db", (), "", (), (trigger,)), 0)
    assert next(parsed(page).iter("strong")).text == "tampered"
    assert "a trigger is missing" in section(parsed(page), "How this was checked")


def test_a_report_of_a_run_without_records_is_a_page(whole: ReportedRun) -> None:
    gone = ReportedRun("gone", (), VerificationReport("gone", TAMPERED, 0, None, "its journal is missing"))
    assert "its journal is missing" in run_page([gone], FINDINGS, 0)
    assert "0 decisions in 0 of 1 runs" in period_page([gone], DecisionFilter("pay"), FINDINGS, 0)


def test_a_report_over_a_period_has_the_decisions_about_a_tool_from_one_time_to_before_another(
    whole: ReportedRun,
) -> None:
    (found,) = find_decisions([whole], DecisionFilter("pay"))
    at = found.decision.time
    assert len(find_decisions([whole], DecisionFilter("pay", at, at + 1))) == 1
    assert find_decisions([whole], DecisionFilter("pay", at + 1)) == []
    assert find_decisions([whole], DecisionFilter("pay", None, at)) == []
    assert find_decisions([whole], DecisionFilter("look")) == []
    store, _ = waiting_run(MemoryStore(), "waits")
    cut = ReportedRun("cut", whole.sealed[:9], VerificationReport("cut", TAMPERED, 9, 4, "its hash does not match"))
    page = period_page([whole, reported(store, "waits"), cut], DecisionFilter("pay"), FINDINGS, 0)
    root = parsed(page)
    assert "1 decision in 1 of 3 runs." in text_of(root)
    assert "whole 37" in section(root, "Decisions")
    assert "waits" not in section(root, "Verification")
    assert "cut tampered its hash does not match" in section(root, "Verification")


@pytest.mark.slow
def test_a_report_of_a_thousand_steps_is_under_three_megabytes() -> None:
    page = run_page([reported(long_run(1_000), "long")], FINDINGS, 0)
    assert page.count('<tr id="r1m') == 4_998
    assert len(page.encode()) < 3_000_000


# -- in a browser ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hostile_texts_run_nothing_load_nothing_and_break_no_layout(tmp_path: Path) -> None:
    runs = [asyncio.run(run_full_of(text)) for text in HOSTILE_TEXTS[::30]]
    every = asyncio.run(run_full_of("\n".join(HOSTILE_TEXTS)))
    file = tmp_path / "report.html"
    file.write_text(run_page([*runs, every], FINDINGS, 0), encoding="utf-8")
    with open_page(file, width=1200, dark=True) as (page, events):
        page.keyboard.press("Tab")
        assert page.evaluate("window.attacked") is None
        for width in (1200, 400):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.querySelectorAll('article').length") == len(runs) + 1
        assert page.evaluate("getComputedStyle(document.querySelector('h1')).display") == "block"
        outside = "[...document.querySelectorAll('.said')].filter((e) => e.getBoundingClientRect().left < -1).length"
        assert page.evaluate(outside) == 0
        assert events == []


@pytest.mark.slow
def test_the_arrow_keys_step_through_a_run_in_picture_and_ledger(tmp_path: Path, whole: ReportedRun) -> None:
    file = tmp_path / "report.html"
    file.write_text(run_page([whole], FINDINGS, 0), encoding="utf-8")
    with open_page(file) as (page, events):
        page.focus("input[type=range]")
        for _ in range(7):
            page.keyboard.press("ArrowRight")
        assert page.inner_text("output") == "move 7 of 29: call_llm.transient_provider to recover"
        assert page.get_attribute("tr.now", "id") == "r1m7"
        assert (
            page.eval_on_selector_all("svg g.now", "all => all.map((e) => e.dataset.edge)")
            == ["call_llm.transient_provider"] * 2
        )
        page.keyboard.press("ArrowLeft")
        assert page.get_attribute("tr.now", "id") == "r1m6"
        assert events == []


@pytest.mark.slow
def test_a_report_needs_no_script_to_be_read(tmp_path: Path, whole: ReportedRun) -> None:
    file = tmp_path / "report.html"
    file.write_text(run_page([whole], FINDINGS, 0), encoding="utf-8")
    with open_page(file, script=False) as (page, events):
        assert page.is_visible("figure.wide svg")
        assert page.is_hidden("figure.narrow svg")
        assert page.locator("table.ledger tbody tr").count() == 29
        assert page.locator(".steps").count() == 0
        assert events == []


@pytest.mark.slow
def test_axe_finds_no_fault_in_light_dark_and_on_a_phone(tmp_path: Path, whole: ReportedRun) -> None:
    axe = install_package("axe-core", "4.14.1", "axe.min.js").read_text("utf-8")
    file = tmp_path / "report.html"
    file.write_text(run_page([whole], FINDINGS, 0), encoding="utf-8")
    with open_page(file, bypass_csp=True) as (page, _):
        page.evaluate(axe)
        for width, scheme in ((1200, "light"), (400, "dark")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            faults = page.evaluate("axe.run(document).then((found) => found.violations.map((v) => [v.id, v.impact]))")
            assert faults == []
        page.evaluate("document.documentElement.removeAttribute('lang')")
        found = page.evaluate("axe.run(document).then((found) => found.violations.map((v) => v.id))")
        assert found == ["html-has-lang"]
