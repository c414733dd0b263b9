"""What if, in a real browser: stored runs under other limits, presets and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import agentfsm.viewer
from agentfsm import LOOP, Agent, Host, MemoryStore
from agentfsm.testing import ScriptedModel, call
from tests.helpers.browser import elsewhere, has_count, has_text, site_page
from tests.helpers.viewer_server import served


def search(query: str) -> str:
    """Search."""
    return f"hits for {query}"


def thirty_runs() -> Any:
    """25 runs with one model call, and 5 with three."""
    store = MemoryStore()
    for number in range(25):
        Agent(ScriptedModel(["fine"]), host=Host(store=store)).run_sync("How?", run_id=f"plain-{number}")
    for number in range(5):
        model = ScriptedModel([call("search", query="a"), call("search", query="b"), "found"])
        Agent(model, tools=[search], host=Host(store=store)).run_sync("Where?", run_id=f"long-{number}")
    return store


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    mine = replace(LOOP.without("post_llm.loop_detected"), name="mine")
    with served(agentfsm.viewer.app(elsewhere(thirty_runs), graphs=[mine])) as address:
        yield address


@pytest.mark.slow
def test_all_runs_are_replayed_and_those_that_go_elsewhere_are_listed(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        page.goto("/what-if")
        page.get_by_text("Choose a preset, a policy or limits").wait_for()
        page.get_by_label("With limits").fill("max_iterations=2")
        page.get_by_role("button", name="Replay").click()
        # the limit takes the third model call from five runs, and what happens then was not recorded
        has_text(page.locator("dl"), "Other moves, ending not known")
        has_count(page.locator("table tbody tr"), 5)
        has_text(page.locator("table tbody tr").first, "pre_step.iteration_limit → recover")
        has_text(page.get_by_role("status").first, "of 30 runs would end differently.")
        assert page.url.endswith("?limits=max_iterations%3D2")
        assert events == []


@pytest.mark.slow
def test_runs_on_the_graph_of_an_agent_of_the_viewer_are_replayed(browser: Any) -> None:
    store = MemoryStore()
    agent = elsewhere(
        lambda: Agent(ScriptedModel(["fine"]), graph=LOOP.without("post_llm.loop_detected"), host=Host(store=store))
    )
    elsewhere(lambda: agent.run_sync("How?", run_id="own"))
    for agents, said in (([agent], "The same in every move1"), ([], "Cannot be replayed1")):
        with (
            served(agentfsm.viewer.app(store, agents=agents)) as site,
            site_page(browser, site) as (page, events),
        ):
            page.goto("/what-if?limits=max_iterations%3D5")
            has_text(page.locator("dl"), said)
            assert events == []


def test_nothing_changes_on_an_equal_graph_or_preset(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        for query in ("preset=standard", "graph=mine"):
            page.goto(f"/what-if?{query}")
            has_text(page.locator("dl"), "The same in every move30")
            has_text(page.get_by_role("status").first, "0 of 30 runs would end differently.")
        assert events == []


@pytest.mark.parametrize(
    "query", ["", "preset=odd", "graph=odd", "limits=max_iterations", "limits=max_iterations=-1", "limits=odd=3"]
)
def test_what_makes_no_sense_is_refused_with_a_reason(browser: Any, site: str, query: str) -> None:
    with site_page(browser, site) as (page, _):
        answer = page.request.get(f"/api/what-if?{query}")
        assert answer.status == 400
        assert answer.json()["error"]
