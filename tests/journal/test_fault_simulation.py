"""Random histories of several simulated processes, by seed, in memory and in a SQLite file."""

from __future__ import annotations

import pytest

from tests.helpers.child_process import run_helper

PART = 250
MORE = (*range(PART, 2_000, PART), *range(10_000, 20_000, PART))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("store", ["memory", "sqlite"])
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.soak) for first in MORE)])
def test_every_simulated_run_ends_like_an_uninterrupted_one(first, store, counted):
    told = run_helper("fault_simulation", store, str(first), str(PART))
    assert told["histories"] == PART
    assert told["crashes"] > PART
    assert told["forks"] > PART / 10
    assert told["doubts"] > PART / 10
    assert told["changes"] > PART
    assert told["from snapshots"] > PART
    counted(
        f"simulated worlds in {store}, seeds {first} to {first + PART - 1}: {told['runs']} runs, "
        f"{told['forks']} forks, {told['crashes']} crashes, {told['doubts']} calls in doubt, "
        f"{told['changes']} changes of graph, loaded from a snapshot {told['from snapshots']} times"
    )


@pytest.mark.slow
def test_the_same_seed_gives_the_same_history_in_both_stores():
    told = [run_helper("fault_simulation", store, "0", "20") for store in ("memory", "memory", "sqlite", "sqlite")]
    assert (told[0], told[2]) == (told[1], told[3])  # in two processes, each with its own hashing
