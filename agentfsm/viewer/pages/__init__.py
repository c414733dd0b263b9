"""The pages of the viewer, one module each; ``PAGES`` is their table, in the order of the menu."""

from __future__ import annotations

from agentfsm.viewer.pages import (
    compare_page,
    inbox_page,
    link_page,
    run_page,
    runs_page,
    statistics_page,
    verification_page,
    what_if_page,
)
from agentfsm.viewer.viewer_page import Page

__all__ = ["PAGES"]

PAGES: tuple[Page, ...] = (
    runs_page.PAGE,
    inbox_page.PAGE,
    run_page.PAGE,
    statistics_page.PAGE,
    compare_page.PAGE,
    what_if_page.PAGE,
    verification_page.PAGE,
    link_page.PAGE,
)
