"""Random histories of a whole small world, by seed."""

from __future__ import annotations

import pytest

from tests.journal.test_crashes import done

SEEDS, PARTS = 2000, 4
PART = SEEDS // PARTS


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", [*range(0, SEEDS, PART), pytest.param(10_000, marks=pytest.mark.soak)])
def test_whatever_happens_each_run_comes_to_the_end_of_its_uninterrupted_life(first, counted):
    count = 5000 if first >= SEEDS else PART
    told = done("simulation", str(first), str(count))
    assert told["histories"] == count
    assert told["crashes"] > count
    assert told["forks"] > count / 10
    assert told["doubts"] > count / 10
    counted(
        f"simulated worlds, seeds {first} to {first + count - 1}: {told['runs']} runs, {told['forks']} forks, "
        f"{told['crashes']} crashes, {told['doubts']} calls in doubt"
    )


def test_the_same_seed_gives_the_same_history():
    assert done("simulation", "0", "20") == done("simulation", "0", "20")  # in two processes, each with its own hashing
