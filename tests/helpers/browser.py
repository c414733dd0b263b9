"""A page in a real browser: what it does, and how it is laid out."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

__all__ = ["OpenedPage", "elsewhere", "has_count", "has_text", "open_page", "running_browser", "site_page"]

Made = TypeVar("Made")

PATIENCE_MS = 30_000
"""How long a page may take until it shows what is expected: as long as it may take to answer a click."""


def elsewhere(make: Callable[[], Made]) -> Made:
    """What a function makes in a thread of its own: Playwright has an event loop in the one of a test."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make).result()


class OpenedPage(NamedTuple):
    """A page in a browser.

    Attributes:
        page: Playwright's page.
        events: What must not happen: messages on the console, errors, dialogs, and requests of other sites.
    """

    page: Any
    events: list[str]


@contextmanager
def running_browser() -> Generator[Any]:
    """The system's Chromium, through Playwright; skips the test where one of them is not installed."""
    browser = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    if browser is None:
        pytest.skip("no chromium is on the PATH")
    try:
        playwright = importlib.import_module("playwright.sync_api")
    except ImportError:
        pytest.skip("playwright is not installed")
    playwright.expect.set_options(timeout=PATIENCE_MS)
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


def has_count(found: Any, count: int) -> None:
    """Wait until a locator finds so many elements."""
    importlib.import_module("playwright.sync_api").expect(found).to_have_count(count)


def has_text(found: Any, text: str) -> None:
    """Wait until the element of a locator contains a text."""
    importlib.import_module("playwright.sync_api").expect(found).to_contain_text(text)


@contextmanager
def open_page(
    file: Path, *, width: int = 1200, dark: bool = False, script: bool = True, bypass_csp: bool = False
) -> Generator[OpenedPage]:
    """A file in a browser that is offline."""
    with running_browser() as browser:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            offline=True,
            java_script_enabled=script,
            bypass_csp=bypass_csp,
        )
        page = context.new_page()
        events = _watch(page, file.as_uri(), exact=True)
        page.goto(file.as_uri())
        yield OpenedPage(page, events)


@contextmanager
def site_page(
    browser: Any,
    site: str,
    *,
    width: int = 1400,
    dark: bool = False,
    headers: Mapping[str, str] | None = None,
    bypass_csp: bool = False,
) -> Generator[OpenedPage]:
    """A page for a site, with a browser's memory of its own; relative addresses are those of the site.

    Args:
        browser: The browser.
        site: The address of the site, without a slash at its end.
        width: Pixels.
        dark: Whether the reader wants dark pages.
        headers: What is sent with every request.
        bypass_csp: Whether a test may inject scripts.
    """
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if dark else "light",
        base_url=site,
        extra_http_headers=dict(headers or {}),
        bypass_csp=bypass_csp,
    )
    page = context.new_page()
    yield OpenedPage(page, _watch(page, f"{site}/", exact=False))
    context.close()


def _watch(page: Any, where: str, *, exact: bool) -> list[str]:
    events: list[str] = []
    page.on("console", partial(_note, events, "text"))
    page.on("pageerror", partial(_note, events, "message"))
    page.on("dialog", partial(_note, events, "message"))
    page.on("request", partial(_note_request, events, where, exact))
    return events


def _note(events: list[str], attribute: str, event: Any) -> None:
    events.append(f"{type(event).__name__}: {getattr(event, attribute)}")


def _note_request(events: list[str], where: str, exact: bool, request: Any) -> None:
    if request.url != where if exact else not request.url.startswith(where):
        events.append(f"request: {request.url}")
