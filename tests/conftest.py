"""Shared pytest configuration: totals at the end of a run, and expected durations so that long tests start first."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest

__all__ = ["EXPECTED_SECONDS", "expected_seconds"]


EXPECTED_SECONDS: Mapping[str, float] = {
    "tests/journal/test_crashes.py::test_a_run_that_is_killed_at_any_point": 40,
    "tests/journal/test_crashes.py::test_a_run_that_is_killed_again_and_again": 12,
    "tests/journal/test_crashes.py::test_starting_interpreters": 8,
    "tests/journal/test_simulation.py::test_whatever_happens": 10,
    "tests/journal/test_mutants.py::test_each_mutant_is_caught": 9,
    "tests/journal/test_mutants.py::test_what_breaks_nothing": 3,
    "tests/journal/test_restore.py::test_the_journal_gives": 3,
    "tests/analysis/test_spin.py::test_the_loop": 9,
    "tests/analysis/test_spin.py::test_random_tables": 6,
    "tests/analysis/test_spin.py::test_what_paths": 3,
    "tests/analysis/test_analyse.py::test_every_preset_passes": 3,
    "tests/analysis/test_analyse.py::test_whether_the_end_can_be_reached": 3,
    "tests/diagrams/test_viewers.py": 12,
    "tests/diagrams/test_engines.py": 5,
    "tests/test_docs.py::test_a_page_is_true": 6,
    "tests/test_properties.py": 3,
    "tests/testing/test_review_example.py": 5,
    "tests/testing/test_plugin.py::test_reports_are_the_same": 3,
    "tests/testing/test_plugin.py::test_prime_paths": 3,
    "tests/testing/test_mutants.py": 2,
    "tests/models/test_streams.py::test_a_stream": 4,
    "tests/cli/test_demo.py": 2.5,
    "tests/cli/test_killed.py": 3,
}


def expected_seconds(test: str) -> float:
    """How long a test takes, by its id; 0 where that is not worth a mention."""
    return next((taken for start, taken in EXPECTED_SECONDS.items() if test.startswith(start)), 0.0)


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
    items[:] = longest_first(items, [expected_seconds(i.nodeid) for i in items], worker_count())


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
