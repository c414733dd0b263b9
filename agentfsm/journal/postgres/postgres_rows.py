"""Rows of the journal on a PostgreSQL server: the records of one commit each, or a single record."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, LiteralString, TypeVar

import psycopg
from psycopg.adapt import Dumper
from psycopg.pq import Format

from agentfsm.journal.commit_encoding import JournalRow

SELECT_ROWS = """
    SELECT seq, body, records, encode(hash, 'hex'), hidden, hidden_values, encode(mac, 'hex')
    FROM agentfsm.journal WHERE run = %s AND seq > %s ORDER BY seq
"""
"""The rows of a run after a sequence number."""

SELECT_NAMED_ROWS: LiteralString = SELECT_ROWS.replace("%s", "(SELECT id FROM agentfsm.run WHERE run_id = %s)", 1)
"""The same of the run with an id: finding its number with a statement of its own would be one more wait."""

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


_Kind = TypeVar("_Kind", str, bytes)


class Column(bytes):
    """The values of a column, as one parameter: an array in the server's binary form.

    For a list, psycopg looks up how to write it for each statement again, which takes longer than all else there.
    """


class _ColumnDumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: Column) -> Column:
        return obj


psycopg.adapters.register_dumper(Column, _ColumnDumper)

_HEAD = struct.Struct(">iiIii")
"""One dimension, whether there are nulls, the type of the values, how many there are, and the number of the first."""
_LENGTH = struct.Struct(">i")
_NULL = _LENGTH.pack(-1)
_BIGINT, _BYTEA, _TEXT = 20, 17, 25


def number_column(values: Sequence[int]) -> Column:
    """A ``bigint[]``."""
    sized = [part for value in values for part in (8, value)]
    return Column(_HEAD.pack(1, 0, _BIGINT, len(values), 1) + struct.pack(">" + "iq" * len(values), *sized))


def bytes_column(values: Sequence[bytes | None], kind: int = _BYTEA) -> Column:
    """A ``bytea[]``."""
    sized = [_NULL if value is None else _LENGTH.pack(len(value)) + value for value in values]
    return Column(_HEAD.pack(1, 1, kind, len(values), 1) + b"".join(sized))


def text_column(values: Sequence[str | None]) -> Column:
    """A ``text[]``."""
    return bytes_column([None if value is None else value.encode() for value in values], _TEXT)


def row_columns(rows: Sequence[tuple[int, JournalRow]]) -> dict[str, Column]:
    """The values of rows by column, for ``INSERT_ROWS``."""
    return {
        "run": number_column([number for number, _ in rows]),
        "last": number_column([row.seq for _, row in rows]),
        "body": text_column([_if(str, row.body) for _, row in rows]),
        "records": bytes_column([_if(bytes, row.body) for _, row in rows]),
        "last_hash": bytes_column([bytes.fromhex(row.hash) for _, row in rows]),
        "hidden": text_column([_if(str, row.hidden) for _, row in rows]),
        "hidden_values": bytes_column([_if(bytes, row.hidden) for _, row in rows]),
        "last_mac": bytes_column([None if row.mac is None else bytes.fromhex(row.mac) for _, row in rows]),
    }


def _if(kind: type[_Kind], value: str | bytes | None) -> _Kind | None:
    """The value if it is of a kind, which has a column of its own."""
    return value if isinstance(value, kind) else None
