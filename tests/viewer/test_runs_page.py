"""The list of runs in a real browser: filters, pages, live news, and nothing that leaves the machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import agentfsm.viewer
from agentfsm import Agent, Host, MemoryStore
from agentfsm.testing import ScriptedModel
from tests.helpers.browser import elsewhere, has_count, has_text, site_page
from tests.helpers.journal_scenarios import finished_run, waiting_run
from tests.helpers.viewer_server import served


@pytest.fixture(scope="module")
def store() -> Any:
    return elsewhere(sixty_two_runs)


def sixty_two_runs() -> Any:
    made, _ = finished_run(MemoryStore(), "whole")
    waiting_run(made, "waits")
    for number in range(60):
        agent = Agent(ScriptedModel(["fine"]), host=Host(store=made))
        agent.run_sync(
            f"Bill {number}.", run_id=f"bill-{number}", tags=["billing"], actor="ann", metadata={"order": number // 2}
        )
    return made


@pytest.fixture(scope="module")
def site(store: Any) -> Iterator[str]:
    with served(agentfsm.viewer.app(store)) as address:
        yield address


def listed(page: Any) -> list[str]:
    page.wait_for_selector("table.runs tbody tr")
    found: list[str] = page.eval_on_selector_all("tr[data-run]", "all => all.map((row) => row.dataset.run)")
    return found


@pytest.mark.slow
def test_runs_are_listed_the_newest_first_a_page_at_a_time(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        page.goto("/")
        assert listed(page) == [f"bill-{number}" for number in range(59, 9, -1)]
        has_text(page.locator(".bar").first, "62 runs")
        page.get_by_role("button", name="Older").click()
        page.wait_for_selector("tr[data-run=whole]")
        assert listed(page) == [*(f"bill-{number}" for number in range(9, -1, -1)), "waits", "whole"]
        waits = page.locator("tr[data-run=waits]").inner_text()
        assert "waiting" in waits
        assert "approval pay" in " ".join(waits.split())
        assert "completed" in page.locator("tr[data-run=whole]").inner_text()
        page.get_by_role("button", name="Newest").click()
        page.wait_for_selector("tr[data-run=bill-59]")
        assert "ann" in page.locator("tr[data-run=bill-59]").inner_text()
        assert events == []


@pytest.mark.slow
def test_filters_find_runs_and_stand_in_the_address(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        page.goto("/")
        listed(page)
        page.get_by_label("What was asked").fill("bill 7")
        page.get_by_role("button", name="Search").click()
        has_count(page.locator("tr[data-run]"), 1)
        assert listed(page) == ["bill-7"]
        assert page.url.endswith("/?text=bill+7")
        page.reload()
        assert listed(page) == ["bill-7"]
        page.goto("/?metadata=order%3D7")
        assert listed(page) == ["bill-15", "bill-14"]
        assert page.get_by_label("Metadata").input_value() == "order=7"
        page.goto("/?status=suspended")
        assert listed(page) == ["waits"]
        page.goto("/?tag=nobody")
        page.get_by_text("No run is like that.").wait_for()
        page.goto("/?run_id=bill-1&actor=ann")
        assert len(listed(page)) == 11
        assert events == []


@pytest.mark.slow
def test_a_new_run_and_its_ending_appear_by_themselves(browser: Any, site: str, store: Any) -> None:
    with site_page(browser, site) as (page, events):
        page.goto("/?tag=live")
        page.get_by_text("No run is like that.").wait_for()
        agent = Agent(ScriptedModel(["fine"]), host=Host(store=store))
        elsewhere(lambda: agent.run_sync("Any news?", run_id="news", tags=["live"]))
        has_text(page.locator("tr[data-run=news]"), "completed")
        assert events == []


def test_a_question_that_makes_no_sense_is_refused_with_a_reason(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, _):
        for query in ("status=odd", "metadata=order", "since=soon", "limit=0", "after=x"):
            answer = page.request.get(f"/api/runs?{query}")
            assert answer.status == 400
            assert answer.json()["error"]


@pytest.mark.slow
def test_a_store_without_runs_says_so_until_the_first_one_begins(browser: Any) -> None:
    empty = elsewhere(MemoryStore)
    with served(agentfsm.viewer.app(empty)) as address, site_page(browser, address) as (page, events):
        for path in ("/", "/statistics"):
            page.goto(path)
            has_text(page.locator("main"), "There is no run in the store yet.")
        page.goto("/?text=invoice")
        has_text(page.locator("main"), "No run is like that.")
        page.goto("/")
        elsewhere(lambda: finished_run(empty, "first"))
        page.locator("tr[data-run=first]").wait_for()
        page.reload()
        has_text(page.locator("main [role=status]"), "1 run")
        assert page.locator("main [role=status]").inner_text() == "1 run"
        page.goto("/statistics")
        has_text(page.get_by_role("status").first, "This is 1 run.")
        assert events == []
