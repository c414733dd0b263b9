"""A process that freezes in a transaction on a PostgreSQL server, while another one waits for what it has locked."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

from agentfsm.journal.postgres import PostgresStore, postgres_run_info, postgres_schema, postgres_store
from agentfsm.journal.run_info import RunInfo
from agentfsm.testing.store_conformance import sealed_records


async def append_while_frozen(store: PostgresStore, database: str) -> None:
    """Append to a run through a store that stands still in the transaction until somebody else has had the run's row.

    Args:
        store: The store.
        database: The URL of its database, without a pooler between.
    """
    frozen, awake = asyncio.Event(), asyncio.Event()
    write = postgres_run_info.write_run_info

    async def stand_still(*listed: Any) -> None:
        if not frozen.is_set():
            frozen.set()
            await awake.wait()
        await write(*listed)

    def wait_for_row() -> None:
        with psycopg.connect(database) as db:
            db.execute("SET lock_timeout = '10s'")
            db.execute("SELECT FROM agentfsm.run WHERE run_id = 'a' FOR UPDATE")

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(postgres_schema, "FROZEN_AFTER_MS", 50)
        patches.setattr(postgres_store, "write_run_info", stand_still)
        records = sealed_records(2)
        lease = await store.acquire("a", "the frozen one", new=True)
        appended = asyncio.ensure_future(store.append(lease, records, "finished", RunInfo("a", "finished")))
        await frozen.wait()
        try:
            await asyncio.to_thread(wait_for_row)
        finally:
            awake.set()
            await appended
        assert await store.records("a") == records
