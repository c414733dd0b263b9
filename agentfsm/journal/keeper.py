"""Keeps one run's entries in a store: encodes them, hands them over in order, and waits when it must."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from agentfsm.errors import JournalError, StaleLease, StoreError
from agentfsm.journal.records import Record, Row
from agentfsm.journal.restore import records
from agentfsm.journal.scribe import Scribe
from agentfsm.journal.secrets import Secrets, keys_in_environment
from agentfsm.journal.store import Lease, Status, Store
from agentfsm.runtime.recorder import Entry, Recorder, TakenUp

if TYPE_CHECKING:
    from pydantic import SecretStr

__all__ = ["StoreKeeper", "open_keeper", "owner_name", "read_back"]

_STATUS: Mapping[str, Status] = {"run.suspended": "suspended", "run.finished": "finished"}


def owner_name() -> str:
    """Who we are, for people to read in an error."""
    return f"process {os.getpid()} on {socket.gethostname()}"


class StoreKeeper:
    """Keeps one run in a store, under a lease."""

    def __init__(self, store: Store, lease: Lease, scribe: Scribe) -> None:
        self._store = store
        self._lease: Lease | None = lease
        self._scribe = scribe
        self._handed: deque[asyncio.Future[None]] = deque()  # what nobody has looked at yet, in order
        self._last: asyncio.Future[None] | None = None
        self._over = False
        self._error: Exception | None = None

    @property
    def error(self) -> Exception | None:
        """Why nothing can be kept any more, or None: the first error, since those behind it only follow from it."""
        while self._handed and self._handed[0].done():
            done = self._handed.popleft()
            error = None if done.cancelled() else done.exception()
            if self._error is None and isinstance(error, Exception):
                self._error = error
        return self._error

    @property
    def head(self) -> str:
        """The hash of the last record that was handed over, in hex."""
        return self._scribe.head

    def push(self, entries: list[Entry]) -> None:
        """Hand entries over, in order, without waiting."""
        if self._lease is None or self._over or self.error is not None:
            return
        try:
            rows = self._scribe.write(entries)
        except (TypeError, ValueError) as error:
            self._error = JournalError(f"the run cannot be written down: {error}")
            return
        status = _STATUS.get(entries[-1][0], "running")
        self._last = self._hand(self._lease, rows, status)
        self._over = status != "running"  # the lease ends with it, unless it fails

    def _hand(self, lease: Lease, rows: Sequence[Row], status: Status) -> asyncio.Future[None]:
        handed = asyncio.ensure_future(self._store.append(lease, rows, status))
        self._handed.append(handed)
        return handed

    async def settle(self) -> None:
        """Wait until everything handed over is durable.

        Raises:
            agentfsm.errors.StoreError: It cannot be kept; the run must not go on.
            agentfsm.errors.JournalError: An entry cannot be written as JSON.
        """
        if self._last is not None and self.error is None:
            cut_off = self._last.cancelled()  # whoever waited was; what was handed over is on its way
            if cut_off and self._lease is not None and not self._over:
                self._last = self._hand(self._lease, (), "running")
            with contextlib.suppress(Exception):  # the first error is told below
                await self._last  # order is kept by the store, so the last one stands for all
        if (error := self.error) is not None:
            if self._lease is not None:
                lease, self._lease = self._lease, None
                with contextlib.suppress(StoreError):  # the first error says more than this one
                    await self._store.release(lease)
            raise error
        if self._over:
            self._lease = None


async def open_keeper(
    store: Store,
    run_id: str,
    taken_up: TakenUp | None,
    secret_arguments: Mapping[str, frozenset[str]],
    known: Iterable[SecretStr] = (),
) -> StoreKeeper:
    """Take a run, new or known, and keep it from here on.

    Args:
        store: Where.
        run_id: The run.
        taken_up: Where a known run stood when it was read, or None for a new one.
        secret_arguments: Names of arguments that must not be written, by tool.
        known: What must not be written wherever it stands, beside the keys of the environment.

    Raises:
        StaleLease: Somebody else holds the run, or it has moved on since it was read.
        StoreError: The store cannot write.
    """
    lease = await store.take(run_id, owner_name(), new=taken_up is None)
    if taken_up is not None and (lease.seq, lease.hash) != (taken_up.seq, taken_up.hash):
        await store.release(lease)
        raise StaleLease(run_id, None, "has moved on since it was read")
    scribe = Scribe(lease.seq, lease.hash, lease.epoch, _secrets(secret_arguments, known))
    if taken_up is not None:
        scribe.go_on(taken_up.tool, taken_up.results)
    return StoreKeeper(store, lease, scribe)


def read_back(
    recorder: Recorder,
    run_id: str,
    store: Store | None,
    secret_arguments: Mapping[str, frozenset[str]],
    known: Iterable[SecretStr] = (),
) -> list[Record]:
    """A run's records, from its store or, without one, written now; see ``open_keeper``."""
    if store is not None:
        return records(store.rows(run_id), run_id)
    scribe = Scribe(secrets=_secrets(secret_arguments, known))
    return records(scribe.write(recorder.entries), run_id)


def _secrets(arguments: Mapping[str, frozenset[str]], known: Iterable[SecretStr]) -> Secrets:
    return Secrets([*keys_in_environment(), *(secret.get_secret_value() for secret in known)], arguments)
