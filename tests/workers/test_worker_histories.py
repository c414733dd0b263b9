"""Histories of workers that are stopped during calls, killed and frozen: every run comes to the end that it should."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.child_process import run_helper

pytest.importorskip("dbos", reason="dbos is not installed")
pytest.importorskip("psycopg", reason="psycopg is not installed")


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("kind", ["postgres", "sqlite"])
@pytest.mark.parametrize(("first", "count", "moments"), [(0, 1, 6), pytest.param(100, 25, 15, marks=pytest.mark.soak)])
def test_no_run_is_lost_cancelled_or_repeated_however_its_workers_end(
    kind: str, first: int, count: int, moments: int, counted: Callable[[str], None]
) -> None:
    counts = run_helper("worker_histories", kind, str(first), str(count), str(moments))
    counted(f"workers on {kind}: " + ", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    assert counts["histories"] == count
    if count > 1:
        for what in ("stopped", "stopped during calls", "killed", "frozen", "cancelled", "forked", "runs completed"):
            assert counts[what] > 0, what
