"""Rows of the journal on a PostgreSQL server: the records of one commit each, or a single record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from agentfsm.journal.commit_encoding import JournalRow

__all__ = ["INSERT_ROWS", "SELECT_ROWS", "row_columns", "rows_of"]

SELECT_ROWS = """
    SELECT seq, body, records, encode(hash, 'hex'), hidden, hidden_values, encode(mac, 'hex')
    FROM agentfsm.journal WHERE run = %s AND seq > %s ORDER BY seq
"""
"""The rows of a run after a sequence number."""

INSERT_ROWS = """
    INSERT INTO agentfsm.journal (run, seq, body, records, hash, hidden, hidden_values, mac)
    SELECT new.* FROM unnest(
        %(run)s::bigint[], %(last)s::bigint[], %(body)s::text[], %(records)s::bytea[], %(last_hash)s::bytea[],
        %(hidden)s::text[], %(hidden_values)s::bytea[], %(last_mac)s::bytea[]
    ) AS new (run, seq, body, records, hash, hidden, hidden_values, mac)
"""
"""Inserts the rows of ``row_columns``."""


def rows_of(found: Iterable[Sequence[Any]]) -> list[JournalRow]:
    """The rows that ``SELECT_ROWS`` found."""
    return [
        JournalRow(seq, body, digest, hidden, mac)
        if records is None
        else JournalRow(seq, records, digest, hidden_values, mac)
        for seq, body, records, digest, hidden, hidden_values, mac in found
    ]


def row_columns(rows: Sequence[tuple[int, JournalRow]]) -> dict[str, list[Any]]:
    """The values of rows by column, for ``INSERT_ROWS``.

    Args:
        rows: The rows, each with the number of its run.
    """
    return {
        "run": [number for number, _ in rows],
        "last": [row.seq for _, row in rows],
        "body": [_if(str, row.body) for _, row in rows],
        "records": [_if(bytes, row.body) for _, row in rows],
        "last_hash": [bytes.fromhex(row.hash) for _, row in rows],
        "hidden": [_if(str, row.hidden) for _, row in rows],
        "hidden_values": [_if(bytes, row.hidden) for _, row in rows],
        "last_mac": [None if row.mac is None else bytes.fromhex(row.mac) for _, row in rows],
    }


def _if(kind: type[str | bytes], value: str | bytes | None) -> str | bytes | None:
    """The value if it is of a kind, which has a column of its own."""
    return value if isinstance(value, kind) else None
