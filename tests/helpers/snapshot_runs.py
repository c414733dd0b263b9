"""Runs that get snapshots, in stores that tests look into, and what such a run says when it is loaded."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from agentfsm import (
    Actor,
    Agent,
    AgentGuardrails,
    Approval,
    Host,
    KeepLast,
    MemoryStore,
    SqliteStore,
    UserInputRequested,
    tool,
)
from agentfsm.agent.resume import load_run
from agentfsm.journal.load import LoadedRun
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.run_info import RunInfo
from agentfsm.journal.store import Lease, SealedSnapshot, Status
from agentfsm.loop.keys import Keyring
from agentfsm.loop.state_json import dump_state
from agentfsm.testing import FakeClock, ScriptedModel, call

SECRET = b"of the tests, and long enough"
KEYS = Keyring(SECRET)
MANAGERS = [Actor(name, ("manager",)) for name in ("ann", "bob")]
CANARY = "canary-7f31-of-the-user"


@tool
def look(at: str) -> str:
    """Look."""
    return f"seen {at}"


PAID = list[Callable[[], None]]()
"""What is called when somebody is paid."""


@contextlib.contextmanager
def counting_payments() -> Generator[list[None]]:
    """A list that gets longer with each payment."""
    paid = list[None]()
    PAID[:] = [lambda: paid.append(None)]
    try:
        yield paid
    finally:
        PAID.clear()


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    for each in PAID:
        each()
    return f"paid {amount}"


@tool(requires_approval=Approval(n=2, roles=("manager",)))
def wire(amount: int) -> str:
    """Wire."""
    return f"wired {amount}"


LIMITS = AgentGuardrails(max_iterations=1_000)
NEWEST = KeepLast(turns=1, replies=1, max_compactions=10_000)


def agent_on(store: Any, script: Sequence[Any], **options: Any) -> Agent[Any, Any]:
    """An agent that looks, pays and wires, whose history is left out of requests but for the newest part."""
    host = Host(store=store, secret=SECRET, clock=FakeClock(), seed=1)
    options = {"tools": [look, pay, wire], "history": NEWEST, **options}
    options = {"guardrails": LIMITS, **options}
    return Agent(options.pop("model", None) or ScriptedModel(script), host=host, **options)


def config_of(agent: Agent[Any, Any]) -> Any:
    return agent._config  # pyright: ignore[reportPrivateUsage]


def long_script(steps: int) -> list[Any]:
    """So many calls, none of which is like another, and an answer."""
    return [*(call("look", at=f"place {n}") for n in range(steps)), "Done."]


class Recording(MemoryStore):
    """A store that keeps what was appended."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, tuple[SealedRecord, ...], Status, RunInfo | None, SealedSnapshot | None]] = []
        self.read = 0  # how many records were read so far

    def append(
        self,
        lease: Lease,
        records: Sequence[SealedRecord],
        status: Status,
        info: RunInfo | None = None,
        snapshot: SealedSnapshot | None = None,
    ) -> Awaitable[None]:
        self.log.append((lease.run_id, tuple(records), status, info, snapshot))
        return super().append(lease, records, status, info, snapshot)

    async def records(self, run_id: str, after: int = 0, limit: int | None = None) -> list[SealedRecord]:
        found = await super().records(run_id, after, limit)
        self.read += len(found)
        return found

    async def after_a_kill(self, appends: int, *, with_snapshots: bool) -> MemoryStore:
        """The store that a process leaves that is killed after so many appends."""
        store = MemoryStore()
        lease = await store.acquire("r", "me", new=True, keyring=KEYS)
        for _, records, status, info, snapshot in self.log[:appends]:
            await store.append(lease, records, status, info, snapshot if with_snapshots else None)
            if status != "running":
                lease = await store.acquire("r", "me", keyring=KEYS)
        await store.release(lease)
        return store


def comparable(loaded: LoadedRun) -> dict[str, Any]:
    """All that a loaded run says, its messages apart."""
    point = loaded.resume_point
    told = {f.name: getattr(point, f.name) for f in fields(point) if f.name not in ("records", "base", "attempts")}
    run = replace(loaded.run, messages=[])
    others = (loaded.suspension_id, dict(loaded.pinned), loaded.asked, len(loaded.run.messages))
    return {**told, "secrets": set(point.secrets), "state": dump_state(run), "others": others}


async def is_loaded_from_snapshot(agent: Agent[Any, Any]) -> bool:
    """Whether an agent begins with a snapshot when it loads the run."""
    loaded = await load_run(config_of(agent), "r", lazily=True)
    return loaded.resume_point.base is not None and bool(loaded.resume_point.base.unread)


async def interrupted(store: Any, steps: int, *, run_id: str = "r", **options: Any) -> None:
    """A run that waits for an approval after so many steps."""
    script = [*long_script(steps)[:-1], call("pay", amount=1)]
    result = await agent_on(store, script, **options).run("Go.", run_id=run_id)
    assert isinstance(result.outcome, UserInputRequested)


async def suspended_in(path: Path, run_id: str = "r", steps: int = 12, prompt: str = "Go.") -> None:
    """Leave a run in a file that waits for an approval after so many steps."""
    async with SqliteStore(path) as store:
        script = [*long_script(steps)[:-1], call("pay", amount=1)]
        await agent_on(store, script).run(prompt, run_id=run_id)


def rows_of(path: Path, statement: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return db.execute(statement).fetchall()
