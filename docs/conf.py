"""Sphinx: how the site is built from the pages of this folder. `make docs` builds it, without a network."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from agentfsm import __version__

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from llms_index import llms_index  # noqa: E402  # beside this file
from reference_pages import example_anchor, is_inherited, write_examples, write_reference  # noqa: E402

project = "agentfsm"
author = "The agentfsm authors"
project_copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
napoleon_use_ivar = True
maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"agentfsm {release}"
copybutton_prompt_text = "$ "

_FILES_ABOVE = {"README": "index", "CHANGELOG": "changelog", "SECURITY": "security", "CONTRIBUTING": "contributing"}
"""Files beside this folder, and the pages that stand for them."""


def _keep_links_within_site(text: str) -> str:
    """Links to files beside this folder, which work where the repository is browsed, as links to pages of the site."""
    for name, page in _FILES_ABOVE.items():
        text = re.sub(rf"\]\((?:\.\./)?{name}\.md(#[^)]*)?", f"]({page}.md", text)
    text = re.sub(r"\[([^\]]*)\]\((?:\.\./)?tests/[^)]*\)", r"\1", text)  # the site does not show the tests
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\]\((?:\.\./)?examples/([^)\s]*)\)", _example_link, text)


def _example_link(found: re.Match[str]) -> str:
    name = found[1].rstrip("/")
    return f"](reference/examples.md{'#' + example_anchor(name) if name else ''})"


def _page(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = _keep_links_within_site(source[0])


def _included(app: Sphinx, path: Path, docname: str, source: list[str]) -> None:
    source[0] = _keep_links_within_site(source[0])


def _write_pages(app: Sphinx) -> None:
    write_reference(HERE / "reference")
    write_examples(HERE / "reference" / "examples.md", HERE.parent / "examples")


def _write_index(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        (Path(app.outdir) / "llms.txt").write_text(llms_index(HERE), encoding="utf-8")


def _skip(app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    return True if is_inherited(name, value) else None


def _mark_code(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """The indented block of a module's docstring as Python code."""
    first = next((number for number, line in enumerate(lines) if line.startswith("    ")), 0)
    if what == "module" and first and not lines[first - 2].endswith("::"):
        lines[first:first] = [".. code-block:: python", ""]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", _write_pages)
    app.connect("build-finished", _write_index)
    app.connect("source-read", _page)
    app.connect("include-read", _included)
    app.connect("autodoc-process-docstring", _mark_code)
    app.connect("autodoc-skip-member", _skip)
