"""The benchmarks run: each part of them once, with sizes that say nothing about speed."""

import argparse
import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import (
    journal_benchmark,
    listing_benchmark,
    loop_benchmark,
    scale_benchmark,
    streaming_benchmark,
)
from tests.benchmarks.scale_throughput import Throughput


@pytest.mark.parametrize("wire", streaming_benchmark.WIRES)
def test_the_parts_of_the_benchmark_of_streaming_run(wire: str) -> None:
    letters = 40 * len(streaming_benchmark.PIECE)
    assert asyncio.run(streaming_benchmark.stream(wire, letters)) >= 40
    building_us, copying_us, size = streaming_benchmark.build(wire, 2)
    assert min(building_us, copying_us) > 0
    assert size > 7 * 300  # at least the results of seven calls


def test_the_benchmark_of_many_runs_runs() -> None:
    assert asyncio.run(streaming_benchmark.many_runs(2)) > 0


@pytest.mark.parametrize("level", ["normal", "full"])
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_stored_run_is_compared_with_one_by_hand(tmp_path: Path, level: str, in_thread: bool) -> None:
    compared = journal_benchmark.compare_stored_with_by_hand(tmp_path, level, steps=2, rounds=1, in_thread=in_thread)
    assert compared > 0


def test_the_parts_of_the_benchmark_of_the_journal_run(tmp_path: Path) -> None:
    a_step, part = journal_benchmark.bytes_a_step(tmp_path, 10, 30)
    assert a_step > part > 0
    assert journal_benchmark.group_commit(tmp_path, runs=4, steps=1) > 0
    with journal_benchmark.slow_disk():
        assert journal_benchmark.group_commit(tmp_path, runs=2, steps=1) > 0
    assert min(journal_benchmark.next_move_s(tmp_path, 3, waits=waits, rounds=1) for waits in (True, False)) > 0


@pytest.mark.slow
def test_the_benchmark_of_listings_prints_every_bound_for_both_stores(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    monkeypatch.setattr(listing_benchmark, "LISTED_RUNS", 120)
    code = listing_benchmark.main()
    lines = capsys.readouterr().out.splitlines()[1:]
    questions = [*listing_benchmark.LISTS, "runs that were cut off", *listing_benchmark.OTHERS]
    assert [[line[:11].strip(), line[11:37].strip()] for line in lines] == [
        [kind, what] for kind in ("SQLite", "PostgreSQL") for what in questions
    ]
    assert code == any(line.endswith("MISSED") for line in lines)


@pytest.mark.parametrize(
    ("what", "few_ms", "many_ms", "met"),
    [
        ("newest 50", 1, 4.9, True),  # under 5 ms
        ("newest 50", 1, 5.1, False),
        ("newest 50", 4, 7.9, True),  # twice that of few runs
        ("newest 50", 4, 8.1, False),
        ("newest 50", 6, 10.1, False),  # never longer than 10 ms
        ("50 by a tag of 1 %", 6, 11.9, True),
        ("50 by a tag of 1 %", 15, 20.1, False),
        ("count by status", 0, 199, True),
        ("count by status", 0, 201, False),
        ("count by text", 0, 201, False),
        ("50 by a text of none", 1, 4.9, True),
        ("50 by a text of none", 1, 5.1, False),
        ("50 that wait for a role", 0, 20.1, False),
        ("runs that were cut off", 1, 5.1, False),
        ("runs that were cut off", 11, 20.1, False),
    ],
)
def test_the_benchmark_of_listings_fails_if_a_bound_is_missed_in_a_file_or_on_a_server(
    what: str,
    few_ms: float,
    many_ms: float,
    met: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: dict[str, tuple[object, bool]] = {
        **{name: (query, False) for name, (_, query) in listing_benchmark.LISTS.items()},
        **{name: (query, count) for name, (_, query, count) in listing_benchmark.OTHERS.items()},
        "runs that were cut off": ("running", False),
    }

    class Answers:
        """A store that takes so long for one question, and no time for the others."""

        def __init__(self, took_ms: float) -> None:
            self.took_ms = took_ms

        async def find_runs(self, query: object, *, count: bool = False) -> float:
            return self.took_ms if (query, count) == asked[what] else 0.1

        async def count_runs(self, query: object) -> float:
            return await self.find_runs(query, count=True)

        heads = find_runs

    async def ask(question: Any) -> Any:
        return await question()

    monkeypatch.setattr(listing_benchmark, "ask", ask)
    for kind in ("SQLite", "PostgreSQL"):
        stores: Any = Answers(few_ms), Answers(many_ms)
        assert asyncio.run(listing_benchmark.compare(*stores, kind)) is met
        lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith("MISSED")]
        assert [line.startswith(kind) and what in line for line in lines] == [True] * (not met)


@pytest.mark.parametrize(("missed", "good"), [("", True), ("SQLite", False), ("PostgreSQL", False)])
def test_the_benchmark_of_listings_is_good_if_both_stores_are(
    missed: str, good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def fill(url: str, runs: int) -> None:
        pass

    async def compare(few: Any, many: Any, kind: str) -> bool:
        asked.append(kind)
        return kind != missed

    monkeypatch.setattr(listing_benchmark, "fill_server", fill)
    monkeypatch.setattr(listing_benchmark, "new_database", lambda server: str(tmp_path / f"{len(asked)}.db"))
    monkeypatch.setattr(listing_benchmark, "compare", compare)
    assert asyncio.run(listing_benchmark.measure(tmp_path, "", 3)) is good
    assert asked == ["SQLite", "PostgreSQL"]


def test_make_bench_runs_each_benchmark_and_fails_if_one_does() -> None:
    recipe = Path("Makefile").read_text().partition("\nbench: ")[2].partition("\n\n")[0]
    named = {path.stem for path in Path("tests/benchmarks").glob("*_benchmark.py")} - {
        "analysis_benchmark",
        "scale_benchmark",
    }
    assert {name for name in named if name not in recipe} == set()
    assert "|| code=1; done; exit $$code" in recipe


@pytest.mark.parametrize("loop", [loop_benchmark.bare_loop, loop_benchmark.careful_loop, loop_benchmark.declared_loop])
def test_the_loops_that_are_compared_run(loop: Callable[[int], Awaitable[None]]) -> None:
    asyncio.run(loop(2))


@pytest.mark.parametrize(("value", "code"), [(2.4, 0), (2.5, 0), (2.6, 1)])
def test_the_benchmark_of_the_journal_fails_if_a_bound_is_missed(
    value: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(folder: Path, report: Callable[[str, float, str], None]) -> None:
        report("without a bound", 9.0, "-")
        report("first", value, "<= 2.5")
        report("second", 1.0, "<= 2.5")

    monkeypatch.setattr(journal_benchmark, "measure", measure)
    assert journal_benchmark.main() == code


@pytest.mark.parametrize(
    ("stored", "bare", "missed"),
    [
        ({1: [100, 90], 2: [130, 130], 8: [120, 117]}, [240, 200], []),
        ({1: [100], 2: [129], 8: [129]}, [200], ["2 workers against 1: 1.29, and not 1.3"]),
        ({1: [100], 2: [150], 8: [130]}, [270], [
            "8 workers against 8 bare loops: 0.48, and not 0.5", "8 workers against 2: 0.87, and not 0.9"]),
    ],
)  # fmt: skip
def test_the_benchmark_of_many_workers_names_the_bounds_that_are_missed(
    stored: dict[int, list[float]], bare: list[float], missed: list[str]
) -> None:
    assert scale_benchmark.report_throughput(Throughput(stored, bare)) == missed


def test_the_benchmark_of_many_workers_draws_its_figures(tmp_path: Path) -> None:
    found = Throughput({1: [100.0], 2: [150.0], 8: [140.0]}, [200.0])
    measured = scale_benchmark.Measured(takeovers=[0.5, 1.25], waits=[0.1, 0.2, 0.3])
    options = argparse.Namespace(workers=8, runs=2000, steps=20, kills=2)
    scale_benchmark.plot(tmp_path, options, found, measured)
    drawn = {file.stem: file.read_text() for file in tmp_path.glob("*.svg")}
    assert drawn.keys() == {"scale-throughput", "scale-workers", "scale-takeovers", "scale-answers"}
    widths = [float(width) for width in re.findall(r'y="\d+" width="([\d.]+)"', drawn["scale-takeovers"])]
    assert widths[1] / widths[0] == pytest.approx(2.5, rel=0.01)
    assert "8 workers, 2,000 runs of 20 steps, 2 kills" in drawn["scale-takeovers"]
    assert ">p50<" in drawn["scale-answers"]
