"""A process that freezes in a transaction on a PostgreSQL server, while another one waits for what it has locked."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

from agentfsm.journal.postgres import PostgresStore, postgres_run_info, postgres_schema, postgres_store
from agentfsm.journal.run_info import RunInfo, RunQuery
from agentfsm.testing.store_conformance import sealed_records


async def redact_while_frozen(store: PostgresStore, database: str) -> None:
    """Redact a record through a store that stands still in the transaction until somebody else has had the run's row.

    Args:
        store: The store.
        database: The URL of its database, without a pooler between.
    """
    frozen, awake = asyncio.Event(), asyncio.Event()
    update = postgres_run_info.update_texts

    async def stand_still(*listed: Any) -> None:
        if not frozen.is_set():
            frozen.set()
            await awake.wait()
        await update(*listed)

    def wait_for_row() -> None:
        with psycopg.connect(database) as db:
            db.execute("SET lock_timeout = '10s'")
            db.execute("SELECT FROM agentfsm.run WHERE run_id = 'a' FOR UPDATE")

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(postgres_schema, "FROZEN_AFTER_MS", 50)
        patches.setattr(postgres_store, "update_texts", stand_still)
        records = sealed_records(2, hidden='[["00","secret"]]')
        lease = await store.acquire("a", "the frozen one", new=True)
        await store.append(lease, records, "running", RunInfo("a", "running"))
        redacted = asyncio.ensure_future(store.redact(lease, 1, "[null]", RunInfo("a", "running", prompt="[gone]")))
        await frozen.wait()
        try:
            await asyncio.to_thread(wait_for_row)
        finally:
            awake.set()
            await redacted
        assert await store.records("a") == [records[0]._replace(hidden="[null]"), records[1]]
        assert [info.prompt for info in (await store.find_runs(RunQuery())).runs] == ["[gone]"]
