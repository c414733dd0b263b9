"""A process that is killed where a run has what users add: it comes to the same end, and repeats what it may alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.child_process import run_helper
from tests.helpers.postgres import new_database, shared_server

STEPS = [13, pytest.param(1, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]


def require_the_same_end(step: int, counted: Callable[[str], None], *url: str) -> None:
    counts = run_helper("changed_crashes", str(step), *url)
    counted(f"own states, sub-agents side by side, streams and pictures{' on a server' * bool(url)}: {counts}")
    assert counts["killed"] == -(-counts["points"] // step) > 1
    assert counts["doubts"] > 0 or step > 1


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_a_run_with_what_users_add_that_is_killed_comes_to_the_same_end(
    step: int, counted: Callable[[str], None]
) -> None:
    require_the_same_end(step, counted)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_a_run_with_what_users_add_that_is_killed_comes_to_the_same_end_on_a_server(
    step: int, counted: Callable[[str], None]
) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    with shared_server() as url:
        require_the_same_end(step, counted, new_database(url))
