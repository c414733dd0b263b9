"""Random histories of several simulated processes, by seed, in memory, in a SQLite file and on a PostgreSQL server."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.child_process import run_helper

PART = 250
ALL = (*range(0, 2_000, PART), *range(10_000, 20_000, PART))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("store", "first", "count"),
    [
        *(("sqlite", 0, 30), ("postgres", 0, 15)),
        *(pytest.param(store, first, PART, marks=pytest.mark.soak) for store in ("memory", "sqlite") for first in ALL),
        *(pytest.param("postgres", first, 100, marks=pytest.mark.soak) for first in ALL),
    ],
)
def test_every_simulated_run_ends_like_an_uninterrupted_one_and_goes_the_same_way_in_each_store(
    store: str, first: int, count: int, request: pytest.FixtureRequest, counted: Callable[[str], None]
) -> None:
    kind = request.getfixturevalue("database") if store == "postgres" else store
    told = run_helper("fault_simulation", kind, str(first), str(count))
    assert told["histories"] == count
    assert told["crashes"] > count
    assert told["forks"] > count / 10
    assert told["doubts"] > count / 10
    assert told["changes"] > count * 0.8  # of 100 histories, some batches have fewer than 100
    assert told["from snapshots"] > count
    assert told == run_helper("fault_simulation", "memory", str(first), str(count))  # by another process: by the seed
    counted(
        f"simulated worlds in {store}, seeds {first} to {first + count - 1}: {told['runs']} runs, "
        f"{told['forks']} forks, {told['crashes']} crashes, {told['doubts']} calls in doubt, "
        f"{told['changes']} changes of graph, loaded from a snapshot {told['from snapshots']} times"
    )
