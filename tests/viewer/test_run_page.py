"""A run in a real browser: stepping, the picture, filters, links to records, and a run followed live."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import agentfsm.viewer
from agentfsm import Agent, Deny, Host, MemoryStore, SqliteStore
from agentfsm.testing import ScriptedModel, call
from tests.helpers.browser import elsewhere, has_count, has_text, site_page
from tests.helpers.child_process import child_environment
from tests.helpers.journal_scenarios import finished_run, sample_agent, waiting_run
from tests.helpers.long_runs import long_run
from tests.helpers.ports import own_port
from tests.helpers.viewer_server import served


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with served(agentfsm.viewer.app(elsewhere(several_runs))) as address:
        yield address


def several_runs() -> Any:
    store = long_run(400)
    finished_run(store, "whole")
    waiting_run(store, "waits")
    reader = Agent(ScriptedModel(["the page is blank"]), host=Host(store=store))
    asks = Agent(
        ScriptedModel([call("reader", task="Read page 1."), "It is blank."]),
        tools=[reader.as_tool("reader", "Reads.")],
        host=Host(store=store),
    )
    asks.run_sync("What is on page 1?", run_id="nests")
    return store


def opened(page: Any, address: str) -> None:
    page.goto(address)
    page.wait_for_selector(".picture svg")
    page.wait_for_selector(".row")


def now_in_picture(page: Any) -> set[str]:
    return set(page.eval_on_selector_all(".picture g.now", "all => all.map((each) => each.dataset.edge)"))


@pytest.mark.slow
def test_arrow_keys_and_the_slider_step_through_a_run_in_picture_ledger_and_details(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        opened(page, "/run?id=whole")
        assert page.inner_text("output") == "the whole run"
        for _ in range(7):
            page.keyboard.press("ArrowRight")
        assert page.inner_text("output") == "move 7 of 29: call_llm.transient_provider to recover"
        assert now_in_picture(page) == {"call_llm.transient_provider"}
        assert "transient_provider" in page.inner_text(".row[aria-selected=true]")
        page.keyboard.press("ArrowLeft")
        assert page.inner_text("output") == "move 6 of 29: pre_step.otherwise to call_llm"
        page.focus("input[type=range]")
        page.keyboard.press("End")
        assert "move 29 of 29: post_llm.otherwise to terminal" in page.inner_text("output")
        page.get_by_role("heading", name="Move 29 of 29").wait_for()
        page.focus("[role=listbox]")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowDown")
        page.get_by_role("heading", name="Move 2 of 29").wait_for()
        assert "Do it all." in page.inner_text(".detail")
        assert page.url.endswith("#record-4")
        page.get_by_role("button", name="The whole run").click()
        assert page.inner_text("output") == "the whole run"
        assert events == []


@pytest.mark.slow
def test_the_row_says_which_guards_did_not_hold_and_which_did(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, _):
        opened(page, "/run?id=whole#record-12")
        page.get_by_role("heading", name="Move 7 of 29").wait_for()
        assert page.locator("ol.guards li").all_inner_texts() == ["cancelled", "aborted"]
        assert "busy" in page.inner_text(".detail")


@pytest.mark.slow
def test_clicking_a_row_of_the_picture_shows_only_its_moves(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        opened(page, "/run?id=whole")
        page.locator(".picture g[data-edge='dispatch_tool.otherwise']").first.click(
            position={"x": 60, "y": 5}, force=True
        )
        has_count(page.locator(".row"), 5)
        assert all("dispatch_tool" in text for text in page.locator(".row").all_inner_texts())
        assert page.inner_text("output") == "move 4 of 29: dispatch_tool.otherwise to post_tool"
        page.get_by_role("button", name="Next").click()
        assert page.inner_text("output") == "move 12 of 29: dispatch_tool.otherwise to post_tool"
        page.get_by_label("Only row").select_option("recover.otherwise")
        has_count(page.locator(".row"), 2)
        page.get_by_label("Only row").select_option("")
        page.locator(".row").nth(6).wait_for()
        assert events == []


def test_every_record_has_a_link(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        opened(page, "/run?id=whole#record-39")
        page.wait_for_selector("#record-39[open]")
        assert "effect.result" in page.inner_text("#record-39")
        assert "paid 2.0 to Bob" in page.inner_text("#record-39")
        page.locator("#record-39 a").click()
        assert page.url.endswith("#record-39")
        page.evaluate("location.hash = '#record-50'")
        page.wait_for_selector("#record-50[open]")
        assert "run.finished" in page.inner_text("#record-50")
        assert events == []


@pytest.mark.slow
def test_sub_agents_are_nested_and_link_to_their_runs(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        opened(page, "/run?id=nests")
        page.locator(".tree a").click()
        has_text(page.locator(".about"), "Called by")
        page.locator(".about").get_by_role("link", name="nests", exact=True).click()
        page.wait_for_selector(".tree")
        assert "Read page 1." in page.inner_text(".tree")
        has_text(page.locator("main"), "Their cost is part of the cost of this run.")
        assert events == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 900, 1050, 1300, 1800])
def test_the_whole_picture_is_shown_or_a_click_away(browser: Any, site: str, width: int) -> None:
    cropped = "(box) => box.scrollHeight > box.clientHeight || box.scrollWidth > box.clientWidth"
    with site_page(browser, site, width=width) as (page, events):
        opened(page, "/run?id=whole")
        box, button = page.locator(".picture .scroll"), page.get_by_role("button", name="Show the whole picture")
        one_column = width <= 1024
        assert box.evaluate(cropped) is one_column
        has_count(button, int(one_column))
        if one_column:
            button.click()
            assert box.evaluate(cropped) is False
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert events == []


@pytest.mark.slow
def test_the_row_of_a_move_scrolls_into_sight_and_the_ledger_stays_beside_it(browser: Any, site: str) -> None:
    in_sight = "(part) => part.getBoundingClientRect().top >= 0 && part.getBoundingClientRect().bottom <= innerHeight"
    with site_page(browser, site) as (page, events):
        page.set_viewport_size({"width": 1400, "height": 700})
        opened(page, "/run?id=whole")
        page.locator("[data-part=decisions] table").wait_for()  # and nothing above the picture changes its height
        has_text(page.locator(".about"), "But under strict")
        has_text(page.locator(".about"), "all done")
        page.locator(".picture .scroll").evaluate("(box) => scrollTo(0, box.getBoundingClientRect().top)")
        page.focus("[role=listbox]")
        page.keyboard.press("End")
        last = page.locator(".picture g.now")
        has_count(last, 1)
        assert last.evaluate(in_sight)
        page.get_by_role("heading", name="Move 29 of 29").wait_for()  # the details take half of the ledger's height
        page.wait_for_function("document.querySelector('[role=listbox]').clientHeight < innerHeight / 2")
        end = "(part) => part.getBoundingClientRect().bottom"
        assert page.locator(".row").last.evaluate(in_sight)
        assert page.locator(".row").last.evaluate(end) <= page.locator("[role=listbox]").evaluate(end)
        assert page.get_by_role("heading", name="Move 29 of 29").evaluate(in_sight)
        assert events == []


@pytest.mark.slow
def test_how_a_run_would_have_gone_under_another_preset_is_a_click_away(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        opened(page, "/run?id=whole")
        told = page.locator(".about")
        has_text(told, "The first 7 moves would have been the same. In move 8 the run was in recover")
        has_text(told, "No guard held, so it went to pre_step (check budgets). But under strict the guard handoff")
        has_text(told, "so it would have gone to terminal (the end). It would have ended otherwise: handed off.")
        page.get_by_role("link", name="How it would have gone under another preset").click()
        page.get_by_text("Under strict").first.wait_for()
        page.goto("/run?id=waits")
        page.get_by_role("link", name="Answer it in the inbox").click()
        has_count(page.locator("article[data-run=waits]"), 1)
        assert events == []


def test_the_parts_of_a_report_are_there_when_they_are_opened(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        opened(page, "/run?id=whole")
        page.locator("[data-part=decisions] table").wait_for()
        assert '{"amount": 2.0, "to": "Bob"}' in page.inner_text("[data-part=decisions]")
        has_text(page.locator(".about"), "all done")
        for name, text in (("transcript", "all done"), ("failures", "busy"), ("graph", "fingerprint")):
            page.locator(f"[data-part={name}] summary").click()
            page.locator(f"[data-part={name}]").get_by_text(text).first.wait_for()
        assert events == []


@pytest.mark.slow
def test_a_long_run_has_few_rows_on_the_page_and_any_of_them_can_be_reached(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        opened(page, "/run?id=long")
        assert page.locator(".row").count() < 60
        page.focus("[role=listbox]")
        page.keyboard.press("End")
        page.get_by_role("heading", name="Move 1,998 of 1,998").wait_for()
        assert page.locator(".row").count() < 60
        assert page.get_attribute(".row[aria-selected=true]", "aria-posinset") == "1998"
        has_text(page.locator(".row[aria-selected=true]"), "read")
        assert events == []


@pytest.mark.slow
def test_a_run_is_followed_while_another_process_runs_it(browser: Any, tmp_path: Path) -> None:
    code = """
        import sys
        from agentfsm import Agent, Host, SqliteStore, tool
        from agentfsm.testing import ScriptedModel, call

        @tool
        def wait(for_line: int) -> str:
            "Wait for a line."
            return sys.stdin.readline().strip()

        with SqliteStore("runs.db") as store:
            model = ScriptedModel([call("wait", for_line=1), call("wait", for_line=2), "both are here"])
            Agent(model, tools=[wait], host=Host(store=store)).run_sync("Wait.", run_id="live")
    """
    env = child_environment() | {"PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with (
        SqliteStore(tmp_path / "runs.db") as store,
        served(agentfsm.viewer.app(store)) as address,
        site_page(browser, address) as (page, events),
        subprocess.Popen(command, cwd=tmp_path, env=env, stdin=subprocess.PIPE, text=True) as child,
    ):
        assert child.stdin is not None
        page.goto("/")
        page.locator("tr[data-run=live]").get_by_text("running").wait_for()
        page.locator("tr[data-run=live] a").first.click()
        has_count(page.locator(".row"), 3)
        page.get_by_text("now in dispatch_tool").wait_for()
        child.stdin.write("the first\n")
        child.stdin.flush()
        has_count(page.locator(".row"), 8)
        page.get_by_text("the first").wait_for()
        child.stdin.write("the second\n")
        child.stdin.flush()
        page.locator(".about").get_by_text("completed").wait_for()
        page.get_by_text("now in terminal").wait_for()
        assert page.locator(".row").count() == 13
        assert child.wait(30) == 0
        assert events == []


def test_a_page_that_names_no_run_says_so(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, _):
        page.goto("/run?id=nobody")
        page.locator("main .failed").get_by_text("there is no run 'nobody'").wait_for()
        page.goto("/run")
        page.locator("main .failed").get_by_text("names no run").wait_for()


@pytest.mark.slow
def test_a_page_goes_on_after_the_viewer_was_restarted(browser: Any) -> None:
    store, port = elsewhere(lambda: waiting_run(MemoryStore(), "waits")[0]), own_port()
    with ExitStack() as stack:
        with served(agentfsm.viewer.app(store), port) as address:
            page, _ = stack.enter_context(site_page(browser, address))
            opened(page, "/run?id=waits")
        page.get_by_text("the viewer cannot be reached").wait_for()
        stack.enter_context(served(agentfsm.viewer.app(store), port))
        page.get_by_text("the viewer cannot be reached").wait_for(state="detached")
        elsewhere(lambda: sample_agent(store, ["then not"]).resume_sync("waits", Deny("no")))
        page.locator(".about").get_by_text("completed").wait_for()
        page.get_by_text("now in terminal").wait_for()
