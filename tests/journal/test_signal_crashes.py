"""A process that is killed between sending, acting on and removing answers: none is lost, and none acted on twice."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.helpers.child_process import child_environment
from tests.helpers.postgres import new_database, shared_server

STEPS = [7, pytest.param(1, marks=pytest.mark.soak)]


def require_each_once(step: int, *url: str) -> None:
    command = [sys.executable, "-m", "tests.helpers.signal_crashes", str(step), *url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=child_environment())
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    print(counts)
    assert counts["killed"] == -(-counts["points"] // step) > 1
    assert (counts["votes"], counts["payments"]) == (2 * counts["killed"], counts["killed"])


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_no_answer_is_lost_or_acted_on_twice_in_a_file(step: int) -> None:
    require_each_once(step)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_no_answer_is_lost_or_acted_on_twice_on_a_server(step: int) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    with shared_server() as url:
        require_each_once(step, new_database(url))
