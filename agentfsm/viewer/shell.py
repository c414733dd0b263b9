"""The HTML document of a page: a heading, the menu, and the page's ES module, which fills in the rest."""

from __future__ import annotations

from collections.abc import Sequence

from agentfsm.report.visible_text import escape
from agentfsm.viewer.viewer_page import Page

__all__ = ["error_html", "page_html"]

STYLE_SHEETS = ("report.css", "picture.css", "viewer.css")


def page_html(page: Page, pages: Sequence[Page], root: str) -> str:
    """The document of a page.

    Args:
        page: The page.
        pages: All pages, for the menu.
        root: The path of the viewer in its app; empty if it is the whole app.
    """
    root, current = escape(root), " aria-current=page"
    styles = "".join(f'<link rel="stylesheet" href="{root}/static/{name}">' for name in STYLE_SHEETS)
    menu = "".join(
        f'<li><a href="{root}{escape(each.path)}"{current if each is page else ""}>{escape(each.title)}</a>'
        for each in pages
        if each.in_menu
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(page.title)} - agentfsm</title>"
        f'<link rel="icon" href="{root}/static/icon.svg">{styles}'
        f'<script type="module" src="{root}/static/{escape(page.script)}"></script></head>\n'
        '<body><a class="skip" href="#main">Skip to the content</a>'
        f'<header><nav aria-label="Pages"><ul>{menu}</ul></nav><p id="person" class="note"></p></header>\n'
        f'<main id="main" tabindex="-1"><h1>{escape(page.title)}</h1>'
        "<noscript><p>The viewer needs JavaScript. <code>agentfsm report</code> writes a run into a file that does "
        "not.</p></noscript></main>\n"
        '<div id="notices" role="status" aria-live="polite"></div></body></html>\n'
    )


def error_html(message: str, root: str) -> str:
    """The document that says why a page is not shown.

    Args:
        message: Why.
        root: The path of the viewer in its app.
    """
    root = escape(root)
    styles = "".join(f'<link rel="stylesheet" href="{root}/static/{name}">' for name in STYLE_SHEETS)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><title>agentfsm</title>'
        f'<link rel="icon" href="{root}/static/icon.svg">{styles}</head>\n'
        f'<body><main><h1>This page is not shown</h1><p class="said">{escape(message)}</p></main></body></html>\n'
    )
