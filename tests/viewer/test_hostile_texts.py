"""Hostile texts in every field run nothing, load nothing and break no layout; and nothing shows a page in a frame."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import quote

import pytest

import agentfsm.viewer
from agentfsm import Actor, MemoryStore
from tests.helpers.browser import elsewhere, has_count, has_text, site_page
from tests.helpers.hostile_runs import SECRET, run_full_of
from tests.helpers.hostile_texts import HOSTILE_TEXTS
from tests.helpers.viewer_server import served

EVERY = "\n".join(HOSTILE_TEXTS)
SHORTER = "\n".join(text[:500] for text in HOSTILE_TEXTS)
"""All of them, in a run whose steps a browser shows quickly."""
IDS = [f"r{text[:60]}".replace("\0", "") for text in HOSTILE_TEXTS[::6]]  # an id has no NUL


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    async def make(store: MemoryStore) -> MemoryStore:
        for run_id, text in zip(IDS, HOSTILE_TEXTS[::6], strict=True):
            await run_full_of(text, store=store, run_id=run_id)
        await run_full_of(EVERY, store=store, run_id="every")
        await run_full_of(SHORTER, store=store, run_id="shorter")
        await run_full_of(EVERY, store=store, run_id="waits", answers=0)
        await run_full_of(EVERY, store=store, run_id="asks", answers=2)
        return store

    made = elsewhere(lambda: asyncio.run(make(MemoryStore())))
    who = Actor("mia <img src=x onerror=window.attacked=1>", ("</script><script>window.attacked=1</script>",))
    with served(agentfsm.viewer.app(made, secret=SECRET, authenticate=lambda request: who)) as address:
        yield address


def is_unharmed(page: Any) -> None:
    """Nothing ran, and the page is as wide as the window, in a wide one and on a phone."""
    assert page.evaluate("window.attacked") is None
    for width in (1300, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.set_viewport_size({"width": 1300, "height": 900})
    outside = "[...document.querySelectorAll('main .said')].filter((e) => e.getBoundingClientRect().left < -1).length"
    assert page.evaluate(outside) == 0


@pytest.mark.slow
def test_the_list_of_runs_stands_hostile_texts(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        page.goto("/")
        page.locator("tr[data-run]").nth(len(IDS) + 3).wait_for()
        is_unharmed(page)
        page.goto("/?text=" + quote("<script>window.attacked=1</script>"))
        page.locator("tr[data-run]").first.wait_for()
        is_unharmed(page)
        assert events == []


def stands_open(page: Any, run_id: str, *, one_of_each_kind: bool) -> None:
    """Show all about the moves of a run, all of them or the first of each kind, and all parts of its page."""
    page.goto(f"/run?id={run_id}")
    page.wait_for_selector(".picture svg")
    moves = page.request.get(f"/api/run?run={run_id}").json()["moves"]
    kinds = [kind for _, kind, _ in moves]
    for number, (seq, kind, _) in enumerate(moves, start=1):
        if one_of_each_kind and kinds.index(kind) != number - 1:
            continue
        page.evaluate(f"location.hash = 'record-{seq}'")
        page.get_by_role("heading", name=f"Move {number} of").wait_for()
        page.evaluate("document.querySelectorAll('.detail details').forEach((each) => { each.open = true; })")
        assert page.evaluate("window.attacked") is None
        assert page.evaluate("document.documentElement.scrollWidth") <= 1400
    page.evaluate("document.querySelectorAll('[data-part]').forEach((each) => { each.open = true; })")
    page.locator("[data-part=graph] table").wait_for()
    page.locator("[data-part=transcript] ol").wait_for()
    is_unharmed(page)


@pytest.mark.slow
def test_every_step_and_part_of_a_run_stands_hostile_texts(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        stands_open(page, "shorter", one_of_each_kind=False)
        assert events == []


@pytest.mark.slow
def test_every_kind_of_step_stands_hostile_texts_in_full_length(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        stands_open(page, "every", one_of_each_kind=True)
        assert events == []


@pytest.mark.slow
def test_a_run_may_have_any_id(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        page.goto("/")
        links = page.locator("tr[data-run] td:nth-child(2) a")
        links.first.wait_for()
        addresses = links.evaluate_all("all => all.map((each) => each.href)")
        for address in addresses[-4:]:
            page.goto(address)
            page.wait_for_selector(".picture svg")
            assert page.evaluate("window.attacked") is None
        assert events == []


@pytest.mark.slow
def test_the_inbox_stands_hostile_texts(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, events):
        page.goto("/inbox")
        page.locator("article[data-run=waits]").get_by_role("button", name="Edit…").click()
        page.get_by_role("form").wait_for()
        is_unharmed(page)
        has_count(page.locator(".field.changed"), 0)
        page.locator("article[data-run=asks]").get_by_role("button", name="Answer…").click()
        is_unharmed(page)
        assert events == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/statistics", "figure.picture svg"),
        ("/compare?a=every&b=waits", ".pane:nth-child(2) figure svg"),
        ("/compare?a=every&preset=strict", ".pane figure svg"),
        ("/what-if?preset=strict", "dl"),
        ("/verification", "table .badge"),
    ],
)
def test_what_is_added_up_and_compared_stands_hostile_texts(browser: Any, site: str, path: str, shown: str) -> None:
    with site_page(browser, site) as (page, events):
        page.goto(path)
        page.wait_for_selector(shown)
        is_unharmed(page)
        assert events == []


@pytest.mark.slow
def test_what_the_server_says_is_data_and_no_page(browser: Any, site: str) -> None:
    with site_page(browser, site) as (page, _):
        for path in ("/api/runs", "/api/run?run=every", "/api/run/step?run=every&number=4", "/api/inbox"):
            answer = page.request.get(path)
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["x-content-type-options"] == "nosniff"
            json.loads(answer.text())
        page.goto("/api/run/part?run=every&name=transcript")
        assert page.evaluate("window.attacked") is None


class EvilPage(BaseHTTPRequestHandler):
    """A page of another site, which frames the viewer and sends requests to it."""

    target = ""

    def do_GET(self) -> None:
        body = (
            f'<iframe src="{self.target}/inbox"></iframe>'
            f'<form id="f" method="post" enctype="text/plain" action="{self.target}/api/inbox/answer"></form>'
            f"<script>window.results = Promise.all(["
            f'fetch("{self.target}/api/runs").then(() => "read", () => "refused"),'
            f'fetch("{self.target}/api/inbox/answer", {{method: "POST", mode: "no-cors", body: "{{}}"}})'
            f'.then((answer) => answer.type, () => "refused"),'
            f'fetch("{self.target}/api/session", {{headers: {{"x-agentfsm-token": "x"}}}})'
            f'.then(() => "read", () => "refused")]);</script>'
        ).encode()
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name of the base class
        pass


@pytest.mark.slow
def test_another_site_can_neither_show_the_viewer_nor_read_nor_answer(browser: Any, site: str) -> None:
    EvilPage.target = site
    with ThreadingHTTPServer(("127.0.0.1", 0), EvilPage) as evil:
        Thread(target=evil.serve_forever, daemon=True).start()
        with site_page(browser, f"http://localhost:{evil.server_port}") as (page, _):
            refused: list[int] = []
            page.on("response", lambda answer: answer.url.startswith(site) and refused.append(answer.status))
            page.goto("/")
            assert page.evaluate("window.results") == ["refused", "refused", "refused"]
            page.evaluate("document.querySelector('#f').submit()")
            has_text(page.locator("body"), "the request comes from another site")
            assert set(refused) <= {403}
            assert len(refused) >= 2  # the frame and the form; the answers to the others are not seen
        evil.shutdown()
    with site_page(browser, site) as (page, _):
        asked = page.request.get("/api/inbox").json()["requests"]
        assert [each["sent"] for each in asked] == [[]] * len(asked)
