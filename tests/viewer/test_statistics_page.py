"""Statistics in a real browser: days, rows as a heat map, the slowest and the most expensive runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import agentfsm.viewer
from agentfsm import Agent, Host, MemoryStore, RunInfo
from agentfsm.testing import ScriptedModel, call
from agentfsm.viewer.run_figures import Listed, figures_of, totals_by_day
from tests.helpers.browser import elsewhere, has_text, site_page
from tests.helpers.viewer_server import served

TIMES = "\N{MULTIPLICATION SIGN}"


def search(query: str) -> str:
    """Search."""
    if query == "broken":
        raise ValueError("no such table")
    return "3 hits"


def five_runs() -> Any:
    """Three plain answers, and two runs in which one call fails before the next one works."""
    store = MemoryStore()
    for number in range(3):
        Agent(ScriptedModel(["fine"]), host=Host(store=store)).run_sync(
            "How?", run_id=f"plain-{number}", tags=["plain"]
        )
    for number in range(2):
        model = ScriptedModel([call("search", query="broken"), call("search", query="x"), "found"])
        Agent(model, tools=[search], host=Host(store=store)).run_sync("Where?", run_id=f"search-{number}")
    return store


@pytest.fixture(scope="module")
def store() -> Any:
    return elsewhere(five_runs)


@pytest.fixture(scope="module")
def site(store: Any) -> Iterator[str]:
    with served(agentfsm.viewer.app(store)) as address:
        yield address


@pytest.mark.slow
def test_days_rows_and_runs_are_counted(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        page.goto("/statistics")
        has_text(page.get_by_role("status").first, "These are 5 runs.")
        day = page.locator("table").first.locator("tbody tr").first
        has_text(day, "completed 5")
        has_text(day, "tool error 2")
        has_text(day, "0.0000 USD")
        page.wait_for_selector("figure.picture svg")
        found = page.locator("g[data-edge='post_tool.tool_error'] title").first.text_content()
        assert found.endswith(f"({TIMES}2)")
        assert page.locator("g[data-edge='call_llm.otherwise'] title").first.text_content().endswith(f"({TIMES}9)")
        assert "5 runs" in page.locator("figure.picture svg").text_content()
        assert events == []


@pytest.mark.slow
def test_filters_and_a_number_of_runs_choose_what_is_counted(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        page.goto("/statistics?tag=plain")
        has_text(page.get_by_role("status").first, "These are 3 runs.")
        page.goto("/statistics?most=2")
        has_text(page.get_by_role("status").first, "These are the newest 2 of 5 runs.")
        page.goto("/statistics?tag=nobody")
        has_text(page.get_by_role("status").first, "No run is like that.")
        assert events == []


def test_what_a_sub_agent_took_and_cost_is_counted_with_its_caller() -> None:
    def ran(run_id: str, parent: str, usd: float) -> Listed:
        info = RunInfo(
            run_id, "finished", started=10.0, updated=10.0 + usd, cost_usd=usd, tokens=int(usd * 100), parent=parent
        )
        return Listed(info, figures_of(run_id, ()))

    runs = [ran("r", "", 3.0), ran("r-1.0", "r", 2.0), ran("s-1.0", "s", 1.0)]  # s is not one of them
    (day,) = totals_by_day(runs)
    assert (day["runs"], day["cost"], day["tokens"], day["seconds"]) == (3, 4.0, 400, 4.0)


def test_what_makes_no_sense_is_refused_with_a_reason(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, _):
        for question, status in (
            ("statistics?most=x", 400),
            ("statistics?status=odd", 400),
            ("statistics/picture", 404),
        ):
            answer = page.request.get(f"/api/{question}")
            assert answer.status == status
            assert answer.json()["error"]
