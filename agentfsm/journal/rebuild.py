"""Writes what a run is listed and searched by anew, from its records."""

from __future__ import annotations

import contextlib

from agentfsm.errors import JournalError, StoreError, UnknownRunError
from agentfsm.journal.journal_writer import owner_name
from agentfsm.journal.listing import compute_run_info
from agentfsm.journal.run_info import RunInfo
from agentfsm.journal.store import Store, consistent_read, off_loop
from agentfsm.loop.keys import Keyring

__all__ = ["rebuild_run_info"]


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
