"""Recomputes what a run is listed and searched by from its records."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from agentfsm.errors import JournalError, StoreError, UnknownRunError
from agentfsm.journal.journal_writer import owner_name
from agentfsm.journal.records import SealedRecord
from agentfsm.journal.rehydrate import rehydrate
from agentfsm.journal.run_info import RunInfo, called_model, first_info, info_of
from agentfsm.journal.store import Status, Store, consistent_read, off_loop
from agentfsm.loop.canonical_json import decode
from agentfsm.loop.keys import Keyring

__all__ = ["compute_run_info", "rebuild_run_info"]


async def rebuild_run_info(store: Store, run_id: str, keyring: Keyring | None = None) -> RunInfo:
    """Write what a run is listed by anew, from its records; for a run of an earlier release, for the first time.

    Args:
        store: The store that has the run; no process may be running it.
        run_id: The run.
        keyring: The keys of the host, under which what the store keeps about the run is sealed.

    Returns:
        What it is listed by now.

    Raises:
        UnknownRunError: There is no such run, or it has no record yet.
        JournalError: Its journal cannot be read.
        StaleLease: Another owner holds the run, or it has new records.
        StoreError: The store cannot be read or written.
    """
    records, head = await consistent_read(store, run_id)
    if head is None or not records:
        raise UnknownRunError(f"run {run_id!r} has no record yet")
    status = head.status
    info = await off_loop(lambda rows: compute_run_info(run_id, rows, status), records)
    lease = await store.acquire(run_id, owner_name(), keyring=keyring)
    try:
        if lease.hash != records[-1].hash:
            raise JournalError(f"run {run_id!r} is not listed anew: it has new records")
        await store.append(lease, (), status, info)
    finally:
        with contextlib.suppress(StoreError):  # the lease is released whether or not the append succeeded
            await store.release(lease)
    return info


def compute_run_info(run_id: str, records: Sequence[SealedRecord], status: Status) -> RunInfo:
    """What a run is to be listed by.

    Args:
        run_id: The run.
        records: Its records.
        status: Its status.

    Raises:
        JournalError: They cannot be read.
    """
    rehydrated = rehydrate(records)
    base = first_info(run_id, records[0])
    suspension = rehydrated.suspension
    expires = None if suspension is None or suspension["expires"] is None else suspension["expires"] / 1000
    info = info_of(base, rehydrated.run, status, decode(records[-1].body)["ts"] / 1000, expires)
    return replace(info, model=called_model(records))
