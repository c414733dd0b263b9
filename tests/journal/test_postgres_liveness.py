"""Who owns a run on a PostgreSQL server when workers freeze and wake up, and when the server's clock jumps."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfsm import StaleLease, StoreError
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.store import Lease
from agentfsm.testing.store_conformance import sealed_records
from tests.helpers.child_process import run_helper
from tests.helpers.postgres import FAKE_CLOCK, CuttingProxy, ServerClock, empty_database, new_database, start_server

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")

from agentfsm.journal.postgres import PostgresStore, postgres_session  # noqa: E402  # needs psycopg
from tests.helpers.frozen_transaction import redact_while_frozen  # noqa: E402

HOUR_S = 3600


@pytest.mark.parametrize("liveness", ["lease", "session"])
def test_nobody_waits_for_a_process_that_was_frozen_in_a_transaction(liveness: Any, database: str) -> None:
    empty_database(database)

    async def scenario() -> None:
        async with PostgresStore(database, liveness=liveness) as store:
            await redact_while_frozen(store, database)

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGSTOP")
@pytest.mark.parametrize("liveness", ["lease", "session"])
def test_workers_that_were_frozen_write_nothing_when_they_wake_up(liveness: str, database: str, counted: Any) -> None:
    empty_database(database)
    told = run_helper("frozen_workers", database, liveness, "20")
    if liveness == "session":
        assert told["owned"] == 20  # a process that is frozen keeps its connection, until its machine is gone
    assert told["taken"] == {"in_doubt": 10, "Taken over.": 20}
    assert told["effects"] == {f"run{number}": 1 if number % 2 else 2 for number in range(20)}
    assert told["woke"] == {"StaleLease": 20}
    assert told["same"]
    assert told["codes"] == {"0": 20}
    counted(f"on PostgreSQL ({liveness}): 20 frozen workers woke up after they were taken over, and wrote nothing")


LOCKS = """
    SELECT (classid::bigint << 32) | objid::bigint FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 1 AND database =
        (SELECT oid FROM pg_database WHERE datname = current_database())
"""


END_SESSION = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s"
HOLDERS = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 ORDER BY granted DESC"
"""Who holds such a lock, and then who waits for it."""


@pytest.fixture
def stranger(database: str) -> Iterator[str]:
    """A role that may connect to the database, as every role may by default, and has no right there."""
    empty_database(database)
    with psycopg.connect(database, autocommit=True) as db:
        db.execute("DROP ROLE IF EXISTS stranger")
        db.execute("CREATE ROLE stranger LOGIN")
        yield "stranger"
        db.execute(f"GRANT CONNECT ON DATABASE {db.info.dbname} TO PUBLIC")


@pytest.mark.parametrize("liveness", ["lease", "session"])
def test_a_role_that_may_only_connect_can_keep_the_runs_of_a_dead_session_from_being_taken_over(
    liveness: Any, database: str, stranger: str
) -> None:
    records = sealed_records(2)

    async def scenario() -> None:
        async with PostgresStore(database, liveness=liveness) as other:
            owner = PostgresStore(database, liveness=liveness)
            lease = await owner.acquire("a", "the owner", new=True)
            await owner.append(lease, records[:1], "running")
            with contextlib.closing(psycopg.connect(database, user=stranger, autocommit=True)) as db:
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    db.execute("SELECT owner_key FROM agentfsm.run")
                keys = [key for (key,) in db.execute(LOCKS).fetchall()]
                assert bool(keys) == (liveness == "session")
                await owner.aclose()  # its run is cut off
                for key in keys:
                    db.execute("SELECT pg_try_advisory_lock(%s)", (key,))
                assert [head.run_id for head in await other.heads("cut off")] == ([] if keys else ["a"])
                with psycopg.connect(database, autocommit=True) as own:
                    own.execute(f"REVOKE CONNECT ON DATABASE {own.info.dbname} FROM PUBLIC")
                    own.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", (stranger,)
                    )
                with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
                    psycopg.connect(database, user=stranger)
            async with asyncio.timeout(60):
                while not await other.heads("cut off"):
                    pass  # the session is ending
            await other.append(await other.acquire("a", "the other one"), records[1:], "finished")
            assert await other.records("a") == records

    asyncio.run(scenario())


def test_a_process_whose_lock_another_session_took_while_its_own_was_lost_says_so(database: str, stranger: str) -> None:
    records = sealed_records(2)

    async def scenario() -> None:
        async with PostgresStore(database, wait_s=0.5) as owner:
            lease = await owner.acquire("a", "the owner", new=True)
            await owner.append(lease, records[:1], "running")
            with contextlib.closing(psycopg.connect(database, user=stranger, autocommit=True)) as db:
                ((key,),) = db.execute(LOCKS).fetchall()
                waiting = asyncio.create_task(asyncio.to_thread(db.execute, "SELECT pg_advisory_lock(%s)", (key,)))
                with psycopg.connect(database, autocommit=True) as own:
                    while not own.execute(
                        "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
                    ).fetchall():
                        await asyncio.sleep(0)
                    own.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
                    )
                await waiting
                with pytest.raises(StoreError, match="another session holds the advisory lock of this process"):
                    async with asyncio.timeout(60):
                        await owner.append(lease, records[1:], "finished")
            await owner.append(lease, records[1:], "finished")
            assert await owner.records("a") == records

    asyncio.run(scenario())


HALF_A_MINUTE_S = 30


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other names for these options")
def test_each_side_notices_within_half_a_minute_that_the_other_one_is_gone(database: str) -> None:
    empty_database(database)
    proxy = CuttingProxy(database)

    async def scenario() -> None:
        async with PostgresStore(proxy.url) as store:
            await store.acquire("a", "me", new=True)
            db = store._queue().session._db
            assert db is not None
            with socket.socket(fileno=os.dup(db.fileno())) as ours:
                idle_s, interval_s, count, waits_ms = (
                    ours.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"))
                    for name in ("KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT")
                )
                assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert idle_s + interval_s * count <= HALF_A_MINUTE_S
            assert 0 < waits_ms <= 1000 * HALF_A_MINUTE_S
            theirs = await db.execute("SELECT source FROM pg_settings WHERE name LIKE 'tcp_keepalives%'")
            assert await theirs.fetchall() == [("client",)] * 3  # their values cannot be seen through a Unix socket
            options = dict(re.findall(r"-c tcp_keepalives_(\w+)=(\d+)", store._settings.conninfo))
            assert int(options["idle"]) + int(options["interval"]) * int(options["count"]) <= HALF_A_MINUTE_S

    asyncio.run(scenario())
    proxy.close()


@pytest.mark.slow
def test_a_process_whose_write_waits_for_a_locked_table_keeps_its_runs(database: str) -> None:
    """As while a store is compacted."""
    empty_database(database)
    records = sealed_records(2)

    async def scenario() -> None:
        owner, other = (PostgresStore(database, liveness="lease", lease_s=3.0) for _ in range(2))
        async with owner, other:
            lease = await owner.acquire("a", "the owner", new=True)
            await owner.append(lease, records[:1], "running")
            with psycopg.connect(database) as db:
                (until,) = db.execute("SELECT alive_until FROM agentfsm.owner").fetchone()
                db.execute("LOCK TABLE agentfsm.journal IN ACCESS EXCLUSIVE MODE")
                append = asyncio.ensure_future(owner.append(lease, records[1:], "finished"))
                with psycopg.connect(database) as clock:  # a lease that nobody renewed has run out then
                    await asyncio.to_thread(
                        clock.execute, "SELECT pg_sleep(extract(epoch FROM %s - clock_timestamp()) + 0.1)", (until,)
                    )
                with pytest.raises(StaleLease, match="the owner"):
                    await other.acquire("a", "the other one")
            await append
            assert await other.records("a") == records

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_server_that_stood_still_longer_than_a_lease_makes_no_living_process_look_dead(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty_database(database)
    proxies, records = [CuttingProxy(database) for _ in range(2)], sealed_records(2)
    left = "SELECT max(extract(epoch FROM alive_until - clock_timestamp()))::float8 FROM agentfsm.owner"
    await_others = postgres_session.PostgresSession.await_others

    async def owner_is_later(session: postgres_session.PostgresSession) -> bool:
        proxies[0].is_frozen = False
        return await await_others(session)

    async def scenario() -> None:
        owner, other = (PostgresStore(proxy.url, liveness="lease", lease_s=1.5) for proxy in proxies)
        async with owner, other:
            await other.append(await other.acquire("b", "the other", new=True), records[:1], "suspended")
            lease = await owner.acquire("a", "the owner", new=True)
            await owner.append(lease, records[:1], "running")
            for proxy in proxies:
                proxy.is_frozen = True
            with psycopg.connect(database, autocommit=True) as db:
                while (left_s := db.execute(left).fetchone()[0]) > 0:
                    await asyncio.to_thread(db.execute, "SELECT pg_sleep(%s)", (left_s,))
            proxies[1].is_frozen = False
            monkeypatch.setattr(postgres_session.PostgresSession, "await_others", owner_is_later)
            assert await other.heads("cut off") == []
            await owner.append(lease, records[1:], "finished")

    asyncio.run(scenario())
    for proxy in proxies:
        proxy.close()


@pytest.fixture
def clock(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerClock]:
    """The clock of a server of its own; ``clock.url`` is a database on it."""
    if FAKE_CLOCK is None:
        pytest.skip("faketime is not installed, which sets the clock of a single program")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        clock = ServerClock(Path(folder))
        with monkeypatch.context() as during_start:
            for name, value in clock.environment.items():
                during_start.setenv(name, value)
            own = start_server(Path(folder) / "data")
        clock.url = new_database(own.get_uri())
        yield clock
        own.cleanup()


def hours_ahead(url: str) -> int:
    """How far the server's clock is ahead of ours."""
    with psycopg.connect(url) as db:
        row = db.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone()
    return round((float(row[0]) - time.time()) / HOUR_S)


async def taken_over(store: PostgresStore, run_id: str) -> Lease:
    """The lease of a run whose process died; its own ends after at most a second."""
    while True:
        with contextlib.suppress(StaleLease):
            return await store.acquire(run_id, "the other one")
        await asyncio.sleep(0.02)


async def died(url: str, run_id: str, record: SealedRecord) -> Lease:
    """What a process leaves that was killed while it had a run; nobody may drop the lease, which would be released."""
    store = PostgresStore(url, liveness="lease", lease_s=0.5)
    lease = await store.acquire(run_id, "the dead one", new=True)
    await store.append(lease, [record], "running")
    await store._queue().session._disconnect()  # without a word to the server
    return lease


@pytest.mark.slow
def test_a_servers_clock_that_jumps_frees_the_runs_of_the_dead_and_lets_nobody_write_who_lost_a_run(
    clock: ServerClock, counted: Any
) -> None:
    first, second = sealed_records(2)
    jumps = [1, 0, 0, -1, 24, 24, -24, 0]
    left: list[Lease] = []
    kept = 0

    async def scenario() -> None:
        nonlocal kept
        owner, other = (PostgresStore(clock.url, liveness="lease", lease_s=0.5) for _ in range(2))
        async with owner, other:
            for number, hours in enumerate(jumps):
                dead, alive = f"dead{number}", f"alive{number}"
                lease = await owner.acquire(alive, "the living one", new=True)
                await owner.append(lease, [first], "running")
                left.append(await died(clock.url, dead, first))
                clock.jump(hours * HOUR_S)
                assert hours_ahead(clock.url) == hours
                try:  # at once, before the owner has renewed its lease
                    taken = await other.acquire(alive, "the other one")
                except StaleLease:
                    await owner.append(lease, [second], "finished")
                    kept += 1
                else:
                    with pytest.raises(StaleLease, match="the other one"):
                        await owner.append(lease, [second], "finished")
                    await other.append(taken, [second], "finished")
                await other.append(await taken_over(other, dead), [second], "finished")
                for run_id in (dead, alive):
                    assert await other.records(run_id) == [first, second]

    asyncio.run(scenario())
    assert kept < len(jumps)
    counted(
        f"on PostgreSQL: the server's clock jumped 6 times by 1 to 48 hours; all {len(jumps)} runs of the dead were "
        f"taken over, {kept} of the living kept theirs, and nobody wrote who had lost one"
    )
