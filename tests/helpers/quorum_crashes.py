"""Kills a run that needs two votes with SIGKILL at every write, resumes it in another process, and counts the votes.

Between the request and the execution there are a vote, an escalation and a second vote, or the request expires. Run as
``python -m tests.helpers.quorum_crashes STEP``; prints what it did as JSON. See ``crash_injection`` for the processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from agentfsm import Actor, Agent, Allow, Approval, Host, ItDidNotRun, ItRan, SqliteStore, tool
from agentfsm.journal.records import read_records
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.verification import GOOD, verify
from agentfsm.testing import FakeClock, ScriptedModel, call
from tests.helpers.crash_injection import AnnouncingConnection, exited_cleanly, run_forked

RUN, START = "r", 1_000_000.0
ANN, BOB, EVE = Actor("ann", ("manager",)), Actor("bob", ("manager",)), Actor("eve", ("director",))
RULE = Approval(
    n=2, roles=("manager",), not_requester=True, validity_s=1000, escalate_to=("director",), escalate_after_s=100
)


class KillPoints:
    """Counts the points that a process passes, and kills it at one of them."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at, self.passed = kill_at, 0

    def passing(self, name: str) -> None:
        self.passed += 1
        if self.passed == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def append(file: Path, text: str) -> None:
    """Append a line durably."""
    with file.open("a") as lines:
        lines.write(text + "\n")
        lines.flush()
        os.fsync(lines.fileno())


def read(file: Path) -> list[str]:
    """The lines of a file; none if it does not exist."""
    return file.read_text().splitlines() if file.exists() else []


async def live(folder: Path, scenario: str, points: KillPoints) -> None:
    """Start or resume the run, answer whatever it asks, and go on to its end."""

    @tool(requires_approval=RULE)
    def pay(amount: int) -> str:
        """Pay."""
        points.passing("before the payment")
        append(folder / "paid", str(amount))
        points.passing("after the payment")
        return "paid"

    store, clock = SqliteStore(folder / "runs.db"), FakeClock(START)
    agent = Agent(ScriptedModel([call("pay", amount=5), "Done."]), tools=[pay], host=Host(store=store, clock=clock))
    late = Agent(ScriptedModel(["Done."]), tools=[pay], host=Host(store=store, clock=clock))
    while (head := await store.head(RUN)) is None or head.status != "finished":
        if head is None or not head.seq:
            await agent.run("Pay 5.", run_id=RUN, actor=ANN)
            continue
        state = rehydrate(await store.records(RUN)).run
        request = state.pending_request
        votes = () if request is None or request.quorum is None else request.quorum.votes
        if votes or (state.turns and request is None):
            clock.advance(START + 200 - clock.time())
        resuming = late if state.turns else agent
        if head.status == "running":
            await resuming.resume(RUN)
        elif request is not None and request.kind == "in_doubt":
            reply = ItRan("paid") if read(folder / "paid") else ItDidNotRun()
            await resuming.resume(RUN, reply, by=BOB)
        elif votes and scenario == "expiry":
            clock.advance(2000)
            await resuming.dismiss(RUN)
        else:
            voter = EVE if votes else BOB
            await resuming.resume(RUN, Allow(), by=voter)
            append(folder / "acknowledged", voter.id)
    store.close()


def process(folder: Path, scenario: str, kill_at: int) -> None:
    """One process's share of the run."""
    points = KillPoints(kill_at)
    AnnouncingConnection.world = points  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    mock.patch.object(sqlite3, "connect", partial(sqlite3.connect, factory=AnnouncingConnection)).start()
    asyncio.run(live(folder, scenario, points))
    (folder / "points").write_text(str(points.passed))


def check(folder: Path, scenario: str) -> tuple[int, int]:
    """What came of a run: the number of its votes and of its payments, after every check."""
    store = SqliteStore(folder / "runs.db")
    rows, head = asyncio.run(store.records(RUN)), asyncio.run(store.head(RUN))
    store.close()
    report = verify(RUN, rows, head)
    assert report.code == GOOD, report
    moves = [r.data for r in read_records(rows, RUN) if r.kind in ("transition", "effect.intent")]
    replies = [m["out"]["answered"]["reply"] for m in moves if "answered" in m.get("out", {})]
    voters = [r["actor"]["id"] for r in replies if r["kind"] == "allow"]
    paid = read(folder / "paid")
    expected: tuple[list[str], list[str]] = (["bob"], []) if scenario == "expiry" else (["bob", "eve"], ["5"])
    assert (voters, paid) == expected, (voters, paid)
    assert set(read(folder / "acknowledged")) <= set(voters)
    kinds = ["pay" if "eid" in m else m["transition"] for m in moves if m.get("name") == "pay" or "transition" in m]
    if "pay" in kinds:
        assert kinds.index("suspended.vote_recorded") < kinds.index("suspended.approval_decided") < kinds.index("pay")
    assert kinds.count("suspended.escalated") == (0 if scenario == "expiry" else 1)
    return len(voters), len(paid)


def life(scenario: str, kill_at: int) -> tuple[int, int, int]:
    """A run that is killed at a point, if any: the points that were passed, its votes and its payments."""
    folder = Path(tempfile.mkdtemp(prefix="quorum-"))
    killed = 0
    while exited_cleanly(os.waitpid(run_forked(partial(process, folder, scenario, 0 if killed else kill_at)), 0)[1]):
        killed += 1
        assert killed == 1
    counts = check(folder, scenario)
    points = int((folder / "points").read_text())
    shutil.rmtree(folder)
    return points, *counts


def matrix(step: int) -> dict[str, Any]:
    """Every ``step``-th point of each scenario; returns the counts."""
    told: dict[str, Any] = {}
    for scenario in ("votes", "expiry"):
        points = life(scenario, 0)[0]
        lives = [life(scenario, kill_at) for kill_at in range(1, points + 1, step)]
        told[scenario] = {
            "points": points,
            "killed": len(lives),
            "votes": sum(votes for _, votes, _ in lives),
            "payments": sum(paid for *_, paid in lives),
        }
    return told


if __name__ == "__main__":
    print(json.dumps(matrix(int(sys.argv[1]))))
