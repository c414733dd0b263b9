"""How long it takes to list and search 100,000 stored runs, against 100, in a file and on a PostgreSQL server.

    python -m tests.benchmarks.listing_benchmark

A list, a search for a text, and the runs that were cut off are to cost at most twice as much as of 100 runs, or less
than 5 ms. The newest 50 are never to take longer than 10 ms, other lists 20 ms, counts 200 ms. The exit code is 1 if a
bound is missed.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from agentfsm import RunQuery, SqliteStore, open_store
from agentfsm.journal.run_info import RunInfo, WaitingFor
from agentfsm.journal.sqlite import sqlite_schema
from agentfsm.journal.sqlite.sqlite_run_info import write_run_info
from agentfsm.journal.store import Store
from tests.helpers.postgres import new_database, shared_server

LISTED_RUNS = 100_000
FEW_RUNS = 100
MAX_RATIO = 2.0
MAX_MS = 5.0

NEWEST_MS, LISTED_MS, COUNTED_MS = 10.0, 20.0, 200.0

LISTS: dict[str, tuple[float, RunQuery]] = {
    "newest 50": (NEWEST_MS, RunQuery()),
    "50 by a tag of 1 %": (LISTED_MS, RunQuery(tag="tag7")),
    "50 by a tag of all": (LISTED_MS, RunQuery(tag="all")),
    "50 by a tag of none": (LISTED_MS, RunQuery(tag="none")),
    "50 by metadata of 2 runs": (LISTED_MS, RunQuery(metadata={"order": 7})),
    "50 by metadata of all": (LISTED_MS, RunQuery(metadata={"shop": "a"})),
    "50 by metadata of none": (LISTED_MS, RunQuery(metadata={"shop": "b"})),
    "50 by actor of 100 runs": (LISTED_MS, RunQuery(actor="user7")),
    "50 by session of 10 runs": (LISTED_MS, RunQuery(session_id="chat5")),
    "50 by a text of all": (LISTED_MS, RunQuery(text="word")),
    "50 by a text of 1 %": (LISTED_MS, RunQuery(text="task 42")),
    "50 by a text of 10 runs": (LISTED_MS, RunQuery(text="task 4242.")),
    "50 by a text of none": (LISTED_MS, RunQuery(text="no such text")),
    "50 by 2 letters of none": (LISTED_MS, RunQuery(text="zq")),
}
"""The most milliseconds that each may take, beside the bound by what it takes of few runs."""

OTHERS: dict[str, tuple[float, RunQuery, bool]] = {
    "50 that wait for a role": (LISTED_MS, RunQuery(waiting_role="boss"), False),
    "count by status": (COUNTED_MS, RunQuery(status="suspended"), True),
    "count by text": (COUNTED_MS, RunQuery(text="task 42"), True),
}
"""What may take so many milliseconds however few runs there are, and whether it is counted."""


CUT_OFF_RUNS = 10


def infos(runs: int) -> Iterator[RunInfo]:
    """Runs as they are listed."""
    for n in range(1, runs + 1):
        waiting = WaitingFor("approval", "pay", ("boss",)) if n % 500 == 0 else None
        yield RunInfo(
            f"run{n:07}", "suspended" if waiting else "running" if n <= CUT_OFF_RUNS else "finished", None, n, n,
            "completed" if n % 3 else "partial", f"Do task {n * 7919 % 10007}. {'word ' * 35}", f"user{n % 1000}",
            f"chat{n // 10}", (f"tag{n % 100}", "all"), "model", 0.1, 100, waiting,
            metadata={"order": str(n // 2), "shop": "a"},
        )  # fmt: skip


def fill_file(path: Path, runs: int = LISTED_RUNS) -> None:
    """Create a file with runs as they are listed; their journals are left out."""
    with closing(sqlite_schema.open_writer(path, "normal")) as db:
        db.execute("BEGIN")
        for n, info in enumerate(infos(runs), 1):
            db.execute("INSERT INTO run (run_id, hash, status) VALUES (?, ?, ?)", (info.run_id, bytes(32), info.status))
            db.execute("INSERT INTO run_info (id) VALUES (?)", (n,))
            write_run_info(db, n, info)
        db.execute("COMMIT")


async def fill_server(url: str, runs: int = LISTED_RUNS) -> None:
    """The same in a database."""
    import psycopg

    from agentfsm.journal.postgres.postgres_rows import text_column
    from agentfsm.journal.postgres.postgres_run_info import WRITE_LISTED, listed_row

    write = "WITH fence AS (SELECT %(number)s::bigint AS id), " + WRITE_LISTED + " SELECT id FROM fence"
    async with open_store(url) as store:
        await store.maintenance.prepare()
    async with await psycopg.AsyncConnection.connect(url) as db:
        for n, info in enumerate(infos(runs), 1):
            await db.execute(
                "INSERT INTO agentfsm.run (id, run_id, hash, status) OVERRIDING SYSTEM VALUE VALUES (%s, %s, %s, %s)",
                (n, info.run_id, bytes(32), info.status),
            )
            await db.execute(write, {"number": n, "listed": text_column([listed_row(n, info)])})
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as db:
        await db.execute("VACUUM ANALYZE")  # as the server itself does after a while


async def ask(question: Callable[[], Awaitable[object]]) -> float:
    """The milliseconds that a question takes, at best of twenty."""
    took: list[float] = []
    for _ in range(20):
        begun = time.perf_counter()
        await question()
        took.append(time.perf_counter() - begun)
    return min(took) * 1000


async def compare(few: Store, many: Store, kind: str) -> bool:
    """Print what each question takes; whether all bounds are met."""
    good = True
    questions: dict[str, tuple[float, list[Callable[[], Awaitable[object]]]]] = {
        what: (limit, [partial(store.find_runs, query) for store in (few, many)])
        for what, (limit, query) in LISTS.items()
    }
    questions["runs that were cut off"] = LISTED_MS, [partial(store.heads, "running") for store in (few, many)]
    for what, (limit, of_both) in questions.items():
        small, large = [await ask(question) for question in of_both]
        good &= _report(kind, what, f"{small:8.2f} ms", large, min(limit, max(MAX_RATIO * small, MAX_MS)))
    for what, (limit, query, count) in OTHERS.items():
        large = await ask(partial(many.count_runs if count else many.find_runs, query))
        good &= _report(kind, what, "", large, limit)
    return good


def _report(kind: str, what: str, few: str, large: float, limit: float) -> bool:
    """Print what a question takes, and its bound; whether it is met."""
    met = large <= limit
    verdict = f"<= {limit:5.1f} ms   {'good' if met else 'MISSED'}"
    print(f"{kind:<10} {what:<26} {few:>11} {large:8.2f} ms {verdict}", flush=True)
    return met


async def measure(folder: Path, server: str, runs: int) -> bool:
    """Measure a file and a database with so many runs; whether all bounds are met."""
    fill_file(folder / "few.db", FEW_RUNS)
    fill_file(folder / "many.db", runs)
    async with SqliteStore(folder / "few.db") as few, SqliteStore(folder / "many.db") as many:
        in_file = await compare(few, many, "SQLite")
    urls = new_database(server), new_database(server)
    await fill_server(urls[0], FEW_RUNS)
    await fill_server(urls[1], runs)
    async with open_store(urls[0]) as few, open_store(urls[1]) as many:
        return await compare(few, many, "PostgreSQL") and in_file


def main() -> int:
    """Measure, and return 1 if a bound is missed."""
    print(f"{'':10} {'':26} {FEW_RUNS:>8} runs {LISTED_RUNS:>6} runs")
    with tempfile.TemporaryDirectory() as name, shared_server() as server:
        return 0 if asyncio.run(measure(Path(name), server, LISTED_RUNS)) else 1


if __name__ == "__main__":
    sys.exit(main())
