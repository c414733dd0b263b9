"""Kills a process with SIGKILL at every write between sending answers, acting on them and removing them.

Two votes, and a decision on a call that was cut off, are sent to the store and acted on from there. The next process
goes on with what it finds. Run as ``python -m tests.helpers.signal_crashes STEP [POSTGRES-URL]``; prints what it did as
JSON. See ``crash_injection`` for the processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from agentfsm import (
    Actor,
    Agent,
    Allow,
    Approval,
    Host,
    ItDidNotRun,
    ItRan,
    Runs,
    SqliteStore,
    StaleLease,
    open_store,
    tool,
)
from agentfsm.errors import RepeatedVoteError, StaleHumanReplyError
from agentfsm.journal.records import read_records
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.store import Store
from agentfsm.journal.verification import GOOD, verify
from agentfsm.loop.keys import Keyring
from agentfsm.testing import ScriptedModel, call
from tests.helpers.crash_injection import AnnouncingConnection, exited_cleanly, run_forked
from tests.helpers.quorum_crashes import KillPoints, append, read

SECRET = b"the secret of the tests"
BOB, EVE = Actor("bob", ("manager",)), Actor("eve", ("manager",))
RULE = Approval(n=2, roles=("manager",))
MAX_ROUNDS = 100


async def send(runs: Runs, run_id: str, folder: Path) -> None:
    """Send what the run waits for, unless that was sent before."""
    request = (await runs.get(run_id)).request
    if request is None:
        return
    if request.kind == "in_doubt":
        reply: Any = ItRan("paid") if read(folder / "paid") else ItDidNotRun()
        voters = [BOB]
    else:
        reply, voters = Allow(), [BOB, EVE]
    for voter in voters:
        try:
            await runs.answer(run_id, reply, by=voter, to=request.digest)
        except (RepeatedVoteError, StaleHumanReplyError):  # it is in the store already
            continue
        append(folder / "acknowledged", f"{request.kind} {voter.id}")


async def live(folder: Path, run_id: str, store: Store, points: KillPoints) -> None:
    """Start the run or go on with it, until it has finished and nothing is left to act on."""

    @tool(requires_approval=RULE)
    def pay(amount: int) -> str:
        """Pay."""
        points.passing("before the payment")
        append(folder / "paid", str(amount))
        points.passing("after the payment")
        return "paid"

    host, runs = Host(store=store, secret=SECRET), Runs(store, secret=SECRET)
    first = Agent(ScriptedModel([call("pay", amount=5), "Done."]), tools=[pay], host=host)
    later = Agent(ScriptedModel(["Done."]), tools=[pay], host=host)
    for _ in range(MAX_ROUNDS):
        head = await store.head(run_id)
        if head is None or not head.seq:
            await first.run("Pay 5.", run_id=run_id)
            continue
        if head.status == "finished" and not await store.signals.pending(run_id):
            break
        if head.status == "suspended":
            await send(runs, run_id, folder)
        acting = later if rehydrate(await store.records(run_id)).run.turns else first
        try:
            if run := await acting.next_run(run_id):
                await run
        except StaleLease:  # the server has not noticed yet that its owner was killed
            await asyncio.sleep(0.01)
    else:
        raise AssertionError(f"run {run_id} does not end")
    await store.aclose()


def process(folder: Path, run_id: str, url: str, kill_at: int, live: Any = live) -> None:
    """One process's share of the run."""
    points = KillPoints(kill_at)

    async def main() -> None:
        if not url:
            AnnouncingConnection.world = points  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
            mock.patch.object(sqlite3, "connect", partial(sqlite3.connect, factory=AnnouncingConnection)).start()
            await live(folder, run_id, SqliteStore(folder / "runs.db"), points)
            return
        from agentfsm.journal.postgres.postgres_session import PostgresSession
        from agentfsm.journal.postgres.postgres_store import PostgresStore

        real = PostgresSession.write

        async def write(session: PostgresSession, work: Any, **options: Any) -> Any:
            points.passing("before a write")
            result = await real(session, work, **options)
            points.passing("after a write")
            return result

        mock.patch.object(PostgresSession, "write", write).start()
        await live(folder, run_id, PostgresStore(url), points)

    asyncio.run(main())
    (folder / "points").write_text(str(points.passed))


async def stored(folder: Path, url: str, look: Callable[[Store], Awaitable[Any]]) -> Any:
    """What a function finds in the store of a run."""
    async with open_store(url or f"sqlite:///{folder}/runs.db") as store:
        return await look(store)


def check(folder: Path, run_id: str, url: str) -> tuple[int, int]:
    """What came of a run: the number of its votes and of its payments, after every check."""

    async def load(store: Store) -> Any:
        return await store.records(run_id), await store.head(run_id), await store.signals.pending(run_id)

    rows, head, pending = asyncio.run(stored(folder, url, load))
    report = verify(run_id, rows, head, keyring=Keyring(SECRET))
    assert (report.code, pending) == (GOOD, []), (report, pending)
    moves = [record.data for record in read_records(rows, run_id) if record.kind == "transition"]
    replies = [move["out"]["answered"]["reply"] for move in moves if "answered" in move["out"]]
    votes = [reply["actor"]["id"] for reply in replies if reply["kind"] == "allow"]
    paid = read(folder / "paid")
    assert (sorted(votes), paid) == (["bob", "eve"], ["5"]), (votes, paid)
    acted_on = {f"approval {vote}" for vote in votes} | {"in_doubt bob" for r in replies if r["kind"] != "allow"}
    assert set(read(folder / "acknowledged")) <= acted_on
    return len(votes), len(paid)


def life(url: str, kill_at: int) -> tuple[int, int, int]:
    """A run that is killed at a point, if any: the points that were passed, its votes and its payments."""
    folder, run_id, killed = Path(tempfile.mkdtemp(prefix="signals-")), f"r{kill_at}", 0
    while exited_cleanly(os.waitpid(run_forked(partial(process, folder, run_id, url, 0 if killed else kill_at)), 0)[1]):
        killed += 1
        assert killed == 1
    counts = check(folder, run_id, url)
    points = int((folder / "points").read_text())
    shutil.rmtree(folder)
    return points, *counts


def matrix(step: int, url: str) -> dict[str, int]:
    """Every ``step``-th point; returns the counts."""
    points = life(url, 0)[0]
    lives = [life(url, kill_at) for kill_at in range(1, points + 1, step)]
    return {
        "points": points,
        "killed": len(lives),
        "votes": sum(votes for _, votes, _ in lives),
        "payments": sum(paid for *_, paid in lives),
    }


if __name__ == "__main__":
    print(json.dumps(matrix(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")))
