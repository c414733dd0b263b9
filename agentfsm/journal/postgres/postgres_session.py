"""The connections of a store in one event loop: one that writes and says that its process lives, and a pool that reads.

An operation whose connection is lost is repeated on a new one, so each must be one that may be repeated: it finds out
by reading whether it was committed before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar
from urllib.parse import quote, unquote

import psycopg
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from agentfsm.errors import ConfigurationError, StoreError
from agentfsm.journal.postgres.postgres_schema import as_store_error, create_schema, read_version, require_current
from agentfsm.runtime.timeout import end_task

logger = logging.getLogger("agentfsm")

Connection = AsyncConnection[tuple[Any, ...]]

Liveness = Literal["session", "lease"]

CHECK_EVERY_S = 1.0
"""How often those that read look whether a later release has migrated the schema."""

READ_CONNECTIONS = 3
"""How many reads there are at a time in one event loop."""

PREPARE_AFTER, PREPARE_IF_ASKED = 5, 1_000_000_000
"""After how many uses of a statement the server keeps its plan, for a connection that writes, and for one that reads.
What reads a single run asks for that with ``prepare=True``, since to plan it takes longer than to do it; the best plan
of a search depends on what is searched for."""

FIRST_DELAY_S, LONGEST_DELAY_S = 0.05, 2.0
"""Seconds between two attempts to connect again; each is twice the one before."""

RETURN_S = 3.0
"""Seconds after which every process has connected again to a server that was away, or has died."""

FAREWELL_S = 2.0
"""Seconds for which a server that does not answer is waited for when a store is closed and nothing is left to write."""

RENEWALS_PER_LEASE = 3
"""How often a lease is renewed before it would expire."""

_KEEPALIVES = {
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
    "connect_timeout": "10",
}
"""Settings by which this side notices within half a minute that the other one is gone."""

_SERVER_KEEPALIVES = "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"
"""The same for the server, which then ends the session and with it the claim that this process lives."""

_STAY_CONNECTED = "SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'idle_session_timeout'"
"""The server would end the session of a process that works on a long call, and others take its runs over. Servers
before version 14 do not have the setting."""

Result = TypeVar("Result")


def read_conninfo(url: str) -> dict[str, str]:
    """The parameters of libpq that a URL gives, or a text in the form of libpq.

    Raises:
        ConfigurationError: It is neither. The error does not quote it.
    """
    try:
        return {name: str(value) for name, value in conninfo_to_dict(url).items()}
    except psycopg.ProgrammingError as error:  # its text may have the password
        unknown = re.search(r'query parameter: ("[^"]*")$', str(error).strip())
        if "@" in unquote(url.partition("?")[2]):  # it may end a password
            unknown = None
        raise ConfigurationError(
            "that is not the URL of a PostgreSQL database, such as postgresql://user:password@host/database"
            + (f": neither libpq nor agentfsm has an option {unknown[1]}" if unknown else "")
        ) from None


def parameters_url(parameters: Mapping[str, str]) -> str:
    """The URL with some parameters of libpq.

    User, password and database are where other programs that parse the URL look for them, and know what to mask in
    their logs.
    """
    rest = dict(parameters)
    login = ":".join(quote(rest.pop(name, ""), safe="") for name in ("user", "password")).removesuffix(":")
    database = quote(rest.pop("dbname", ""), safe="")
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in rest.items())
    return f"postgresql://{login}{'@' if login else ''}/{database}?{query}".removesuffix("?")


@dataclass(frozen=True)
class PostgresSettings:
    """How a store uses its server.

    Attributes:
        url: The database, as a URL or in the form of libpq; like ``listen_url``, it may have a password.
        liveness: How the server knows that this process lives: by its session, or by leases that it renews.
        lease_s: Seconds for which a lease is valid.
        wait_s: Seconds to wait for a server that went away.
        listen_url: The database without a pooler between, where new signals are heard of; empty for ``url``.
    """

    url: str = field(repr=False)
    liveness: Liveness
    lease_s: float
    wait_s: float
    listen_url: str = field(default="", repr=False)

    @property
    def listens(self) -> bool:
        """Whether a connection may LISTEN, which a pooler does not let through."""
        return bool(self.listen_url) or self.liveness == "session"

    @property
    def listen_conninfo(self) -> str:
        """What libpq connects with to LISTEN."""
        return replace(self, url=self.listen_url or self.url, liveness="session").conninfo

    @property
    def prepares(self) -> bool:
        """Whether the server may keep plans for a connection: a pooler may give it another session."""
        return self.liveness == "session"

    @property
    def server(self) -> str:
        """The server and the database, without user and password."""
        parts = read_conninfo(self.url)
        return f"PostgreSQL at {parts.get('host', 'its usual address')}, database {parts.get('dbname', '(default)')!r}"

    @property
    def conninfo(self) -> str:
        """What libpq connects with. What the URL itself says counts, but text is always sent as UTF-8."""
        given = read_conninfo(self.url)
        if self.liveness == "session":  # a pooler refuses settings that it does not know
            given["options"] = f"{_SERVER_KEEPALIVES} {given.get('options', '')}".strip()
        return make_conninfo(**(_KEEPALIVES | {"application_name": "agentfsm"} | given | {"client_encoding": "UTF8"}))


class PostgresSession:
    """The connections of a store in the running event loop. It closes itself when ``asyncio.run`` ends the loop."""

    def __init__(self, settings: PostgresSettings) -> None:
        self.settings = settings
        self.key = secrets.randbits(62)
        """By which the server knows the process: an advisory lock, or a row of ``owner``."""
        self._db: Connection | None = None
        self._was_connected = False
        self._lost_at = self._renewed_at = float("-inf")
        self._is_away = False
        self._checked_at = float("-inf")
        self._backend: int | None = None
        self._writing = asyncio.Lock()
        self._opening = asyncio.Lock()
        self._pool: AsyncConnectionPool[Connection] | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._end: AsyncGenerator[None] | None = None

    # -- writing --------------------------------------------------------------------------------------

    async def write(
        self, work: Callable[[Connection, bool], Awaitable[Result]], *, checks_schema: bool = False
    ) -> Result:
        """What an operation returns on the writing connection, after all operations before it.

        Args:
            work: The operation. It gets the connection, and whether an attempt before this one may have been committed.
            checks_schema: Whether it writes nothing by itself if a later release has migrated the schema.

        Raises:
            StoreFormatError: An earlier or a later release wrote the schema.
            StoreError: The server refuses, or has not been reached for ``wait_s`` seconds.
        """
        async with self._writing:
            return await self._repeated(lambda again: self._attempt(work, again, checks_schema))

    async def _attempt(
        self, work: Callable[[Connection, bool], Awaitable[Result]], again: bool, checks_schema: bool
    ) -> Result:
        is_new = self._db is None or self._db.closed
        if self._db is None or is_new:
            self._db = await self._connect()
        try:
            if not is_new and not checks_schema:
                await require_current(self._db)
            return await work(self._db, again)
        except psycopg.InternalError as error:
            if _is_out_of_step(error):
                await self._db.close()
            raise

    async def _connect(self) -> AsyncConnection:
        """A new writing connection, on which the process says that it lives."""
        await self._begin()
        prepare = PREPARE_AFTER if self.settings.prepares else None
        db = await AsyncConnection.connect(self.settings.conninfo, autocommit=True, prepare_threshold=prepare)
        self._was_connected = True
        try:
            if await read_version(db):
                await require_current(db)
            else:
                await create_schema(db)
            if self.settings.liveness == "session":
                await db.execute(_STAY_CONNECTED)
                await self._lock(db)
            else:
                await db.execute("DELETE FROM agentfsm.owner WHERE alive_until < clock_timestamp()")  # of the dead
                await self._renew(db)
        except BaseException:
            await db.close()
            raise
        self._backend = db.info.backend_pid
        if self.settings.liveness == "lease" and self._renewal is None:
            self._renewal = asyncio.create_task(self._keep_renewing())
        return db

    async def _lock(self, db: Connection) -> None:
        """Take the advisory lock of this process; from a lost connection, if the server still keeps that one."""
        row = await (await db.execute("SELECT pg_try_advisory_lock(%s)", (self.key,))).fetchone()
        if row is None or not row[0]:
            await db.execute("SELECT pg_terminate_backend(%s)", (self._backend,))
            raise psycopg.OperationalError("another session holds the advisory lock of this process")

    async def _renew(self, db: Connection) -> None:
        await db.execute(
            "INSERT INTO agentfsm.owner (key, renewed_at, alive_until)"
            " SELECT %s, now, now + make_interval(secs => %s) FROM clock_timestamp() AS now"
            " ON CONFLICT (key) DO UPDATE SET renewed_at = excluded.renewed_at, alive_until = excluded.alive_until",
            (self.key, self.settings.lease_s),
        )
        self._note_gap()
        self._renewed_at = asyncio.get_running_loop().time()

    async def _keep_renewing(self) -> None:
        """Renew the lease on connections of its own: what is done on the others may wait for a locked table."""
        while True:
            await asyncio.sleep(self.settings.lease_s / RENEWALS_PER_LEASE)
            with contextlib.suppress(psycopg.Error):  # the next write reports it
                async with await AsyncConnection.connect(self.settings.conninfo, autocommit=True) as db:
                    await self._renew(db)

    # -- reading --------------------------------------------------------------------------------------

    async def read(self, work: Callable[[Connection], Awaitable[Result]], empty: Result) -> Result:
        """What a query returns.

        Raises:
            StoreFormatError: An earlier or a newer release wrote the schema.
            StoreError: The server refuses, or has not been reached for ``wait_s`` seconds.
        """

        async def query(db: Connection) -> Result:
            now = asyncio.get_running_loop().time()
            if now - self._checked_at >= CHECK_EVERY_S:
                if self._checked_at < 0 and not await read_version(db):
                    return empty
                await require_current(db)
                self._checked_at = now
            return await work(db)

        return await self.inspect(query)

    async def inspect(self, work: Callable[[Connection], Awaitable[Result]]) -> Result:
        """What a query returns that needs no schema.

        Raises:
            StoreError: The server refuses, or has not been reached for ``wait_s`` seconds.
        """

        async def query(again: bool) -> Result:
            async with self._opening:
                if self._pool is None:
                    self._pool = await self._open_pool()
            async with self._pool.connection() as db:
                return await work(db)

        return await self._repeated(query)

    async def _open_pool(self) -> AsyncConnectionPool[Connection]:
        await self._begin()
        if not self._was_connected:  # a pool would try for a long time, and not say why
            await (await AsyncConnection.connect(self.settings.conninfo)).close()
            self._was_connected = True
        pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            self.settings.conninfo,
            connection_class=AsyncConnection,
            min_size=0,
            max_size=READ_CONNECTIONS,
            kwargs={"autocommit": True, "prepare_threshold": PREPARE_IF_ASKED if self.settings.prepares else None},
            timeout=LONGEST_DELAY_S,  # then it is asked again, and connects at once
            reconnect_timeout=LONGEST_DELAY_S,  # it would wait ever longer between two attempts
            open=False,
        )
        await pool.open()
        return pool

    # -- lost connections -----------------------------------------------------------------------------

    async def _repeated(self, attempt: Callable[[bool], Awaitable[Result]]) -> Result:
        """What an attempt returns, made again while the server cannot be reached."""
        loop = asyncio.get_running_loop()
        give_up, delay, again = loop.time() + self.settings.wait_s, FIRST_DELAY_S, False
        while True:
            try:
                result = await attempt(again)
            except psycopg.Error as error:
                is_lost = isinstance(error, _LOST) or _is_out_of_step(error)
                if not is_lost or not self._was_connected or isinstance(error, _REFUSED):
                    raise as_store_error(error, self.settings.server) from error
                if loop.time() + delay > give_up:
                    raise StoreError(
                        f"{self.settings.server} has not been reached for {self.settings.wait_s:g} s: "
                        f"{await _reason(error, self.settings.conninfo)}; what was acknowledged is stored, and its "
                        "runs can be resumed"
                    ) from error
                await self._note_loss(error, loop.time())
            else:
                if self._is_away:
                    self._is_away = False
                    logger.warning("%s is reached again", self.settings.server)
                return result
            again = True
            if self._db is not None and self._db.closed:
                self._db = None
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY_S)

    async def _note_loss(self, error: psycopg.Error, now: float) -> None:
        """Remember when the server was away last. A pool that had no connection in time had lost them, or is busy."""
        is_away = error.sqlstate is None or error.sqlstate.startswith(_AWAY)
        if now - self._lost_at < 2 * RETURN_S if isinstance(error, PoolTimeout) else is_away:
            self._lost_at = now
            if not self._is_away:
                self._is_away = True
                logger.warning(
                    "%s cannot be reached, and is waited for: %s",
                    self.settings.server,
                    await _reason(error, self.settings.conninfo),
                )

    def _note_gap(self) -> None:
        """Remember that a renewal is late: the server may have stood still, so that others are late with theirs."""
        now = asyncio.get_running_loop().time()
        if self._renewal is not None and now - self._renewed_at > 2 * self.settings.lease_s / RENEWALS_PER_LEASE:
            self._lost_at = now

    async def claim_again(self) -> None:
        """Say at once that this process lives, if it said so before its connections were lost.

        Raises:
            StoreError: The server refuses, or has not been reached for ``wait_s`` seconds.
        """

        async def claim(db: Connection, again: bool) -> None:
            await db.execute("SELECT 1")

        if self._backend is not None:
            await self.write(claim)

    async def await_others(self) -> bool:
        """Wait, if the server was away a moment ago, until others have had time to say that they live.

        Returns:
            Whether it waited: what was read before may take living processes for dead.
        """
        own = self.settings
        lease_s = own.lease_s / RENEWALS_PER_LEASE if own.liveness == "lease" else 0.0
        self._note_gap()
        left_s = self._lost_at + RETURN_S + lease_s - asyncio.get_running_loop().time()
        if left_s > 0:
            await asyncio.sleep(left_s)
        return left_s > 0

    # -- the end --------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Have the session closed at the end of the event loop."""
        if self._end is None:
            self._end = self._until_the_loop_ends()
            await anext(self._end)

    async def _until_the_loop_ends(self) -> AsyncGenerator[None]:
        """Closes the session when ``asyncio.run`` shuts down the asynchronous generators of its loop."""
        try:
            yield
        finally:
            await self._disconnect()

    async def aclose(self) -> None:
        """Say that the process no longer owns a run, and close all connections."""
        await self._stop_renewing()
        if self._db is not None and not self._db.closed:
            farewell = asyncio.create_task(_say_farewell(self._db, self.settings.liveness, self.key))
            await asyncio.wait([farewell], timeout=FAREWELL_S)
            await end_task(farewell)
        await self._disconnect()
        if self._end is not None:
            await self._end.aclose()
            self._end = None

    async def _stop_renewing(self) -> None:
        if self._renewal is not None:
            renewal, self._renewal = self._renewal, None
            await end_task(renewal)

    async def _disconnect(self) -> None:
        await self._stop_renewing()
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await pool.close()
        if self._db is not None:
            db, self._db = self._db, None
            await db.close()


async def _reason(error: psycopg.Error, conninfo: str) -> str:
    """What an error says; of a pool that could not connect, what the server says to a connection."""
    if isinstance(error, PoolTimeout):
        try:
            await (await AsyncConnection.connect(conninfo)).close()
        except psycopg.Error as refusal:
            error = refusal
    return " ".join(str(error).split())


async def _say_farewell(db: Connection, liveness: Liveness, key: int) -> None:
    with contextlib.suppress(psycopg.Error):
        if liveness == "session":
            await db.execute("SELECT pg_advisory_unlock(%s)", (key,))
        else:
            await db.execute("DELETE FROM agentfsm.owner WHERE key = %s", (key,))


_LOST = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.errors.IdleInTransactionSessionTimeout)
"""What is raised when the connection is gone, or none is available."""

_REFUSED = (
    psycopg.errors.DiskFull,
    psycopg.errors.ConfigurationLimitExceeded,
    psycopg.errors.ProgramLimitExceeded,
)
"""What is raised when the server has answered, and will not answer anything else to the same operation."""

_AWAY = ("08", "57P")
"""How the codes begin of the errors of a server that ends connections or accepts none; without any answer, there is no
code."""


def _is_out_of_step(error: psycopg.Error) -> bool:
    """Whether the client got another answer than to what it had asked: a pooler lost its server, and told so first."""
    return isinstance(error, psycopg.InternalError) and error.sqlstate is None
