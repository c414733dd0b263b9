"""Holds and purges whole runs: which may go, what is checked before, and what remains and why.

A run is purged together with the runs that it called as sub-agents, or not at all. What decides about a run is its
verified journal, never the columns by which it is listed: whoever can change those must not be able to have a run
deleted, and a journal that was tampered with is evidence.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from agentfsm.errors import ConfigurationError, JournalError, StoreError, UnknownRunError
from agentfsm.journal.listing import ended_at, iterate_runs
from agentfsm.journal.maintenance import Hold, Tombstone, require_clock, seal_hold, seal_tombstone, why_held
from agentfsm.journal.run_info import RunInfo, RunQuery, check_selects_one, first_info
from agentfsm.journal.store import Head, Store, consistent_read, off_loop
from agentfsm.journal.verification import GOOD, TAMPERED, UNVERIFIABLE, VerificationReport, verify
from agentfsm.loop.keys import SECRET_VARIABLE, KeyPurpose, Keyring

_BATCH = 100
_DAY_S = 86_400
_LISTED_OTHERWISE = "its entry in the list differs from its records: agentfsm store rebuild mends that"


async def hold_run(store: Store, run_id: str, hold: Hold, keyring: Keyring) -> None:
    """Hold a run, whoever owns it: from now on it can be neither purged nor redacted.

    Args:
        store: The store.
        run_id: The run.
        hold: Why and by whom; it is sealed here.
        keyring: The keys of the host; the current one seals it.

    Raises:
        UnknownRunError: There is no such run.
        ConfigurationError: The run was written under another secret: under this one, its hold would count as forged.
        StoreError: The store cannot be read or written.
    """
    await require_secret_of(store, run_id, keyring)
    await store.maintenance.set_hold(run_id, seal_hold(run_id, hold, keyring))


async def end_hold(store: Store, run_id: str, keyring: Keyring, *, by: str = "", now: float | None = None) -> None:
    """End the hold of a run; does nothing if it has none.

    Args:
        store: The store.
        run_id: The run.
        keyring: The keys of the host; the current one seals that it was ended.
        by: Who ends it.
        now: The time, in seconds since the epoch; that of this machine by default.

    Raises:
        ConfigurationError: The run was written under another secret.
        StoreError: The store cannot be read or written.
    """
    await require_secret_of(store, run_id, keyring)
    held = (await store.maintenance.holds()).get(run_id)
    if held is not None:
        at = max(time.time() if now is None else now, held.since)  # a checkpoint misses what is older than it signed
        ended = Hold(held.reason, by, at, ended=True)
        await store.maintenance.set_hold(run_id, seal_hold(run_id, ended, keyring))


async def require_secret_of(store: Store, run_id: str, keyring: Keyring) -> None:
    """Check that a run was written under a secret of the host; see ``hold_run``."""
    head = await store.head(run_id)
    if head is not None and (key_id := keyring.foreign_key_id(head.mac)):
        raise ConfigurationError(
            f"run {run_id!r} was written under another secret, with key id {key_id}; the one given here has key id "
            f"{keyring.current.key_id}: give that of the process that wrote it ({SECRET_VARIABLE}, or the keyring)"
        )


@dataclass(frozen=True, slots=True)
class KeptRun:
    """A run that was not purged.

    Attributes:
        run_id: The run.
        reason: Why not.
    """

    run_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """What was purged, or would be, and what was not.

    Attributes:
        purged: The ids of the runs that were purged, sub-agents' runs included.
        kept: The runs that were to be purged and remain.
    """

    purged: tuple[str, ...] = ()
    kept: tuple[KeptRun, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RetentionRule:
    """How long runs are kept after they ended.

    Attributes:
        days: For how many days.
        tag: Only runs with this tag; None for all.
        session_id: Only runs of this conversation; None for all.

    Raises:
        ConfigurationError: The number of days is negative, or a text is longer than what runs are listed by.
    """

    days: float
    tag: str | None = None
    session_id: str | None = None

    def __post_init__(self) -> None:
        if not self.days >= 0:
            raise ConfigurationError(f"days={self.days}: runs are kept for 0 days or more")
        check_selects_one("tag", self.tag)
        check_selects_one("session_id", self.session_id)

    @property
    def query(self) -> RunQuery:
        """The runs that it is about."""
        return RunQuery(tag=self.tag, session_id=self.session_id, limit=500)

    def allows_purge(self, info: RunInfo, now: float) -> bool:
        """Whether a run may be purged.

        Args:
            info: What its records say; ``updated`` is when it ended.
            now: The time, in seconds since the epoch.
        """
        return info.updated is not None and info.updated <= now - self.days * _DAY_S and self.query.matches(info)


async def apply_retention(
    store: Store,
    rule: RetentionRule,
    keyring: Keyring,
    *,
    by: str = "",
    reason: str = "",
    dry_run: bool = False,
    now: float | None = None,
) -> PurgeReport:
    """Purge the runs that ended longer ago than a rule keeps them.

    Args:
        store: The store.
        rule: The rule.
        keyring: The keys of the host: the current one seals the tombstones.
        by: Who requested it, for the tombstones.
        reason: Why, for the tombstones; the rule by default.
        dry_run: Whether to purge nothing, and only say what would be.
        now: The time, in seconds since the epoch; that of this machine by default.

    Raises:
        ConfigurationError: The clock of this machine is far from the server's.
        StoreError: The store cannot be read or written.
    """
    if now is None:
        await require_clock(store.maintenance)
    at = time.time() if now is None else now
    found = [
        info.run_id
        async for info in iterate_runs(store, replace(rule.query, status="finished", parent=""))
        if info.updated is not None and info.updated <= at - rule.days * _DAY_S
    ]
    return await purge_runs(
        store,
        found,
        keyring,
        by=by,
        reason=reason or f"kept for {rule.days:g} days",
        dry_run=dry_run,
        allows=lambda info: rule.allows_purge(info, at),
    )


async def purge_runs(
    store: Store,
    run_ids: Iterable[str],
    keyring: Keyring,
    *,
    by: str = "",
    reason: str = "",
    dry_run: bool = False,
    allows: Callable[[RunInfo], bool] | None = None,
) -> PurgeReport:
    """Delete whole runs that ended, with the runs that they called, and keep a sealed tombstone of each.

    Runs that are held, are running, wait for somebody, are owned, or do not verify remain.

    Args:
        store: The store.
        run_ids: The runs.
        keyring: The keys of the host: the current one seals the tombstones.
        by: Who requested it, for the tombstones.
        reason: Why, for the tombstones.
        dry_run: Whether to purge nothing, and only say what would be.
        allows: Says of what the records of a run say whether it may be purged; by default it may.

    Raises:
        StoreError: The store cannot be read or written.
    """
    holds = await store.maintenance.holds()
    purged: list[str] = []
    kept: list[KeptRun] = []
    batch: list[Tombstone] = []
    for run_id in dict.fromkeys(run_ids):
        family, why = await _family(store, run_id, holds, keyring, allows)
        if why:
            kept.append(KeptRun(run_id, why))
            continue
        now = int(time.time() * 1000)
        batch += [seal_tombstone(_tombstone(head, now, by, reason), keyring) for head in family]
        if len(batch) >= _BATCH:
            await _bury(store, batch, dry_run, purged, kept)
            batch = []
    await _bury(store, batch, dry_run, purged, kept)
    return PurgeReport(tuple(purged), tuple(kept))


async def _bury(
    store: Store, batch: Sequence[Tombstone], dry_run: bool, purged: list[str], kept: list[KeptRun]
) -> None:
    wanted = [each.run_id for each in batch]
    done = set(wanted if dry_run else await store.maintenance.purge(batch))
    purged += [run_id for run_id in wanted if run_id in done]
    kept += [KeptRun(run_id, "it changed in the meantime") for run_id in wanted if run_id not in done]


async def _family(
    store: Store, run_id: str, holds: dict[str, Hold], keyring: Keyring, allows: Callable[[RunInfo], bool] | None
) -> tuple[list[Head], str]:
    """A run and those that it called, those first; and why they must remain, or an empty string."""
    head, why = await _inspect(store, run_id, holds, keyring, allows)
    if head is None:
        return [], why
    below: list[Head] = []
    async for child in iterate_runs(store, RunQuery(parent=run_id, limit=500)):
        heads, why = await _family(store, child.run_id, holds, keyring, lambda info: info.parent == run_id)
        if why:
            called = "which is listed as called by it" if why == _LISTED_OTHERWISE else "which it called"
            return [], f"{child.run_id}, {called}, remains: {why}"
        below += heads
    return [*below, head], ""


async def _inspect(
    store: Store, run_id: str, holds: dict[str, Hold], keyring: Keyring, allows: Callable[[RunInfo], bool] | None
) -> tuple[Head | None, str]:
    """The head of a run, and why it must remain, or an empty string."""
    if (why := why_held(run_id, holds.get(run_id), keyring)) is not None:
        return None, f"it is on hold{f' ({why})' if why else ''}"
    try:
        records, head = await consistent_read(store, run_id)
    except UnknownRunError:
        return None, "there is no such run"
    except StoreError as error:
        return None, f"it cannot be read: {error}"
    if head is None:
        return None, "there is no such run"
    if head.owner is not None:
        return None, f"{head.owner} owns it"
    if not records:
        return (head, "") if allows is None else (None, _LISTED_OTHERWISE)
    if head.status != "finished":
        return None, "it waits for somebody" if head.status == "suspended" else "it was interrupted, and has not ended"
    report = await off_loop(lambda rows: verify(run_id, rows, head, keyring=keyring), records)
    if report.code in (TAMPERED, UNVERIFIABLE):
        return None, f"it does not verify, so it is evidence: record {report.seq}: {report.reason}"
    try:
        if allows is not None and not allows(replace(first_info(run_id, records[0]), updated=ended_at(records))):
            return None, _LISTED_OTHERWISE
    except JournalError as error:
        return None, str(error)
    return head, ""


def _tombstone(head: Head, now: int, by: str, reason: str) -> Tombstone:
    number = json.loads(head.row)[0] if head.row else 0
    return Tombstone(number, head.run_id, head.epoch, head.seq, head.hash, now, by, reason)


def verify_tombstone(
    tombstone: Tombstone, keyring: Keyring | None, signed: Mapping[int, str] | None = None
) -> VerificationReport:
    """Whether a run was purged by somebody with the host's secret, as it was when a checkpoint was made or later.

    Args:
        tombstone: What remains of it.
        keyring: The keys of the host; without them, nothing shows who purged it.
        signed: Hashes of its records by sequence number, from a checkpoint; 0 is a run without records.
    """
    run_id = tombstone.run_id
    sealed = (
        None if keyring is None else keyring.check_seal(KeyPurpose.tombstone, tombstone.content.encode(), tombstone.mac)
    )
    if sealed is False:
        return VerificationReport(run_id, TAMPERED, 0, None, "its tombstone was not written with the secret")
    newest = max(signed or {0: ""})
    if newest > tombstone.seq or (newest == tombstone.seq and newest and (signed or {})[newest] != tombstone.hash):
        reason = "its tombstone is that of another state of it than the checkpoint has"
        return VerificationReport(run_id, TAMPERED, 0, None, reason)
    doubt = "it was purged under a secret that is not given" if sealed is None and keyring is not None else ""
    return VerificationReport(run_id, GOOD, 0, doubt=doubt)
