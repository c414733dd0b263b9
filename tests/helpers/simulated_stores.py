"""The stores of the fault simulation: slow, sometimes full, and left behind by processes that crash.

What they read and write, also in a file or on a server, is done before their methods return: how long it took has no
influence on what happens next, and the same random draws give the same history in each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import random
import tempfile
from collections.abc import Callable, Generator, Sequence
from typing import Any, Self
from unittest import mock

from agentfsm import MemoryStore, PostgresStore, SqliteStore, StaleLease, StoreFullError
from agentfsm.journal import store as journal_store
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.run_info import RunInfo
from agentfsm.journal.sqlite import sqlite_writer
from agentfsm.journal.sqlite.sqlite_reader import SqliteReader
from agentfsm.journal.sqlite.sqlite_writer import SqliteWriter
from agentfsm.journal.store import Lease, SealedSnapshot, Status
from agentfsm.runtime import context
from tests.helpers.postgres import empty_database
from tests.helpers.read_now import read_at_once

__all__ = ["SlowMemoryStore", "SlowStore", "do_at_once", "simulated_store"]


class SlowAppends:
    """Appends that are slow, may find no space, and are lost or kept when the process crashes."""

    def set_up(self, draw: random.Random, no_room: float, deadly: float) -> Self:
        """The same store, with what may happen to it."""
        self.draw, self.no_room, self.deadly = draw, no_room, deadly
        self.queue: list[tuple[Any, ...]] = []
        return self

    async def append_now(self, *arguments: Any) -> None:
        """Append what ``append`` was given."""
        await super().append(*arguments)  # type: ignore[misc]  # of the store  # pyright: ignore

    def forget_leases(self) -> None:
        """Be the store of another process."""
        raise NotImplementedError

    def append(
        self,
        lease: Lease,
        records: Sequence[SealedRecord],
        status: Status,
        info: RunInfo | None = None,
        snapshot: SealedSnapshot | None = None,
    ) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self.queue.append((lease, tuple(records), status, info, snapshot, done))
        self._later(loop, self.draw.randrange(3))
        return done

    def _later(self, loop: asyncio.AbstractEventLoop, ticks: int) -> None:
        loop.call_soon(self._later, loop, ticks - 1) if ticks else loop.call_soon(self._first, loop)

    def _first(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.draw.random() < self.deadly:
            loop.stop()
            return
        *appended, done = self.queue.pop(0)
        try:
            if self.draw.random() < self.no_room:
                raise StoreFullError("there is no room")
            read_at_once(self.append_now(*appended))
        except Exception as error:
            if not done.done():
                done.set_exception(error)
        else:
            if not done.done():
                done.set_result(None)

    async def die(self) -> None:
        """Crash: a prefix of the pending appends becomes durable all the same."""
        for *appended, _ in self.queue[: self.draw.randrange(len(self.queue) + 1)]:
            with contextlib.suppress(StaleLease):  # an append before it had found no space
                await self.append_now(*appended)
        self.queue = []
        self.forget_leases()


class SlowMemoryStore(SlowAppends, MemoryStore):
    """In memory."""

    def forget_leases(self) -> None:
        for kept in self._runs.values():
            kept.lease = None


class SlowSqliteStore(SlowAppends, SqliteStore):
    """In a real file."""

    def forget_leases(self) -> None:
        self._leases.clear()


class SlowPostgresStore(SlowAppends, PostgresStore):
    """On a real server, with a connection for each process."""

    def forget_leases(self) -> None:
        """Cut the connections of the process, and wait until the server has noticed."""
        import psycopg

        self._leases.clear()
        with psycopg.connect(self._settings.url, autocommit=True) as db:
            for queue in self._queues.values():
                lost = queue.session._db  # pyright: ignore[reportPrivateUsage]
                if lost is not None:
                    lost.pgconn.finish()
                    db.execute("SELECT pg_advisory_xact_lock(%s)", (queue.session.key,))
        self._queues.clear()


SlowStore = SlowMemoryStore | SlowSqliteStore | SlowPostgresStore


@contextlib.contextmanager
def simulated_store(kind: str) -> Generator[SlowStore]:
    """An empty store.

    Args:
        kind: ``memory``, ``sqlite`` for a file, or the URL of a database, which loses what it has.
    """
    if kind == "memory":
        yield SlowMemoryStore()
    elif kind == "sqlite":
        with tempfile.TemporaryDirectory() as folder, SlowSqliteStore(f"{folder}/db", synchronous="normal") as file:
            file.claim()
            yield file
    else:
        empty_database(kind)
        database = SlowPostgresStore(kind)
        yield database
        database.forget_leases()


# -- at once ------------------------------------------------------------------------------------------------


def do_at_once() -> None:
    """Have stores read and write in the thread that runs, before their methods return, in the rest of this process."""
    context.YIELD_AFTER_S = float("inf")  # else it would depend on the machine where a run lets the others go on
    journal_store.SHORT_JOURNAL_CHARS = 1 << 60  # a longer one would be read in a thread
    sqlite_writer.CHECKPOINT_INTERVAL = 10**9  # a thread would make the checkpoints
    mock.patch.object(SqliteReader, "read", _read_in_this_thread).start()
    mock.patch.object(SqliteWriter, "submit", _then_flush(SqliteWriter.submit)).start()
    if importlib.util.find_spec("psycopg"):
        _do_at_once_on_servers()


async def _read_in_this_thread(self: SqliteReader, query: Any, default: Any) -> Any:
    return self.read_now(query, default)


def _then_flush(submit: Callable[..., asyncio.Future[Any]]) -> Callable[..., asyncio.Future[Any]]:
    def submit_and_flush(self: SqliteWriter, *job: Any, **options: Any) -> asyncio.Future[Any]:
        done = submit(self, *job, **options)
        self._on_flush()  # pyright: ignore[reportPrivateUsage]
        return done

    return submit_and_flush


def _do_at_once_on_servers() -> None:
    from psycopg import waiting

    from agentfsm.journal.postgres import postgres_store
    from agentfsm.journal.postgres.postgres_session import PostgresSession
    from agentfsm.journal.postgres.postgres_signals import PostgresSignals
    from agentfsm.journal.postgres.postgres_store import _Queue  # pyright: ignore[reportPrivateUsage]

    postgres_store.SHORT_ROWS_BYTES = postgres_store.FETCHED_ROWS = 1 << 30  # more of them let others go on
    postgres_store.TURNS_BETWEEN_COMMITS = 0

    async def read(self: PostgresSession, query: Any, _empty: Any) -> Any:
        return await self.write(lambda db, _again: query(db))  # not in a pool, which has tasks

    def flush(self: _Queue) -> None:
        read_at_once(self._flush())  # pyright: ignore[reportPrivateUsage]

    mock.patch.multiple(
        waiting, wait_async=_blocking(waiting.wait), wait_conn_async=_blocking(waiting.wait_conn)
    ).start()
    mock.patch.object(PostgresSession, "read", read).start()
    mock.patch.object(_Queue, "_start", flush).start()
    mock.patch.object(PostgresSignals, "listener").start()  # nobody sends any, and to wait for one would block


def _blocking(wait: Callable[..., Any]) -> Callable[..., Any]:
    async def wait_in_this_thread(*connection: Any, **limits: Any) -> Any:
        return wait(*connection, **limits)

    return wait_in_this_thread
