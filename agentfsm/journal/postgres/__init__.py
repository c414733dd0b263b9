"""A store on a PostgreSQL server, for many processes on many machines (extra ``postgres``)."""

from agentfsm.errors import MissingExtraError

try:
    from agentfsm.journal.postgres.postgres_store import PostgresStore
except ImportError as error:
    raise MissingExtraError("a store on PostgreSQL", "postgres") from error

__all__ = ["PostgresStore"]
