"""Killed anywhere, resumed elsewhere: the same end, nothing acknowledged lost, no effect done too often."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")


def crashes(*arguments: str) -> dict:
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    env = {**os.environ, **({"TMPDIR": shm} if shm else {})}
    done = subprocess.run(
        [sys.executable, "-m", "tests.journal.crashes", *arguments], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return json.loads(done.stdout)


def test_a_run_that_is_killed_at_any_point_comes_to_the_same_end():
    told = crashes("matrix", "5")
    assert told["points"] >= 60
    assert len(told["where"]) >= 7
    assert told["kills"]["fork"] >= 15
    assert told["doubts"] >= 3


def test_a_run_that_is_killed_again_and_again_comes_to_the_same_end():
    told = crashes("histories", "7", "20")
    assert told["kills"] >= 20


def test_of_four_processes_that_resume_one_run_one_does():
    told = crashes("race", "8")
    assert told["RunResult"] == 8
    assert sum(told.values()) == 8 + 4 * 8


def test_nobody_takes_a_run_from_an_owner_that_is_frozen_and_it_goes_on_when_it_thaws():
    told = crashes("frozen")
    assert f"process {told['child']}" in told["owner"]
    assert f"process {told['child']}" in told["refused"]
    assert (told["left"], told["code"], told["finished"], told["doubts"]) == (0, 0, True, 0)


def test_a_full_disk_is_a_clear_error_and_the_run_goes_on_when_there_is_room():
    told = crashes("full-disk")
    assert sum(told.values()) >= 3


@pytest.mark.soak
def test_of_four_processes_that_resume_one_run_one_does_thirty_times():
    assert crashes("race", "30")["RunResult"] == 30


@pytest.mark.soak
def test_every_point_is_killed_at():
    told = crashes("matrix")
    assert told["points"] >= 300


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_many_histories(seed):
    assert crashes("histories", str(seed), "150")["kills"] >= 150
