"""Somebody who can write to the queues of the workers, and does not have the host's secret, has code of his own run.

DBOS reads what is in its tables as a pickle wherever a row says so, and reading a pickle runs what is in it. After each
attack a worker serves the queue, looks for what was cut off and set aside, and does the work of others all the same.
"""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfsm import Agent, Runs, open_store
from agentfsm.testing import ScriptedModel
from agentfsm.workers import Worker, find_waker, open_waker

pytest.importorskip("dbos", reason="dbos is not installed")

import sqlalchemy as sa  # comes with dbos

SECRET = b"of the host, 32 bytes at the least"
ROW: dict[str, Any] = {
    "workflow_uuid": "his:1",
    "status": "ENQUEUED",
    "name": "agentfsm.activation",
    "queue_name": "desk",
    "queue_partition_key": "-",
    "executor_id": "his",
    "serialization": "portable_json",
    "inputs": '{"positionalArgs":[{"run_id":"his","epoch":1,"queue":"desk"}],"namedArgs":{}}',
    "priority": 1001,
    "created_at": 1,
    "updated_at": 1,
}


class Code:
    """What is run by whoever reads its pickle."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


PLACES = [
    {column: "PICKLE", "status": status, "serialization": serialization}
    for serialization in ("py_pickle", None)
    for column in ("inputs", "output", "error")
    for status in ("ENQUEUED", "PENDING", "SUCCESS", "ERROR", "CANCELLED", "DELAYED")
]
SCHEDULE = {
    "schedule_id": "his",
    "schedule_name": "his",
    "workflow_name": ROW["name"],
    "schedule": "* * * * *",
}
BROKEN = [
    {"inputs": inputs, "status": status}
    for inputs in (None, "", "{", "[]", '{"positionalArgs":[]}', '{"positionalArgs":[{"run_id":"his"}]}', '"x"')
    for status in ("ENQUEUED", "PENDING", "CANCELLED")
]
ATTACKS = [*PLACES, *BROKEN]
ASIDE = '{"state":"set aside","reason":"by him"}'


def attack(url: str, mark: Path) -> None:
    """All of them at once, each in a row of its own, and each again as a row that is set aside."""
    pickled = base64.b64encode(pickle.dumps(Code(mark))).decode()
    engine = sa.create_engine(url)
    schema = "" if engine.dialect.name == "sqlite" else "agentfsm_dbos."

    def insert(table: str, row: dict[str, Any]) -> None:
        values = ", ".join(f":{name}" if name != "attributes" else "CAST(:attributes AS json)" for name in row)
        if not schema:
            values = values.replace("CAST(:attributes AS json)", ":attributes")
        given = {name: pickled if value == "PICKLE" else value for name, value in row.items()}
        db.execute(sa.text(f"INSERT INTO {schema}{table} ({', '.join(row)}) VALUES ({values})"), given)

    with engine.begin() as db:
        insert("workflow_schedules", {**SCHEDULE, "context": "PICKLE"})
        for number, changed in enumerate(ATTACKS):
            for attributes in (None, ASIDE):
                own = {"workflow_uuid": f"his{number}{'a' * bool(attributes)}:1", "attributes": attributes}
                insert("workflow_status", {**ROW, **changed, **own})
    engine.dispose()


needs_sqlite = pytest.mark.skipif(
    sys.version_info >= (3, 12) and sqlite3.sqlite_version_info < (3, 42), reason="DBOS needs SQLite 3.42 or newer"
)


@pytest.fixture(params=[pytest.param("sqlite", marks=needs_sqlite), "postgres"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/runs.db"
    else:
        yield request.getfixturevalue("database")


def queues(url: str) -> str:
    """The database with the queues, as somebody else connects to it."""
    return f"{url}.queue" if url.startswith("sqlite") else url.replace("postgresql://", "postgresql+psycopg://")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # DBOS finds his schedule broken
def test_nothing_in_the_queues_is_run_as_code_and_the_work_of_others_is_done(
    store_url: str, tmp_path: Path, counted: Callable[[str], None]
) -> None:
    mark = tmp_path / "mark"

    async def scenario() -> list[str | None]:
        waker = open_waker(store_url, poll_s=0.05)
        async with open_store(store_url) as store:
            runs = Runs(store, secret=SECRET, waker=waker)
            agent = Agent(ScriptedModel(["Hello."] * 2))
            before = await runs.submit("desk", "Before.", idempotency_key="before")
            attack(queues(store_url), mark)
            assert await waker.list_set_aside() is not None
            assert await waker.unfinished(0.0) is not None
            other = await find_waker(store_url)
            assert other is not None
            await other.list_set_aside()
            await other.aclose()
            worker = Worker({"desk": agent}, store, waker, secret=SECRET)
            working = asyncio.create_task(worker.run())
            after = await runs.submit("desk", "After.", idempotency_key="after")
            while {(await runs.get(each)).info.status for each in (before, after)} != {"finished"}:
                await asyncio.sleep(0.05)
            worker.stop()
            await working
            ended = [each.ending for each in (await runs.list()).runs]
        await waker.aclose()
        return ended

    assert asyncio.run(asyncio.wait_for(scenario(), 60)) == ["completed", "completed"]
    assert not mark.exists()
    counted(f"somebody in the queues: {1 + 2 * len(ATTACKS)} attacks, 0 succeeded")
