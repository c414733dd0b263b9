"""The web processes of ``docs/deployment.md`` under uvicorn, on one PostgreSQL store, with workers: some are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.child_process import child_environment
from tests.helpers.ports import own_port
from tests.helpers.postgres import new_database, shared_server

for module in ("dbos", "psycopg", "starlette", "uvicorn"):
    pytest.importorskip(module, reason=f"{module} is not installed")

ROOT = Path(__file__).parents[1]
SECRET = "the secret of all of these processes"
RUNS, CLIENTS = 40, 8

DESK = """
from agentfsm import Actor, Agent, Approval, tool
from tests.helpers.worker_app import Steps

@tool(requires_approval=Approval(roles=("manager",)), idempotent=True)
def refund(order: int) -> str:
    "Refund an order."
    return f"refunded {order}"

desk = Agent(Steps("refund"), tools=[refund])

def sign_in(user):
    return Actor(user, ("manager",) if user == "ann" else (), verified=True)
"""
"""The agent of the guide with a model that serves any number of runs, and what stands for a sign-in."""


class Desk:
    """Web processes and workers in a folder with the files of the guide, and what clients ask of them."""

    def __init__(self, folder: Path, url: str) -> None:
        guide = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
        for name in ("front.py", "main.py"):
            (block,) = re.findall(rf"^```python {re.escape(name)}\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
            (folder / name).write_text(block)
        (folder / "desk.py").write_text(DESK)
        main = (
            (folder / "main.py")
            .read_text()
            .replace("waker=open_waker(url))", "waker=open_waker(url), authenticate=sign_in)")
        )
        (folder / "main.py").write_text(f"from desk import sign_in\n{main}")
        self.folder, self.url = folder, url
        self.env = child_environment() | {
            "AGENTFSM_SECRET": SECRET,
            "AGENTFSM_STORE": url,
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        }
        self.web: list[tuple[subprocess.Popen[Any], str]] = []
        self.workers: list[subprocess.Popen[Any]] = []
        self.requests = 0
        self._counting = threading.Lock()

    def start_web(self) -> tuple[subprocess.Popen[Any], str]:
        """Start a web process; returns it with its address."""
        port = own_port()
        command = [sys.executable, "-m", "uvicorn", "main:app", "--port", str(port), "--log-level", "warning"]
        return subprocess.Popen(command, cwd=self.folder, env=self.env), f"http://127.0.0.1:{port}"

    def start_worker(self) -> None:
        """Start a worker, which serves an agent whose refunds need approval."""
        command = [sys.executable, "-m", "agentfsm", "worker", "desk:desk"]
        self.workers.append(subprocess.Popen(command, cwd=self.folder, env=self.env, stderr=subprocess.DEVNULL))

    def request(self, first: int, method: str, path: str, body: Any = None) -> httpx.Response:
        """The answer of one of the two web processes; of the other one, or a new one, if that is killed meanwhile."""
        for attempt in range(200):
            _, address = self.web[(first + attempt) % 2]
            try:
                answered = httpx.request(
                    method, address + path, json=body, headers={"x-user": "ann"}, timeout=60, trust_env=False
                )
            except httpx.TransportError:
                time.sleep(0.1)
                continue
            with self._counting:
                self.requests += 1
            return answered
        raise AssertionError(f"nobody answers {path}")

    def kill_web(self, which: int) -> None:
        """Kill a web process, and start another one in its place."""
        process, _ = self.web[which]
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.web[which] = self.start_web()

    def kill_worker(self) -> None:
        """Kill one of the workers."""
        process = self.workers.pop()
        process.kill()
        process.wait()

    def close(self) -> None:
        """Kill all processes."""
        while self.workers:
            self.kill_worker()
        for process, _ in self.web:
            process.kill()
            process.wait()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with shared_server() as server:
        desk = Desk(tmp_path, new_database(server))
        desk.web = [desk.start_web(), desk.start_web()]
        desk.start_worker()
        desk.start_worker()
        yield desk
        desk.close()


def until(condition: Callable[[], Any]) -> Any:
    """What a condition returns as soon as that is true."""
    end = time.monotonic() + 200
    while not (found := condition()):
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.1)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_and_answers_are_not_lost_when_web_processes_and_a_worker_are_killed(desk: Desk) -> None:
    def submit(number: int) -> str:
        body = {"prompt": f"Refund order {number}.", "key": f"order-{number}"}
        answered = desk.request(number, "POST", "/runs", body)
        assert answered.status_code == 202, answered.text
        return str(answered.json()["run_id"])

    def answer(waiting: dict[str, Any]) -> int:
        """Answer a request through the process to which the run was not submitted."""
        run_id, body = waiting["run_id"], {"allow": True, "digest": waiting["digest"]}
        return desk.request(ids.index(run_id) + 1, "POST", f"/runs/{run_id}/answer", body).status_code

    def ask_for_more() -> list[dict[str, Any]]:
        return [each for each in desk.request(0, "GET", "/waiting").json() if each["run_id"] not in answered]

    answered, told = set[str](), list[int]()
    with ThreadPoolExecutor(CLIENTS) as clients:
        submitted = clients.map(submit, range(RUNS))
        ids = [next(submitted) for _ in range(RUNS // 4)]
        desk.kill_web(0)
        ids += submitted
        assert len(set(ids)) == RUNS
        while len(answered) < RUNS:
            waiting = until(ask_for_more)
            answers = clients.map(answer, waiting)
            if len(answered) < RUNS // 2 <= len(answered) + len(waiting):
                told.append(next(answers))
                desk.kill_web(1)
                desk.kill_worker()
            told += answers
            answered |= {each["run_id"] for each in waiting}
    # an answer whose 200 was lost with a process is refused when it is repeated, before or after the run has ended
    assert set(told) <= {200, 409, 410}
    assert len(told) - told.count(200) <= CLIENTS
    assert desk.requests >= 2 * RUNS

    def all_end() -> bool:
        return all(desk.request(0, "GET", f"/runs/{run_id}").json()["status"] == "finished" for run_id in ids)

    until(all_end)
    ended = [desk.request(1, "GET", f"/runs/{run_id}").json() for run_id in ids]
    assert ended == [{"status": "finished", "ending": "completed", "answer": "done"}] * RUNS
    command = [sys.executable, "-m", "agentfsm", "verify", "--json"]
    verified = subprocess.run(command, env=desk.env, capture_output=True, text=True, timeout=120, check=False)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert {json.loads(line)["run_id"] for line in verified.stdout.splitlines()} >= set(ids)
