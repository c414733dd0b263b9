"""Shared pytest configuration: totals at the end of a run, and expected durations so that long tests start first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

__all__ = ["EXPECTED_SECONDS", "expected_seconds"]

# Hundreds of tests start an interpreter or fork one. Bytecode is cached on disk even where the environment says
# otherwise, or each of them would compile the package, and each pytest in them rewrite the test modules, again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Every run of every test is checked against the model of its graph's proofs, also in other processes.
os.environ["AGENTFSM_MONITOR"] = "raise"

EXPECTED_SECONDS: Mapping[str, float] = {
    "tests/journal/test_crash_recovery.py::test_a_run_that_is_killed_at_any_point": 16,
    "tests/journal/test_crash_recovery.py::test_a_run_that_is_killed_again_and_again": 6,
    "tests/journal/test_crash_recovery.py::test_starting_interpreters": 5,
    "tests/journal/test_fault_simulation.py::test_every_simulated_run": 11,
    "tests/journal/test_mutants.py::test_each_mutant_is_caught": 9,
    "tests/journal/test_mutants.py::test_a_harmless_change": 3,
    "tests/journal/test_rehydrate.py::test_the_journal_gives": 3,
    "tests/analysis/test_spin.py::test_the_loop": 9,
    "tests/analysis/test_spin.py::test_random_tables": 6,
    "tests/analysis/test_spin.py::test_pairs_that_no_path": 3,
    "tests/analysis/test_random_graphs.py": 6,
    "tests/analysis/test_analyse.py::test_every_preset_passes": 3,
    "tests/analysis/test_analyse.py::test_whether_the_end_can_be_reached": 3,
    "tests/diagrams/test_text_formats.py": 12,
    "tests/diagrams/test_interchange.py": 5,
    "tests/test_docs.py::test_the_blocks_of_a_page": 6,
    "tests/test_properties.py": 3,
    "tests/testing/test_review_example.py": 5,
    "tests/testing/test_pytest_plugin.py::test_reports_are_the_same": 3,
    "tests/testing/test_pytest_plugin.py::test_prime_paths": 3,
    "tests/testing/test_loop_table_mutants.py": 2,
    "tests/testing/test_mutation_score.py": 15,
    "tests/testing/test_witness_driver.py": 2,
    "tests/testing/test_counterexample.py": 3,
    "tests/testing/test_reviewed_paths.py::test_every_criterion": 2,
    "tests/testing/test_strategies.py::test_five_hundred": 6,
    "tests/testing/test_strategies.py::test_an_agent_without": 6,
    "tests/models/test_streaming.py::test_a_stream": 4,
    "tests/runtime/test_subagent.py::test_however_sub_agents_are_nested": 3,
    "tests/runtime/test_subagent.py::test_those_that_run_together": 3,
    "tests/runtime/test_state_context.py::test_after_a_crash": 2,
    "tests/test_pull_requests.py": 6,
    "tests/cli/test_demo_command.py": 2.5,
    "tests/cli/test_mutate_command.py": 8,
    "tests/cli/test_resume_killed_run.py": 3,
}


def expected_seconds(test_id: str) -> float:
    """How long a test takes on an idle machine; 0 if it is not listed."""
    return next((seconds for prefix, seconds in EXPECTED_SECONDS.items() if test_id.startswith(prefix)), 0.0)


COUNTED = "counted"


@pytest.fixture
def counted(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Call it with a line that says how many cases a test has tried; the line is printed at the end of the test run."""
    return lambda line: record_property(COUNTED, line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the lines of all tests, sorted."""
    reports: list[Any] = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, ())]
    lines = sorted(
        str(line) for r in reports for name, line in r.user_properties if name == COUNTED and r.when == "call"
    )
    if lines:
        terminalreporter.section("cases tried")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.hookimpl(trylast=True)  # after every hook that deselects tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start long tests first; pytest-xdist gives each worker a contiguous part of the list to begin with."""
    items[:] = longest_first(items, [expected_seconds(i.nodeid) for i in items], worker_count())


def worker_count() -> int:
    """How many pytest-xdist workers share the list."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def longest_first(items: list[Any], seconds: list[float], workers: int) -> list[Any]:
    """The items in parts of equal length, one for each worker; each part starts with its share of the long items.

    Args:
        items: The items.
        seconds: How long each takes; items with 0 keep their order, after the long ones.
        workers: The number of parts.
    """
    by_length = sorted((n for n in range(len(items)) if seconds[n]), key=lambda n: -seconds[n])
    others = (n for n in range(len(items)) if not seconds[n])
    order: list[int] = []
    for worker in range(workers):
        length = (len(items) - len(order)) // (workers - worker)
        own = by_length[worker::workers]
        order += own + [next(others) for _ in range(length - len(own))]
    return [items[n] for n in order]


def pytest_unconfigure() -> None:
    """Stop what all test modules share."""
    if "tests.helpers.postgres" in sys.modules:
        sys.modules["tests.helpers.postgres"].stop_shared_server()
