"""The pages of the viewer, one module each; ``PAGES`` is their table, in the order of the menu."""

from __future__ import annotations

from agentfsm.viewer.pages import inbox_page, link_page, run_page, runs_page
from agentfsm.viewer.viewer_page import Page

__all__ = ["PAGES"]

PAGES: tuple[Page, ...] = (
    runs_page.PAGE,
    inbox_page.PAGE,
    run_page.PAGE,
    link_page.PAGE,
)
