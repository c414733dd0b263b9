"""A page in a real browser that is offline: what it does, and how it is laid out."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

__all__ = ["OpenedPage", "open_page"]


class OpenedPage(NamedTuple):
    """A page in a browser.

    Attributes:
        page: Playwright's page.
        events: What must not happen: messages on the console, errors, dialogs, and requests other than for the file.
    """

    page: Any
    events: list[str]


@contextmanager
def open_page(
    file: Path, *, width: int = 1200, dark: bool = False, script: bool = True, bypass_csp: bool = False
) -> Generator[OpenedPage]:
    """A file in the system's Chromium, through Playwright; skips the test where one of them is not installed."""
    browser = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    if browser is None:
        pytest.skip("no chromium is on the PATH")
    try:
        playwright = importlib.import_module("playwright.sync_api")
    except ImportError:
        pytest.skip("playwright is not installed")
    events: list[str] = []
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        context = opened.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            offline=True,
            java_script_enabled=script,
            bypass_csp=bypass_csp,
        )
        page = context.new_page()
        page.on("console", partial(_note, events, "text"))
        page.on("pageerror", partial(_note, events, "message"))
        page.on("dialog", partial(_note, events, "message"))
        page.on("request", partial(_note_request, events, file.as_uri()))
        page.goto(file.as_uri())
        yield OpenedPage(page, events)
        opened.close()


def _note(events: list[str], attribute: str, event: Any) -> None:
    events.append(f"{type(event).__name__}: {getattr(event, attribute)}")


def _note_request(events: list[str], file: str, request: Any) -> None:
    if request.url != file:
        events.append(f"request: {request.url}")
