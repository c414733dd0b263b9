"""``TenantStore``: a store in which only the runs of some tenants exist, whatever is done with it.

A run is that of a tenant if it has the tag ``tenant:NAME``. What decides is its first record, which is sealed, and not
the columns by which it is listed; those only say which pages to look at. The run of a sub-agent has the tags of the run
that called it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Self

from pydantic import SecretStr

from agentfsm.errors import ConfigurationError, JournalError, RunExistsError, UnknownRunError
from agentfsm.journal.listing import find_listing
from agentfsm.journal.maintenance import Damage, Fact, Hold, StoreMaintenance, Tombstone
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.run_info import RunInfo, RunPage, RunQuery, first_info
from agentfsm.journal.signals import SealedSignal, SignalQueue
from agentfsm.journal.store import Head, Lease, SealedSnapshot, Status, Store, WhichRuns
from agentfsm.journal.store_url import store_url
from agentfsm.loop.keys import Keyring

_NAME = re.compile(r"[^\s*]{1,100}")

REMEMBERED = 10_000
"""How many runs a store remembers to be those of its tenants: the tags of a run that has begun do not change."""


def tenant_tag(name: str) -> str:
    """The tag of the runs of a tenant.

    Raises:
        ConfigurationError: It is not a name: one has 1 to 100 characters, without white space and ``*``.
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} is not the name of a tenant: a name has up to 100 characters, and no space or '*'"
        )
    return f"tenant:{name}"


class TenantStore:
    """A store with the runs of some tenants. Those of others are unknown here: they are not found, listed or counted.

    Args:
        store: The store with the runs of all tenants.
        tenants: The names of the tenants; for none of them, it is empty.

    Attributes:
        url: Where the store of all tenants is, as ``store_url`` says; it may have a password.
        purged: The runs that were purged through it: it has the tombstones of these.

    Raises:
        ConfigurationError: A name is not valid.
    """

    def __init__(self, store: Store, tenants: Iterable[str]) -> None:
        self._store = store
        found = store_url(store)
        self.url = None if found is None else SecretStr(str(found))
        self._tags = tuple(sorted({tenant_tag(name) for name in tenants}))
        self._known: set[str] = set()
        self.purged: set[str] = set()

    @property
    def maintenance(self) -> StoreMaintenance:
        """What is done to the runs of the tenants."""
        return _TenantMaintenance(self, self._store)

    @property
    def signals(self) -> SignalQueue:
        """The answers and cancellations that wait for the runs of the tenants."""
        return _TenantSignals(self, self._store.signals)

    async def has(self, run_id: str) -> bool:
        """Whether a run is one of a tenant's.

        Raises:
            StoreError: The store cannot be read.
        """
        if run_id in self._known:
            return True
        head = await self._store.head(run_id)
        if head is None:
            return False
        if not head.seq:  # it has no record yet: a worker is to start it
            listed = await find_listing(self._store, run_id)
            return listed is not None and not set(self._tags).isdisjoint(listed.tags)
        try:
            tags = first_info(run_id, (await self._store.records(run_id, limit=1))[0]).tags
        except (JournalError, IndexError):  # nobody can say whose it is
            return False
        own = not set(self._tags).isdisjoint(tags)
        if own:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known.add(run_id)
        return own

    def on(self, store: Store) -> TenantStore:
        """The same tenants' runs of another view of the store, such as one that writes for a moment."""
        other = TenantStore(store, ())
        other._tags, other._known, other.purged = self._tags, self._known, self.purged
        return other

    async def require(self, run_id: str) -> None:
        """Check that a run is one of a tenant's.

        Raises:
            UnknownRunError: It is not, or there is no such run: nobody learns which.
            StoreError: The store cannot be read.
        """
        if not await self.has(run_id):
            raise UnknownRunError(f"there is no run {run_id!r}")

    def _restricted(self, query: RunQuery) -> RunQuery:
        if query.tag is None and len(self._tags) == 1:
            return replace(query, tag=self._tags[0])  # found by its index, in the order of the pages
        return replace(query, any_tag=self._tags)

    async def acquire(self, run_id: str, owner: str, *, new: bool = False, keyring: Keyring | None = None) -> Lease:
        """Acquire the lease of a run; see ``Store.acquire``. A new run is that of whom its tags name.

        All tenants share the ids. For one that is taken, the error does not say whether its run is purged or another's.
        """
        if not new:
            await self.require(run_id)
        elif await self.maintenance.was_purged(run_id):
            raise RunExistsError(f"the id {run_id!r} cannot be used: another run has it or had it")
        return await self._store.acquire(run_id, owner, new=new, keyring=keyring)

    def append(
        self,
        lease: Lease,
        records: Sequence[SealedRecord],
        status: Status,
        info: RunInfo | None = None,
        snapshot: SealedSnapshot | None = None,
    ) -> Awaitable[None]:
        """Append records; see ``Store.append``."""
        return self._store.append(lease, records, status, info, snapshot)

    async def release(self, lease: Lease) -> None:
        """Release a lease; see ``Store.release``."""
        await self._store.release(lease)

    async def redact(self, lease: Lease, seq: int, hidden: str, listed: RunInfo | None = None) -> None:
        """Replace the hidden values of one record; see ``Store.redact``."""
        await self._store.redact(lease, seq, hidden, listed)

    async def head(self, run_id: str) -> Head | None:
        """The head of a run; see ``Store.head``."""
        return await self._store.head(run_id) if await self.has(run_id) else None

    async def heads(self, which: WhichRuns | None = None) -> list[Head]:
        """The heads of the tenants' runs; see ``Store.heads``."""
        return [head for head in await self._store.heads(which) if await self.has(head.run_id)]

    async def records(self, run_id: str, after: int = 0, limit: int | None = None) -> list[SealedRecord]:
        """A run's records; see ``Store.records``."""
        await self.require(run_id)
        return await self._store.records(run_id, after, limit)

    async def snapshot(self, run_id: str) -> SealedSnapshot | None:
        """A run's snapshot; see ``Store.snapshot``."""
        return await self._store.snapshot(run_id) if await self.has(run_id) else None

    async def find_runs(self, query: RunQuery) -> RunPage:
        """The runs that a query finds; see ``Store.find_runs``."""
        return await self._store.find_runs(self._restricted(query))

    async def count_runs(self, query: RunQuery) -> int:
        """How many runs a query finds; see ``Store.count_runs``."""
        return await self._store.count_runs(self._restricted(query))

    async def aclose(self) -> None:
        """Close the store with the runs of all tenants."""
        await self._store.aclose()

    async def __aenter__(self) -> Self:
        """The store itself, which is closed at the end of the ``async with`` block."""
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


class _TenantSignals:
    """The signals of the runs of some tenants; a ``SignalQueue``."""

    def __init__(self, own: TenantStore, signals: SignalQueue) -> None:
        self._own = own
        self._signals = signals

    async def send(self, signal: SealedSignal) -> bool:
        await self._own.require(signal.run_id)
        return await self._signals.send(signal)

    async def pending(self, run_id: str | None = None) -> list[SealedSignal]:
        return [each for each in await self._signals.pending(run_id) if await self._own.has(each.run_id)]

    async def remove(self, signal_id: str) -> None:
        if any(each.id == signal_id for each in await self.pending()):
            await self._signals.remove(signal_id)

    async def listen(self) -> AsyncGenerator[str]:
        async for run_id in self._signals.listen():
            if await self._own.has(run_id):
                yield run_id


class _TenantMaintenance:
    """What is done to the runs of some tenants; a ``StoreMaintenance``. It says nothing of the store as a whole.

    Another tenant's run is here as one that was purged: there is no such run, and its id cannot be used.
    """

    def __init__(self, own: TenantStore, store: Store) -> None:
        self._own = own
        self._store = store

    async def prepare(self, *, migrate: bool = False) -> None:
        await self._store.maintenance.prepare(migrate=migrate)

    @asynccontextmanager
    async def writable(self, store: Any) -> AsyncGenerator[Any]:
        async with self._store.maintenance.writable(self._store) as writable:
            yield self._own.on(writable)

    async def describe(self) -> list[Fact]:
        return []

    async def schema_damage(self) -> list[Damage]:
        return []

    async def row_damage(self) -> list[Damage]:
        return []

    async def set_hold(self, run_id: str, hold: Hold | None) -> None:
        await self._own.require(run_id)
        await self._store.maintenance.set_hold(run_id, hold)

    async def holds(self) -> dict[str, Hold]:
        found = await self._store.maintenance.holds()
        return {run_id: hold for run_id, hold in found.items() if await self._own.has(run_id)}

    async def purge(self, tombstones: Sequence[Tombstone]) -> list[str]:
        own = [each for each in tombstones if await self._own.has(each.run_id)]
        gone = await self._store.maintenance.purge(own)
        self._own.purged.update(gone)
        return gone

    async def tombstones(self, run_id: str | None = None) -> list[Tombstone]:
        if not self._own.purged:  # whose any other run was, nobody can say
            return []
        return [each for each in await self._store.maintenance.tombstones(run_id) if each.run_id in self._own.purged]

    async def was_purged(self, run_id: str) -> bool:
        head = await self._store.head(run_id)
        if head is None:
            return await self._store.maintenance.was_purged(run_id)
        listed = None if head.seq else await find_listing(self._store, run_id)
        is_claim = listed is not None and not listed.tags  # of a process that has died, perhaps: it says nothing yet
        return not is_claim and not await self._own.has(run_id)

    async def reindex(self) -> list[str]:
        return [each for each in await self._store.maintenance.reindex() if await self._own.has(each)]

    async def compact(self) -> str:
        return await self._store.maintenance.compact()
