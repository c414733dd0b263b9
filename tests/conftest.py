"""Shared pytest configuration: the totals that tests count are printed at the end of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
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

COUNTED = "counted"


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
