"""A store on a PostgreSQL server, for many processes on many machines (extra ``postgres``)."""

from typing import TYPE_CHECKING, Any

from agentfsm.errors import MissingExtraError

__all__ = ["PostgresStore"]

if TYPE_CHECKING:
    from agentfsm.journal.postgres.postgres_store import PostgresStore
else:
    try:
        from agentfsm.journal.postgres.postgres_store import PostgresStore
    except ImportError as missing:
        REASON = missing

        class PostgresStore:  # so that ``from agentfsm import *`` works without the extra
            """Stands for the store where its packages are not installed."""

            def __init__(self, *args: Any, **options: Any) -> None:
                raise MissingExtraError("a store on PostgreSQL", "postgres") from REASON
