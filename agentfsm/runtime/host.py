"""What the embedding program provides: clock, signing secret, seed, store, replay guard, and long-term memory."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agentfsm.loop.messages import Message

if TYPE_CHECKING:
    from agentfsm.journal.store import Store

__all__ = ["Clock", "FileReplayGuard", "Host", "InMemoryReplayGuard", "Memory", "ReplayGuard", "SystemClock"]


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


class ReplayGuard(Protocol):
    """Remembers which suspension records were resumed, so that each is used once."""

    def is_used(self, record_id: str) -> bool:
        """Whether a record was claimed."""
        ...

    def claim(self, record_id: str) -> bool:
        """Claim a record; False where somebody else did before. Must be atomic."""
        ...


class InMemoryReplayGuard:
    """Used records of this process: enough for one that suspends and resumes by itself."""

    def __init__(self) -> None:
        self._claims: dict[str, object] = {}

    def is_used(self, record_id: str) -> bool:
        """Whether a record was claimed."""
        return record_id in self._claims

    def claim(self, record_id: str) -> bool:
        """Claim a record; False where it was claimed before."""
        mine = object()
        return self._claims.setdefault(record_id, mine) is mine  # one step, among threads too


class FileReplayGuard:
    """Used records as empty files in a folder, which any number of processes may share.

    Args:
        folder: The folder; it is made when the first record is claimed.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def is_used(self, record_id: str) -> bool:
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
        replay_guard: Remembers which suspension records were resumed.
        store: Where runs keep their journals; without one they keep them in memory, and cannot be taken
            up by another process.
    """

    clock: Clock = field(default_factory=SystemClock)
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    seed: int | None = None
    replay_guard: ReplayGuard = field(default_factory=InMemoryReplayGuard)
    store: Store | None = None

    def new_id(self) -> str:
        """A fresh random id, 16 hex digits."""
        return secrets.token_hex(8)

    def __post_init__(self) -> None:
        if isinstance(self.secret, str):
            object.__setattr__(self, "secret", self.secret.encode())
        if not self.secret:
            raise ValueError("secret is empty: anybody could sign a record with it")


class Memory(Protocol):
    """Recalls before the first model call, remembers when the run has ended.

    Whatever it raises is warned about, and the run goes on without it; so it does where it takes longer than
    the guardrails' ``tool_timeout_s``.
    """

    async def recall(self, prompt: str) -> str:
        """What is worth knowing for a prompt, as text; empty for nothing."""
        ...

    async def remember(self, messages: Sequence[Message]) -> None:
        """Keep what is worth keeping of a run's transcript."""
        ...
