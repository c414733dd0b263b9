"""``SignalHub``: tells whoever runs a run or listens in this process, in any thread, that it has got a signal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

from agentfsm.journal.signals import SealedSignal
from agentfsm.journal.store import Lease

RECHECK_S = 30.0
"""Seconds after which all pending signals are listed again, even where each new one is announced: for those that could
not be acted on by whoever held the run."""


class _Listener:
    """One iteration over the runs that get signals."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.notified = asyncio.Event()
        self.run_ids: dict[str, None] = {}

    def notify(self, run_id: str) -> None:
        self.run_ids[run_id] = None
        self.notified.set()

    async def is_notified(self, until: float) -> bool:
        """Whether it is notified before a time of its loop."""
        try:
            async with asyncio.timeout_at(until):
                await self.notified.wait()
        except TimeoutError:
            return False
        return True

    def take(self) -> list[str]:
        run_ids, self.run_ids = list(self.run_ids), {}
        self.notified.clear()
        return run_ids


class SignalHub:
    """Notifies whoever in this process has to know of the signals of one store."""

    def __init__(self, lease_of: Callable[[str], Lease | None]) -> None:
        self._lease_of = lease_of
        self._listeners: set[_Listener] = set()

    def notify(self, run_id: str) -> None:
        """Tell the owner of a run, and every listener, that it has got a signal; may be called from any thread."""
        lease = self._lease_of(run_id)
        if lease is not None:
            lease.signal()
        for listener in tuple(self._listeners):
            with contextlib.suppress(RuntimeError):  # its loop is closed
                listener.loop.call_soon_threadsafe(listener.notify, run_id)

    async def listen(
        self,
        read_pending: Callable[[], Awaitable[Iterable[SealedSignal]]],
        recheck_s: Callable[[], float] = lambda: RECHECK_S,
    ) -> AsyncGenerator[str]:
        """The ids of runs that have signals, and of those that get some, forever."""
        listener = _Listener()
        self._listeners.add(listener)  # before they are read, so that none is missed
        try:
            while True:
                for run_id in dict.fromkeys([signal.run_id for signal in await read_pending()]):
                    yield run_id
                recheck_at = listener.loop.time() + recheck_s()
                while await listener.is_notified(recheck_at):
                    for run_id in listener.take():
                        yield run_id
        finally:
            self._listeners.discard(listener)
