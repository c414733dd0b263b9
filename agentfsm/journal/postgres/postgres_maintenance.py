"""Maintains a store on a PostgreSQL server; see ``StoreMaintenance``."""

from __future__ import annotations

from collections.abc import Callable

from agentfsm.journal.maintenance import Damage
from agentfsm.journal.postgres.postgres_damage import find_row_damage, find_schema_damage
from agentfsm.journal.postgres.postgres_session import Connection, PostgresSession

__all__ = ["PostgresMaintenance"]


class PostgresMaintenance:
    """Maintains the schema ``agentfsm`` of one database.

    Args:
        session: Returns the connections of the running event loop.
    """

    def __init__(self, session: Callable[[], PostgresSession]) -> None:
        self._session = session

    async def prepare(self) -> None:
        """Connect, and create or migrate the tables; see ``StoreMaintenance.prepare``."""
        await self._session().write(_nothing)

    async def schema_damage(self) -> list[Damage]:
        """How tables and triggers differ from those of a release; see ``StoreMaintenance.schema_damage``."""
        return await self._session().read(find_schema_damage, list[Damage]())

    async def row_damage(self) -> list[Damage]:
        """Records that belong to no run; see ``StoreMaintenance.row_damage``."""
        return await self._session().read(find_row_damage, list[Damage]())


async def _nothing(db: Connection, again: bool) -> None:
    """A write that only connects."""
