"""A report as Markdown fits a comment on a pull request, and nothing in it is markup of somebody else's."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from functools import cache

import pytest

from agentfsm import Agent, Host, Message, Reply
from agentfsm.journal.memory_store import MemoryStore
from agentfsm.journal.run_info import RunQuery
from agentfsm.journal.verification import TAMPERED, VerificationReport, verify
from agentfsm.loop.messages import Usage
from agentfsm.report.markdown_report import MAX_COMMENT, run_markdown
from agentfsm.report.reported_run import Findings, ReportedRun
from agentfsm.testing import ScriptedModel, call
from tests.helpers.hostile_runs import run_full_of
from tests.helpers.hostile_texts import HOSTILE_TEXTS
from tests.helpers.journal_scenarios import finished_run
from tests.helpers.long_runs import long_run

FINDINGS = Findings("runs.db", ("00",), "a checkpoint", ("nothing",))


def reported(store: MemoryStore, run_id: str) -> ReportedRun:
    records = tuple(asyncio.run(store.records(run_id)))
    return ReportedRun(run_id, records, verify(run_id, records))


def whole_run() -> ReportedRun:
    return reported(finished_run(MemoryStore(), "whole")[0], "whole")


def outside_code(text: str) -> str:
    """What a reader of CommonMark reads as markup: without fenced blocks, and without code spans."""
    text = re.sub(r"^```mermaid\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", "", text)


def test_a_report_has_the_facts_the_answers_the_picture_and_the_moves() -> None:
    text = run_markdown([whole_run()], FINDINGS)
    assert text.startswith("### Run `whole`: `completed`\n")
    assert "- Verification: **intact**" in text
    assert "- Asked: `Do it all.`" in text
    assert "- Cost: " not in text  # its model says neither tokens nor a price
    assert '| 1970-01-12 13:46:42 UTC | not recorded | **`edit`** `{"amount": 2.0, "to": "Bob"}` |' in text
    assert "```mermaid\nflowchart TD\n" in text
    assert "| 7 | `call_llm` | `transient_provider` | `recover` | `cancelled, aborted` |" in text
    assert text.endswith("Verified with key 00, compared with a checkpoint.")


def test_a_report_says_what_the_run_cost() -> None:
    store = MemoryStore()
    reply = Reply(Message.assistant("It is blank."), usage=Usage(1_000, 30, cost_usd=0.0125))
    Agent(ScriptedModel([reply]), host=Host(store=store)).run_sync("What is on page 1?", run_id="priced")
    assert "- Cost: 0.0125 USD, 1,030 tokens\n" in run_markdown([reported(store, "priced")], FINDINGS)


def test_a_report_has_the_prompts_as_they_were_sent_each_message_once() -> None:
    text = run_markdown([whole_run()], FINDINGS)
    table = text[text.index("rows of prompts as sent") :]
    assert table.count("`Do it all.`") == 1
    assert "| 1 | 3 |  | user | `Do it all.` |" in table
    assert '| 2 | 11 | the first 2 of request 1 | assistant | `add {"a": 1, "b": 2}` |' in table
    assert re.search(r"^\| 3 \| \d+ \| the first 4 of request 2 \|  \|  \|$", table, re.MULTILINE)  # asked again


def test_a_report_lists_the_sub_agents_of_a_run() -> None:
    store = MemoryStore()
    reader = Agent(ScriptedModel(["the page is blank"]), host=Host(store=store))
    model = ScriptedModel([call("reader", task="Read page 1."), "It is blank."])
    tools = [reader.as_tool("reader", "Reads.")]
    Agent(model, tools=tools, host=Host(store=store)).run_sync("What is on it?", run_id="asks")
    page = asyncio.run(store.find_runs(RunQuery()))
    (child,) = (info.run_id for info in page.runs if info.run_id != "asks")
    text = run_markdown([reported(store, "asks"), reported(store, child)], FINDINGS)
    assert f"- Sub-agent `{child}`: `Read page 1.`; `completed`, 0.0000 USD" in text
    assert f"### Run `{child}`: `completed`" in text


def test_a_report_says_what_is_wrong() -> None:
    broken = VerificationReport("whole", TAMPERED, 50, 4, "its hash does not match")
    run = replace(whole_run(), verification=broken)
    assert "- Verification: **tampered**: `its hash does not match` in record 4" in run_markdown([run], FINDINGS)
    schema = VerificationReport("(schema)", TAMPERED, 0, None, "a trigger is missing")
    assert "- **tampered**: `(schema): a trigger is missing`" in run_markdown([], Findings(problems=(schema,)))


@pytest.mark.slow
def test_a_report_of_long_and_of_many_runs_fits_a_comment() -> None:
    text = run_markdown([reported(long_run(200), "long")], FINDINGS)
    assert MAX_COMMENT * 0.9 < len(text) <= MAX_COMMENT
    assert re.search(r"\| \d+ more do not fit \|", text)
    many = run_markdown([whole_run()] * 30, FINDINGS)
    assert len(many) <= MAX_COMMENT
    assert re.search(r"^\d+ runs more do not fit\.$", many, re.MULTILINE)


@cache
def shown_around(text: str) -> str:
    return outside_code(run_markdown([asyncio.run(run_full_of(text))], FINDINGS))


@pytest.mark.parametrize("text", HOSTILE_TEXTS, ids=range(len(HOSTILE_TEXTS)))
def test_hostile_text_stays_in_code_spans(text: str) -> None:
    hashes = r"[0-9a-f]{16,}"
    assert re.sub(hashes, "", shown_around(text).replace("\\|", "")) == re.sub(hashes, "", shown_around("plain"))
