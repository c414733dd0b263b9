"""A run as it stood at one moment, though somebody may be writing it."""

from __future__ import annotations

from agentfsm.journal.records import Row
from agentfsm.journal.store import Head, Store

__all__ = ["as_it_stands"]

TRIES = 3


def as_it_stands(store: Store, run_id: str) -> tuple[list[Row], Head | None]:
    """A run's rows and what its store notes of them, of one moment.

    A store gives them one after the other, and a run that goes on meanwhile would look as if somebody had tampered
    with it. While it does, they are read again; a run that never stands still is given as far as it was noted
    before its rows were read.

    Raises:
        UnknownRunError: There is no such run.
        StoreError: The store cannot be read.
    """
    before = store.head(run_id)
    rows = store.rows(run_id)
    for _ in range(TRIES):
        after = store.head(run_id)
        if before is None or after is None or (before.seq, before.hash) == (after.seq, after.hash):
            return rows, after
        before, rows = after, store.rows(run_id)
    return rows[: before.seq] if before is not None else rows, before
