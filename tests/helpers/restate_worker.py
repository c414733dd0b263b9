"""A worker on Restate, as a process: ``python -m tests.helpers.restate_worker STORE INGRESS ADMIN ENDPOINT NAME...``.

It serves the agents of ``worker_app`` with these names until it gets SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from agentfsm import open_store
from agentfsm.workers import Worker, WorkerSettings
from agentfsm.workers.restate_waker import RestateWaker
from tests.helpers import worker_app


async def main(url: str, ingress: str, admin: str, endpoint: str, *names: str) -> None:
    """Serve until told to stop."""
    waker = RestateWaker(ingress, admin, endpoint=endpoint)
    async with open_store(url) as store:
        agents = {name: getattr(worker_app, name) for name in names}
        settings = WorkerSettings(max_attempts=2, grace_s=20)
        worker = Worker(agents, store, waker, secret=os.environ["AGENTFSM_SECRET"].encode(), settings=settings)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        await worker.run()
        await waker.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
