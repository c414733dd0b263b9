"""Shared pytest configuration: the totals that tests count are printed at the end of a run."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Hundreds of tests start an interpreter or fork one. Bytecode is cached on disk even where the environment says
# otherwise, or each of them would compile the package, and each pytest in them rewrite the test modules, again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Every run of every test is checked against the model of its graph's proofs, also in other processes.
os.environ["AGENTFSM_MONITOR"] = "raise"

# A machine that has other work may take any time for an example.
settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")

# All that is imported and collected stays until the end: looking through it for garbage, again and again, finds none.
gc.disable()

COUNTED = "counted"


def pytest_collection_finish() -> None:
    """From here on, look for garbage, but not in what has been collected."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with whole programs: they take longest, and a long test that starts last leaves other workers idle."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file that has no test of those that are asked for: "-m slow and ..." needs "mark.slow" somewhere."""
    asked = re.match("(slow|soak|servers)( and|$)", config.option.markexpr)
    if asked is None or not collection_path.name.startswith("test_"):
        return None
    return True if f"mark.{asked[1]}" not in collection_path.read_text(encoding="utf-8") else None


@pytest.fixture
def counted(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Call it with a line that says how many cases a test has tried; the line is printed at the end of the test run."""
    return lambda line: record_property(COUNTED, line)


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    """The URL of an empty database on a PostgreSQL server, which the tests of one module use one after the other."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    from tests.helpers.postgres import new_database, shared_server  # starts the server

    with shared_server() as server:
        yield new_database(server)


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


def pytest_unconfigure() -> None:
    """Stop what all test modules share."""
    if "tests.helpers.postgres" in sys.modules:
        sys.modules["tests.helpers.postgres"].stop_shared_server()
