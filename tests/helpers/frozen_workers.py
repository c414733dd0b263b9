"""Workers on a PostgreSQL server that are frozen inside a call, lose their runs to another process, and wake up.

Run as ``python -m tests.helpers.frozen_workers URL LIVENESS COUNT``; prints what it did as JSON. Every second worker is
inside a call that must not be repeated.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, cast

import psycopg

from agentfsm import Agent, Host, ItRan, Run, UserInputRequested, tool
from agentfsm.journal.postgres import PostgresStore
from agentfsm.journal.postgres.postgres_session import Liveness
from agentfsm.journal.store import consistent_read
from agentfsm.journal.verification import verify
from agentfsm.loop.keys import Keyring
from agentfsm.testing import ScriptedModel, call
from tests.helpers.crash_injection import exited_cleanly, run_forked

SECRET = b"the secret of all workers"


class Workers:
    """What all processes share.

    Args:
        url: The database.
        liveness: How the server knows that a worker lives.
        folder: For the files in which the processes note what they did.
    """

    def __init__(self, url: str, liveness: Liveness, folder: Path) -> None:
        self._url, self._folder = url, folder
        self._liveness: Liveness = liveness

    def store(self) -> PostgresStore:
        """A store of the running event loop."""
        return PostgresStore(self._url, liveness=self._liveness, lease_s=0.5)

    def agent(self, store: PostgresStore, *script: Any, freezes: bool = False) -> Agent:
        """The agent of every process, which may freeze its process inside a call."""

        async def effect(name: str) -> str:
            self.note("effects", name)
            if freezes:
                os.kill(os.getpid(), signal.SIGSTOP)  # at once: nothing is renewed any more
            return "done"

        @tool(idempotent=True)
        async def repeatable(name: str) -> str:
            """Do something that may be done again."""
            return await effect(name)

        @tool
        async def once(name: str) -> str:
            """Do something that must be done once."""
            return await effect(name)

        return Agent(ScriptedModel(list(script)), tools=[repeatable, once], host=Host(store=store, secret=SECRET))

    def note(self, file: str, line: str) -> None:
        """Add a line to a file."""
        with (self._folder / file).open("a") as notes:
            notes.write(f"{line}\n")

    def notes(self, file: str) -> Counter[str]:
        """How often each line was added to a file."""
        path = self._folder / file
        return Counter(path.read_text().splitlines() if path.exists() else ())

    def end_sessions(self) -> None:
        """What the server does when it no longer hears of the workers' machine."""
        with psycopg.connect(self._url, autocommit=True) as db:
            db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    def worker(self, number: int) -> None:
        """Begin a run, freeze in its call, and note how the run came out."""

        async def work() -> None:
            async with self.store() as store:
                name = call("once" if number % 2 else "repeatable", name=f"run{number}")
                try:
                    result: object = await self.agent(store, name, "Awake.", freezes=True).run(
                        "Go.", run_id=f"run{number}"
                    )
                except Exception as error:
                    result = error
                self.note("woke", type(result).__name__)

        asyncio.run(work())

    async def take_over(self, count: int) -> Counter[str]:
        """Finish all runs; returns how they ended."""
        async with self.store() as store:
            agent = self.agent(store, *["Taken over."] * count)
            runs: dict[str, Run[Any, Any]] = {}
            while len(runs) < count:
                runs |= {run.run_id: run for run in await agent.unfinished_runs()}
                await asyncio.sleep(0.05)
            told = Counter[str]()
            for run_id, run in runs.items():
                result = await run
                if isinstance(result.outcome, UserInputRequested):
                    told[result.outcome.kind] += 1
                    result = await agent.resume(run_id, ItRan("done"))
                told[str(result.output)] += 1
            return told

    async def owners(self) -> int:
        """How many runs have an owner that lives."""
        async with self.store() as store:
            return sum(head.owner is not None for head in await store.heads())

    async def journals(self) -> tuple[dict[str, tuple[int, str]], Counter[str]]:
        """The head of each run, and how many of them verify with which code."""
        async with self.store() as store:
            codes, heads = Counter[str](), dict[str, tuple[int, str]]()
            for each in await store.heads():
                records, head = await consistent_read(store, each.run_id)
                codes[str(verify(each.run_id, records, head, keyring=Keyring(SECRET)).code)] += 1
                heads[each.run_id] = (each.seq, each.hash)
            return heads, codes


def main(url: str, liveness: Liveness, count: int) -> dict[str, Any]:
    """Freeze so many workers, finish their runs, and wake them up."""
    with tempfile.TemporaryDirectory() as folder:
        workers = Workers(url, liveness, Path(folder))
        asyncio.run(workers.owners())  # everything is imported before the first fork
        children = [run_forked(lambda number=number: workers.worker(number)) for number in range(count)]
        try:
            return _freeze_and_wake(workers, children, liveness)
        except BaseException:
            for child in children:
                os.kill(child, signal.SIGKILL)
            raise


def _freeze_and_wake(workers: Workers, children: list[int], liveness: Liveness) -> dict[str, Any]:
    for child in children:
        _, status = os.waitpid(child, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "a worker ended before it was inside its call"
    owned = asyncio.run(workers.owners())
    if liveness == "session":
        workers.end_sessions()
    taken = asyncio.run(workers.take_over(len(children)))
    before, _ = asyncio.run(workers.journals())
    effects = workers.notes("effects")
    for child in children:
        os.kill(child, signal.SIGCONT)
    for child in children:
        assert not exited_cleanly(os.waitpid(child, 0)[1])
    after, codes = asyncio.run(workers.journals())
    return {
        "owned": owned,
        "taken": taken,
        "effects": effects,
        "woke": workers.notes("woke"),
        "same": before == after and effects == workers.notes("effects"),
        "codes": codes,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], cast("Liveness", sys.argv[2]), int(sys.argv[3]))))
