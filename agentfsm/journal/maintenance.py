"""What is done to a store as a whole: making it ready, finding damage, holding and purging runs, and compacting it.

Holds are sealed under the host's key, and one that was ended stays in the store as such. So whoever writes to the store
without the secret can neither end a hold, because that would need its seal, nor remove it without a checkpoint showing
that it is gone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from agentfsm.errors import ConfigurationError, JournalError
from agentfsm.loop.keys import KeyPurpose, Keyring

AnyStore = TypeVar("AnyStore")
"""The store that is maintained: a module further up says what it is."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is wrong with a store itself, which no journal shows.

    Attributes:
        where: The run, or ``(run 7)`` if only its number is known, or ``(schema)``.
        reason: What is wrong.
        records: How many records it has.
        seq: The record in question, or None.
    """

    where: str
    reason: str
    records: int = 0
    seq: int | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """Something about a store.

    Attributes:
        name: What it is about, such as ``size``.
        value: The fact.
        is_problem: Whether it is an obstacle, so that something has to be done about it.
    """

    name: str
    value: str
    is_problem: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """Keeps a run from being purged and redacted, until it is ended.

    Attributes:
        reason: Why, such as the number of a case.
        by: Who holds it, or who ended its hold.
        since: Since when, in seconds since the epoch.
        ended: Whether the hold was ended then. It stays in the store, so that one that somebody removes is missed.
        mac: The seal of all this under the host's key (``hold_run``, ``end_hold``); empty if nobody sealed it.
    """

    reason: str = ""
    by: str = ""
    since: float = 0.0
    ended: bool = False
    mac: str = ""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What remains of a run that was purged: that it was here, and who deleted it. Nothing of its content.

    Attributes:
        number: The number that the run had in its store.
        run_id: The run.
        epoch: How often it was acquired.
        seq: The sequence number of its last record.
        hash: That record's hash, 64 hex digits.
        purged_at: When it was purged, in milliseconds since the epoch.
        by: Who requested it.
        reason: Why.
        mac: The seal of all this under the host's key.
    """

    number: int
    run_id: str
    epoch: int
    seq: int
    hash: str
    purged_at: int
    by: str = ""
    reason: str = ""
    mac: str = ""

    @property
    def content(self) -> str:
        """All but the seal, as the text that is sealed: a JSON array."""
        fields = (self.number, self.run_id, self.epoch, self.seq, self.hash, self.purged_at, self.by, self.reason)
        return json.dumps(fields, separators=(",", ":"))


def seal_tombstone(tombstone: Tombstone, keyring: Keyring) -> Tombstone:
    """The tombstone, sealed under the current key."""
    return replace(tombstone, mac=keyring.current.seal(KeyPurpose.tombstone, tombstone.content.encode()))


async def require_clock(maintenance: StoreMaintenance) -> None:
    """Check that the clock here, by which runs are started, expire and are purged, is not far from the server's.

    Raises:
        ConfigurationError: It is.
        StoreError: The store cannot be read.
    """
    for fact in await maintenance.describe():
        if fact.name == "clock" and fact.is_problem:
            raise ConfigurationError(f"{fact.name}: {fact.value}")


def read_tombstone(content: str, mac: str) -> Tombstone:
    """The tombstone that a store has as text.

    Raises:
        JournalError: The text is not that of a tombstone.
    """
    try:
        number, run_id, epoch, seq, digest, purged_at, by, reason = json.loads(content)
        found = Tombstone(
            int(number), str(run_id), int(epoch), int(seq), str(digest), int(purged_at), str(by), str(reason), mac
        )
    except (ValueError, TypeError) as error:
        raise JournalError("the tombstone of a purged run cannot be read") from error
    if found.content != content:
        raise JournalError(f"the tombstone of run {found.run_id!r} is not as it was written")
    return found


class StoreMaintenance(Protocol):
    """Maintains one store. Nothing that it does blocks the event loop."""

    async def prepare(self, *, migrate: bool = False) -> None:
        """Get ready to write now, instead of at the first write: what would keep it from writing is an error here.

        Tables that are missing are created.

        Args:
            migrate: Whether tables of an earlier release are brought up to date on a server, where processes of that
                release may use them. Those of a file are in any case, because no other process can write it.

        Raises:
            StoreFormatError: They are of an earlier release, and are not to be migrated.
            StoreError: The store cannot be written.
        """
        ...

    def writable(self, store: AnyStore) -> AbstractAsyncContextManager[AnyStore]:
        """A store through which an operation of a moment writes, such as a redaction, while others use the store.

        ::

            async with store.maintenance.writable(store) as writable:
                await fork(writable, ...)

        Raises:
            StoreLockedError: Another process writes the store, and does not answer.
            StoreError: The store cannot be written.
        """
        ...

    async def describe(self) -> list[Fact]:
        """What kind of store it is, how large, who may write it, and what prevents that.

        Raises:
            StoreError: The store cannot be read.
        """
        ...

    async def schema_damage(self) -> list[Damage]:
        """How tables and triggers differ from those that a release created.

        Raises:
            StoreError: The store cannot be read.
        """
        ...

    async def row_damage(self) -> list[Damage]:
        """Runs that were deleted, though others still have their place, and records that belong to no run.

        Raises:
            StoreError: The store cannot be read.
        """
        ...

    async def set_hold(self, run_id: str, hold: Hold | None) -> None:
        """Hold a run, whoever owns it: from now on it can be neither purged nor redacted.

        ``hold_run`` and ``end_hold`` seal what they write, which nobody without the host's secret can do.

        Args:
            run_id: The run.
            hold: Why and by whom, or that it was ended; None to remove what the store has. A run has one hold at a
                time, the last one.

        Raises:
            UnknownRunError: There is no such run.
            StoreError: The store cannot be written.
        """
        ...

    async def holds(self) -> dict[str, Hold]:
        """The last hold of each run that has or had one, by run; those that were ended included.

        Raises:
            StoreError: The store cannot be read.
        """
        ...

    async def purge(self, tombstones: Sequence[Tombstone]) -> list[str]:
        """Delete runs with all that the store has of them, and keep their tombstones: each run in one transaction.

        A run is left as it is if it is held, if somebody owns it, if it has neither finished nor is empty, or if its
        number, epoch or last record are not those of its tombstone. The id of a purged run that had records cannot
        be used again.

        Returns:
            The ids of the runs that were deleted.

        Raises:
            StoreError: The store cannot be written. Each run is whole, or is purged.
        """
        ...

    async def tombstones(self, run_id: str | None = None) -> list[Tombstone]:
        """What remains of the runs that were purged, in the order in which those were created.

        Args:
            run_id: The id of a run, to read only what remains of runs with it; None for all.

        Raises:
            JournalError: One of them cannot be read.
            StoreError: The store cannot be read.
        """
        ...

    async def was_purged(self, run_id: str) -> bool:
        """Whether a run that had records was purged, so that its id cannot be used again; it reads no tombstone.

        Raises:
            StoreError: The store cannot be read.
        """
        ...

    async def reindex(self) -> list[str]:
        """Have each run found by the tags and the metadata by which it is listed, and by no others.

        Returns:
            The ids of the runs that were found by others, which only somebody who edits a store by hand can cause.

        Raises:
            StoreError: The store cannot be written.
        """
        ...

    async def compact(self) -> str:
        """Return the space of what was deleted, so that nothing of it is left in the store. It may take a while.

        Returns:
            Where something of it may still be, or an empty string.

        Raises:
            StoreError: The store cannot be written.
        """
        ...


# -- holds ----------------------------------------------------------------------------------------------

SignedHold = tuple[int, str]
"""What a checkpoint signs of a hold: since when it is as it is, in milliseconds since the epoch, and its SHA-256."""


def why_held(run_id: str, hold: Hold | None, keyring: Keyring) -> str | None:
    """Why a run must be neither purged nor redacted; None if it may be."""
    if hold is None or (hold.ended and _is_sealed(run_id, hold, keyring)):
        return None
    return "somebody without the secret ended that: agentfsm verify" if hold.ended else hold.reason


def seal_hold(run_id: str, hold: Hold, keyring: Keyring) -> Hold:
    """The hold of a run, sealed under the current key."""
    return replace(hold, mac=keyring.current.seal(KeyPurpose.hold, _content(run_id, hold)))


def signed_hold(run_id: str, hold: Hold) -> SignedHold:
    """What a checkpoint signs of a hold."""
    return _milliseconds(hold), hashlib.sha256(_content(run_id, hold)).hexdigest()


def find_changed_holds(
    holds: Mapping[str, Hold], keyring: Keyring | None, signed: Mapping[str, SignedHold] | None = None
) -> list[Damage]:
    """An entry for each hold that no secret of the host sealed, or that is not what a checkpoint signed, or newer.

    Args:
        holds: The holds of a store, by run.
        keyring: The keys of the host; without them, nothing shows who wrote a hold.
        signed: The holds of a checkpoint, by run, without those of runs that were purged; None without a checkpoint.
    """
    found: list[Damage] = []
    for run_id, hold in holds.items():
        if keyring is not None and not _is_sealed(run_id, hold, keyring):
            reason = "its hold was not written with the secret; if it is right, write it again: agentfsm store hold"
            found.append(Damage(run_id, reason))
    for run_id, (since, digest) in (signed or {}).items():
        now = signed_hold(run_id, holds[run_id]) if run_id in holds else None
        if now is None or now[0] < since or (now[0] == since and now[1] != digest):
            gone = "is gone" if now is None else "is older than, or not, that of the checkpoint"
            found.append(Damage(run_id, f"its hold {gone}: somebody removed it, or put an older one back"))
    return found


def _is_sealed(run_id: str, hold: Hold, keyring: Keyring) -> bool:
    return keyring.check_seal(KeyPurpose.hold, _content(run_id, hold), hold.mac) is True


def _content(run_id: str, hold: Hold) -> bytes:
    fields = (run_id, hold.reason, hold.by, _milliseconds(hold), hold.ended)
    return json.dumps(fields, separators=(",", ":"), default=repr).encode()  # a row may have other types


def _milliseconds(hold: Hold) -> int:
    return round(hold.since * 1000)
