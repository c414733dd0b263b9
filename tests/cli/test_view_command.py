"""``agentfsm view`` serves a store to this machine, and stops with Ctrl-C."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from agentfsm import SqliteStore
from tests.helpers.child_process import child_environment
from tests.helpers.journal_scenarios import finished_run


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "agentfsm", "view", *arguments]


def environment() -> dict[str, str]:
    return child_environment() | {"PYTHONPATH": str(Path.cwd())}


def test_a_store_is_served_while_it_is_written_and_ctrl_c_stops_it(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "runs.db") as store:
        finished_run(store, "sample")
        viewer = subprocess.Popen(
            command("--store", "runs.db", "--port", "0"),
            cwd=tmp_path,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert viewer.stderr is not None
        line = viewer.stderr.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert address is not None, line
        with httpx.Client(base_url=address[0], trust_env=False) as client:
            assert [run["id"] for run in client.get("/api/runs").json()["runs"]] == ["sample"]
            finished_run(store, "second")
            assert [run["id"] for run in client.get("/api/runs").json()["runs"]] == ["second", "sample"]
            with client.stream("GET", "/api/run/events?run=sample") as events:
                assert next(events.iter_lines()).startswith("retry:")
                viewer.send_signal(signal.SIGINT)
                assert viewer.wait(20) in (0, 130)
        assert viewer.stderr.read() == ""
        viewer.stderr.close()


def test_a_store_that_is_not_there_is_wrong_usage_and_is_not_created(tmp_path: Path) -> None:
    done = subprocess.run(
        command("--store", "none.db"), cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "there is no store at none.db" in done.stderr
    assert list(tmp_path.iterdir()) == []
