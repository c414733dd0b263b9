"""Runs in environments whose secrets are our own words: none changes or is called tampered, all replay and resume."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.child_process import run_helper
from tests.helpers.hostile_environments import ENVIRONMENTS

PART, GROUP = 25, 25
ALL = [
    pytest.param(first, PART, range(group, group + GROUP), marks=pytest.mark.soak, id=f"{first}-{group}")
    for first in range(0, 1_025, PART)
    for group in range(0, len(ENVIRONMENTS), GROUP)
]
"""More than 2,000 runs, in each environment."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("first", "count", "environments"), [pytest.param(0, 2, range(len(ENVIRONMENTS)), id="some"), *ALL]
)
def test_no_honest_run_is_changed_or_called_tampered(
    first: int, count: int, environments: range, counted: Callable[[str], None]
) -> None:
    told = run_helper("hostile_environments", str(first), str(count), *map(str, environments))
    assert told["environments"] == len(environments)
    assert told["runs"] >= count * len(environments)
    assert told["withheld"] > 2 * told["runs"]
    assert told["crashes"] > 0
    last = f"{first + count - 1} in environments {environments[0]} to {environments[-1]}"
    counted(
        f"honest runs with hostile variables, seeds {first} to {last}: {told['runs']} runs, {told['crashes']} crashes, "
        f"{told['withheld']} values withheld, 0 called tampered"
    )


def test_there_are_fifty_environments() -> None:
    assert len(ENVIRONMENTS) == 50
    assert len({tuple(each.items()) for each in ENVIRONMENTS}) == 50
