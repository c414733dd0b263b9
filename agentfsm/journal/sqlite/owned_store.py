"""Writes a SQLite file for a moment, itself or through the process that is its writer.

``SqliteTurn`` says which: it makes this process the writer, or connects to the one that is. ``OwnedStore`` is the store
over that connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from agentfsm.errors import StaleLease, StoreError, StoreLockedError
from agentfsm.journal.hash_chain import GENESIS_HASH
from agentfsm.journal.maintenance import StoreMaintenance
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.run_info import RunInfo, RunPage, RunQuery
from agentfsm.journal.signals import SignalQueue
from agentfsm.journal.sqlite.owner_protocol import (
    connect,
    dump_info,
    has_unix_sockets,
    is_same_user,
    load_error,
    read_message,
    write_message,
)
from agentfsm.journal.sqlite.sqlite_writer import SqliteWriter
from agentfsm.journal.sqlite.store_file import StoreFile
from agentfsm.journal.store import (
    Head,
    Lease,
    SealedSnapshot,
    Status,
    Store,
    WhichRuns,
    changed_row_error,
    head_row,
    is_changed,
    seal_row,
)
from agentfsm.loop.keys import Keyring

ANSWER_S = 30.0
"""Seconds to wait for the process that writes the file: it may be frozen."""

ACQUIRE_ATTEMPTS = 5
"""Attempts to acquire a run that changes in the meantime."""


class RunRow(NamedTuple):
    """The row of a run."""

    number: int
    run_id: str
    epoch: int
    owner: str | None
    seq: int
    digest: str
    status: Status
    mac: str

    def text(self) -> str:
        """The text that is sealed."""
        return head_row(*self[:-1])


class OwnerConnection:
    """A connection to the process that writes a file."""

    def __init__(self, database: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._database = database
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()

    async def call(self, command: str, **fields: Any) -> Any:
        """What the process answers to a command.

        Raises:
            StoreLockedError: It does not answer.
            StoreError: It refuses, or has ended; then it is not known whether it did what was asked.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await write_message(self._writer, {"command": command, **fields})
                    message = await read_message(self._reader)
            except TimeoutError:
                raise StoreLockedError(
                    f"{self._database.name} is in use by another process, which has not answered for {ANSWER_S:g} s"
                ) from None
            except (OSError, ValueError):
                message = None
        if message is None:
            raise StoreError(
                f"the process that writes {self._database} ended in the meantime: check whether it did what was asked, "
                "and repeat it if not"
            )
        if "error" in message:
            raise load_error(message)
        return message["value"]

    async def aclose(self) -> None:
        """Close it; leases that were not released end."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def connect_to_owner(file: StoreFile) -> OwnerConnection | None:
    """A connection to the process that writes a file; None if nobody listens.

    Raises:
        StoreError: A process of another user listens there.
    """
    address = file.lock.announced() if has_unix_sockets() else ""
    if not address:
        return None
    try:
        connection = await connect(address)
    except OSError:  # it is the address of a process that was killed
        return None
    if not is_same_user(connection):
        connection.close()
        raise StoreError(f"the process that writes {file.given} is another user's: nothing was asked of it")
    return OwnerConnection(file.given, *await asyncio.open_unix_connection(sock=connection))


@dataclass(slots=True, eq=False)
class _OwnedLease(Lease):
    """A lease that the other process holds for this one, and what it takes to seal the row of the run."""

    number: int = 0
    row: tuple[int, Status] = (0, "running")
    keyring: Keyring | None = None


class OwnedStore:
    """Reads a file here, and writes it through the process that owns it. Leases end with the connection."""

    def __init__(
        self,
        store: Store,
        owner: OwnerConnection,
        select_row: Callable[[str], Awaitable[tuple[RunRow | None, int]]],
    ) -> None:
        self._store = store
        self._owner = owner
        self._select_row = select_row

    @property
    def maintenance(self) -> StoreMaintenance:
        """What is done to the store as a whole."""
        return self._store.maintenance

    @property
    def signals(self) -> SignalQueue:
        """The answers and cancellations that wait for runs."""
        return self._store.signals

    async def acquire(self, run_id: str, owner: str, *, new: bool = False, keyring: Keyring | None = None) -> Lease:
        """Acquire the lease of a run; see ``Store.acquire``."""
        for attempt in range(1, ACQUIRE_ATTEMPTS + 1):
            run, next_number = await self._select_row(run_id)
            lease, seals = _next_lease(run_id, owner, keyring, run, next_number)
            try:
                lease.number, lease.epoch, lease.seq, lease.hash = await self._owner.call(
                    "acquire", run=run_id, owner=owner, new=new, seals=seals
                )
            except StaleLease as error:
                if error.why != "has changed in the meantime" or attempt == ACQUIRE_ATTEMPTS:
                    raise
            else:
                return lease
        raise StaleLease(run_id, None, "has changed in the meantime")

    def append(
        self,
        lease: Lease,
        records: Sequence[SealedRecord],
        status: Status,
        info: RunInfo | None = None,
        snapshot: SealedSnapshot | None = None,
    ) -> Awaitable[None]:
        """Append records after the last one; see ``Store.append``."""
        held = _held(lease)
        if records:
            held.seq, held.hash = records[-1].seq, records[-1].hash
        held.row = (held.row[0], status)
        return asyncio.ensure_future(
            self._owner.call(
                "append",
                lease=held.number,
                records=records,
                status=status,
                info=dump_info(info),
                snapshot=snapshot,
                seals=_seals(held),
            )
        )

    async def release(self, lease: Lease) -> None:
        """Release a lease; see ``Store.release``."""
        held = _held(lease)
        with contextlib.suppress(StoreError):  # an append ended it
            await self._owner.call("release", lease=held.number, seals=_seals(held))

    async def redact(self, lease: Lease, seq: int, hidden: str, listed: RunInfo | None = None) -> None:
        """Replace the hidden values of one record; see ``Store.redact``."""
        await self._owner.call("redact", lease=_held(lease).number, seq=seq, hidden=hidden, listed=dump_info(listed))

    # -- reading --------------------------------------------------------------------------------------

    async def head(self, run_id: str) -> Head | None:
        """The head of a run; see ``Store.head``."""
        return await self._store.head(run_id)

    async def heads(self, which: WhichRuns | None = None) -> list[Head]:
        """The heads of runs; see ``Store.heads``."""
        return await self._store.heads(which)

    async def records(self, run_id: str, after: int = 0, limit: int | None = None) -> list[SealedRecord]:
        """A run's records; see ``Store.records``."""
        return await self._store.records(run_id, after, limit)

    async def snapshot(self, run_id: str) -> SealedSnapshot | None:
        """A run's snapshot; see ``Store.snapshot``."""
        return await self._store.snapshot(run_id)

    async def find_runs(self, query: RunQuery) -> RunPage:
        """The runs that a query finds; see ``Store.find_runs``."""
        return await self._store.find_runs(query)

    async def count_runs(self, query: RunQuery) -> int:
        """How many runs a query finds; see ``Store.count_runs``."""
        return await self._store.count_runs(query)

    async def aclose(self) -> None:
        """Close the connection; the store itself stays open."""
        await self._owner.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


def _next_lease(
    run_id: str, owner: str, keyring: Keyring | None, run: RunRow | None, next_number: int
) -> tuple[_OwnedLease, dict[str, str]]:
    """The lease that comes after what the store keeps about a run, and the seals of both.

    Raises:
        StoreError: Somebody without the secret changed what the store keeps.
    """
    if run is None:
        lease = _OwnedLease(run_id, owner, 1, 0, GENESIS_HASH, row=(next_number, "running"), keyring=keyring)
        return lease, _seals(lease)
    text = run.text()
    if is_changed(text, run.mac, keyring):
        raise changed_row_error(run_id)
    lease = _OwnedLease(
        run_id, owner, run.epoch + 1, run.seq, run.digest, row=(run.number, run.status), keyring=keyring
    )
    return lease, {text: run.mac, **_seals(lease)}


def _held(lease: Lease) -> _OwnedLease:
    if not isinstance(lease, _OwnedLease):
        raise StaleLease(lease.run_id, None, "was acquired through another store")
    return lease


def _seals(lease: _OwnedLease) -> dict[str, str]:
    """The seals of what the store keeps about a run while the lease lasts, and after it."""
    number, status = lease.row
    rows = [
        head_row(number, lease.run_id, lease.epoch, owner, lease.seq, lease.hash, status)
        for owner in (lease.owner, None)
    ]
    return {row: seal_row(lease.keyring, row) for row in rows}


ATTEMPTS, FIRST_DELAY_S, LONGEST_DELAY_S = 14, 0.01, 1.0
"""Attempts to write a file whose writer does not listen, and seconds between them: each is twice as long as the one
before. Together they are as long as SQLite itself waits for a lock."""


class SqliteTurn:
    """Who may write one file now: this process, or another one that is asked to.

    Args:
        file: The file.
        writer: Its writer in this process.
        has_leases: Whether this process has acquired a run, and so has to stay the writer.
    """

    def __init__(self, file: StoreFile, writer: SqliteWriter, has_leases: Callable[[], bool]) -> None:
        self._file = file
        self._writer = writer
        self._has_leases = has_leases
        self._users = 0
        self._for_a_moment = False  # the first of the users made this process the writer

    @asynccontextmanager
    async def write(self) -> AsyncGenerator[OwnerConnection | None]:
        """Become the writer for a moment, unless this process is it, or connect to the process that is.

        Yields:
            The connection to the process that writes the file; None if this one does.

        Raises:
            StoreLockedError: Another process writes the file, and nobody listens for it.
            StoreError: The file cannot be written.
        """
        if not self._users:
            self._for_a_moment = not self._writer.is_started
        self._users += 1
        try:
            owner = None if self._writer.is_started else await self._claim()
            try:
                yield owner
            finally:
                if owner is not None:
                    await owner.aclose()
        finally:
            self._users -= 1
            if self._for_a_moment and not self._users and not self._has_leases():
                self._writer.close_if_idle()

    async def do(self, here: Callable[[], Awaitable[Any]], command: str, **fields: Any) -> Any:
        """What an operation returns that is done here, or by the process that writes the file, as ``write`` says."""
        async with self.write() as owner:
            return await (here() if owner is None else owner.call(command, **fields))

    async def _claim(self) -> OwnerConnection | None:
        """Become the writer, or connect to it."""
        delay = FIRST_DELAY_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await self._writer.started(briefly=True)
            except StoreLockedError:
                owner = await connect_to_owner(self._file)
                if owner is not None:
                    return owner
                if attempt == ATTEMPTS:
                    raise
            else:
                return None
            await asyncio.sleep(delay)  # it may only just have begun, or be ending
            delay = min(2 * delay, LONGEST_DELAY_S)
        return None
