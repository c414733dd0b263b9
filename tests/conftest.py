"""What tests count is said at the end of a test run; long tests begin first."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.heavy import seconds

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


@pytest.hookimpl(trylast=True)  # behind whatever leaves tests out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long tests first, the longest in front; each of xdist's workers begins with a stretch of the list."""
    items[:] = longest_first(items, [seconds(i.nodeid) for i in items], worker_count())


def worker_count() -> int:
    """How many workers share the list."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def longest_first(items: list[Any], taken: list[float], workers: int) -> list[Any]:
    """Items in another order: cut into as many stretches as there are workers, each has its share of the long ones.

    Args:
        items: The items.
        taken: How long each takes, in seconds; 0 for those that stay where they are, behind the others.
        workers: How many stretches there are to be, all of one length.
    """
    by_length = sorted((n for n in range(len(items)) if taken[n]), key=lambda n: -taken[n])
    others = (n for n in range(len(items)) if not taken[n])
    order: list[int] = []
    for worker in range(workers):
        length = (len(items) - len(order)) // (workers - worker)
        own = by_length[worker::workers]
        order += own + [next(others) for _ in range(length - len(own))]
    return [items[n] for n in order]
