"""Runs that workers have set aside, in the file ``runs.db`` of a folder and the queues beside it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from agentfsm import Agent, Host, open_store
from agentfsm.agent.config import with_host
from agentfsm.runtime.run import advance, hand_over
from agentfsm.testing import ScriptedModel
from agentfsm.workers import open_waker
from agentfsm.workers.waker import Activation

__all__ = ["SECRET", "cut_off_often", "put_back", "set_aside"]

SECRET = b"the secret of this process, long enough"


async def cut_off_often(folder: Path, agent: Agent[Any, Any], run_id: str) -> None:
    """Leave a run as workers do that died five times at the same point."""
    async with open_store(folder / "runs.db") as store:
        own = agent.with_config(with_host(agent.config, Host(store=store, secret=SECRET)))
        run = own.run("Say hello.", run_id=run_id)
        await advance(run)
        await hand_over(run)
        for _ in range(5):
            await store.release(await store.acquire(run_id, "a worker", keyring=own.config.host.keyring))


def set_aside(folder: Path, *run_ids: str, until: float | None = None) -> None:
    """Cut runs off, and set them aside."""

    async def scenario() -> None:
        waker = open_waker(folder / "runs.db")
        for run_id in run_ids:
            await cut_off_often(folder, Agent(ScriptedModel(["Hello."])), run_id)
            activation = Activation(run_id, 6, "support@1")
            await waker.wake(activation)
            await waker.set_aside(activation, "it kills its workers", until)
        await waker.aclose()

    asyncio.run(scenario())


def put_back(folder: Path, run_id: str) -> None:
    """Have a run delivered again."""

    async def scenario() -> None:
        waker = open_waker(folder / "runs.db")
        assert await waker.put_back(run_id)
        await waker.aclose()

    asyncio.run(scenario())
