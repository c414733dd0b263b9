"""A report as PDF: printed by a browser that is installed, or an error that says what to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agentfsm.errors import ConfigurationError
from agentfsm.report.page import BROWSERS, render_pdf


def test_a_page_is_printed() -> None:
    if not any(map(shutil.which, BROWSERS)):
        pytest.skip(f"none of {', '.join(BROWSERS)} is on the PATH")
    found = render_pdf("<!DOCTYPE html><title>A report</title><p>Hello.")
    assert found.startswith(b"%PDF-")
    assert found.rstrip().endswith(b"%%EOF")


def test_without_a_browser_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"none of chromium.*write the report as HTML"):
        render_pdf("<p>")


def test_a_browser_that_fails_is_named_with_what_it_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    browser = tmp_path / "chromium"
    browser.write_text("#!/bin/sh\necho 'no display' >&2\nexit 1\n")
    browser.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"chromium could not print the report: no display"):
        render_pdf("<p>")
