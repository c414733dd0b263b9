"""``SignalInbox``: what a run that is in progress does about the signals that its store gets for it."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable

from agentfsm.errors import AgentfsmError, StoreError
from agentfsm.journal.signals import SealedSignal, is_about, open_signal
from agentfsm.journal.store import Lease, Status, Store
from agentfsm.loop.keys import Keyring
from agentfsm.runtime.hooks import logger


class SignalInbox:
    """The signals to one run that this process drives. It reads the store only when the run has got one."""

    def __init__(self, store: Store, run_id: str, keyring: Keyring) -> None:
        self._store = store
        self._run_id = run_id
        self._keyring = keyring
        self._cancel: Callable[[str], None]
        self._hash_of: Callable[[int], Awaitable[str | None]]
        self._acted_on = ""
        self._cancellations: dict[str, SealedSignal] = {}
        self._reading: asyncio.Task[None] | None = None
        self._missed = False  # whether another signal came while they were read
        self._closed = False

    @property
    def has_work(self) -> bool:
        """Whether anything is left to do once the run is durable."""
        return bool(self._acted_on or self._cancellations or self._reading)

    async def watch(
        self,
        lease: Lease,
        hash_of: Callable[[int], Awaitable[str | None]],
        cancel: Callable[[str], None],
        acted_on: str,
    ) -> None:
        """Act on what has arrived, before anything else happens in the run, and on what arrives from now on.

        Args:
            lease: The lease of the run.
            hash_of: The hash of the record with a sequence number, or None.
            cancel: Cancels the run, with a reason.
            acted_on: The id of the signal that the run is resumed with, or an empty string.
        """
        self._hash_of, self._cancel, self._acted_on = hash_of, cancel, acted_on
        loop = asyncio.get_running_loop()
        inbox: weakref.ref[SignalInbox] = weakref.ref(self)  # a lease that nobody holds must end at once

        def on_signal() -> None:
            if inbox() is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(_read_inbox, inbox)

        lease.on_signal = on_signal
        if lease.is_signalled or lease.epoch > 1:  # it may have been cancelled while nobody ran it
            self.read()
        if self._reading is not None:
            await asyncio.wait([self._reading])

    def read(self) -> None:
        """Read what has arrived, in a task."""
        self._missed = self._reading is not None
        if self._reading is None and not self._closed:
            self._reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        try:
            await self._act()
            while self._missed:
                self._missed = False
                await self._act()
        except AgentfsmError as error:
            logger.warning("run %s: its signals cannot be read: %s", self._run_id, error)
        finally:
            self._reading = None

    async def _act(self) -> None:
        for sealed in await self._store.signals.pending(self._run_id):
            signal = open_signal(sealed, self._keyring)
            if signal is not None and signal.kind == "cancel" and is_about(signal, await self._hash_of(signal.to[0])):
                self._cancellations[signal.id] = sealed
                self._cancel(signal.cancel_reason)

    async def clear_up(self, status: Status | None) -> None:
        """Remove the signals that were acted on, now that this is durable."""
        self._closed = status is not None
        if self._closed and self._reading is not None:
            await asyncio.wait([self._reading])
        done = [self._acted_on] if self._acted_on else []
        if status == "finished":
            done += self._cancellations
        with contextlib.suppress(StoreError):  # what is left fits no run any more, and is removed when it is read
            for signal_id in done:
                await self._store.signals.remove(signal_id)
            if status == "suspended":  # it was cancelled at the very moment at which it began to wait
                for sealed in self._cancellations.values():
                    await self._store.signals.send(sealed)
        self._acted_on = ""
        if status is not None:
            self._cancellations.clear()


def _read_inbox(inbox: weakref.ref[SignalInbox]) -> None:
    this = inbox()
    if this is not None:
        this.read()
