"""Killed anywhere, resumed elsewhere: the same end, nothing acknowledged lost, no effect done too often."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")


def crashes(*arguments: str) -> dict:
    shm = "/dev/shm" if os.path.isdir("/dev/shm") else None
    env = {**os.environ, **({"TMPDIR": shm} if shm else {})}
    done = subprocess.run(
        [sys.executable, "-m", "tests.journal.crashes", *arguments], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return json.loads(done.stdout)


def test_a_run_that_is_killed_at_any_point_comes_to_the_same_end():
    told = crashes("matrix", "4")
    assert told["points"] >= 80
    assert len(told["where"]) >= 12
    assert told["doubts"] >= 5


def test_a_run_that_is_killed_again_and_again_comes_to_the_same_end():
    told = crashes("histories", "7", "25")
    assert told["kills"] >= 25


@pytest.mark.soak
def test_every_point_is_killed_at():
    told = crashes("matrix")
    assert told["points"] >= 300


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_many_histories(seed):
    assert crashes("histories", str(seed), "150")["kills"] >= 150
