"""Many workers on one PostgreSQL server: submitted runs with approvals among them, and workers that are killed.

    python -m tests.benchmarks.scale_benchmark --workers 8 --runs 2000 --steps 20 --kills 20

First, records per second of 1, 2 and 8 workers, and of bare loops that write the same rows, interleaved. Then all
runs, with kills spread over them: the time until the runs of a killed worker have another owner, and from an answer to
the next step. The workers have the default options. The exit code is 1 if a run
does not end or does not verify, or if a bound is missed. ``--plots FOLDER`` writes a picture of each figure. With
``--disk`` the server waits for its disk at each commit, as PostgreSQL does by default.
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

import psycopg

from agentfsm import Allow, HumanReplyError, RunQuery, Runs, open_store
from agentfsm.journal.store import Store
from agentfsm.journal.verification import GOOD
from agentfsm.workers import open_waker
from tests.benchmarks.scale_throughput import Throughput, measure_throughput
from tests.benchmarks.scale_workers import SECRET, Workers, calls_of_each, submit_all
from tests.helpers.plots import bar_plot
from tests.helpers.postgres import new_database, shared_server, stop_shared_server

MAX_TAKEOVER_S = 2.0


@dataclass
class Measured:
    """What was measured, in seconds.

    Attributes:
        answered: When each run was answered.
        takeovers: Until the runs of each killed worker had another owner.
        waits: From each answer to the next step of its run.
        killed_runs: How many runs the killed workers had.
        ended: The part of all runs that have ended.
        failures: What was not as it must be.
    """

    answered: dict[str, float] = field(default_factory=dict[str, float])
    takeovers: list[float] = field(default_factory=list[float])
    waits: list[float] = field(default_factory=list[float])
    killed_runs: int = 0
    ended: float = 0.0
    failures: list[str] = field(default_factory=list[str])


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
    """Kill a random worker each time that so many runs have ended, and measure how long its runs have no owner."""
    dice = random.Random(options.seed)
    for number in range(options.kills):
        while to.ended < (number + dice.random()) / (options.kills + 1):
            await asyncio.sleep(0.05)
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


async def measure_kills(url: str, folder: Path, options: argparse.Namespace) -> Measured:
    """Have all runs made while workers are killed."""
    workers, measured = Workers(url, folder, options.steps), Measured()
    waker = open_waker(url)
    try:
        async with open_store(url) as store:
            runs = Runs(store, secret=SECRET.encode(), waker=waker)
            begun = time.monotonic()
            run_ids = await submit_all(runs, options.runs, options.steps)
            submitted_s = time.monotonic() - begun
            print(f"submitted {len(run_ids)} runs, {len(run_ids) / submitted_s:,.0f} per second", flush=True)
            for _ in range(options.workers):
                workers.start()
            begun = time.monotonic()
            answers = asyncio.create_task(answer_all(runs, measured))
            killer = asyncio.create_task(kill_some(workers, store, options, measured))
            while measured.ended < 1:
                measured.ended = await runs.count(RunQuery(status="finished")) / len(run_ids)
                if time.monotonic() - begun > options.limit:
                    measured.failures.append(f"only {measured.ended:.0%} of the runs ended in {options.limit:g} s")
                    await explain(store, folder)
                    break
                await asyncio.sleep(0.25)
            elapsed = time.monotonic() - begun
            for task in (answers, killer):
                task.cancel()
            await asyncio.wait({answers, killer})
            await report(runs, run_ids, elapsed, folder, measured)
    finally:
        workers.close()
        await waker.aclose()
    if len(measured.takeovers) < options.kills:
        measured.failures.append(f"only {len(measured.takeovers)} of {options.kills} workers were killed")
    if max(measured.takeovers, default=0.0) > MAX_TAKEOVER_S:
        measured.failures.append(f"a takeover took longer than {MAX_TAKEOVER_S:g} s")
    return measured


async def explain(store: Store, folder: Path) -> None:
    """Print what is known of the runs that did not end."""
    log = (folder / "workers.log").read_text().splitlines()
    for status in ("running", "suspended"):
        for head in await store.heads(status):
            print(head.run_id, status, f"epoch {head.epoch}", f"seq {head.seq}", head.owner)
            print(*(line for line in log if head.run_id in line), sep="\n")
    print(*(line for line in log if "Error" in line or "WARNING" in line), sep="\n")


async def report(runs: Runs, run_ids: Sequence[str], elapsed: float, folder: Path, measured: Measured) -> None:
    """Verify all runs, and print the figures."""
    reports = [await runs.verify(run_id) for run_id in run_ids]
    good = sum(each.code == GOOD for each in reports)
    ended = await runs.count(RunQuery(ending="completed"))
    records = sum(each.records for each in reports)
    if min(good, ended) < len(run_ids):
        measured.failures.append("not every run ended and verifies")
    steps: dict[str, list[float]] = {}
    for run_id, at in (call for calls in calls_of_each(folder) for call in calls):
        steps.setdefault(run_id, []).append(at)
    for run_id, answered in measured.answered.items():
        if later := [at for at in steps.get(run_id, ()) if at >= answered]:
            measured.waits.append(min(later) - answered)
    print(f"{ended} of {len(run_ids)} runs completed, {good} verify, in {elapsed:.1f} s")
    print(f"{records:,} records, {records / elapsed:,.0f} per second; {len(measured.answered)} approvals")
    print("from an answer to the next step:", ", ".join(f"{name} {s:.2f} s" for name, s in spread(measured.waits)))
    print(
        f"{len(measured.takeovers)} kills, {measured.killed_runs} runs cut off; all taken over after "
        + (", ".join(f"{each:.2f}" for each in sorted(measured.takeovers)) or "-")
        + " s"
    )


def spread(seconds: Sequence[float]) -> list[tuple[str, float]]:
    """Median, 90th and 99th percentile, and maximum."""
    if len(seconds) < 2:
        return [("the only one", each) for each in seconds]
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return [("p50", cuts[49]), ("p90", cuts[89]), ("p99", cuts[98]), ("the longest", max(seconds))]


def report_throughput(found: Throughput) -> list[str]:
    """Print records per second and their ratios; returns which bounds were missed."""
    for number, figures in sorted(found.stored.items()):
        print(f"{number} workers: {', '.join(f'{each:,.0f}' for each in figures)} records per second")
    print(f"bare loops: {', '.join(f'{each:,.0f}' for each in found.bare)} records per second")
    missed: list[str] = []
    for what, ratio, least in found.ratios():
        print(f"{what}: {ratio:.2f} (at least {least:g})", flush=True)
        if ratio < least:
            missed.append(f"{what}: {ratio:.2f}, and not {least:g}")
    return missed


def plot(folder: Path, options: argparse.Namespace, found: Throughput, measured: Measured) -> None:
    """Write a picture of each figure."""
    cores = f"{os.cpu_count()} cores"
    rounds = f"median of {len(found.bare)} interleaved rounds, {cores}"
    most = max(found.stored)
    under = f"{options.workers} workers, {options.runs:,} runs of {options.steps} steps, {options.kills} kills, {cores}"
    median = {number: statistics.median(figures) for number, figures in sorted(found.stored.items())}
    bare = statistics.median(found.bare)
    pictures = {
        "scale-throughput": bar_plot(
            "Records per second, against bare loops that write the same rows",
            [(f"{most} bare loops", bare), (f"{most} workers", median[most])],
            "",
            subtitle=rounds,
            bound=("half of the bare loops", bare / 2),
        ),
        "scale-workers": bar_plot(
            "Records per second by the number of workers",
            [(f"{number} worker{'s' if number > 1 else ''}", figure) for number, figure in median.items()],
            "",
            subtitle=rounds,
        ),
        "scale-takeovers": bar_plot(
            "Seconds until the runs of a killed worker have another owner",
            [(f"kill {number}", each) for number, each in enumerate(measured.takeovers, 1)],
            "s",
            subtitle=under,
            bound=(f"{MAX_TAKEOVER_S:g} s", MAX_TAKEOVER_S),
        ),
        "scale-answers": bar_plot(
            "Seconds from a person's answer to the next step", spread(measured.waits), "s", subtitle=under
        ),
    }
    for name, picture in pictures.items():
        (folder / f"{name}.svg").write_text(picture, encoding="utf-8")


def use_disk(server: str) -> None:
    """Have a server wait for its disk, for which those of the tests do not."""
    with psycopg.connect(server, autocommit=True) as db:
        db.execute("ALTER SYSTEM SET fsync = on")
        db.execute("SELECT pg_reload_conf()")


def main() -> int:
    """Run the benchmark as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison of 1, 2 and --workers workers")
    parser.add_argument("--sample", type=int, default=150, help="runs for one or two of them")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which to give up")
    parser.add_argument("--disk", action="store_true", help="have the server wait for its disk")
    parser.add_argument("--plots", type=Path, help="the folder for pictures of the figures")
    options = parser.parse_args()
    print(
        f"{options.workers} workers, {options.runs} runs of {options.steps} steps, {os.cpu_count()} cores", flush=True
    )
    numbers = sorted({1, 2, options.workers})
    with shared_server() as server, tempfile.TemporaryDirectory() as folder:
        if options.disk:
            use_disk(server)
        found = asyncio.run(measure_throughput(server, numbers, options.sample, options.steps, options.rounds))
        failures = report_throughput(found)
        measured = asyncio.run(measure_kills(new_database(server), Path(folder), options))
    stop_shared_server()
    if options.plots is not None:
        plot(options.plots, options, found, measured)
    for failure in [*failures, *measured.failures]:
        print(f"MISSED: {failure}")
    return int(bool(failures or measured.failures))


if __name__ == "__main__":
    sys.exit(main())
