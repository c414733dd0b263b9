"""Many workers on one PostgreSQL server: submitted runs with approvals among them, and workers that are killed.

    python -m tests.benchmarks.scale_benchmark --workers 8 --runs 2000 --steps 20 --kills 20

Prints records per second, the time from an answer to the next step, and the time until the runs of a killed worker have
another owner. The exit code is 1 if a run does not end or does not verify, or if a takeover took longer than a bound.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentfsm import Allow, HumanReplyError, RunQuery, Runs, open_store
from agentfsm.journal.store import Store
from agentfsm.journal.verification import GOOD
from agentfsm.workers import open_waker
from tests.helpers.child_process import child_environment
from tests.helpers.postgres import new_database, shared_server

SECRET = "the secret of all processes of this benchmark"  # of nobody
MAX_TAKEOVER_S = 2.0
APPROVED_EVERY = 5


@dataclass
class Measured:
    """What was measured, in seconds."""

    answered: dict[str, float] = field(default_factory=dict[str, float])
    takeovers: list[float] = field(default_factory=list[float])
    killed_runs: int = 0


class Workers:
    """The worker processes."""

    def __init__(self, url: str, folder: Path, steps: int) -> None:
        self._command = [sys.executable, "-m", "agentfsm", "worker", "tests.helpers.scale_app:scale", "--store", url]
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


async def submit_all(runs: Runs, count: int, steps: int) -> list[str]:
    """Submit all runs, a few at a time."""
    gate = asyncio.Semaphore(8)

    async def submit(number: int) -> str:
        async with gate:
            asked_at = number % steps if number % APPROVED_EVERY == 0 else -1
            return await runs.submit("scale", str(asked_at), idempotency_key=str(number))

    return list(await asyncio.gather(*map(submit, range(count))))


async def answer_all(runs: Runs, measured: Measured) -> None:
    """Answer whatever waits for a person, until cancelled."""
    while True:
        async for info in runs.iterate(RunQuery(status="suspended", limit=500)):
            waits = info.waiting_for is not None and info.waiting_for.kind == "approval"
            if waits and info.run_id not in measured.answered:
                try:
                    await runs.answer(info.run_id, Allow(), by="Ann")
                except HumanReplyError:  # it is listed a moment longer than it waits
                    continue
                measured.answered[info.run_id] = time.time()
        await asyncio.sleep(0.2)


async def kill_some(workers: Workers, store: Store, options: argparse.Namespace, to: Measured) -> None:
    """Kill a random worker now and then, and measure how long its runs have no owner."""
    dice = random.Random(options.seed)
    for _ in range(options.kills):
        await asyncio.sleep(options.gap * dice.uniform(0.5, 1.5))
        victim, left = await choose_victim(workers, store, dice)
        victim.kill()
        victim.wait(30)
        killed = time.monotonic()
        workers.alive.remove(victim)
        workers.start()
        to.killed_runs += len(left)
        while left and time.monotonic() - killed < 30:
            running = {head.run_id: head for head in await store.heads("running")}
            left = {i: e for i, e in left.items() if i in running and running[i].epoch == e}
            await asyncio.sleep(0.05)
        to.takeovers.append(time.monotonic() - killed)


async def choose_victim(
    workers: Workers, store: Store, dice: random.Random
) -> tuple[subprocess.Popen[bytes], dict[str, int]]:
    """A worker that is at work, and the runs that it owns, with their epochs."""
    while True:
        children = {f"process {child.pid} ": child for child in workers.alive}
        owned: dict[str, dict[str, int]] = {name: {} for name in children}
        for head in await store.heads("running"):
            for name in children:
                if head.owner is not None and head.owner.startswith(name):
                    owned[name][head.run_id] = head.epoch
        busy = sorted(name for name, runs in owned.items() if runs)
        if busy:
            name = dice.choice(busy)
            return children[name], owned[name]
        await asyncio.sleep(0.1)


def first_steps(folder: Path) -> dict[str, list[float]]:
    """When each run made its steps."""
    found: dict[str, list[float]] = {}
    for file in folder.glob("*.calls"):
        for line in file.read_text(encoding="ascii").splitlines():
            run_id, _, at = line.partition(" ")
            found.setdefault(run_id, []).append(float(at))
    return found


def percentiles(seconds: Sequence[float]) -> str:
    """Median, 99th percentile and maximum, in milliseconds."""
    if len(seconds) < 2:
        return "too few"
    p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98]
    return f"p50 {1000 * statistics.median(seconds):.0f} ms, p99 {1000 * p99:.0f} ms, max {1000 * max(seconds):.0f} ms"


async def measure(url: str, folder: Path, options: argparse.Namespace) -> int:
    """Run the benchmark, print what was measured, and return the exit code."""
    workers, measured = Workers(url, folder, options.steps), Measured()
    waker = open_waker(url)
    try:
        async with open_store(url) as store:
            runs = Runs(store, secret=SECRET.encode(), waker=waker)
            begun = time.monotonic()
            run_ids = await submit_all(runs, options.runs, options.steps)
            submitted_s = time.monotonic() - begun
            print(f"submitted {len(run_ids)} runs, {len(run_ids) / submitted_s:,.0f} per second")
            for _ in range(options.workers):
                workers.start()
            begun = time.monotonic()
            answers = asyncio.create_task(answer_all(runs, measured))
            killer = asyncio.create_task(kill_some(workers, store, options, measured))
            while (ended := await runs.count(RunQuery(status="finished"))) < len(run_ids):
                if time.monotonic() - begun > options.limit:
                    print(f"only {ended} of {len(run_ids)} runs ended in {options.limit:g} s")
                    await explain(store, folder)
                    break
                await asyncio.sleep(0.25)
            elapsed = time.monotonic() - begun
            for task in (answers, killer):
                task.cancel()
            await asyncio.wait({answers, killer})
            return await report(runs, run_ids, elapsed, folder, measured)
    finally:
        workers.close()
        await waker.aclose()


async def explain(store: Store, folder: Path) -> None:
    """Print what is known of the runs that did not end."""
    log = (folder / "workers.log").read_text().splitlines()
    for status in ("running", "suspended"):
        for head in await store.heads(status):
            print(head.run_id, status, f"epoch {head.epoch}", f"seq {head.seq}", head.owner)
            print(*(line for line in log if head.run_id in line), sep="\n")
    print(*(line for line in log if "Error" in line or "WARNING" in line), sep="\n")


async def report(runs: Runs, run_ids: Sequence[str], elapsed: float, folder: Path, measured: Measured) -> int:
    """Verify all runs, and print the figures."""
    reports = [await runs.verify(run_id) for run_id in run_ids]
    good = sum(each.code == GOOD for each in reports)
    ended = await runs.count(RunQuery(ending="completed"))
    records = sum(each.records for each in reports)
    steps = first_steps(folder)
    waits = [
        min((at for at in steps.get(run_id, ()) if at >= answered), default=answered) - answered
        for run_id, answered in measured.answered.items()
    ]
    print(f"{ended} of {len(run_ids)} runs completed, {good} verify, in {elapsed:.1f} s")
    print(f"{records:,} records, {records / elapsed:,.0f} per second; {len(measured.answered)} approvals")
    print(f"from an answer to the next step: {percentiles(waits)}")
    longest = max(measured.takeovers, default=0.0)
    print(
        f"{len(measured.takeovers)} kills, {measured.killed_runs} runs cut off; all taken over after "
        + (", ".join(f"{each:.2f}" for each in sorted(measured.takeovers)) or "-")
        + " s"
    )
    return int(ended < len(run_ids) or good < len(run_ids) or longest > MAX_TAKEOVER_S)


def main() -> int:
    """Run the benchmark as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--gap", type=float, default=4.0, help="seconds between two kills, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which to give up")
    options = parser.parse_args()
    print(f"{options.workers} workers, {options.runs} runs of {options.steps} steps, {os.cpu_count()} cores")
    with shared_server() as server, tempfile.TemporaryDirectory() as folder:
        return asyncio.run(measure(new_database(server), Path(folder), options))


if __name__ == "__main__":
    sys.exit(main())
