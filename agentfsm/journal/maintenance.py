"""What is done to a store as a whole, beside writing and reading runs: making it ready, and finding what is damaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Damage", "StoreMaintenance"]


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


class StoreMaintenance(Protocol):
    """Maintains one store. Nothing that it does blocks the event loop."""

    async def prepare(self) -> None:
        """Get ready to write now, instead of at the first write: what would keep it from writing is an error here.

        Tables that are missing are created, and those of an earlier release are brought up to date.

        Raises:
            StoreError: The store cannot be written.
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
