"""The signals of a PostgreSQL store: a table, and the connection on which a process hears of new ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import LiteralString

import psycopg
from psycopg import AsyncConnection

from agentfsm.errors import StoreError, UnknownRunError
from agentfsm.journal.postgres.postgres_schema import transaction
from agentfsm.journal.postgres.postgres_session import Connection, PostgresSession, PostgresSettings
from agentfsm.journal.signals import SealedSignal, SignalHub
from agentfsm.journal.store import Lease
from agentfsm.runtime.timeout import end_task

CHANNEL = "agentfsm_signal"

POLL_S = 2.0
"""Seconds between two looks at the table where the server cannot say that it has changed."""

START_DELAY_S = 0.25
"""Seconds that a process has a run before it listens: a shorter run needs no connection for that."""

RECONNECT_S = 1.0
"""Seconds before the next attempt to connect again."""

MAX_PAYLOAD_CHARS = 1000
"""A longer id is not sent along: the server takes at most 8000 bytes."""

_SELECT: LiteralString = "SELECT id, run_id, body, encode(mac, 'hex') FROM agentfsm.signal "


async def insert_signal(db: Connection, signal: SealedSignal) -> bool:
    """Add a signal and announce it; False if there is another one with its id. It may be repeated.

    Raises:
        UnknownRunError: There is no such run.
    """
    async with transaction(db):
        await db.execute(
            "INSERT INTO agentfsm.signal (id, run_id, body, mac) SELECT %s, run_id, %s, %s FROM agentfsm.run"
            " WHERE run_id = %s ON CONFLICT (id) DO NOTHING",
            (signal.id, signal.body, bytes.fromhex(signal.mac), signal.run_id),
        )
        row = await (await db.execute(_SELECT + "WHERE id = %s", (signal.id,))).fetchone()
        if row is None:
            raise UnknownRunError(f"there is no run {signal.run_id!r}")
        if SealedSignal(*row) != signal:
            return False
        payload = signal.run_id if len(signal.run_id) <= MAX_PAYLOAD_CHARS else ""
        await db.execute("SELECT pg_notify(%s, %s)", (CHANNEL, payload))
        return True


async def select_signals(db: Connection, run_id: str | None) -> list[SealedSignal]:
    """The signals of a run, or of all runs, the oldest first."""
    if run_id is None:
        rows = await db.execute(_SELECT + "ORDER BY number")
    else:
        rows = await db.execute(_SELECT + "WHERE run_id = %s ORDER BY number", (run_id,), prepare=True)
    return [SealedSignal(*row) for row in await rows.fetchall()]


async def delete_signal(db: Connection, signal_id: str) -> None:
    """Delete a signal."""
    await db.execute("DELETE FROM agentfsm.signal WHERE id = %s", (signal_id,))


class SignalListener:
    """Hears of new signals, in a task of the event loop, until it is closed.

    Args:
        settings: The settings of the store. With a connection of its own, it hears of a signal at once; behind a
            pooler without a direct URL, it looks every ``POLL_S`` seconds.
        read_pending: Reads the ids of the runs that have signals.
        notify: Called with the id of each run that has got one.
        claim_again: Called when its connection was lost: those that say that this process lives may be, too.
    """

    def __init__(
        self,
        settings: PostgresSettings,
        read_pending: Callable[[], Awaitable[Iterable[str]]],
        notify: Callable[[str], None],
        claim_again: Callable[[], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._read_pending = read_pending
        self._notify = notify
        self._claim_again = claim_again
        self._awaited = asyncio.Event()
        self.task = asyncio.create_task(self._listen() if settings.listens else self._poll())

    def start(self) -> None:
        """Listen from now on: somebody waits for it."""
        self._awaited.set()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            with contextlib.suppress(StoreError):  # the next look may succeed; whoever uses the store gets the error
                self._notify_all(await self._read_pending())

    def _notify_all(self, run_ids: Iterable[str]) -> None:
        for run_id in dict.fromkeys(run_ids):
            self._notify(run_id)

    async def _listen(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_DELAY_S):
                await self._awaited.wait()
        while True:
            with contextlib.suppress(psycopg.Error, StoreError):
                async with await AsyncConnection.connect(self._settings.listen_conninfo, autocommit=True) as db:
                    await db.execute("LISTEN " + CHANNEL)  # from here on, this connection does nothing else
                    self._notify_all(await self._read_pending())  # those that were sent while nobody listened
                    async for notice in db.notifies():
                        self._notify_all([notice.payload] if notice.payload else await self._read_pending())
            with contextlib.suppress(StoreError):  # this connection is the first that notices it if the server was away
                await self._claim_again()
            await asyncio.sleep(RECONNECT_S)

    async def aclose(self) -> None:
        """Stop listening."""
        await end_task(self.task)


class PostgresSignals:
    """The signals of one database."""

    def __init__(self, session: Callable[[], PostgresSession], lease_of: Callable[[str], Lease | None]) -> None:
        self._session = session
        self._hub = SignalHub(lease_of)
        self._listeners: dict[asyncio.AbstractEventLoop, SignalListener] = {}

    async def send(self, signal: SealedSignal) -> bool:
        """Keep a signal; see ``SignalQueue.send``."""
        is_kept = await self._session().write(lambda db, _: insert_signal(db, signal))
        if is_kept:
            self._hub.notify(signal.run_id)
        return is_kept

    async def pending(self, run_id: str | None = None) -> list[SealedSignal]:
        """The signals that were not removed yet; see ``SignalQueue.pending``."""
        return await self._session().read(lambda db: select_signals(db, run_id), list[SealedSignal]())

    async def remove(self, signal_id: str) -> None:
        """Remove a signal; see ``SignalQueue.remove``. The server keeps its row in free pages for a while."""
        await self._session().write(lambda db, _: delete_signal(db, signal_id))

    def listen(self) -> AsyncGenerator[str]:
        """The ids of runs that have signals; see ``SignalQueue.listen``."""
        self.listener().start()
        return self._hub.listen(self.pending)

    async def _run_ids(self) -> list[str]:
        return [signal.run_id for signal in await self.pending()]

    def listener(self) -> SignalListener:
        """What hears of new signals in the running event loop, from now on."""
        loop = asyncio.get_running_loop()
        if loop not in self._listeners:
            session = self._session()
            listener = SignalListener(session.settings, self._run_ids, self._hub.notify, session.claim_again)
            self._listeners[loop] = listener
            listener.task.add_done_callback(lambda _: self._listeners.pop(loop, None))  # at the latest with its loop
        return self._listeners[loop]

    async def aclose(self) -> None:
        """Hear of no more signals in the running event loop."""
        listener = self._listeners.pop(asyncio.get_running_loop(), None)
        if listener is not None:
            await listener.aclose()
