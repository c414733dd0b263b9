"""The port to a memory: what an agent remembers between runs. A memory that fails is done without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentfsm.core.messages import Message

__all__ = ["Memory"]


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
