"""The SQLite store: a durable store in one file."""

from agentfsm.journal.sqlite.sqlite_store import SqliteStore

__all__ = ["SqliteStore"]
