"""What the embedding program lends to runs: a clock, a secret, a seed, and a memory of used records."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from agentfsm.journal.store import Store

__all__ = ["Clock", "Host", "SystemClock", "UsedInFolder", "UsedInProcess", "UsedRecords"]


class Clock(Protocol):
    """Where a run reads the time and waits; tests inject their own."""

    def monotonic(self) -> float:
        """Seconds that only go up, for durations."""
        ...

    def time(self) -> float:
        """Seconds since the epoch, for what people read."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The machine's own clock."""

    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


class UsedRecords(Protocol):
    """Remembers which suspension records were resumed, so that each is used once."""

    def used(self, record_id: str) -> bool:
        """Whether a record was claimed."""
        ...

    def claim(self, record_id: str) -> bool:
        """Claim a record; False where somebody else did before. Must be atomic."""
        ...


class UsedInProcess:
    """Used records of this process: enough for one that suspends and resumes by itself."""

    def __init__(self) -> None:
        self._claims: dict[str, object] = {}

    def used(self, record_id: str) -> bool:
        """Whether a record was claimed."""
        return record_id in self._claims

    def claim(self, record_id: str) -> bool:
        """Claim a record; False where it was claimed before."""
        mine = object()
        return self._claims.setdefault(record_id, mine) is mine  # one step, among threads too


class UsedInFolder:
    """Used records as empty files in a folder, which any number of processes may share.

    Args:
        folder: The folder; it is made when the first record is claimed.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def used(self, record_id: str) -> bool:
        """Whether a record was claimed."""
        return (self._folder / record_id).exists()

    def claim(self, record_id: str) -> bool:
        """Claim a record; False where it was claimed before.

        Raises:
            OSError: The folder cannot be written; the record is not claimed.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            (self._folder / record_id).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


@dataclass(frozen=True)
class Host:
    """What the embedding program lends to runs.

    Attributes:
        clock: Where time comes from.
        secret: Signs suspension records. By default a random one, good within this process alone: give
            every process that suspends or resumes the same.
        seed: Seed of a run's random draws (jitter); None derives them from the run's id alone.
        used: Remembers which suspension records were resumed.
        store: Where runs keep their journals; without one they keep them in memory, and cannot be taken
            up by another process.
    """

    clock: Clock = field(default_factory=SystemClock)
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    seed: int | None = None
    used: UsedRecords = field(default_factory=UsedInProcess)
    store: Store | None = None

    def new_id(self) -> str:
        """A fresh random id, 16 hex digits."""
        return secrets.token_hex(8)

    def __post_init__(self) -> None:
        if isinstance(self.secret, str):
            object.__setattr__(self, "secret", self.secret.encode())
        if not self.secret:
            raise ValueError("secret is empty: anybody could sign a record with it")
