"""The worker processes of ``make bench-scale``, what they are given to do, and when they did it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from agentfsm import Runs
from tests.helpers.child_process import child_environment

SECRET = "the secret of all processes of this benchmark"  # of nobody
APPROVED_EVERY = 5


class Workers:
    """The worker processes.

    Args:
        url: The database.
        folder: Where they write what they did.
        steps: How many steps each run has.
    """

    def __init__(self, url: str, folder: Path, steps: int) -> None:
        worker = [sys.executable, "-m", "agentfsm", "worker", "tests.helpers.scale_app:scale"]
        self._command = [*worker, "--store", url]
        self._env = child_environment() | {
            "AGENTFSM_SECRET": SECRET,
            "SCALE_FOLDER": str(folder),
            "SCALE_STEPS": str(steps),
        }
        self._folder = folder
        self.alive: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start one more."""
        with (self._folder / "workers.log").open("ab") as log:
            self.alive.append(subprocess.Popen(self._command, env=self._env, stdout=log, stderr=log))

    def close(self) -> None:
        """Kill all."""
        for child in self.alive:
            child.kill()
            child.wait(30)


async def submit_all(runs: Runs, count: int, steps: int, *, approvals: bool = True) -> list[str]:
    """Submit all runs, a few at a time; a person must approve one step of every fifth run, unless there are none."""
    gate = asyncio.Semaphore(8)

    async def submit(number: int) -> str:
        async with gate:
            asked_at = number % steps if approvals and number % APPROVED_EVERY == 0 else -1
            return await runs.submit("scale", str(asked_at), idempotency_key=str(number))

    return list(await asyncio.gather(*map(submit, range(count))))


def calls_of_each(folder: Path) -> list[list[tuple[str, float]]]:
    """For each worker, the runs whose steps it made, and when."""
    return [
        [
            (run_id, float(at))
            for run_id, _, at in (line.partition(" ") for line in file.read_text("ascii").splitlines())
        ]
        for file in folder.glob("*.calls")
    ]
