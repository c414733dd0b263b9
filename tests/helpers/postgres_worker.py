"""A process that runs an agent on a PostgreSQL store, and stays inside its tool until it is killed.

    python -m tests.helpers.postgres_worker URL LIVENESS RUN_ID FILE

The tool adds a line to FILE, and prints ``inside``.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from agentfsm import Agent, Host, tool
from agentfsm.journal.postgres import PostgresStore
from agentfsm.testing import ScriptedModel, call

SECRET = b"the secret of both workers"


def worker(store: PostgresStore, file: Path, *script: Any, stays: bool = False) -> Agent:
    """The agent of both processes."""

    @tool(idempotent=True)
    def ship(order: int) -> str:
        """Ship an order."""
        with file.open("a") as log:
            log.write(f"{order}\n")
        if stays:
            print("inside", flush=True)
            time.sleep(600)
        return "shipped"

    return Agent(ScriptedModel(list(script)), tools=[ship], host=Host(store=store, secret=SECRET))


async def main(url: str, liveness: str, run_id: str, file: str) -> None:
    store = PostgresStore(url, liveness=liveness, lease_s=4.0)  # type: ignore[arg-type]
    await worker(store, Path(file), call("ship", order=7), stays=True).run("Ship order 7.", run_id=run_id)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
