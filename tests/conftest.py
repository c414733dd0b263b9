"""What tests count is said at the end of a test run, also where workers ran them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

COUNTED = "counted"


@pytest.fixture
def counted(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Call it with a line for the end of the test run: how much a test has tried."""
    return lambda line: record_property(COUNTED, line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the lines of all tests, in order."""
    reports: list[Any] = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, ())]
    lines = sorted(
        str(line) for r in reports for name, line in r.user_properties if name == COUNTED and r.when == "call"
    )
    if lines:
        terminalreporter.section("what was tried")
        for line in lines:
            terminalreporter.write_line(line)
