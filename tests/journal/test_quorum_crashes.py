"""A run that needs two votes, killed at every write: no vote is lost or counted twice, and the call runs once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=(pytest.mark.soak, pytest.mark.timeout(1800)))])
def test_no_call_runs_without_its_quorum_and_no_vote_is_lost_or_counted_twice(
    step: int, counted: Callable[[str], None]
) -> None:
    command = [sys.executable, "-m", "tests.helpers.quorum_crashes", str(step)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    counts = json.loads(told.stdout)
    for scenario, votes, payments in (("votes", 2, 1), ("expiry", 1, 0)):
        of = counts[scenario]
        assert of["killed"] == -(-of["points"] // step) > 1
        assert (of["votes"], of["payments"]) == (votes * of["killed"], payments * of["killed"])
        counted(
            f"killed between request and {'payment' if payments else 'expiry'}: at {of['killed']} of {of['points']} "
            f"points, {of['votes']} votes counted once, {of['payments']} payments"
        )
