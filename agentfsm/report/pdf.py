"""A page as PDF, printed by a Chromium that is installed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from agentfsm.errors import ConfigurationError

__all__ = ["BROWSERS", "render_pdf"]


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
"""The programs that can print a page, the first one found on the path is used."""

PRINT_TIMEOUT_S = 300

_FLAGS = (
    "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-extensions",
    "--no-pdf-header-footer", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
"""The last one keeps the browser from asking any server for anything."""


def render_pdf(page: str) -> bytes:
    """A page as a PDF file.

    Args:
        page: The HTML of the page.

    Raises:
        ConfigurationError: No browser is installed that can print it, or it failed.
    """
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise ConfigurationError(
            f"a PDF needs Chromium or Chrome, and none of {', '.join(BROWSERS)} is on the PATH: install one, or write "
            "the report as HTML and print it from any browser"
        )
    with tempfile.TemporaryDirectory(prefix="agentfsm-") as name:
        folder = Path(name)
        (folder / "report.html").write_text(page, encoding="utf-8")
        target = folder / "report.pdf"
        command = [browser, *_FLAGS, f"--user-data-dir={folder / 'profile'}", f"--print-to-pdf={target}"]
        problem = _print([*command, (folder / "report.html").as_uri()], target)
        if problem and not target.exists():  # a browser that runs as root, as in a container, refuses its sandbox
            problem = _print([*command, "--no-sandbox", (folder / "report.html").as_uri()], target)
        if not target.exists():
            raise ConfigurationError(f"{browser} could not print the report: {problem or 'it wrote no file'}")
        return target.read_bytes()


def _print(command: list[str], target: Path) -> str:
    """Run the browser; what it says if it fails."""
    try:
        done = subprocess.run(  # noqa: S603  # a fixed program and flags, and a file that we wrote
            command, capture_output=True, text=True, errors="replace", timeout=PRINT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if target.exists() else " ".join(done.stderr.split())[-300:]
