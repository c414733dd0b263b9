"""What the journal costs: ``python -m tests.benchmarks.journal`` prints ratios, which say more than times do.

The baseline of a stored run is a loop written by hand that makes the same calls, checks the arguments and keeps
time limits too, appends the same text to SQLite and commits as often, at the same ``synchronous`` level.
Figures of one machine are compared with each other only, interleaved, and the best of several rounds counts.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentfsm import Agent, AgentGuardrails, Host, Message, ModelRequest, Reply, SqliteStore, ToolCall, tool
from agentfsm.core.messages import FinishReason
from agentfsm.journal.restore import restore
from agentfsm.journal.verify import verify

SIZE = 1000
"""Characters of each call's argument and of each result."""

LIMITS = AgentGuardrails(
    max_iterations=10**6, max_execution_time_s=None, max_steps=10**7, max_tokens=10**12, loop_hard_threshold=20
)


class Talker:
    """A model that calls a tool so many times, with another long text each time."""

    name = "talker"

    def __init__(self, steps: int) -> None:
        self.steps, self.made = steps, 0

    async def reply(self, request: ModelRequest) -> Reply:
        self.made += 1
        if self.made > self.steps:
            return Reply(Message.assistant("done"))
        return said(self.made)


def said(n: int) -> Reply:
    text = f"{n} " + "x" * SIZE
    return Reply(Message.assistant("", (ToolCall(f"c{n}", "echo", {"text": text}),)), FinishReason.TOOL_CALLS)


@tool
async def echo(text: str) -> str:
    """Say it again."""
    return text


async def ours(store: SqliteStore | None, steps: int, run_id: str = "r") -> float:
    agent = Agent(Talker(steps), tools=[echo], guardrails=LIMITS, host=Host(store=store))
    begun = time.perf_counter()
    await agent.run("go", run_id=run_id)
    return time.perf_counter() - begun


async def by_hand(db: sqlite3.Connection, steps: int) -> float:
    """The same calls, the same text, the same number of commits."""
    model, messages, pending = Talker(steps), [{"role": "user", "content": "go"}], [{"role": "user", "content": "go"}]
    begun = time.perf_counter()

    def commit() -> None:
        db.execute("BEGIN")
        db.executemany("INSERT INTO log (text) VALUES (?)", [(json.dumps(m),) for m in pending])
        db.execute("COMMIT")
        pending.clear()

    while True:
        commit()
        async with asyncio.timeout(60):
            reply = await model.reply(None)  # type: ignore[arg-type]
        calls = reply.message.tool_calls
        entry: dict[str, Any] = {"role": "assistant", "content": reply.message.content}
        entry["tool_calls"] = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in calls]
        messages.append(entry)
        pending.append(entry)
        if not calls:
            break
        for c in calls:
            commit()
            arguments = echo.arguments(c.arguments)
            async with asyncio.timeout(600):
                result = {"role": "tool", "tool_call_id": c.id, "content": await echo.function(**arguments)}
            messages.append(result)
            pending.append(result)
    commit()
    return time.perf_counter() - begun


def plain_db(path: Path, level: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA synchronous = {level}")
    db.execute("CREATE TABLE log (id INTEGER PRIMARY KEY, text TEXT)")
    return db


def stored_against_by_hand(folder: Path, level: Any, steps: int, rounds: int) -> float:
    mine, theirs = [], []
    for n in range(rounds):
        store = SqliteStore(folder / f"{level}{n}.db", synchronous=level)
        asyncio.run(ours(store, 2, "warm"))
        mine.append(asyncio.run(ours(store, steps)))
        store.close()
        db = plain_db(folder / f"{level}{n}.plain", level)
        asyncio.run(by_hand(db, 2))
        theirs.append(asyncio.run(by_hand(db, steps)))
        db.close()
    print(f"    ours {min(mine) / steps * 1e6:.0f} us a step, by hand {min(theirs) / steps * 1e6:.0f}", file=sys.stderr)
    return min(mine) / min(theirs)


def bytes_a_step(folder: Path, first: int, last: int) -> tuple[float, float]:
    """Bytes of the file for each step from the first to the last, and what part of it is the text itself."""
    sizes = {}
    for steps in (first, last):
        path = folder / f"size{steps}.db"
        store = SqliteStore(path, synchronous="normal")
        asyncio.run(ours(store, steps))
        store.close()
        db = sqlite3.connect(path)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.close()
        sizes[steps] = path.stat().st_size
    a_step = (sizes[last] - sizes[first]) / (last - first)
    text = len(json.dumps(said(last).message.tool_calls[0].arguments)) + SIZE
    return a_step, a_step / text


def group_commit(folder: Path, runs: int, steps: int) -> float:
    """How many times the durable records a second of one run many runs at once reach."""
    store = SqliteStore(folder / "group.db")

    async def many(count: int, name: str) -> float:
        begun = time.perf_counter()
        await asyncio.gather(*(ours(store, steps, f"{name}{n}") for n in range(count)))
        took = time.perf_counter() - begun
        return sum(store.head(f"{name}{n}").seq for n in range(count)) / took  # type: ignore[union-attr]

    asyncio.run(many(1, "warm"))
    one = max(asyncio.run(many(1, f"one{n}")) for n in range(3))
    all_at_once = max(asyncio.run(many(runs, f"many{n}-")) for n in range(2))
    store.close()
    print(f"    {one:.0f} and {all_at_once:.0f} records a second", file=sys.stderr)
    return all_at_once / one


def main() -> None:
    """Measure everything once and print it as a table."""
    told: list[tuple[str, float, str]] = []

    def tell(what: str, value: float, wanted: str) -> None:
        told.append((what, value, wanted))
        print(f"{what:<66} {value:>10.2f}   {wanted}", flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measure(folder, tell)


def measure(folder: Path, tell: Callable[[str, float, str], None]) -> None:
    early, _ = bytes_a_step(folder, 10, 50)
    late, part = bytes_a_step(folder, 500, 1000)
    tell("bytes a step, steps 500 to 1000 against 10 to 50", late / early, "1.0")
    tell("bytes a step against its text", part, "<= 2")
    for level, wanted in (("full", "<= 1.5"), ("normal", "<= 4")):
        tell(
            f"a stored run against one by hand, {level.upper()}", stored_against_by_hand(folder, level, 200, 5), wanted
        )
    store = SqliteStore(folder / "long.db", synchronous="normal")
    asyncio.run(ours(store, 10, "warm"))
    short = min(asyncio.run(ours(store, 10, f"short{n}")) for n in range(9)) / 10
    long = min(asyncio.run(ours(store, 1000, f"long{n}")) for n in range(3)) / 1000
    tell("time a step in a run of 1000 against one of 10, stored", long / short, "<= 1.2")
    tell("128 runs at once against one, durable records a second", group_commit(folder, 128, 3), ">= 20")
    asyncio.run(ours(store, 1250, "big"))
    begun = time.perf_counter()
    rows = store.rows("big")
    read = time.perf_counter() - begun
    begun = time.perf_counter()
    verify("big", rows, store.head("big"))
    checked = time.perf_counter() - begun
    begun = time.perf_counter()
    restore(rows)
    restored = time.perf_counter() - begun
    store.close()
    tell("verify, thousands of records a second", len(rows) / checked / 1000, ">= 50")
    tell(
        "loading 10,000 records (read, verify, fold), seconds",
        (read + checked + restored) / len(rows) * 10_000,
        "< 0.3",
    )


if __name__ == "__main__":
    main()
