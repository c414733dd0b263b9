"""Records per second of 1, 2 and 8 workers, and of a bare loop that writes the same rows, interleaved."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from agentfsm import RunQuery, Runs, open_store
from agentfsm.workers import open_waker
from tests.benchmarks.scale_workers import SECRET, Workers, calls_of_each, submit_all
from tests.helpers.child_process import child_environment
from tests.helpers.postgres import drop_database, new_database

MIN_OF_BARE, MIN_TWO_OF_ONE, MIN_EIGHT_OF_TWO = 0.5, 1.3, 0.9
MEASURED_UNTIL = 0.95
"""The part of all steps after which the last runs no longer keep every worker busy."""


@dataclass
class Throughput:
    """Records per second, a figure for each round.

    Attributes:
        stored: Of workers, by their number.
        bare: Of as many bare loops as the most workers.
    """

    stored: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    bare: list[float] = field(default_factory=list[float])

    def ratios(self) -> list[tuple[str, float, float]]:
        """What is compared, the median ratio of each round, and the least that it may be."""
        one, two, most = sorted(self.stored)
        return [
            (f"{most} workers against {most} bare loops", _ratio(self.stored[most], self.bare), MIN_OF_BARE),
            (f"{two} workers against {one}", _ratio(self.stored[two], self.stored[one]), MIN_TWO_OF_ONE),
            (f"{most} workers against {two}", _ratio(self.stored[most], self.stored[two]), MIN_EIGHT_OF_TWO),
        ]


def _ratio(these: Sequence[float], those: Sequence[float]) -> float:
    return median(this / that for this, that in zip(these, those, strict=True))


async def measure_throughput(server: str, numbers: Sequence[int], runs: int, steps: int, rounds: int) -> Throughput:
    """Measure each number of workers, and bare loops, once per round.

    Args:
        server: The server.
        numbers: How many workers; the last is the number of bare loops.
        runs: How many runs for one or two workers; more workers get more.
        steps: How many steps each run has.
        rounds: How many rounds.
    """
    found = Throughput({number: [] for number in numbers})
    for _ in range(rounds):
        for number in numbers:
            url, count = new_database(server), runs * max(1, number // 2)
            found.stored[number].append(await _stored(url, number, count, steps))
            if number == numbers[-1]:
                found.bare.append(await _bare(url, server, number, count))
            drop_database(url)
    return found


async def _stored(url: str, number: int, runs: int, steps: int) -> float:
    """Records per second while so many workers are all at work."""
    waker = open_waker(url)
    with tempfile.TemporaryDirectory() as folder:
        workers = Workers(url, Path(folder), steps)
        try:
            async with open_store(url) as store:
                own = Runs(store, secret=SECRET.encode(), waker=waker)
                await submit_all(own, runs, steps, approvals=False)
                await _start_at_once(workers, number, Path(folder))
                while await own.count(RunQuery(status="finished")) < runs:
                    await asyncio.sleep(0.25)
                records = sum(head.seq for head in await store.heads())
        finally:
            workers.close()
            await waker.aclose()
        times = [[at for _, at in calls] for calls in calls_of_each(Path(folder))]
    begun = max(min(each) for each in times)
    every = sorted(at for each in times for at in each)
    ended = every[int(MEASURED_UNTIL * len(every)) - 1]
    if len(times) < number or begun >= ended:
        raise SystemExit(f"{runs} runs are too few: they ended before all {number} workers had begun")
    return records / len(every) * sum(begun < at <= ended for at in every) / (ended - begun)


async def _start_at_once(workers: Workers, number: int, folder: Path) -> None:
    """Start workers, and let them begin when each of them has a run."""
    (folder / "hold").touch()
    for _ in range(number):
        workers.start()
    while len(list(folder.glob("*.waiting"))) < number:
        await asyncio.sleep(0.05)
    (folder / "hold").unlink()


async def _bare(source: str, server: str, number: int, runs: int) -> float:
    """Records per second of so many processes that write the rows of runs in one fenced statement each."""
    target = new_database(server)
    async with open_store(target) as store:
        await store.maintenance.prepare()
    command = [sys.executable, "-m", "tests.helpers.bare_writer", source, target, str(-(-runs // number))]
    writers = [
        subprocess.Popen(
            command, env=child_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        for _ in range(number)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
    told = [writer.communicate()[0] for writer in writers]
    drop_database(target)
    figures = [tuple(map(float, line.split())) for line in told]
    begun, ended = min(each[0] for each in figures), max(each[1] for each in figures)
    return sum(each[2] for each in figures) / (ended - begun)
