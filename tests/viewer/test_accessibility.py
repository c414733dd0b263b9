"""Every page is usable by keyboard and screen reader: axe finds no serious fault, in light, dark and on a phone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import agentfsm.viewer
from agentfsm import Actor, MemoryStore
from tests.helpers.browser import elsewhere, has_text, site_page
from tests.helpers.journal_scenarios import finished_run, waiting_run
from tests.helpers.npm_servers import install_package
from tests.helpers.viewer_server import served


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    def make() -> MemoryStore:
        store, _ = finished_run(MemoryStore(), "whole")
        return waiting_run(store, "waits")[0]

    viewer = agentfsm.viewer.app(
        elsewhere(make), secret=b"of the tests", authenticate=lambda request: Actor("mia", ("manager",))
    )
    with served(viewer) as address:
        yield address


def runs(page: Any) -> None:
    page.goto("/")
    page.locator("tr[data-run=whole]").wait_for()
    page.locator("summary").click()


def run(page: Any) -> None:
    page.goto("/run?id=whole#record-12")
    page.get_by_role("heading", name="Move 7 of 29").wait_for()
    page.wait_for_selector(".picture svg")
    page.locator("[data-part=decisions] table").wait_for()


def inbox(page: Any) -> None:
    page.goto("/inbox")
    page.get_by_role("button", name="Edit…").click()
    page.get_by_label("to").first.fill("Carla")


def link(page: Any) -> None:
    page.goto("/link#abc.def")
    page.get_by_role("button", name="Open").click()
    page.get_by_role("alert").wait_for()


def statistics(page: Any) -> None:
    page.goto("/statistics")
    page.wait_for_selector("figure.picture svg")
    page.locator("summary").last.click()


def compare(page: Any) -> None:
    page.goto("/compare?a=whole&b=waits")
    page.wait_for_selector(".pane:nth-child(2) figure svg")


def what_if(page: Any) -> None:
    page.goto("/what-if?limits=max_iterations%3D1")
    page.wait_for_selector("table")


def verification(page: Any) -> None:
    page.goto("/verification")
    page.wait_for_selector("table .badge")


@pytest.mark.slow
@pytest.mark.parametrize("show", [runs, run, inbox, link, statistics, compare, what_if, verification])
def test_axe_finds_no_fault(browser: Any, site: str, show: Callable[[Any], None]) -> None:
    axe = install_package("axe-core", "4.14.1", "axe.min.js").read_text("utf-8")
    with site_page(browser, site, bypass_csp=True) as (page, _):
        show(page)
        page.evaluate(axe)
        for width, scheme in ((1300, "light"), (1300, "dark"), (390, "dark")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            found = page.evaluate(
                "axe.run(document).then((found) => found.violations.map("
                "(v) => [v.id, v.impact, v.nodes[0].html.slice(0, 200), v.nodes[0].failureSummary]))"
            )
            assert found == []


def test_an_approval_is_given_with_the_keyboard_alone(browser: Any, site: str) -> None:
    with site_page(browser, site, width=390) as (page, events):
        page.goto("/inbox")
        page.get_by_role("button", name="Allow").wait_for()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.keyboard.press("Enter")
        for _ in range(12):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "Allow":
                break
        box = page.locator("button:focus").bounding_box()
        assert box["height"] >= 44  # a finger's width
        page.keyboard.press("Enter")
        has_text(page.locator("article"), "Sent.")
        assert page.evaluate("document.activeElement.textContent") == "Put away"
        assert events == []
