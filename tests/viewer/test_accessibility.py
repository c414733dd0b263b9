"""Every page is usable by keyboard and screen reader: axe finds no serious fault, in light, dark and on a phone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import agentfsm.viewer
from agentfsm import Actor, SqliteStore
from tests.helpers.browser import elsewhere, has_text, site_page
from tests.helpers.company_runs import accountant, fill
from tests.helpers.npm_servers import install_package
from tests.helpers.viewer_server import served

PICTURES = Path(__file__).parents[2] / "build" / "pages"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("company") / "runs.db"
    elsewhere(lambda: fill(file))
    with elsewhere(lambda: SqliteStore(file)) as store:
        agent = elsewhere(lambda: accountant(store))
        viewer = agentfsm.viewer.app(store, agents=[agent], authenticate=lambda request: Actor("mia", ("manager",)))
        with served(viewer) as address:
            yield address


def runs(page: Any) -> None:
    page.goto("/")
    page.locator("tr[data-run=invoice-2231]").wait_for()


def no_runs(page: Any) -> None:
    page.goto("/?text=nothing+like+it")
    page.get_by_text("No run is like that.").wait_for()
    page.locator("summary").click()


def run(page: Any) -> None:
    page.goto("/run?id=invoice-2231")
    page.wait_for_selector(".picture svg")
    page.locator("[data-part=decisions] table").wait_for()
    page.get_by_role("heading", name="Sub-agents").wait_for()


def step(page: Any) -> None:
    page.goto("/run?id=invoice-2231#record-35")
    page.get_by_role("heading", name="of 33").wait_for()
    page.wait_for_selector(".picture svg")
    for name in ("transcript", "failures", "costs", "graph", "redactions"):
        page.locator(f"[data-part={name}] summary").click()


def redacted(page: Any) -> None:
    page.goto("/run?id=payslip#record-1")
    page.get_by_role("heading", name="Move 1 of").wait_for()
    page.wait_for_selector(".picture svg")
    page.get_by_text("the run cannot be replayed: record 1").wait_for()


def inbox(page: Any) -> None:
    page.goto("/inbox")
    page.locator("article[data-run=refund-121]").get_by_role("button", name="Edit…").click()
    page.get_by_label("customer").first.fill("Carla Souza")
    page.get_by_label("express").check()


def empty_inbox(page: Any) -> None:
    page.goto("/inbox?run=refund-118")
    page.get_by_text("Nothing waits for you.").wait_for()


def link(page: Any) -> None:
    page.goto("/link#abc.def")
    page.get_by_role("button", name="Open").click()
    page.get_by_role("alert").wait_for()


def statistics(page: Any) -> None:
    page.goto("/statistics")
    page.wait_for_selector("figure.picture svg")
    page.locator("summary").last.click()


def compare(page: Any) -> None:
    page.goto("/compare?a=refund-118&b=refund-121")
    page.wait_for_selector(".pane:nth-child(2) figure svg")


def replayed(page: Any) -> None:
    page.goto("/compare?a=invoice-2231&preset=strict")
    page.wait_for_selector("figure svg")


def what_if(page: Any) -> None:
    page.goto("/what-if?limits=max_iterations%3D1")
    page.wait_for_selector("table")


def verification(page: Any) -> None:
    page.goto("/verification")
    page.wait_for_selector("table .badge")


PAGES = [
    runs, no_runs, run, step, redacted, inbox, empty_inbox, link, statistics, compare, replayed, what_if, verification,
]  # fmt: skip
LOOKS = {"light": (1300, "light"), "dark": (1300, "dark"), "phone": (390, "dark")}


@pytest.mark.slow
@pytest.mark.parametrize("show", PAGES)
def test_axe_finds_no_fault(browser: Any, site: str, show: Callable[[Any], None]) -> None:
    """Each page is kept as a picture, too: ``build/pages/run-phone.png``."""
    axe = install_package("axe-core", "4.14.1", "axe.min.js").read_text("utf-8")
    with site_page(browser, site, bypass_csp=True) as (page, events):
        show(page)
        page.evaluate(axe)
        for look, (width, scheme) in LOOKS.items():
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            found = page.evaluate(
                "axe.run(document).then((found) => found.violations.map("
                "(v) => [v.id, v.impact, v.nodes[0].html.slice(0, 200), v.nodes[0].failureSummary]))"
            )
            assert found == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            page.screenshot(path=PICTURES / f"{show.__name__}-{look}.png", full_page=True)
        # a browser notes by itself that the answer to a forged link is a refusal
        assert [each for each in events if show is not link or "403" not in each] == []


@pytest.mark.slow
def test_an_approval_is_given_with_the_keyboard_alone(browser: Any, site: str) -> None:
    with site_page(browser, site, width=390) as (page, events):
        page.goto("/inbox")
        page.get_by_role("button", name="Allow").last.wait_for()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.keyboard.press("Enter")
        for _ in range(30):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "Allow":
                break
        box = page.locator("button:focus").bounding_box()
        assert box["height"] >= 44  # a finger's width
        page.keyboard.press("Enter")
        has_text(page.locator("article .notice"), "Sent; the run goes on.")
        assert page.evaluate("document.activeElement.textContent") == "Put away"
        assert events == []
